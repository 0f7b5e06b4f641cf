"""What a config asks for, in the terms of the memory plan: mode, tiers, budgets, slots of the store.

Pure functions of the config. `memory_plan` decides by them, for a run and for the planner alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.config import Config, OptimizerBlock
from offload.layout.tiers import Wish
from offload.states import Tier
from offload.swapper.modes import ADAM, DTYPES, MOMENTS, PRECISIONS, Mode

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def wish_of(config: Config, accumulation: int = 1) -> Wish:
    """Returns what the config asks of homes and memory.

    Args:
        config: the whole config.
        accumulation: micro-batches of a step.
    """
    zero, offload = config.zero_optimization, config.offload
    param, optimizer = zero.offload_param, zero.offload_optimizer
    return Wish(
        weights=_TIERS[param.device],
        states=_TIERS[optimizer.device],
        host_memory=offload.host_memory,
        device_memory=offload.device_memory,
        states_off_device=optimizer.ratio,
        cached_weights=_cached_weights(config),
        small_unit=zero.stage3_param_persistence_threshold,
        live=zero.stage3_max_live_parameters,
        tile=zero.sub_group_size,
        accumulation=accumulation,
    )


def _cached_weights(config: Config) -> int | None:
    """Returns the elements of weights in host memory that DeepSpeed's keys ask for, or None.

    Where one of `buffer_count` and `buffer_size` is given, the other has DeepSpeed's default.
    """
    param = config.zero_optimization.offload_param
    buffers = None
    if param.buffer_count is not None or param.buffer_size is not None:
        buffers = (param.buffer_count or 5) * (param.buffer_size or 10**8)
    given = [count for count in (param.max_in_cpu, buffers) if count is not None]
    return max(given) if given else None


def rule_name(block: OptimizerBlock, groups: Iterable[Mapping[str, Any]] = ({},)) -> str:
    """Returns the name of the rule by which the config's optimizer block updates `groups`."""
    name = {"Adam": ADAM, "AdamW": ADAM}.get(block.type, block.type.lower())
    if name == "sgd" and any({**block.settings, **group}["momentum"] for group in groups):
        return "momentum"
    return name


def mode_of(config: Config, optimizer: str) -> Mode:
    """Returns the states that there are; `optimizer` is the name of its rule."""
    return Mode(config.dtype, optimizer, PRECISIONS[config.dtype], MOMENTS[optimizer])


def gradient_dtype(config: Config, mode: Mode, accumulation: int) -> torch.dtype:
    """Returns the dtype in which a gradient waits for its update.

    It is `grad_accum_dtype` where the config has one; else fp32 where several micro-batches are added up, and the dtype
    of the weights where a gradient is stored once.
    """
    named = config.data_types.grad_accum_dtype
    if named is not None:
        return DTYPES[named]
    return torch.float32 if accumulation > 1 else mode.weight_dtype


def buffer_dtype(config: Config) -> torch.dtype | None:
    """Returns the dtype of the model's floating-point buffers; None leaves them as they are."""
    named = config.data_types.buffer_dtype
    return DTYPES[named] if named else None
