"""Assembly of an engine's components from a plan: memory, weights, gradients, hooks and the update worker.

If a step fails, the steps before it are undone. Files belong to the caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from offload.aio.shared_queue import SharedQueue
from offload.engine.callbacks import EngineCallbacks
from offload.engine.distributed.agreement import Agreement
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.gradients.completion import UnitCompletion
from offload.engine.gradients.device_to_host import DeviceToHost
from offload.engine.gradients.disk_spill import DiskSpill, windows
from offload.engine.gradients.places import GradientPlaces
from offload.engine.gradients.reduce_scatter import ReduceScatterAccumulator
from offload.engine.gradients.values import borders
from offload.engine.metrics.compute_spans import ComputeSpans, compute_spans
from offload.engine.metrics.step_meter import StepMeter
from offload.engine.optim.fused import FusedUpdates
from offload.engine.optim.lamb import LambUpdates
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.speculation.rules import RunFacts, run_may_speculate
from offload.engine.optim.torch_updates import TorchUpdates
from offload.engine.optim.update_strategy import UpdateStrategy
from offload.engine.optim.update_worker import UpdateWorker
from offload.engine.params.deferred_parameter import forget
from offload.engine.params.initial_fill import InitialFill, make_resident_shards
from offload.engine.params.local_shards import LocalShards
from offload.engine.params.module_hooks import ModuleHooks
from offload.engine.params.paged_parameter import ParamHandle
from offload.engine.params.torch_function_rules import RULES
from offload.engine.params.unit_views import UnitViews
from offload.engine.params.weight_edits import WeightEdits
from offload.engine.setup.buffers import move_buffers
from offload.engine.setup.hooks import activations, module_hooks
from offload.engine.setup.plan import Plan
from offload.engine.setup.run_files import RunFiles
from offload.engine.training.components import EngineComponents
from offload.layout.pager_inputs import limits, unit_sizes
from offload.layout.placement import STAGING_BUFFERS, WINDOWS
from offload.layout.tiers import copied_memory
from offload.states import State, Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.modes import LAMB, TORCH
from offload.swapper.pager import Pager
from offload.swapper.store import Store, Written
from offload.swapper.store.drive_spans import DriveSpans
from offload.swapper.store.spill_file import SpillFile
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
    timeline, names = recorders.timeline, shown_names(plan)
    # The order matters: memory first, then the pager, the partitions and their values. Hooks come after the model has
    # given up its weights, and the update worker, whose thread uses all of them, comes last.
    with contextlib.ExitStack() as undo:
        host = _host_arena(plan, callbacks)
        undo.callback(host.close)
        arena = DeviceArena(plan.placement.device_nbytes, plan.device, plan.config.offload.debug.poison)
        compute = compute_spans(timeline, names)
        rounds = None if plan.ranks is None else Agreement(plan.ranks, names, callbacks, timeline=timeline)
        pager = _pager(plan, host, arena, files.store, rounds, timeline)
        # Each component that owns memory or a thread registers how it is closed; an error closes them in reverse order.
        undo.callback(pager.close)
        held = _held(plan, host, arena, pager, files.store)
        _fill(plan, model, held, files, resume)
        gradients = _gradients(plan, host, arena, files, pager, rounds, callbacks, recorders, compute)
        undo.callback(gradients.close)
        handles = _handles(plan, model)
        unit_views = UnitViews(plan.layouts, handles, pager, plan.mode.weight_dtype)
        kept = activations(plan, model, files, timeline)
        undo.callback(kept.close)
        hooks = module_hooks(plan, model, handles, unit_views, gradients, pager, callbacks, kept, timeline, compute)
        undo.callback(hooks.remove)
        weights = _weights(plan, model, handles, pager, hooks, unit_views, callbacks)
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
        ranks=plan.ranks,
        agreement=rounds,
        store=files.store,
        queue=files.queue,
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
        copied = copied_memory(plan.parts, placed.tiers, placed.promoted)
    return HostArena(placed.classes, plan.device, process_memory(), budget, callbacks.give_cache, copied)


def shown_names(plan: Plan) -> list[str]:
    """Returns the name of each unit for messages and timelines."""
    return [layout.name or "the root" for layout in plan.layouts]


def _pager(
    plan: Plan, host: HostArena, arena: DeviceArena, store: Store | None, rounds: Agreement | None, timeline: Timeline
) -> Pager:
    """Returns the pager."""
    # The pager receives sizes and limits only; it knows neither modules nor parameters.
    sizes = unit_sizes(plan.layouts, plan.placement, plan.shares, plan.mode)
    return Pager(sizes, host, arena, plan.device, store, limits(plan.config, plan.mode), rounds, timeline=timeline)


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


def _fill(plan: Plan, model: nn.Module, held: LocalShards, files: RunFiles, resume: bool) -> None:
    """Writes every weight to its tier, into new files or none, and moves buffers; parameters are left empty."""
    files.make()
    filler = InitialFill(held, plan.parts.largest_unit, plan.ranks)
    # A new run begins with the user's values, those from files, or the modules' initialization from the seed.
    if not resume:
        filler.fill(model, plan.layouts, plan.config.offload.seed)
    else:
        filler.read_back(len(held.layouts))
        for parameter in model.parameters():  # the model's own values are dropped, unread
            forget(parameter)
    move_buffers(model, plan)


def _handles(plan: Plan, model: nn.Module) -> list[list[ParamHandle]]:
    """Returns a handle for each parameter, unit by unit."""
    dtype, device = plan.mode.weight_dtype, plan.device.torch
    return [
        [
            ParamHandle(
                model.get_parameter(segment.name), segment.name, unit, position, dtype, segment.shape, device, RULES
            )
            for position, segment in enumerate(layout.segments)
        ]
        for unit, layout in enumerate(plan.layouts)
    ]


def _weights(
    plan: Plan,
    model: nn.Module,
    handles: Sequence[Sequence[ParamHandle]],
    pager: Pager,
    hooks: ModuleHooks,
    unit_views: UnitViews,
    callbacks: EngineCallbacks,
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
    )


# -- gradients and updates ----------------------------------------------------------------------------


def _gradients(
    plan: Plan,
    host: HostArena,
    arena: DeviceArena,
    files: RunFiles,
    pager: Pager,
    rounds: Agreement | None,
    callbacks: EngineCallbacks,
    recorders: Recorders,
    compute: ComputeSpans,
) -> GradientAccumulator:
    """Returns the accumulator of gradients, with its memory in the tiers of the plan.

    Args:
        plan: All decisions.
        host: Source of host buffers.
        arena: Source of device buffers.
        files: The files of the run.
        pager: Receives failures of other threads.
        rounds: Order of collectives; None with one rank.
        callbacks: The engine.
        recorders: Receive reports of work.
        compute: Spans of forward and backward.
    """
    dtype, trainable = plan.parts.gradient_dtype, plan.trainable
    with contextlib.ExitStack() as undo:
        spill = downloads = None
        if files.queue is not None and plan.placement.spilled:
            spill = _spill(plan, trainable, host, files.queue, pager, files.written, recorders.spans)
            undo.callback(spill.close)
        # The CPU cannot read gradients on such a device, so they are first copied to pinned staging buffers.
        if any(plan.parts.trainable_numel) and not plan.device.host_addressable:
            downloads = _downloads(plan, host, pager, recorders.timeline)
            undo.callback(downloads.close)
        # Totals on the device keep their place for the whole run, so that no step allocates device memory.
        on_device = {
            unit: arena.keep(plan.parts.nbytes[unit][State.GRAD]).view(dtype)
            for unit, tiers in enumerate(plan.placement.tiers)
            if tiers.get(State.GRAD) is Tier.DEVICE
        }
        totals = {unit: arena.keep(nbytes).view(dtype) for unit, nbytes in plan.placement.added}
        waiting = GradientPlaces(spill=spill, on_device=on_device, totals=totals, downloads=downloads)
        gradients: GradientAccumulator
        if plan.ranks is None or rounds is None or not any(trainable):
            gradients = GradientAccumulator(
                plan.layouts,
                trainable,
                host,
                dtype,
                waiting,
                callbacks,
                timeline=recorders.timeline,
                compute=compute,
                completion=UnitCompletion(callbacks) if run_may_speculate(_run_facts(plan)) else None,
            )
        else:
            gradients = ReduceScatterAccumulator(
                plan.layouts,
                trainable,
                host,
                dtype,
                waiting,
                callbacks,
                device_arena=arena,
                bucket_dtype=plan.mode.weight_dtype,  # the dtype of gradients in a backward
                ranks=plan.ranks,
                rounds=rounds,
                timeline=recorders.timeline,
                compute=compute,
            )
        undo.pop_all()
    return gradients


def _run_facts(plan: Plan) -> RunFacts:
    """Returns the facts that decide whether updates may be made under the backward."""
    return RunFacts(
        wanted=plan.config.offload.speculate is not False and plan.config.offload.debug.overlap,
        ranks=1 if plan.ranks is None else plan.ranks.size,
        one_pass=plan.mode.optimizer not in (LAMB, TORCH),
        commits=plan.slots == 2 and plan.commit_every > 0,
        on_disk=any(
            part and all(row[state] is Tier.DISK for state in plan.mode.states)
            for part, row in zip(plan.trainable, plan.placement.tiers, strict=True)
        ),
    )


def _downloads(plan: Plan, host: HostArena, pager: Pager, timeline: Timeline) -> DeviceToHost:
    """Returns the copies of gradients from the device to staging buffers in host memory."""
    staging = [host.staging.take(host.classes.staging // STAGING_BUFFERS) for _ in range(STAGING_BUFFERS)]
    buffers = [each for each in staging if each is not None]
    # Two buffers or more: one is filled by the device while the CPU reads another.
    assert len(buffers) == STAGING_BUFFERS, "the class was sized for them"
    most = plan.parts.largest_gradient
    return DeviceToHost(plan.device, buffers, most, plan.device_kernels, pager.fail, pager.check, timeline=timeline)


def _spill(
    plan: Plan,
    trainable: Sequence[range],
    host: HostArena,
    queue: SharedQueue,
    pager: Pager,
    written: Written,
    spans: DriveSpans,
) -> DiskSpill:
    """Returns the gradients on disk, with their windows in host memory."""
    placement, parts = plan.placement, plan.parts
    itemsize = parts.gradient_dtype.itemsize
    buffers = [host.gradients.take(placement.window_numel * itemsize) for _ in range(WINDOWS)]
    unit_windows = {
        unit: windows(borders(plan.layouts[unit], trainable[unit]), placement.window_numel)
        for unit in placement.spilled
    }
    nbytes = {unit: parts.nbytes[unit][State.GRAD] for unit in unit_windows}
    # Gradients do not outlive a step, so their file is never committed.
    scratch = SpillFile(plan.config.drives, nbytes, queue, written, spans)
    return DiskSpill(unit_windows, parts.gradient_dtype, [each for each in buffers if each], scratch, pager.fail)


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
    if plan.mode.optimizer == TORCH:
        scratch = host.tiles.take(plan.placement.scratch_nbytes)
        assert scratch is not None and optimizer.replaced is not None
        return TorchUpdates(optimizer=optimizer.replaced, layouts=plan.layouts, scratch=scratch.tensor(torch.float32))
    if plan.mode.optimizer == LAMB:
        return LambUpdates(mode=plan.mode)
    return FusedUpdates(mode=plan.mode, device=held.device, gradients=gradients)
