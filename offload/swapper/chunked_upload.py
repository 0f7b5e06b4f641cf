"""A partition that is larger than any lease goes from DISK to the device piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from offload.aio.protocols import Future
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import Lease


def stream(
    read: Callable[[int, memoryview], Future],
    leases: Sequence[Lease],
    whole: torch.Tensor,
    share: Sequence[range],
    device: Device,
    after: Sequence[Event],
) -> Event:
    """Fill the stretches `share` of `whole`, (nbytes,) uint8 on the device, with a partition that `read` reads.

    One lease is filled while another is copied. The event ends the last copy; the leases are free then, and no read is
    in flight any more however this ends.
    """
    total = sum(len(stretch) for stretch in share)
    reading: deque[tuple[Lease, int, Future]] = deque()
    copied: dict[int, Event] = {}
    last: Event | None = None
    start = 0
    try:
        while start < total or reading:
            while start < total and len(reading) < len(leases):
                lease = leases[(start // leases[0].nbytes) % len(leases)]
                if lease.offset in copied:
                    copied[lease.offset].wait()  # blocks: the lease is read until then
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
        for _, _, future in reading:
            try:
                future.wait()
            except OSError:
                pass  # what is told is the first error
    assert last is not None, "a partition that has no bytes needs no lease"
    last.wait()  # the leases go to others now
    return last


def overlaps(share: Sequence[range], first: int, last: int) -> list[tuple[range, int]]:
    """What of `share` the bytes [first, last) of a partition are, each with its offset from `first`."""
    found: list[tuple[range, int]] = []
    begin = 0
    for stretch in share:
        start, stop = max(begin, first), min(begin + len(stretch), last)
        if start < stop:
            found.append((range(stretch.start + start - begin, stretch.start + stop - begin), start - first))
        begin += len(stretch)
    return found
