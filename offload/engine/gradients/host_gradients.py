"""Host memory of gradients: a host buffer for each unit, or a window of one that waits on DISK."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.engine.gradients.disk_spill import DiskSpill
from offload.kernels.sums import Sum


class HostGradients:
    """Gradients of all units on the host. The accumulator's lock guards every call."""

    def __init__(self, memory: Sequence[torch.Tensor | None], spill: DiskSpill | None) -> None:
        """Takes the memory.

        Args:
            memory: (numel,) of each unit's partition; None for a unit that spills, stays on the device, or is frozen.
            spill: gradients of units that wait on DISK.
        """
        self._memory, self._spill = memory, spill
        self._sums: dict[tuple[int, int, int], Sum] = {}
        """Checked memory of each chunk of a host buffer, by unit, first element and length."""

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
