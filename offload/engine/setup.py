"""Construction of an engine's core from a plan: files, memory, threads and hooks, in this order.

If a step fails, the objects made before are closed, and files are left as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from offload import kernels
from offload.activations import checkpoints as policy
from offload.activations.activations import Activations
from offload.activations.checkpoints import UnitCheckpoints, UnitSeconds, blocks_of
from offload.activations.kept_inputs import DiskSlots, HostBlocks, KeptInputs, Staging
from offload.activations.tiles import tile as tile_mlps
from offload.aio import IoQueue
from offload.aio.backend import DEFAULTS
from offload.aio.memory import release_heap
from offload.aio.shared_queue import SharedQueue
from offload.checkpointing import with_configured
from offload.config import Aio, Config, effective, load_config, resolve_batch
from offload.config.load import read_json
from offload.distributed.agreement import Agreement, AllOrNothing, Rounds
from offload.distributed.gathers import SecondaryShards, WeightGathers, form_node
from offload.distributed.process_group import UNABLE, Ranks, join_ranks, meet_others, stay_away
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.distributed.reshard import NewRanks, finish, reshard
from offload.distributed.world import World
from offload.engine import build_optimizer
from offload.engine.callbacks import EngineCallbacks
from offload.engine.components import EngineComponents, close_all
from offload.engine.data import Loader, check_data, load
from offload.engine.deferred import forget
from offload.engine.dtype_mismatch import kept_in_fp32
from offload.engine.edits import WeightEdits
from offload.engine.engine import Engine, EngineCore
from offload.engine.experts import StackHandle
from offload.engine.fill import InitialFill, make_resident_shards
from offload.engine.gradient_transfer import DeviceToHost, DiskSpill, windows
from offload.engine.gradients import GradientAccumulator, GradientPlaces, UnitCompletion, borders, parameter_starts
from offload.engine.hooks import ModuleHooks, SavedTensors, other_hooks
from offload.engine.keywords import refuse
from offload.engine.metric_writers import check_monitor, make_reporter
from offload.engine.metrics import ComputeSpans, Listener, Relay, StepMeter, compute_spans
from offload.engine.opaque import ParameterBytes, page_out, with_adopted_buffers
from offload.engine.optimizer import Optimizer, Rule, check_options, refuse_others
from offload.engine.params import ParamHandle, handle_of
from offload.engine.plan import (
    Plan,
    check_division,
    check_fits,
    check_groups,
    check_model,
    check_nodes,
    check_replaced,
    check_tensor_parallel,
    decide,
    summary,
    warn_if_slow,
)
from offload.engine.saved_state import ModuleEntries
from offload.engine.shards import LocalShards
from offload.engine.shared_memory import line_on_users, memory_of
from offload.engine.snapshot import Snapshot, keep_generators, scheduler_state
from offload.engine.state import LossScaler, StepSettings, job_of
from offload.engine.torch_functions import RULES
from offload.engine.unit_views import UnitViews
from offload.engine.update import RunFacts, UpdateWorker, run_may_speculate
from offload.engine.update_strategy import UpdateSetting, UpdateStrategy
from offload.errors import ConfigError, StoreError, UsageError
from offload.hardware.probe import kept_window
from offload.launch.environment import rank_number
from offload.layout.fingerprint import describe
from offload.layout.flat_layout import Segment
from offload.layout.frozen import expander
from offload.layout.memory_plan import limits, unit_sizes
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, makes_early_updates
from offload.layout.placement import STAGING_BUFFERS, WINDOWS
from offload.layout.tiers import copied_memory
from offload.model_io.saved_names import about_saved, saved_names
from offload.notices import Headline, Remark, announce
from offload.parallel.sequence import SequenceForward, SequenceParallel, check_units, form_groups
from offload.parallel.sequence import check_model as check_sequences
from offload.parallel.sharded_params import FoundShards, ShardedViews, TakenShards, find_shards, taken_over
from offload.parallel.stages import PipelineStages, check_pipeline, pipeline_place, stage_sites
from offload.parallel.tensor import form_grid
from offload.passes.layer_major import LayerMajor
from offload.sizes import count_of, format_size
from offload.states import State, Tier
from offload.swapper.memory.device import Device, compute_device, open_device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.pager import Pager
from offload.swapper.store import Rating, Store, StoreSpec, Written
from offload.swapper.store.format import last_of_all, was_committed
from offload.swapper.store.inspection import look
from offload.swapper.store.recovery import check_one_run
from offload.swapper.store.requests import DriveSpans
from offload.swapper.store.spill_file import SpillFile
from offload.swapper.weight_source import WeightSource
from offload.timeline import OFF, Timeline, open_timeline

if TYPE_CHECKING:
    from typing_extensions import Unpack


# -- run files -----------------------------------------------------------------------------------------
#
# The files of a run: swap files, their queue, and the count of bytes written.


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run, as far as it has any."""

    queue: SharedQueue | None
    """Queue of all requests; None without files."""
    store: Store | None
    """The swap files; None without states on DISK."""
    source: WeightSource | None
    """The files from which the pager reads weights: the swap files, or others that are only read; None without any."""
    others: contextlib.ExitStack
    """Closes the files that are only read."""
    make: Callable[[], None]
    """Makes the swap files of a new run, before anything is written to them; does nothing for a resumed run."""
    written: Written
    """Counts of the bytes that go to each drive."""


class NewStore:
    """The swap files of a start, which replace those of an earlier run as late as possible.

    An error before `make` leaves the earlier run as it was, on every rank.
    """

    def __init__(self, plan: Plan, store: Store | None, resumed: bool, lr_scheduler: object) -> None:
        """Changes nothing.

        Args:
            plan: All decisions.
            store: The swap files, locked; None without any.
            resumed: True if they are open at a commit.
            lr_scheduler: The schedule, whose state the first commit contains; None without one.
        """
        self._plan, self._store, self._resumed, self._lr_scheduler = plan, store, resumed, lr_scheduler
        self._made = False

    def make(self) -> None:
        """Makes the files of a new run, once every rank has come so far. Collective.

        Raises:
            ConfigError: If no commit can contain the state of the schedule.
            StoreError: If there is no room.
        """
        plan, store = self._plan, self._store
        if store is None or self._resumed:
            return
        if plan.commit_every:
            scheduler_state(self._lr_scheduler)
        # All take the first rank's: by it folders of ranks are known to belong together.
        run_id = plan.world.everyone.share(uuid.uuid4().hex, "check its start")[0]
        self._made = True
        store.create(over=plan.resume or plan.replace, run_id=run_id)
        # A rank commits only after this exchange: no commit exists beside files of an earlier run.
        plan.world.everyone.share(None, "create its store")

    def undo(self) -> None:
        """Closes the files after an error. An earlier run keeps its files, and a new one leaves none."""
        if self._store is None:
            return
        if not self._plan.resume and (self._made or not was_committed(self._store.folders[0])):
            self._store.remove()
        self._store.close()


# -- gradients -----------------------------------------------------------------------------------------
#
# The accumulator of gradients, put together as the plan says: its memory in each tier, and its threads.


def gradient_accumulator(
    plan: Plan,
    host: HostArena,
    arena: DeviceArena,
    files: RunFiles,
    pager: Pager,
    agreement: Agreement,
    callbacks: EngineCallbacks,
    spans: DriveSpans,
    compute: ComputeSpans,
) -> GradientAccumulator:
    """Returns the accumulator of gradients, with its memory in the tiers of the plan.

    Args:
        plan: All decisions.
        host: Source of host buffers.
        arena: Source of device buffers.
        files: The files of the run.
        pager: Receives failures of other threads.
        agreement: What the ranks agree on.
        callbacks: The engine.
        spans: Records requests to the drives.
        compute: Spans of forward and backward.
    """
    dtype, trainable, timeline = plan.parts.gradient_dtype, plan.trainable, pager.table.timeline
    with contextlib.ExitStack() as undo:
        spill = downloads = None
        if files.queue is not None and plan.placement.spilled:
            spill = _spill(plan, trainable, host, files.queue, pager, files.written, spans)
            undo.callback(spill.close)
        # The CPU cannot read gradients on such a device, so they are first copied to pinned staging buffers.
        if any(plan.parts.trainable_numel) and not plan.device.host_addressable:
            downloads = _downloads(plan, host, pager, timeline)
            undo.callback(downloads.close)
        waiting = _gradient_places(plan, arena, spill, downloads)
        accumulator: GradientAccumulator
        if plan.parts.reduction is None:
            accumulator = GradientAccumulator(
                plan.layouts,
                trainable,
                host,
                dtype,
                waiting,
                callbacks,
                timeline=timeline,
                compute=compute,
                completion=UnitCompletion(callbacks) if run_may_speculate(_run_facts(plan)) else None,
            )
        else:
            assert isinstance(agreement, Rounds), "only several ranks reduce"
            accumulator = ReduceScatterAccumulator(
                plan.layouts,
                trainable,
                host,
                dtype,
                waiting,
                callbacks,
                device=plan.device,
                device_arena=arena,
                reduction=plan.parts.reduction,
                ranks=plan.world.ranks,
                rounds=agreement,
                timeline=timeline,
                compute=compute,
            )
        undo.pop_all()
    return accumulator


def _gradient_places(
    plan: Plan, arena: DeviceArena, spill: DiskSpill | None, downloads: DeviceToHost | None
) -> GradientPlaces:
    """Returns the memory in which gradients wait, other than that of the host."""
    dtype = plan.parts.gradient_dtype
    # Totals on the device keep their place for the whole run, so that no step allocates device memory.
    on_device = {
        unit: arena.keep(plan.parts.nbytes[unit][State.GRAD]).view(dtype)
        for unit, tiers in enumerate(plan.placement.tiers)
        if tiers.get(State.GRAD) is Tier.DEVICE
    }
    totals = {unit: arena.keep(nbytes).view(dtype) for unit, nbytes in plan.placement.added}
    return GradientPlaces(spill=spill, on_device=on_device, totals=totals, downloads=downloads)


def _run_facts(plan: Plan) -> RunFacts:
    """Returns the facts that decide whether updates may be made under the backward."""
    return RunFacts(
        wanted=makes_early_updates(plan.config.offload.speculate, plan.device.host_addressable)
        and plan.config.offload.debug.overlap,
        ranks=plan.world.everyone.size,
        one_pass=plan.mode.one_pass,
        commits=plan.slots == 2 and plan.commit_every > 0,
        on_disk=any(
            part and all(tier is Tier.DISK for state, tier in row.items() if state is not State.GRAD)
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
        unit: windows(borders(layout, part), parameter_starts(layout, part), placement.window_numel)
        for unit, layout, part in ((unit, plan.layouts[unit], trainable[unit]) for unit in placement.spilled)
    }
    nbytes = {unit: parts.nbytes[unit][State.GRAD] for unit in unit_windows}
    # Gradients do not outlive a step, so their file is never committed.
    scratch = SpillFile(
        plan.config.drives,
        nbytes,
        queue,
        written,
        spans,
        title=lambda unit: f"the gradient of {plan.layouts[unit].name or 'the root'}",
    )
    # A receiving thread adds gradients beside the backward, so that its waits are none of the model's.
    timeline = pager.table.timeline if plan.device.host_addressable else OFF
    return DiskSpill(
        unit_windows, parts.gradient_dtype, [each for each in buffers if each], scratch, pager.fail, timeline
    )


# -- hooks ---------------------------------------------------------------------------------------------
#
# The hooks on a model: units, saved tensors, and blocks that are computed again in backward.


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


# -- assembly ------------------------------------------------------------------------------------------
#
# Assembly of an engine's components from a plan: memory, weights, gradients, hooks and the update worker.
#
# If a step fails, the steps before it are undone. Files belong to the caller.


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
        compute, agreement = compute_spans(timeline, shown_names(plan)), _agreement(plan, arena, callbacks, timeline)
        pager = undo.enter_context(contextlib.closing(_pager(plan, host, arena, files, agreement, timeline)))
        held = _held(plan, host, arena, pager, files.store)
        sources = _sources(plan)
        _fill(plan, model, held, files, resume, sources)
        gradients = gradient_accumulator(
            plan, host, arena, files, pager, agreement, callbacks, recorders.spans, compute
        )
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
        world=plan.world,
        agreement=agreement,
        store=files.store,
        queue=files.queue,
        read_only=files.others,
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


def _agreement(plan: Plan, arena: DeviceArena, callbacks: EngineCallbacks, timeline: Timeline) -> Agreement:
    """Returns the agreement of the ranks among which ZeRO divides."""
    if plan.world.ranks.size == 1:
        return Agreement()
    coded = plan.parts.gathers
    codes, secondary = arena.keep(coded.nbytes) if coded else None, None
    if (sizes := plan.parts.secondary) is not None:
        secondary = SecondaryShards(
            sizes, plan.world.ranks.rank, plan.world.node, plan.device, arena.keep(sizes.nbytes)
        )
    gathers = WeightGathers(plan.world.ranks, plan.device, coded, codes, secondary)
    return Rounds(gathers, shown_names(plan), callbacks, timeline=timeline)


def shown_names(plan: Plan) -> list[str]:
    """Returns the name of each unit for messages and timelines."""
    return [layout.name or "the root" for layout in plan.layouts]


def _pager(
    plan: Plan, host: HostArena, arena: DeviceArena, files: RunFiles, agreement: Agreement, timeline: Timeline
) -> Pager:
    """Returns the pager."""
    # The pager receives sizes and limits only; it knows neither modules nor parameters.
    sizes = unit_sizes(plan.layouts, plan.placement, plan.shares, plan.mode, plan.images)
    # Where each rank has whole weights, a use needs no other rank: they meet when they reduce gradients, and at step().
    peers = agreement if isinstance(agreement, Rounds) and plan.world.ranks.mesh.shards > 1 else None
    return Pager(
        sizes,
        host,
        arena,
        plan.device,
        files.source,
        limits(plan.config, plan.mode),
        peers,
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
    filler = InitialFill(held, plan.world)
    # A new run begins with the user's values, those from files, or the modules' initialization from the seed.
    if not resume:
        # The stages of a pipeline number their units alike, and are to draw other values.
        seed = plan.config.offload.seed + plan.world.position
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
                value = buffer if plan.world.ranks.size == 1 else _of_rank_0(buffer, plan.world.ranks)
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
        several_ranks=plan.world.ranks.size > 1,
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
        strategy=_strategy(plan, optimizer.rule, host, held, gradients),
        tile_numel=plan.placement.tile_numel,
        tile_nbytes=(host.classes.tiles - plan.placement.scratch_nbytes) // plan.placement.tile_buffers,
        tile_buffers=plan.placement.tile_buffers,
        commit_every=plan.commit_every,
        timeline=timeline,
    )


def _strategy(
    plan: Plan, rule: Rule, host: HostArena, held: LocalShards, gradients: GradientAccumulator
) -> UpdateStrategy:
    """Returns the strategy by which the optimizer's rule updates units."""
    nbytes = plan.placement.scratch_nbytes
    room = host.tiles.take(nbytes) if nbytes else None
    return rule.strategy(
        UpdateSetting(
            mode=plan.mode,
            layouts=plan.layouts,
            parts=plan.trainable,
            whole=plan.parts.whole,
            scratch=torch.empty(0, device="cpu") if room is None else room.tensor(torch.float32),
            device=held.device,
            gradients=gradients,
            # A rank that has whole units steps them as one rank does, and exchanges nothing, however many replicas
            # there are.
            ranks=Ranks() if plan.world.ranks.mesh.shards == 1 else plan.world.ranks,
        )
    )


# -- build ---------------------------------------------------------------------------------------------


_T = TypeVar("_T")

OpenSource: TypeAlias = Callable[[SharedQueue, DriveSpans, contextlib.ExitStack], WeightSource]
"""A function that opens files of weights that are only read, and leaves their closing to the stack."""

STARTING = threading.RLock()
"""Serializes the starts of engines in a process: memory that a plan counts on must still be free when taken."""


_SMALL_BLOCK, _LITTLE = 32 << 10, 256 << 10
"""Bytes of a block, and bytes in flight, below which a drive waits for requests: measured with 4 and 64 KiB."""


def build(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    make: Callable[[EngineCore, tuple[str, ...]], _T],
    lr_scheduler: Any = None,
    loader: Loader | None = None,
    *,
    open_source: OpenSource | None = None,
    listener: Listener | None = None,
) -> _T:
    """Returns an engine. Creates files, memory, threads and hooks, in this order; an error closes what was made before.

    Args:
        plan: All decisions.
        model: Loses its weights.
        optimizer: Groups of its parameters.
        make: Makes the engine of its core and of the lines for the user.
        lr_scheduler: A schedule, or None.
        loader: Batches of training data, or None.
        open_source: Opens the files from which weights are read, if these are not the swap files.
        listener: Receives the spans of the engine; None for none but those that the config asks for.
    """
    timeline = open_timeline(plan.config.offload.trace, plan.world.everyone.rank, plan.world.everyone.size)
    if plan.world.everyone.rank == 0:
        check_monitor(plan.config)
    written = _written(plan)
    inputs_on_disk = plan.config.drives and plan.config.activation_tier in ("cpu", "nvme", "auto")
    # Without a file to read or write no I/O thread is started.
    on_files = plan.slots or plan.placement.spilled or inputs_on_disk or open_source
    queue = _queue(plan.config) if on_files else None
    memory = memory_of(model)
    store: Store | None = None
    files, others = NewStore(plan, None, False, lr_scheduler), contextlib.ExitStack()
    try:
        recorders = _recorders(plan, model, timeline, queue, written, listener)
        progress: Snapshot | None = None
        if queue is not None and plan.slots:
            store = _store(plan, model, optimizer, lr_scheduler, queue, written, recorders.spans)
            files = NewStore(plan, store, False, lr_scheduler)
            progress = _progress(plan, store, model, optimizer)
            files = NewStore(plan, store, progress is not None, lr_scheduler)

        def components(callbacks: EngineCallbacks) -> EngineComponents:
            source: WeightSource | None = store
            if queue is not None and open_source is not None:
                source = open_source(queue, recorders.spans, others)
            found = RunFiles(queue=queue, store=store, source=source, others=others, make=files.make, written=written)
            return _components(plan, model, optimizer, found, progress is not None, recorders, callbacks)

        core = EngineCore(
            module=model,
            device=plan.device.torch,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loader=loader,
            settings=_settings(plan),
            layouts=plan.layouts,
            commits=bool(plan.commit_every),
            assemble=components,
        )
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one that is raised
            close_all(*(() if queue is None else (queue.close,)), others.close, files.undo)
        raise
    try:
        return make(core, (*_notices(plan, core), *line_on_users(memory), *_begin(plan, core, progress)))
    except BaseException:
        core.shutdown.abandon(remove=progress is None)
        raise


def _store(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: Any,
    queue: SharedQueue,
    written: Written,
    spans: DriveSpans,
) -> Store:
    """Returns this rank's store, locked; a run of another number of ranks becomes one of this number first. Collective.

    For the arguments see `build` and `Store`.
    """
    config, spec = plan.config, _store_spec(plan, model)
    if config.offload.resume == "never":
        run, job = Path(config.drives[0]) / config.offload.run, job_of(model, _settings(plan), optimizer, lr_scheduler)
        # The first rank alone has the note of the end, which its store deletes.
        AllOrNothing(plan.world.ranks, "replace the run").by_first(lambda: check_replaced(run, spec, job))
    new = NewRanks(
        drives=config.drives,
        run=config.offload.run,
        spec=spec,
        layouts=plan.layouts,
        mode=plan.mode,
        shares=plan.shares,
        ranks=AllOrNothing(plan.world.ranks, "give the run another number of ranks"),
        everyone=AllOrNothing(
            plan.world.everyone if plan.world.divides_model else Ranks(), "give the run another number of ranks"
        ),
        place=plan.world.description,
        mesh=plan.world.ranks.mesh,
    )
    new.ranks.by_first(lambda: finish(new.folders))
    line = None
    if plan.resume and plan.slots == 2:
        line = reshard(new, queue, lambda progress: check_fits(progress, model, optimizer))
    store = Store(new.drives, new.run, plan.world.ranks.rank, spec, queue, written, spans)
    store.notices += [] if line is None else [line]
    return store


def _progress(plan: Plan, store: Store, model: nn.Module, optimizer: Optimizer) -> Snapshot | None:
    """Opens the files of a run that is resumed, and returns its state; None for a new run."""
    at = _last_commit_of_all(plan, store)
    if at is None:
        return None
    progress = Snapshot.unpack(store.open(at))
    progress.check_fits(plan.layouts)
    check_fits(progress, model, optimizer)
    return progress


def _components(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    files: RunFiles,
    resume: bool,
    recorders: Recorders,
    callbacks: EngineCallbacks,
) -> EngineComponents:
    """Returns the components; for the arguments see `assemble`."""
    parts = assemble(plan, model, optimizer, files, resume, recorders, callbacks)
    # The timeline begins once the components are built: the filling of the tiers is not shown.
    recorders.timeline.start()
    if plan.tiled_mlps:  # last, as nothing that fails follows before the engine owns the components
        untile = tile_mlps(model, plan.tiled_mlps, plan.config.offload.tile_mlp)
        parts = dataclasses.replace(parts, untile=untile)
    if plan.world.divides_model or plan.sites:
        # Behind all other hooks on modules and state dicts, as nothing that fails follows here either.
        parts = dataclasses.replace(parts, sharded_views=ShardedViews(plan.sites))
    if plan.world.sequence.size > 1:
        forward = SequenceForward(model, SequenceParallel(world=plan.world))
        parts = dataclasses.replace(parts, sequence_forward=forward)
    return parts


def _notices(plan: Plan, core: EngineCore) -> tuple[str, ...]:
    """Returns the lines of the plan and of the components."""
    components = core.components
    return (
        *plan.notices,
        *_io_notices(components.queue, plan.config.aio),
        summary(plan),
        *(components.store.notices if components.store is not None else ()),
        *components.timeline.notices,
        *components.activations.notices,
        *core.state.notices(),
    )


def _begin(plan: Plan, core: EngineCore, progress: Snapshot | None) -> tuple[str, ...]:
    """Restores the state of a resumed run, or commits that of a new one; returns lines on what differs."""
    notices: tuple[str, ...] = ()
    store = core.components.store
    if progress is not None:
        notices = tuple(core.state.restore(progress))
        folder = os.path.join(plan.config.drives[0], plan.config.offload.run)
        data = core.state.where_data_goes_on()
        notices = (Headline(f"resuming after step {core.state.global_steps} of the run in {folder}{data}"), *notices)
    elif store is not None and plan.commit_every:
        # Step 0: a kill during the first step then resumes from the initial weights.
        store.commit(0, core.state.take().pack())
    if core.components.meter is not None:
        core.components.meter.begin()
    return notices


def _queue(config: Config) -> SharedQueue:
    """Returns the queue of the config's I/O settings."""
    return SharedQueue(
        IoQueue,
        config.offload.io_backend,
        block_bytes=config.aio.block_size,
        depth=config.aio.queue_depth,
        threads=config.aio.intra_op_parallelism,
        window_bytes=kept_window(config.drives),
    )


def _io_notices(queue: SharedQueue | None, asked: Aio) -> tuple[str, ...]:
    """Returns notices if the system refuses the fastest backend, if drives are used in windows, and if little moves."""
    if queue is None:
        return ()
    refused = f"I/O by {queue.backend}: {'; '.join(queue.refusals)}"
    window = format_size(queue.window_bytes)
    windows = f"reads and writes go in windows of {window}: `offload probe` measured that both at once are slower here"
    auto = DEFAULTS["io_uring"]
    block = asked.block_size or auto.block_bytes
    in_flight = (asked.intra_op_parallelism or auto.threads) * (asked.queue_depth or auto.depth) * block
    little = (
        f'"aio" asks for blocks of {format_size(block)} and {format_size(in_flight)} in flight, with which drives take '
        "several times as long; leave its keys out, or take those that `offload tune` measures"
    )
    return (
        *((refused,) if queue.refusals else ()),
        *((windows,) if queue.window_bytes else ()),
        *((little,) if block < _SMALL_BLOCK or in_flight < _LITTLE else ()),
    )


def _settings(plan: Plan) -> StepSettings:
    """Returns the settings of a step."""
    return StepSettings(
        micro_batch_size=plan.batch.micro,
        accumulation=plan.batch.accumulation,
        total_batch_size=plan.batch.total,
        clip=plan.config.gradient_clipping,
        skip_nonfinite=plan.config.offload.on_nonfinite == "skip",
        seed=plan.config.offload.seed,
        overlap=plan.placement.overlaps_updates(
            plan.config.offload.debug.overlap,
            on_cpu=plan.device.host_addressable,
            alone=plan.parts.alone,
            slots=plan.slots,
        ),
        config=plan.config,
        scaler=LossScaler(plan.config.fp16) if plan.config.dtype == "fp16" else None,
        device_need=plan.placement.device_need,
    )


def _recorders(
    plan: Plan,
    model: nn.Module,
    timeline: Timeline,
    queue: SharedQueue | None,
    written: Written,
    listener: Listener | None,
) -> Recorders:
    """Returns the recorders of the components; for a breakdown of steps the meter also receives spans."""
    meter = _meter(plan, model, queue, written)
    if listener is None and plan.config.wall_clock_breakdown:
        listener = meter
    return Recorders(
        timeline=timeline if listener is None else Relay(timeline, listener),
        spans=DriveSpans(timeline, shown_names(plan)),
        meter=meter,
    )


def _facts(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """Returns the facts on the run for the first line of a log."""
    config = plan.config
    return {
        "run": config.offload.run,
        "model": type(model).__name__,
        "parameters": sum(segment.value_numel for layout in plan.layouts for segment in layout.segments),
        "dtype": config.dtype,
        "moments": config.moments,
        "master": config.offload.master,
        "device": str(plan.device.torch),
        "ranks": plan.world.everyone.size,
        "samples_a_step": plan.batch.total,
        "host_budget_bytes": sum(plan.placement.classes),
        "device_budget_bytes": plan.placement.device_nbytes,
        "drive_tbw": config.offload.drive_tbw,
        "drive_share": config.offload.drive_share,
    }


def _meter(plan: Plan, model: nn.Module, queue: SharedQueue | None, written: Written) -> StepMeter | None:
    """Returns the meter of steps, or None if the config does not ask for one, or on any rank but 0."""
    facts = _facts(plan, model)
    reporter = make_reporter(plan.config, plan.batch.total, facts) if plan.world.everyone.rank == 0 else None
    if reporter is None:
        return None

    def io_bytes() -> tuple[int, int]:
        return (0, 0) if queue is None else (queue.read_bytes, queue.written_bytes)

    breakdown = plan.config.wall_clock_breakdown
    sent = (lambda: plan.world.sent.total) if plan.world.everyone.size > 1 else None
    return StepMeter(plan.device.torch, io_bytes, written.drives, sent, breakdown, reporter)


def _written(plan: Plan) -> Written:
    """Returns the counter of bytes written to the drives, with the drives' endurance from the config."""
    block = plan.config.offload
    # Ranks of one machine share its drives, and each counts only its own bytes.
    local = rank_number(os.environ, "LOCAL_WORLD_SIZE", 1) if plan.world.everyone.size > 1 else 1  # set by torchrun
    rating = None if block.drive_tbw is None else Rating(block.drive_tbw * 1e12, block.drive_share, local)
    return Written(plan.config.drives, rating)


def _last_commit_of_all(plan: Plan, store: Store) -> int | None:
    """Returns the number of the last commit that every rank holds, or None to start over. Changes nothing.

    Raises:
        StoreError: If a rank has no commit, or the commits are of two runs.
    """
    if not plan.resume:
        return None
    newest = store.newest_serial()
    # The ranks decide together: a single rank that resumed would wait for the others for ever.
    folder = store.folders[0]
    run_id = None if newest is None else look(folder).run_id
    every = plan.world.everyone.share([newest, str(folder), run_id])
    everyone: list[int | None] = [row[0] for row in every]
    if None not in everyone:
        check_one_run([(path, run) for _, path, run in every])
        return last_of_all(everyone)
    # If a run was killed while it was created, some ranks have no commit, but then no rank has more than its first.
    if any(commit is not None and commit > 1 for commit in everyone):
        without = ", ".join(str(rank) for rank, commit in enumerate(everyone) if commit is None)
        raise StoreError(
            f"rank {without} of {len(everyone)} has no commit in {folder.parent}, other ranks have: its "
            "folder was deleted, another drive is mounted there, or the run had another number of ranks; put the swap "
            "files of all ranks back, resume with as many ranks as the run had, or choose another run name"
        )
    return None


def _store_spec(plan: Plan, model: nn.Module) -> StoreSpec:
    """Returns the layout of the swap files."""
    layout = describe(plan.layouts, plan.mode, plan.world.ranks.mesh.shards, plan.world.ranks.mesh.replicas)
    # A grid alone describes itself: descriptions of other stores have no such key.
    layout |= plan.world.description
    return plan.placement.store(plan.parts, plan.slots, layout, about_saved(model, plan.world.divides_model))


# -- gpu allocator -------------------------------------------------------------------------------------
#
# Growing segments for torch's allocator of a GPU, unless the user has chosen otherwise.
#
# torch's allocator takes memory from the driver in segments. Of fixed size, each keeps the gaps that batches of other
# lengths leave in it, and beside an arena that takes most of the GPU a gap is memory that nobody can use. A segment
# that grows is one range of addresses, onto which memory is mapped as it is needed.
#
# torch reads the setting once, from the environment, when CUDA is first used. To change it later there is only a
# private function, which sets every other setting of the user back to its default.


_NAME = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable that every version reads for CUDA. torch 2.9 alone warns that it is deprecated, and ignores
PYTORCH_ALLOC_CONF for CUDA in 2.9.1 (pytorch/pytorch#183387); later versions take either name.
"""
_NAMES = (_NAME, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""All variables with settings of the allocator."""
_GROWING = "expandable_segments:True"


def let_segments_grow(device: str) -> tuple[Remark, ...]:
    """Asks torch for segments that grow, in this process's environment, and returns a line for the user.

    A further call changes nothing, and returns the same line.

    Args:
        device: the device of the config: "auto", "cpu" or "cuda".

    Returns:
        The line if segments grow by this setting, or if it comes too late; nothing if there is no GPU of NVIDIA, or
        if the user has set anything else.
    """
    if device == "cpu" or torch.version.hip is not None or not torch.cuda.is_available():
        return ()
    asks, line = chosen(os.environ, torch.cuda.is_initialized())
    if asks:
        os.environ[_NAME] = _GROWING
    return () if line is None else (line,)


def chosen(environment: Mapping[str, str], in_use: bool) -> tuple[bool, Remark | None]:
    """Returns whether the variable is to be set, and the line for the user, if any.

    Args:
        environment: the environment of the process.
        in_use: True if CUDA has been used, and the environment read.
    """
    given = {name: environment[name] for name in _NAMES if environment.get(name)}
    grows = Remark(
        f"torch's allocator lets its segments grow ({next(iter(given), _NAME)}={_GROWING}), which leaves fewer gaps "
        "beside the weights; another value of this variable changes that"
    )
    if given:
        return False, grows if set(given.values()) == {_GROWING} else None
    if in_use:
        return False, Remark(
            f"CUDA was in use before offload.initialize, so torch's allocator keeps segments of fixed size, which may "
            f"lose memory to gaps: set {_NAME}={_GROWING} in the environment"
        )
    return True, grows


# -- plain config --------------------------------------------------------------------------------------
#
# The keywords of `initialize` for a loop of plain PyTorch, as the config that they mean.


class PlainKeywords(TypedDict, total=False):
    """Keywords that stand for a config, or beside one that says the same."""

    weights: str
    """Tier of the weights: "none" (the device), "cpu" or "nvme"."""
    states: str
    """Tier of the optimizer's states and fp32 masters, by the same names."""
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """Folder of the swap files, or one for each drive."""
    host_memory: int | str
    """Bytes of host memory, as a number or text such as "32GiB"."""
    device_memory: int | str
    """Bytes of device memory."""
    dtype: str | torch.dtype
    """"bf16", "fp16" or "fp32"; by default that of the model's parameters."""
    gradient_accumulation_steps: int
    """Micro-batches of a step."""


class _Key(NamedTuple):
    """A key of the config, as the path of its blocks."""

    path: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.path)


_KEYS = {
    "weights": _Key(("zero_optimization", "offload_param", "device")),
    "states": _Key(("zero_optimization", "offload_optimizer", "device")),
    "path": _Key(("offload", "nvme_path")),
    "host_memory": _Key(("offload", "host_memory")),
    "device_memory": _Key(("offload", "device_memory")),
    "gradient_accumulation_steps": _Key(("gradient_accumulation_steps",)),
}
"""The key that each keyword sets, except for `dtype`."""
_TIERS = ("none", "cpu", "nvme")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plain_config(model: Any, config: Any, keywords: Mapping[str, Any]) -> Any:
    """Returns the config that keywords stand for, added to the given one.

    Args:
        model: the model, whose dtype is the default where there is no config.
        config: a config as `initialize` takes it, or None.
        keywords: those of `PlainKeywords` that were given.

    Raises:
        ConfigError: if a keyword and the config say different things, which names both; if a keyword has a value that
            it cannot have, or a tier on drives has no path.
        UsageError: if there is no such keyword.
    """
    if unknown := sorted(keywords.keys() - PlainKeywords.__annotations__.keys()):
        raise UsageError(
            f"initialize got the keyword {unknown[0]!r}, expected some of {', '.join(PlainKeywords.__annotations__)}"
        )
    # None is what a caller passes on who was given nothing.
    given = {name: value for name, value in keywords.items() if value is not None}
    if not given:
        return config
    _check_tiers(given, config)
    content: dict[str, Any] = {} if config is None else _copy(config)
    dtype = given.pop("dtype", None)
    # With a config its own blocks say the dtype and the clip; a loop of plain PyTorch clips nothing by itself.
    if config is None:
        content["gradient_clipping"] = 0.0
        dtype = dtype or _of_model(model)
    for name, value in given.items():
        if name == "path":
            paths = [value] if isinstance(value, str | os.PathLike) else list(value)
            value = [os.fspath(each) for each in paths]
        _put(content, _KEYS[name], name, value)
    if dtype is not None:
        wanted = _DTYPES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype
        if wanted not in _DTYPES.values():
            raise ConfigError(f'dtype must be "bf16", "fp16" or "fp32", got {dtype!r}')
        for each in ("bf16", "fp16"):
            _put(content, _Key((each, "enabled")), "dtype", each == wanted, said=str(wanted))
    return content


def _check_tiers(given: Mapping[str, Any], config: Any) -> None:
    """Raises `ConfigError`, in the words of the keywords, if a tier is none or lacks its folder."""
    for name in ("weights", "states"):
        tier = given.get(name, "none")
        if tier not in _TIERS:
            raise ConfigError(f'{name} must be "none", "cpu" or "nvme", got {tier!r}')
        if tier == "nvme" and "path" not in given and config is None:
            raise ConfigError(f'{name}="nvme" needs path=, the folder of the swap files on the drive')


def _copy(config: Any) -> dict[str, Any]:
    """Returns the content of a config, whose blocks may be changed."""
    content = dict(config) if isinstance(config, Mapping) else read_json(config)

    # Deep, down to the blocks: the caller's dict must not change.
    def blocks(block: Mapping[str, Any]) -> dict[str, Any]:
        return {name: blocks(value) if isinstance(value, Mapping) else value for name, value in block.items()}

    return blocks(content)


def _put(content: dict[str, Any], key: _Key, name: str, value: Any, said: str | None = None) -> None:
    """Sets a key, or compares what the config says with the keyword."""
    block = content
    for each in key.path[:-1]:
        block = block.setdefault(each, {})
        if not isinstance(block, dict):
            raise ConfigError(f"the config has no block for {key}, but {block!r}: make it a dict")
    # "auto" leaves the value to whoever knows it, as in transformers.
    before = block.setdefault(key.path[-1], value)
    same = before == value or [before] == value or before == "auto"
    if not same:
        raise ConfigError(
            f"initialize got {name}={value if said is None else said!r} and a config in which {key} is {before!r}: "
            "leave one of them out"
        )
    block[key.path[-1]] = value


def _of_model(model: Any) -> str:
    """Returns the dtype of the model's floating-point parameters: the widest, if there are several."""
    # Several dtypes in one model: the widest holds the values of all.
    found = {each.dtype for each in model.parameters()} if isinstance(model, nn.Module) else set()
    # No mode trains float64: such a model trains in fp32, and a line says so.
    names = {_DTYPES.get(dtype, "fp32") for dtype in found if dtype in _DTYPES or dtype is torch.float64} or {"fp32"}
    return "fp32" if len(names) > 1 else names.pop()


# -- initialize ----------------------------------------------------------------------------------------
#
# `initialize`: carries out the plan of an engine, which `plan` has decided before anything is changed.
#
# If a step fails, the steps before it are undone, and the other ranks receive the reason.


logger = logging.getLogger("offload")


class Initialized(NamedTuple):
    """Result of `initialize`: the 4-tuple of DeepSpeed."""

    engine: Engine
    """The engine, which the training loop calls."""
    optimizer: Optimizer
    """Parameter groups, whose settings may be changed between steps; `engine.step()` steps it."""
    loader: Loader | None
    """Batches of `training_data` on the engine's device, each rank's own rows; None without data."""
    lr_scheduler: Any
    """The given schedule or that of the config, which `engine.step()` advances; None without one."""


class Given(NamedTuple):
    """What the user hands over beside the model and the config; see `initialize`."""

    optimizer: Any
    model_parameters: Any
    training_data: Dataset[Any] | None
    lr_scheduler: Any
    collate_fn: Callable[[list[Any]], Any] | None


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    *,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mesh_param: Any = None,
    **plain: Unpack[PlainKeywords],
) -> Initialized:
    """Returns an engine over `model`, as `deepspeed.initialize` does: (engine, optimizer, loader, lr_scheduler).

    The engine takes over the parameters: placeholders outside of forward and backward. All ranks must call it.

    Args:
        args: Namespace whose `deepspeed_config` is read if `config` and `config_params` are None.
        model: The model to train.
        optimizer: One of torch's that has not stepped, a callable that makes one from the parameters, or None for the
            config's. An optimizer without a kernel runs unchanged, on the CPU.
        model_parameters: Parameters or groups for the config's optimizer or the callable; None for all that train.
        training_data: Dataset to load batches from; without it the loader is None.
        lr_scheduler: An object with `step()`, a callable that makes one from the optimizer, or None for the config's.
        collate_fn: Makes a batch from samples; None for torch's default.
        config: Path of a DeepSpeed JSON file, or its content as a dict.
        config_params: Another name of `config`.
        mpu: Megatron's `parallel_state`, whose groups divide the parameters that it has marked; None without it.
        dist_init_required: For compatibility; None or a bool, without effect.
        distributed_port: For compatibility; None or the launcher's port.
        mesh_param: For compatibility; must be None.
        **plain: Keywords that stand for a config: weights, states, path, host_memory, device_memory, dtype, and so on.

    Raises:
        ConfigError: If the config is wrong or does not fit the model. This and the following come before any change.
        BudgetError: If a memory budget is too small.
        StoreError: If a disk is too small, or the run on it does not fit.
        UsageError: If a compatibility keyword is refused, or the model is under an engine already.
        RankError: If another rank has ended before it made its engine.
    """
    # First of all: an error raised before this call would leave the other ranks waiting for this one.
    meet_others()
    try:
        refuse(dist_init_required=dist_init_required, distributed_port=distributed_port, mesh_param=mesh_param)
        args, model = _model_of(args, model)
        shards = find_shards(model, mpu)
        loaded = with_configured(load_config(chosen_config(args, config, config_params, model, plain)))
        check_data(training_data, collate_fn)
        let_segments_grow(loaded.offload.device)  # before CUDA is used
        device = open_device(compute_device(loaded.offload.device))
    except BaseException as error:  # a Ctrl-C too: the process may live on, and the others would wait for it
        # The process group of this engine does not exist yet, so the reason goes through torch's store.
        stay_away(f"{type(error).__name__}: {error}")
        raise
    ranks = Ranks()
    try:
        ranks = join_ranks(device, loaded.zero_optimization.mics_shard_size)
        with STARTING, with_adopted_buffers(model):
            given = Given(optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
            return _initialize(loaded, model, device, ranks, shards, given)
    except BaseException as error:
        # The other ranks wait for this one, and receive the reason.
        ranks.close(f"{UNABLE}{type(error).__name__}: {error}")
        raise


def _initialize(
    loaded: Config,
    model: nn.Module,
    device: Device,
    everyone: Ranks,
    shards: FoundShards,
    given: Given,
) -> Initialized:
    """Makes the engine of a model whose DTensors are ordinary parameters; see `_start` for the arguments."""
    # Before the first message: each rank comes to the same result by itself.
    check_sequences(model, loaded)
    check_pipeline(model, loaded)
    world = form_grid(everyone, shards.row, shards.sharded, pipeline_place(model), shards.dims)
    check_groups(world, shards, device.torch)
    check_nodes(loaded, world)
    world = dataclasses.replace(world, sequence=form_groups(world, loaded.sequence_parallel_size))
    one_at_a_time = bool(shards.dtensors) or world.shares_batches or isinstance(model, PipelineStages)
    loaded = _of_a_column(loaded, world, one_at_a_time)
    with taken_over(model, shards) as taken:
        taken.translate_optimizer(given.optimizer)
        given = given._replace(model_parameters=taken.translated(given.model_parameters))
        return _start(loaded, model, device, world, taken, given)


def _of_a_column(loaded: Config, world: World, one_at_a_time: bool) -> Config:
    """Returns the config of a column of the grid, which is a run of its own.

    Args:
        loaded: The config of the user.
        world: The place of this process.
        one_at_a_time: True if micro-batches cannot take turns: the model computes with DTensors, is stages of a
            pipeline, or ranks share sequences.

    Raises:
        ConfigError: If micro-batches shall take turns.
        StoreError: If the run of this name was divided otherwise.
    """
    block, own = loaded.offload, world.suffix
    check_division(loaded.drives, block.run, own, block.resume)
    if not world.divides_model and not one_at_a_time:
        return loaded
    if block.schedule == LAYER_MAJOR:
        raise ConfigError(
            '"schedule": "layer_major" runs several micro-batches at once, which a model that is divided among '
            "processes cannot: leave it out with tensor parallelism, pipelines and sequence_parallel_size"
        )
    changes = {"schedule": MICRO_BATCH_MAJOR, "run": f"{block.run}{own}"}
    return loaded.model_copy(update={"offload": block.model_copy(update=changes)})


def _start(
    loaded: Config,
    model: nn.Module,
    device: Device,
    world: World,
    taken: TakenShards,
    given: Given,
) -> Initialized:
    """Makes the plan and carries it out; for the arguments see `initialize`. The caller holds `STARTING`."""
    batch = resolve_batch(loaded, world.data_ranks)
    _check_same_data(world.everyone, given.training_data)
    chosen = build_optimizer.choose(loaded.optimizer, model, given.optimizer, given.model_parameters)
    check_options(chosen)
    check_model(model)  # before the optimizer's own code meets parameters without a shape
    with keep_generators(device.torch):  # the optimizer's own code may draw in its dry run
        kept = build_optimizer.kept_by(chosen, model)
    matrices = build_optimizer.matrices_by(chosen, model)
    plan = decide(loaded, batch, model, device, world, chosen.rule, kept, matrices)
    codes = loaded.zero_optimization.sends_codes
    check_tensor_parallel(world, plan.mode, plan.layouts, bool(plan.units.experts), bool(plan.tiled_mlps), codes)
    check_units(world.sequence.size, bool(plan.units.experts))
    world = dataclasses.replace(world, node=form_node(world.ranks, plan.parts.secondary))
    plan = dataclasses.replace(plan, sites=tuple(taken.sites), world=world)
    ModuleEntries(model, commits=bool(plan.commit_every))  # what no commit could contain is refused
    # From now on the weights leave the model, and no error could bring them back.
    taken.keep()
    schedule, notices = build_optimizer.choose_scheduler(loaded.scheduler, given.lr_scheduler, chosen)
    as_trained = (*_as_trained(plan, model), *_as_saved(plan, model), *let_segments_grow(loaded.offload.device))
    plan = dataclasses.replace(plan, notices=(*plan.notices, *as_trained, *notices, *chosen.notices()))
    if not device.host_addressable:
        kernels.leave_cores()
    # The user's object wins over the config, as in DeepSpeed.
    if given.optimizer is not None and loaded.optimizer is not None:
        unused = f"the optimizer {loaded.optimizer.type} of the config is not used, because optimizer= is given"
        plan = dataclasses.replace(plan, notices=(*plan.notices, unused))
    loader = None
    if given.training_data is not None:
        loader = load(
            given.training_data,
            batch.micro,
            world.data_rank,
            world.data_ranks,
            loaded.offload.seed,
            given.collate_fn,
            device.torch,
            loaded.dataloader_drop_last,
        )
    engine = build(plan, model, chosen, Engine, schedule, loader)
    release_heap()  # the model's first weights were made and freed unit by unit
    if plan.world.everyone.rank == 0:
        warn_if_slow(loaded, device.torch, plan.resume)
        logger.info(effective(loaded, batch, world.data_ranks))
        for notice in engine.notices:
            announce(notice)
        logger.debug("the complete config: %s", json.dumps(engine.config, indent=2))
    # A step of another optimizer on these parameters would have no effect, so it raises from now on.
    refuse_others()
    return Initialized(engine, chosen, loader, schedule)


def _check_same_data(everyone: Ranks, data: Any) -> None:
    """Raises `ConfigError`, on all ranks, if data sets of two ranks differ in length. Collective."""
    lengths: list[int | None] = everyone.share(None if data is None else len(data))
    counted = {rank: length for rank, length in enumerate(lengths) if length is not None}
    first = next(iter(counted), 0)
    for rank, length in counted.items():
        if length != counted[first]:
            raise ConfigError(
                f"training_data= contains {count_of(counted[first], 'sample')} on rank {first} and {length} on rank "
                f"{rank}: give every rank the same data set, of which the loader takes each rank's own rows"
            )


def _as_saved(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Returns a notice if a model that is divided among processes is not saved as its class says."""
    if not plan.world.divides_model or saved_names(model) is None:
        return ()
    return (
        f"{type(model).__name__} saves entries of its own, or under names of its own: with tensor parallelism or a "
        "pipeline, model files and exports have the names of the parameters, and no other entries",
    )


def _as_trained(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Returns notices if training differs from the model's own settings, or from older DeepSpeed with this config."""
    config, ranks, parts = plan.config, plan.world.ranks.size, plan.parts
    stage, clip = config.zero_optimization.stage, config.gradient_clipping
    wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    reduced = "the numbers are the same"
    if parts.whole_gradients:
        reduced = (
            f"but micro-batches are added up on each rank, in {format_size(parts.reduction_nbytes)} of the device's "
            "memory, and each step is reduced once"
        )
    whole = (
        '; "stage": 0 without "mics_shard_size" keeps all of them on each rank, as in DeepSpeed' if stage == 0 else ""
    )
    why = "since the config does not say"
    if "gradient_clipping" in config.left_open:
        why = 'which "auto" means where no Trainer sets the number'
    node, kept = config.zero_optimization.zero_hpz_partition_size, parts.secondary
    lines = (
        (
            "gradient_clipping" not in config.model_fields_set,
            f'gradients are clipped to a global norm of {clip:g}, {why}; "gradient_clipping": 0 turns clipping off, as '
            "in older DeepSpeed",
        ),
        (
            plan.world.ranks.mesh.shards > 1
            and stage < 3,  # with one shard each rank has all, and the line on replicas says so
            f"ZeRO stage {stage} on {ranks} ranks is trained as stage 3: weights, gradients and states are "
            f"partitioned; {reduced}{whole}",
        ),
        (
            kept is not None,
            f"each rank keeps 1/{node} of all weights on its device, {format_size(kept.nbytes if kept else 0)}, "
            "for gathers within a node (zero_hpz_partition_size); a step gathers each unit over all ranks once",
        ),
        (
            node > 1 and kept is None,
            f"zero_hpz_partition_size has no effect: a node of {node} has all ranks, and their weights with them",
        ),
        (
            bool(wide),
            f"{wide[0] if wide else ''} is float64, which is not supported: the model is trained in "
            f"{config.dtype}{'' if config.dtype == 'fp32' else ', with masters of 32 bits'}; call model.float() "
            "before initialize to silence this message",
        ),
    )
    return (*(line for holds, line in lines if holds), *kept_in_fp32(model, plan.mode.weight_dtype))


def _model_of(args: Any, model: Any) -> tuple[Any, nn.Module]:
    """Returns the namespace and the model, which may come first, in the place of DeepSpeed's `args`."""
    if model is None and isinstance(args, nn.Module):
        return None, args
    return args, check_model_type(model)


def check_model_type(model: Any) -> nn.Module:
    """Returns `model`; raises `ConfigError` if it is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize expects model, a torch.nn.Module, got {type(model).__name__}")
    return model


def chosen_config(
    args: Any, config: Any, config_params: Any, model: Any = None, plain: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Returns the single config of the arguments of `initialize`; raises `ConfigError`."""
    given = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    # Two configs are an error of their own.
    if plain and len(given) < 2:
        return plain_config(model, given[0] if given else None, plain)
    if len(given) != 1:
        raise ConfigError(
            f"expected one of config, config_params and args.deepspeed_config, got {len(given)}; "
            f'give the path of a DeepSpeed JSON file or its content as a dict, or keywords such as states="nvme"'
        )
    return given[0]
