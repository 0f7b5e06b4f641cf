"""Handlers for signals that end a command.

`signals` raises an exception, so that temporary files are removed. `exit_on_signal` ends the process even if
native code blocks Python's own handlers. Python runs signal handlers on the main thread only, so both must be used
there.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from offload.interrupts import handled
from offload.threads import Thread

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a command to end: Ctrl-C, a supervisor, a terminal that closes."""

AT_ONCE = "stopped at once by a second signal; steps that were committed are kept"
"""The line that a command prints when a second signal ends it."""

_GRACE = 1.0
"""Seconds within which Python's own handler should start."""
_AGAIN = 0.25
"""Seconds after which a lost signal is sent again."""


@contextmanager
def signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP inside the context into `SystemExit`, so that files are removed. Main thread only.

    A signal that the process ignores stays ignored, as SIGHUP under nohup.

    Python drops an exception that a handler raises without a caller to receive it, as in a callback of the garbage
    collector. A helper thread therefore sends the signal again until the context ends. While the exception propagates
    and files are removed, further signals raise nothing.
    """
    main, raised = threading.get_ident(), list[BaseException]()
    # `put` may interrupt itself, so a handler may call it. Starting a thread takes locks, so the thread exists before.
    arrived = queue.SimpleQueue[int]()

    def send() -> None:
        # Runs on the helper thread, until a 0 arrives.
        number = arrived.get()
        while number:
            try:
                number = arrived.get(timeout=_AGAIN)
            except queue.Empty:
                signal.pthread_kill(main, number)

    def stop(number: int, frame: FrameType | None) -> None:
        arrived.put(number)
        # Not inside a finalizer, where the exception would be lost, and not while an earlier one is being handled.
        if not in_finalizer(frame) and not any(error in raised for error in handled()):
            raised.append(SystemExit(128 + number))
            raise raised[-1]

    before = handlers(signal.SIGTERM, signal.SIGHUP)
    helper = Thread(target=send, daemon=True, name="offload-signals")
    helper.start()
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        # The helper must have ended before: none of its signals may reach the handlers that are restored.
        arrived.put(0)
        helper.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def handlers(*numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Returns the handlers of those signals that the process does not ignore, by number.

    A parent that ignores a signal, as nohup and a shell's background jobs do, wants its children to do so too.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    return {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}


def in_finalizer(frame: FrameType | None) -> bool:
    """Returns True if a frame belongs to a finalizer, whose exceptions Python prints and drops."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def exit_on_signal(words: str) -> Iterator[None]:
    """Obeys SIGINT, SIGTERM and SIGHUP inside the context even during a long call of native code. Main thread only.

    Python runs handlers between bytecode instructions. If the handler has not started after a second, the process exits
    immediately with code 128 plus the signal's number. Use the context only if there is nothing to clean up. `words` is
    the message on stderr for an immediate exit.
    """
    begun = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = handlers(*ENDING)

    def begin(number: int, frame: FrameType | None) -> None:
        begun.set()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            raise SystemExit(128 + number)

    # The C-level handler writes the signal's number to the pipe at once, even if Python's handler cannot run yet. The
    # watcher reads the pipe. It needs the GIL for a moment, so the native code must release the GIL now and then.
    watcher = Thread(target=_watch, args=(reading, begun, words), daemon=True, name="offload-signals")
    for number in before:
        signal.signal(number, begin)
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        begun.set()
        # If a handler for a second signal has set its own descriptor, that descriptor stays.
        if (now := signal.set_wakeup_fd(earlier)) != writing:
            signal.set_wakeup_fd(now)
        for number, handler in before.items():
            # A handler that other code has installed inside the context stays.
            if signal.getsignal(number) is begin:
                signal.signal(number, handler)
        # The watcher must have ended before the pipe is closed: its descriptor might be reused at once.
        os.write(writing, b"\0")
        watcher.join()
        os.close(reading)
        os.close(writing)


def _watch(reading: int, begun: threading.Event, words: str) -> None:
    """Ends the process after a signal whose handler does not start. Runs on a thread, until a byte of 0 arrives."""
    while number := os.read(reading, 1)[0]:
        if number in ENDING and not begun.wait(_GRACE):
            # Shows the cursor, which a progress bar hides.
            cursor = "\x1b[?25h" if os.isatty(2) else ""
            with suppress(OSError):  # a terminal that was closed takes no words
                os.write(2, f"{cursor}{words}\n".encode())
            os._exit(128 + number)
