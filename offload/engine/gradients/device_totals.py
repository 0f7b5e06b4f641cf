"""Totals of a step's gradients in memory of the device, which they leave once, instead of after each micro-batch.

    micro-batch   first ─► stored    further ─► added    last, or who asks ─► leaves for the host

A total that has left is no longer here: what comes for it later is added where it is. Each addition is rounded once, as
the host's kernel has it, so where a total was made changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

Stretch = tuple[int, int]
"""A segment of a unit, and the first element of it."""


class Totals:
    """What is here of the gradients of some units. Belongs to the thread that adds gradients, or makes the step."""

    def __init__(self, memory: Mapping[int, torch.Tensor]) -> None:
        """`memory` is on the device, for each unit as much as its gradient takes, in the dtype in which it waits."""
        self._memory = dict(memory)
        self._here: dict[int, dict[Stretch, range]] = {unit: {} for unit in memory}
        """Where in a unit's memory each stretch lies that is here."""

    def have(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Take the totals of more units, between steps."""
        self._memory |= memory
        self._here |= {unit: {} for unit in memory}

    def takes(self, unit: int) -> bool:
        """Whether there is memory for the totals of `unit`."""
        return unit in self._memory

    def has(self, unit: int, stretch: Stretch) -> bool:
        """Whether something was added up there that has not left."""
        return stretch in self._here.get(unit, ())

    def segments(self, unit: int) -> set[int]:
        """The segments of which something is here."""
        return {segment for segment, _ in self._here.get(unit, ())}

    def add(self, unit: int, stretch: Stretch, start: int, values: torch.Tensor) -> None:
        """Store or add `values`, (n,) on the device, whose place in the unit's gradient begins at `start`."""
        memory = self._memory[unit][start : start + len(values)]
        if self.has(unit, stretch):
            memory.add_(values)
        else:
            memory.copy_(values)
            self._here[unit][stretch] = range(start, start + len(values))  # now: half a copy is none

    def values(self, unit: int, stretch: Stretch) -> torch.Tensor:
        """(n,) on the device: a total that is here, in the memory of later ones."""
        place = self._here[unit][stretch]
        return self._memory[unit][place.start : place.stop]

    def stretches(self) -> Iterator[tuple[int, Stretch]]:
        """All that are here, with their units; they may leave meanwhile."""
        for unit, here in self._here.items():
            for stretch in list(here):
                yield unit, stretch

    def forget(self, unit: int, segment: int | None = None) -> None:
        """Nothing of a unit, or of a segment of it, is here any more."""
        here = self._here.get(unit, {})
        for stretch in [each for each in here if segment in (None, each[0])]:
            del here[stretch]

    def left(self, unit: int, stretch: Stretch) -> None:
        """A total is on its way, and what comes for it is added elsewhere."""
        self._here[unit].pop(stretch, None)
