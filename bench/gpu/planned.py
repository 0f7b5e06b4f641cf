"""A model too large for the GPU, its states over host and disk as the planner has it, with as many layers as fit."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import offload
from bench.gpu.work import Work
from offload.errors import BudgetError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.memory import Memory, Room, settings, settle
from offload.sizes import format_size
from offload.swapper.memory.device_choice import open_device
from offload.swapper.memory.limits import free_host_memory

_HOST_SHARE = 0.8
"""Of what is free: libraries, and what the loop itself takes, need some."""
_DISK_SHARE = 0.95
_PLACEMENTS = (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))
"""Of weights and states. What goes to a drive moves up again as far as there is RAM."""


class Fitted(NamedTuple):
    """What of a model a machine has room for."""

    layers: int
    """0 where not even one fits."""
    settings: dict[str, Any]
    words: str


def fit(work: Work, room: Room) -> Fitted:
    """The config that holds most layers of the model: all in RAM, else over RAM and disk."""
    with offload.init():
        model: Any = work.build()
    whole = int(model.config.num_hidden_layers)
    least, most = 0, whole
    found: Memory | None = None
    while least < most:  # the most layers that have room
        middle = (least + most + 1) // 2
        memory = _settled(work._replace(layers=middle), room)
        if memory is None:
            most = middle - 1
        else:
            least, found = middle, memory
    has = f"of RAM {format_size(room.host)} and of disk {format_size(room.disk or 0)} are free"
    if found is None:
        return Fitted(0, {}, f"not one layer of {work.model} fits: {has}")
    takes = f"take {format_size(found.host)} of RAM and {format_size(found.stored + found.spilled)} of disk; {has}"
    what = "all" if least == whole else f"{least} of"
    return Fitted(least, _settings(work, room, found), f"{what} {whole} layers of {work.model} {takes}")


def room_of(work: Work) -> Room:
    """What this machine has for it."""
    device = open_device(work.device)
    disk = int(_DISK_SHARE * shutil.disk_usage(work.folder).free)
    return Room(int(_HOST_SHARE * free_host_memory()), device.free_bytes(), disk)


def _settled(work: Work, room: Room) -> Memory | None:
    """What goes where, None where it does not fit."""
    with offload.init():
        model = work.build()
    layouts = layouts_of(model, find_units(model))
    for tiers in _PLACEMENTS:
        try:
            memory = settle(layouts, _wish(work, tiers, room), room, work.accumulation)
        except BudgetError:
            continue
        if memory.stored + memory.spilled <= (room.disk or 0):
            return memory
    return None


def _wish(work: Work, tiers: tuple[str, str], room: Room) -> dict[str, Any]:
    return settings(
        *tiers,
        host_memory=room.host if "nvme" in tiers else None,
        durability="none",
        batch=work.batch_size,
        accumulation=work.accumulation,
        paths=[str(work.folder)],
    )


def _settings(work: Work, room: Room, memory: Memory) -> dict[str, Any]:
    zero = memory.config.zero_optimization
    content = _wish(work, (zero.offload_param.device, zero.offload_optimizer.device), room)
    content["offload"]["device"] = work.device.type
    return content
