"""A lock with a wait for changes that survives a Ctrl-C on the main thread.

`threading.Condition` is written in Python: an interrupt between two of its lines can leave its lock released inside a
`with` block, whose end then releases the lock of another thread. The lock of this module knows its owner, and every
exit from a wait acquires the lock again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class InterruptibleLock:
    """A lock and its condition. Acquire with `with monitor.lock:`, once; the caller of every method holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiters: list[threading.Lock] = []

    def wait(self) -> None:
        """Waits without the lock until `notify_all`, or until an exception; holds the lock again on return."""
        # Each waiter has a lock of its own, acquired here and released by `notify_all`: to acquire it again is the
        # wait.
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            self.without_lock(waiter.acquire)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wakes every waiting thread.

        If an interrupt ends this call early, the next call wakes the remaining threads.
        """
        while self._waiters:
            # Popped after the release: an interrupt between the two leaves a waiter that was woken already, and
            # `locked` avoids the error of a second release. The other order could lose a waiter.
            if self._waiters[-1].locked():
                self._waiters[-1].release()
            self._waiters.pop()

    def without_lock(self, act: Callable[[], _T]) -> _T:
        """Calls `act` without the lock, and holds the lock again however the call ends."""
        interrupt: BaseException | None = None
        try:
            self.lock.release()  # inside the `try`: CPython checks for signals after a call, so an interrupt may follow
            if self._owned:
                self.lock.acquire()
                raise AssertionError(
                    "a thread took the lock twice: the thread that must make the change could never take it"
                )
            result = act()
        finally:
            while True:
                try:
                    if not self._owned:
                        self.lock.acquire()
                    break
                except BaseException as error:  # Ctrl-C after one of these calls, or during the wait for the lock
                    interrupt = error
            if interrupt is not None:
                raise interrupt
        return result

    @property
    def _owned(self) -> bool:
        """True if this thread holds the lock."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # threading.Condition calls it as well
