"""The home of every partition: which tier it comes back to between uses, decided from sizes alone.

    as configured ─► too much for the host budget: homes move down to DISK, one partition at a time
                 └─► room is left in the budget: states move up to HOST, a share of them that stays there

A step sweeps over all states and begins again with the first, which is what caches by recent use are worst at: so the
share of the states that lies in HOST is fixed. Weights at home on DISK have a cache as well, which the pager fills by
next use, since a forward and a backward are no sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.layout.flat_layout import WORD, UnitLayout
from offload.sizes import align_up, count_of, format_size
from offload.states import State, Tier
from offload.swapper.modes import Mode

Homes = tuple[Mapping[State, Tier], ...]
"""For each unit the home of each state that this rank has of it; of GRAD, where it waits for its update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """Bytes of each state of each unit that this rank holds. Units without trainable elements have a weight only."""

    nbytes: tuple[Mapping[State, int], ...]
    """GRAD in the dtype in which it waits for its update."""
    trainable_numel: tuple[int, ...]
    unit_nbytes: tuple[int, ...]
    """Bytes of the weights of each unit, all ranks' parts together."""
    largest_gradient: int
    """Bytes of the gradients of the largest unit as a backward makes them, all ranks' parts together."""
    gradient_dtype: torch.dtype
    alone: bool
    """Whether this is the only rank."""
    largest_parameter: int = 0
    """Elements of the largest one that trains."""
    frozen: tuple[int, ...] = ()
    """Bytes at the end of each WEIGHT that no update writes; empty is none at all."""

    @property
    def largest_unit(self) -> int:
        return max(self.unit_nbytes, default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What the config asks for. Counts are of elements, as in DeepSpeed's files; None leaves the choice to us."""

    weights: Tier
    states: Tier
    host_memory: int | None = None
    device_memory: int | None = None
    states_off_device: float = 1.0
    """The share of the states that leaves the device (`ratio`)."""
    cached_weights: int | None = None
    """Weights that have room in HOST beside their home on DISK (`max_in_cpu`, `buffer_count` times `buffer_size`)."""
    small_unit: int = 0
    """Units of at most so many elements stay on the device (`stage3_param_persistence_threshold`)."""
    live: int | None = None
    """Elements on the device at a time, beside those at home there (`stage3_max_live_parameters`)."""
    tile: int | None = None
    """Elements of a tile at most (`sub_group_size`)."""
    accumulation: int = 1
    """Micro-batches of a step."""


def partitions(
    layouts: Sequence[UnitLayout], mode: Mode, gradient_dtype: torch.dtype, rank: int, world_size: int
) -> Partitions:
    """This rank's bytes of every unit and state."""
    rows: list[Mapping[State, int]] = []
    trainable = [len(layout.trainable(rank, world_size)) for layout in layouts]
    for layout, numel in zip(layouts, trainable, strict=True):
        weights = numel + len(layout.frozen(rank, world_size))
        row = {State.WEIGHT: weights * mode.weight_dtype.itemsize}
        if numel:
            row |= {state: numel * dtype.itemsize for state, dtype in mode.states.items() if state is not State.WEIGHT}
            if State.PACKED in row:
                row[State.PACKED] = layout.packed_numel * WORD
            row = {state: nbytes for state, nbytes in row.items() if nbytes}
            row[State.GRAD] = numel * gradient_dtype.itemsize
        rows.append(row)
    itemsize = mode.weight_dtype.itemsize
    return Partitions(
        nbytes=tuple(rows),
        trainable_numel=tuple(trainable),
        unit_nbytes=tuple(layout.numel * itemsize for layout in layouts),
        largest_gradient=max((layout.trainable_stop * itemsize for layout in layouts), default=0),
        gradient_dtype=gradient_dtype,
        alone=world_size == 1,
        largest_parameter=max((s.numel for layout in layouts for s in layout.segments if s.trainable), default=0),
        frozen=tuple(len(layout.frozen(rank, world_size)) * itemsize for layout in layouts),
    )


def configured(parts: Partitions, wish: Wish, weight_itemsize: int) -> Homes:
    """Every partition where the config says, gradients in HOST."""
    on_device = (1.0 - wish.states_off_device) * sum(parts.trainable_numel)
    rows: list[Mapping[State, Tier]] = []
    passed = 0
    for row, numel, unit_nbytes in zip(parts.nbytes, parts.trainable_numel, parts.unit_nbytes, strict=True):
        small = unit_nbytes <= wish.small_unit * weight_itemsize
        states = Tier.DEVICE if passed + numel / 2 <= on_device else wish.states
        passed += numel
        homes = dict.fromkeys(row, states)
        homes[State.WEIGHT] = Tier.DEVICE if small else wish.weights
        if State.GRAD in row:
            homes[State.GRAD] = Tier.HOST
        rows.append(homes)
    return tuple(rows)


def gradients_on_device(parts: Partitions, homes: Homes, room: int) -> Homes:
    """`homes` with the gradients of units on the device that live there altogether, one after the other within `room`.

    There they are added up, and updated by the device's own kernel; in HOST they are, where they have no room.
    """
    found: list[tuple[int, State]] = []
    for unit, (row, nbytes) in enumerate(zip(homes, parts.nbytes, strict=True)):
        alone = State.GRAD in row and all(row[state] is Tier.DEVICE for state in row if state is not State.GRAD)
        if alone and align_up(nbytes[State.GRAD]) <= room:
            found.append((unit, State.GRAD))
            room -= align_up(nbytes[State.GRAD])
    return with_home(homes, found, Tier.DEVICE)


def to_add_up(parts: Partitions, homes: Homes) -> tuple[tuple[int, int], ...]:
    """The units whose gradients leave the device, and the bytes in which it could add them up over the micro-batches.

    Those that spill come first: each micro-batch would have them read and written again.
    """
    units = [unit for unit, row in enumerate(homes) if row.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE]
    units.sort(key=lambda unit: homes[unit][State.GRAD] is not Tier.DISK)
    return tuple((unit, align_up(parts.nbytes[unit][State.GRAD])) for unit in units)


def that_fit(totals: Iterable[tuple[int, int]], room: int) -> tuple[tuple[int, int], ...]:
    """Those of `totals`, units and bytes, that `room` is enough for, one after the other."""
    found: list[tuple[int, int]] = []
    for unit, nbytes in totals:
        if nbytes <= room:
            found.append((unit, nbytes))
            room -= nbytes
    return tuple(found)


_DOWN = (
    State.GRAD,
    State.EXP_AVG_SQ,
    State.EXP_AVG,
    State.SUM,
    State.MOMENTUM_BUFFER,
    State.PACKED,
    State.RESIDUAL,
    State.MASTER,
    State.WEIGHT,
)
"""What leaves HOST first, least used first: weights are read twice a step or more."""


def ways_down(homes: Homes) -> Iterator[Homes]:
    """`homes`, then with one partition more on DISK instead of in HOST each time, the last unit's first.

    Then the same with gradients in HOST: the windows through which they spill may take more than they save.
    """
    yield homes
    for order in (_DOWN, _DOWN[1:]):
        rows = [dict(row) for row in homes]
        for state in order:
            for row in reversed(rows):
                if row.get(state) is Tier.HOST:
                    row[state] = Tier.DISK
                    yield tuple(dict(each) for each in rows)


def to_raise(homes: Homes, parts: Partitions, room: int) -> tuple[tuple[int, State], ...]:
    """The states at home on DISK, unit after unit, for which `room` bytes in HOST are enough."""
    found: list[tuple[int, State]] = []
    for unit, (row, nbytes) in enumerate(zip(homes, parts.nbytes, strict=True)):
        for state in nbytes:
            if state in (State.WEIGHT, State.GRAD):
                continue
            if row[state] is Tier.DISK and align_up(nbytes[state]) <= room:
                found.append((unit, state))
                room -= align_up(nbytes[state])
    return tuple(found)


def with_home(homes: Homes, partitions: Iterable[tuple[int, State]], tier: Tier) -> Homes:
    """`homes` with some of them changed."""
    rows = [dict(row) for row in homes]
    for unit, state in partitions:
        rows[unit][state] = tier
    return tuple(rows)


def home_nbytes(parts: Partitions, homes: Homes, tier: Tier) -> int:
    """Bytes of all partitions at home in `tier`, in steps of 4096."""
    return sum(
        align_up(nbytes)
        for row, places in zip(parts.nbytes, homes, strict=True)
        for state, nbytes in row.items()
        if places[state] is tier
    )


def differences(parts: Partitions, before: Homes, after: Homes) -> str:
    """In words what has moved: "gradient of 3 units (1.2 GiB) to disk"; empty where nothing has."""
    moved: dict[tuple[State, Tier], list[int]] = {}
    for row, old, new in zip(parts.nbytes, before, after, strict=True):
        for state, nbytes in row.items():
            if old[state] is not new[state]:
                moved.setdefault((state, new[state]), []).append(nbytes)
    return ", ".join(
        f"{state.value} of {len(sizes)} of {count_of(len(parts.nbytes), 'unit')} ({format_size(sum(sizes))}) "
        f"to {tier.value}"
        for (state, tier), sizes in moved.items()
    )
