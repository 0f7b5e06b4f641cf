"""The config's placement settings in the terms of the memory plan: mode, tiers, budgets, slots of the store.

Pure functions of the config. `memory_plan` decides by them, both for a run and for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.config import Config, OptimizerBlock
from offload.errors import ConfigError
from offload.layout.collectives.reduction import CODES, MOST_CODED_REPLICAS, Reduction
from offload.layout.modes import ADAM, DTYPES, MOMENTS, NOT_OF_MATRICES, Mode, make_mode
from offload.layout.optimizers.of_torch import kernel_rule, optimizer_class
from offload.layout.schedule import LAYER_MAJOR
from offload.layout.tiers import PlacementRequest
from offload.states import State, Tier

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def placement_request(config: Config, accumulation: int = 1) -> PlacementRequest:
    """Returns the placement that the config asks for: tiers, memory budgets and limits.

    Args:
        config: the full config.
        accumulation: micro-batches of an optimizer step.
    """
    zero, offload = config.zero_optimization, config.offload
    param, optimizer = zero.offload_param, zero.offload_optimizer
    return PlacementRequest(
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
        # Inputs that never leave the device need no host memory.
        inputs=offload.activation_memory if config.activation_tier not in (None, "device") else 0,
    )


def _cached_weights(config: Config) -> int | None:
    """Returns the number of weight elements that DeepSpeed's keys want cached in host memory, or None if none is set.

    If only one of `buffer_count` and `buffer_size` is set, the other takes DeepSpeed's default.
    """
    param = config.zero_optimization.offload_param
    buffers = None
    if param.buffer_count is not None or param.buffer_size is not None:
        # DeepSpeed's defaults: 5 buffers of 1e8 elements each.
        buffers = (param.buffer_count or 5) * (param.buffer_size or 10**8)
    given = [count for count in (param.max_in_cpu, buffers) if count is not None]
    return max(given) if given else None


def rule_name(block: OptimizerBlock, groups: Iterable[Mapping[str, Any]] = ({},)) -> str:
    """Returns the name of the update rule that the config's optimizer block selects.

    Args:
        block: the config's optimizer block.
        groups: the parameter groups, whose settings override those of the block.
    """
    if block.of_torch:
        return kernel_rule(optimizer_class(block.type), [{**block.settings, **group} for group in groups])
    name = {"Adam": ADAM, "AdamW": ADAM}.get(block.type, block.type.lower())
    # One group with momentum is enough: the mode, and so the set of states, is the same for all units.
    if name == "sgd" and any({**block.settings, **group}["momentum"] for group in groups):
        return "momentum"
    return name


def mode_of(config: Config, optimizer: str) -> Mode:
    """Returns the mode, which fixes the set of states and their dtypes; `optimizer` is the name of the rule.

    Raises:
        ConfigError: the moments or the master are to have a form that the optimizer or the weights cannot keep.
    """
    if State.PACKED in MOMENTS[optimizer] and config.moments != "fp32":
        raise ConfigError(
            f'"moments" is {config.moments}, but this optimizer runs by torch\'s own code, and keeps states of its own '
            'dtypes; leave "moments" and bf16_optimizer_states out, or use an optimizer with a kernel (AdamW, Adam, '
            "Lamb, Lion, Adagrad, SGD, Muon, SinkGD)"
        )
    if optimizer in NOT_OF_MATRICES and config.moments == "int8":
        raise ConfigError(
            '"moments" is int8, but Muon and SinkGD keep moments of matrices, which have no blocks of 8 bits; set bf16'
        )
    master = config.offload.master
    if master != "fp32" and config.dtype != "bf16":
        why = (
            "an fp32 weight is its own master"
            if config.dtype == "fp32"
            else "the fp32 master beside an fp16 weight shares no bits with it"
        )
        raise ConfigError(
            f'"master" is {master}, a bf16 weight with 8 more bits, but the weights are {config.dtype}: {why}; set '
            '"bf16": {"enabled": true} (--dtype bf16), or leave "master" out'
        )
    if State.PACKED in MOMENTS[optimizer] and master != "fp32":
        raise ConfigError(
            f'"master" is {master}, but this optimizer runs by torch\'s own code, whose steps are not '
            'rounded stochastically; leave "master" out, or use an optimizer with a kernel (AdamW, Adam, Lamb, Lion, '
            "Adagrad, SGD, Muon, SinkGD)"
        )
    return make_mode(config.dtype, optimizer, config.moments, master)


def gradient_dtype(config: Config, mode: Mode, accumulation: int) -> torch.dtype:
    """Returns the dtype in which a gradient is stored until its update.

    The config's `grad_accum_dtype` wins if set. Otherwise gradients are fp32 if several micro-batches accumulate into
    them, and of the weights' dtype if each gradient is stored once.
    """
    named = config.data_types.grad_accum_dtype
    if named is not None:
        return DTYPES[named]
    return torch.float32 if accumulation > 1 else mode.weight_dtype


def reduction_of(config: Config, mode: Mode, accumulation: int, world_size: int, replicas: int = 1) -> Reduction | None:
    """Returns the way in which several ranks reduce their gradients; None for one rank.

    ZeRO partitions gradients from stage 2 on, so that a rank of stages 0 and 1 has memory for the sum of all of a
    step's micro-batches, and reduces it once.

    Args:
        config: the config.
        mode: gives the dtype of a backward's gradients.
        accumulation: micro-batches of an optimizer step.
        world_size: number of shards.
        replicas: number of replicas, each of which is divided into shards.
    """
    if world_size * replicas == 1:
        return None
    zero = config.zero_optimization
    overlaps = zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm
    whole = accumulation > 1 and zero.stage < 2
    # Sums of micro-batches that take turns are sent too, often of two units that lie between two blocks. Not by "auto":
    # only some loops run in turns then, and all others would send twice the bytes of 16-bit gradients.
    turns = config.offload.schedule == LAYER_MAJOR
    sums = gradient_dtype(config, mode, accumulation)
    named = config.communication_data_type
    dtype = DTYPES[named] if named else sums if whole or turns else mode.weight_dtype
    exchanges = 2 if overlaps else 1
    # A replica of one shard sends nothing but its sums to the other replicas.
    form = CODES if zero.zero_quantized_gradients and world_size > 1 else None
    coded_sums = zero.zero_quantized_gradients and 1 < replicas <= MOST_CODED_REPLICAS
    if whole:  # a sum of another dtype is rounded into a bucket
        buckets = 0 if dtype == sums else exchanges
    elif turns:
        buckets = 2
    else:  # one is free again once its codes are made
        buckets = exchanges if form is None else 1
    return Reduction(
        dtype=dtype,
        exchanges=exchanges,
        buckets=buckets,
        whole=whole,
        replicas=replicas,
        form=form,
        coded_sums=coded_sums,
        in_place=world_size == 1 and dtype is torch.float32 and not coded_sums,
    )


def buffer_dtype(config: Config) -> torch.dtype | None:
    """Returns the dtype of the model's floating-point buffers; None keeps the dtypes that the model gives them."""
    named = config.data_types.buffer_dtype
    return DTYPES[named] if named else None
