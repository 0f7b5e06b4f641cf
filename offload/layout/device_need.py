"""The bytes that the device arena needs, and its growth after a first step; decided from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout.tiers import that_fit
from offload.sizes import MIB, PAGE
from offload.swapper.memory.device import DeviceRoom

_MARGIN = 256 * MIB
"""For what libraries allocate later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeed:
    """Bytes of the device arena."""

    least: int
    """What works: homes there, gradients to be reduced, and the largest unit that comes and goes."""
    most: int
    """What it may grow to, once a step has shown what activations leave free."""
    unit: int
    """The largest unit that comes and goes."""
    weights: int
    """All that the units need, so that none has to go: what is beyond is for `totals`."""
    totals: tuple[tuple[int, int], ...] = ()
    """Units whose gradients may be added up there, and the bytes of each; whom it helps most is first."""

    def added(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Those of `totals` that an arena of `nbytes` has room for."""
        return that_fit(self.totals, nbytes - self.weights)


def growth(nbytes: int, need: DeviceNeed, room: DeviceRoom) -> int:
    """Returns the bytes that an arena of `nbytes` takes after the first step, of the `room` that this has left.

    Half as much as its activations took stays free beside them, for sequences that are longer; as much again where
    totals of gradients would take it, which help less than weights. Less than the largest unit is not worth it.
    """
    free = min(need.most - nbytes, room.free - room.kept // 2 - _MARGIN) // PAGE * PAGE
    if nbytes + free > need.weights:
        totals = need.added(min(nbytes + free, nbytes + room.free - room.kept - _MARGIN))
        free = need.weights - nbytes + sum(each for _, each in totals)
    return free if free >= max(need.unit, PAGE) else 0
