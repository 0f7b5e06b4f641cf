"""The I/O queue that the engines of one process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable

from offload.aio import File, IoQueue, Priority
from offload.aio.protocols import Future

# any thread: an engine may start or end on any of them.
_lock = threading.Lock()
_open: dict[Hashable, tuple[IoQueue, int]] = {}
"""Open queues, with the number of their engines. Keys contain the process id, so a forked child opens new queues."""


class SharedQueue:
    """One engine's handle on a shared queue. It counts the bytes of this engine alone.

    The first engine opens the queue with `make(backend, **shape)`; engines with equal arguments share it until the last
    one closes its handle. Belongs to the process that made it.
    """

    def __init__(self, make: Callable[..., IoQueue], backend: str, **shape: int | None) -> None:
        self._key = (os.getpid(), make, backend, tuple(sorted(shape.items())))
        # calling thread: `make` runs under the lock, so two threads that start engines never open one queue twice.
        with _lock:
            queue, users = _open.get(self._key) or (make(backend, **shape), 0)
            _open[self._key] = (queue, users + 1)
        self._queue = queue
        # any thread: model, update worker and callbacks read and write. `+=` on an attribute is not one operation.
        self._counts = threading.Lock()
        self._closed = False
        self.backend, self.refusals = self._queue.backend, self._queue.refusals
        self.read_bytes = self.written_bytes = 0
        """Bytes that this engine has requested so far."""

    def read(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        *,
        priority: Priority = Priority.NORMAL,
        checksum: bool = False,
    ) -> Future:
        with self._counts:
            self.read_bytes += len(buffer)
        return self._queue.read(file, offset, buffer, priority=priority, checksum=checksum)

    def write(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        *,
        priority: Priority = Priority.BACKGROUND,
        checksum: bool = False,
    ) -> Future:
        with self._counts:
            self.written_bytes += len(buffer)
        return self._queue.write(file, offset, buffer, priority=priority, checksum=checksum)

    def close(self) -> None:
        """Ends this engine's use of the queue; the last engine closes the queue. Idempotent."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            # calling thread: the queue's threads serve the other engines too, so only the last one closes it.
            queue, users = _open.pop(self._key)
            if users > 1:
                _open[self._key] = (queue, users - 1)
                return
        # calling thread: waits for requests and their callbacks, outside of the lock. Another engine may open a queue
        # meanwhile, since this one is no longer in `_open`.
        queue.close()
