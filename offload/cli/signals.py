"""Signals that end a command: with its files removed, and also where Python or native code stands in the way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_GRACE = 1.0
"""Seconds in which Python's own handler should have begun."""
_AGAIN = 0.25
"""Seconds after which a signal that was lost is sent again."""


@contextmanager
def signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is inside as an exception does, so that its files are removed. Main thread only.

    What a handler raises is lost where Python has no caller to give it to, as in a callback of the garbage collector:
    then it is raised again a moment later. While it is on its way, and files are removed, nothing comes in between.
    """
    main, lock = threading.get_ident(), threading.Lock()
    ended, raised = threading.Event(), list[BaseException]()

    def send(number: int) -> None:
        while not ended.wait(_AGAIN):
            with lock:
                if not ended.is_set():
                    signal.pthread_kill(main, number)

    def stop(number: int, frame: FrameType | None) -> None:
        if not sending:
            sending.append(threading.Thread(target=send, args=(number,), daemon=True, name="offload-signals"))
            sending[0].start()
        if not _in_finalizer(frame) and not any(each in raised for each in _handled()):
            raised.append(SystemExit(128 + number))
            raise raised[-1]

    sending: list[threading.Thread] = []
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        with lock:
            ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _handled() -> Iterator[BaseException]:
    """The exception that is being handled, and those in whose handling it came."""
    error = sys.exc_info()[1]
    while error is not None:
        yield error
        error = error.__context__


@contextmanager
def obeyed(words: str) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM are obeyed within a call of native code as well, however long that takes.

    Python runs handlers between its own instructions. Where that has not come after a second, the process ends at once,
    with `words` and exit code 128 and the signal's number: only for what has nothing to remove. Main thread only.
    """
    begun = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wanted = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in wanted.items() if handler != signal.SIG_IGN}

    def begin(number: int, frame: FrameType | None) -> None:
        begun.set()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            raise SystemExit(128 + number)

    watcher = threading.Thread(target=_watch, args=(reading, begun, words), daemon=True, name="offload-signals")
    for number in before:
        signal.signal(number, begin)
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        begun.set()
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            if signal.getsignal(number) is begin:  # else a handler has taken its own place
                signal.signal(number, handler)
        os.write(writing, b"\0")
        watcher.join()
        os.close(reading)
        os.close(writing)


def _watch(reading: int, begun: threading.Event, words: str) -> None:
    """End the process after a signal whose handler does not begin. A byte of 0 ends the thread."""
    while number := os.read(reading, 1)[0]:
        if number in (signal.SIGINT, signal.SIGTERM) and not begun.wait(_GRACE):
            cursor = "\x1b[?25h" if os.isatty(2) else ""  # which a bar hides
            os.write(2, f"{cursor}{words}\n".encode())
            os._exit(128 + number)
