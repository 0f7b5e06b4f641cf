"""A lock with a wait for changes, which a Ctrl-C on the main thread neither leaves locked nor gives to somebody else.

`threading.Condition` is written in Python: an interrupt between two of its lines can leave its lock released inside of
a `with` block, whose end then releases the lock of another thread. Here the lock is one that knows its owner, and
every way out of a wait takes it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Monitor:
    """Take `lock` by `with monitor.lock:`, once; all methods are for the thread that holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiters: list[threading.Lock] = []

    def wait(self) -> None:
        """Wait without the lock until `notify_all`, or until an exception ends it; the lock is held again then."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            self.without_lock(waiter.acquire)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake every thread that waits. After an interrupt in here, the next call wakes who is left."""
        while self._waiters:
            if self._waiters[-1].locked():
                self._waiters[-1].release()
            self._waiters.pop()

    def without_lock(self, act: Callable[[], _T]) -> _T:
        """Call `act` without the lock, and hold it again however that ends."""
        interrupt: BaseException | None = None
        try:
            self.lock.release()  # nothing can come between this and `try`: CPython looks for signals after calls
            if self._owned:
                self.lock.acquire()
                raise AssertionError("the lock was taken twice: who shall make the change could never have it")
            result = act()
        finally:
            while True:
                try:
                    if not self._owned:
                        self.lock.acquire()
                    break
                except BaseException as error:  # Ctrl-C after one of these calls, or while the lock was waited for
                    interrupt = error
            if interrupt is not None:
                raise interrupt
        return result

    @property
    def _owned(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # what threading.Condition asks too
