"""Threads whose start ends, also where memory does."""

from __future__ import annotations

import threading
import types
import weakref
from typing import Any

_CHECK_S = 0.05
"""Seconds between two looks at a thread that has not begun."""


class Thread(threading.Thread):
    """A thread whose `start` returns once it runs, and raises `RuntimeError` if it never will.

    A new thread needs memory before it can run. If there is none, Python prints "Exception ignored in thread started
    by", and the thread is gone. `threading.Thread.start` then waits for ever (python/cpython#140746).
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._runs = threading.Event()
        self._started = _Unwaited()

    def start(self) -> None:
        super().start()
        # calling thread: this wait ends, since a thread that is gone has dropped the function that it was given.
        while not self._runs.wait(_CHECK_S):
            if self._function() is None and not self._runs.is_set():
                threading._limbo.pop(self, None)  # type: ignore[attr-defined]
                raise RuntimeError("can't start new thread: it found no memory to begin")

    def run(self) -> None:
        self._runs.set()
        super().run()

    @property
    def _bootstrap(self) -> types.MethodType:
        """The function that Python gives to the new thread, which alone holds it."""
        function = types.MethodType(threading.Thread._bootstrap, self)  # type: ignore[attr-defined]
        self._function = weakref.ref(function)
        return function


class _Unwaited(threading.Event):
    """The event for which `threading.Thread.start` would wait."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()
