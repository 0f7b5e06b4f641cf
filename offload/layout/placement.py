"""Decides the placement of one rank's partitions, and the memory for them and for the work on them, from sizes alone.

Pure functions; `initialize` carries out their decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from offload.errors import BudgetError, ConfigError
from offload.layout.drive_budget import Written
from offload.layout.modes import Mode
from offload.layout.peak_memory import BesideBudgets, PeakMemory, beside_budgets, check_peak
from offload.layout.tiers import (
    Partitions,
    PlacementRequest,
    TierMap,
    check_room,
    configured,
    demotions,
    differences,
    first_states,
    gradients_on_device,
    inputs_nbytes,
    most_written,
    that_fit,
    tier_nbytes,
    to_add_up,
    to_promote,
    with_tier,
)
from offload.notices import Remark
from offload.sizes import GIB, MIB, PAGE, align_up, format_size
from offload.states import State, Tier
from offload.swapper.memory.device import DeviceRoom
from offload.swapper.memory.device_arena import check_budget
from offload.swapper.memory.host_arena import TILE_BUFFERS, HostBudget
from offload.swapper.store import StoreSpec

# -- device need ---------------------------------------------------------------------------------------
#
# Size of the device arena, its growth after the first step and its return to the first size, from sizes alone.
#
#     first step ─► grown ─► memory ran short, or the user asks ─► as at the start ─► calm steps ─► grown, if room is
#     left
#
# A growth leaves free 1.5 times the memory that activations have ever needed. If activations then run short, they
# needed more than the growth had left free. So the next growth leaves at least 1.5 times as much free. Hence a run has
# a handful of shortages at most, whatever its batches are.


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

    It holds the states whose tier is DEVICE, buffers for the reduction of gradients, and the paged units that must be
    there together.
    """
    most: int
    """Upper bound of the growth, once a step has shown how much memory activations leave free."""
    unit: int
    """Bytes of the largest unit that is paged in and out."""
    together: int = 0
    """Bytes of the paged units that must be on the device together; 0 if none is paged."""
    weights: int
    """Bytes with which no unit is evicted, within the config's limit. An arena uses further bytes for `totals`."""
    totals: tuple[tuple[int, int], ...] = ()
    """Units whose gradients may accumulate on the device, as (unit, bytes); the units that gain most come first."""

    def added(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Returns the entries of `totals` that fit into an arena of `nbytes`, taken greedily in order."""
        return that_fit(self.totals, nbytes - self.weights)


def growth(nbytes: int, need: DeviceNeed, room: DeviceRoom) -> int:
    """Returns how many bytes the device arena grows by after the first step; 0 if growth is not worth it.

    For longer sequences, the growth leaves free half of the bytes that the activations of the first step took. If
    gradient totals would use the memory, it leaves free all of these bytes, because totals help less than weights. A
    growth by less than the largest unit would not let one more unit stay. `room.kept` counts the bytes that the
    activations of the first step took.
    """
    free = min(need.most - nbytes, room.free - room.kept // 2 - _MARGIN) // PAGE * PAGE
    if nbytes + free > need.weights:
        totals = need.added(min(nbytes + free, nbytes + room.free - room.kept - _MARGIN))
        free = need.weights - nbytes + sum(total for _, total in totals)
    return free if free >= max(need.unit, PAGE) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaHistory:
    """Facts about an arena and the steps so far, which decide its next growth."""

    grown: int = 0
    """Bytes of the arena that can be given back."""
    beside: int = 0
    """Bytes that the last growth left for everything outside the arena."""
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

        If the memory is `short`, the device ran out of it; otherwise the user asked.
        """
        return ArenaHistory(peak=max(self.peak, room.kept, self.beside if short else 0), wait=_CALM)


def taken_by_others(room: DeviceRoom, history: ArenaHistory) -> bool:
    """Returns True if memory that activations have needed before is not free any more beside a grown arena.

    A growth leaves them more than that, so another process has taken it. `room` is that at the end of a step.
    """
    return bool(history.grown) and room.free + room.kept < history.peak


def next_growth(nbytes: int, need: DeviceNeed, room: DeviceRoom, history: ArenaHistory) -> int:
    """Returns how many bytes the device arena grows by at the end of a step; 0 if it does not.

    The growth treats the peak of `history` as if activations had needed it in the last step.
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
    largest = "the largest unit" + (", with those that are there at the same time," if parts.together else "")
    if parts.whole_gradients:
        return (
            f"it must hold the states stored there, {largest} and {format_size(parts.reduction_nbytes)} for the "
            "gradients of all micro-batches, which ZeRO stages 0 and 1 add up on each rank: raise it, or set "
            '"stage": 2, which reduces each micro-batch'
        )
    reduction = parts.reduction
    if parts.node.nbytes:
        return (
            f"it must hold the states stored there, {largest.rstrip(',')}, "
            f"{format_size(parts.node.nbytes)} for the secondary partition of all weights, and "
            f"{format_size(parts.collectives_nbytes - parts.node.nbytes)} for what ranks send each "
            'other: raise it, or leave "zero_hpz_partition_size" out'
        )
    if parts.coded.largest or (reduction is not None and reduction.form is not None):
        return (
            f"it must hold the states stored there, {largest} and "
            f"{format_size(parts.collectives_nbytes)} for gradients and codes that ranks send each other"
        )
    if parts.joined_gathers:
        return (
            f"it must hold the states stored there, {largest} and "
            f"{format_size(parts.collectives_nbytes)} for what ranks send each other, more by allgather_bucket_size"
        )
    times = 2 if reduction is None else reduction.exchanges + reduction.buckets
    less = "" if reduction is None or reduction.exchanges < 2 else ', fewer with "overlap_comm": false'
    return (
        f"it must hold the states stored there, {largest} and, with several ranks, {_TIMES[times]} its gradients{less}"
    )


def moving(parts: Partitions, tiers: TierMap) -> list[int]:
    """Returns the bytes of each unit that are paged in and out of the device; 0 for a unit that stays there."""
    return [
        # With several ranks a resident weight is only a shard, and blocks are not values. Such a unit is assembled for
        # every use, and evicted.
        0 if parts.device_resident(unit, row_tiers) else align_up(nbytes)
        for unit, (nbytes, row_tiers) in enumerate(zip(parts.unit_nbytes, tiers, strict=True))
    ]


def largest_moving(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of the largest unit that is paged, or of all that a module has of its own; 0 if none is."""
    nbytes = moving(parts, tiers)
    return max([*nbytes, *(sum(nbytes[unit] for unit in together.units) for together in parts.together)], default=0)


def _least_moving(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of the paged units that are on the device together; 0 if none is paged.

    Units inside of a module need its own beside them. On several ranks these are beside any unit of another rank.
    """
    nbytes, largest = moving(parts, tiers), largest_moving(parts, tiers)
    sums = [
        (sum(nbytes[unit] for unit in units), max(nbytes[other] for other in others))
        for units, others in parts.together
        if others
    ]
    if not parts.alone:
        return largest + max((around for around, _ in sums), default=0)
    return max([largest, *(around + other for around, other in sums)])


# -- machine -------------------------------------------------------------------------------------------
#
# The facts about a machine that a placement needs, and sizes of host buffers that planner and engine share.


STAGING_BUFFERS = 3
"""Host buffers through which gradients leave the device."""
STAGED_CHUNKS = 4
"""Chunks of fp32 gradients that a staging buffer has room for, where memory is not short: 64 MiB. At least it is one.

The host adds all of a buffer in one call. In between it needs Python's lock, which the thread that gives work to the
device holds most of the time.
"""
WINDOWS = 3
"""Host buffers of gradients that spill to disk: one is filled while the others are written."""
CHUNK = 1 << 22
"""Elements of a gradient that one call adds or sums the squares of. All callers use this number, for equal bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineMemory:
    """Memory and devices of the machine that states are placed on; sizes in bytes."""

    free_host: int
    """Bytes that the tightest limit leaves."""
    free_device: int
    """0 if the compute device is the host itself."""
    host_addressable: bool
    """True if the host can compute on the device's memory."""
    drives: bool
    """True if the run has a disk for partitions that are moved."""
    unified: bool = False
    """True if the device's memory is the host's, although the host cannot compute on it."""
    other_engines: int = 0
    """Bytes of the host budget that other engines of this process take already."""
    device_kernels: bool = False
    """True if the device has its own kernels for AdamW and for sums of squares."""
    limit: str = "this machine"
    """In words, the tightest limit of host memory."""
    weights_held: int = 0
    """Bytes of the model's weights in host memory now, which the start gives back."""

    @property
    def own_device_memory(self) -> bool:
        """True if the device has memory of its own, so that its arena and activations take no host memory."""
        return not self.host_addressable and not self.unified


# -- device --------------------------------------------------------------------------------------------
#
# Size of the device arena at the start, from sizes alone.


_DEVICE_UNITS = 3
"""Units of the largest size that the device arena holds by default."""
_ARENA_SHARE = 0.25
"""If the CPU computes, the default arena takes at most this fraction of the bytes that `beside_budgets` leaves."""
_GRADIENT_SHARE = 0.75
"""Fraction of the free device memory for resident states, paged units and gradients: activations need the rest."""


def device_share(share: float, parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of the device budget with which the fraction `share` of the weights stays on the device.

    Weights count as the device holds them: in the compute dtype, also those that other tiers store as codes. Beside
    them the budget has room for two of the largest units, one in use and one on its way, and for resident states.
    Raises `ConfigError` if no weights are paged, so all of them stay.
    """
    paged, largest = moving(parts, tiers), largest_moving(parts, tiers)
    if not sum(paged) and any(row[State.WEIGHT] is Tier.HOST for row in tiers):
        return device_fixed(parts, tiers)  # the device uses the host's memory
    resident = sum(nbytes for nbytes, size in zip(parts.unit_nbytes, paged, strict=True) if not size)
    return device_fixed(parts, tiers) + room_for_share(share, resident, sum(paged), largest)


def room_for_share(share: float, resident: int, paged: int, largest: int) -> int:
    """Returns the bytes for paged units with which the fraction `share` of the weights stays on the device.

    `resident` are the bytes of the units that never leave it, `paged` those of all others, `largest` of one of these.
    Raises `ConfigError` if no weights are paged, so all of them stay.
    """
    if not paged:
        raise ConfigError(
            '"device_memory" is a percentage of the weights that stay on the device, but "offload_param" places all of '
            'them there: set its "device" to cpu or nvme (weights="cpu"), or leave "device_memory" out'
        )
    kept = max(int(share * (resident + paged)) - resident, 0)
    return min(align_up(kept) + 2 * largest, paged + largest)


def divide_device(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: MachineMemory, tiers: TierMap
) -> tuple[int, DeviceNeed]:
    """Returns the initial bytes of the device arena, and the bounds of its size."""
    fixed, largest = device_fixed(parts, tiers), largest_moving(parts, tiers)
    # All paged units plus room for one more of any size, so that gaps between units force no eviction.
    whole = max(_DEVICE_UNITS * largest, sum(moving(parts, tiers)) + largest)
    together = _least_moving(parts, tiers)
    live = whole if request.live is None else max(together, align_up(request.live * mode.weight_dtype.itemsize))
    weights = min(whole, live)
    # If whole gradients add up before they are reduced, a step has one partition of each gradient and no other sum.
    adds_up = request.accumulation > 1 and not machine.host_addressable and not parts.whole_gradients
    totals = to_add_up(parts, tiers) if adds_up else ()
    # Gradients on the device are an optimization that the least budget need not hold.
    in_host = with_tier(tiers, ((unit, State.GRAD) for unit, row in enumerate(tiers) if State.GRAD in row), Tier.HOST)
    least = device_fixed(parts, in_host) + together
    if request.device_memory is not None:
        share = request.weights_on_device
        what = '"device_memory"' if share is None else f'"device_memory" of {100 * share:.15g}%'
        check_budget(what, request.device_memory, least, least_holds(parts))
        # Test devices of type cpu do not tell what is free.
        if not machine.host_addressable and 0 < machine.free_device < request.device_memory:
            raise BudgetError(
                f'"device_memory" is {format_size(request.device_memory)}, and {format_size(machine.free_device)} of '
                "the device is free for this process, for gradients and activations too: lower it, or end what else "
                f"uses the device; the least that works is {format_size(least)} ({least} bytes)"
            )
        room = max(0, request.device_memory // PAGE * PAGE - fixed)
        if request.live is not None:
            total_nbytes = sum(nbytes for _, nbytes in that_fit(totals, room - weights))
            room = min(room, max(live, weights + total_nbytes))
        most = room
    else:
        check_room(parts.node, least, machine.free_host if machine.host_addressable else machine.free_device)
        # By default the arena begins small and grows once the first step has shown the memory of the activations.
        room = most = max(together, min(_DEVICE_UNITS * largest, live))
        if machine.host_addressable:  # the host budget, activations and gradients share this memory
            share = int(_ARENA_SHARE * max(machine.free_host - sum(beside_budgets(parts)), 0)) // PAGE * PAGE
            gathered = request.keeps_weights and not parts.alone
            room = most = max(together, min(weights if gathered else room, share))
        elif machine.unified and any(row[State.WEIGHT] is Tier.HOST for row in tiers):
            pass  # a larger arena would hold second copies of weights that are in the same memory already
        else:
            most = weights + sum(nbytes for _, nbytes in totals)
    need = DeviceNeed(
        least=least, most=fixed + most, unit=largest, together=together, weights=fixed + weights, totals=totals
    )
    return fixed + room, need


# -- tile sizes ----------------------------------------------------------------------------------------
#
# Sizes of the update pipeline's tiles: elements of a tile, number of tiles, and bytes of their class of host memory.
#
# Pure functions of sizes.


_WHOLE_UNITS = 3
"""Number of tiles if each holds an entire unit: one is read, one computed, one written."""
_MATRICES = 4
"""Number of tiles if each holds a matrix: matrices differ in size, and one tile more evens out the differences."""
_TILE_NBYTES = range(4 * MIB, 16 * MIB + 1)
"""Smallest and largest bytes of the host buffer of one tile."""


def pipeline(parts: Partitions, mode: Mode, request: PlacementRequest, tiers: TierMap) -> tuple[int, int]:
    """Returns the bytes of the smallest and of the largest useful class of tiles; both 0 if nothing trains."""
    numel = max(parts.trainable_numel, default=0)
    if not numel:
        return 0, 0
    step = tile_growth(parts, mode, tiers)
    # An optimizer of torch needs all elements of a parameter at once, so its tiles are entire units. An optimizer with
    # a rule for matrices needs a matrix at once.
    if mode.steps_whole:
        most = _WHOLE_UNITS if mode.whole_units else _MATRICES
        return _scratch_nbytes(parts, mode) + step, _scratch_nbytes(parts, mode) + most * step
    element_bytes = _tile_element_bytes(parts, mode, tiers)
    if request.tile is not None:
        # A tile holds at least one step, however small the config's limit is.
        numel = min(numel, max(request.tile, _tile_step(mode)))
    small, large = (
        align_up(TILE_BUFFERS * min(numel * element_bytes, nbytes), step) or step
        for nbytes in (_TILE_NBYTES[0], _TILE_NBYTES[-1])
    )
    return small, large


def tile_growth(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns how many bytes the class of tiles grows by: one more unit or matrix, or one more step of every tile."""
    if not any(parts.trainable_numel):
        return 0
    if mode.whole_units:
        return _whole_unit_nbytes(parts, tiers)
    if mode.matrix_rule:
        return _matrix_nbytes(parts, mode, tiers)
    return TILE_BUFFERS * _tile_step_nbytes(parts, mode, tiers)


def tiles(parts: Partitions, mode: Mode, tiers: TierMap, nbytes: int) -> tuple[int, int, int]:
    """Returns the elements of a tile, the number of tiles and the scratch bytes, for a class of `nbytes`.

    Without anything that trains, `nbytes` is 0.
    """
    if mode.whole_units:
        scratch = _scratch_nbytes(parts, mode) if nbytes else 0
        buffers = (nbytes - scratch) // max(_whole_unit_nbytes(parts, tiers), 1)
        return max(parts.trainable_numel, default=0), buffers, scratch
    if mode.matrix_rule:
        scratch, tile = _scratch_nbytes(parts, mode) if nbytes else 0, _matrix_nbytes(parts, mode, tiers)
        step = mode.tile_step
        numel = tile // _tile_element_bytes(parts, mode, tiers) // step * step
        return numel, (nbytes - scratch) // max(tile, 1), scratch
    # Elements are rounded down to steps, so that every state of every tile begins at a page of its partition.
    return nbytes // TILE_BUFFERS // _tile_step_nbytes(parts, mode, tiers) * _tile_step(mode), TILE_BUFFERS, 0


def _whole_unit_nbytes(parts: Partitions, tiers: TierMap) -> int:
    return max(
        sum(
            align_up(nbytes)
            for state, nbytes in row.items()
            # A gradient in HOST or on the device is read from its own memory, so a tile needs no room for it.
            if state is not State.GRAD or row_tiers[State.GRAD] is Tier.DISK
        )
        for row, row_tiers, numel in zip(parts.nbytes, tiers, parts.trainable_numel, strict=True)
        if numel
    )


def _matrix_nbytes(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes of a tile that holds any matrix, and at least the usual number of other elements."""
    spilled = parts.gradient_dtype.itemsize if window_nbytes(parts, tiers) else 0
    matrix = 0
    for unit_mode in _modes(parts, mode):
        of_matrices = [dtype.itemsize for state, dtype in unit_mode.states.items() if state not in unit_mode.partial]
        matrix = max(matrix, sum(align_up(parts.whole.tile * itemsize) for itemsize in (*of_matrices, spilled)))
    element_bytes = _tile_element_bytes(parts, mode, tiers)
    steps = max(_TILE_NBYTES[0] // element_bytes // mode.tile_step, 1)
    numel = min(max(parts.trainable_numel, default=0), steps * mode.tile_step)
    return align_up(max(matrix, numel * element_bytes))


def _scratch_nbytes(parts: Partitions, mode: Mode) -> int:
    """Returns the bytes that a step with whole parameters needs in addition to its tiles.

    The bytes hold an fp32 gradient, an fp32 master if no state is a whole master, and the values that ranks exchange.
    With an optimizer of torch, ranks exchange a master and a gradient, else an update. Rules for matrices also compute
    in the memory of gradient, master and a square, so they need it in every precision.
    """
    itemsize, whole = torch.float32.itemsize, parts.whole
    copies = 2 if State.MASTER_LOW_BITS in mode.weights or mode.matrix_rule or not parts.alone else 1
    squares = align_up(whole.square * itemsize) if mode.matrix_rule else 0
    traded = align_up((1 if mode.matrix_rule else 2) * whole.traded * itemsize)
    # A model may have no matrix, and an arena allocates no empty memory.
    return copies * align_up(whole.parameter * itemsize) + squares + traded or PAGE


def _tile_step(mode: Mode) -> int:
    return max(mode.rule.block, mode.tile_step)


def _tile_step_nbytes(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes of a tile of one step: its elements, and a page for the scales of its blocks."""
    return _tile_step(mode) * _tile_element_bytes(parts, mode, tiers) + (PAGE if mode.in_blocks else 0)


def _tile_element_bytes(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes of a tile for one element: its states without scales, and a gradient if any spills."""
    states = max(unit_mode.element_bytes for unit_mode in _modes(parts, mode))
    # A gradient that waits on disk passes through a tile.
    return states + (parts.gradient_dtype.itemsize if window_nbytes(parts, tiers) else 0)


def _modes(parts: Partitions, mode: Mode) -> tuple[Mode, ...]:
    return (mode, mode.in_fp32) if any(parts.in_fp32) else (mode,)


# -- host ----------------------------------------------------------------------------------------------
#
# Host memory of a run: the need of each class of buffers, the default budget and its division, from sizes alone.


_HOST_SHARE = 0.8
"""Fraction of the free host memory that a run takes at most. The rest is for activations if the device computes there,
and for the system."""
_HOST_RESERVE = 6 * GIB
_HOST_RESERVE_SHARE = 0.05
"""Bytes, or fraction if that is more, of the free host memory that a run beside a device with memory of its own leaves:
Python, torch, the loader and the cache of files need them. A small machine keeps `_HOST_SHARE`."""
_ACTIVATIONS = 512 * MIB
"""Bytes that the default budget leaves to activations at least, where the device computes in host memory."""
_STREAM_NBYTES = 16 * MIB
"""Bytes of the least host buffer of weights. Larger units are read in chunks if two buffers of them do not fit."""
_WINDOW_NBYTES = 32 * MIB
"""Bytes of the largest host buffer of a gradient that spills."""


def usable_host(free: int, *, own_device_memory: bool) -> int:
    """Returns how many of the `free` bytes of host memory a run takes at most, unless the config names a budget."""
    share = int(_HOST_SHARE * free)
    if not own_device_memory:
        return share
    return max(share, free - max(_HOST_RESERVE, int(_HOST_RESERVE_SHARE * free)))


def least_host(parts: Partitions, mode: Mode, request: PlacementRequest, machine: MachineMemory) -> HostBudget:
    """Returns the smallest classes of host buffers that work: after any demotions, with large units read in chunks."""
    configured_tiers = configured(parts, request, mode.weight_dtype.itemsize)
    return min((way.least for way in _ways(parts, mode, request, machine, configured_tiers)), key=sum)


def default_budget(
    parts: Partitions,
    mode: Mode,
    request: PlacementRequest,
    machine: MachineMemory,
    configured_tiers: TierMap,
    beside: BesideBudgets,
) -> int:
    """Returns the bytes of host memory that a run takes at most if the config names no budget.

    `beside` are the bytes that a step is known to take beside both budgets.
    """
    most = usable_host(machine.free_host, own_device_memory=machine.own_device_memory)
    if machine.own_device_memory:
        return most
    # One memory: the device arena takes a part of it.
    arena, _ = divide_device(parts, mode, request, machine, configured_tiers)
    if machine.host_addressable:
        # In a small container both arenas would leave no room for gradients and activations, and the kernel would end
        # the run. Two gradients are those of tied weights, or of a loss that scales its sums.
        rest = machine.free_host - arena - sum(beside_budgets(parts))
        rest = min(usable_host(rest, own_device_memory=False), rest - _ACTIVATIONS)
        rest = min(rest, machine.free_host + machine.weights_held - arena - sum(beside)) // PAGE * PAGE
    else:
        rest = usable_host(max(machine.free_host - arena, 0), own_device_memory=False)
    # At least the bytes that suffice after all moves to DISK, if the run has a drive.
    ways = [configured_tiers]
    if machine.drives:
        host = [(unit, state) for unit, row in enumerate(configured_tiers) for state in row if row[state] is Tier.HOST]
        states = [(unit, state) for unit, state in host if state is not State.GRAD]
        ways = [with_tier(configured_tiers, moved, Tier.DISK) for moved in (host, states)]
    least = min(sum(host_needs(parts, mode, request, machine, tiers)[0]) for tiers in ways)
    return min(most, max(rest, least))


def host_needs(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: MachineMemory, tiers: TierMap
) -> tuple[HostBudget, HostBudget]:
    """Returns the bytes of each class of host buffers under `tiers`: the least that work, and the most that help."""
    small, large = pipeline(parts, mode, request, tiers)
    weights = dict(_disk_weights(parts, tiers))
    largest = max(weights.values(), default=0)
    # Two buffers of weights: one is uploaded while the next is read. Groups of experts are small beside what a layer
    # computes before them: with two buffers, updates that run under a forward would wait for it in each layer.
    buffers = max(2 * largest, *(sum(weights.get(unit, 0) for unit in units) for units in parts.groups), 0)
    # Pieces of a gradient are whole chunks, unless a buffer has room for all of it.
    whole = 0 if machine.host_addressable else align_up(2 * parts.largest_gradient)
    few, many = (STAGING_BUFFERS * min(chunks * CHUNK * 4, whole) for chunks in (1, STAGED_CHUNKS))
    gradients = WINDOWS * align_up(window_nbytes(parts, tiers))
    resident = tier_nbytes(parts, tiers, Tier.HOST)
    return (
        HostBudget(small, 2 * align_up(min(largest, _STREAM_NBYTES)), gradients, resident, few),
        HostBudget(large, buffers, gradients, resident, many),
    )


class _Way(NamedTuple):
    """Host needs after the first `number` moves of a series of `demotions`."""

    moves: Sequence[tuple[int, State]]
    number: int
    least: HostBudget
    most: HostBudget

    def tiers(self, before: TierMap) -> TierMap:
        """Returns the tier map after the moves; `before` is the one before them."""
        return with_tier(before, self.moves[: self.number], Tier.DISK) if self.number else before


def _ways(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: MachineMemory, tiers: TierMap
) -> Iterator[_Way]:
    """Yields the host needs of `tiers`, and of each map after a further move of `demotions` if there are drives.

    A move to DISK frees its bytes. Anything else changes only if no weight, or no gradient, as large was on DISK
    before. So the needs of thousands of units are counted a few times.
    """
    needs = host_needs(parts, mode, request, machine, tiers)
    yield _Way((), 0, *needs)
    largest = dict.fromkeys((State.WEIGHT, State.GRAD), 0)
    for row, places in zip(parts.nbytes, tiers, strict=True):
        largest |= {state: max(most, row[state]) for state, most in largest.items() if places.get(state) is Tier.DISK}
    for moves in demotions(tiers, request.early) if machine.drives else ():
        rows, known, (least, most) = [dict(row) for row in tiers], dict(largest), needs
        for count, (unit, state) in enumerate(moves, 1):
            rows[unit][state], nbytes = Tier.DISK, parts.nbytes[unit].get(state, 0)
            if nbytes > known.get(state, nbytes) or (state is State.GRAD and mode.whole_units):
                known[state] = max(nbytes, known[state])
                least, most = host_needs(parts, mode, request, machine, tuple(rows))
            else:
                resident = least.resident - align_up(nbytes)
                least, most = least._replace(resident=resident), most._replace(resident=resident)
            yield _Way(moves, count, least, most)


def divide_host(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: MachineMemory, tiers: TierMap, budget: int
) -> HostBudget:
    """Returns the classes of host buffers within `budget`, which must hold the least that works."""
    least, most = host_needs(parts, mode, request, machine, tiers)
    # Spare memory goes first to weights, up to two buffers of the largest unit, then to tiles, to staging, and last to
    # the cache.
    room = budget - sum(least)
    weights = min(most.weights, (least.weights + room) // (2 * PAGE) * (2 * PAGE))
    room -= weights - least.weights
    step = tile_growth(parts, mode, tiers)
    tiles = min(most.tiles, least.tiles + (room // step * step if step else 0))
    room -= tiles - least.tiles
    staging = most.staging if room >= most.staging - least.staging else least.staging
    room -= staging - least.staging
    cache = max(sum(nbytes for _, nbytes in _disk_weights(parts, tiers)) - weights, 0)  # of all weights on DISK
    # Without an explicit budget, or with a limit in the config, the cache holds no more than the config asks for.
    if request.host_memory is None or request.cached_weights is not None:
        cache = min(cache, max((request.cached_weights or 0) * mode.weight_dtype.itemsize - weights, 0))
    return least._replace(tiles=tiles, weights=weights, staging=staging, cache=min(cache, room) // PAGE * PAGE)


def window_nbytes(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of one window of spilling gradients; 0 if none spills."""
    spilled = [
        row[State.GRAD]
        for row, row_tiers in zip(parts.nbytes, tiers, strict=True)
        if row_tiers.get(State.GRAD) is Tier.DISK
    ]
    return min(max(spilled, default=0), max(_WINDOW_NBYTES, CHUNK * parts.gradient_dtype.itemsize))


def _disk_weights(parts: Partitions, tiers: TierMap) -> list[tuple[int, int]]:
    return [
        (unit, align_up(row[State.WEIGHT]))
        for unit, (row, row_tiers) in enumerate(zip(parts.nbytes, tiers, strict=True))
        if row_tiers[State.WEIGHT] is Tier.DISK
    ]


# -- placement -----------------------------------------------------------------------------------------


_FIRST_SHARE = 1 / 16
"""Fraction of the free host memory that the states of the first unit may take although they are configured for DISK."""
_FEW = 1 << 16
"""Elements of a tile whose fixed work takes as long as the work on the elements, as measured on two cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Tiers of this rank's partitions, and the memory for them and for the work on them."""

    tiers: TierMap
    promoted: tuple[tuple[int, State], ...]
    """Partitions promoted from DISK to HOST. They use memory of the cache, and leave if another engine needs it."""
    classes: HostBudget
    device_nbytes: int
    device_need: DeviceNeed
    added: tuple[tuple[int, int], ...]
    """Units whose gradients accumulate on the device and leave it once a step, each with its bytes of the arena."""
    tile_numel: int
    tile_buffers: int
    """Tiles that are read, computed or written at a time."""
    scratch_nbytes: int
    """For an optimizer of torch, bytes of the class of tiles for the largest parameter's fp32 gradient and master."""
    inputs_nbytes: int | None
    """Bytes of host memory, in addition to `classes`, for inputs of recomputed blocks; None for what is free then."""
    peak: PeakMemory
    """The sum that a start compares with the limits of host memory."""
    window_numel: int
    """Elements of a spilling gradient that are in HOST at a time; 0 if no gradient spills."""
    notices: tuple[str, ...]

    @property
    def on_disk(self) -> bool:
        """True if the tier of any state is DISK, or would be DISK without promotion. Gradients do not count."""
        in_tier = (tier is Tier.DISK for row in self.tiers for state, tier in row.items() if state is not State.GRAD)
        return bool(self.promoted) or any(in_tier)

    def keeps_on_disk(self, parts: Partitions) -> bool:
        """Returns `on_disk` without the weights that are in the model's own files."""
        rows = (row for unit, row in enumerate(self.tiers) if not parts.in_place(unit))
        tiers = (tier for row in rows for state, tier in row.items() if state is not State.GRAD)
        return bool(self.promoted) or any(tier is Tier.DISK for tier in tiers)

    def overlaps_updates(self, wanted: bool, *, on_cpu: bool, alone: bool, slots: int) -> bool:
        """Returns True if a step's updates run during the next forward. `slots` is 0 without a store."""
        # With everything in memory, an update waits only for the cores on which the forward computes. Run side by side,
        # both take longer than one after the other.
        return wanted and not (on_cpu and alone and not slots and not self.on_disk and not self.spilled)

    @property
    def spilled(self) -> tuple[int, ...]:
        """Units whose gradients wait on DISK."""
        return tuple(unit for unit, row in enumerate(self.tiers) if row.get(State.GRAD) is Tier.DISK)

    @property
    def sends_gradients(self) -> bool:
        """True if the gradients of any unit have another tier than DEVICE."""
        return any(row.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE for row in self.tiers)

    @property
    def moving_nbytes(self) -> int:
        """Bytes of the device arena, without the gradients that accumulate there (`added`)."""
        return self.device_nbytes - sum(nbytes for _, nbytes in self.added)

    def grown(self, nbytes: int) -> Placement:
        """Returns the placement with a device arena larger by `nbytes`, as after the first step."""
        device_nbytes = self.device_nbytes + nbytes
        return replace(self, device_nbytes=device_nbytes, added=self.device_need.added(device_nbytes))

    def tiers_of(self, *states: State) -> str:
        """Returns the tiers of these states in words: "disk", or "host and disk"."""
        return " and ".join(
            tier.value for tier in Tier if any(row.get(state) is tier for row in self.tiers for state in states)
        )

    def settled(self, parts: Partitions) -> Placement:
        """Returns the placement for a store of the states on DISK alone: promoted states never leave HOST again."""
        nbytes = parts.pages_nbytes(self.promoted)
        classes = self.classes._replace(resident=self.classes.resident + nbytes, cache=self.classes.cache - nbytes)
        return replace(self, classes=classes, promoted=())

    def stored(self, parts: Partitions, slots: int) -> tuple[Mapping[State, int], ...]:
        """Returns for each unit the bytes of the states that the store keeps; empty if there is no store.

        A durable store has 2 `slots`, a store written in place 1.
        """
        if not slots:
            return ()
        return tuple(
            {
                state: nbytes
                for state, nbytes in row.items()
                if state is not State.GRAD and (slots == 2 or tiers[state] is Tier.DISK) and not parts.in_place(unit)
            }
            for unit, (row, tiers) in enumerate(zip(parts.nbytes, self.tiers, strict=True))
        )

    def deferred(self, parts: Partitions, slots: int, commit_every: int) -> frozenset[int]:
        """Returns the units that are written at commits alone: units in memory, if not every step is committed."""
        if slots != 2 or commit_every < 2:
            return frozenset()
        return frozenset(
            unit
            for unit, row in enumerate(self.tiers)
            if parts.trainable_numel[unit]
            and all(row[state] is not Tier.DISK for state in row if state is not State.GRAD)
        )

    def written(self, parts: Partitions, slots: int, commit_every: int) -> Written:
        """Returns the bytes of states and gradients that this rank writes to all drives; arguments as of `deferred`."""
        deferred = self.deferred(parts, slots, commit_every)
        sums = {True: 0, False: 0}
        for unit, row in enumerate(self.stored(parts, slots)):
            if parts.trainable_numel[unit]:
                frozen = parts.frozen[unit] if parts.frozen and State.WEIGHT in row else 0
                sums[unit in deferred] += sum(row.values()) - frozen
        sums[False] += sum(parts.nbytes[unit][State.GRAD] for unit in self.spilled)
        return Written(sums[False], sums[True])

    def store(
        self,
        parts: Partitions,
        slots: int,
        shadowed: frozenset[int] = frozenset(),
        fingerprint: Mapping[str, Any] = {},
        about: Mapping[str, Any] = {},
    ) -> StoreSpec:
        """Returns the specification of a store; `slots` as in `stored`, the other arguments as in `StoreSpec`."""
        return StoreSpec(self.stored(parts, slots), slots, fingerprint, about, parts.frozen if slots else (), shadowed)


def place(
    parts: Partitions,
    mode: Mode,
    request: PlacementRequest,
    machine: MachineMemory,
    beside: BesideBudgets | None = None,
) -> Placement:
    """Returns a placement of every byte within both budgets, or within their defaults.

    `beside` are the bytes that a step takes beside both budgets if the CPU computes; None for those of one gradient of
    the largest unit and no activations. Raises `BudgetError` if a budget is too small (the message names the smallest
    that works), or exceeds the free memory.
    """
    beside = beside or beside_budgets(parts, gradients=1)
    configured_tiers = configured(parts, request, mode.weight_dtype.itemsize)
    if request.weights_on_device is not None:
        nbytes = device_share(request.weights_on_device, parts, configured_tiers)
        request = replace(request, device_memory=nbytes)
    # All engines of the process share an explicit host budget.
    if request.host_memory is not None:
        budget = max(request.host_memory - machine.other_engines, 0) // PAGE * PAGE
    else:
        budget = default_budget(parts, mode, request, machine, configured_tiers, beside)
    if budget > machine.free_host:
        raise BudgetError(
            f'"host_memory" leaves {format_size(budget)} for this engine, but only {format_size(machine.free_host)} is '
            f"free on this machine; lower it, or leave it out for a budget of the bytes needed"
        )
    whole, inputs = budget, request.inputs
    # With a default budget, inputs beside the host arena take what is free when they need it, except on a device with
    # memory of its own, where the arena may leave little.
    if inputs != 0 and (request.host_memory is not None or machine.own_device_memory):
        inputs = inputs_nbytes(request, budget, budget - sum(least_host(parts, mode, request, machine)))
        budget -= inputs
    # The device has a kernel for AdamW only; any other optimizer needs the gradients on the host.
    if machine.device_kernels and mode.rule.on_device:
        # Gradients take the rest of an explicit budget, or of a fraction of the free memory.
        fixed, largest = device_fixed(parts, configured_tiers), largest_moving(parts, configured_tiers)
        if request.weights_on_device is not None:
            spare = 0  # the percentage is of weights alone
        elif request.device_memory is not None:
            spare = request.device_memory // PAGE * PAGE - fixed - _least_moving(parts, configured_tiers)
        else:
            spare = int(_GRADIENT_SHARE * machine.free_device) - fixed - _DEVICE_UNITS * largest
        configured_tiers = gradients_on_device(parts, configured_tiers, spare)
    tiers = _fitting_tiers(parts, mode, request, machine, configured_tiers, budget)
    notices: list[str] = []
    if moved := differences(parts, configured_tiers, tiers):
        notices.append(
            f"host memory of {format_size(budget)} has no room for all states configured for it; moved: {moved}"
        )
    promoted: tuple[tuple[int, State], ...] = ()
    if request.spares_drives:
        room = budget - sum(host_needs(parts, mode, request, machine, tiers)[1])
        spared = most_written(tiers, parts, room)
        if moved := differences(parts, tiers, with_tier(tiers, spared, Tier.HOST)):
            notices.append(Remark(f"so that fewer bytes are written, whole layers stay in memory; moved: {moved}"))
        # States are promoted, so that their memory can be given back. Weights have no memory of their own on DISK.
        promoted = tuple((unit, state) for unit, state in spared if state is not State.WEIGHT)
        tiers = with_tier(tiers, set(spared).difference(promoted), Tier.HOST)
    rest = budget - sum(host_needs(parts, mode, request, machine, tiers)[1]) - parts.pages_nbytes(promoted)
    others = with_tier(tiers, promoted, Tier.HOST)
    promoted += first_states(others, parts, min(rest, int(_FIRST_SHARE * machine.free_host)))
    left = budget - parts.pages_nbytes(promoted)
    classes = divide_host(parts, mode, request, machine, tiers, left)
    why = "the layer that a step uses first and completes last keeps its states in host memory"
    if request.host_memory is not None:
        # Without an explicit budget a run takes only the memory that it needs, so nothing else is promoted.
        promoted += to_promote(with_tier(tiers, promoted, Tier.HOST), parts, left - sum(classes))
        why = f"host memory of {format_size(budget)} has room for more states"
    higher = with_tier(tiers, promoted, Tier.HOST)
    if moved := differences(parts, tiers, higher):
        notices.append(Remark(f"{why}; moved: {moved}"))
    tiers = higher
    classes = classes._replace(cache=classes.cache + parts.pages_nbytes(promoted))
    if request.inputs is None and inputs is not None:
        inputs = (whole - sum(classes)) // PAGE * PAGE  # and what weights and states do not use
    if request.weights_on_device is not None:  # weights that have moved to disk come and go, also where a CPU computes
        request = replace(request, device_memory=device_share(request.weights_on_device, parts, tiers))
    device_nbytes, device_need = divide_device(parts, mode, request, machine, tiers)
    # An explicit budget of the host includes inputs of blocks.
    in_host = sum(classes) + ((inputs or 0) if request.host_memory is not None else 0)
    available = machine.free_host + machine.weights_held
    peak = _peak(in_host, device_nbytes, beside, machine, parts)
    if request.device_memory is None and machine.host_addressable and sum(peak) > available:
        device_nbytes = max(device_need.least, (device_nbytes - sum(peak) + available) // PAGE * PAGE)
        peak = _peak(in_host, device_nbytes, beside, machine, parts)
    least = _peak(sum(least_host(parts, mode, request, machine)), device_need.least, beside, machine, parts)
    check_peak(peak, available, machine.limit, sum(least))
    tile_numel, tile_buffers, scratch_nbytes = tiles(parts, mode, tiers, classes.tiles)
    most = max(parts.trainable_numel, default=0)
    if request.tile is not None and tile_numel < min(most, _FEW):
        notices.append(
            f'"sub_group_size" {request.tile} cuts the updates of {most} elements into tiles of {tile_numel}, which '
            "takes several times as long as tiles of 16 MiB; leave the key out, or set it to a million or more"
        )
    return Placement(
        tiers=tiers,
        promoted=promoted,
        classes=classes,
        device_nbytes=device_nbytes,
        device_need=device_need,
        added=device_need.added(device_nbytes),
        tile_numel=tile_numel,
        tile_buffers=tile_buffers,
        scratch_nbytes=scratch_nbytes,
        inputs_nbytes=inputs,
        peak=peak,
        window_numel=window_nbytes(parts, tiers) // parts.gradient_dtype.itemsize,
        notices=tuple(notices),
    )


def _peak(
    host_nbytes: int, device_nbytes: int, beside: BesideBudgets, machine: MachineMemory, parts: Partitions
) -> PeakMemory:
    """Returns the host memory that a run needs, with budgets of these bytes. Its store has at most two slots."""
    states = (nbytes for row in parts.nbytes for state, nbytes in row.items() if state is not State.GRAD)
    stored = 2 * sum(states) if machine.drives else 0
    if machine.host_addressable:
        return PeakMemory.of(host_nbytes, device_nbytes, beside, stored)
    return PeakMemory(host_nbytes, device_nbytes if machine.unified else 0, *BesideBudgets(libraries=0))


def _fitting_tiers(
    parts: Partitions,
    mode: Mode,
    request: PlacementRequest,
    machine: MachineMemory,
    configured_tiers: TierMap,
    budget: int,
) -> TierMap:
    """Returns the first of `configured_tiers` and its demotions that fits into `budget` bytes of host memory.

    Raises `BudgetError` if no tier map fits.
    """
    tried: list[_Way] = []
    for way in _ways(parts, mode, request, machine, configured_tiers):
        if sum(way.least._replace(weights=way.most.weights)) <= budget:
            return way.tiers(configured_tiers)
        tried.append(way)
    # Reading the largest unit in chunks is slow, so it is the last resort, after all moves to DISK.
    for way in tried:
        if sum(way.least) <= budget:
            return way.tiers(configured_tiers)
    raise _budget_error(request, mode, budget, machine, min((way.least for way in tried), key=sum))


def _budget_error(
    request: PlacementRequest, mode: Mode, budget: int, machine: MachineMemory, least: HostBudget
) -> BudgetError:
    advice = "" if machine.drives else "; with an nvme_path, states and gradients that have no room would move there"
    pipeline = "a smaller sub_group_size lowers this"
    if mode.steps_whole:
        pipeline = f"which holds complete {'units' if mode.whole_units else 'matrices'}"
    needs = (
        f"{format_size(least.tiles)} for the update pipeline ({pipeline}), "
        f"{format_size(least.weights)} for host buffers of weights, {format_size(least.gradients + least.staging)} for "
        f"gradients in transit, {format_size(least.resident)} for gradients and states stored in host memory{advice}"
    )
    if request.host_memory is None:
        return BudgetError(
            f"this model needs at least {format_size(sum(least))} of host memory, {format_size(machine.free_host)} is "
            f"free, of which at most {format_size(budget)} is used by default: {needs}; a larger "
            '"host_memory" in "offload" takes more of the free memory'
        )
    taken = ""
    if machine.other_engines:
        taken = (
            f", less {format_size(machine.other_engines)} for other engines of this process (destroy() frees the "
            f"budget of an engine)"
        )
    need = sum(least) + machine.other_engines
    return BudgetError(
        f'"host_memory" is {format_size(request.host_memory)} ({request.host_memory} bytes){taken}, the least that '
        f"works is {format_size(need)} ({need} bytes): {needs}"
    )
