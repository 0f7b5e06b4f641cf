"""From a plan to the parts of an engine: memory, weights in their homes, gradients, hooks, the update worker.

What fails on the way takes back what was made before it; files are the caller's.
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
from offload.engine.distributed.process_group import Ranks
from offload.engine.gradients.accumulator import GradientAccumulator, GradientPlaces, borders
from offload.engine.gradients.device_to_host import DeviceToHost
from offload.engine.gradients.disk_spill import DiskSpill, windows
from offload.engine.gradients.reduce_scatter import ReduceScatterAccumulator
from offload.engine.metrics.compute_spans import ComputeSpans, compute_spans
from offload.engine.metrics.step_meter import StepMeter
from offload.engine.optim.fused import FusedUpdates
from offload.engine.optim.lamb import LambUpdates
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.torch_updates import TorchUpdates
from offload.engine.optim.update_strategy import UpdateStrategy
from offload.engine.optim.update_worker import UpdateWorker
from offload.engine.params.deferred_parameter import forget
from offload.engine.params.initial_fill import InitialFill, make_resident_shards
from offload.engine.params.local_shards import LocalShards
from offload.engine.params.module_hooks import ModuleHooks
from offload.engine.params.paged_parameter import ParamHandle
from offload.engine.params.saved_tensors import SavedTensors
from offload.engine.params.torch_function_rules import RULES
from offload.engine.params.unit_views import UnitViews
from offload.engine.params.weight_edits import WeightEdits
from offload.engine.build.plan import Plan
from offload.engine.training.components import EngineComponents
from offload.layout.pager_inputs import limits, unit_sizes
from offload.layout.placement import STAGING_BUFFERS, WINDOWS
from offload.states import State
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.modes import LAMB, TORCH
from offload.swapper.pager import Pager
from offload.states import Tier
from offload.swapper.store import Store, Written
from offload.swapper.store.drive_spans import DriveSpans
from offload.swapper.store.spill_file import SpillFile
from offload.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Recorders:
    """What the parts of an engine tell of their work."""

    timeline: Timeline
    """Gets spans, counters and phases; `OFF` where neither a file nor the meter is to have them."""
    spans: DriveSpans
    """Gets requests to the drives, and commits."""
    meter: StepMeter | None
    """Listens to `timeline` where a breakdown of steps is asked for; None where nobody wants to know of steps."""


def assemble(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    queue: SharedQueue | None,
    store: Store | None,
    written: Written,
    resume: bool,
    recorders: Recorders,
    callbacks: EngineCallbacks,
) -> EngineComponents:
    """Maps the arenas, takes the model's weights over, installs hooks and starts the update worker.

    Args:
        plan: all decisions.
        model: loses its weights, also where a `resume` reads them from the store.
        optimizer: groups of its parameters.
        queue: of the store's requests; None without files.
        store: the swap files; None without states on DISK.
        written: counts what goes to the drives.
        resume: whether the weights come from the store.
        recorders: what the components record their work with.
        callbacks: the engine, which is not complete yet; the components keep it.

    Raises:
        BudgetError: if other engines of the process leave no room.
    """
    timeline = recorders.timeline
    with contextlib.ExitStack() as undo:
        host = HostArena(
            plan.placement.classes, plan.device, process_memory(), plan.config.offload.host_memory, callbacks.give_cache
        )
        undo.callback(host.close)
        arena = DeviceArena(plan.placement.device_nbytes, plan.device, plan.config.offload.debug.poison)
        names = shown_names(plan)
        compute = compute_spans(timeline, names)
        rounds = None if plan.ranks is None else Agreement(plan.ranks, names, callbacks, timeline=timeline)
        pager = _pager(plan, host, arena, store, rounds, timeline)
        undo.callback(pager.close)
        held = _held(plan, host, arena, pager, store)
        _fill(plan, model, held, resume)
        trainable = tuple(share[0] for share in plan.shares)
        gradients = _gradients(
            plan, trainable, host, arena, queue, pager, rounds, written, callbacks, recorders, compute
        )
        undo.callback(gradients.close)
        _move_buffers(model, plan)
        places = _places(plan, model)
        bindings = UnitViews(plan.layouts, places, pager, plan.mode.weight_dtype)
        saved = SavedTensors([layout.name for layout in plan.layouts], places, bindings, pager, compute)
        sites = plan.units.sites
        hooks = ModuleHooks(
            model, sites, places, bindings, saved, gradients, pager, callbacks, timeline=timeline, compute=compute
        )
        undo.callback(hooks.remove)
        weights = _weights(plan, model, places, pager, hooks, bindings, callbacks)
        undo.callback(weights.remove)
        trains = any(plan.parts.trainable_numel)
        updater = _updater(plan, optimizer, host, held, gradients, timeline) if trains else None
        undo.pop_all()
    return EngineComponents(
        hooks=hooks,
        weights=weights,
        unit_views=bindings,
        update_worker=updater,
        pager=pager,
        gradients=gradients,
        ranks=plan.ranks,
        agreement=rounds,
        store=store,
        queue=queue,
        arena=host,
        layouts=plan.layouts,
        trainable=trainable,
        shards=held,
        written=written,
        timeline=timeline,
        meter=recorders.meter,
    )


def shown_names(plan: Plan) -> list[str]:
    """Returns the name of each unit, as messages and time lines have it."""
    return [layout.name or "the root" for layout in plan.layouts]


def _pager(
    plan: Plan, host: HostArena, arena: DeviceArena, store: Store | None, rounds: Agreement | None, timeline: Timeline
) -> Pager:
    sizes = unit_sizes(plan.layouts, plan.placement, plan.shares, plan.mode)
    return Pager(sizes, host, arena, plan.device, store, limits(plan.config, plan.mode), rounds, timeline=timeline)


# -- weights ------------------------------------------------------------------------------------------


def _held(plan: Plan, host: HostArena, arena: DeviceArena, pager: Pager, store: Store | None) -> LocalShards:
    residents = make_resident_shards(plan.parts, plan.mode, plan.placement, host, arena)
    plan.device.synchronize()  # torch may still fill the arena's memory, or use what it was; uploads must come after
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


def _fill(plan: Plan, model: nn.Module, held: LocalShards, resume: bool) -> None:
    """Put every weight into its home; the model is left without any."""
    filler = InitialFill(held, plan.parts.largest_unit, plan.ranks)
    if not resume:
        filler.fill(model, plan.layouts, plan.config.offload.seed)
        return
    filler.read_back(len(held.layouts))
    for parameter in model.parameters():  # whatever the model came with is dropped, unread
        forget(parameter)


def _move_buffers(model: nn.Module, plan: Plan) -> None:
    """Put buffers on the device, in their dtype, as they are on rank 0; those that are one buffer stay one."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the original is kept, so that its id is
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
    """A copy of the buffer as it is on rank 0."""
    values = buffer.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    ranks.broadcast(values, 0)
    return values


def _places(plan: Plan, model: nn.Module) -> list[list[ParamHandle]]:
    """A place for each parameter, unit by unit."""
    dtype, device = plan.mode.weight_dtype, plan.device.torch
    return [
        [
            ParamHandle(model.get_parameter(segment.name), segment.name, unit, position, dtype, segment.shape, device, RULES)
            for position, segment in enumerate(layout.segments)
        ]
        for unit, layout in enumerate(plan.layouts)
    ]


def _weights(
    plan: Plan,
    model: nn.Module,
    places: Sequence[Sequence[ParamHandle]],
    pager: Pager,
    hooks: ModuleHooks,
    bindings: UnitViews,
    callbacks: EngineCallbacks,
) -> WeightEdits:
    return WeightEdits(
        model,
        plan.layouts,
        places,
        pager,
        hooks,
        bindings,
        plan.mode.weight_dtype,
        trains=any(plan.parts.trainable_numel),
        several_ranks=plan.ranks is not None,
        callbacks=callbacks,
    )


# -- gradients and updates ----------------------------------------------------------------------------


def _gradients(
    plan: Plan,
    trainable: Sequence[range],
    host: HostArena,
    arena: DeviceArena,
    queue: SharedQueue | None,
    pager: Pager,
    rounds: Agreement | None,
    written: Written,
    callbacks: EngineCallbacks,
    recorders: Recorders,
    compute: ComputeSpans,
) -> GradientAccumulator:
    dtype = plan.parts.gradient_dtype
    with contextlib.ExitStack() as undo:
        spill = downloads = None
        if queue is not None and plan.placement.spilled:
            spill = _spill(plan, trainable, host, queue, pager, written, recorders.spans)
            undo.callback(spill.close)
        if any(plan.parts.trainable_numel) and not plan.device.host_addressable:
            downloads = _downloads(plan, host, pager, recorders.timeline)
            undo.callback(downloads.close)
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
                plan.layouts, trainable, host, dtype, waiting, callbacks, timeline=recorders.timeline, compute=compute
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
                bucket_dtype=plan.mode.weight_dtype,  # what a backward makes
                ranks=plan.ranks,
                rounds=rounds,
                timeline=recorders.timeline,
                compute=compute,
            )
        undo.pop_all()
    return gradients


def _downloads(plan: Plan, host: HostArena, pager: Pager, timeline: Timeline) -> DeviceToHost:
    staging = [host.staging.take(host.classes.staging // STAGING_BUFFERS) for _ in range(STAGING_BUFFERS)]
    leases = [lease for lease in staging if lease is not None]
    assert len(leases) == STAGING_BUFFERS, "the class was sized for them"
    most = plan.parts.largest_gradient
    return DeviceToHost(plan.device, leases, most, plan.device_kernels, pager.fail, pager.check, timeline=timeline)


def _spill(
    plan: Plan,
    trainable: Sequence[range],
    host: HostArena,
    queue: SharedQueue,
    pager: Pager,
    written: Written,
    spans: DriveSpans,
) -> DiskSpill:
    placement, parts = plan.placement, plan.parts
    itemsize = parts.gradient_dtype.itemsize
    leases = [host.gradients.take(placement.window_numel * itemsize) for _ in range(WINDOWS)]
    stretches = {
        unit: windows(borders(plan.layouts[unit], trainable[unit]), placement.window_numel)
        for unit in placement.spilled
    }
    nbytes = {unit: parts.nbytes[unit][State.GRAD] for unit in stretches}
    scratch = SpillFile(plan.config.drives, nbytes, queue, written, spans)
    return DiskSpill(stretches, parts.gradient_dtype, [lease for lease in leases if lease], scratch, pager.fail)


def _updater(
    plan: Plan, optimizer: Optimizer, host: HostArena, held: LocalShards, gradients: GradientAccumulator, timeline: Timeline
) -> UpdateWorker:
    return UpdateWorker(
        held=held,
        arena=host,
        gradients=gradients,
        strategy=_strategy(plan, optimizer, host, held, gradients),
        tile_numel=plan.placement.tile_numel,
        tile_buffers=plan.placement.tile_buffers,
        commit_every=plan.commit_every,
        timeline=timeline,
    )


def _strategy(plan: Plan, optimizer: Optimizer, host: HostArena, held: LocalShards, gradients: GradientAccumulator) -> UpdateStrategy:
    """Returns the way in which the mode's optimizer does its steps."""
    if plan.mode.optimizer == TORCH:
        scratch = host.tiles.take(plan.placement.scratch_nbytes)
        assert scratch is not None and optimizer.replaced is not None
        return TorchUpdates(optimizer=optimizer.replaced, layouts=plan.layouts, scratch=scratch.tensor(torch.float32))
    if plan.mode.optimizer == LAMB:
        return LambUpdates(mode=plan.mode)
    return FusedUpdates(mode=plan.mode, device=held.device, gradients=gradients)
