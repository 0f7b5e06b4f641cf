"""Copies through a few buffers, with several reads and writes in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from offload.aio import aligned_empty
from offload.aio.protocols import Future, Pending, wait_for_all
from offload.sizes import MIB

T = TypeVar("T")

BUFFER_NBYTES = 8 * MIB
BUFFERS = 12


def flow_buffers() -> list[memoryview]:
    """Returns the buffers that `flow` works with, 96 MiB in all, page-aligned for direct I/O."""
    # 64 MiB are what the queue has in flight; the others wait for their checksum or for the thread that reuses them.
    # With 64 MiB in all, reads with checksums were measured to be a sixth slower than the drive.
    return [aligned_empty(BUFFER_NBYTES) for _ in range(BUFFERS)]


def flow(
    buffers: Sequence[memoryview],
    items: Iterable[T],
    begin: Callable[[T, memoryview], Iterable[Pending]],
    end: Callable[[T, memoryview], Sequence[Future]],
    ended: Callable[[T, Sequence[Future]], None] = lambda *_: None,
) -> None:
    """Passes `items` through `buffers`, in their order. All work happens on the calling thread.

    Every request has ended when this returns or raises.

    Args:
        buffers: Owned by the caller; each is in use by one chunk at a time.
        items: Chunks of work; drawn lazily, when a buffer is free.
        begin: Starts to fill a buffer with a chunk and gives the pending reads.
        end: Called when those reads are done; starts to write the buffer and returns the pending writes.
        ended: Called with the chunk and its writes when those writes are done.
    """
    free = deque(buffers)
    reading: deque[tuple[T, memoryview, list[Pending]]] = deque()
    writing: deque[tuple[T, memoryview, Sequence[Future]]] = deque()
    remaining = iter(items)
    more = True
    try:
        while True:
            # Start as many reads as there are free buffers: they are in flight while older chunks are written.
            while more and free:
                item = next(remaining, None)
                if item is None:
                    more = False
                    break
                reading.append((item, free.popleft(), []))
                # One by one: if a later read fails to begin, `finally` waits for those before.
                for read in begin(item, reading[-1][1]):
                    reading[-1][2].append(read)
            # Begin to write the oldest chunk if its reads are done. If no write is pending, there is nothing else to
            # wait for, so wait for these reads.
            if reading and (not writing or all(future.done() for future in reading[0][2])):
                item, buffer, reads = reading[0]
                for read in reads:
                    read.wait()
                reading.popleft()
                writing.append((item, buffer, end(item, buffer)))
            elif writing:
                item, buffer, futures = writing[0]
                for future in futures:
                    future.wait()
                ended(item, futures)
                writing.popleft()
                free.append(buffer)
            else:
                return
    finally:
        # After an error the kernel may still access the buffers of requests in flight, so wait for all requests.
        for _, _, pending in (*reading, *writing):
            wait_for_all(pending)


def parts_of(buffer: memoryview, sizes: Iterable[tuple[T, int]]) -> dict[T, memoryview]:
    """Returns parts of a buffer, one after the other, by key; `sizes` has the bytes of each key."""
    parts, end = dict[T, memoryview](), 0
    for key, nbytes in sizes:
        parts[key] = buffer[end : end + nbytes]
        end += nbytes
    return parts


class WriteBehind:
    """Buffers that are filled and written in turns. A buffer is filled again when its writes have ended.

    A context: at its end all writes have ended, and the first error of a write is raised, unless the context ends with
    another error.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._turns: deque[tuple[memoryview, list[Pending]]] = deque((buffer, []) for buffer in buffers)

    def take(self) -> tuple[memoryview, list[Pending]]:
        """Returns a buffer that is no longer in use, and the list to which the caller adds the writes of the buffer.

        Raises:
            IoError: If one of the earlier writes of the buffer has failed.
        """
        buffer, writes = self._turns[0]
        for write in writes:
            write.wait()
        writes.clear()
        self._turns.rotate(-1)
        return buffer, writes

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pending = [write for _, writes in self._turns for write in writes]
        # All writes are awaited first: the buffers are freed next, whether or not a write has failed.
        wait_for_all(pending)
        for write in pending if kind is None else ():
            write.wait()
