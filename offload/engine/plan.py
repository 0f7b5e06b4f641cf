"""What an engine will be: every decision, from config, model and sizes alone, before anything is touched.

`initialize` carries a plan out. With several ranks each makes its own, and they compare what must be equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.config import Batch, Config
from offload.engine.absent import is_absent, origin_of
from offload.engine.homes import Partitions, Wish, partitions
from offload.engine.layout import UnitLayout, lay_out, with_kept
from offload.engine.packed import Kept
from offload.engine.placeholder import Paged
from offload.engine.placement import Machine, Placement, free_host_memory, place
from offload.engine.ranks import Ranks
from offload.engine.units import Units, find_units
from offload.errors import ConfigError, StoreError, UsageError
from offload.kernels import cuda
from offload.notices import Remark
from offload.sizes import count_of, format_size
from offload.swapper.device import Device
from offload.swapper.host import process_memory
from offload.swapper.modes import DTYPES, MOMENTS, PRECISIONS, TORCH, Mode, dtype_name
from offload.swapper.residency import Tier
from offload.swapper.states import State
from offload.swapper.store import Shortage, find_removal, find_shortage, holder, other_runs, rank_folders, run_status

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
_SHOWN = 5
"""Names in a notice."""


class Plan(NamedTuple):
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
    slots: int
    """Slots of each partition in the store: 2 durable, 1 written in place, 0 where there is no store."""
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them as they are."""
    commit_every: int
    """Steps from one commit to the next; 0 where there is none."""
    resume: bool
    replace: bool
    """Whether a run of this name that is there goes."""
    device_kernels: bool
    """Whether the device has kernels of its own for AdamW and for sums of squares."""
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


def decide(
    config: Config,
    batch: Batch,
    model: nn.Module,
    device: Device,
    ranks: Ranks | None,
    optimizer: str,
    kept: Mapping[str, tuple[Kept, ...]],
) -> Plan:
    """Decide everything; `optimizer` is the name of its rule, `kept` what one of torch keeps of each parameter.

    Raises `ConfigError`, `BudgetError` and `StoreError`.
    """
    rank, world_size, here = (0, 1, 1) if ranks is None else (ranks.rank, ranks.size, ranks.here)
    _check_model(model)
    if optimizer == TORCH and world_size > 1:
        raise ConfigError(
            f"an optimizer without a kernel needs whole parameters, which lie in parts on {world_size} ranks; train on "
            f"one rank, or with AdamW"
        )
    mode = mode_of(config, optimizer)
    units = find_units(model, config.units)
    layouts = tuple(
        with_kept(lay_out(unit.name, [(name, model.get_parameter(name)) for name in unit.parameters], world_size), kept)
        for unit in units.units
    )
    parts = partitions(layouts, mode, gradient_dtype(config, mode, batch.accumulation), rank, world_size)
    buffer_dtype = DTYPES[config.data_types.buffer_dtype] if config.data_types.buffer_dtype else None
    _check_batch_norm(model, mode, device.torch, buffer_dtype)
    if ranks is not None:
        _check_same(ranks, config, batch, mode, layouts, model)
    device_kernels, why_not = _device_kernels(device)
    machine = Machine(
        free_host_memory() // here,
        device.free_bytes(),
        device.host_addressable,
        bool(config.drives),
        process_memory().needed_bytes,
        device_kernels,
    )
    placement = place(parts, mode, wish_of(config, batch.accumulation), machine)
    on_disk = placement.on_disk
    if ranks is not None:
        on_disk = any(ranks.share(on_disk))
    resume, replaced = _resume(config, on_disk)
    if ranks is not None:
        resume = any(ranks.share(resume))
    slots, notices = _slots(config, on_disk, parts, resume, placement, ranks)
    if slots < 2:
        placement = placement.settled(parts)
        slots = slots if placement.on_disk else 0
    return Plan(
        config,
        batch,
        device,
        ranks,
        mode,
        units,
        layouts,
        parts,
        placement,
        slots,
        buffer_dtype,
        config.offload.commit_every if slots == 2 else 0,
        resume,
        config.offload.resume == "restart" or bool(replaced),
        device_kernels,
        (
            *config.notices,
            *(replaced if rank == 0 else ()),
            *placement.notices,
            *notices,
            *why_not,
            *(_leftovers(config) if rank == 0 else ()),
        ),
    )


def _device_kernels(device: Device) -> tuple[bool, tuple[str, ...]]:
    """Whether a device whose memory the host cannot address has kernels of ours, and a line where it could have."""
    if device.host_addressable:
        return False, ()
    why_not = cuda.why_not(device.torch) if device.torch.type == "cuda" else None
    if why_not is None:
        return True, ()
    return False, (
        f"the CPU sums the squares of gradients and updates what lives on the GPU, and is slower: {why_not}",
    )


def wish_of(config: Config, accumulation: int = 1) -> Wish:
    """What the config asks of homes and memory, for steps of so many micro-batches."""
    zero, offload = config.zero_optimization, config.offload
    param, optimizer = zero.offload_param, zero.offload_optimizer
    return Wish(
        _TIERS[param.device],
        _TIERS[optimizer.device],
        offload.host_memory,
        offload.device_memory,
        optimizer.ratio,
        _cached_weights(config),
        zero.stage3_param_persistence_threshold,
        zero.stage3_max_live_parameters,
        zero.sub_group_size,
        accumulation,
    )


def _cached_weights(config: Config) -> int | None:
    """What DeepSpeed's files say of weights in host memory, with its own default for half of a pair."""
    param = config.zero_optimization.offload_param
    buffers = None
    if param.buffer_count is not None or param.buffer_size is not None:
        buffers = (param.buffer_count or 5) * (param.buffer_size or 10**8)
    given = [count for count in (param.max_in_cpu, buffers) if count is not None]
    return max(given) if given else None


def mode_of(config: Config, optimizer: str) -> Mode:
    """The states that there are; `optimizer` is the name of its rule."""
    return Mode(config.dtype, optimizer, PRECISIONS[config.dtype], MOMENTS[optimizer])


def compute_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('"device" is cuda, but torch finds no CUDA device; set it to "auto" or "cpu"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count > 1 and torch.cuda.current_device() == 0:  # torchrun shows all to each; other launchers show one
        if local >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local}, but torch finds {count_of(count, 'CUDA device')}; start as many processes"
            )
        torch.cuda.set_device(local)
    return torch.device("cuda", torch.cuda.current_device())


def _check_same(
    ranks: Ranks, config: Config, batch: Batch, mode: Mode, layouts: Sequence[UnitLayout], model: nn.Module
) -> None:
    """Raise `ConfigError`, on every rank, where the ranks were not given the same."""
    facts = {
        "batch": list(batch),
        "weights": config.weight_tier,
        "states": config.optimizer_tier,
        "mode": mode.name,
        "accumulation dtype": config.data_types.grad_accum_dtype,
        "clip": config.gradient_clipping,
        "torch_autocast": config.torch_autocast.enabled,
        "seed": config.offload.seed,
        "on_nonfinite": config.offload.on_nonfinite,
        "run": config.offload.run,
        "durability": repr(config.offload.durability),
        "resume": config.offload.resume,
        "units": [layout.name for layout in layouts],
        "parameters": [[s.name, list(s.shape), s.trainable] for layout in layouts for s in layout.segments],
        "weights given": [name for name, parameter in model.named_parameters() if not parameter.is_meta],
        "weights to be read": [
            name for name, parameter in model.named_parameters() if origin_of(parameter) is not None
        ],
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
            f"{count_of(len(wrong), 'parameter is', 'parameters are')} not floating point (quantized?), the first is "
            f"{wrong[0]}; offload trains bf16, fp16 and fp32 weights: give the model as it was before it was quantized"
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
    _check_absent(model)
    if any(isinstance(parameter, Paged) for parameter in model.parameters()):
        raise UsageError(
            "this model is under an engine already; destroy does not give its weights back: build a new one"
        )


def _check_absent(model: nn.Module) -> None:
    """Whoever made a module of the weights of another that has none yet has made it without values."""
    named = dict(model.named_parameters())
    lost = [name for name, parameter in named.items() if parameter.is_meta and not is_absent(parameter)]
    if lost and any(map(is_absent, named.values())):
        raise ConfigError(
            f"parameter {lost[0]} was put on the meta device beside those of offload.init or load_pretrained, so its "
            f"values are gone; make it on the CPU, or inside of offload.init"
        )
    for name, parameter in named.items():
        origin = origin_of(parameter)
        if origin is not None and origin.shape != tuple(parameter.shape):
            raise ConfigError(
                f"parameter {name} has shape {list(parameter.shape)} now, and what load_pretrained has found for it "
                f"has shape {list(origin.shape)}; a model can be resized before its folder is written, or built in "
                f"its new size and loaded with ignore_mismatched_sizes=True"
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
                    f'cannot compute with on the CPU; set "data_types": {{"buffer_dtype": "{dtype_name(dtype)}"}}'
                )


def gradient_dtype(config: Config, mode: Mode, accumulation: int) -> torch.dtype:
    """The weights' where a gradient is stored once, fp32 where many are added, or as grad_accum_dtype says."""
    named = config.data_types.grad_accum_dtype
    if named is not None:
        return DTYPES[named]
    return torch.float32 if accumulation > 1 else mode.weight_dtype


def _resume(config: Config, on_disk: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether to resume, and a line about the run that a start replaces.

    Raises `StoreError` where what lies there and what was asked for do not fit.
    """
    offload = config.offload
    if not config.drives or not (on_disk or offload.wants_store):
        if offload.resume == "must":
            raise StoreError('"resume" is must, but this configuration keeps no store to resume from')
        if offload.resume == "auto" and config.drives and run_status(config.drives, offload.run).exists:
            if offload.durability == "auto":
                return True, ()  # with more memory than it had, or other homes: it goes on with its store
            raise StoreError(
                f"{os.path.join(config.drives[0], offload.run)} holds a run, but this configuration keeps no "
                f'store: give it the homes that the run had, or set "durability": "step", or choose another run name'
            )
        return False, ()
    status = run_status(config.drives, offload.run)
    folder = os.path.join(config.drives[0], offload.run)
    if status.exists and offload.resume in ("never", "restart"):
        if held := next((who for rank in rank_folders(Path(folder)) if (who := holder(rank))), None):
            raise StoreError(f"{folder} is in use by {held}, and trains; wait for its end, or choose another run name")
        if offload.resume == "never" and not status.closed:
            raise StoreError(
                f'{folder} holds a run that did not end; go on with it by --resume auto ("resume": "auto"), or start '
                f'over by --resume restart ("resume": "restart"), or delete it with `offload rm {folder}`, or choose '
                f"another run name"
            )
        size = format_size(find_removal(Path(folder)).nbytes)
        how = "which was closed at its end" if status.closed else "which did not end"
        keeps = '"resume": "auto" would go on with one, another run name keeps it'
        return False, (f"the run in {folder} ({size}), {how}, is replaced; {keeps}",)
    if status.finished is not None and not status.exists and offload.resume not in ("never", "restart"):
        raise StoreError(
            f"{folder} was finished at step {status.finished.get('steps')}, so nothing is left to resume; "
            f'choose another run name, or start over with "resume": "never" (--resume never)'
        )
    if not status.exists and offload.resume == "must":
        raise StoreError(f'"resume" is must, but {folder} holds no committed step')
    return status.exists, ()


def _slots(
    config: Config, on_disk: bool, parts: Partitions, resume: bool, placement: Placement, ranks: Ranks | None
) -> tuple[int, tuple[str, ...]]:
    """How many slots the store has: 2 where a step is durable, 1 in place, 0 where there is no store."""
    slots, must = wanted_slots(config, on_disk, parts)
    if config.offload.wants_store and slots == 2 and not config.drives:
        raise ConfigError('"durability" asks for a store, but no nvme_path is given; set one in the "offload" block')
    if resume and any(parts.trainable_numel) and config.offload.durability != "none":
        return 2, ()
    if slots < 2 or must:
        return slots, ()
    spec = placement.store(parts, 2)
    short = find_shortage(config.drives, spec.nbytes * (1 if ranks is None else ranks.here))
    if ranks is not None:
        short = next((Shortage(*found) for found in ranks.share(short) if found is not None), None)
    if short is None:
        return 2, ()
    return 1, (
        f"durability none: two slots need {format_size(short.need)}, {short.path} has {format_size(short.free)} free; "
        f"one slot is written in place, and a killed run cannot be resumed",
    )


def wanted_slots(config: Config, on_disk: bool, parts: Partitions) -> tuple[int, bool]:
    """Slots of a store, and whether it must have so many: by default it has one where the drives lack room for two."""
    if config.offload.durability == "none" or not any(parts.trainable_numel):
        return (1 if on_disk else 0), True
    if config.offload.wants_store:
        return 2, True
    return (2, False) if on_disk else (0, True)


def _leftovers(config: Config) -> tuple[str, ...]:
    """A line where runs lie on the drives that take room and that nobody holds. They are never deleted here."""
    found = other_runs(config.drives, config.offload.run)
    if not found:
        return ()
    shown = ", ".join(f"{each.path} ({format_size(each.nbytes)})" for each in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    are = "other run that nobody holds takes" if len(found) == 1 else "other runs that nobody holds take"
    return (
        Remark(
            f"{len(found)} {are} {format_size(sum(each.nbytes for each in found))}: "
            f"{shown}{more}; `offload inspect {found[0].path.parent}` tells of them, `offload rm` deletes one"
        ),
    )


def _durability(plan: Plan) -> str:
    if not plan.commit_every:
        return ""
    often = "each step" if plan.commit_every == 1 else f"every {plan.commit_every} steps"
    without = plan.placement.store(plan.parts, 1).nbytes
    return f" (durable {often}; {format_size(without)} with durability none)"


def summary(plan: Plan) -> str:
    """One line: what lives where and what it takes."""
    placement = plan.placement
    stored = placement.store(plan.parts, plan.slots).nbytes
    clip = plan.config.gradient_clipping
    clipped = f"clipped to a norm of {clip:g}" if clip else "not clipped"
    states = [state for state in plan.mode.states if state is not State.WEIGHT]
    return Remark(
        f"{plan.mode.name} on {plan.device.torch}: weights on {placement.tiers(State.WEIGHT) or 'nothing'}, states on "
        f"{placement.tiers(*states) or 'nothing'}{', gradients on disk' if placement.spilled else ''}; host "
        f"{format_size(sum(placement.classes))}, device {format_size(placement.device_nbytes)}, swap files "
        f"{format_size(stored)}{_durability(plan)}; gradients {clipped}"
    )
