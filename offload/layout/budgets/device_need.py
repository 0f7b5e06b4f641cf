"""Size of the device arena, its growth after the first step and its return to the first size, from sizes alone.

    first step ─► grown ─► memory ran short, or the user asks ─► as at the start ─► calm steps ─► grown, if room is left

A growth leaves free 1.5 times the memory that activations have ever needed. If activations then run short, they needed
more than the growth had left, so the next growth leaves at least 1.5 times as much as the one before. Hence a run sees
a handful of shortages at most, whatever its batches are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.layout.tiers import Partitions, TierMap, that_fit, tier_nbytes
from offload.sizes import MIB, PAGE, align_up, format_size
from offload.states import Tier
from offload.swapper.memory.device import DeviceRoom

_MARGIN = 256 * MIB
"""Bytes that stay free for allocations that libraries make later."""

_TIMES = {2: "twice", 3: "three times", 4: "four times"}

_CALM = 8
"""Steps after which an arena that has given memory back may grow again."""


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
        room: free memory of the device after the first step; `room.kept` counts the bytes that its activations took.
    """
    free = min(need.most - nbytes, room.free - room.kept // 2 - _MARGIN) // PAGE * PAGE
    if nbytes + free > need.weights:
        totals = need.added(min(nbytes + free, nbytes + room.free - room.kept - _MARGIN))
        free = need.weights - nbytes + sum(each for _, each in totals)
    return free if free >= max(need.unit, PAGE) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaHistory:
    """Facts about an arena and the steps so far, from which its next growth is decided."""

    grown: int = 0
    """Bytes of the arena that can be given back."""
    beside: int = 0
    """Bytes that the last growth left for all that is not in the arena."""
    peak: int = 0
    """Most bytes that activations had needed, as far as was known when the arena last grew or gave memory back."""
    wait: int | None = 1
    """Steps until the arena may grow; None if it does not grow any more."""

    def after_step(self) -> ArenaHistory:
        """Returns the history after one more step."""
        return replace(self, wait=max(self.wait - 1, 0)) if self.wait else self

    def after_growth(self, nbytes: int, room: DeviceRoom) -> ArenaHistory:
        """Returns the history after a growth by `nbytes`, which may be 0, into `room`."""
        beside = room.free + room.kept - nbytes if nbytes else 0
        return replace(self, grown=nbytes, beside=beside, peak=max(self.peak, room.kept), wait=None)

    def after_return(self, room: DeviceRoom, short: bool) -> ArenaHistory:
        """Returns the history after the grown memory was given back.

        Args:
            room: free memory of the device just before.
            short: True if the device ran out of memory; False if the user asked.
        """
        return ArenaHistory(peak=max(self.peak, room.kept, self.beside if short else 0), wait=_CALM)


def next_growth(nbytes: int, need: DeviceNeed, room: DeviceRoom, history: ArenaHistory) -> int:
    """Returns the bytes by which the device arena grows at the end of a step; 0 if it does not.

    Args:
        nbytes: current bytes of the arena.
        need: the bounds of the arena.
        room: free memory of the device.
        history: the steps so far; its peak is left free as if activations took it in the last step.
    """
    if history.grown or history.wait != 0:
        return 0
    peak = max(history.peak, room.kept)
    return growth(nbytes, need, DeviceRoom(room.free + room.kept - peak, peak))


def device_fixed(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes that stay on the device: resident states and, with several ranks, buffers of collectives."""
    return tier_nbytes(parts, tiers, Tier.DEVICE) + parts.collectives_nbytes


def least_holds(parts: Partitions) -> str:
    """Returns in words what the smallest device budget holds."""
    if parts.whole_gradients:
        return (
            f"it must hold the states stored there, the largest unit and {format_size(parts.reduction_nbytes)} for the "
            "gradients of all micro-batches, which ZeRO stages 0 and 1 add up on each rank: raise it, or set "
            '"stage": 2, which reduces each micro-batch'
        )
    reduction = parts.reduction
    if parts.secondary is not None:
        return (
            "it must hold the states stored there, the largest unit, "
            f"{format_size(parts.secondary.nbytes)} for the secondary partition of all weights, and "
            f"{format_size(parts.collectives_nbytes - parts.secondary.nbytes)} for what ranks send each "
            'other: raise it, or leave "zero_hpz_partition_size" out'
        )
    if parts.gathers is not None or (reduction is not None and reduction.form is not None):
        return (
            "it must hold the states stored there, the largest unit and "
            f"{format_size(parts.collectives_nbytes)} for gradients and codes that ranks send each other"
        )
    times = 2 if reduction is None else reduction.exchanges + reduction.buckets
    less = "" if reduction is None or reduction.exchanges < 2 else ', fewer with "overlap_comm": false'
    return (
        "it must hold the states stored there, the largest unit and, with several ranks, "
        f"{_TIMES[times]} its gradients{less}"
    )


def moving(parts: Partitions, tiers: TierMap) -> list[int]:
    """Returns the bytes of each unit that is paged in and out of the device."""
    return [
        align_up(nbytes)
        for unit, (nbytes, row_tiers) in enumerate(zip(parts.unit_nbytes, tiers, strict=True))
        # With several ranks a resident weight is only a shard, and blocks are not values: such a unit is put together
        # for every use, and evicted.
        if not parts.stays(unit, row_tiers)
    ]


def largest_moving(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of the largest unit that is paged; 0 if none is."""
    return max(moving(parts, tiers), default=0)
