"""Futures of requests in flight, and the thread that runs their callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol

from offload.aio._native import Flight, Queue
from offload.aio.file import DirectFile, FilePiece
from offload.aio.unanswered import wait_aloud
from offload.errors import IoError, UsageError
from offload.interrupts import interruptible
from offload.threads import Thread

_TIMED_OUT = -1
_AGAIN_S = 0.05
"""Seconds between two tries of the callback thread to find memory."""


log = logging.getLogger("offload.aio")

exiting = threading.Event()
"""Set when the interpreter is about to end. From then on no thread is started for callbacks."""


class File(Protocol):
    """A file that a queue reads and writes: a `DirectFile` or a `StripedFile`."""

    @property
    def path(self) -> str:
        """Path for messages."""
        ...

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        ...

    def pieces(self, offset: int, nbytes: int) -> list[FilePiece]:
        """Returns the file ranges that store `nbytes` bytes from `offset` on, in order.

        Args:
            offset: first logical byte.
            nbytes: number of bytes.
        """
        ...

    def parts(self) -> list[DirectFile]:
        """Returns the underlying files."""
        ...


class IoFuture:
    """A request in flight. Any thread may query it or wait for it. Dropping the future does not stop the request.

    `await future` waits in asyncio and returns the same as `wait`.
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
        # A forked child inherits futures but none of the threads that complete them, hence the process id.
        self._callbacks, self._flight, self._operation, self._checksum = callbacks, flight, operation, checksum
        self._file, self._offset, self._nbytes, self._pid = file, offset, nbytes, os.getpid()
        self._waiting: list[Callback] | None = None
        """Callbacks to run when the request ends; None if there are none. The lock of `Callbacks` guards the list."""

    def done(self) -> bool:
        """Returns True if the request has ended, successfully or not."""
        return self._flight.done()

    @interruptible
    def wait(self, timeout: float | None = None) -> int:
        """Waits for the request and returns the number of bytes that were moved.

        Args:
            timeout: seconds to wait; None waits without limit.

        Returns:
            The number of bytes of the request.

        Raises:
            IoError: the request failed.
            TimeoutError: `timeout` seconds have passed; the request continues.
            UsageError: the caller is a forked child of the process that made the request.
        """
        if os.getpid() != self._pid:
            raise of_the_parent(self._pid)
        if timeout is None:
            # If the drive answers soon, this is a single call of the native `wait`. Only after a long wait without an
            # answer, `_request` makes a line for the user.
            wait_aloud(lambda seconds: self._flight.wait(seconds) != _TIMED_OUT, self._request)
        error = self._flight.wait(0.0 if timeout is None else max(timeout, 0.0))
        if error == _TIMED_OUT:
            raise TimeoutError(f"{self._operation} of {self._nbytes} bytes is not done after {timeout} s")
        if error:
            raise self._failure(error)
        return self._nbytes

    def crc32c(self) -> int:
        """Returns the CRC-32C of the bytes that were moved. Waits for the request.

        Raises:
            ValueError: the request was made without `checksum`.
            IoError: the request failed.
        """
        if not self._checksum:
            raise ValueError("no checksum was computed: pass checksum=True with the request")
        self.wait()
        return self._flight.crc

    def page_crcs(self) -> bytes:
        """Returns one CRC-32C of 4 bytes for each page of the file that the request covers. Waits for the request.

        The first page is the page of the first byte. The request may cover only parts of the first and the last page.
        Their checksums cover only the request's bytes.

        Raises:
            ValueError: the request was made without `checksum`.
            IoError: the request failed.
        """
        if not self._checksum:
            raise ValueError("no checksum was computed: pass checksum=True with the request")
        self.wait()
        return self._flight.page_crcs

    def add_done_callback(self, function: Callable[[IoFuture], object]) -> None:
        """Calls `function(self)` once the request has ended.

        If the request has ended already, the calling thread runs the function at once. If the calling thread is running
        another callback, the function runs right after this callback. If the request is still in flight, the callback
        thread of the queue runs the function later. The callback thread runs all callbacks of the queue one after
        another. Exceptions of callbacks are logged.

        Args:
            function: receives this future; its result is ignored.

        Raises:
            UsageError: the caller is a forked child of the process that made the request.
        """
        if os.getpid() != self._pid:
            raise of_the_parent(self._pid)
        self._callbacks.add(self, function)

    def __await__(self) -> Generator[object, None, int]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not ended.done():  # a cancelled task no longer waits
                ended.set_result(None)

        # callback thread: may run this function, but only the thread of the asyncio loop may complete `ended`.
        def tell(_: IoFuture) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end)

        self.add_done_callback(tell)
        yield from ended.__await__()
        return self.wait()

    def _request(self) -> str:
        return f"{self._operation} of {self._nbytes} bytes at offset {self._offset} of {self._file.path}"

    def _failure(self, error: int) -> IoError:
        """Returns the `IoError` for errno `error`. For a striped file, it names the file that failed, if known."""
        if error == errno.EBADMSG or not self._nbytes:  # a checksum covers all files; an empty request has none
            return IoError(self._file.path, self._offset, self._nbytes, error, self._operation)
        at = self._file.pieces(self._offset, self._nbytes)[self._flight.failed_piece]
        return IoError(at.owner.path, at.offset, at.nbytes, error, self._operation)


Callback = Callable[[IoFuture], object]


class Callbacks:
    """Runs callbacks as requests end, on a thread of its own that starts with the first callback.

    Holds the native queue rather than the `IoQueue`, so that an `IoQueue` without references can be finalized.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._tags = itertools.count(1)
        self._lock = threading.Lock()
        self._announced: dict[int, IoFuture] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, future: IoFuture, function: Callback) -> None:
        """Calls `function(future)` when `future` ends, or now if `future` has ended already."""
        with self._lock:
            # The flight is announced with its first callback. Later callbacks join the list `_waiting`.
            if future._waiting is not None:
                future._waiting.append(function)
                return
            announced = not (self._stopped or exiting.is_set()) and self._announce(future, function)
        # Outside of the lock: a user's function may add further callbacks.
        if not announced:
            future._flight.wait(-1.0)  # returns at once, unless no callback thread may start because Python is ending
            _call(future, function)

    def stop(self) -> None:
        """Waits until every callback has run. The native queue must be closed first.

        If a callback calls `stop`, the call returns without waiting, since the callback thread cannot join itself.
        """
        with self._lock:
            self._stopped = True
            # `thread` is read under the lock and joined outside of it, because the callback thread needs the lock to
            # finish.
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _announce(self, future: IoFuture, function: Callback) -> bool:
        """Registers `function` with the native queue. The caller holds the lock.

        Returns False if the request has ended already.
        """
        if self._thread is None:
            thread = Thread(target=self._run, name="offload-io-callbacks", daemon=True)
            thread.start()
            self._thread = thread
        tag = next(self._tags)
        # The tag is stored before the native queue learns it, because the callback thread looks it up as soon as the
        # request ends.
        self._announced[tag], future._waiting = future, [function]
        if self._queue.announce(future._flight, tag):
            return True
        # The request had ended before the announcement, so the native queue will not report the tag.
        del self._announced[tag]
        future._waiting = None
        return False

    def _run(self) -> None:
        """Runs on the callback thread: waits for announced requests to end until the native queue is closed."""
        while tags := self._ended():
            for tag in tags:
                # callback thread: takes the list. From then on `add` calls new functions itself, as the request has
                # ended.
                with self._lock:
                    future = self._announced.pop(tag)
                    functions, future._waiting = future._waiting or [], None
                future.done()  # returns the buffer to its owner before a callback may reuse it
                for function in functions:
                    _call(future, function)

    def _ended(self) -> list[int]:
        """Waits for requests to end, and returns their tags; returns none once the native queue is closed."""
        while True:
            # callback thread: others wait for its callbacks, so without memory for the tags it asks again. The native
            # queue keeps them, and needs no memory once it is closed.
            with contextlib.suppress(MemoryError):
                return self._queue.announced()
            time.sleep(_AGAIN_S)


class _Calls(threading.local):
    """Calls that the current thread has yet to make. `later` is None if the thread runs no callback."""

    later: deque[tuple[IoFuture, Callback]] | None = None


_calls = _Calls()


def _call(future: IoFuture, function: Callback) -> None:
    """Calls `function(future)`, or defers the call until the running callback of this thread has returned.

    Deferral keeps a chain of callbacks from nesting on the stack.
    """
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
                    interrupt = error  # Ctrl-C belongs to the main thread's caller, not to the callback
                else:
                    log.exception("a callback of an I/O request raised")
    finally:
        _calls.later = None
    if interrupt is not None:
        raise interrupt


def of_the_parent(pid: int) -> UsageError:
    """Returns the error for a forked child that uses a queue of its parent, process `pid`."""
    return UsageError(
        f"this queue belongs to process {pid}; a forked child does not inherit its threads; open a queue in the child"
    )
