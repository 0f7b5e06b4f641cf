"""Assembly of an engine from its plan: files, memory, threads and hooks, in this order.

If a step fails, the objects made before are closed, and files are left as they were.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload import kernels
from offload.activations.audit import RandomAudit
from offload.activations.checkpoints import UnitCheckpoints
from offload.activations.kept_inputs import DiskSlots, HostBlocks, KeptInputs, Staging
from offload.activations.partitions import InputPartitions
from offload.activations.tiles import TiledMlps
from offload.aio import IoQueue
from offload.aio.backend import DEFAULTS
from offload.aio.memory import release_heap
from offload.aio.shared_queue import SharedQueue
from offload.config import Aio
from offload.distributed.agreement import Agreement, AllOrNothing, Rounds
from offload.distributed.gathers import (
    CodedWeightGathers,
    ExpertGathers,
    JoinedWeightGathers,
    NodeGathers,
    WeightGathers,
)
from offload.distributed.process_group import Ranks
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.distributed.reshard import NewRanks, finish, reshard
from offload.distributed.world import World
from offload.engine.callbacks import ActivationPolicy, EngineCallbacks, Extension
from offload.engine.commits import BudgetedCommits, Commits
from offload.engine.components import EngineComponents, close_all
from offload.engine.data import Loader
from offload.engine.edits import WeightEdits
from offload.engine.engine import EngineCore
from offload.engine.fill import Codes, FirstWeights, Values, fill_tiers, make_resident_shards
from offload.engine.gradient_transfer import DeviceToHost, DiskSpill, NoDownloads, NoSpill, windows
from offload.engine.gradients import GradientAccumulator, NoCompletion, UnitCompletion, borders, parameter_starts
from offload.engine.hooks import ModuleHooks, SavedTensors
from offload.engine.memory_guard import MemoryGuard
from offload.engine.micro_batches import PassSchedule
from offload.engine.optimizer import Optimizer
from offload.engine.params import ParamHandle, StorageForm
from offload.engine.plan import Plan, check_fits, check_replaced, line_for_a_loop_of_calls, summary
from offload.engine.shards import LocalShards
from offload.engine.shared_memory import line_on_users, memory_of
from offload.engine.snapshot import Snapshot, scheduler_state
from offload.engine.state import LossScaler, NoLossScaler, StepSettings, TrainingState, job_of
from offload.engine.unit_views import UnitViews
from offload.engine.update import Updates, UpdateWorker
from offload.engine.update_strategy import UpdateSetting
from offload.errors import StoreError
from offload.experts.stacks import StackedExperts, TargetedParameters, ZeroGradients, stack_handles
from offload.launch.environment import rank_number
from offload.layout.drive_budget import DriveBudget, Written
from offload.layout.fingerprint import describe
from offload.layout.flat_layout import ParameterSegment
from offload.layout.frozen import expander
from offload.layout.memory_plan import limits, unit_sizes
from offload.layout.pass_order import LAYER_MAJOR
from offload.layout.placement import STAGING_BUFFERS, WINDOWS, usable_host
from offload.layout.tiers import copied_memory
from offload.layout.units import blocks_of
from offload.layout.update_order import SecondPasses
from offload.metrics.flops import StepProfiler, peak_of
from offload.metrics.meter import ComputeSpans, Listener, Meter, Relay, StepMeter, compute_spans
from offload.metrics.writers import check_monitor, make_reporter
from offload.model_io.base_files import base_files
from offload.model_io.deferred import origin_of
from offload.model_io.folder import Stored
from offload.model_io.places import TensorPlaces
from offload.model_io.saved_names import about_saved, described_adapter
from offload.notices import Headline, show
from offload.parallel.sequence import SequenceForward, SequenceParallel
from offload.parallel.sharded_params import ShardedViews
from offload.parallel.stage_run import StageRun
from offload.parallel.stages import PipelineStages, stage_sites
from offload.passes.layer_major import LayerMajor
from offload.quantized.tensors import ParameterBytes, QuantizedTensors, UnpackedWeights
from offload.sizes import format_size
from offload.states import State, Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.pager import Pager
from offload.swapper.store import DriveByteCounter, NoStore, Rating, Store
from offload.swapper.store.format import last_of_all, was_committed
from offload.swapper.store.inspection import look
from offload.swapper.store.model_files import ModelFiles
from offload.swapper.store.recovery import check_one_run
from offload.swapper.store.requests import DriveSpans
from offload.swapper.store.spill_file import SpillFile
from offload.swapper.table import WeightSource
from offload.timeline import OFF, Timeline, open_timeline
from offload.vocabulary.pieces import table_handles

logger = logging.getLogger("offload")

_T = TypeVar("_T")

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
    listener: Listener | None = None,
) -> _T:
    """Returns an engine. Creates files, memory, threads and hooks, in this order; an error closes what was made before.

    The model loses its weights. `make` receives the core and the notices for the user. `listener` receives the
    spans of the engine; without it the config's own listener does, if any.
    """
    config, world = plan.config, plan.world
    if not plan.device.host_addressable:
        kernels.leave_cores()
    timeline = open_timeline(config.offload.trace, world.everyone.rank, world.everyone.size)
    if world.everyone.rank == 0:
        check_monitor(config)
    memory = memory_of(model)
    files = RunFiles(plan, lr_scheduler, timeline)
    try:
        meter = _meter(plan, model, files)
        if listener is None and config.wall_clock_breakdown and isinstance(meter, StepMeter):
            listener = meter
        if listener is not None:
            timeline = Relay(timeline, listener)
        progress = files.open(model, optimizer)
        settings, commits = _settings(plan), bool(plan.memory.commit_every)
        core = EngineCore(
            model,
            TrainingState(model, plan.device.torch, optimizer, lr_scheduler, loader, settings, plan.layouts, commits),
            functools.partial(_components, plan, model, optimizer, files, meter, timeline),
        )
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one that is raised
            files.undo()
        raise
    try:
        state, store = core.state, files.store
        notices = (
            *plan.notices,
            *_io_notices(files.queue, config.aio),
            summary(plan, store.spec),
            *store.notices,
            *timeline.notices,
            *core.components.activations.notices,
            *state.notices(),
            *line_on_users(memory),
        )
        if progress is not None:
            changes = state.restore(progress)
            folder, data = os.path.join(config.drives[0], config.offload.run), state.where_data_goes_on()
            line = f"resuming after step {state.global_steps} of the run in {folder}{data}"
            notices = (*notices, Headline(line), *changes)
        elif plan.memory.commit_every:
            # Step 0: a kill during the first step then resumes from the initial weights.
            store.commit(0, state.take().pack())
        meter.begin()
        return make(core, notices)
    except BaseException:
        core.shutdown.abandon(remove=progress is None)
        raise


def _components(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    files: RunFiles,
    meter: Meter,
    timeline: Timeline,
    callbacks: EngineCallbacks,
) -> EngineComponents:
    """Maps the arenas, takes over the model's weights, installs hooks and starts the update worker.

    The components store the callbacks of the engine, which is not complete yet, and call them only later. If a step
    fails, the steps before it are undone, except for files.
    """
    config, device, world = plan.config, plan.device, plan.world
    parts, placement = plan.memory.parts, plan.memory.placement
    dtypes = [mode.weight_dtype for mode in plan.modes]
    # The order matters: memory first, then the pager, the partitions and their values. Hooks come after the model has
    # given up its weights, and the update worker, whose thread uses all of them, comes last.
    with contextlib.ExitStack() as undo:
        # Each component that owns memory or a thread is closed by an error, in reverse order.
        copied = None
        if not device.host_addressable:
            copied = copied_memory(parts, placement.tiers, placement.promoted, plan.memory.updates_early)
        budget = config.offload.host_memory
        host = HostArena(placement.classes, device, process_memory(), budget, callbacks.give_cache, copied)
        undo.callback(host.close)
        arena = DeviceArena(placement.device_nbytes, device, config.offload.debug.poison)
        compute = compute_spans(timeline, shown_names(plan))
        agreement = _agreement(plan, arena, callbacks, timeline)
        pager = Pager(
            # The pager receives sizes and limits only; it knows neither modules nor parameters.
            unit_sizes(
                plan.layouts,
                placement,
                plan.shares,
                plan.memory.mode,
                plan.in_place_layouts,
                gathered=world.ranks.gathers,
                host_addressable=parts.host_addressable,
            ),
            host,
            arena,
            device,
            files.source(),
            limits(config, plan.memory.mode),
            # If each rank holds whole weights, ranks meet only to reduce gradients and at step(), not when a unit is
            # used.
            agreement if isinstance(agreement, Rounds) and world.ranks.gathers else None,
            expand=expander(plan.layouts, plan.memory.mode.weight_dtype),
            timeline=timeline,
        )
        undo.callback(pager.close)

        # This rank's partitions in their tiers, and the first values of the weights.
        residents = make_resident_shards(parts, plan.modes, placement, host, arena)
        # torch may still have kernels in flight that fill this memory, or that use the tensors to which it belonged
        # before. Uploads run on a stream of their own and must come after those kernels.
        device.synchronize()
        shards = LocalShards(
            mode=plan.memory.mode,
            layouts=plan.layouts,
            shares=plan.shares,
            nbytes=parts.nbytes,
            sizes=pager.sizes,
            residents=residents,
            pager=pager,
            device=device,
            store=files.store,
            deferred=set(placement.deferred(parts, plan.memory.slots, plan.memory.commit_every)),
            model_files=files.model_files,
        )
        forms = _forms(plan)
        files.make()
        # A new run begins with the user's values, those from files, or the modules' initialization from the seed.
        if not files.resumed:
            # Stages of a pipeline number their units alike, so the position is added to make them draw different
            # values.
            seed = config.offload.seed + world.position
            fill_tiers(model, plan.layouts, forms, shards, world, seed, plan.in_place, plan.units.tables)
        else:
            shards.read_back()
            # The model's own values are dropped, unread.
            for unit, unit_forms in enumerate(forms):
                for form in unit_forms:
                    form.empty(model, in_place=unit in plan.in_place)
        _move_buffers(model, plan)
        release_heap()  # the first weights were made and freed unit by unit

        # Gradients, and what stands on the model.
        schedule = _schedule(plan, model, callbacks, agreement)
        gradients = _gradients(plan, files, host, arena, pager, agreement, schedule, callbacks, compute)
        undo.callback(gradients.close)
        handles = _handles(plan, model, forms)
        unit_views = UnitViews(plan.layouts, handles, pager, dtypes)
        policy = _activations(plan, model, files, schedule, timeline)
        undo.callback(policy.close)
        hooks = ModuleHooks(
            model,
            {**stage_sites(model), **plan.units.sites},
            handles,
            unit_views,
            SavedTensors(handles, unit_views, pager, compute, policy, wrapped=bool(plan.sites)),
            gradients,
            pager,
            callbacks,
            policy,
            timeline=timeline,
            compute=compute,
        )
        undo.callback(hooks.remove)
        schedule.install(dict(model.named_modules()))
        undo.callback(schedule.remove)
        weights = WeightEdits(
            model,
            plan.layouts,
            handles,
            pager,
            hooks,
            unit_views,
            dtypes,
            trains=any(parts.trainable_numel),
            several_ranks=not world.ranks.alone,
            callbacks=callbacks,
            composed=[
                *stack_handles(model, plan.layouts, handles, plan.units.experts, plan.world.experts),
                *table_handles(model, plan.layouts, handles, plan.units.tables),
            ],
            coded=parts.coded.elements,
        )
        undo.callback(weights.remove)
        extensions: list[Extension] = [schedule]
        for extension in _extensions(plan, model, handles, gradients, shards, host, arena, callbacks):
            undo.callback(extension.remove)
            extensions.append(extension)

        updater = Updates()
        if any(parts.trainable_numel):
            scratch = host.tiles.take(placement.scratch_nbytes) if placement.scratch_nbytes else None
            setting = UpdateSetting(
                mode=plan.memory.mode,
                layouts=plan.layouts,
                parts=plan.trainable,
                whole=parts.whole,
                scratch=torch.empty(0, device="cpu") if scratch is None else scratch.tensor(torch.float32),
                device=device,
                gradients=gradients,
                # A rank that holds whole units steps them alone and exchanges nothing, whatever the number of replicas.
                ranks=Ranks() if world.ranks.mesh.shards == 1 else world.ranks,
                replicas=world.ranks if world.ranks.mesh.shards == 1 else Ranks(),
            )
            updater = UpdateWorker(
                shards=shards,
                arena=host,
                gradients=gradients,
                strategy=optimizer.rule.strategy(setting),
                tile_numel=placement.tile_numel,
                tile_nbytes=(host.classes.tiles - placement.scratch_nbytes) // placement.tile_buffers,
                tile_buffers=placement.tile_buffers,
                commits=_commits(plan, files),
                # Where the CPU computes, a second pass would only give the cores more to do.
                second_passes=None
                if plan.device.host_addressable
                else SecondPasses(sum(len(part) for part in plan.trainable)),
                timeline=timeline,
            )
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
        activations=policy,
        schedule=schedule,
        world=world,
        agreement=agreement,
        store=files.store,
        queue=files.queue,
        read_only=files.read_only,
        base_files=files.base_files,
        arena=host,
        layouts=plan.layouts,
        trainable=plan.trainable,
        shards=shards,
        written=files.written,
        timeline=timeline,
        meter=meter,
        shows_dtensors=bool(plan.sites),
        extensions=tuple(extensions),
        peak=placement.peak,
    )


# -- files ---------------------------------------------------------------------------------------------


class RunFiles:
    """The files of a start, and the queue that reads and writes them.

    Swap files replace an earlier run's files as late as possible: an error before `make` leaves the earlier run as it
    was, on every rank.
    """

    def __init__(self, plan: Plan, lr_scheduler: object, timeline: Timeline) -> None:
        self._plan, self._lr_scheduler = plan, lr_scheduler
        config, rating = plan.config, None
        if config.offload.drive_tbw is not None:
            rating = Rating(config.offload.drive_tbw * 1e12, config.offload.drive_share, _local_ranks(plan))
        self.written = DriveByteCounter(config.drives, rating)
        self.spans = DriveSpans(timeline, shown_names(plan))
        self.read_only = contextlib.ExitStack()
        """Closes files of weights that are only read."""
        self.store: Store = NoStore(len(plan.layouts))
        """The swap files, locked."""
        self.model_files: ModelFiles | None = None
        """The model's own files, if weights are read there."""
        self.base_files: Sequence[Mapping[str, Any]] = ()
        """The files of frozen weights under adapters, with which the run began."""
        self.resumed = False
        """True if the files are open at a commit."""
        self._made = False
        self.queue: SharedQueue | None = None
        inputs_on_disk = config.drives and config.activation_tier in ("cpu", "nvme", "auto")
        # Without a file to read or write no I/O thread is started. Last, since nothing would close the queue.
        if plan.memory.slots or plan.memory.placement.spilled or inputs_on_disk or plan.in_place:
            self.queue = SharedQueue(
                IoQueue,
                config.offload.io_backend,
                block_bytes=config.aio.block_size,
                depth=config.aio.queue_depth,
                threads=config.aio.intra_op_parallelism,
            )

    def open(self, model: nn.Module, optimizer: Optimizer) -> Snapshot | None:
        """Locks this rank's store, and opens it if the run is resumed. Collective.

        First converts a run of another number of ranks to this number. Returns the state of a run that is resumed.
        """
        plan, queue = self._plan, self.queue
        self.base_files = base_files(model)
        if queue is None or not plan.memory.slots:
            return None
        config, world = plan.config, plan.world
        layout = describe(plan.layouts, plan.memory.mode, world.ranks.mesh.shards, world.ranks.mesh.replicas)
        # Only a grid has a description of itself; the layout of any other store lacks the key.
        layout |= world.description
        about = about_saved(model, world.divides_model, self.base_files)
        spec = plan.memory.placement.store(plan.memory.parts, plan.memory.slots, plan.memory.shadowed, layout, about)
        if config.offload.resume == "never":
            run = Path(config.drives[0]) / config.offload.run
            job = job_of(model, _settings(plan), optimizer, self._lr_scheduler)
            # Only the first rank's folder contains the note of the end. The first rank's store deletes the note.
            AllOrNothing(world.ranks, "replace the run").by_first(lambda: check_replaced(run, spec, job))
        new = NewRanks(
            drives=config.drives,
            run=config.offload.run,
            spec=spec,
            layouts=plan.layouts,
            mode=plan.memory.mode,
            shares=plan.shares,
            places=TensorPlaces(model, quantized=False) if plan.in_place else None,
            ranks=AllOrNothing(world.ranks, "give the run another number of ranks"),
            everyone=AllOrNothing(
                world.everyone if world.divides_model else Ranks(), "give the run another number of ranks"
            ),
            place=world.description,
            mesh=world.ranks.mesh,
        )
        new.ranks.by_first(lambda: finish(new.folders))
        line = None
        if plan.resume and plan.memory.slots == 2:
            line = reshard(new, queue, lambda progress: check_fits(progress, model, optimizer))
        keep_every = config.offload.keep_every if plan.memory.commit_every else 0
        store = self.store = Store(
            new.drives, new.run, world.ranks.rank, spec, queue, self.written, self.spans, keep_every=keep_every
        )
        store.notices += [] if line is None else [line]
        # The first values of frozen parameters that are tensors in the model's files are there.
        frozen = {segment.parameter for layout in plan.layouts for segment in layout.segments if not segment.trainable}
        origins = {name: origin_of(model.get_parameter(name)) for name in frozen}
        stored = {name: origin for name, origin in origins.items() if isinstance(origin, Stored)}
        store.first_values = FirstWeights(plan.layouts, plan.memory.mode, plan.shares, stored)
        at = _last_commit_of_all(plan, store)
        if at is None:
            return None
        progress = Snapshot.unpack(store.open(at))
        progress.check_fits(plan.layouts)
        check_fits(progress, model, optimizer)
        self.resumed = True
        if (adapter := described_adapter(self.store.spec.about)) is not None:
            self.base_files = adapter.base_files
        return progress

    def source(self) -> WeightSource:
        """Returns the files that weights are read from, opened.

        A run that trains compares the model's own files with those that it began with, and later every read of them.
        Raises `StoreError` if they are not the files of the run.
        """
        plan = self._plan
        if not plan.in_place or self.queue is None:
            return self.store
        files = ModelFiles(plan.in_place_layouts, plan.stamps, self.queue, self.spans, self.store)
        self.model_files = self.read_only.enter_context(contextlib.closing(files))
        if any(plan.memory.parts.trainable_numel):
            if self.resumed:
                files.expect(self.store.spec.files, self.store.folders[0].parent)
            else:
                files.scan()
            if plan.memory.slots:
                self.store.name_files(files.described())
        return files

    def make(self) -> None:
        """Makes the swap files of a new run once every rank has made this call. Collective.

        Raises:
            ConfigError: If no commit can contain the state of the schedule.
            StoreError: If there is no room.
        """
        plan = self._plan
        if self.resumed or not plan.memory.slots:
            return
        if plan.memory.commit_every:
            scheduler_state(self._lr_scheduler)
        # All ranks take the first rank's id, which marks their folders as parts of one run.
        run_id = plan.world.everyone.share(uuid.uuid4().hex, "check its start")[0]
        self._made = True
        self.store.create(over=plan.resume or plan.replace, run_id=run_id)
        # A rank commits only after this exchange: no commit exists together with files of an earlier run.
        plan.world.everyone.share(None, "create its store")

    def undo(self) -> None:
        """Closes everything after an error. An earlier run keeps its files, and a new one leaves none."""
        close_all(*(() if self.queue is None else (self.queue.close,)), self.read_only.close, self._undo_store)

    def _undo_store(self) -> None:
        if self.store.folders and not self._plan.resume and (self._made or not was_committed(self.store.folders[0])):
            self.store.remove()
        self.store.close()


def _last_commit_of_all(plan: Plan, store: Store) -> int | None:
    """Returns the number of the last commit that every rank holds, or None to start over. Changes nothing.

    Raises `StoreError` if a rank has no commit, or the commits are of two runs.
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


def _io_notices(queue: SharedQueue | None, asked: Aio) -> tuple[str, ...]:
    """Returns notices if the system refuses the fastest backend, and if little moves."""
    if queue is None:
        return ()
    refused = f"I/O by {queue.backend}: {'; '.join(queue.refusals)}"
    auto = DEFAULTS["io_uring"]
    block = asked.block_size or auto.block_bytes
    in_flight = (asked.intra_op_parallelism or auto.threads) * (asked.queue_depth or auto.depth) * block
    little = (
        f'"aio" asks for blocks of {format_size(block)} and {format_size(in_flight)} in flight, with which drives take '
        "several times as long; leave its keys out, or take those that `offload tune` measures"
    )
    return (
        *((refused,) if queue.refusals else ()),
        *((little,) if block < _SMALL_BLOCK or in_flight < _LITTLE else ()),
    )


def _local_ranks(plan: Plan) -> int:
    """Returns the ranks of this machine, which share its drives. Each counts only its own bytes."""
    return rank_number(os.environ, "LOCAL_WORLD_SIZE", 1) if plan.world.everyone.size > 1 else 1  # set by torchrun


def _commits(plan: Plan, files: RunFiles) -> Commits:
    offload, everyone, ranks = plan.config.offload, plan.world.everyone, _local_ranks(plan)
    if offload.drive_budget is None or not files.written.drives():
        return Commits(plan.memory.commit_every)
    store, drives = files.store, len(plan.config.drives)

    return BudgetedCommits(
        plan.memory.commit_every,
        budget=DriveBudget.of(offload.drive_budget),
        # Files are striped, so each drive takes an equal share.
        written=Written(
            *(
                ranks * nbytes / drives
                for nbytes in plan.memory.placement.written(
                    plan.memory.parts, plan.memory.slots, plan.memory.commit_every
                )
            )
        ),
        thins=offload.thins_commits,
        keep_every=offload.keep_every,
        counter=files.written,
        ranks=ranks,
        path=store.folders[0] / "budget" if store.folders and everyone.rank == 0 else None,
        everyone=everyone,
    )


# -- settings and numbers of steps ---------------------------------------------------------------------


def _settings(plan: Plan) -> StepSettings:
    return StepSettings(
        micro_batch_size=plan.batch.micro,
        accumulation=plan.batch.accumulation,
        total_batch_size=plan.batch.total,
        clip=plan.config.gradient_clipping,
        seed=plan.config.offload.seed,
        overlap=plan.memory.placement.overlaps_updates(
            plan.config.offload.debug.overlap,
            on_cpu=plan.device.host_addressable,
            alone=plan.memory.parts.alone,
            slots=plan.memory.slots,
        ),
        config=plan.config,
        gradients=plan.memory.parts.gradients.values,
        scaler=LossScaler(plan.config.fp16)
        if plan.config.dtype == "fp16"
        else NoLossScaler(skips=plan.config.offload.on_nonfinite == "skip"),
        device_need=plan.memory.placement.device_need,
    )


def _meter(plan: Plan, model: nn.Module, files: RunFiles) -> Meter:
    """Returns the meter of steps, which records nothing if the config does not ask for it, or on any rank but 0."""
    config = plan.config
    facts = {  # in the first line of a log
        "run": config.offload.run,
        "model": type(model).__name__,
        "parameters": sum(segment.value_numel for layout in plan.layouts for segment in layout.segments),
        "dtype": config.dtype,
        "moments": config.moments,
        "master": config.offload.master,
        "device": str(plan.device.torch),
        "ranks": plan.world.everyone.size,
        "samples_a_step": plan.batch.total,
        "host_budget_bytes": sum(plan.memory.placement.classes),
        "device_budget_bytes": plan.memory.placement.device_nbytes,
        "drive_tbw": config.offload.drive_tbw,
        "drive_budget": config.offload.drive_budget,
        "drive_share": config.offload.drive_share,
    }
    reporter = make_reporter(config, plan.batch.total, facts) if plan.world.everyone.rank == 0 else None
    if reporter is None:
        return Meter()

    def io_bytes() -> tuple[int, int]:
        return (0, 0) if files.queue is None else (files.queue.read_bytes, files.queue.written_bytes)

    sent = (lambda: plan.world.sent.total) if not plan.world.everyone.alone else None
    profiler = None
    if config.flops_profiler.enabled:
        peak = peak_of(plan.device.torch, config.dtype)
        profiler = StepProfiler(model, config.flops_profiler, peak, plan.batch.total)
    breakdown, drives = config.wall_clock_breakdown, files.written.drives
    return StepMeter(plan.device.torch, io_bytes, drives, sent, breakdown, reporter, profiler)


# -- components ----------------------------------------------------------------------------------------


def _extensions(
    plan: Plan,
    model: nn.Module,
    handles: Sequence[Sequence[ParamHandle]],
    gradients: GradientAccumulator,
    shards: LocalShards,
    host: HostArena,
    arena: DeviceArena,
    callbacks: EngineCallbacks,
) -> Iterator[Extension]:
    """Yields the features that are installed on the model; each is built after the one before."""
    quantized = [segment.name for layout in plan.layouts for segment in layout.segments if segment.inner]
    if quantized:
        yield UnpackedWeights(model, quantized)
    if plan.units.experts:
        zeros = None
        if plan.config.offload.experts != "visited":
            zeros = ZeroGradients(plan.layouts, plan.trainable, gradients, plan.device.torch, plan.units.experts)
        yield StackedExperts(model, plan.layouts, plan.units.experts, shards.pager, zeros)
    yield TargetedParameters(model, handles)
    if plan.world.divides_model or plan.sites:
        yield ShardedViews(plan.sites)
    if plan.world.sequence.size > 1:
        yield SequenceForward(model, SequenceParallel(world=plan.world))
    if plan.tiled_mlps:
        yield TiledMlps(model, plan.tiled_mlps, plan.config.offload.tile_mlp)
    if plan.config.comms_logger.enabled:
        yield CommunicationLog(plan.world)
    if plan.config.offload.audit == "random":
        yield RandomAudit(
            dict(model.named_modules()),
            blocks_of(model, plan.config.units),
            plan.config.offload.seed,
            plan.batch.accumulation,
            plan.device.torch,
            callbacks,
            shards,
            gradients,
            exact=not plan.memory.parts.coded.largest,
        )
    if plan.device.host_addressable:
        yield MemoryGuard(model, plan.memory.placement.peak, host, arena, plan.world.everyone.here, callbacks)


class CommunicationLog(Extension):
    """The block "comms_logger": a table of rank 0's collectives when the engine is closed."""

    def __init__(self, world: World) -> None:
        self._world, self._printed = world, world.everyone.rank != 0

    def remove(self) -> None:
        if not self._printed:
            self._printed = True
            show(f"collectives of rank 0 since its engine was created:\n{self._world.sent.table()}", logger)


def _agreement(plan: Plan, arena: DeviceArena, callbacks: EngineCallbacks, timeline: Timeline) -> Agreement:
    if plan.world.ranks.alone:
        return Agreement()
    gathers, coded, node = WeightGathers(plan.world.ranks), plan.memory.parts.coded, plan.memory.parts.node
    if coded.largest:
        gathers = CodedWeightGathers(plan.world.ranks, plan.device, coded, arena.keep(coded.nbytes))
    if plan.memory.parts.joined_gathers:
        sizes = unit_sizes(plan.layouts, plan.memory.placement, plan.shares, plan.memory.mode)
        gathers = JoinedWeightGathers(
            plan.world.ranks, plan.device, sizes, arena.keep(plan.memory.parts.joined_gathers)
        )
    if node.nbytes:
        gathers = NodeGathers(gathers, node, plan.world.node, plan.device, arena.keep(node.nbytes))
    owned = {unit for unit, layout in enumerate(plan.layouts) if layout.ep_size > 1}
    if owned:
        gathers = ExpertGathers(gathers, plan.world.expert_shards, owned)
    return Rounds(gathers, shown_names(plan), callbacks, timeline=timeline)


def shown_names(plan: Plan) -> list[str]:
    """Returns the name of each unit for messages and timelines."""
    return [layout.name or "the root" for layout in plan.layouts]


def _forms(plan: Plan) -> list[list[Values]]:
    itemsize, device = plan.memory.mode.weight_dtype.itemsize, plan.device.torch

    def form(unit: int, segment: ParameterSegment) -> Values:
        if segment.inner:
            return QuantizedTensors(segment, ParameterBytes(segment.name, unit, segment.start * itemsize, device))
        return Codes(segment) if segment.form else Values(segment)

    return [[form(unit, segment) for segment in layout.segments] for unit, layout in enumerate(plan.layouts)]


def _move_buffers(model: nn.Module, plan: Plan) -> None:
    """Moves buffers to the device, in their dtype, with the values of rank 0; shared buffers stay shared."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the originals, so that no new one gets an id
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                value = buffer
                if not plan.world.ranks.alone:
                    value = buffer.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                    plan.world.ranks.broadcast(value, 0)
                dtype = plan.buffer_dtype if buffer.is_floating_point() else None
                moved[id(buffer)] = (buffer, value.to(plan.device.torch, dtype))
            module._buffers[name] = moved[id(buffer)][1]


def _handles(plan: Plan, model: nn.Module, forms: Sequence[Sequence[StorageForm]]) -> list[list[ParamHandle]]:
    """Returns a handle for each parameter, unit by unit; an expert's row or a piece gets a parameter made here."""
    device, handles = plan.device.torch, list[list[ParamHandle]]()
    parameters = dict(model.named_parameters())
    for unit, (layout, mode) in enumerate(zip(plan.layouts, plan.modes, strict=True)):
        handles.append([])
        for position, segment in enumerate(layout.segments):
            parameter = parameters[segment.parameter]
            if segment.stack:
                empty = torch.empty(0, dtype=plan.memory.mode.weight_dtype, device=device)
                parameter = nn.Parameter(empty, parameter.requires_grad)
            handles[unit].append(
                ParamHandle(
                    parameter=parameter,
                    name=segment.name,
                    form=forms[unit][position],
                    unit=unit,
                    position=position,
                    dtype=mode.weight_dtype,
                    shape=segment.shape,
                    device=device,
                )
            )
    return handles


def _gradients(
    plan: Plan,
    files: RunFiles,
    host: HostArena,
    arena: DeviceArena,
    pager: Pager,
    agreement: Agreement,
    schedule: PassSchedule,
    callbacks: EngineCallbacks,
    compute: ComputeSpans,
) -> GradientAccumulator:
    """Returns the accumulator of gradients, with its memory in the tiers of the plan, and its threads."""
    dtypes, trainable, timeline = plan.memory.parts.gradients, plan.trainable, pager.table.timeline
    with contextlib.ExitStack() as undo:
        spill: DiskSpill = NoSpill()
        downloads: DeviceToHost = NoDownloads()
        if files.queue is not None and plan.memory.placement.spilled:
            spill = _spill(plan, files, files.queue, host, pager)
            undo.callback(spill.close)
        # The CPU cannot read gradients on such a device, so they are first copied to pinned staging buffers.
        if any(plan.memory.parts.trainable_numel) and not plan.device.host_addressable:
            # Two buffers or more: one is filled by the device while the CPU reads another.
            staging = [host.staging.take(host.classes.staging // STAGING_BUFFERS) for _ in range(STAGING_BUFFERS)]
            buffers = [buffer for buffer in staging if buffer is not None]
            assert len(buffers) == STAGING_BUFFERS, "the class was sized for them"
            most, calls = plan.memory.parts.largest_gradient, (pager.fail, pager.check)
            downloads = DeviceToHost(plan.device, buffers, most, plan.device_kernels, *calls, timeline=timeline)
            undo.callback(downloads.close)
        common: dict[str, Any] = {
            "layouts": plan.layouts,
            "parts": trainable,
            "arena": host,
            "dtypes": dtypes,
            "schedule": schedule,
            "callbacks": callbacks,
            "spill": spill,
            # Gradients on the device keep their place for the whole run, so that no step allocates device memory.
            "on_device": {
                unit: arena.keep(plan.memory.parts.nbytes[unit][State.GRAD]).view(dtypes.stored)
                for unit, tiers in enumerate(plan.memory.placement.tiers)
                if tiers.get(State.GRAD) is Tier.DEVICE
            },
            "totals": {unit: arena.keep(nbytes).view(dtypes.sums) for unit, nbytes in plan.memory.placement.added},
            "downloads": downloads,
            "timeline": timeline,
            "compute": compute,
        }
        accumulator: GradientAccumulator
        if plan.memory.parts.reduction is None:
            completion = UnitCompletion(callbacks) if plan.memory.updates_early else NoCompletion()
            accumulator = GradientAccumulator(**common, completion=completion)
        else:
            assert isinstance(agreement, Rounds), "only several ranks reduce"
            accumulator = ReduceScatterAccumulator(
                **common,
                device=plan.device,
                device_arena=arena,
                reduction=plan.memory.parts.reduction,
                rounds=agreement,
                expert_shards=plan.world.expert_shards,
            )
        undo.pop_all()
    return accumulator


def _spill(plan: Plan, files: RunFiles, queue: SharedQueue, host: HostArena, pager: Pager) -> DiskSpill:
    """Returns the gradients on disk, with their windows in host memory."""
    placement, parts = plan.memory.placement, plan.memory.parts
    buffers = [host.gradients.take(placement.window_numel * parts.gradient_dtype.itemsize) for _ in range(WINDOWS)]
    unit_windows = {
        unit: windows(borders(layout, part), parameter_starts(layout, part), placement.window_numel)
        for unit, layout, part in ((unit, plan.layouts[unit], plan.trainable[unit]) for unit in placement.spilled)
    }
    nbytes = {unit: parts.nbytes[unit][State.GRAD] for unit in unit_windows}
    # Gradients do not outlive a step, so their file is never committed.
    scratch = SpillFile(
        plan.config.drives,
        nbytes,
        queue,
        files.written,
        files.spans,
        title=lambda unit: f"the gradient of {plan.layouts[unit].name or 'the root'}",
    )
    # receiving thread: adds gradients during the backward, so its waits do not count as the model's.
    timeline = pager.table.timeline if plan.device.host_addressable else OFF
    return DiskSpill(
        unit_windows, parts.gradient_dtype, [buffer for buffer in buffers if buffer], scratch, pager.fail, timeline
    )


def _schedule(plan: Plan, model: nn.Module, callbacks: EngineCallbacks, agreement: Agreement) -> PassSchedule:
    if isinstance(model, PipelineStages):
        return StageRun(model)
    if plan.schedule.schedule != LAYER_MAJOR:
        return PassSchedule()
    return LayerMajor(
        blocks_of(model, plan.config.units),
        plan.device,
        wanted=plan.config.offload.schedule == LAYER_MAJOR,
        room=callbacks.device_room if plan.schedule.after_a_step else None,
        line=line_for_a_loop_of_calls(plan) if plan.world.everyone.rank == 0 else None,
        anywhere=lambda here: agreement.mean(float(here)) > 0,
    )


_RESERVE = 4
"""On an accelerator, "auto" reserves a quarter of the memory free at the start for everything but inputs."""


def _activations(
    plan: Plan, model: nn.Module, files: RunFiles, schedule: PassSchedule, timeline: Timeline
) -> ActivationPolicy:
    """Returns the policy for the blocks' activations: keep them, or compute them again from inputs in some tier."""
    config, device, tier, queue = plan.config, plan.device, plan.config.activation_tier, files.queue
    if tier is None:
        return ActivationPolicy()
    block, on_cpu = config.activation_checkpointing, device.host_addressable
    blocks = blocks_of(model, config.units)[: block.number_checkpoints]
    # Data-parallel ranks have different inputs. There is nothing to partition among them, nor is there in DeepSpeed.
    partitions = InputPartitions(plan.world.inputs) if plan.world.inputs.size > 1 else None
    # In host memory a copy of a tensor frees nothing, so only a drive helps a device that works there.
    if tier == "device" or (on_cpu and queue is None):
        return UnitCheckpoints(blocks, config, device, partitions)
    room = plan.memory.placement.inputs_nbytes
    at_once = (len(blocks) or None) if block.contiguous_memory_optimization else None
    memory = HostBlocks(
        device, process_memory(), config.offload.host_memory, 0 if tier == "nvme" or on_cpu else room, at_once
    )
    reserve = device.free_bytes() // _RESERVE

    def device_limit(now: int) -> float:
        """Returns the bytes that inputs may take on the device, from the bytes that they take now."""
        if tier == "nvme" or (tier == "cpu" and not on_cpu):
            return 0
        if not on_cpu:
            return now + device.free_bytes() - reserve
        return room if room is not None else now + usable_host(free_host_memory(), own_device_memory=False)

    return KeptInputs(
        blocks,
        config,
        device,
        staging=Staging(memory, None if queue is None else DiskSlots(config.drives, queue, files.written), timeline),
        device_limit=device_limit,
        schedule=schedule,
        timeline=timeline,
        partitions=partitions,
    )
