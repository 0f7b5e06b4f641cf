"""A lock with a wait for changes that survives a Ctrl-C on the main thread.

`threading.Condition` is written in Python: an interrupt between two of its lines can leave its lock released inside a
`with` block. The end of the block then releases the lock of another thread. Here a Ctrl-C is handled during the wait
itself, and every exit from the wait acquires the lock again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from offload.interrupts import interruptible, uninterrupted

_T = TypeVar("_T")


class InterruptibleLock:
    """A lock and its condition. A thread enters `lock` by `with`, and only once; the caller of a method holds it."""

    def __init__(self, lock: threading.RLock | None = None) -> None:
        """Creates a condition with a new lock, or one more condition of `lock`."""
        self.lock = threading.RLock() if lock is None else lock
        self._waiters: list[threading.Lock] = []

    @property
    def held(self) -> bool:
        """True if the calling thread holds the lock."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # threading.Condition calls it as well

    @uninterrupted
    def wait(self) -> None:
        """Waits without the lock until `notify_all`, or until an exception; holds the lock again on return."""
        # Each waiter has its own lock, acquired here and released by `notify_all`. To wait, the thread acquires its
        # lock again.
        waiter = threading.Lock()
        waiter.acquire()

        def change() -> None:
            _sleep(waiter)

        self._waiters.append(waiter)
        try:
            self.without_lock(change)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    @uninterrupted
    def notify_all(self) -> None:
        """Wakes every waiting thread."""
        while self._waiters:
            self._waiters.pop().release()

    @uninterrupted
    def without_lock(self, act: Callable[[], _T]) -> _T:
        """Calls `act` without the lock, and holds the lock again however the call ends.

        A Ctrl-C is handled inside of `act` only in functions that are `interruptible`.
        """
        self.lock.release()
        try:
            if self.held:
                raise AssertionError("a thread took the lock twice: no other thread could make the change")
            return act()
        finally:
            self.lock.acquire()


@interruptible
def _sleep(waiter: threading.Lock) -> None:
    waiter.acquire()
