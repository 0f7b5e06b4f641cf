"""Requests in flight, and the functions that are called when they end."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol

from offload.aio._native import Flight, Queue
from offload.aio.file import DirectFile, Piece
from offload.errors import IoError, UsageError

_TIMED_OUT = -1


log = logging.getLogger("offload.aio")

exiting = threading.Event()
"""Set when the interpreter is about to end: from then on no thread is started for callbacks."""


class File(Protocol):
    """What a queue reads and writes: a `DirectFile` or a `StripedFile`."""

    @property
    def path(self) -> str:
        """For messages."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        ...

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Where `nbytes` bytes from `offset` on lie, in order."""
        ...

    def parts(self) -> list[DirectFile]:
        """The files that this one is made of."""
        ...


class IoFuture:
    """One request in flight. Any thread may ask or wait; dropping it does not stop the request.

    `await future` waits in asyncio and gives what `wait` gives.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_checksum",
        "_file",
        "_flight",
        "_nbytes",
        "_offset",
        "_operation",
        "_pid",
        "_waiting",
    )

    def __init__(
        self,
        callbacks: Callbacks,
        flight: Flight,
        operation: str,
        file: File,
        offset: int,
        nbytes: int,
        checksum: bool,
    ) -> None:
        self._callbacks, self._flight, self._operation, self._checksum = callbacks, flight, operation, checksum
        self._file, self._offset, self._nbytes, self._pid = file, offset, nbytes, os.getpid()
        self._waiting: list[Callback] | None = None
        """Functions to call at the end, once there is one; under the lock of the callbacks."""

    def done(self) -> bool:
        """Whether the request has ended, well or not."""
        return self._flight.done()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the request: its number of bytes.

        Raises `IoError` where it failed, and `TimeoutError` after `timeout` seconds; the request then goes on.
        """
        if os.getpid() != self._pid:
            raise of_the_parent(self._pid)
        error = self._flight.wait(-1.0 if timeout is None else max(timeout, 0.0))
        if error == _TIMED_OUT:
            raise TimeoutError(f"{self._operation} of {self._nbytes} bytes is not done after {timeout} s")
        if error:
            raise self._failure(error)
        return self._nbytes

    def crc32c(self) -> int:
        """The CRC-32C of the bytes that were moved, of a request with `checksum`; waits for it."""
        if not self._checksum:
            raise ValueError("there is no checksum: ask for it with checksum=True")
        self.wait()
        return self._flight.crc

    def add_done_callback(self, function: Callable[[IoFuture], object]) -> None:
        """Call `function(self)` once the request has ended: at once if it has, else on a thread of the queue.

        That thread runs all callbacks of the queue, one after the other. What one raises is logged. Within a callback
        "at once" is after it.
        """
        if os.getpid() != self._pid:
            raise of_the_parent(self._pid)
        self._callbacks.add(self, function)

    def __await__(self) -> Generator[object, None, int]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not ended.done():  # a task that was cancelled waits no more
                ended.set_result(None)

        def tell(_: IoFuture) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end)

        self.add_done_callback(tell)
        yield from ended.__await__()
        return self.wait()

    def _failure(self, error: int) -> IoError:
        pieces = self._file.pieces(self._offset, self._nbytes)
        if len(pieces) < 2 or error == errno.EBADMSG:  # a checksum is that of the whole request
            return IoError(self._file.path, self._offset, self._nbytes, error, self._operation)
        at = pieces[self._flight.failed_piece]
        return IoError(at.owner.path, at.offset, at.nbytes, error, self._operation)


Callback = Callable[[IoFuture], object]


class Callbacks:
    """Calls functions as requests end, on a thread of its own, which is there once one was asked for.

    It holds the native queue and not the `IoQueue`, so that one that is dropped can end.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._tags = itertools.count(1)
        self._lock = threading.Lock()
        self._announced: dict[int, IoFuture] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, future: IoFuture, function: Callback) -> None:
        """Call `function(future)` at the end of `future`, or now where that is past."""
        with self._lock:
            if future._waiting is not None:
                future._waiting.append(function)
                return
            told = not (self._stopped or exiting.is_set()) and self._announce(future, function)
        if not told:
            future._flight.wait(-1.0)  # it is past, or the interpreter is about to end
            _call(future, function)

    def stop(self) -> None:
        """Let every callback run; the native queue is closed. From a callback it does not wait for callbacks."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _announce(self, future: IoFuture, function: Callback) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="offload-io-callbacks", daemon=True)
            thread.start()
            self._thread = thread
        tag = next(self._tags)
        self._announced[tag], future._waiting = future, [function]  # before it can be told of
        if self._queue.announce(future._flight, tag):
            return True
        del self._announced[tag]
        future._waiting = None
        return False

    def _run(self) -> None:
        while tags := self._queue.announced():
            for tag in tags:
                with self._lock:
                    future = self._announced.pop(tag)
                    functions, future._waiting = future._waiting or [], None
                future.done()  # its buffer is its owner's again
                for function in functions:
                    _call(future, function)


class _Calls(threading.local):
    """What a thread has still to call; None where it is in no callback."""

    later: deque[tuple[IoFuture, Callback]] | None = None


_calls = _Calls()


def _call(future: IoFuture, function: Callback) -> None:
    """Call it, or within another callback after that one: a chain of callbacks is no tower of them."""
    if _calls.later is not None:
        _calls.later.append((future, function))
        return
    interrupt: KeyboardInterrupt | None = None
    _calls.later = deque([(future, function)])
    try:
        while _calls.later:
            future, function = _calls.later.popleft()
            try:
                function(future)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    interrupt = error  # Ctrl-C is for who asked for the callback, and no fault of it
                else:
                    log.exception("a callback of an I/O request raised")
    finally:
        _calls.later = None
    if interrupt is not None:
        raise interrupt


def of_the_parent(pid: int) -> UsageError:
    return UsageError(f"this queue belongs to process {pid}; a forked child has none of its threads")
