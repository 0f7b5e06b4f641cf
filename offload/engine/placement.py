"""Where every state of every unit lives, and how much memory that takes: decided from sizes alone.

Pure functions. What they decide is carried out in `initialize`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from offload.engine.layout import UnitLayout
from offload.errors import BudgetError
from offload.sizes import MIB, PAGE, align_up, format_size
from offload.swapper.arena import Classes, check_budget
from offload.swapper.residency import Tier
from offload.swapper.states import Mode, State

TILE_BUFFERS = 3
STAGING_BUFFERS = 3
TILE_STEP = 2048
"""Elements: 4096 bytes of the smallest state."""

_STAGING_NBYTES = 16 * MIB
_TILE_NBYTES = range(16 * MIB, 32 * MIB + 1)
_DEVICE_UNITS = 3
_HOST_SHARE = 0.8


class Partitions(NamedTuple):
    """Bytes of each state of each unit that this rank holds. Units without trainable elements have a weight only."""

    nbytes: tuple[Mapping[State, int], ...]
    trainable_numel: tuple[int, ...]
    largest_unit: int
    """Bytes of the weights of the largest unit, all ranks' parts together."""
    largest_gradient: int
    """Bytes of the gradients of the largest unit as a backward makes them, all ranks' parts together."""
    alone: bool
    """Whether this is the only rank."""

    @property
    def largest_weight(self) -> int:
        return max((states[State.WEIGHT] for states in self.nbytes), default=0)


class Placement(NamedTuple):
    """The homes of this rank's partitions, and the memory that they and the work on them take."""

    weight_home: Tier
    state_home: Tier
    slots: int
    """Slots of each partition in the store: 2 durable, 1 written in place, 0 no store."""
    stored: tuple[Mapping[State, int], ...]
    """Bytes of each state that has slots; empty without a store."""
    classes: Classes
    device_nbytes: int

    def home(self, state: State) -> Tier:
        return self.weight_home if state is State.WEIGHT else self.state_home


def partitions(layouts: Sequence[UnitLayout], mode: Mode, rank: int, world_size: int) -> Partitions:
    """This rank's bytes of every unit and state."""
    rows: list[Mapping[State, int]] = []
    trainable = [len(layout.trainable(rank, world_size)) for layout in layouts]
    for layout, numel in zip(layouts, trainable, strict=True):
        weights = numel + len(layout.frozen(rank, world_size))
        row = {State.WEIGHT: weights * mode.weight_dtype.itemsize}
        if numel:
            row |= {state: numel * dtype.itemsize for state, dtype in mode.states.items() if state is not State.WEIGHT}
        rows.append(row)
    itemsize = mode.weight_dtype.itemsize
    return Partitions(
        tuple(rows),
        tuple(trainable),
        max((layout.numel * itemsize for layout in layouts), default=0),
        max((layout.trainable_stop * itemsize for layout in layouts), default=0),
        world_size == 1,
    )


def place(
    parts: Partitions,
    mode: Mode,
    weight_home: Tier,
    state_home: Tier,
    slots: int,
    gradient_dtype: torch.dtype,
    host_memory: int | None,
    device_memory: int | None,
    free_host: int,
    host_addressable: bool,
) -> Placement:
    """Give every byte its place, within `host_memory` and `device_memory` or what they default to.

    Raises `BudgetError` with the least that works.
    """
    homes = {tier: _home_nbytes(parts, tier, weight_home, state_home) for tier in Tier}
    classes = _cut_host(parts, mode, weight_home, homes[Tier.HOST], gradient_dtype, host_memory, host_addressable)
    if host_memory is None and sum(classes) > _HOST_SHARE * free_host:
        raise BudgetError(
            f"this model needs {format_size(sum(classes))} of host memory with its states where they are configured, "
            f"{format_size(free_host)} is free, of which at most 80 % may be taken; move states to nvme, or take "
            f'more by setting "host_memory" in the "offload" block'
        )
    if host_memory is not None and host_memory > free_host:
        raise BudgetError(
            f'"host_memory" is {format_size(host_memory)}, but only {format_size(free_host)} is free on this machine; '
            f"lower it, or leave it out to take what is needed"
        )
    on_device = 0 if weight_home is Tier.DEVICE and parts.alone else parts.largest_unit
    fixed = homes[Tier.DEVICE] + (0 if parts.alone else 2 * align_up(parts.largest_gradient))
    device_nbytes = fixed + _DEVICE_UNITS * on_device
    if device_memory is not None:
        check_budget(
            '"device_memory"',
            device_memory,
            fixed + on_device,
            "it must hold the states at home there, the largest unit and, with several ranks, twice its gradients",
        )
        device_nbytes = max(fixed, device_memory // PAGE * PAGE)
    stored: tuple[Mapping[State, int], ...] = ()
    if slots:
        in_place = {state for state in State if (weight_home if state is State.WEIGHT else state_home) is Tier.DISK}
        kept = set(State) if slots == 2 else in_place
        stored = tuple({state: n for state, n in row.items() if state in kept} for row in parts.nbytes)
    return Placement(weight_home, state_home, slots, stored, classes, device_nbytes)


def _home_nbytes(parts: Partitions, tier: Tier, weight_home: Tier, state_home: Tier) -> int:
    return sum(
        align_up(nbytes)
        for row in parts.nbytes
        for state, nbytes in row.items()
        if (weight_home if state is State.WEIGHT else state_home) is tier
    )


def _cut_host(
    parts: Partitions,
    mode: Mode,
    weight_home: Tier,
    home_nbytes: int,
    gradient_dtype: torch.dtype,
    host_memory: int | None,
    host_addressable: bool,
) -> Classes:
    """The classes of host leases: tiles shrink to fit, and what is left over is cache for weights."""
    whole = max(parts.trainable_numel, default=0) * mode.element_bytes
    step = TILE_BUFFERS * TILE_STEP * mode.element_bytes
    small, large = (TILE_BUFFERS * min(whole, nbytes) for nbytes in (_TILE_NBYTES[0], _TILE_NBYTES[-1]))
    small, large = (max(align_up(nbytes, step), step) for nbytes in (small, large))
    weights = 2 * parts.largest_weight if weight_home is Tier.DISK else 0
    gradients = sum(align_up(numel * gradient_dtype.itemsize) for numel in parts.trainable_numel)
    buffer = 0 if host_addressable else min(_STAGING_NBYTES, align_up(parts.largest_gradient))
    staging = STAGING_BUFFERS * buffer
    fixed = weights + gradients + home_nbytes + staging
    if host_memory is None:
        return Classes(large, weights, gradients, home_nbytes, staging)
    check_budget(
        '"host_memory"',
        host_memory,
        fixed + small,
        f"{format_size(small)} for the update pipeline, {format_size(weights)} for two leases of the largest unit's "
        f"weights, {format_size(gradients + staging)} for gradients, {format_size(home_nbytes)} for states at home "
        f"there",
    )
    tiles = min(large, (host_memory - fixed) // step * step)
    spare = (host_memory - fixed - tiles) // PAGE * PAGE if weight_home is Tier.DISK else 0
    return Classes(tiles, weights + spare, gradients, home_nbytes, staging)


def free_host_memory() -> int:
    """Bytes that this process may still take: what the machine has available, within its cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    for line in _read("/proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            folder, limit_name, used_name = f"/sys/fs/cgroup{path}", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = f"/sys/fs/cgroup/memory{path}"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside of a container the path may be that of the host: then the mount itself is our cgroup.
        for place in (folder, folder[: -len(path)]):
            limit, used = _read(f"{place}/{limit_name}").strip(), _read(f"{place}/{used_name}").strip()
            if limit.isdigit() and used.isdigit():
                free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
