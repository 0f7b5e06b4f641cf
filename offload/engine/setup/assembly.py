"""Assembly of an engine's components from a plan: memory, weights, gradients, hooks and the update worker.

If a step fails, the steps before it are undone. Files belong to the caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload.distributed.agreement import Agreement
from offload.distributed.gathers import SecondaryShards, WeightGathers
from offload.distributed.process_group import Ranks
from offload.engine.callbacks import EngineCallbacks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.metrics.compute_spans import compute_spans
from offload.engine.metrics.step_meter import StepMeter
from offload.engine.optim.fused import FusedUpdates
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.update_strategy import UpdateStrategy
from offload.engine.optim.update_worker import UpdateWorker
from offload.engine.params.deferred_parameter import forget
from offload.engine.params.experts.stack_handle import StackHandle
from offload.engine.params.initial_fill import InitialFill, make_resident_shards
from offload.engine.params.local_shards import LocalShards
from offload.engine.params.module_hooks import ModuleHooks
from offload.engine.params.opaque.paged_tensor import ParameterBytes
from offload.engine.params.opaque.takeover import page_out
from offload.engine.params.paged_parameter import ParamHandle
from offload.engine.params.torch_function_rules import RULES
from offload.engine.params.unit_views import UnitViews
from offload.engine.params.weight_edits import WeightEdits
from offload.engine.setup.gradients import gradient_accumulator
from offload.engine.setup.hooks import activations, module_hooks
from offload.engine.setup.plan import Plan
from offload.engine.setup.run_files import RunFiles
from offload.engine.training.components import EngineComponents
from offload.layout.flat_layout import Segment
from offload.layout.frozen import expander
from offload.layout.memory_plan import limits, unit_sizes
from offload.layout.modes import LAMB, TORCH
from offload.layout.pass_order import makes_early_updates
from offload.layout.tiers import copied_memory
from offload.optimizers.lamb import LambUpdates
from offload.optimizers.matrices import MatrixUpdates
from offload.optimizers.torch_updates import TorchUpdates
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.pager import Pager
from offload.swapper.store import Store
from offload.swapper.store.requests import DriveSpans
from offload.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Recorders:
    """Receivers of the reports of components about their work."""

    timeline: Timeline
    """Receives spans, counters and phases; `OFF` if neither a file nor the meter records them."""
    spans: DriveSpans
    """Receives requests to the drives, and commits."""
    meter: StepMeter | None
    """Receives the spans of `timeline` if a breakdown of steps is configured; None if steps are not metered."""


def assemble(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    files: RunFiles,
    resume: bool,
    recorders: Recorders,
    callbacks: EngineCallbacks,
) -> EngineComponents:
    """Maps the arenas, takes over the model's weights, installs hooks and starts the update worker.

    Args:
        plan: All decisions.
        model: Loses its weights, even if they are read from the store.
        optimizer: Groups of its parameters.
        files: The files of the run, open.
        resume: True to read the weights from the store.
        recorders: Receive the reports of the components.
        callbacks: The engine, which is not complete yet; the components store it and call it only later.

    Raises:
        BudgetError: If other engines of the process leave no room.
    """
    timeline = recorders.timeline
    # The order matters: memory first, then the pager, the partitions and their values. Hooks come after the model has
    # given up its weights, and the update worker, whose thread uses all of them, comes last.
    with contextlib.ExitStack() as undo:
        # Each component that owns memory or a thread is closed by an error, in reverse order.
        host = undo.enter_context(contextlib.closing(_host_arena(plan, callbacks)))
        arena = DeviceArena(plan.placement.device_nbytes, plan.device, plan.config.offload.debug.poison)
        compute, rounds = compute_spans(timeline, shown_names(plan)), _agreement(plan, arena, callbacks, timeline)
        pager = undo.enter_context(contextlib.closing(_pager(plan, host, arena, files, rounds, timeline)))
        held = _held(plan, host, arena, pager, files.store)
        sources = _sources(plan)
        _fill(plan, model, held, files, resume, sources)
        gradients = gradient_accumulator(plan, host, arena, files, pager, rounds, callbacks, recorders.spans, compute)
        undo.callback(gradients.close)
        handles = _handles(plan, model)
        unit_views = UnitViews(plan.layouts, handles, pager, plan.mode.weight_dtype)
        kept = undo.enter_context(contextlib.closing(activations(plan, model, files, callbacks, timeline)))
        users = (unit_views, gradients, pager, callbacks, kept)
        hooks, borders = module_hooks(plan, model, handles, *users, timeline, compute)
        undo.callback(hooks.remove)
        weights = _weights(plan, model, handles, pager, hooks, unit_views, callbacks, sources)
        undo.callback(weights.remove)
        updater = _updater(plan, optimizer, host, held, gradients, timeline)
        # Complete: from now on the engine closes the components.
        undo.pop_all()
    return EngineComponents(
        hooks=hooks,
        weights=weights,
        unit_views=unit_views,
        update_worker=updater,
        pager=pager,
        gradients=gradients,
        activations=kept,
        layer_major=borders,
        ranks=plan.ranks,
        agreement=rounds,
        store=files.store,
        queue=files.queue,
        model_files=files.model_files,
        arena=host,
        layouts=plan.layouts,
        trainable=plan.trainable,
        shards=held,
        written=files.written,
        timeline=timeline,
        meter=recorders.meter,
    )


def _host_arena(plan: Plan, callbacks: EngineCallbacks) -> HostArena:
    """Returns the engine's part of the process's host memory."""
    budget, placed, copied = plan.config.offload.host_memory, plan.placement, None
    if not plan.device.host_addressable:
        early = makes_early_updates(plan.config.offload.speculate, on_cpu=False)
        copied = copied_memory(plan.parts, placed.tiers, placed.promoted, early)
    return HostArena(placed.classes, plan.device, process_memory(), budget, callbacks.give_cache, copied)


def _agreement(plan: Plan, arena: DeviceArena, callbacks: EngineCallbacks, timeline: Timeline) -> Agreement | None:
    """Returns the agreement of all ranks; None if there is only one."""
    if plan.ranks is None:
        return None
    coded = plan.parts.gathers
    codes, secondary = arena.keep(coded.nbytes) if coded else None, None
    if plan.node is not None:
        sizes = plan.parts.secondary
        assert sizes is not None, "there are nodes for a secondary partition alone"
        secondary = SecondaryShards(sizes, plan.rank, plan.node, plan.device, arena.keep(sizes.nbytes))
    gathers = WeightGathers(plan.ranks, plan.device, coded, codes, secondary)
    return Agreement(gathers, shown_names(plan), callbacks, timeline=timeline)


def shown_names(plan: Plan) -> list[str]:
    """Returns the name of each unit for messages and timelines."""
    return [layout.name or "the root" for layout in plan.layouts]


def _pager(
    plan: Plan, host: HostArena, arena: DeviceArena, files: RunFiles, rounds: Agreement | None, timeline: Timeline
) -> Pager:
    """Returns the pager."""
    # The pager receives sizes and limits only; it knows neither modules nor parameters.
    sizes = unit_sizes(plan.layouts, plan.placement, plan.shares, plan.mode, plan.images)
    # Where each rank has whole weights, a use needs no other rank: they meet when they reduce gradients, and at step().
    divided = plan.ranks is not None and plan.ranks.mesh.shards > 1
    return Pager(
        sizes,
        host,
        arena,
        plan.device,
        files.store or files.model_files,
        limits(plan.config, plan.mode),
        rounds if divided else None,
        expand=expander(plan.layouts, plan.mode.weight_dtype),
        timeline=timeline,
    )


# -- weights ------------------------------------------------------------------------------------------


def _held(plan: Plan, host: HostArena, arena: DeviceArena, pager: Pager, store: Store | None) -> LocalShards:
    """Allocates this rank's partitions in their tiers."""
    residents = make_resident_shards(plan.parts, plan.mode, plan.placement, host, arena)
    # torch may still have kernels in flight that fill this memory, or that use the tensors to which it belonged before.
    # Uploads run on a stream of their own and must come after those kernels.
    plan.device.synchronize()
    return LocalShards(
        mode=plan.mode,
        layouts=plan.layouts,
        shares=plan.shares,
        nbytes=plan.parts.nbytes,
        sizes=pager.sizes,
        residents=residents,
        pager=pager,
        device=plan.device,
        store=store,
    )


def _sources(plan: Plan) -> dict[str, ParameterBytes]:
    """Returns the bytes of each parameter that is stored as bytes, by name."""
    itemsize, device = plan.mode.weight_dtype.itemsize, plan.device.torch
    return {
        segment.name: ParameterBytes(segment.name, unit, segment.start * itemsize, device)
        for unit, layout in enumerate(plan.layouts)
        for segment in layout.segments
        if segment.inner
    }


def _fill(
    plan: Plan,
    model: nn.Module,
    held: LocalShards,
    files: RunFiles,
    resume: bool,
    sources: Mapping[str, ParameterBytes],
) -> None:
    """Writes every weight to its tier, into new files or none, and moves buffers; parameters are left empty."""
    files.make()
    filler = InitialFill(held, plan.ranks, plan.grid)
    # A new run begins with the user's values, those from files, or the modules' initialization from the seed.
    if not resume:
        # The stages of a pipeline number their units alike, and are to draw other values.
        seed = plan.config.offload.seed + (0 if plan.grid is None else plan.grid.position)
        filler.fill(model, plan.layouts, seed, sources, plan.in_place)
    else:
        held.read_back()
        # The model's own values are dropped, unread.
        for segment in (segment for layout in plan.layouts for segment in layout.segments):
            if segment.inner:
                page_out(model, segment, sources[segment.name])
            else:
                forget(model.get_parameter(segment.parameter))
    _move_buffers(model, plan)


def _move_buffers(model: nn.Module, plan: Plan) -> None:
    """Moves buffers to the device, in their dtype, with the values of rank 0; shared buffers stay shared."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original, so that no new one gets its id
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                value = buffer if plan.ranks is None else _of_rank_0(buffer, plan.ranks)
                dtype = plan.buffer_dtype if buffer.is_floating_point() else None
                moved[id(buffer)] = (buffer, value.to(plan.device.torch, dtype))
            module._buffers[name] = moved[id(buffer)][1]


def _of_rank_0(buffer: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Returns a copy of the buffer as it is on rank 0. Collective."""
    values = buffer.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    ranks.broadcast(values, 0)
    return values


def _handles(plan: Plan, model: nn.Module) -> list[list[ParamHandle]]:
    """Returns a handle for each parameter, unit by unit; for an expert's rows, of parameters made here."""
    dtype, device = plan.mode.weight_dtype, plan.device.torch

    def parameter(segment: Segment) -> nn.Parameter:
        found = model.get_parameter(segment.parameter)
        if segment.stack:
            return nn.Parameter(torch.empty(0, dtype=dtype, device=device), found.requires_grad)
        return found

    return [
        [
            ParamHandle(parameter(segment), segment.name, unit, position, dtype, segment.shape, device, RULES)
            for position, segment in enumerate(layout.segments)
        ]
        for unit, layout in enumerate(plan.layouts)
    ]


def _stack_handles(plan: Plan, model: nn.Module, handles: Sequence[Sequence[ParamHandle]]) -> list[StackHandle]:
    """Returns a handle for each parameter whose rows have the `handles` of experts."""
    dtype, device = plan.mode.weight_dtype, plan.device.torch
    rows: dict[str, list[ParamHandle]] = {}
    # Experts of a stack are units one after the other, so that its rows come in their order.
    for layout, mine in zip(plan.layouts, handles, strict=True):
        for segment, handle in zip(layout.segments, mine, strict=True):
            if segment.stack:
                rows.setdefault(segment.stack, []).append(handle)
    return [StackHandle(model.get_parameter(name), name, mine, dtype, device, RULES) for name, mine in rows.items()]


def _weights(
    plan: Plan,
    model: nn.Module,
    handles: Sequence[Sequence[ParamHandle]],
    pager: Pager,
    hooks: ModuleHooks,
    unit_views: UnitViews,
    callbacks: EngineCallbacks,
    sources: Mapping[str, ParameterBytes],
) -> WeightEdits:
    """Returns the component through which users read and edit weights."""
    return WeightEdits(
        model,
        plan.layouts,
        handles,
        pager,
        hooks,
        unit_views,
        plan.mode.weight_dtype,
        trains=any(plan.parts.trainable_numel),
        several_ranks=plan.ranks is not None,
        callbacks=callbacks,
        opaque=tuple(sources.values()),
        stacks=_stack_handles(plan, model, handles),
        coded=() if plan.parts.gathers is None else plan.parts.gathers.elements,
    )


# -- updates -------------------------------------------------------------------------------------------


def _updater(
    plan: Plan,
    optimizer: Optimizer,
    host: HostArena,
    held: LocalShards,
    gradients: GradientAccumulator,
    timeline: Timeline,
) -> UpdateWorker | None:
    """Returns the update worker, whose thread runs from now on; None if nothing trains."""
    if not any(plan.parts.trainable_numel):
        return None
    return UpdateWorker(
        shards=held,
        arena=host,
        gradients=gradients,
        strategy=_strategy(plan, optimizer, host, held, gradients),
        tile_numel=plan.placement.tile_numel,
        tile_buffers=plan.placement.tile_buffers,
        commit_every=plan.commit_every,
        timeline=timeline,
    )


def _strategy(
    plan: Plan, optimizer: Optimizer, host: HostArena, held: LocalShards, gradients: GradientAccumulator
) -> UpdateStrategy:
    """Returns the strategy by which the mode's optimizer updates units."""
    # A rank that has whole units steps them as one rank does, and exchanges nothing, however many replicas there are.
    ranks = None if plan.ranks is None or plan.ranks.mesh.shards == 1 else plan.ranks
    if plan.mode.optimizer == TORCH:
        scratch = host.tiles.take(plan.placement.scratch_nbytes)
        assert scratch is not None and optimizer.replaced is not None
        return TorchUpdates(
            optimizer=optimizer.replaced,
            mode=plan.mode,
            layouts=plan.layouts,
            whole=plan.parts.whole,
            scratch=scratch.tensor(torch.float32),
            ranks=ranks,
        )
    if plan.mode.matrix_rule:
        scratch = host.tiles.take(plan.placement.scratch_nbytes)
        assert scratch is not None
        return MatrixUpdates(
            mode=plan.mode,
            layouts=plan.layouts,
            parts=plan.trainable,
            whole=plan.parts.whole,
            scratch=scratch.tensor(torch.float32),
            device=held.device,
            ranks=ranks,
        )
    if plan.mode.optimizer == LAMB:
        return LambUpdates(mode=plan.mode)
    return FusedUpdates(mode=plan.mode, device=held.device, gradients=gradients)
