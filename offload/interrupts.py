"""Ctrl-C: its handler waits until the functions that it must not split have returned; a second one ends the process.

CPython runs a signal's handler on the main thread, between any two instructions. A handler that raises, as Ctrl-C's
handler does, would leave a change half done: a unit that is pinned for ever, or a residency that no thread completes.

    @uninterrupted    such a change: the handler waits until the function returns
    @interruptible    a wait within a change, at which the state is consistent: the handler runs there

The handler looks for these functions on the stack when a signal arrives, so the decorators cost nothing otherwise. The
innermost decorated function decides. An exception of a handler during a wait counts as a failure of the wait, like an
error of the drive.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RETRY_S = 0.001
"""Seconds after which a deferred signal arrives again. Changes take microseconds."""

_deferring: dict[CodeType, bool] = {}
"""For the code of each decorated function: True if handlers wait, False if they run."""

_deferred: list[int] = []
"""Signals that were deferred and have not arrived again. Raw threads append nothing and remove their own."""

_owners: weakref.WeakSet[object] = weakref.WeakSet()
"""The engines that have called `defer_signals` and are not closed."""


def uninterrupted(function: _F) -> _F:
    """Returns `function` itself, during whose calls on the main thread handlers of `_SIGNALS` wait."""
    _deferring[function.__code__] = True
    return function


def interruptible(function: _F) -> _F:
    """Returns `function` itself, during whose calls handlers run even if an `uninterrupted` function is the caller."""
    _deferring[function.__code__] = False
    return function


@interruptible
def let_deferred_in() -> None:
    """Runs the handlers of signals that are deferred now. For a change that leaves the main thread no other moment."""
    while _deferred:
        time.sleep(_RETRY_S)


def defer_signals(owner: object) -> None:
    """Wraps the process's handlers of `_SIGNALS`, unless wrapped already. Wraps on the main thread only.

    Called at the start of each forward and step, since the user may set a handler in between, as Jupyter does for each
    cell.

    Args:
        owner: an engine. The handlers stay wrapped until `restore_signals` finds no other owner alive.
    """
    _owners.add(owner)
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, _Deferring):
                signal.signal(number, _Deferring(handler))


def restore_signals(owner: object) -> None:
    """Restores the handlers that `defer_signals` has wrapped, if there is no owner but `owner`.

    A handler that was set since stays. On a thread other than the main one all handlers stay.
    """
    _owners.discard(owner)
    if not _owners and threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(handler, _Deferring):
                signal.signal(number, handler.handler)


class _Deferring:
    """A signal handler that calls `handler` at the next moment without a change under way."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_deferred(frame):
            signal_later(number)
        else:
            self.handler(number, frame)


def signal_later(number: int) -> None:
    """Lets a signal arrive again after a moment. Called by its handler."""
    _deferred.append(number)
    # A raw thread: one of `threading` takes locks on its start, which the interrupted code may hold.
    _thread.start_new_thread(_signal_again, (number,))


def _is_deferred(frame: FrameType | None) -> bool:
    """Returns True if the innermost decorated function on the stack is `uninterrupted`."""
    while frame is not None:
        if frame.f_code in _deferring:
            return _deferring[frame.f_code]
        frame = frame.f_back
    return False


def _signal_again(number: int) -> None:
    """Waits a moment, then lets the signal arrive again. Runs on a thread of its own."""
    time.sleep(_RETRY_S)
    _thread.interrupt_main(signal.Signals(number))
    _deferred.remove(number)  # last: until here `let_deferred_in` waits for it


def is_on_stack(call: FrameType) -> bool:
    """Returns True if `call` still runs on this thread. A Ctrl-C may have ended it before its last lines ran."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def handled() -> list[BaseException]:
    """Returns the exception that is being handled, and the chain of its contexts."""
    chain: list[BaseException] = []
    error = sys.exc_info()[1]
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__context__
    return chain


def exit_on_next_signal(words: str, *numbers: int) -> Callable[[], None]:
    """Makes the next of these signals end the process at once, without a traceback. Main thread only.

    The process prints one line to stderr and exits with code 128 plus the signal's number, also within native code
    where Python's handlers do not run. Nothing is cleaned up: a commit survives this as it does a kill.

    Returns:
        A function that ends this; the handlers of `numbers` stay those of this function until they are set anew.
    """
    ending = _thread.allocate_lock()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def end(number: int, _: FrameType | None = None) -> None:
        if ending.acquire(False):  # the watcher and the main thread may both be here
            with contextlib.suppress(OSError):  # a terminal that was closed takes no words
                cursor = "\x1b[?25h" if os.isatty(2) else ""  # shows the cursor, which a progress line hides
                os.write(2, f"{cursor}{words}\n".encode())
            os._exit(128 + number)

    def watch() -> None:
        while number := os.read(reading, 1)[0]:
            if number in numbers:
                end(number)
        os.close(reading)

    for number in numbers:
        signal.signal(number, end)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A raw thread: one of `threading` takes locks on its start, which the interrupted code may hold.
    _thread.start_new_thread(watch, ())

    def undo() -> None:
        current = signal.set_wakeup_fd(-1)
        if current != writing:
            signal.set_wakeup_fd(current)
        os.write(writing, b"\0")
        os.close(writing)

    return undo
