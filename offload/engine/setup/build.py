"""Construction of an engine's core from a plan: files, memory, threads and hooks, in this order.

If a step fails, the objects made before are closed, and files are left as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from offload.activations.tiles import tile as tile_mlps
from offload.aio import IoQueue
from offload.aio.backend import DEFAULTS
from offload.aio.shared_queue import SharedQueue
from offload.config import Aio, Config
from offload.distributed.agreement import AllOrNothing
from offload.distributed.process_group import Ranks
from offload.distributed.reshard import NewRanks, finish, reshard
from offload.engine.callbacks import EngineCallbacks
from offload.engine.core import EngineCore
from offload.engine.metrics.reporter import check_monitor, make_reporter
from offload.engine.metrics.span_relay import Listener, Relay
from offload.engine.metrics.step_meter import StepMeter
from offload.engine.optim.optimizer import Optimizer
from offload.engine.setup.assembly import Recorders, assemble, shown_names
from offload.engine.setup.plan import Plan, summary
from offload.engine.setup.resume import check_fits, check_replaced
from offload.engine.setup.run_files import NewStore, RunFiles
from offload.engine.training.components import EngineComponents, close_all
from offload.engine.training.data_loader import Loader
from offload.engine.training.loss_scale import LossScaler
from offload.engine.training.snapshot import Snapshot
from offload.engine.training.step_settings import StepSettings, job_of
from offload.errors import StoreError
from offload.fileio.stamp import Stamp
from offload.hardware.probe import kept_window
from offload.launch.environment import rank_number
from offload.layout.fingerprint import describe
from offload.model_io.saved_names import about_saved
from offload.notices import Headline
from offload.parallel.sequence import SequenceForward
from offload.parallel.sharded_params import ShardedViews
from offload.sizes import format_size
from offload.swapper.store import Rating, Store, StoreSpec, Written
from offload.swapper.store.format import last_of_all
from offload.swapper.store.inspection import look
from offload.swapper.store.model_files import ModelFiles
from offload.swapper.store.recovery import check_one_run
from offload.swapper.store.requests import DriveSpans
from offload.timeline import Timeline, open_timeline

_T = TypeVar("_T")

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
    stamps: Mapping[str, Stamp] = {},
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
        stamps: Stamp of each of the model's own files that the plan reads, by path.
        listener: Receives the spans of the engine; None for none but those that the config asks for.
    """
    timeline = open_timeline(plan.config.offload.trace, plan.process, plan.processes)
    if plan.process == 0:
        check_monitor(plan.config)
    written = _written(plan)
    inputs_on_disk = plan.config.drives and plan.config.activation_tier in ("cpu", "nvme", "auto")
    # Without a file to read or write no I/O thread is started.
    on_files = plan.slots or plan.placement.spilled or inputs_on_disk or plan.in_place
    queue = _queue(plan.config) if on_files else None
    store: Store | None = None
    files = NewStore(plan, None, False, lr_scheduler)
    try:
        recorders = _recorders(plan, model, timeline, queue, written, listener)
        progress: Snapshot | None = None
        if queue is not None and plan.slots:
            store = _store(plan, model, optimizer, lr_scheduler, queue, written, recorders.spans)
            files = NewStore(plan, store, False, lr_scheduler)
            progress = _progress(plan, store, model, optimizer)
            files = NewStore(plan, store, progress is not None, lr_scheduler)

        def components(callbacks: EngineCallbacks) -> EngineComponents:
            own = ModelFiles(plan.images, stamps, queue, recorders.spans) if queue and plan.in_place else None
            found = RunFiles(queue=queue, store=store, model_files=own, make=files.make, written=written)
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
            close_all(*(() if queue is None else (queue.close,)), files.undo)
        raise
    try:
        return make(core, (*_notices(plan, core), *_begin(plan, core, progress)))
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
        _everyone(plan.ranks, "replace the run").by_first(lambda: check_replaced(run, spec, job))
    new = NewRanks(
        drives=config.drives,
        run=config.offload.run,
        spec=spec,
        layouts=plan.layouts,
        mode=plan.mode,
        shares=plan.shares,
        ranks=_everyone(plan.ranks, "give the run another number of ranks"),
        everyone=_everyone(None if plan.grid is None else plan.everyone, "give the run another number of ranks"),
        place={} if plan.grid is None else plan.grid.description,
        mesh=plan.mesh,
    )
    new.ranks.by_first(lambda: finish(new.folders))
    line = None
    if plan.resume and plan.slots == 2:
        line = reshard(new, queue, lambda progress: check_fits(progress, model, optimizer))
    store = Store(new.drives, new.run, plan.rank, spec, queue, written, spans)
    store.notices += [] if line is None else [line]
    return store


def _everyone(ranks: Ranks | None, what: str) -> AllOrNothing:
    """Returns this rank's side of work before there is an engine; `what` names the work, for messages."""
    if ranks is None:
        return AllOrNothing(0, 1, lambda value: [value], what)
    return AllOrNothing(ranks.rank, ranks.size, lambda value: ranks.share(value, what), what)


def _progress(plan: Plan, store: Store, model: nn.Module, optimizer: Optimizer) -> Snapshot | None:
    """Opens the files of a run that is resumed, and returns its state; None for a new run."""
    at = _last_commit_of_all(plan, store)
    if at is None:
        return None
    progress = Snapshot.unpack(store.open(at))
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
    if plan.grid is not None or plan.sites:
        # Behind all other hooks on modules and state dicts, as nothing that fails follows here either.
        views = ShardedViews(plan.sites)
        parts = dataclasses.replace(parts, tensor_parallel=plan.grid, sharded_views=views)
    if plan.node is not None:
        parts = dataclasses.replace(parts, node=plan.node)
    if plan.sequence is not None:
        forward = SequenceForward(model, plan.sequence)
        parts = dataclasses.replace(parts, sequence=plan.sequence, sequence_forward=forward)
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
        "ranks": plan.processes,
        "samples_a_step": plan.batch.total,
        "host_budget_bytes": sum(plan.placement.classes),
        "device_budget_bytes": plan.placement.device_nbytes,
        "drive_tbw": config.offload.drive_tbw,
        "drive_share": config.offload.drive_share,
    }


def _meter(plan: Plan, model: nn.Module, queue: SharedQueue | None, written: Written) -> StepMeter | None:
    """Returns the meter of steps, or None if the config does not ask for one, or on any rank but 0."""
    facts = _facts(plan, model)
    reporter = make_reporter(plan.config, plan.batch.total, facts) if plan.process == 0 else None
    if reporter is None:
        return None

    def io_bytes() -> tuple[int, int]:
        return (0, 0) if queue is None else (queue.read_bytes, queue.written_bytes)

    everyone, breakdown = plan.everyone, plan.config.wall_clock_breakdown
    # With a grid, or groups for sequences, the counts are those of all of its groups.
    groups = plan.grid or plan.sequence or everyone
    sent = None if groups is None else lambda: groups.sent.total
    return StepMeter(plan.device.torch, io_bytes, written.drives, sent, breakdown, reporter)


def _written(plan: Plan) -> Written:
    """Returns the counter of bytes written to the drives, with the drives' endurance from the config."""
    block = plan.config.offload
    # Ranks of one machine share its drives, and each counts only its own bytes.
    local = rank_number(os.environ, "LOCAL_WORLD_SIZE", 1) if plan.everyone is not None else 1  # set by torchrun
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
    if plan.everyone is None:
        return newest
    # The ranks decide together: a single rank that resumed would wait for the others for ever.
    folder = store.folders[0]
    run_id = None if newest is None else look(folder).run_id
    every = plan.everyone.share([newest, str(folder), run_id])
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
    layout = describe(plan.layouts, plan.mode, plan.mesh.shards, plan.mesh.replicas)
    # Only where it differs from 1, so that descriptions of other stores have no such key.
    if plan.grid is not None:
        layout |= plan.grid.description
    return plan.placement.store(plan.parts, plan.slots, layout, about_saved(model, plan.grid is not None))
