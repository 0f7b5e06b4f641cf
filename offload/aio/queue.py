"""Reads and writes in flight, moved by native threads that never hold the GIL."""

from __future__ import annotations

import atexit
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from offload.aio._native import Flight, Queue
from offload.aio.file import DirectFile
from offload.errors import IoError, UsageError
from offload.sizes import MIB, PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_TIMED_OUT = -1


class IoFuture:
    """One request in flight. Any thread may ask or wait; dropping it does not stop the request."""

    __slots__ = ("_flight", "_nbytes", "_offset", "_operation", "_path", "_pid")

    def __init__(self, flight: Flight, operation: str, path: str, offset: int, nbytes: int) -> None:
        self._flight, self._operation, self._path = flight, operation, path
        self._offset, self._nbytes, self._pid = offset, nbytes, os.getpid()

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
            raise IoError(self._path, self._offset, self._nbytes, error, self._operation)
        return self._nbytes


class IoQueue:
    """A team of `threads` threads over a queue of blocks of `block_bytes` bytes; reads go before writes.

    A buffer is any C-contiguous one, writable for a read. It is the queue's from the call until the request is done:
    neither write to it nor, for a read, look at it before. A failure is that request's alone. Belongs to the process
    that made it.
    """

    def __init__(self, threads: int = 4, block_bytes: int = 4 * MIB) -> None:
        if threads < 1 or block_bytes < PAGE:
            raise ValueError(f"expected threads >= 1 and block_bytes >= {PAGE}, got {threads} and {block_bytes}")
        self._queue = Queue(threads, block_bytes)
        self._pid = os.getpid()
        self._closed = False
        _open_queues.add(self)

    def read(self, file: DirectFile, offset: int, buffer: Buffer) -> IoFuture:
        """Fill `buffer` from byte `offset` of `file`; past the end of the file that is an error (ENODATA)."""
        return self._submit("read", file, offset, buffer)

    def write(self, file: DirectFile, offset: int, buffer: Buffer) -> IoFuture:
        """Write `buffer` at byte `offset` of `file`. Durable after `file.sync()`."""
        return self._submit("write", file, offset, buffer)

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return self._queue.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""
        return self._queue.written_bytes

    def close(self) -> None:
        """Let every request end, then join the threads; idempotent, and nothing in a forked child."""
        if os.getpid() == self._pid:
            self._closed = True
            self._queue.close()  # even if another thread does so already: it waits for the end

    def __enter__(self) -> IoQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, operation: str, file: DirectFile, offset: int, buffer: Buffer) -> IoFuture:
        if os.getpid() != self._pid:
            raise _of_the_parent(self._pid)
        if file.closed:
            raise UsageError(f"{file.path} is closed")
        if offset < 0:
            raise ValueError(f"expected an offset of at least 0, got {offset}")
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ValueError(f"expected a C-contiguous buffer, got strides {view.strides} of shape {view.shape}")
        if operation == "read" and view.readonly:
            raise ValueError("expected a writable buffer to read into, got a read-only one")
        flight, own = None, file.descriptors
        if not self._closed:
            flight = self._queue.submit(operation == "write", own, own.direct, own.buffered, offset, view)
        if flight is None:
            raise UsageError("this queue is closed")
        return IoFuture(flight, operation, file.path, offset, view.nbytes)


def _of_the_parent(pid: int) -> UsageError:
    return UsageError(f"this queue belongs to process {pid}; a forked child has none of its threads")


_open_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Writes that a program did not wait for are done before it ends."""
    for queue in list(_open_queues):
        queue.close()
