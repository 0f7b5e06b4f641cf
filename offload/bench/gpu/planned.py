"""A model too large for the GPU, with as many layers as fit; the planner places its states on host and disk."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import torch

import offload
from offload.bench.gpu.work import StepSize, Work
from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.activations.budgets import activations
from offload.planner.activations.load import Load
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import from_name
from offload.sizes import format_size
from offload.swapper.memory.device import open_device
from offload.swapper.memory.limits import free_host_memory

_HOST_SHARE = 0.8
"""Fraction of the free RAM that the run may take. Libraries and the loop itself need the rest."""
_DISK_SHARE = 0.95
"""Fraction of the free disk that the run may take."""
_PLACEMENTS = (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))
"""Devices of weights and of states. Partitions on nvme are promoted into RAM as far as there is room."""


_GPU_SHARE = 0.9
"""Fraction of the GPU's memory that states and activations may take."""
_OF_A_PARAMETER = 14
"""Bytes of a parameter in none/none: weight and gradient in bf16, low bits of the master, and two moments in fp32."""
_STEPS = (
    StepSize(8, 4096),
    *(StepSize(8, tokens, recompute=True) for tokens in (4096, 2048, 1024, 512)),
    *(StepSize(sequences, 512, recompute=True) for sequences in (4, 2, 1)),
)
"""Steps to try, the largest first."""


class Fitted(NamedTuple):
    """The layers of a model that a machine has room for."""

    layers: int
    """0 if not even one fits."""
    settings: dict[str, Any]
    words: str


def fit(work: Work, room: Room) -> Fitted:
    """Returns the largest number of layers that fit and their config: all in RAM, or else in RAM and on disk."""
    with offload.init():
        model: Any = work.build()
    whole = int(model.config.num_hidden_layers)
    least, most = 0, whole
    found: Memory | None = None
    while least < most:  # a bisection for the most layers that fit
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


def largest_step(model: str, memory: int) -> StepSize:
    """Returns the largest size of a step with which weights, states and activations of a model fit on a GPU.

    If none fits, returns the smallest. The bytes of none/none decide, so that all placements have the same step.

    Args:
        model: a preset.
        memory: bytes of the GPU.
    """
    for size in _STEPS:
        try:
            shape = from_name(model, size.seq_len, torch.bfloat16)
        except ConfigError:  # more tokens than the model has positions
            continue
        beside = activations(shape, Load(size.batch_size, recompute=size.recompute))
        if _OF_A_PARAMETER * shape.parameters + beside <= _GPU_SHARE * memory:
            return size
    return _STEPS[-1]


def room_of(work: Work) -> Room:
    """Returns the free memory and disk of this machine that a run may take."""
    device = open_device(work.device)
    disk = int(_DISK_SHARE * shutil.disk_usage(work.folder).free)
    return Room(int(_HOST_SHARE * free_host_memory()), device.free_bytes(), disk)


def _settled(work: Work, room: Room) -> Memory | None:
    """Returns the memory of a run, or None if it does not fit."""
    with offload.init():
        model = work.build()
    layouts = layouts_of(model, find_units(model))
    for tiers in _PLACEMENTS:
        try:
            memory = settle(layouts, _config_of(work, tiers, room), room, work.accumulation)
        except BudgetError:
            continue
        if memory.stored + memory.spilled <= (room.disk or 0):
            return memory
    return None


def _config_of(work: Work, tiers: tuple[str, str], room: Room) -> dict[str, Any]:
    return settings(
        *tiers,
        host_memory=room.host if "nvme" in tiers else None,
        durability="none",
        batch=work.batch_size,
        accumulation=work.accumulation,
        paths=[str(work.folder)],
        moments=work.moments,
        master=work.master,
    )


def _settings(work: Work, room: Room, memory: Memory) -> dict[str, Any]:
    zero = memory.config.zero_optimization
    content = _config_of(work, (zero.offload_param.device, zero.offload_optimizer.device), room)
    content["offload"]["device"] = work.device.type
    return content
