"""Totals of a step's gradients in device memory, copied to the host once instead of after each micro-batch.

    micro-batch   first ─► stored    further ─► added    last, or a read ─► copied to the host

Once the copy of a total to the host has begun, the device drops the total; later gradients are added on the host. Each
addition is rounded once, as by the host's kernel, so a sum has the same bits on the device and on the host.

Some units have memory for their totals for good. Where the micro-batches of a step take turns at a block, every unit
has totals: the first gradient itself becomes the total, until the last micro-batch has left the block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

SegmentRange = tuple[int, int]
"""Key of a range of a unit's gradient: the segment, and the range's first element within the segment."""


class DeviceTotals:
    """The totals on the device for some units.

    Called by the thread that adds gradients or by the one that makes the step, never by both at once.
    """

    def __init__(self, memory: Mapping[int, torch.Tensor], dtype: torch.dtype) -> None:
        """Takes device memory for the totals.

        Args:
            memory: for each unit (numel,) on the device.
            dtype: the dtype in which gradients wait for their update.
        """
        self._memory, self._dtype = dict(memory), dtype
        self._here: dict[int, dict[SegmentRange, torch.Tensor]] = {}
        """By unit: each range whose total is on the device, (n,), with the total."""

    def have(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Takes device memory for the totals of more units, between steps."""
        self._memory |= memory

    def leave(self, units: Collection[int]) -> dict[int, torch.Tensor]:
        """Returns the memory of `units`, in the form that `have` takes. None of them may have a total left."""
        assert not any(self._here.get(unit) for unit in units), "a total would be lost"
        return {unit: self._memory.pop(unit) for unit in units}

    def close(self) -> None:
        """Lets go of all memory and totals."""
        self._memory, self._here = {}, {}

    def takes(self, unit: int) -> bool:
        """Returns True if there is memory for the totals of `unit`."""
        return unit in self._memory

    def has(self, unit: int, segment_range: SegmentRange) -> bool:
        """Returns True if a total of this range is on the device."""
        return segment_range in self._here.get(unit, ())

    def segments(self, unit: int) -> set[int]:
        """Returns the segments of `unit` that have a total on the device."""
        return {segment for segment, _ in self._here.get(unit, ())}

    def add(self, unit: int, segment_range: SegmentRange, start: int, values: torch.Tensor) -> None:
        """Stores or adds `values`, (n,) on the device, at position `start` of the unit's gradient.

        Without memory for the unit, `values` become the total, which later calls change: they belong to this object.
        """
        here = self._here.setdefault(unit, {})
        if segment_range in here:
            here[segment_range].add_(values)
        elif unit in self._memory:
            here[segment_range] = self._memory[unit][start : start + len(values)]
            here[segment_range].copy_(values)
        else:
            here[segment_range] = values.to(self._dtype)

    def values(self, unit: int, segment_range: SegmentRange) -> torch.Tensor:
        """Returns a total, (n,) on the device, perhaps a view of memory that later totals reuse."""
        return self._here[unit][segment_range]

    def ranges(self) -> Iterator[tuple[int, SegmentRange]]:
        """Yields the range of every total on the device, with its unit; totals may be dropped meanwhile."""
        for unit, here in list(self._here.items()):
            for segment_range in list(here):
                yield unit, segment_range

    def forget(self, unit: int, segment: int | None = None) -> None:
        """Drops the totals of a unit, or of one segment of it."""
        here = self._here.get(unit, {})
        for segment_range in [each for each in here if segment in (None, each[0])]:
            del here[segment_range]

    def left(self, unit: int, segment_range: SegmentRange) -> None:
        """Drops a total whose copy to the host has begun; later gradients are added on the host."""
        self._here[unit].pop(segment_range, None)
