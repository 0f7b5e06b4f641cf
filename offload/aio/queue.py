"""Reads and writes in flight, moved by native threads that never hold the GIL."""

from __future__ import annotations

import atexit
import enum
import logging
import operator
import os
import sys
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from offload.aio.backend import open_native
from offload.aio.future import Callbacks, File, IoFuture, exiting, of_the_parent
from offload.errors import UsageError
from offload.sizes import GIB, PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
        self._callbacks = Callbacks(self._queue)
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
            raise of_the_parent(self._pid)
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


_open_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Writes that a program did not wait for are done before it ends. From here on no thread for callbacks starts."""
    exiting.set()
    while queues := list(_open_queues):
        for queue in queues:
            _open_queues.discard(queue)
            queue.close()
