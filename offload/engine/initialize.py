"""`initialize`: from a model and a config to an engine. Everything is checked before anything is touched."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offload.aio import IoQueue
from offload.config import Batch, Config, load_config, resolve_batch
from offload.engine.bindings import Bindings
from offload.engine.engine import Choices, Engine, Parts
from offload.engine.fill import Filler, make_residents
from offload.engine.gradients import Gradients
from offload.engine.hooks import Hooks
from offload.engine.layout import UnitLayout, lay_out
from offload.engine.loader import load
from offload.engine.optimizer import Optimizer, check_covers, from_config, from_torch
from offload.engine.placeholder import Paged, Place
from offload.engine.placement import Partitions, Placement, free_host_memory, partitions, place
from offload.engine.progress import Progress, persistent_buffers
from offload.engine.ranks import Ranks, join_ranks
from offload.engine.reduction import ReducedGradients
from offload.engine.rounds import Rounds
from offload.engine.saved import SavedTensors
from offload.engine.units import Units, find_units
from offload.engine.updater import Updater
from offload.engine.weights import Weights
from offload.errors import ConfigError, StoreError, UsageError
from offload.sizes import format_size
from offload.swapper.arena import DeviceArena, HostArena
from offload.swapper.device import Device, open_device
from offload.swapper.pager import Pager, UnitSize
from offload.swapper.residency import Tier
from offload.swapper.states import MODES, Mode
from offload.swapper.store import Commit, Shortage, Store, StoreSpec, find_shortage, run_status

logger = logging.getLogger("offload")

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Initialized(NamedTuple):
    """What `initialize` returns: the 4-tuple of DeepSpeed."""

    engine: Engine
    optimizer: Optimizer
    loader: DataLoader[Any] | None
    lr_scheduler: Any


class _Plan(NamedTuple):
    """All decisions, made before a file, a byte of memory or the model is touched."""

    config: Config
    batch: Batch
    device: Device
    ranks: Ranks | None
    mode: Mode
    units: Units
    layouts: tuple[UnitLayout, ...]
    parts: Partitions
    placement: Placement
    gradient_dtype: torch.dtype
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them as they are."""
    durable: bool
    resume: bool
    notices: tuple[str, ...]

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def world_size(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    @property
    def shares(self) -> tuple[tuple[range, range], ...]:
        """This rank's trainable and frozen elements of each unit."""
        rank, size = self.rank, self.world_size
        return tuple((layout.trainable(rank, size), layout.frozen(rank, size)) for layout in self.layouts)


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
) -> Initialized:
    """Put `model` under an engine, as `deepspeed.initialize` does, and return (engine, optimizer, loader, scheduler).

    `config` (or `config_params`, or `args.deepspeed_config`) is a DeepSpeed JSON file's path or its content as a dict.
    `optimizer` is a `torch.optim.AdamW` or `Adam`, a callable that makes one from the parameters, or None for the
    config's; `lr_scheduler` an object with `step()`, or a callable that makes one from the optimizer. The loader is
    None without `training_data`. The model's parameters are taken over: outside of forward and backward they are
    placeholders.

    Raises `ConfigError`, `BudgetError` or `StoreError` before anything is changed; a disk that is too small is such an
    error too.
    """
    loaded = load_config(_the_config(args, config, config_params))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize expects model, a torch.nn.Module, got {type(model).__name__}")
    device = open_device(_device(loaded.offload.device))
    ranks = join_ranks(device)
    try:
        return _initialize(
            loaded, model, device, ranks, optimizer, model_parameters, training_data, lr_scheduler, collate_fn
        )
    except BaseException as error:
        if ranks is not None:
            ranks.close(f"{type(error).__name__}: {error}")  # the others wait for this one
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
    batch = resolve_batch(loaded, 1 if ranks is None else ranks.size)
    plan = _decide(loaded, batch, model, device, ranks)
    chosen = _optimizer(plan, model, optimizer, model_parameters)
    schedule = lr_scheduler(chosen) if _is_factory(lr_scheduler) else lr_scheduler
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at each step, which engine.step() has not; call its step(metric) "
            "yourself and do not pass it as lr_scheduler"
        )
    engine = _build(plan, model, chosen, schedule)
    loader = None
    if training_data is not None:
        loader = load(
            training_data, batch.micro, plan.rank, plan.world_size, loaded.offload.seed, collate_fn, device.torch
        )
    for notice in engine.notices if plan.rank == 0 else ():
        logger.info(notice)
    atexit.register(engine.at_exit)
    return Initialized(engine, chosen, loader, schedule)


def _the_config(args: Any, config: Any, config_params: Any) -> Any:
    given = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    if len(given) != 1:
        raise ConfigError(
            f"expected one of config, config_params and args.deepspeed_config, got {len(given)}; "
            f"give the path of a DeepSpeed JSON file or its content as a dict"
        )
    return given[0]


def _is_factory(given: Any) -> bool:
    return isinstance(given, type) or (callable(given) and not hasattr(given, "step"))


# -- deciding -----------------------------------------------------------------------------------------


def _decide(config: Config, batch: Batch, model: nn.Module, device: Device, ranks: Ranks | None) -> _Plan:
    rank, world_size, here = (0, 1, 1) if ranks is None else (ranks.rank, ranks.size, ranks.here)
    _check_model(model)
    mode = MODES[config.dtype]
    units = find_units(model, config.units)
    layouts = tuple(
        lay_out(unit.name, [(name, model.get_parameter(name)) for name in unit.parameters], world_size)
        for unit in units.units
    )
    parts = partitions(layouts, mode, rank, world_size)
    weight_home, state_home = _TIERS[config.weight_tier], _TIERS[config.optimizer_tier]
    on_disk = weight_home is Tier.DISK or (state_home is Tier.DISK and any(parts.trainable_numel))
    gradient_dtype = _gradient_dtype(config, mode, batch.accumulation)
    buffer_dtype = _DTYPES[config.data_types.buffer_dtype] if config.data_types.buffer_dtype else None
    _check_batch_norm(model, mode, device.torch, buffer_dtype)
    free_host = free_host_memory() // here

    def placed(slots: int) -> Placement:
        offload = config.offload
        return place(
            parts,
            mode,
            weight_home,
            state_home,
            slots,
            gradient_dtype,
            offload.host_memory,
            offload.device_memory,
            free_host,
            device.host_addressable,
        )

    if ranks is not None:
        _check_same(ranks, config, batch, mode, layouts, model)
    resume = _resume(config, on_disk)
    if ranks is not None:
        resume = any(ranks.share(resume))
    slots, notices = _slots(config, on_disk, any(parts.trainable_numel), resume, placed, ranks)
    return _Plan(
        config,
        batch,
        device,
        ranks,
        mode,
        units,
        layouts,
        parts,
        placed(slots),
        gradient_dtype,
        buffer_dtype,
        slots == 2,
        resume,
        (*config.notices, *notices),
    )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('"device" is cuda, but torch finds no CUDA device; set it to "auto" or "cpu"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))  # torchrun: one GPU for each process
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK is {index}, but this machine has {torch.cuda.device_count()} CUDA devices; start as many "
            f"processes as there are devices"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_same(
    ranks: Ranks, config: Config, batch: Batch, mode: Mode, layouts: Sequence[UnitLayout], model: nn.Module
) -> None:
    """Raise `ConfigError`, on every rank, where the ranks were not given the same."""
    facts = {
        "batch": list(batch),
        "weights": config.weight_tier,
        "states": config.optimizer_tier,
        "dtype": mode.name,
        "accumulation dtype": config.data_types.grad_accum_dtype,
        "clip": config.gradient_clipping,
        "run": config.offload.run,
        "durability": config.offload.durability,
        "resume": config.offload.resume,
        "units": [layout.name for layout in layouts],
        "parameters": [[s.name, list(s.shape), s.trainable] for layout in layouts for s in layout.segments],
        "weights given": [name for name, parameter in model.named_parameters() if not parameter.is_meta],
    }
    everyone = ranks.share(facts)
    for name, mine in everyone[0].items():
        for rank, others in enumerate(everyone):
            if others[name] != mine:
                raise ConfigError(
                    f"rank {rank} was given other {name} than rank 0: {_brief(others[name])}, not {_brief(mine)}; "
                    f"give every rank the same model and config"
                )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:80]}…"


def _check_model(model: nn.Module) -> None:
    wrong = [n for n, p in model.named_parameters() if not p.is_floating_point()]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} parameters are not floating point (quantized?), the first is {wrong[0]}; offload trains "
            f"bf16 and fp32 weights"
        )
    memory: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            other = memory.setdefault(parameter.data_ptr(), name)
            if other != name:
                raise ConfigError(
                    f"parameters {other} and {name} share memory without being one parameter, so they would be untied; "
                    f"tie them by one object (head.weight = embedding.weight, without .data), or clone() one"
                )
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ConfigError(
            f"buffer {lost[0]} is on the meta device, so its values are gone; build the model inside "
            f"offload.init(...), which leaves buffers real"
        )
    if any(isinstance(parameter, Paged) for parameter in model.parameters()):
        raise UsageError(
            "this model is under an engine already; destroy does not give its weights back: build a new one"
        )


def _check_batch_norm(model: nn.Module, mode: Mode, device: torch.device, buffer_dtype: torch.dtype | None) -> None:
    """torch's CPU kernel takes statistics in the dtype of the weights alone, and says so only in the first forward."""
    dtype = mode.weight_dtype
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and isinstance(module.running_mean, torch.Tensor):
            have = buffer_dtype or module.running_mean.dtype
            if module.weight is not None and have != dtype:
                raise ConfigError(
                    f"{name} is a BatchNorm, whose statistics are {have} and whose weights are {dtype}, which torch "
                    f'cannot compute with on the CPU; set "data_types": {{"buffer_dtype": "{_NAMES[dtype]}"}}'
                )


def _gradient_dtype(config: Config, mode: Mode, accumulation: int) -> torch.dtype:
    """bf16 where a gradient is stored once, fp32 where many are added, or as data_types.grad_accum_dtype says."""
    named = config.data_types.grad_accum_dtype
    if named is not None:
        return _DTYPES[named]
    return torch.float32 if accumulation > 1 else mode.weight_dtype


def _resume(config: Config, on_disk: bool) -> bool:
    """Whether to resume; raises `StoreError` where what lies there and what was asked for do not fit."""
    offload = config.offload
    if not config.drives or not (on_disk or offload.durability == "step"):
        if offload.resume == "must":
            raise StoreError('"resume" is must, but this configuration keeps no store to resume from')
        if offload.resume == "auto" and config.drives and run_status(config.drives, offload.run).exists:
            raise StoreError(
                f"{os.path.join(config.drives[0], offload.run)} holds a run, but this configuration keeps no "
                f'store: give it the homes that the run had, or set "durability": "step", or choose another run name'
            )
        return False
    status = run_status(config.drives, offload.run)
    folder = os.path.join(config.drives[0], offload.run)
    if status.exists and offload.resume == "never":
        raise StoreError(
            f'{folder} holds a run that did not end; go on with it by --resume auto ("resume": "auto"), or delete it '
            f"with `offload rm {folder}`, or choose another run name"
        )
    if status.finished is not None and not status.exists and offload.resume != "never":
        raise StoreError(
            f"{folder} was finished at step {status.finished.get('steps')}, so nothing is left to resume; "
            f'choose another run name, or start over with "resume": "never" (--resume never)'
        )
    if not status.exists and offload.resume == "must":
        raise StoreError(f'"resume" is must, but {folder} holds no committed epoch')
    return status.exists


def _slots(
    config: Config,
    on_disk: bool,
    trains: bool,
    resume: bool,
    placed: Callable[[int], Placement],
    ranks: Ranks | None,
) -> tuple[int, tuple[str, ...]]:
    """How many slots the store has: 2 where a step is durable, 1 in place, 0 where there is no store."""
    wish = config.offload.durability
    if wish == "none" or not trains:
        return (1 if on_disk else 0), ()
    if wish == "step" and not config.drives:
        raise ConfigError('"durability" is step, but no nvme_path is given; set one in the "offload" block')
    if wish == "step" or resume:
        return 2, ()
    if not on_disk:
        return 0, ()
    short = find_shortage(config.drives, StoreSpec(placed(2).stored, 2, {}), 1 if ranks is None else ranks.here)
    if ranks is not None:
        short = next((Shortage(*found) for found in ranks.share(short) if found is not None), None)
    if short is None:
        return 2, ()
    return 1, (
        f"durability none: two slots need {format_size(short.need)}, {short.path} has {format_size(short.free)} free; "
        f"one slot is written in place, and a killed run cannot be resumed",
    )


def _optimizer(plan: _Plan, model: nn.Module, given: Any, model_parameters: Any) -> Optimizer:
    """The optimizer that was given, or the config's over `model_parameters`."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if callable(given) and not isinstance(given, torch.optim.Optimizer):
        given = given(list(model_parameters) if model_parameters is not None else trainable)
    if given is not None:
        chosen = from_torch(given)
    elif not trainable:
        return Optimizer([{"params": []}], {"lr": 0.0})
    elif plan.config.optimizer is None:
        raise ConfigError(
            f"{len(trainable)} parameters are trainable, but there is no optimizer; add to the config "
            '"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, or pass optimizer='
        )
    else:
        params = plan.config.optimizer.params
        if params.lr is None:
            raise ConfigError('the learning rate is "auto" or absent; give optimizer.params.lr a number')
        settings = {
            "lr": params.lr,
            "betas": params.betas,
            "eps": params.eps,
            "weight_decay": params.weight_decay,
            "decoupled": plan.config.optimizer.decoupled,
        }
        chosen = from_config(_trainable_only(model_parameters, trainable), settings)
    check_covers(chosen, model)
    return chosen


def _trainable_only(given: Iterable[Any] | None, trainable: Sequence[nn.Parameter]) -> list[Any]:
    """`given`, parameters or groups of them, without frozen ones."""
    if given is None:
        return list(trainable)
    items = list(given)
    if items and isinstance(items[0], Mapping):
        return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in items]
    return [p for p in items if p.requires_grad]


# -- acting -------------------------------------------------------------------------------------------


def _build(plan: _Plan, model: nn.Module, optimizer: Optimizer, lr_scheduler: Any) -> Engine:
    """Make files, memory, threads and hooks. What fails on the way closes what was made before."""
    queue = IoQueue() if plan.placement.slots else None
    store: Store | None = None
    try:
        progress: Progress | None = None
        if queue is not None:
            store = Store(plan.config.drives, plan.config.offload.run, plan.rank, _store_spec(plan), queue)
            at = _last_commit_of_all(plan, store)
            if at is not None:
                progress = Progress.unpack(store.open(at))
                _check_fits(progress, model, optimizer)
            else:
                store.create()
        parts = _fill(plan, model, queue, store, resume=progress is not None)
    except BaseException:
        if queue is not None:
            queue.close()
        if store is not None:
            store.remove() if not plan.resume else store.close()
        raise
    choices = Choices(
        plan.batch.micro,
        plan.batch.accumulation,
        plan.batch.total,
        plan.config.gradient_clipping,
        plan.config.offload.on_nonfinite == "skip",
        plan.config.offload.seed,
        plan.config.offload.debug.overlap,
    )
    engine = Engine(
        model,
        plan.device.torch,
        parts,
        optimizer,
        lr_scheduler,
        choices,
        plan.durable,
        (*plan.notices, _summary(plan)),
    )
    try:
        if progress is not None:
            engine.restore(progress)
        elif store is not None and plan.durable:
            # Epoch 0: a kill during the first step resumes from the initial weights.
            store.commit(0, engine.progress().pack())
    except BaseException:
        engine.abandon(remove=progress is None)
        raise
    return engine


def _last_commit_of_all(plan: _Plan, store: Store) -> Commit | None:
    """The last commit that every rank holds; None to start over.

    A rank may be one commit ahead of another that was killed before its own, and no further (see `Rounds.step`). Where
    some hold none, a kill came while the run was being made: then nobody is beyond its first.
    """
    if not plan.resume:
        return None
    newest = store.newest_commit()
    if plan.ranks is None:
        return newest or Commit(0, 0)  # what is damaged is for `Store.open` to say
    everyone = [None if found is None else Commit(*found) for found in plan.ranks.share(newest)]
    held = [commit for commit in everyone if commit is not None]
    if len(held) == len(everyone):
        return min(held)
    if any(commit > Commit(0, 0) for commit in held):
        without = ", ".join(str(rank) for rank, commit in enumerate(everyone) if commit is None)
        raise StoreError(
            f"rank {without} of {len(everyone)} has no commit in {store.folders[0].parent}, others have: the run was "
            f"of another number of ranks, or another drive is mounted there; go on with as many ranks as it had, or "
            f"choose another run name"
        )
    return None


def _check_fits(progress: Progress, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `StoreError` where buffers or groups are not those of the run."""
    mine = {name: list(buffer.shape) for name, buffer in persistent_buffers(model).items()}
    theirs = {name: list(buffer.shape) for name, buffer in progress.buffers.items()}
    if mine != theirs:
        name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
        raise StoreError(f"buffer {name} has shape {theirs.get(name)} in the run and {mine.get(name)} in this model")
    if len(progress.facts["groups"]) != len(optimizer.param_groups):
        raise StoreError(
            f"the run has {len(progress.facts['groups'])} groups of parameters, this optimizer has "
            f"{len(optimizer.param_groups)}"
        )


def _fill(plan: _Plan, model: nn.Module, queue: IoQueue | None, store: Store | None, resume: bool) -> Parts:
    """Map the arenas, take the model's weights over, start the worker, install the hooks."""
    placement, device = plan.placement, plan.device
    host = HostArena(placement.classes, device)
    arena = DeviceArena(placement.device_nbytes, device, plan.config.offload.debug.poison)
    sizes = [_unit_size(layout, plan) for layout in plan.layouts]
    rounds = None if plan.ranks is None else Rounds(plan.ranks, [layout.name or "the root" for layout in plan.layouts])
    pager = Pager(sizes, host, arena, device, store, rounds)
    if rounds is not None:
        rounds.give_weights = pager.take_part
    residents = make_residents(plan.parts, plan.mode, placement, host, arena)
    filler = Filler(plan.mode, plan.parts, placement, pager, residents, device, store, plan.shares, plan.ranks)
    if resume:
        filler.read_back(len(sizes))
        _forget_weights(model)
    else:
        filler.fill(model, plan.layouts, plan.config.offload.seed)
    del filler
    trainable = tuple(share[0] for share in plan.shares)
    gradients = _gradients(plan, trainable, host, arena, rounds)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if plan.ranks is not None:
                    buffer = _of_rank_0(buffer, plan.ranks)
                floating = buffer.is_floating_point()
                module._buffers[name] = buffer.to(device.torch, plan.buffer_dtype if floating else None)
    dtype = plan.mode.weight_dtype
    places = [
        [
            Place(model.get_parameter(segment.name), segment.name, unit, position, dtype, segment.shape, device.torch)
            for position, segment in enumerate(layout.segments)
        ]
        for unit, layout in enumerate(plan.layouts)
    ]
    bindings = Bindings(plan.layouts, places, pager, dtype)
    saved = SavedTensors([layout.name for layout in plan.layouts], places, bindings, pager)
    hooks = Hooks(model, plan.units.sites, places, bindings, saved, gradients)
    weights = Weights(model, plan.layouts, places, pager, hooks, dtype)
    updater = None
    if any(plan.parts.trainable_numel):
        updater = Updater(plan.mode, sizes, pager, host, device, store, residents, gradients, plan.durable)
    return Parts(
        hooks,
        weights,
        bindings,
        updater,
        pager,
        gradients,
        plan.ranks,
        rounds,
        store,
        queue,
        host,
        plan.layouts,
        trainable,
    )


def _gradients(
    plan: _Plan, trainable: Sequence[range], host: HostArena, arena: DeviceArena, rounds: Rounds | None
) -> Gradients:
    if plan.ranks is None or rounds is None or not any(trainable):
        return Gradients(plan.layouts, trainable, host, plan.gradient_dtype, plan.device)
    made = plan.mode.weight_dtype  # what a backward makes
    return ReducedGradients(
        plan.layouts, trainable, host, plan.gradient_dtype, plan.device, arena, made, plan.ranks, rounds
    )


def _of_rank_0(buffer: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A copy of the buffer as it is on rank 0."""
    values = buffer.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    ranks.broadcast(values, 0)
    return values


def _unit_size(layout: UnitLayout, plan: _Plan) -> UnitSize:
    itemsize = plan.mode.weight_dtype.itemsize
    parts = (layout.trainable(plan.rank, plan.world_size), layout.frozen(plan.rank, plan.world_size))
    share = tuple(range(part.start * itemsize, part.stop * itemsize) for part in parts if part)
    return UnitSize(layout.name, layout.numel * itemsize, plan.placement.weight_home, share)


def _forget_weights(model: nn.Module) -> None:
    """On a resume the store has the weights: whatever the model came with is dropped, unread."""
    for parameter in model.parameters():
        if parameter.is_meta:
            empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
        else:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


def _store_spec(plan: _Plan) -> StoreSpec:
    fingerprint = {
        "mode": plan.mode.name,
        "world_size": plan.world_size,
        "units": {
            layout.name: {
                "numel": layout.numel,
                "trainable": layout.trainable_stop,
                "parameters": [[s.name, list(s.shape), s.trainable] for s in layout.segments],
            }
            for layout in plan.layouts
        },
    }
    return StoreSpec(plan.placement.stored, plan.placement.slots, fingerprint)


def _summary(plan: _Plan) -> str:
    """One line: what lives where and what it takes."""
    placement = plan.placement
    stored = StoreSpec(placement.stored, placement.slots, {}).nbytes if placement.slots else 0
    clip = plan.config.gradient_clipping
    return (
        f"{plan.mode.name} on {plan.device.torch}: weights on {placement.weight_home.value}, states on "
        f"{placement.state_home.value}; host {format_size(sum(placement.classes))}, device "
        f"{format_size(placement.device_nbytes)}, swap files {format_size(stored)}"
        f"{' (durable each step)' if plan.durable else ''}; gradients clipped at {clip or 'no'} norm"
    )
