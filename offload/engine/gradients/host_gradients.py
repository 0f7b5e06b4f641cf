"""Host memory of gradients: a host buffer for each unit, or a window of one that waits on DISK."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.engine.gradients.disk_spill import DiskSpill
from offload.kernels.sums import Sum
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK


class HostGradients:
    """Gradients of all units on the host. The accumulator's lock guards every call."""

    def __init__(
        self,
        memory: Sequence[torch.Tensor | None],
        spill: DiskSpill | None,
        layouts: Sequence[UnitLayout],
        parts: Sequence[range],
        addressable: bool,
    ) -> None:
        """Takes the memory.

        Args:
            memory: (numel,) of each unit's partition; None for a unit that spills, stays on the device, or is frozen.
            spill: gradients of units that wait on DISK.
            layouts: the segments of each unit.
            parts: the elements of each unit that this rank updates.
            addressable: True if the host can address the gradients of a backward.
        """
        self._memory, self._spill = memory, spill
        self._sums: dict[tuple[int, int, int], Sum] = {}
        """Checked memory of each chunk of a host buffer, by unit, first element and length."""
        self._whole: dict[tuple[int, int], Sum] = {}
        """Checked memory of parameters of one chunk, by unit and segment; see `take`."""
        for unit, (layout, part) in enumerate(zip(layouts, parts, strict=True)):
            for position, segment in enumerate(layout.segments):
                inside = part.start <= segment.start and segment.stop <= part.stop
                if addressable and memory[unit] is not None and inside and 0 < segment.numel <= CHUNK:
                    self._whole[unit, position] = self.sum(unit, segment.start - part.start, segment.numel)

    def take(
        self, unit: int, segment: int, gradient: torch.Tensor, squares: dict[tuple[int, int], float | torch.Tensor]
    ) -> bool:
        """Stores or adds the gradient of a small parameter as it is, if it can, in few calls.

        Args:
            unit: the unit.
            segment: the parameter.
            gradient: as autograd has made it.
            squares: sums of squares of the unit, which say what was stored, and receive that of the new values.

        Returns:
            False, and nothing is changed, if the gradient must be prepared or cut.
        """
        whole = self._whole.get((unit, segment))
        value = None if whole is None else whole.take(gradient, add=(segment, 0) in squares)
        if value is not None:
            squares[segment, 0] = value
        return value is not None

    def spills(self, unit: int) -> bool:
        """Returns True if the gradient of `unit` waits on DISK."""
        return self._spill is not None and unit in self._spill

    def values(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a unit's gradient, valid until the next call."""
        if self._spill is not None and unit in self._spill:
            return self._spill.part(unit, start, stop)
        memory = self._memory[unit]
        assert memory is not None
        return memory[start:stop]

    def sum(self, unit: int, start: int, numel: int) -> Sum:
        """Returns the sum of gradients in elements [start, start + numel), valid until the next call."""
        found = self._sums.get((unit, start, numel))
        if found is None:
            found = Sum(self.values(unit, start, start + numel))
            if not self.spills(unit):  # a window moves, a host buffer does not
                self._sums[unit, start, numel] = found
        return found
