"""Chunked transfer of a partition that is larger than any host buffer, from DISK to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from offload.aio.protocols import Future, wait_for_all
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import HostBuffer


def stream(
    read: Callable[[int, memoryview], Future],
    leases: Sequence[HostBuffer],
    whole: torch.Tensor,
    share: Sequence[range],
    device: Device,
    after: Sequence[Event],
) -> Event:
    """Fills the byte ranges `share` of `whole` with a partition, chunk by chunk, and waits for the last copy.

    One host buffer is filled while another is copied. No read is in flight when this returns or raises.

    Args:
        read: starts to read the partition from a byte offset into a buffer.
        leases: host buffers of equal size, owned by the caller and free again on return.
        whole: (nbytes,) uint8 on the device.
        share: byte ranges of `whole`, in the order of the partition's bytes.
        device: starts the copies.
        after: events that must be done before `whole` is written.

    Returns:
        The event of the last copy, which is done.

    Raises:
        OSError: the first error of a read.
    """
    total = sum(len(stretch) for stretch in share)
    reading: deque[tuple[HostBuffer, int, Future]] = deque()
    copied: dict[int, Event] = {}
    last: Event | None = None
    start = 0
    try:
        while start < total or reading:
            while start < total and len(reading) < len(leases):
                # Chunks use the buffers in turn, so the buffer of this chunk is the one whose read was finished
                # longest ago.
                lease = leases[(start // leases[0].nbytes) % len(leases)]
                if lease.offset in copied:
                    copied[lease.offset].wait()  # blocks: the copy to the device reads the buffer until then
                nbytes = min(lease.nbytes, total - start)
                reading.append((lease, start, read(start, lease.buffer[:nbytes])))
                start += nbytes
            lease, first, future = reading[0]
            moved = future.wait()
            reading.popleft()
            for stretch, offset in overlaps(share, first, first + moved):
                source = lease.tensor(torch.uint8)[offset : offset + len(stretch)]
                last = device.upload(whole[stretch.start : stretch.stop], source, after)
                copied[lease.offset] = last
    finally:
        wait_for_all(future for _, _, future in reading)
    assert last is not None, "an empty partition needs no host buffer"
    last.wait()  # the caller reuses the host buffers
    return last


def overlaps(share: Sequence[range], first: int, last: int) -> list[tuple[range, int]]:
    """Returns the byte ranges of the unit that are bytes [first, last) of a partition, with offsets from `first`."""
    found: list[tuple[range, int]] = []
    begin = 0
    for stretch in share:
        start, stop = max(begin, first), min(begin + len(stretch), last)
        if start < stop:
            found.append((range(stretch.start + start - begin, stretch.start + stop - begin), start - first))
        begin += len(stretch)
    return found
