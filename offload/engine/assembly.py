"""Assembly of an engine from its plan: files, memory, threads and hooks, in this order.

If a step fails, the objects made before are closed, and files are left as they were.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from offload import kernels
from offload.activations.checkpoints import FREE_SHARE, UnitCheckpoints, blocks_of
from offload.activations.kept_inputs import DiskSlots, HostBlocks, KeptInputs, Staging
from offload.activations.tiles import TiledMlps
from offload.aio import IoQueue
from offload.aio.backend import DEFAULTS
from offload.aio.shared_queue import SharedQueue
from offload.config import Aio, Config
from offload.distributed.agreement import Agreement, AllOrNothing, Rounds
from offload.distributed.gathers import CodedWeightGathers, NodeGathers, WeightGathers
from offload.distributed.process_group import Ranks
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.distributed.reshard import NewRanks, finish, reshard
from offload.engine.callbacks import ActivationPolicy, EngineCallbacks, Extension
from offload.engine.components import EngineComponents, close_all
from offload.engine.data import Loader
from offload.engine.early_updates import run_may_speculate
from offload.engine.edits import WeightEdits
from offload.engine.engine import EngineCore
from offload.engine.fill import Codes, Values, fill_tiers, make_resident_shards
from offload.engine.gradient_transfer import DeviceToHost, DiskSpill, windows
from offload.engine.gradients import GradientAccumulator, UnitCompletion, borders, parameter_starts
from offload.engine.hooks import ModuleHooks, SavedTensors
from offload.engine.micro_batches import PassSchedule
from offload.engine.optimizer import Optimizer, Rule
from offload.engine.params import ParamHandle, StorageForm
from offload.engine.plan import (
    Plan,
    check_fits,
    check_replaced,
    summary,
)
from offload.engine.shards import LocalShards
from offload.engine.shared_memory import line_on_users, memory_of
from offload.engine.snapshot import Snapshot, scheduler_state
from offload.engine.state import LossScaler, StepSettings, job_of
from offload.engine.torch_functions import RULES
from offload.engine.unit_views import UnitViews
from offload.engine.update import Updates, UpdateWorker
from offload.engine.update_strategy import UpdateSetting, UpdateStrategy
from offload.errors import StoreError
from offload.experts.stacks import StackedExperts, TargetedParameters, ZeroGradients, stack_handles
from offload.hardware.probe import kept_window
from offload.launch.environment import rank_number
from offload.layout.fingerprint import describe
from offload.layout.flat_layout import ParameterSegment
from offload.layout.frozen import expander
from offload.layout.memory_plan import limits, unit_sizes
from offload.layout.pass_order import LAYER_MAJOR, makes_early_updates
from offload.layout.placement import STAGING_BUFFERS, WINDOWS
from offload.layout.tiers import copied_memory
from offload.metrics.meter import ComputeSpans, Listener, Meter, Relay, StepMeter, compute_spans
from offload.metrics.writers import check_monitor, make_reporter
from offload.model_io.saved_names import about_saved
from offload.notices import Headline
from offload.parallel.sequence import SequenceForward, SequenceParallel
from offload.parallel.sharded_params import ShardedViews
from offload.parallel.stage_run import StageRun
from offload.parallel.stages import PipelineStages, stage_sites
from offload.passes.layer_major import LayerMajor
from offload.quantized.tensors import ParameterBytes, QuantizedTensors, UnpackedWeights
from offload.sizes import format_size
from offload.states import State, Tier
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.pager import Pager
from offload.swapper.store import DriveByteCounter, NoStore, Rating, Store, StoreSpec
from offload.swapper.store.format import last_of_all, was_committed
from offload.swapper.store.inspection import look
from offload.swapper.store.recovery import check_one_run
from offload.swapper.store.requests import DriveSpans
from offload.swapper.store.spill_file import SpillFile
from offload.swapper.table import WeightSource
from offload.timeline import OFF, Timeline, open_timeline

_T = TypeVar("_T")

OpenSource: TypeAlias = Callable[[SharedQueue, DriveSpans, contextlib.ExitStack], WeightSource]
"""A function that opens read-only files of weights. The stack closes them."""

STARTING = threading.RLock()
"""Serializes the starts of engines in a process: memory that a plan counts on must still be free when taken."""


_SMALL_BLOCK, _LITTLE = 32 << 10, 256 << 10
"""With fewer bytes per block or fewer bytes in flight a drive waits for requests: measured with 4 and 64 KiB."""


def assemble(
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
        make: Makes the engine from its core and the notices for the user.
        lr_scheduler: A schedule, or None.
        loader: Batches of training data, or None.
        open_source: Opens the files that weights are read from, if these are not the swap files.
        listener: Receives the spans of the engine; None for the config's own listener, if any.
    """
    if not plan.device.host_addressable:
        kernels.leave_cores()
    timeline = open_timeline(plan.config.offload.trace, plan.world.everyone.rank, plan.world.everyone.size)
    if plan.world.everyone.rank == 0:
        check_monitor(plan.config)
    written = _written(plan)
    inputs_on_disk = plan.config.drives and plan.config.activation_tier in ("cpu", "nvme", "auto")
    # Without a file to read or write no I/O thread is started.
    on_files = plan.slots or plan.placement.spilled or inputs_on_disk or open_source
    queue = _queue(plan.config) if on_files else None
    memory = memory_of(model)
    swap_files, sources = NewStore(plan, lr_scheduler), contextlib.ExitStack()
    try:
        meter, spans = _meter(plan, model, queue, written), DriveSpans(timeline, shown_names(plan))
        if listener is None and plan.config.wall_clock_breakdown and isinstance(meter, StepMeter):
            listener = meter
        if listener is not None:
            timeline = Relay(timeline, listener)
        progress: Snapshot | None = None
        if queue is not None and plan.slots:
            swap_files.store = _store(plan, model, optimizer, lr_scheduler, queue, written, spans)
            progress = _progress(plan, swap_files.store, model, optimizer)
            swap_files.resumed = progress is not None

        def components(callbacks: EngineCallbacks) -> EngineComponents:
            """Maps the arenas, takes over the model's weights, installs hooks and starts the update worker.

            The components store the callbacks of the engine, which is not complete yet, and call them only later. If a
            step fails, the steps before it are undone, except for files.
            """
            source: WeightSource = swap_files.store
            if queue is not None and open_source is not None:
                source = open_source(queue, spans, sources)
            # The order matters: memory first, then the pager, the partitions and their values. Hooks come after the
            # model has given up its weights, and the update worker, whose thread uses all of them, comes last.
            with contextlib.ExitStack() as undo:
                # Each component that owns memory or a thread is closed by an error, in reverse order.
                host = undo.enter_context(contextlib.closing(_host_arena(plan, callbacks)))
                arena = DeviceArena(plan.placement.device_nbytes, plan.device, plan.config.offload.debug.poison)
                compute = compute_spans(timeline, shown_names(plan))
                agreement = _agreement(plan, arena, callbacks, timeline)
                pager = undo.enter_context(contextlib.closing(_pager(plan, host, arena, source, agreement, timeline)))
                shards = _held(plan, host, arena, pager, swap_files.store)
                forms = _forms(plan)
                swap_files.make()
                _fill(plan, model, shards, swap_files.resumed, forms)
                schedule = _schedule(plan, model)
                gradients = gradient_accumulator(
                    plan, host, arena, queue, written, pager, agreement, schedule, callbacks, spans, compute
                )
                undo.callback(gradients.close)
                handles = _handles(plan, model, forms)
                unit_views = UnitViews(plan.layouts, handles, pager, [mode.weight_dtype for mode in plan.modes])
                model_activations = activations(plan, model, queue, written, schedule, timeline)
                undo.callback(model_activations.close)
                users = (unit_views, gradients, pager, callbacks, model_activations)
                hooks = module_hooks(plan, model, handles, *users, timeline, compute)
                undo.callback(hooks.remove)
                schedule.install(dict(model.named_modules()))
                undo.callback(schedule.remove)
                weights = _weights(plan, model, handles, pager, hooks, unit_views, callbacks)
                undo.callback(weights.remove)
                extensions: list[Extension] = [schedule]
                for extension in _extensions(plan, model, handles, gradients, pager):
                    undo.callback(extension.remove)
                    extensions.append(extension)
                updater = _updater(plan, optimizer, host, shards, gradients, timeline)
                # Complete: from now on the engine closes the components. Nothing that follows fails.
                undo.pop_all()
            timeline.start()  # the filling of the tiers is not shown
            return EngineComponents(
                hooks=hooks,
                weights=weights,
                unit_views=unit_views,
                update_worker=updater,
                pager=pager,
                gradients=gradients,
                activations=model_activations,
                schedule=schedule,
                world=plan.world,
                agreement=agreement,
                store=swap_files.store,
                queue=queue,
                read_only=sources,
                arena=host,
                layouts=plan.layouts,
                trainable=plan.trainable,
                shards=shards,
                written=written,
                timeline=timeline,
                meter=meter,
                shows_dtensors=bool(plan.sites),
                extensions=tuple(extensions),
            )

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
            close_all(*(() if queue is None else (queue.close,)), sources.close, swap_files.undo)
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
    written: DriveByteCounter,
    spans: DriveSpans,
) -> Store:
    """Returns this rank's store, locked; first converts a run of another number of ranks to this number. Collective.

    For the arguments see `assemble` and `Store`.
    """
    config, spec = plan.config, _store_spec(plan, model)
    if config.offload.resume == "never":
        run, job = Path(config.drives[0]) / config.offload.run, job_of(model, _settings(plan), optimizer, lr_scheduler)
        # Only the first rank's folder contains the note of the end. The first rank's store deletes the note.
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


def _notices(plan: Plan, core: EngineCore) -> tuple[str, ...]:
    components = core.components
    return (
        *plan.notices,
        *_io_notices(components.queue, plan.config.aio),
        summary(plan),
        *components.store.notices,
        *components.timeline.notices,
        *components.activations.notices,
        *core.state.notices(),
    )


def _begin(plan: Plan, core: EngineCore, progress: Snapshot | None) -> tuple[str, ...]:
    """Restores the state of a resumed run or commits the state of a new one; returns notices about differences."""
    notices: tuple[str, ...] = ()
    store = core.components.store
    if progress is not None:
        notices = tuple(core.state.restore(progress))
        folder = os.path.join(plan.config.drives[0], plan.config.offload.run)
        data = core.state.where_data_goes_on()
        notices = (Headline(f"resuming after step {core.state.global_steps} of the run in {folder}{data}"), *notices)
    elif plan.commit_every:
        # Step 0: a kill during the first step then resumes from the initial weights.
        store.commit(0, core.state.take().pack())
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


def _meter(plan: Plan, model: nn.Module, queue: SharedQueue | None, written: DriveByteCounter) -> Meter:
    """Returns the meter of steps, which records nothing if the config does not ask for it, or on any rank but 0."""
    facts = _facts(plan, model)
    reporter = make_reporter(plan.config, plan.batch.total, facts) if plan.world.everyone.rank == 0 else None
    if reporter is None:
        return Meter()

    def io_bytes() -> tuple[int, int]:
        return (0, 0) if queue is None else (queue.read_bytes, queue.written_bytes)

    breakdown = plan.config.wall_clock_breakdown
    sent = (lambda: plan.world.sent.total) if plan.world.everyone.size > 1 else None
    return StepMeter(plan.device.torch, io_bytes, written.drives, sent, breakdown, reporter)


def _written(plan: Plan) -> DriveByteCounter:
    """Returns the counter of bytes written to the drives, with the drives' endurance from the config."""
    block = plan.config.offload
    # Ranks of one machine share its drives, and each counts only its own bytes.
    local = rank_number(os.environ, "LOCAL_WORLD_SIZE", 1) if plan.world.everyone.size > 1 else 1  # set by torchrun
    rating = None if block.drive_tbw is None else Rating(block.drive_tbw * 1e12, block.drive_share, local)
    return DriveByteCounter(plan.config.drives, rating)


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
    newest_of_all = plan.world.everyone.share([newest, str(folder), run_id])
    everyone: list[int | None] = [row[0] for row in newest_of_all]
    if None not in everyone:
        check_one_run([(path, run) for _, path, run in newest_of_all])
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
    # Only a grid has a description of itself; the layout of any other store lacks the key.
    layout |= plan.world.description
    return plan.placement.store(plan.parts, plan.slots, layout, about_saved(model, plan.world.divides_model))


# -- run files -----------------------------------------------------------------------------------------
#
# The swap files of a run, from their lock to their first bytes.


class NewStore:
    """The swap files of a start, which replace an earlier run's files as late as possible.

    An error before `make` leaves the earlier run as it was, on every rank.
    """

    def __init__(self, plan: Plan, lr_scheduler: object) -> None:
        self._plan, self._lr_scheduler = plan, lr_scheduler
        self.store: Store = NoStore(len(plan.layouts))
        """The swap files, locked."""
        self.resumed = False
        """True if the files are open at a commit."""
        self._made = False

    def make(self) -> None:
        """Makes the files of a new run once every rank has made this call. Collective.

        Raises:
            ConfigError: If no commit can contain the state of the schedule.
            StoreError: If there is no room.
        """
        plan = self._plan
        if self.resumed or not plan.slots:
            return
        if plan.commit_every:
            scheduler_state(self._lr_scheduler)
        # All ranks take the first rank's id, which marks their folders as parts of one run.
        run_id = plan.world.everyone.share(uuid.uuid4().hex, "check its start")[0]
        self._made = True
        self.store.create(over=plan.resume or plan.replace, run_id=run_id)
        # A rank commits only after this exchange: no commit exists together with files of an earlier run.
        plan.world.everyone.share(None, "create its store")

    def undo(self) -> None:
        """Closes the files after an error. An earlier run keeps its files, and a new one leaves none."""
        if self.store.folders and not self._plan.resume and (self._made or not was_committed(self.store.folders[0])):
            self.store.remove()
        self.store.close()


# -- components ----------------------------------------------------------------------------------------
#
# The components of an engine: memory, weights, gradients, hooks and the update worker.
#
# If a step fails, the steps before it are undone. Files belong to the caller.


def _extensions(
    plan: Plan,
    model: nn.Module,
    handles: Sequence[Sequence[ParamHandle]],
    gradients: GradientAccumulator,
    pager: Pager,
) -> Iterator[Extension]:
    """Yields the features that are installed on the model; each is built after the one before."""
    quantized = [segment.name for layout in plan.layouts for segment in layout.segments if segment.inner]
    if quantized:
        yield UnpackedWeights(model, quantized)
    if plan.units.experts:
        zeros = None
        if plan.config.offload.experts == "each":
            zeros = ZeroGradients(plan.layouts, plan.trainable, gradients, plan.device.torch)
        yield StackedExperts(model, plan.units.experts, pager, zeros)
    yield TargetedParameters(model, handles)
    if plan.world.divides_model or plan.sites:
        yield ShardedViews(plan.sites)
    if plan.world.sequence.size > 1:
        yield SequenceForward(model, SequenceParallel(world=plan.world))
    if plan.tiled_mlps:
        yield TiledMlps(model, plan.tiled_mlps, plan.config.offload.tile_mlp)


def _host_arena(plan: Plan, callbacks: EngineCallbacks) -> HostArena:
    """Returns the engine's part of the process's host memory."""
    budget, placed, copied = plan.config.offload.host_memory, plan.placement, None
    if not plan.device.host_addressable:
        early = makes_early_updates(plan.config.offload.speculate, on_cpu=False)
        copied = copied_memory(plan.parts, placed.tiers, placed.promoted, early)
    return HostArena(placed.classes, plan.device, process_memory(), budget, callbacks.give_cache, copied)


def _agreement(plan: Plan, arena: DeviceArena, callbacks: EngineCallbacks, timeline: Timeline) -> Agreement:
    """Returns the agreement of the ranks among which ZeRO partitions states."""
    if plan.world.ranks.size == 1:
        return Agreement()
    gathers, coded, node = WeightGathers(plan.world.ranks), plan.parts.coded, plan.parts.node
    if coded.largest:
        gathers = CodedWeightGathers(plan.world.ranks, plan.device, coded, arena.keep(coded.nbytes))
    if node.nbytes:
        gathers = NodeGathers(gathers, node, plan.world.node, plan.device, arena.keep(node.nbytes))
    return Rounds(gathers, shown_names(plan), callbacks, timeline=timeline)


def shown_names(plan: Plan) -> list[str]:
    """Returns the name of each unit for messages and timelines."""
    return [layout.name or "the root" for layout in plan.layouts]


def _pager(
    plan: Plan,
    host: HostArena,
    arena: DeviceArena,
    source: WeightSource,
    agreement: Agreement,
    timeline: Timeline,
) -> Pager:
    # The pager receives sizes and limits only; it knows neither modules nor parameters.
    sizes = unit_sizes(plan.layouts, plan.placement, plan.shares, plan.mode, plan.in_place_layouts)
    # If each rank holds whole weights, ranks meet only to reduce gradients and at step(), not when a unit is used.
    peers = agreement if isinstance(agreement, Rounds) and plan.world.ranks.mesh.shards > 1 else None
    return Pager(
        sizes,
        host,
        arena,
        plan.device,
        source,
        limits(plan.config, plan.mode),
        peers,
        expand=expander(plan.layouts, plan.mode.weight_dtype),
        timeline=timeline,
    )


# -- weights ------------------------------------------------------------------------------------------


def _held(plan: Plan, host: HostArena, arena: DeviceArena, pager: Pager, store: Store) -> LocalShards:
    """Allocates this rank's partitions in their tiers."""
    residents = make_resident_shards(plan.parts, plan.modes, plan.placement, host, arena)
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


def _forms(plan: Plan) -> list[list[Values]]:
    """Returns how the weights of each segment are stored, unit by unit."""
    itemsize, device = plan.mode.weight_dtype.itemsize, plan.device.torch

    def form(unit: int, segment: ParameterSegment) -> Values:
        if segment.inner:
            return QuantizedTensors(segment, ParameterBytes(segment.name, unit, segment.start * itemsize, device))
        return Codes(segment) if segment.form else Values(segment)

    return [[form(unit, segment) for segment in layout.segments] for unit, layout in enumerate(plan.layouts)]


def _fill(
    plan: Plan,
    model: nn.Module,
    shards: LocalShards,
    resume: bool,
    forms: Sequence[Sequence[Values]],
) -> None:
    """Writes every weight to its tier and moves buffers; parameters are left empty."""
    # A new run begins with the user's values, those from files, or the modules' initialization from the seed.
    if not resume:
        # Stages of a pipeline number their units alike, so the position is added to make them draw different values.
        seed = plan.config.offload.seed + plan.world.position
        fill_tiers(model, plan.layouts, forms, shards, plan.world, seed, plan.in_place)
    else:
        shards.read_back()
        # The model's own values are dropped, unread.
        for form in (form for unit_forms in forms for form in unit_forms):
            form.empty(model)
    _move_buffers(model, plan)


def _move_buffers(model: nn.Module, plan: Plan) -> None:
    """Moves buffers to the device, in their dtype, with the values of rank 0; shared buffers stay shared."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the originals, so that no new one gets an id
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


def _handles(plan: Plan, model: nn.Module, forms: Sequence[Sequence[StorageForm]]) -> list[list[ParamHandle]]:
    """Returns a handle for each parameter, unit by unit; an expert's rows get parameters that are made here."""
    device = plan.device.torch

    def parameter(segment: ParameterSegment) -> nn.Parameter:
        of_model = model.get_parameter(segment.parameter)
        if segment.stack:
            return nn.Parameter(torch.empty(0, dtype=plan.mode.weight_dtype, device=device), of_model.requires_grad)
        return of_model

    return [
        [
            ParamHandle(
                parameter=parameter(segment),
                name=segment.name,
                form=forms[unit][position],
                unit=unit,
                position=position,
                dtype=mode.weight_dtype,
                shape=segment.shape,
                device=device,
                rules=RULES,
            )
            for position, segment in enumerate(layout.segments)
        ]
        for unit, (layout, mode) in enumerate(zip(plan.layouts, plan.modes, strict=True))
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
    """Returns the component that reads and edits weights for users."""
    return WeightEdits(
        model,
        plan.layouts,
        handles,
        pager,
        hooks,
        unit_views,
        [mode.weight_dtype for mode in plan.modes],
        trains=any(plan.parts.trainable_numel),
        several_ranks=plan.world.ranks.size > 1,
        callbacks=callbacks,
        composed=stack_handles(model, plan.layouts, handles, plan.units.experts),
        coded=plan.parts.coded.elements,
    )


# -- gradients -----------------------------------------------------------------------------------------
#
# The accumulator of gradients, assembled according to the plan: its memory in each tier, and its threads.


def gradient_accumulator(
    plan: Plan,
    host: HostArena,
    arena: DeviceArena,
    queue: SharedQueue | None,
    written: DriveByteCounter,
    pager: Pager,
    agreement: Agreement,
    schedule: PassSchedule,
    callbacks: EngineCallbacks,
    spans: DriveSpans,
    compute: ComputeSpans,
) -> GradientAccumulator:
    """Returns the accumulator of gradients, with its memory in the tiers of the plan.

    Args:
        plan: All decisions.
        host: Source of host buffers.
        arena: Source of device buffers.
        queue: Reads and writes files; None without any.
        written: Counts of the bytes that go to each drive.
        pager: Receives failures of other threads.
        agreement: The agreement of the ranks.
        schedule: The order of a step's micro-batches.
        callbacks: The engine.
        spans: Records requests to the drives.
        compute: Spans of forward and backward.
    """
    dtype, trainable, timeline = plan.parts.gradient_dtype, plan.trainable, pager.table.timeline
    with contextlib.ExitStack() as undo:
        spill = downloads = None
        if queue is not None and plan.placement.spilled:
            spill = _spill(plan, trainable, host, queue, pager, written, spans)
            undo.callback(spill.close)
        # The CPU cannot read gradients on such a device, so they are first copied to pinned staging buffers.
        if any(plan.parts.trainable_numel) and not plan.device.host_addressable:
            downloads = _downloads(plan, host, pager, timeline)
            undo.callback(downloads.close)
        memory: dict[str, Any] = {
            "spill": spill,
            # Gradients on the device keep their place for the whole run, so that no step allocates device memory.
            "on_device": {
                unit: arena.keep(plan.parts.nbytes[unit][State.GRAD]).view(dtype)
                for unit, tiers in enumerate(plan.placement.tiers)
                if tiers.get(State.GRAD) is Tier.DEVICE
            },
            "totals": {unit: arena.keep(nbytes).view(dtype) for unit, nbytes in plan.placement.added},
            "downloads": downloads,
        }
        common = (plan.layouts, trainable, host, dtype, schedule, callbacks)
        accumulator: GradientAccumulator
        if plan.parts.reduction is None:
            completion = UnitCompletion(callbacks) if _may_speculate(plan) else None
            accumulator = GradientAccumulator(
                *common, **memory, timeline=timeline, compute=compute, completion=completion
            )
        else:
            assert isinstance(agreement, Rounds), "only several ranks reduce"
            accumulator = ReduceScatterAccumulator(
                *common,
                **memory,
                device=plan.device,
                device_arena=arena,
                reduction=plan.parts.reduction,
                rounds=agreement,
                timeline=timeline,
                compute=compute,
            )
        undo.pop_all()
    return accumulator


def _may_speculate(plan: Plan) -> bool:
    """Returns True if updates may be made under the backward."""
    return run_may_speculate(
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
    buffers = [buffer for buffer in staging if buffer is not None]
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
    written: DriveByteCounter,
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
    # receiving thread: adds gradients during the backward, so its waits do not count as the model's.
    timeline = pager.table.timeline if plan.device.host_addressable else OFF
    return DiskSpill(
        unit_windows, parts.gradient_dtype, [buffer for buffer in buffers if buffer], scratch, pager.fail, timeline
    )


# -- hooks ---------------------------------------------------------------------------------------------
#
# The hooks on a model: units, saved tensors, and blocks that are computed again in backward.


_RESERVE = 4
"""On an accelerator, "auto" reserves a quarter of the memory free at the start for everything but inputs."""


def module_hooks(
    plan: Plan,
    model: nn.Module,
    handles: Sequence[Sequence[ParamHandle]],
    unit_views: UnitViews,
    gradients: GradientAccumulator,
    pager: Pager,
    callbacks: EngineCallbacks,
    model_activations: ActivationPolicy,
    timeline: Timeline,
    compute: ComputeSpans,
) -> ModuleHooks:
    """Installs the hooks of modules, saved tensors and checkpoints on the model.

    Args:
        plan: All decisions.
        model: The model, whose parameters have handles.
        handles: The parameters of each unit.
        unit_views: Materializes units.
        gradients: Receives every gradient.
        pager: Fetches units.
        callbacks: The engine.
        model_activations: Decides what is computed again, and where inputs wait.
        timeline: Records phases.
        compute: Records forwards and backwards of units.
    """
    saved = SavedTensors(handles, unit_views, pager, compute, model_activations, wrapped=bool(plan.sites))
    return ModuleHooks(
        model,
        {**stage_sites(model), **plan.units.sites},
        handles,
        unit_views,
        saved,
        gradients,
        pager,
        callbacks,
        model_activations,
        timeline=timeline,
        compute=compute,
    )


def _schedule(plan: Plan, model: nn.Module) -> PassSchedule:
    """Returns the order of a step's micro-batches, which installs nothing yet."""
    if isinstance(model, PipelineStages):
        return StageRun(model)
    if plan.schedule.schedule != LAYER_MAJOR:
        return PassSchedule()
    wanted = plan.config.offload.schedule == LAYER_MAJOR
    return LayerMajor(blocks_of(model, plan.config.units), plan.device, wanted)


def activations(
    plan: Plan,
    model: nn.Module,
    queue: SharedQueue | None,
    written: DriveByteCounter,
    schedule: PassSchedule,
    timeline: Timeline,
) -> ActivationPolicy:
    """Returns the policy for the blocks' activations: keep them, or compute them again from inputs in some tier.

    Args:
        plan: All decisions.
        model: The model.
        queue: Reads and writes files; None if there is no drive for inputs.
        written: Counts of the bytes that go to each drive.
        schedule: The order of a step's micro-batches.
        timeline: Records copies.
    """
    config, device, tier = plan.config, plan.device, plan.config.activation_tier
    if tier is None:
        return ActivationPolicy()
    block = config.activation_checkpointing
    blocks = blocks_of(model, config.units)[: block.number_checkpoints]
    # In host memory a copy of a tensor frees nothing, so only a drive helps a device that works there.
    if tier == "device" or (device.host_addressable and queue is None):
        return UnitCheckpoints(blocks, config, device)
    room = 0 if tier == "nvme" or device.host_addressable else plan.placement.inputs_nbytes
    at_once = (len(blocks) or None) if block.contiguous_memory_optimization else None
    memory = HostBlocks(device, process_memory(), config.offload.host_memory, room, at_once)
    slots = None if queue is None else DiskSlots(config.drives, queue, written)
    return KeptInputs(
        blocks,
        config,
        device,
        staging=Staging(memory, slots, timeline),
        device_limit=_device_limit(tier, device, plan.placement.inputs_nbytes),
        schedule=schedule,
        timeline=timeline,
    )


def _device_limit(tier: str, device: Device, room: int | None) -> Callable[[int], float]:
    """Returns a function of the bytes that inputs take on the device now: the bytes that they may take.

    Args:
        tier: "cpu", "nvme" or "auto".
        device: The compute device.
        room: Bytes of host memory for inputs; None for a share of the free memory.
    """
    if tier == "nvme" or (tier == "cpu" and not device.host_addressable):
        return lambda now: 0
    if not device.host_addressable:
        reserve = device.free_bytes() // _RESERVE
        return lambda now: now + device.free_bytes() - reserve
    if room is not None:
        return lambda now: room
    return lambda now: math.floor(now + FREE_SHARE * free_host_memory())


# -- updates -------------------------------------------------------------------------------------------


def _updater(
    plan: Plan,
    optimizer: Optimizer,
    host: HostArena,
    shards: LocalShards,
    gradients: GradientAccumulator,
    timeline: Timeline,
) -> Updates:
    """Returns the update worker, whose thread runs from now on, unless nothing trains."""
    if not any(plan.parts.trainable_numel):
        return Updates()
    return UpdateWorker(
        shards=shards,
        arena=host,
        gradients=gradients,
        strategy=_strategy(plan, optimizer.rule, host, shards, gradients),
        tile_numel=plan.placement.tile_numel,
        tile_nbytes=(host.classes.tiles - plan.placement.scratch_nbytes) // plan.placement.tile_buffers,
        tile_buffers=plan.placement.tile_buffers,
        commit_every=plan.commit_every,
        timeline=timeline,
    )


def _strategy(
    plan: Plan, rule: Rule, host: HostArena, shards: LocalShards, gradients: GradientAccumulator
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
            device=shards.device,
            gradients=gradients,
            # A rank that holds whole units steps them alone and exchanges nothing, whatever the number of replicas.
            ranks=Ranks() if plan.world.ranks.mesh.shards == 1 else plan.world.ranks,
        )
    )
