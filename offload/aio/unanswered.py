"""Lines for the user about a drive that does not answer: a hung NFS server, a frozen file system, an SSD that dies.

A thread that waits for a request of the queue waits with a limit, and logs a line when the limit has passed. A system
call such as fdatasync has no limit, so another thread logs the lines in the meantime.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from offload.notices import announce
from offload.threads import Thread

NOTICE_S = 30.0
"""Seconds without an answer before the first line."""
AGAIN_S = 60.0
"""Seconds between two lines."""
_here = threading.local()
"""Whether another thread logs lines for this thread already."""


def wait_aloud(ended: Callable[[float], bool], request: Callable[[], str]) -> None:
    """Waits until a request has ended, and logs a line after 30 s and every minute from then on.

    Args:
        ended: waits for the request at most this number of seconds; returns True if it has ended.
        request: returns the name of the request, with its file. Called only for a line.
    """
    began = time.monotonic()
    if ended(NOTICE_S):
        return
    while True:
        announce(
            f"the drive has not answered for {time.monotonic() - began:.0f} s: {request()}; the run waits, and goes on "
            "when the drive answers: look at the drive, its file system and its server (dmesg)"
        )
        if ended(AGAIN_S):
            return


@contextlib.contextmanager
def aloud(request: Callable[[], str]) -> Iterator[None]:
    """Logs lines, like `wait_aloud`, from another thread while a system call in the context has not ended.

    The context starts a thread, so use it only around calls that wait for a drive anyway, and around several together.
    Inside of another such context it does nothing: the outer one logs the lines.

    Args:
        request: returns the name of the call that is under way, with its file. Called on the other thread.
    """
    if getattr(_here, "speaks", False):
        yield
        return
    over = threading.Event()
    thread = Thread(target=wait_aloud, args=(over.wait, request), name="offload-unanswered", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can start, as at the end of Python; the call itself must not fail
        yield
        return
    _here.speaks = True
    try:
        yield
    finally:
        _here.speaks = False
        over.set()
        thread.join()  # ends at once: it waits for nothing but `over`


def sync(descriptor: int, path: object) -> None:
    """Makes the bytes of a file, or the names in a folder, durable, and logs lines while the drive does not answer.

    Raises:
        OSError: If they may not be durable.
    """
    with aloud(lambda: f"fsync of {path}"):
        os.fsync(descriptor)
