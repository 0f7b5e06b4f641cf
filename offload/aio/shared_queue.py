"""The I/O queue that engines of one process share, as each of them sees it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable

from offload.aio import File, IoQueue, Priority
from offload.aio.protocols import Future

_lock = threading.Lock()
_open: dict[Hashable, tuple[IoQueue, int]] = {}
"""Queues and how many engines have each. Those of the parent of a forked child have other keys."""


class SharedQueue:
    """One engine's way to the queue that `make(backend, **shape)` makes, or made for an engine that is still there.

    The same requests with counts of its own. Belongs to the process that made it.
    """

    def __init__(self, make: Callable[..., IoQueue], backend: str, **shape: int | None) -> None:
        self._key = (os.getpid(), make, backend, tuple(sorted(shape.items())))
        with _lock:
            queue, users = _open.get(self._key) or (make(backend, **shape), 0)
            _open[self._key] = (queue, users + 1)
        self._queue = queue
        self._counts = threading.Lock()
        self._closed = False
        self.backend, self.refusals = self._queue.backend, self._queue.refusals
        self.read_bytes = self.written_bytes = 0
        """Asked for by this engine so far."""

    def read(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        *,
        priority: Priority = Priority.NORMAL,
        checksum: bool = False,
    ) -> Future:
        """Fill `buffer` from byte `offset` of `file`."""
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
        """Write `buffer` at byte `offset` of `file`."""
        with self._counts:
            self.written_bytes += len(buffer)
        return self._queue.write(file, offset, buffer, priority=priority, checksum=checksum)

    def close(self) -> None:
        """End this engine's use; the last one closes the queue. Idempotent."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            queue, users = _open.pop(self._key)
            if users > 1:
                _open[self._key] = (queue, users - 1)
                return
        queue.close()
