"""Chunked transfer of a partition, or an image, that is larger than any host buffer, from DISK to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from offload.aio.protocols import Future, wait_for_all
from offload.swapper.in_place.image import Piece
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import HostBuffer


def stream(
    read: Callable[[int, memoryview], Future],
    total: int,
    host_buffers: Sequence[HostBuffer],
    whole: torch.Tensor,
    pieces: Sequence[Piece],
    device: Device,
    after: Sequence[Event],
    waiting: Callable[[], AbstractContextManager[None]],
) -> Event:
    """Copies the `pieces` of a partition to their places in `whole`, chunk by chunk, and waits for the last copy.

    With two host buffers or more, one is filled while another is copied. No read is in flight when this returns or
    raises; after an error a copy may be.

    Args:
        read: starts to read the partition from a byte offset into a buffer.
        total: bytes of the partition.
        host_buffers: host buffers of equal size, owned by the caller and free again on return.
        whole: the unit's device memory, (nbytes,) uint8.
        pieces: what is copied, in the order of the partition's bytes.
        device: starts the copies.
        after: events that must be done before `whole` is written.
        waiting: makes a context for each wait for a read.

    Returns:
        The event of the last copy. The copy has ended.

    Raises:
        OSError: the first error of a read.
    """
    reading: deque[tuple[HostBuffer, int, Future]] = deque()
    copied: dict[int, Event] = {}
    last: Event | None = None
    start = 0
    try:
        while start < total or reading:
            while start < total and len(reading) < len(host_buffers):
                # Chunks use the buffers in turn, so the buffer of this chunk is the one whose read was finished
                # longest ago.
                host_buffer = host_buffers[(start // host_buffers[0].nbytes) % len(host_buffers)]
                if host_buffer.offset in copied:
                    copied[host_buffer.offset].wait()  # blocks: the copy to the device reads the buffer until then
                nbytes = min(host_buffer.nbytes, total - start)
                reading.append((host_buffer, start, read(start, host_buffer.buffer[:nbytes])))
                start += nbytes
            host_buffer, first, future = reading[0]
            with waiting():
                moved = future.wait()
            reading.popleft()
            for segment, offset in overlaps(pieces, first, first + moved):
                source = host_buffer.tensor(torch.uint8)[offset : offset + len(segment)]
                last = device.upload(whole[segment.start : segment.stop], source, after)
                copied[host_buffer.offset] = last
    finally:
        wait_for_all(future for _, _, future in reading)
    assert last is not None, "an empty partition needs no host buffer"
    last.wait()  # the caller reuses the host buffers
    return last


def overlaps(pieces: Sequence[Piece], first: int, last: int) -> list[tuple[range, int]]:
    """Returns the byte ranges of the unit that hold bytes [first, last) of a partition, with offsets from `first`."""
    found: list[tuple[range, int]] = []
    for begin, target in pieces:
        start, stop = max(begin, first), min(begin + len(target), last)
        if start < stop:
            found.append((range(target.start + start - begin, target.start + stop - begin), start - first))
    return found
