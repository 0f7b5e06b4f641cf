"""A queue of reads and writes, moved by native threads that never hold the GIL."""

from __future__ import annotations

import atexit
import enum
import errno
import logging
import operator
import os
import sys
import weakref
from typing import TYPE_CHECKING

from offload.aio.backend import open_native
from offload.aio.file import DirectFile, StripedFile
from offload.aio.future import Callbacks, File, IoFuture, exiting, of_the_parent
from offload.errors import IoError, UsageError
from offload.sizes import GIB, PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LAST = (1 << 63) - 1
"""The largest end of a request: offsets are signed 64-bit numbers in the kernel."""
MOST_THREADS, MOST_DEPTH = 256, 4096

log = logging.getLogger("offload.aio")


class Priority(enum.IntEnum):
    """The priority of a request. A lower value goes first.

    Every ninth block is taken from a lower priority, if one is pending. BACKGROUND occupies at most three quarters of
    the capacity, so that a read never waits for a device full of write-behind.
    """

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


class IoQueue:
    """A queue of reads and writes, cut into blocks and moved by native threads.

    Requests run in no certain order: to read the bytes of an earlier write, wait for the write first. A failure affects
    only its own request. A queue belongs to the process that made it; a forked child must not use it.

    Any C-contiguous buffer will do; for a read it must be writable. The queue owns the buffer from the call until the
    request is done: until then do not change the source of a write, and neither read nor change the destination of a
    read.

    The attribute `backend` names the backend in use; `refusals` explains why each earlier candidate was refused. An
    argument of None selects the value that was fastest on the measured drives.

    Args:
        backend: "io_uring", "libaio", "threads" (pread and pwrite), or "auto": the first of these that the system
            grants.
        block_bytes: bytes of a block.
        depth: blocks in flight for each thread. Each thread of the backend "threads" moves one block at a time, so
            `depth` multiplies `threads`. The product is at most 16, or `threads` if that is larger.
        threads: number of native threads.

    Raises:
        ValueError: a number is out of range.
        ConfigError: the backend is unknown or refused by this system.
    """

    _opened = False
    """True once `__init__` has succeeded. A class attribute: `__del__` runs even if `__init__` was never entered."""

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
        self._closed = True  # nothing to close if the next lines raise
        self._pid = os.getpid()
        self._queue, chosen = open_native(backend, threads, depth, block_bytes)
        self.backend, self.refusals = chosen.backend, chosen.refusals
        self.threads, self.depth, self.block_bytes = chosen.shape
        self._callbacks = Callbacks(self._queue)
        self._closed, self._opened = False, True
        # A weak set: the list for `_close_all` does not keep a queue alive.
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
        """Reads into `buffer` from byte `offset` of `file`.

        Args:
            file: an open file.
            offset: first byte. A read beyond the end of the file fails (ENODATA).
            buffer: destination, owned by the queue until the request is done.
            priority: order among pending requests.
            checksum: compute the CRC-32C on the way, for `IoFuture.crc32c`.
            expect_crc32c: the CRC-32C that the bytes must have; another one fails the request (EBADMSG).

        Returns:
            The future of the request, whose `wait` raises `IoError` if the request fails.

        Raises:
            ValueError: a bad offset, buffer or checksum.
            UsageError: the queue or the file is closed, or belongs to a parent process.
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
        """Writes `buffer` at byte `offset` of `file`. Durable once the request is done and `file.sync()` has returned.

        Args:
            file: an open file.
            offset: first byte.
            buffer: source, owned by the queue until the request is done.
            priority: order among pending requests.
            checksum: compute the CRC-32C on the way, for `IoFuture.crc32c`.

        Returns:
            The future of the request, whose `wait` raises `IoError` if the request fails.

        Raises:
            ValueError: a bad offset or buffer.
            UsageError: the queue or the file is closed, or belongs to a parent process.
        """
        return self._submit("write", file, offset, buffer, priority, checksum, None)

    def check(self, operation: str, offset: int, buffer: Buffer) -> tuple[memoryview, int]:
        """Checks a request like `read` and `write`, except for its file, which need not be open yet.

        Args:
            operation: "read" or "write".
            offset: first byte.
            buffer: destination or source.

        Returns:
            A view of the buffer, and the offset as an int.

        Raises:
            ValueError: a bad offset or buffer.
            UsageError: the queue is closed, or belongs to a parent process.
        """
        self._check_open()
        view, offset = memoryview(buffer), operator.index(offset)
        if not 0 <= offset <= _LAST - view.nbytes:
            raise ValueError(f"expected an offset from 0 and an end before 2**63, got {offset} and {view.nbytes} bytes")
        if not view.c_contiguous:
            raise ValueError(f"expected a C-contiguous buffer, got strides {view.strides} of shape {view.shape}")
        if operation == "read" and view.readonly:
            raise ValueError("expected a writable buffer to read into, got a read-only one")
        return view, offset

    def register(self, *things: Buffer | DirectFile | StripedFile) -> int:
        """Registers with the kernel memory and files that many requests will use, until the queue is closed.

        The kernel then need not look them up for each block. Waits for the blocks that are in flight. Only io_uring
        registers; other backends accept the call without effect and are only slower.

        Args:
            things: files, and buffers. From now on all pages of the buffers are resident, pinned and counted against
                RLIMIT_MEMLOCK.

        Returns:
            The bytes of memory that were registered: fewer than given if the limit, the kernel or the backend allows no
            more.

        Raises:
            UsageError: the queue is closed or belongs to a parent process.
        """
        self._check_open()
        done = 0
        for thing in things:
            if isinstance(thing, DirectFile | StripedFile):
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
        """Returns the seconds within which a fraction of all blocks ended; 0 if no block has ended.

        The resolution is an eighth of an octave (9 %). The time of a block starts when the kernel gets it.

        Args:
            operation: "read" or "write".
            fraction: 0 to 1; 0.99 gives the 99th percentile.

        Raises:
            ValueError: another operation, or a fraction out of range.
        """
        if operation not in ("read", "write") or not 0 <= fraction <= 1:
            raise ValueError(f'expected "read" or "write" and a fraction from 0 to 1, got {operation!r}, {fraction}')
        return self._queue.latency(operation == "write", fraction)

    def close(self) -> None:
        """Waits for every request and every callback, then joins the threads. Idempotent.

        Does nothing in a forked child. Called from a callback, does not wait for callbacks.
        """
        # A forked child contains none of the threads that it would join.
        if not self._opened or os.getpid() != self._pid:
            return
        self._closed = True
        self._queue.close()  # also waits if another thread is closing the queue already
        self._callbacks.stop()

    def __del__(self) -> None:
        # This neither takes the lock of the callbacks nor joins their thread. The garbage collector may run it while
        # this thread holds the lock, or the callback thread waits for the lock. The callback thread ends by itself.
        if self._opened and not sys.is_finalizing() and os.getpid() == self._pid:
            self._closed = True
            self._queue.close()

    def __enter__(self) -> IoQueue:
        return self

    def __exit__(self, *_: object) -> None:
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
        """Checks a request and hands it to the native queue, whose `Flight` keeps buffer and descriptors alive."""
        # Everything is checked here, with the caller's values in the message; the native code trusts its arguments.
        view, offset = self.check(operation, offset, buffer)
        if file.closed:
            raise UsageError(f"{file.path} is closed")
        if expected is not None and not 0 <= operator.index(expected) < 1 << 32:
            raise ValueError(f"expected a CRC-32C of 32 bits, got {expected}")
        pieces = file.pieces(offset, view.nbytes)
        try:
            flight = self._queue.submit(operation == "write", Priority(priority), pieces, view, checksum, expected)
        except MemoryError:
            raise IoError(file.path, offset, view.nbytes, errno.ENOMEM, operation) from None
        # None: another thread has closed the queue since `_check_open`.
        if flight is None:
            raise UsageError("this queue is closed")
        with_crc = checksum or expected is not None
        return IoFuture(self._callbacks, flight, operation, file, offset, view.nbytes, with_crc)


_open_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Completes pending writes before the program ends. From now on no thread starts for callbacks."""
    # Python ends daemon threads abruptly, so a callback thread must not start this late.
    exiting.set()
    # A callback that runs during `close` may open another queue, hence the loop.
    while queues := list(_open_queues):
        for queue in queues:
            _open_queues.discard(queue)
            queue.close()
