"""Totals of a step's gradients in device memory, copied to the host once instead of after each micro-batch.

    micro-batch   first ─► stored    further ─► added    last, or a read ─► copied to the host

Once a total has been copied to the host it is dropped from the device; later gradients accumulate on the host. Each
addition is rounded once, as by the host's kernel, so the place of a sum changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

Stretch = tuple[int, int]
"""A range of a gradient: a segment of a unit, and the first element within the segment."""


class DeviceTotals:
    """The totals on the device for some units. Belongs to the thread that adds gradients, or makes the step."""

    def __init__(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Takes device memory for the totals.

        Args:
            memory: for each unit (numel,) on the device, in the dtype in which the unit's gradient waits for its
                update.
        """
        self._memory = dict(memory)
        self._here: dict[int, dict[Stretch, range]] = {unit: {} for unit in memory}
        """The positions in the unit's memory of each range that is on the device."""

    def have(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Takes device memory for the totals of more units, between steps."""
        self._memory |= memory
        self._here |= {unit: {} for unit in memory}

    def takes(self, unit: int) -> bool:
        """Returns True if there is memory for the totals of `unit`."""
        return unit in self._memory

    def has(self, unit: int, stretch: Stretch) -> bool:
        """Returns True if a total of this range is on the device."""
        return stretch in self._here.get(unit, ())

    def segments(self, unit: int) -> set[int]:
        """Returns the segments of which a total is on the device."""
        return {segment for segment, _ in self._here.get(unit, ())}

    def add(self, unit: int, stretch: Stretch, start: int, values: torch.Tensor) -> None:
        """Stores or adds `values`, (n,) on the device, at position `start` of the unit's gradient."""
        memory = self._memory[unit][start : start + len(values)]
        if self.has(unit, stretch):
            memory.add_(values)
        else:
            memory.copy_(values)
            self._here[unit][stretch] = range(start, start + len(values))

    def values(self, unit: int, stretch: Stretch) -> torch.Tensor:
        """Returns a total as (n,) on the device. Later totals reuse the memory."""
        place = self._here[unit][stretch]
        return self._memory[unit][place.start : place.stop]

    def stretches(self) -> Iterator[tuple[int, Stretch]]:
        """Yields the range of every total on the device, with its unit; totals may be dropped meanwhile."""
        for unit, here in self._here.items():
            for stretch in list(here):
                yield unit, stretch

    def forget(self, unit: int, segment: int | None = None) -> None:
        """Drops the totals of a unit, or of one segment of it."""
        here = self._here.get(unit, {})
        for stretch in [each for each in here if segment in (None, each[0])]:
            del here[stretch]

    def left(self, unit: int, stretch: Stretch) -> None:
        """Drops a total whose copy to the host has begun; later gradients are added on the host."""
        self._here[unit].pop(stretch, None)
