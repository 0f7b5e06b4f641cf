"""Size of the device arena, and its growth after the first step, decided from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout.tiers import that_fit
from offload.sizes import MIB, PAGE
from offload.swapper.memory.device import DeviceRoom

_MARGIN = 256 * MIB
"""Bytes that stay free for allocations that libraries make later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeed:
    """Sizes, in bytes, that bound the device arena."""

    least: int
    """Bytes of the smallest arena that works.

    It holds the states whose tier is DEVICE, buffers for the reduction of gradients, and the largest paged unit.
    """
    most: int
    """Upper bound of the growth, once a step has shown how much memory activations leave free."""
    unit: int
    """Bytes of the largest unit that is paged in and out."""
    weights: int
    """Bytes with which no unit has to be evicted, within the config's limit. Memory beyond them goes to `totals`."""
    totals: tuple[tuple[int, int], ...] = ()
    """Units whose gradients may accumulate on the device, each with its bytes; those that gain most come first."""

    def added(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Returns those of `totals`, taken greedily in order, for which an arena of `nbytes` has room."""
        return that_fit(self.totals, nbytes - self.weights)


def growth(nbytes: int, need: DeviceNeed, room: DeviceRoom) -> int:
    """Returns the bytes by which the device arena grows after the first step; 0 if growth is not worth it.

    Half as much memory as the activations of the first step took stays free, for longer sequences. If gradient totals
    would use the memory, as much as the activations took stays free, because totals help less than weights. Growth by
    less than the largest unit would not let one more unit stay.

    Args:
        nbytes: current bytes of the arena.
        need: the bounds of the arena.
        room: free memory of the device after the first step; `room.kept` is what the activations of that step took.
    """
    free = min(need.most - nbytes, room.free - room.kept // 2 - _MARGIN) // PAGE * PAGE
    if nbytes + free > need.weights:
        totals = need.added(min(nbytes + free, nbytes + room.free - room.kept - _MARGIN))
        free = need.weights - nbytes + sum(each for _, each in totals)
    return free if free >= max(need.unit, PAGE) else 0
