"""Reads and writes in flight, moved by native threads that never hold the GIL."""

from __future__ import annotations

import asyncio
import atexit
import enum
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from offload.aio._native import Flight
from offload.aio.backend import open_native
from offload.aio.file import DirectFile, Piece
from offload.errors import IoError, UsageError
from offload.sizes import PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_TIMED_OUT = -1

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
    def path(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def pieces(self, offset: int, nbytes: int) -> list[Piece]: ...
    def parts(self) -> list[DirectFile]: ...


class IoFuture:
    """One request in flight. Any thread may ask or wait; dropping it does not stop the request.

    `await future` waits in asyncio and gives what `wait` gives.
    """

    __slots__ = ("__weakref__", "_checksum", "_file", "_flight", "_nbytes", "_offset", "_operation", "_pid", "_queue")

    def __init__(
        self,
        queue: IoQueue,
        flight: Flight,
        operation: str,
        file: File,
        offset: int,
        nbytes: int,
        checksum: bool,
    ) -> None:
        self._queue, self._flight, self._operation, self._checksum = queue, flight, operation, checksum
        self._file, self._offset, self._nbytes, self._pid = file, offset, nbytes, os.getpid()

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

        That thread runs all callbacks of the queue, one after the other. What one raises is logged.
        """
        if os.getpid() != self._pid:
            raise _of_the_parent(self._pid)
        self._queue._call_when_done(self, function)

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
        at = pieces[self._flight.failed_piece]
        whole = (self._file.path, self._offset, self._nbytes)
        path, offset, nbytes = whole if len(pieces) == 1 else (at.owner.path, at.offset, at.nbytes)
        return IoError(path, offset, nbytes, error, self._operation)


class IoQueue:
    """Reads and writes in flight, cut into blocks of `block_bytes`, by `threads` threads with `depth` blocks each.

    `backend` is "io_uring", "libaio", "threads" (of pread and pwrite; one block each, so that there are more of them),
    or "auto": the first of these that the system grants. The attribute `backend` then tells which, `refusals` why none
    before it. What is None gets the value that was fastest on the drives that were tried.

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
        for name, value, least in (("threads", threads, 1), ("depth", depth, 1), ("block_bytes", block_bytes, PAGE)):
            if value is not None and value < least:
                raise ValueError(f"expected {name} >= {least}, got {value}")
        self._closed = True  # nothing to close where the next line raises
        self._pid = os.getpid()
        self._queue, chosen = open_native(backend, threads, depth, block_bytes)
        self.backend, self.refusals = chosen.backend, chosen.refusals
        self.threads, self.depth, self.block_bytes = chosen.shape
        self._closed = False
        self._tags = itertools.count(1)
        self._callbacks: dict[int, tuple[IoFuture, Callable[[IoFuture], object]]] = {}
        self._caller: threading.Thread | None = None
        self._caller_lock = threading.Lock()
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
        if operation not in ("read", "write"):
            raise ValueError(f'expected "read" or "write", got {operation!r}')
        return self._queue.latency(operation == "write", fraction)

    def close(self) -> None:
        """Let every request end and every callback run, then join the threads; idempotent.

        Nothing in a forked child. From a callback it does not wait for callbacks.
        """
        if os.getpid() != self._pid or not hasattr(self, "_queue"):
            return
        with self._caller_lock:
            self._closed = True
        self._queue.close()  # even if another thread does so already: it waits for the end
        caller = self._caller
        if caller is not None and caller is not threading.current_thread():
            caller.join()

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
        if offset < 0:
            raise ValueError(f"expected an offset of at least 0, got {offset}")
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ValueError(f"expected a C-contiguous buffer, got strides {view.strides} of shape {view.shape}")
        if operation == "read" and view.readonly:
            raise ValueError("expected a writable buffer to read into, got a read-only one")
        pieces = file.pieces(offset, view.nbytes)
        flight = self._queue.submit(operation == "write", priority, pieces, view, checksum, expected)
        if flight is None:
            raise UsageError("this queue is closed")
        return IoFuture(self, flight, operation, file, offset, view.nbytes, checksum or expected is not None)

    # -- callbacks ----------------------------------------------------------------------------------

    def _call_when_done(self, future: IoFuture, function: Callable[[IoFuture], object]) -> None:
        tag = next(self._tags)
        self._callbacks[tag] = (future, function)  # before it can be announced
        with self._caller_lock:
            if self._caller is None and not self._closed:
                self._caller = threading.Thread(target=self._call, name="offload-io-callbacks", daemon=True)
                self._caller.start()
            told = self._caller is not None and self._queue.announce(future._flight, tag)
        if not told:
            self._run(tag)

    def _call(self) -> None:
        """Run callbacks as requests end, until the queue is closed and none is left."""
        while tags := self._queue.announced():
            for tag in tags:
                self._run(tag)

    def _run(self, tag: int) -> None:
        future, function = self._callbacks.pop(tag)
        try:
            function(future)
        except Exception:
            log.exception("a callback of an I/O request raised")


def _of_the_parent(pid: int) -> UsageError:
    return UsageError(f"this queue belongs to process {pid}; a forked child has none of its threads")


_open_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Writes that a program did not wait for are done before it ends."""
    for queue in list(_open_queues):
        queue.close()
