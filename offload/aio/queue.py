"""Reads and writes in flight, moved by native threads that never hold the GIL."""

from __future__ import annotations

import asyncio
import atexit
import enum
import errno
import itertools
import logging
import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from offload.aio._native import Flight, Queue
from offload.aio.backend import open_native
from offload.aio.file import DirectFile, Piece
from offload.errors import IoError, UsageError
from offload.sizes import GIB, PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_TIMED_OUT = -1
_LAST = (1 << 63) - 1
MOST_THREADS, MOST_DEPTH = 256, 4096

log = logging.getLogger("offload.aio")


class Priority(enum.IntEnum):
    """Which of two requests goes first.

    A lower one still gets every ninth block, and BACKGROUND holds at most three quarters of what is in flight, so that
    a read never waits for a device full of write-behind.
    """

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


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
        callbacks: _Callbacks,
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
            raise _of_the_parent(self._pid)
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
            raise _of_the_parent(self._pid)
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


class _Callbacks:
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
            told = not (self._stopped or _exiting) and self._announce(future, function)
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


class IoQueue:
    """Reads and writes in flight, cut into blocks of `block_bytes`, by `threads` threads with `depth` blocks each.

    `backend` is "io_uring", "libaio", "threads" (of pread and pwrite; one block each, so `depth` makes more of them, 16
    at most), or "auto": the first of these that the system grants. The attribute `backend` then tells which, `refusals`
    why none before it. What is None gets the value that was fastest on the drives that were tried.

    A buffer is any C-contiguous one, writable for a read. It is the queue's from the call until the request is done:
    neither write to it nor, for a read, look at it before. Requests run in no certain order, so one that must see the
    bytes of another waits for it. A failure is that request's alone. Belongs to the process that made it.
    """

    def __init__(
        self,
        backend: str = "auto",
        *,
        block_bytes: int | None = None,
        depth: int | None = None,
        threads: int | None = None,
    ) -> None:
        for name, value, least, most in (
            ("threads", threads, 1, MOST_THREADS),
            ("depth", depth, 1, MOST_DEPTH),
            ("block_bytes", block_bytes, PAGE, GIB),
        ):
            if value is not None and not least <= value <= most:
                raise ValueError(f"expected {name} from {least} to {most}, got {value}")
        self._closed = True  # nothing to close where the next line raises
        self._pid = os.getpid()
        self._queue, chosen = open_native(backend, threads, depth, block_bytes)
        self.backend, self.refusals = chosen.backend, chosen.refusals
        self.threads, self.depth, self.block_bytes = chosen.shape
        self._callbacks = _Callbacks(self._queue)
        self._closed = False
        _open_queues.add(self)

    def read(
        self,
        file: File,
        offset: int,
        buffer: Buffer,
        *,
        priority: Priority = Priority.NORMAL,
        checksum: bool = False,
        expect_crc32c: int | None = None,
    ) -> IoFuture:
        """Fill `buffer` from byte `offset` of `file`; past the end of the file that is an error (ENODATA).

        `checksum` computes the CRC-32C on the way, for `IoFuture.crc32c`; `expect_crc32c` compares it too, and another
        one is an error (EBADMSG, as file systems say it).
        """
        return self._submit("read", file, offset, buffer, priority, checksum, expect_crc32c)

    def write(
        self,
        file: File,
        offset: int,
        buffer: Buffer,
        *,
        priority: Priority = Priority.BACKGROUND,
        checksum: bool = False,
    ) -> IoFuture:
        """Write `buffer` at byte `offset` of `file`. Durable after `file.sync()`. `checksum` as for `read`."""
        return self._submit("write", file, offset, buffer, priority, checksum, None)

    def register(self, *things: Buffer | File) -> int:
        """Tell the kernel of memory and files that many requests will use, until the queue is closed.

        It then need not look them up for each block. Memory is pinned, all of it present from now on, and counts
        against RLIMIT_MEMLOCK. The bytes of memory that were registered: fewer where that limit, the kernel or the
        backend (only io_uring has this) allows no more, which costs speed alone. Waits for what the drivers are at.
        """
        self._check_open()
        done = 0
        for thing in things:
            if hasattr(thing, "parts"):
                for part in thing.parts():
                    own = part.descriptors
                    for descriptor in (own.direct, own.buffered):
                        self._queue.register_file(own, descriptor)
            else:
                done += self._queue.register_memory(thing)
        return done

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return self._queue.moved_bytes(False)

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""
        return self._queue.moved_bytes(True)

    def latency(self, operation: str, fraction: float) -> float:
        """Seconds within which that fraction of all blocks of "read" or "write" ended, to an eighth; 0 for none.

        Counted from the hand-over of a block to the kernel.
        """
        if operation not in ("read", "write") or not 0 <= fraction <= 1:
            raise ValueError(f'expected "read" or "write" and a fraction from 0 to 1, got {operation!r}, {fraction}')
        return self._queue.latency(operation == "write", fraction)

    def close(self) -> None:
        """Let every request end and every callback run, then join the threads; idempotent.

        Nothing in a forked child. From a callback it does not wait for callbacks.
        """
        if not hasattr(self, "_callbacks") or os.getpid() != self._pid:
            return
        self._closed = True
        self._queue.close()  # even if another thread does so already: it waits for the end
        self._callbacks.stop()

    def __del__(self) -> None:
        # Without the lock of the callbacks and without waiting for their thread: the garbage collector may come while
        # this very thread holds the one, or while the other wants it. The thread ends by itself.
        if hasattr(self, "_callbacks") and not sys.is_finalizing() and os.getpid() == self._pid:
            self._closed = True
            self._queue.close()

    def __enter__(self) -> IoQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise _of_the_parent(self._pid)
        if self._closed:
            raise UsageError("this queue is closed")

    def _submit(
        self,
        operation: str,
        file: File,
        offset: int,
        buffer: Buffer,
        priority: Priority,
        checksum: bool,
        expected: int | None,
    ) -> IoFuture:
        self._check_open()
        if file.closed:
            raise UsageError(f"{file.path} is closed")
        view, offset = memoryview(buffer), operator.index(offset)
        if not 0 <= offset <= _LAST - view.nbytes:
            raise ValueError(f"expected an offset from 0 and an end before 2**63, got {offset} and {view.nbytes} bytes")
        if expected is not None and not 0 <= operator.index(expected) < 1 << 32:
            raise ValueError(f"expected a CRC-32C of 32 bits, got {expected}")
        if not view.c_contiguous:
            raise ValueError(f"expected a C-contiguous buffer, got strides {view.strides} of shape {view.shape}")
        if operation == "read" and view.readonly:
            raise ValueError("expected a writable buffer to read into, got a read-only one")
        pieces = file.pieces(offset, view.nbytes)
        flight = self._queue.submit(operation == "write", Priority(priority), pieces, view, checksum, expected)
        if flight is None:
            raise UsageError("this queue is closed")
        with_crc = checksum or expected is not None
        return IoFuture(self._callbacks, flight, operation, file, offset, view.nbytes, with_crc)


def _of_the_parent(pid: int) -> UsageError:
    return UsageError(f"this queue belongs to process {pid}; a forked child has none of its threads")


_open_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()
_exiting = False


@atexit.register
def _close_all() -> None:
    """Writes that a program did not wait for are done before it ends. From here on no thread for callbacks starts."""
    global _exiting
    _exiting = True
    while queues := list(_open_queues):
        for queue in queues:
            _open_queues.discard(queue)
            queue.close()
