"""Placement of one rank's partitions, and the memory for them and for the work on them, decided from sizes alone.

Pure functions; `initialize` carries out their decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from offload.errors import BudgetError
from offload.layout.device_need import DeviceNeed, device_fixed, largest_moving, least_holds, moving
from offload.layout.tiers import (
    Partitions,
    PlacementRequest,
    TierMap,
    configured,
    demotions,
    differences,
    gradients_on_device,
    inputs_nbytes,
    that_fit,
    tier_nbytes,
    to_add_up,
    to_promote,
    with_tier,
)
from offload.layout.tile_sizes import pipeline, tile_growth, tiles
from offload.notices import Remark
from offload.sizes import MIB, PAGE, align_up, format_size
from offload.states import State, Tier
from offload.swapper.memory.device_arena import check_budget
from offload.swapper.memory.host_arena import Classes
from offload.swapper.modes import ADAM, Mode
from offload.swapper.store import StoreSpec

STAGING_BUFFERS = 3
"""Host buffers through which gradients leave the device."""
WINDOWS = 3
"""Host buffers of gradients that spill to disk: one is filled while the others are written."""
CHUNK = 1 << 22
"""Elements of a gradient that one call adds or whose squares it sums: one number for all callers, for equal bits."""

_STREAM_NBYTES = 16 * MIB
"""Bytes of the least host buffer of weights. Larger units are read in chunks if two buffers of them do not fit."""
_WINDOW_NBYTES = 32 * MIB
"""Bytes of the largest host buffer of a gradient that spills."""
_DEVICE_UNITS = 3
"""Units of the largest size for which the device arena has room by default."""
HOST_SHARE = 0.8
"""Fraction of the free host memory that the default budget takes."""
_ARENA_SHARE = 0.25
"""Fraction of the free host memory that the default device arena takes at most if the device computes there."""
_GRADIENT_SHARE = 0.75
"""Fraction of the free device memory for resident states, paged units and gradients: activations need the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory and devices of the machine on which states are placed; sizes in bytes."""

    free_host: int
    free_device: int
    """0 if the compute device is the host itself."""
    host_addressable: bool
    """True if the host can compute on the device's memory."""
    drives: bool
    """True if the run has a disk to which partitions may be moved."""
    other_engines: int = 0
    """Bytes of the host budget that other engines of this process take already."""
    device_kernels: bool = False
    """True if the device has its own kernels for AdamW and for sums of squares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Tiers of this rank's partitions, and the memory for them and for the work on them."""

    tiers: TierMap
    promoted: tuple[tuple[int, State], ...]
    """Partitions promoted from DISK to HOST. They use memory of the cache, and leave if another engine needs it."""
    classes: Classes
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
    """Bytes of host memory, beside `classes`, for inputs of blocks that are computed again; None: what is free."""
    window_numel: int
    """Elements of a spilling gradient that are in HOST at a time; 0 if no gradient spills."""
    notices: tuple[str, ...]

    @property
    def on_disk(self) -> bool:
        """True if the tier of any state is DISK, or would be DISK without promotion. Gradients do not count."""
        in_tier = (tier is Tier.DISK for row in self.tiers for state, tier in row.items() if state is not State.GRAD)
        return bool(self.promoted) or any(in_tier)

    @property
    def spilled(self) -> tuple[int, ...]:
        """Units whose gradients wait on DISK."""
        return tuple(unit for unit, row in enumerate(self.tiers) if row.get(State.GRAD) is Tier.DISK)

    @property
    def moving_nbytes(self) -> int:
        """Bytes of the device arena without those of gradients that accumulate there (`added`)."""
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
        nbytes = sum(align_up(parts.nbytes[unit][state]) for unit, state in self.promoted)
        classes = self.classes._replace(resident=self.classes.resident + nbytes, cache=self.classes.cache - nbytes)
        return replace(self, classes=classes, promoted=())

    def stored(self, parts: Partitions, slots: int) -> tuple[Mapping[State, int], ...]:
        """Returns the bytes of each state that the store keeps, unit by unit; empty if there is no store.

        Args:
            parts: this rank's partitions.
            slots: 2 for a durable store, 1 for a store written in place, 0 for none.
        """
        if not slots:
            return ()
        return tuple(
            {
                state: nbytes
                for state, nbytes in row.items()
                if state is not State.GRAD and (slots == 2 or tiers[state] is Tier.DISK)
            }
            for row, tiers in zip(parts.nbytes, self.tiers, strict=True)
        )

    def store(
        self, parts: Partitions, slots: int, fingerprint: Mapping[str, Any] = {}, about: Mapping[str, Any] = {}
    ) -> StoreSpec:
        """Returns the specification of a store; `slots` as in `stored`, the other arguments as in `StoreSpec`."""
        return StoreSpec(self.stored(parts, slots), slots, fingerprint, about, parts.frozen if slots else ())


class _Need(NamedTuple):
    """Bytes of each class of host buffers for given tiers: the least that works, and the most that is useful."""

    least: Classes
    most: Classes


def place(parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine) -> Placement:
    """Returns a placement of every byte within both budgets, or within their defaults.

    Raises:
        BudgetError: a budget is too small (the message names the smallest that works), or exceeds the free memory.
    """
    budget = int(HOST_SHARE * machine.free_host)
    # All engines of the process share an explicit host budget.
    if request.host_memory is not None:
        budget = max(request.host_memory - machine.other_engines, 0) // PAGE * PAGE
    if budget > machine.free_host:
        raise BudgetError(
            f'"host_memory" leaves {format_size(budget)} for this engine, but only {format_size(machine.free_host)} is '
            f"free on this machine; lower it, or leave it out for a budget of the bytes needed"
        )
    inputs = request.inputs
    if request.host_memory is not None and inputs != 0:
        inputs = inputs_nbytes(request, budget - sum(least_host(parts, mode, request, machine)))
        budget -= inputs
    configured_tiers = configured(parts, request, mode.weight_dtype.itemsize)
    # The device has a kernel for AdamW only; any other optimizer needs the gradients on the host.
    if machine.device_kernels and mode.optimizer == ADAM:
        configured_tiers = gradients_on_device(
            parts, configured_tiers, _device_spare(parts, request, machine, configured_tiers)
        )
    tiers = _fitting_tiers(parts, mode, request, machine, configured_tiers, budget)
    notices: list[str] = []
    if moved := differences(parts, configured_tiers, tiers):
        notices.append(
            f"host memory of {format_size(budget)} has no room for all states configured for it; moved: {moved}"
        )
    need = _needs(parts, mode, request, machine, tiers)
    classes = _divide_host(parts, request, mode, tiers, need, budget)
    promoted: tuple[tuple[int, State], ...] = ()
    if request.host_memory is not None:
        # Without an explicit budget a run takes only the memory that it needs, so nothing is promoted.
        promoted = to_promote(tiers, parts, budget - sum(classes))
        higher = with_tier(tiers, promoted, Tier.HOST)
        if moved := differences(parts, tiers, higher):
            notices.append(Remark(f"host memory of {format_size(budget)} has room for more states; moved: {moved}"))
        tiers = higher
        more = sum(align_up(parts.nbytes[unit][state]) for unit, state in promoted)
        classes = classes._replace(cache=classes.cache + more)
    device_nbytes, device_need = _divide_device(parts, mode, request, machine, tiers)
    # Both arenas are in the same host memory: each may fit alone although the two together do not.
    if machine.host_addressable and sum(classes) + device_nbytes > machine.free_host:
        raise BudgetError(
            f"the compute device is the CPU, so its budget of {format_size(device_nbytes)} is host memory beside the "
            f"host budget of {format_size(sum(classes))}; {format_size(machine.free_host)} is free: lower "
            f'"device_memory" or "host_memory", or move states from the device to cpu or nvme'
        )
    tile_numel, tile_buffers, scratch_nbytes = tiles(parts, mode, tiers, classes.tiles)
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
        window_numel=_window_nbytes(parts, tiers) // parts.gradient_dtype.itemsize,
        notices=tuple(notices),
    )


# -- host ---------------------------------------------------------------------------------------------


def least_host(parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine) -> Classes:
    """Returns the smallest classes of host buffers that work: after any demotions, with large units read in chunks."""
    configured_tiers = configured(parts, request, mode.weight_dtype.itemsize)
    ways = demotions(configured_tiers) if machine.drives else iter((configured_tiers,))
    return min((_needs(parts, mode, request, machine, tiers).least for tiers in ways), key=sum)


def _fitting_tiers(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, configured_tiers: TierMap, budget: int
) -> TierMap:
    """Returns the first of `configured_tiers` and its demotions that fits into `budget` bytes of host memory.

    Raises:
        BudgetError: no tier map fits.
    """
    tried: list[tuple[TierMap, Classes]] = []
    for tiers in demotions(configured_tiers) if machine.drives else (configured_tiers,):
        need = _needs(parts, mode, request, machine, tiers)
        if sum(need.least._replace(weights=need.most.weights)) <= budget:
            return tiers
        tried.append((tiers, need.least))
    # Reading the largest unit in chunks is slow, so it is the last resort, after all moves to DISK.
    for tiers, least in tried:
        if sum(least) <= budget:
            return tiers
    raise _budget_error(request, mode, budget, machine, min((least for _, least in tried), key=sum))


def _budget_error(request: PlacementRequest, mode: Mode, budget: int, machine: Machine, least: Classes) -> BudgetError:
    """Returns the error that names the budget, the smallest one that works, and the classes of the latter (`least`)."""
    advice = "" if machine.drives else "; with an nvme_path, states and gradients that have no room would move there"
    more = "" if machine.drives else "move states to nvme, or "
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
            f'free, of which at most 80 % is used by default: {needs}; {more}set a larger "host_memory" in "offload"'
        )
    others = ""
    if machine.other_engines:
        others = (
            f", less {format_size(machine.other_engines)} for other engines of this process (destroy() frees the "
            f"budget of an engine)"
        )
    need = sum(least) + machine.other_engines
    return BudgetError(
        f'"host_memory" is {format_size(request.host_memory)} ({request.host_memory} bytes){others}, the least that '
        f"works is {format_size(need)} ({need} bytes): {needs}"
    )


def _needs(parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, tiers: TierMap) -> _Need:
    """Returns the bytes of each class of host buffers under `tiers`."""
    small, large = pipeline(parts, mode, request, tiers)
    largest = max((n for _, n in _disk_weights(parts, tiers)), default=0)
    buffer = 0 if machine.host_addressable else min(CHUNK * 4, align_up(2 * parts.largest_gradient))
    gradients = WINDOWS * align_up(_window_nbytes(parts, tiers))
    kept, staging = tier_nbytes(parts, tiers, Tier.HOST), STAGING_BUFFERS * buffer
    # Two buffers of weights: one is uploaded while the next is read.
    return _Need(
        Classes(small, 2 * align_up(min(largest, _STREAM_NBYTES)), gradients, kept, staging),
        Classes(large, 2 * align_up(largest), gradients, kept, staging),
    )


def _divide_host(
    parts: Partitions, request: PlacementRequest, mode: Mode, tiers: TierMap, need: _Need, budget: int
) -> Classes:
    """Returns the classes of host buffers within `budget`, which must hold at least `need.least`."""
    least, most = need
    # Spare memory goes first to weights, up to two buffers of the largest unit, then to tiles, then to the cache.
    room = budget - sum(least)
    weights = min(most.weights, (least.weights + room) // (2 * PAGE) * (2 * PAGE))
    room -= weights - least.weights
    step = tile_growth(parts, mode, tiers)
    tiles = min(most.tiles, least.tiles + (room // step * step if step else 0))
    room -= tiles - least.tiles
    cache = _cacheable(parts, tiers, weights)
    # Without an explicit budget, or with a limit in the config, the cache holds no more than the config asks for.
    if request.host_memory is None or request.cached_weights is not None:
        cache = min(cache, max((request.cached_weights or 0) * mode.weight_dtype.itemsize - weights, 0))
    return least._replace(tiles=tiles, weights=weights, cache=min(cache, room) // PAGE * PAGE)


def _window_nbytes(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of one window of spilling gradients; 0 if none spills."""
    spilled = [
        row[State.GRAD]
        for row, row_tiers in zip(parts.nbytes, tiers, strict=True)
        if row_tiers.get(State.GRAD) is Tier.DISK
    ]
    return min(max(spilled, default=0), max(_WINDOW_NBYTES, CHUNK * parts.gradient_dtype.itemsize))


def _disk_weights(parts: Partitions, tiers: TierMap) -> list[tuple[int, int]]:
    """Returns unit and bytes of each WEIGHT partition whose tier is DISK."""
    return [
        (unit, align_up(row[State.WEIGHT]))
        for unit, (row, row_tiers) in enumerate(zip(parts.nbytes, tiers, strict=True))
        if row_tiers[State.WEIGHT] is Tier.DISK
    ]


def _cacheable(parts: Partitions, tiers: TierMap, weights: int) -> int:
    """Returns the bytes, beyond `weights` bytes of buffers, that a cache of all weights on DISK would fill."""
    return max(sum(nbytes for _, nbytes in _disk_weights(parts, tiers)) - weights, 0)


# -- device -------------------------------------------------------------------------------------------


def _divide_device(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, tiers: TierMap
) -> tuple[int, DeviceNeed]:
    """Returns the initial bytes of the device arena, and the bounds of its size."""
    fixed, largest = device_fixed(parts, tiers), largest_moving(parts, tiers)
    # All paged units plus room for one more of any size, so that gaps between units force no eviction.
    whole = max(_DEVICE_UNITS * largest, sum(moving(parts, tiers)) + largest)
    live = whole if request.live is None else max(largest, align_up(request.live * mode.weight_dtype.itemsize))
    weights = min(whole, live)
    # Where whole gradients add up before they are reduced, a step has one partition of each: there is no other sum.
    adds_up = request.accumulation > 1 and not machine.host_addressable and not parts.whole_gradients
    totals = to_add_up(parts, tiers) if adds_up else ()
    # Gradients on the device are an optimization that the least budget need not hold.
    in_host = with_tier(tiers, ((unit, State.GRAD) for unit, row in enumerate(tiers) if State.GRAD in row), Tier.HOST)
    least = device_fixed(parts, in_host) + largest
    if request.device_memory is not None:
        check_budget(
            '"device_memory"',
            request.device_memory,
            least,
            least_holds(parts),
        )
        room = max(0, request.device_memory // PAGE * PAGE - fixed)
        if request.live is not None:
            beside = sum(nbytes for _, nbytes in that_fit(totals, room - weights))
            room = min(room, max(live, weights + beside))
        most = room
    else:
        # By default the arena begins small and grows once the first step has shown the memory of the activations.
        room = most = min(_DEVICE_UNITS * largest, live)
        if machine.host_addressable:  # the host budget, activations and gradients come out of the same memory
            room = most = max(largest, min(room, int(_ARENA_SHARE * machine.free_host) // PAGE * PAGE))
        else:
            most = weights + sum(nbytes for _, nbytes in totals)
    need = DeviceNeed(least=least, most=fixed + most, unit=largest, weights=fixed + weights, totals=totals)
    return fixed + room, need


def _device_spare(parts: Partitions, request: PlacementRequest, machine: Machine, tiers: TierMap) -> int:
    """Returns the bytes for gradients on the device: the rest of an explicit budget or of `_GRADIENT_SHARE`."""
    fixed, largest = device_fixed(parts, tiers), largest_moving(parts, tiers)
    if request.device_memory is not None:
        return request.device_memory // PAGE * PAGE - fixed - largest
    return int(_GRADIENT_SHARE * machine.free_device) - fixed - _DEVICE_UNITS * largest
