"""Host memory of gradients: a host buffer for each unit, or a window of one that waits on DISK."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload.engine._native import DirectAdd
from offload.engine.gradients.disk_spill import DiskSpill
from offload.kernels.sums import Sum
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK
from offload.swapper.memory.host_arena import HostArena


def buffers_for(
    parts: Sequence[range], arena: HostArena, dtype: torch.dtype, elsewhere: Collection[int]
) -> list[torch.Tensor | None]:
    """Returns host memory, (numel,), for the gradients of each unit; None for those whose gradients are `elsewhere`."""
    memory: list[torch.Tensor | None] = []
    for unit, part in enumerate(parts):
        kept = part and unit not in elsewhere
        host_buffer = arena.take_copied(len(part) * dtype.itemsize) if kept else None
        assert host_buffer is not None or not kept, "the arena class of the host tier was sized for its gradients"
        memory.append(None if host_buffer is None else host_buffer.tensor(dtype))
    return memory


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
        """Checked memory of parameters of one chunk, by unit and segment; see `adder`."""
        for unit, (layout, part) in enumerate(zip(layouts, parts, strict=True)):
            for position, segment in enumerate(layout.segments):
                inside = part.start <= segment.start and segment.stop <= part.stop
                if addressable and memory[unit] is not None and inside and 0 < segment.numel <= CHUNK:
                    self._whole[unit, position] = self.sum(unit, segment.start - part.start, segment.numel)

    def adder(
        self,
        unit: int,
        segment: int,
        add: Callable[[torch.Tensor], None],
        lock: AbstractContextManager[Any],
        reading: Collection[int],
        squares: list[dict[tuple[int, int], float | torch.Tensor]],
    ) -> Callable[[torch.Tensor], None]:
        """Returns a function that stores or adds a gradient of one parameter as autograd has made it.

        Args:
            unit: the unit.
            segment: the parameter.
            add: does so in any case; what the function does where a gradient must be prepared, cut or wait.
            lock: the accumulator's lock.
            reading: units whose gradients an update reads.
            squares: sums of squares of each unit, which say what was stored, and receive those of new values.
        """
        whole = self._whole.get((unit, segment))
        return add if whole is None else DirectAdd(whole.take, add, lock, reading, squares, unit, segment).add

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
