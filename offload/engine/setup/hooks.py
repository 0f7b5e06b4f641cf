"""The hooks on a model: units, saved tensors, and blocks that are computed again in backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from offload.activations import checkpoints as policy
from offload.activations.activations import Activations
from offload.activations.checkpoints import UnitCheckpoints, UnitSeconds, blocks_of
from offload.activations.kept_inputs import DiskSlots, HostBlocks, KeptInputs, Staging
from offload.engine.callbacks import EngineCallbacks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.metrics.compute_spans import ComputeSpans
from offload.engine.params.module_hooks import ModuleHooks
from offload.engine.params.paged_parameter import ParamHandle, handle_of
from offload.engine.params.saved_tensors import SavedTensors, other_hooks
from offload.engine.params.unit_views import UnitViews
from offload.engine.setup.plan import Plan
from offload.engine.setup.run_files import RunFiles
from offload.layout.pass_order import LAYER_MAJOR
from offload.parallel.stages import stage_sites
from offload.passes.layer_major import LayerMajor
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.pager import Pager
from offload.timeline import Timeline

_RESERVE = 4
"""On an accelerator, "auto" leaves a quarter of the memory that is free at the start to everything but inputs."""


def module_hooks(
    plan: Plan,
    model: nn.Module,
    handles: Sequence[Sequence[ParamHandle]],
    unit_views: UnitViews,
    gradients: GradientAccumulator,
    pager: Pager,
    callbacks: EngineCallbacks,
    kept: Activations,
    timeline: Timeline,
    compute: ComputeSpans,
) -> tuple[ModuleHooks, LayerMajor | None]:
    """Installs the hooks of modules, saved tensors and checkpoints on the model, and the borders of its blocks.

    There are no borders if micro-batches pass through the model one after the other.

    Args:
        plan: All decisions.
        model: The model, whose parameters have handles.
        handles: The parameters of each unit.
        unit_views: Materializes units.
        gradients: Receives every gradient.
        pager: Fetches units.
        callbacks: The engine.
        kept: Activations of the model.
        timeline: Records phases.
        compute: Records forwards and backwards of units.
    """
    saved = SavedTensors(handles, unit_views, pager, compute, kept.inputs, wrapped=bool(plan.sites))
    hooks = ModuleHooks(
        model,
        {**stage_sites(model), **plan.units.sites},
        handles,
        unit_views,
        saved,
        gradients,
        pager,
        callbacks,
        kept.checkpoints,
        experts=plan.units.experts,
        timeline=timeline,
        compute=compute,
    )
    if plan.schedule.schedule != LAYER_MAJOR:
        return hooks, None
    blocks = blocks_of(model, plan.config.units)
    wanted = plan.config.offload.schedule == LAYER_MAJOR
    return hooks, LayerMajor(dict(model.named_modules()), blocks, hooks.passes, plan.device, wanted)


def activations(
    plan: Plan, model: nn.Module, files: RunFiles, callbacks: EngineCallbacks, timeline: Timeline
) -> Activations:
    """Returns the blocks that are computed again, and the keeper of their inputs.

    Args:
        plan: All decisions.
        model: The model.
        files: The files of the run; the queue exists if there is a drive for inputs.
        callbacks: The engine.
        timeline: Records copies.
    """
    block = plan.config.activation_checkpointing
    blocks, lines = tuple[str, ...](), tuple[str, ...]()
    if plan.config.activation_tier is not None:
        blocks = blocks_of(model, plan.config.units)[: block.number_checkpoints]
        lines = policy.notices(plan.config, len(blocks), plan.device.host_addressable)
    seconds = UnitSeconds({name: model.get_submodule(name) for name in blocks}) if block.profile else None
    checkpoints = UnitCheckpoints(
        blocks, plan.device, other_hooks, _is_weight, block.synchronize_checkpoint_boundary, seconds
    )

    def turn() -> int | None:
        now = callbacks.turn()
        return None if now is None else now.number

    inputs = _kept_inputs(plan, files, len(blocks), turn, timeline)
    return Activations(checkpoints=checkpoints, inputs=inputs, notices=lines)


def _is_weight(value: Any) -> bool:
    """Returns True for a parameter of a model under an engine."""
    return handle_of(value) is not None


def _kept_inputs(
    plan: Plan, files: RunFiles, blocks: int, turn: Callable[[], int | None], timeline: Timeline
) -> KeptInputs | None:
    """Returns the keeper of inputs of `blocks` modules, or None if they stay where the forward computes them."""
    config, device, tier = plan.config, plan.device, plan.config.activation_tier
    if tier in (None, "device"):
        return None
    assert tier is not None
    # In host memory a copy of a tensor frees nothing, so only a drive helps a device that works there.
    if device.host_addressable and files.queue is None:
        return None
    room = 0 if tier == "nvme" or device.host_addressable else plan.placement.inputs_nbytes
    at_once = None
    if config.activation_checkpointing.contiguous_memory_optimization:
        at_once = blocks or None
    memory = HostBlocks(device, process_memory(), config.offload.host_memory, room, at_once)
    slots = None if files.queue is None else DiskSlots(config.drives, files.queue, files.written)
    limit = _device_limit(tier, device, plan.placement.inputs_nbytes)
    return KeptInputs(device, Staging(memory, slots, timeline), limit, turn, timeline)


def _device_limit(tier: str, device: Device, room: int | None) -> Callable[[int], float]:
    """Returns the bytes that inputs may take on the device, given the bytes that they take now.

    Args:
        tier: "cpu", "nvme" or "auto".
        device: The compute device.
        room: Bytes of host memory for inputs; None for what is free.
    """
    if tier == "nvme" or (tier == "cpu" and not device.host_addressable):
        return lambda now: 0
    if not device.host_addressable:
        reserve = device.free_bytes() // _RESERVE
        return lambda now: now + device.free_bytes() - reserve
    if room is not None:
        return lambda now: room
    return lambda now: math.floor(now + policy.FREE_SHARE * free_host_memory())
