"""`initialize`: carries out the plan of an engine, which `plan` has decided before anything is changed.

If a step fails, the steps before it are undone, and the other ranks receive the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from offload import kernels
from offload.aio import IoQueue
from offload.aio.shared_queue import SharedQueue
from offload.checkpointing import with_configured
from offload.config import Config, effective, load_config, resolve_batch
from offload.engine.callbacks import EngineCallbacks
from offload.engine.core import EngineCore
from offload.engine.distributed.process_group import Ranks, join_ranks
from offload.engine.distributed.rendezvous import UNABLE, meet_others, stay_away
from offload.engine.engine import Engine
from offload.engine.keywords import refuse
from offload.engine.metrics.reporter import check_monitor, make_reporter
from offload.engine.metrics.span_relay import Relay
from offload.engine.metrics.step_meter import StepMeter
from offload.engine.optim import build_optimizer as optimizer_choice
from offload.engine.optim.optimizer import Optimizer, refuse_others
from offload.engine.params.opaque.buffers import with_adopted_buffers
from offload.engine.setup.assembly import Recorders, assemble, shown_names
from offload.engine.setup.dtype_choice import warn_if_slow
from offload.engine.setup.gpu_allocator import let_segments_grow
from offload.engine.setup.io_notices import io_notices
from offload.engine.setup.plan import Plan, decide, summary
from offload.engine.setup.resume import check_fits
from offload.engine.setup.run_files import NewStore, RunFiles
from offload.engine.tiles.known_mlps import tile as tile_mlps
from offload.engine.training import build_scheduler as schedule_choice
from offload.engine.training.components import EngineComponents, close_all
from offload.engine.training.data_loader import Loader, check_data, load
from offload.engine.training.loss_scale import LossScaler
from offload.engine.training.snapshot import Snapshot, keep_generators
from offload.engine.training.step_settings import StepSettings
from offload.errors import ConfigError, StoreError
from offload.hardware.probe import kept_window
from offload.layout.fingerprint import about, describe
from offload.notices import announce
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_choice import compute_device, open_device
from offload.swapper.store import Rating, Store, StoreSpec, Written
from offload.swapper.store.drive_spans import DriveSpans
from offload.swapper.store.format.commit_record import last_of_all
from offload.timeline import Timeline, open_timeline

logger = logging.getLogger("offload")

_starting = threading.RLock()
"""Serializes the starts of engines in a process: memory that a plan counts on must still be free when taken."""


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
) -> Initialized:
    """Returns an engine over `model`, as `deepspeed.initialize` does: (engine, optimizer, loader, lr_scheduler).

    The engine takes over the parameters, which become placeholders outside of forward and backward. All ranks must call
    it.

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
        mpu: For compatibility with DeepSpeed; must be None.
        dist_init_required: For compatibility; None or a bool, without effect.
        distributed_port: For compatibility; None or the launcher's port.
        mesh_param: For compatibility; must be None.

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
        refuse(mpu=mpu, dist_init_required=dist_init_required, distributed_port=distributed_port, mesh_param=mesh_param)
        loaded = with_configured(load_config(_the_config(args, config, config_params)))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"initialize expects model, a torch.nn.Module, got {type(model).__name__}")
        check_data(training_data, collate_fn)
        let_segments_grow(loaded.offload.device)  # before CUDA is used
        device = open_device(compute_device(loaded.offload.device))
    except BaseException as error:  # a Ctrl-C too: the process may live on, and the others would wait for it
        # The process group of this engine does not exist yet, so the reason goes through torch's store.
        stay_away(f"{type(error).__name__}: {error}")
        raise
    ranks: Ranks | None = None
    try:
        ranks = join_ranks(device)
        with _starting, with_adopted_buffers(model):
            return _initialize(
                loaded, model, device, ranks, optimizer, model_parameters, training_data, lr_scheduler, collate_fn
            )
    except BaseException as error:
        if ranks is not None:
            # The other ranks wait for this one, and receive the reason.
            ranks.close(f"{UNABLE}{type(error).__name__}: {error}")
        raise


def _initialize(
    loaded: Config,
    model: nn.Module,
    device: Device,
    ranks: Ranks | None,
    optimizer: Any,
    model_parameters: Any,
    training_data: Dataset[Any] | None,
    lr_scheduler: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Initialized:
    """Makes the plan and carries it out; for the arguments see `initialize`. The caller holds `_starting`."""
    batch = resolve_batch(loaded, 1 if ranks is None else ranks.size)
    chosen = optimizer_choice.choose(loaded.optimizer, model, optimizer, model_parameters)
    with keep_generators(device.torch):  # the optimizer's own code may draw in its dry run
        kept = optimizer_choice.kept_by(chosen, model)
    matrices = optimizer_choice.matrices_by(chosen, model)
    plan = decide(loaded, batch, model, device, ranks, chosen.rule.name, kept, matrices)
    schedule, notices = schedule_choice.choose(loaded.scheduler, lr_scheduler, chosen)
    as_trained = (*_as_trained(loaded, plan.world_size, model), *let_segments_grow(loaded.offload.device))
    plan = dataclasses.replace(plan, notices=(*plan.notices, *as_trained, *notices, *chosen.notices()))
    if not device.host_addressable:
        kernels.leave_cores()
    # The user's object wins over the config, as in DeepSpeed.
    if optimizer is not None and loaded.optimizer is not None:
        unused = f"the optimizer {loaded.optimizer.type} of the config is not used, because optimizer= is given"
        plan = dataclasses.replace(plan, notices=(*plan.notices, unused))
    loader = None
    if training_data is not None:
        loader = load(
            training_data,
            batch.micro,
            plan.rank,
            plan.world_size,
            loaded.offload.seed,
            collate_fn,
            device.torch,
            loaded.dataloader_drop_last,
        )
    engine = _build(plan, model, chosen, schedule, loader)
    if plan.rank == 0:
        warn_if_slow(loaded, device.torch, plan.resume)
        logger.info(effective(loaded, batch, plan.world_size))
        for notice in engine.notices:
            announce(notice)
        logger.debug("the complete config: %s", json.dumps(engine.config, indent=2))
    # A step of another optimizer on these parameters would have no effect, so it raises from now on.
    refuse_others()
    return Initialized(engine, chosen, loader, schedule)


def _as_trained(config: Config, ranks: int, model: nn.Module) -> tuple[str, ...]:
    """Returns notices if training differs from the model's own settings, or from older DeepSpeed with this config."""
    stage, clip = config.zero_optimization.stage, config.gradient_clipping
    wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    lines = (
        (
            "gradient_clipping" not in config.model_fields_set,
            f'gradients are clipped to a global norm of {clip:g}, since the config does not say; "gradient_clipping": '
            "0 turns clipping off, as in older DeepSpeed",
        ),
        (
            ranks > 1 and stage < 3,
            f"ZeRO stage {stage} on {ranks} ranks is trained as stage 3: weights, gradients and states are "
            f"partitioned; the numbers are the same",
        ),
        (
            bool(wide),
            f"{wide[0] if wide else ''} is float64, which is not supported: the model is trained in "
            f"{config.dtype}{'' if config.dtype == 'fp32' else ', with masters of 32 bits'}; call model.float() "
            "before initialize to silence this message",
        ),
    )
    return tuple(line for holds, line in lines if holds)


def _the_config(args: Any, config: Any, config_params: Any) -> Any:
    """Returns the single config that was given; raises `ConfigError`."""
    given = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    if len(given) != 1:
        raise ConfigError(
            f"expected one of config, config_params and args.deepspeed_config, got {len(given)}; "
            f"give the path of a DeepSpeed JSON file or its content as a dict"
        )
    return given[0]


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


def _build(plan: Plan, model: nn.Module, optimizer: Optimizer, lr_scheduler: Any, loader: Loader | None) -> Engine:
    """Creates files, memory, threads and hooks, in this order. If a step fails, the objects made before are closed."""
    timeline = open_timeline(plan.config.offload.trace, plan.rank, plan.world_size)
    if plan.rank == 0:
        check_monitor(plan.config)
    written = _written(plan)
    inputs_on_disk = plan.config.drives and plan.config.activation_tier in ("cpu", "nvme", "auto")
    queue = _queue(plan.config) if plan.slots or plan.placement.spilled or inputs_on_disk else None
    store: Store | None = None
    files = NewStore(plan, None, False, lr_scheduler)
    try:
        recorders = _recorders(plan, timeline, queue, written)
        progress: Snapshot | None = None
        if queue is not None and plan.slots:
            where = (plan.config.drives, plan.config.offload.run, plan.rank)
            store = Store(*where, _store_spec(plan, model), queue, written, recorders.spans)
            files = NewStore(plan, store, False, lr_scheduler)
            at = _last_commit_of_all(plan, store)
            if at is not None:
                progress = Snapshot.unpack(store.open(at))
                check_fits(progress, model, optimizer)
                files = NewStore(plan, store, True, lr_scheduler)

        def components(callbacks: EngineCallbacks) -> EngineComponents:
            found = RunFiles(queue=queue, store=store, make=files.make, written=written)
            parts = assemble(plan, model, optimizer, found, progress is not None, recorders, callbacks)
            # The timeline begins once the components are built: the filling of the tiers is not shown.
            timeline.start()
            if plan.tiled_mlps:  # last, as nothing that fails follows before the engine owns the components
                untile = tile_mlps(model, plan.tiled_mlps, plan.config.offload.tile_mlp)
                parts = dataclasses.replace(parts, untile=untile)
            return parts

        notices = (
            *plan.notices,
            *io_notices(queue),
            summary(plan),
            *(store.notices if store is not None else ()),
            *timeline.notices,
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
            close_all(*(() if queue is None else (queue.close,)), files.undo)
        raise
    try:
        notices += (*core.components.activations.notices, *core.state.notices())
        if progress is not None:
            notices += tuple(core.state.restore(progress))
        elif store is not None and plan.commit_every:
            # Step 0: a kill during the first step then resumes from the initial weights.
            store.commit(0, core.state.take().pack())
        if core.components.meter is not None:
            core.components.meter.begin()
        return Engine(core, notices)
    except BaseException:
        core.shutdown.abandon(remove=progress is None)
        raise


def _settings(plan: Plan) -> StepSettings:
    """Returns the settings of a step."""
    return StepSettings(
        micro_batch_size=plan.batch.micro,
        accumulation=plan.batch.accumulation,
        total_batch_size=plan.batch.total,
        clip=plan.config.gradient_clipping,
        skip_nonfinite=plan.config.offload.on_nonfinite == "skip",
        seed=plan.config.offload.seed,
        overlap=plan.config.offload.debug.overlap,
        config=plan.config,
        scaler=LossScaler(plan.config.fp16) if plan.config.dtype == "fp16" else None,
        device_need=plan.placement.device_need,
    )


def _recorders(plan: Plan, timeline: Timeline, queue: SharedQueue | None, written: Written) -> Recorders:
    """Returns the recorders of the components; for a breakdown of steps the meter also receives spans."""
    meter = _meter(plan, queue, written)
    breakdown = plan.config.wall_clock_breakdown
    return Recorders(
        timeline=timeline if meter is None or not breakdown else Relay(timeline, meter),
        spans=DriveSpans(timeline, shown_names(plan)),
        meter=meter,
    )


def _meter(plan: Plan, queue: SharedQueue | None, written: Written) -> StepMeter | None:
    """Returns the meter of steps, or None if the config does not ask for one, or on any rank but 0."""
    reporter = make_reporter(plan.config, plan.batch.total) if plan.rank == 0 else None
    if reporter is None:
        return None

    def io_bytes() -> tuple[int, int]:
        return (0, 0) if queue is None else (queue.read_bytes, queue.written_bytes)

    return StepMeter(plan.device.torch, io_bytes, written.drives, plan.config.wall_clock_breakdown, reporter)


def _written(plan: Plan) -> Written:
    """Returns the counter of bytes written to the drives, with the drives' endurance from the config."""
    block = plan.config.offload
    # Ranks of one machine share its drives, and each counts only its own bytes.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if plan.ranks is not None else 1  # set by torchrun
    rating = None if block.drive_tbw is None else Rating(block.drive_tbw * 1e12, block.drive_share, local)
    return Written(plan.config.drives, rating)


def _last_commit_of_all(plan: Plan, store: Store) -> int | None:
    """Returns the number of the last commit that every rank holds, or None to start over. Raises `StoreError`."""
    if not plan.resume:
        return None
    newest = store.newest_serial()
    if plan.ranks is None:
        return newest
    # The ranks decide together: a single rank that resumed would wait for the others for ever.
    everyone: list[int | None] = plan.ranks.share(newest)
    if None not in everyone:
        return last_of_all(everyone)
    # If a run was killed while it was created, some ranks have no commit, but then no rank has more than its first.
    if any(commit is not None and commit > 1 for commit in everyone):
        without = ", ".join(str(rank) for rank, commit in enumerate(everyone) if commit is None)
        raise StoreError(
            f"rank {without} of {len(everyone)} has no commit in {store.folders[0].parent}, other ranks have: the run "
            "had another number of ranks, or another drive is mounted there; resume with as many ranks as the run "
            "had, or choose another run name"
        )
    return None


def _store_spec(plan: Plan, model: nn.Module) -> StoreSpec:
    """Returns the layout of the swap files."""
    layout = describe(plan.layouts, plan.mode, plan.world_size)
    return plan.placement.store(plan.parts, plan.slots, layout, about(model))
