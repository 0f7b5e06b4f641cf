"""The failure that a script tells by `sys.exit`, of which Python says nothing to the handlers of the exit.

A script that catches its error, logs it and calls `sys.exit(1)` has failed as much as one that the error ends.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from offload.notices import exception_line


class _Exit:
    """The function `sys.exit`, which remembers here that the main thread has called it with a failure."""

    def __init__(self, exit: Callable[[Any], NoReturn]) -> None:
        functools.update_wrapper(self, exit)
        self._exit = exit
        self.failure = ""

    def __call__(self, status: Any = None, /) -> NoReturn:
        done = status is None or (isinstance(status, int) and status == 0)
        # On another thread it ends that thread alone.
        if not done and threading.current_thread() is threading.main_thread():
            self.failure = exception_line(sys.exc_info()[1] or SystemExit(status))
        self._exit(status)


@functools.cache
def _watched() -> _Exit:
    """Replaces `sys.exit`, once. It stays replaced, since others may wrap it later."""
    watched = _Exit(sys.exit)
    sys.exit = watched
    return watched


def watch() -> None:
    """Begins to remember failures of this process."""
    _watched()


def failure() -> str:
    """Returns the exception that was handled when `sys.exit` was called with a failure, or that call; empty if none."""
    return _watched().failure


def forget() -> None:
    """Forgets a failure: the script has caught the `SystemExit`, and goes on."""
    _watched().failure = ""
