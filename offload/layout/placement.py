"""How much memory the homes of all partitions take, and the work on them: decided from sizes alone.

Pure functions. What they decide is carried out in `initialize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from offload.errors import BudgetError
from offload.layout.device_need import DeviceNeed
from offload.layout.tiers import (
    Homes,
    Partitions,
    Wish,
    configured,
    differences,
    gradients_on_device,
    home_nbytes,
    that_fit,
    to_add_up,
    to_raise,
    ways_down,
    with_home,
)
from offload.layout.tile_sizes import pipeline, tile_growth, tiles
from offload.notices import Remark
from offload.sizes import MIB, PAGE, align_up, format_size
from offload.states import State, Tier
from offload.swapper.memory.device_arena import check_budget
from offload.swapper.memory.host_arena import Classes
from offload.swapper.modes import ADAM, TORCH, Mode
from offload.swapper.store import StoreSpec

STAGING_BUFFERS = 3
WINDOWS = 3
"""Buffers of gradients that spill: one is filled while the others are written."""
CHUNK = 1 << 22
"""Elements of a parameter's gradient that are added, and whose squares are summed, at a time: everywhere the same."""

_STREAM_NBYTES = 16 * MIB
"""A lease of weights where there is no room for two of the largest unit, which then comes piece by piece."""
_WINDOW_NBYTES = 32 * MIB
_DEVICE_UNITS = 3
_HOST_SHARE = 0.8
_GRADIENT_SHARE = 0.75
"""Of what is free on the device, for all that lives there and its gradients: activations need the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is to place things in."""

    free_host: int
    free_device: int
    """0 where the compute device is the host itself."""
    host_addressable: bool
    """Whether the host can work on the device's memory."""
    drives: bool
    """Whether there is a disk to which homes may move."""
    other_engines: int = 0
    """Bytes of the host budget that engines of this process need already."""
    device_kernels: bool = False
    """Whether the device has a kernel of its own for AdamW, and for sums of squares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The homes of this rank's partitions, and the memory that they and the work on them take."""

    homes: Homes
    raised: tuple[tuple[int, State], ...]
    """Partitions whose home was moved up, into the memory of the cache: they go when another engine needs it."""
    classes: Classes
    device_nbytes: int
    device_need: DeviceNeed
    added: tuple[tuple[int, int], ...]
    """Units whose gradients are added up on the device and leave it once a step, and bytes of the arena for each."""
    tile_numel: int
    tile_buffers: int
    """Tiles that are read, computed or written at a time."""
    scratch_nbytes: int
    """Of the class of tiles, for an optimizer of torch: a master and a gradient in fp32, of the largest parameter."""
    window_numel: int
    """Elements of a gradient that are in HOST together where it spills; 0 where none does."""
    notices: tuple[str, ...]

    @property
    def on_disk(self) -> bool:
        """Whether anything that outlives a step is at home there, or would be without room to spare."""
        at_home = (tier is Tier.DISK for row in self.homes for state, tier in row.items() if state is not State.GRAD)
        return bool(self.raised) or any(at_home)

    @property
    def spilled(self) -> tuple[int, ...]:
        """The units whose gradients wait on DISK."""
        return tuple(unit for unit, row in enumerate(self.homes) if row.get(State.GRAD) is Tier.DISK)

    @property
    def moving_nbytes(self) -> int:
        """Bytes of the device arena that have no total of a gradient."""
        return self.device_nbytes - sum(nbytes for _, nbytes in self.added)

    def grown(self, nbytes: int) -> Placement:
        """With so much more of the device, as after a first step."""
        device_nbytes = self.device_nbytes + nbytes
        return replace(self, device_nbytes=device_nbytes, added=self.device_need.added(device_nbytes))

    def tiers(self, *states: State) -> str:
        """Where these states are, in words: "disk", or "host and disk"."""
        return " and ".join(
            tier.value for tier in Tier if any(row.get(state) is tier for row in self.homes for state in states)
        )

    def settled(self, parts: Partitions) -> Placement:
        """For a store that does not keep what is at home above it: what was raised stays where it is."""
        nbytes = sum(align_up(parts.nbytes[unit][state]) for unit, state in self.raised)
        classes = self.classes._replace(homes=self.classes.homes + nbytes, cache=self.classes.cache - nbytes)
        return replace(self, classes=classes, raised=())

    def stored(self, parts: Partitions, slots: int) -> tuple[Mapping[State, int], ...]:
        """Bytes of each state that a store of so many slots keeps: 2 durable, 1 in place, 0 where there is none."""
        if not slots:
            return ()
        return tuple(
            {
                state: nbytes
                for state, nbytes in row.items()
                if state is not State.GRAD and (slots == 2 or homes[state] is Tier.DISK)
            }
            for row, homes in zip(parts.nbytes, self.homes, strict=True)
        )

    def store(
        self, parts: Partitions, slots: int, fingerprint: Mapping[str, Any] = {}, about: Mapping[str, Any] = {}
    ) -> StoreSpec:
        """What a store of so many slots holds."""
        return StoreSpec(self.stored(parts, slots), slots, fingerprint, about, parts.frozen if slots else ())


class _Need(NamedTuple):
    """Bytes of each class with certain homes: the least that works, and what makes it fast."""

    least: Classes
    most: Classes


def place(parts: Partitions, mode: Mode, wish: Wish, machine: Machine) -> Placement:
    """Give every byte its place, within both budgets or what they default to.

    Raises `BudgetError` with the least that works.
    """
    budget = int(_HOST_SHARE * machine.free_host)
    if wish.host_memory is not None:
        budget = max(wish.host_memory - machine.other_engines, 0) // PAGE * PAGE
    if budget > machine.free_host:
        raise BudgetError(
            f'"host_memory" is {format_size(budget)}, but only {format_size(machine.free_host)} is free on this '
            f"machine; lower it, or leave it out to take what is needed"
        )
    asked = configured(parts, wish, mode.weight_dtype.itemsize)
    if machine.device_kernels and mode.optimizer == ADAM:
        asked = gradients_on_device(parts, asked, _device_spare(parts, wish, machine, asked))
    homes = _that_fit(parts, mode, wish, machine, asked, budget)
    notices: list[str] = []
    if moved := differences(parts, asked, homes):
        notices.append(f"host memory of {format_size(budget)} has no room for all that is at home there: {moved}")
    need = _needs(parts, mode, wish, machine, homes)
    classes = _cut(parts, wish, mode, homes, need, budget)
    raised: tuple[tuple[int, State], ...] = ()
    if wish.host_memory is not None:
        raised = to_raise(homes, parts, budget - sum(classes))
        higher = with_home(homes, raised, Tier.HOST)
        if moved := differences(parts, homes, higher):
            notices.append(Remark(f"host memory of {format_size(budget)} has room for more: {moved}"))
        homes = higher
        more = sum(align_up(parts.nbytes[unit][state]) for unit, state in raised)
        classes = classes._replace(cache=classes.cache + more)
    device_nbytes, device_need = _cut_device(parts, mode, wish, machine, homes)
    if machine.host_addressable and sum(classes) + device_nbytes > machine.free_host:
        raise BudgetError(
            f"the compute device is the CPU, so its budget of {format_size(device_nbytes)} is host memory beside the "
            f"host budget of {format_size(sum(classes))}; {format_size(machine.free_host)} is free: lower "
            f'"device_memory" or "host_memory", or move homes from the device to cpu or nvme'
        )
    tile_numel, tile_buffers, scratch_nbytes = tiles(parts, mode, homes, classes.tiles)
    return Placement(
        homes=homes,
        raised=raised,
        classes=classes,
        device_nbytes=device_nbytes,
        device_need=device_need,
        added=device_need.added(device_nbytes),
        tile_numel=tile_numel,
        tile_buffers=tile_buffers,
        scratch_nbytes=scratch_nbytes,
        window_numel=_window_nbytes(parts, homes) // parts.gradient_dtype.itemsize,
        notices=tuple(notices),
    )


# -- host ---------------------------------------------------------------------------------------------


def least_host(parts: Partitions, mode: Mode, wish: Wish, machine: Machine) -> Classes:
    """The least host memory that works: homes that may move are on DISK, the largest unit comes in pieces."""
    asked = configured(parts, wish, mode.weight_dtype.itemsize)
    ways = ways_down(asked) if machine.drives else iter((asked,))
    return min((_needs(parts, mode, wish, machine, homes).least for homes in ways), key=sum)


def _that_fit(parts: Partitions, mode: Mode, wish: Wish, machine: Machine, asked: Homes, budget: int) -> Homes:
    """`asked`, or the nearest below them that the budget holds; the largest unit comes in pieces only at the last."""
    tried: list[tuple[Homes, Classes]] = []
    for homes in ways_down(asked) if machine.drives else (asked,):
        need = _needs(parts, mode, wish, machine, homes)
        if sum(need.least._replace(weights=need.most.weights)) <= budget:
            return homes
        tried.append((homes, need.least))
    for homes, least in tried:
        if sum(least) <= budget:
            return homes
    raise _too_small(wish, mode, budget, machine, min((least for _, least in tried), key=sum))


def _too_small(wish: Wish, mode: Mode, budget: int, machine: Machine, least: Classes) -> BudgetError:
    advice = "" if machine.drives else "; with an nvme_path, states and gradients that have no room would move there"
    pipeline = "which takes whole units" if mode.optimizer == TORCH else "sub_group_size makes it smaller"
    what = (
        f"{format_size(least.tiles)} for the update pipeline ({pipeline}), "
        f"{format_size(least.weights)} for leases of weights, {format_size(least.gradients + least.staging)} for "
        f"gradients on their way, {format_size(least.homes)} for gradients and states at home there{advice}"
    )
    if wish.host_memory is None:
        return BudgetError(
            f"this model needs {format_size(sum(least))} of host memory with its states where they are configured, "
            f"{format_size(machine.free_host)} is free, of which at most 80 % may be taken: {what}; move states to "
            f'nvme, or take more by setting "host_memory" in the "offload" block'
        )
    others = ""
    if machine.other_engines:
        others = (
            f", less {format_size(machine.other_engines)} for other engines of this process (destroy() gives back what "
            f"one has)"
        )
    need = sum(least) + machine.other_engines
    return BudgetError(
        f'"host_memory" is {format_size(wish.host_memory)} ({wish.host_memory} bytes){others}, the least that works is '
        f"{format_size(need)} ({need} bytes): {what}"
    )


def _needs(parts: Partitions, mode: Mode, wish: Wish, machine: Machine, homes: Homes) -> _Need:
    small, large = pipeline(parts, mode, wish, homes)
    largest = max((n for _, n in _disk_weights(parts, homes)), default=0)
    buffer = 0 if machine.host_addressable else min(CHUNK * 4, align_up(2 * parts.largest_gradient))
    gradients = WINDOWS * align_up(_window_nbytes(parts, homes))
    kept, staging = home_nbytes(parts, homes, Tier.HOST), STAGING_BUFFERS * buffer
    return _Need(
        Classes(small, 2 * align_up(min(largest, _STREAM_NBYTES)), gradients, kept, staging),
        Classes(large, 2 * align_up(largest), gradients, kept, staging),
    )


def _cut(parts: Partitions, wish: Wish, mode: Mode, homes: Homes, need: _Need, budget: int) -> Classes:
    """The classes of host leases: leases of weights grow to two of the largest unit, then tiles, then the cache."""
    least, most = need
    room = budget - sum(least)
    weights = min(most.weights, (least.weights + room) // (2 * PAGE) * (2 * PAGE))
    room -= weights - least.weights
    step = tile_growth(parts, mode, homes)
    tiles = min(most.tiles, least.tiles + (room // step * step if step else 0))
    room -= tiles - least.tiles
    cache = _cacheable(parts, homes, weights)
    if wish.host_memory is None or wish.cached_weights is not None:
        cache = min(cache, max((wish.cached_weights or 0) * mode.weight_dtype.itemsize - weights, 0))
    return least._replace(tiles=tiles, weights=weights, cache=min(cache, room) // PAGE * PAGE)


def _window_nbytes(parts: Partitions, homes: Homes) -> int:
    spilled = [
        row[State.GRAD] for row, home in zip(parts.nbytes, homes, strict=True) if home.get(State.GRAD) is Tier.DISK
    ]
    return min(max(spilled, default=0), max(_WINDOW_NBYTES, CHUNK * parts.gradient_dtype.itemsize))


def _disk_weights(parts: Partitions, homes: Homes) -> list[tuple[int, int]]:
    """Unit and bytes of each WEIGHT partition at home on DISK."""
    return [
        (unit, align_up(row[State.WEIGHT]))
        for unit, (row, home) in enumerate(zip(parts.nbytes, homes, strict=True))
        if home[State.WEIGHT] is Tier.DISK
    ]


def _cacheable(parts: Partitions, homes: Homes, weights: int) -> int:
    """Bytes beyond `weights` that a cache of all weights on DISK would fill."""
    return max(sum(nbytes for _, nbytes in _disk_weights(parts, homes)) - weights, 0)


# -- device -------------------------------------------------------------------------------------------


def _cut_device(parts: Partitions, mode: Mode, wish: Wish, machine: Machine, homes: Homes) -> tuple[int, DeviceNeed]:
    """Bytes of the device arena at first, and what it needs: homes, units that come and go, gradients to be reduced."""
    fixed, largest = _device_fixed(parts, homes), _largest_moving(parts, homes)
    whole = max(_DEVICE_UNITS * largest, sum(_moving(parts, homes)) + largest)
    live = whole if wish.live is None else max(largest, align_up(wish.live * mode.weight_dtype.itemsize))
    weights = min(whole, live)
    totals = to_add_up(parts, homes) if wish.accumulation > 1 and not machine.host_addressable else ()
    in_host = with_home(homes, ((unit, State.GRAD) for unit, row in enumerate(homes) if State.GRAD in row), Tier.HOST)
    least = _device_fixed(parts, in_host) + largest
    if wish.device_memory is not None:
        check_budget(
            '"device_memory"',
            wish.device_memory,
            least,
            "it must hold the states at home there, the largest unit and, with several ranks, twice its gradients",
        )
        room = max(0, wish.device_memory // PAGE * PAGE - fixed)
        if wish.live is not None:
            beside = sum(nbytes for _, nbytes in that_fit(totals, room - weights))
            room = min(room, max(live, weights + beside))
        most = room
    else:
        room = most = min(_DEVICE_UNITS * largest, live)
        if not machine.host_addressable:
            most = weights + sum(nbytes for _, nbytes in totals)
    need = DeviceNeed(least=least, most=fixed + most, unit=largest, weights=fixed + weights, totals=totals)
    return fixed + room, need


def _device_spare(parts: Partitions, wish: Wish, machine: Machine, homes: Homes) -> int:
    """Bytes of the device that gradients may take: what an explicit budget leaves, or nearly all that is free."""
    fixed, largest = _device_fixed(parts, homes), _largest_moving(parts, homes)
    if wish.device_memory is not None:
        return wish.device_memory // PAGE * PAGE - fixed - largest
    return int(_GRADIENT_SHARE * machine.free_device) - fixed - _DEVICE_UNITS * largest


def _device_fixed(parts: Partitions, homes: Homes) -> int:
    """Bytes of what stays on the device: homes, and with several ranks what gradients are reduced in."""
    return home_nbytes(parts, homes, Tier.DEVICE) + (0 if parts.alone else 2 * align_up(parts.largest_gradient))


def _moving(parts: Partitions, homes: Homes) -> list[int]:
    """Bytes of each unit that comes to the device and goes."""
    return [
        align_up(nbytes)
        for nbytes, home in zip(parts.unit_nbytes, homes, strict=True)
        if not (home[State.WEIGHT] is Tier.DEVICE and parts.alone)
    ]


def _largest_moving(parts: Partitions, homes: Homes) -> int:
    return max(_moving(parts, homes), default=0)
