"""The config: a DeepSpeed JSON file, or its content as a dict, read into frozen models.

    config = load_config("ds_config.json")

Every key of DeepSpeed's offload is known here: honoured, accepted because it tunes what this library decides by itself
(one notice names those), or refused with the reason. All keys that DeepSpeed does not have lie in the block "offload",
which DeepSpeed ignores. docs/configuration.md is written from the descriptions and tables below.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from offload.errors import ConfigError
from offload.sizes import parse_size

Tier = Literal["none", "cpu", "nvme"]


# -- values -------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """`1e8` and `200000000.0` are integers, `true` is not a number."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _strings(value: Any) -> Any:
    return (value,) if isinstance(value, str | os.PathLike) else value


def _path(value: Any) -> Any:
    return os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value


def _size(value: Any) -> Any:
    try:
        return parse_size(value)
    except OverflowError:
        raise ValueError("should be a size that a machine can have") from None


def _rates(value: Any) -> Any:
    """A number for all groups of parameters, or a list with one for each."""
    numbers = value if isinstance(value, list | tuple) else (value,)
    if not numbers or not all(_is_rate(number) for number in numbers):
        raise ValueError("should be a number of at least 0, or a list of such, one for each group of parameters")
    rates = tuple(float(number) for number in numbers)
    return rates if isinstance(value, list | tuple) else rates[0]


def _is_rate(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _or_auto(value: Any) -> Any:
    return value if isinstance(value, str) and value == "auto" else _rates(value)


def _momentum(value: Any) -> Any:
    rates = _rates(value)
    if max(rates if isinstance(rates, tuple) else (rates,)) >= 1:
        raise ValueError("should be below 1")
    return rates


def _schedule(name: str) -> str:
    """The type of a schedule, in any case of letters."""
    known = {word.lower(): word for word in (*SCHEDULES, *TORCH_SCHEDULES)}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    hint = f'did you mean "{known[near[0]]}"? ' if near else ""
    raise ValueError(
        f"should be {', '.join(SCHEDULES)}, or one of torch.optim.lr_scheduler that a file can describe, got {name!r}; "
        f"{hint}Any other schedule can be passed to offload.initialize as lr_scheduler="
    )


def _steps(value: Any) -> Any:
    """Infinity, as `accelerate` writes it, is never: 0."""
    return 0 if value == math.inf else _number(value)


def _spelling(names: Mapping[str, str]) -> BeforeValidator:
    """Other spellings of a choice, in any case of letters."""
    return BeforeValidator(lambda value: names.get(value.lower(), value) if isinstance(value, str) else value)


Whole = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Whole, Field(gt=0)]
Elements = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[Number, Field(le=1)]
Rates = Annotated[float | tuple[float, ...], BeforeValidator(_rates)]
RatesOrAuto = Annotated[float | tuple[float, ...] | Literal["auto"], BeforeValidator(_or_auto)]
Momentum = Annotated[float | tuple[float, ...], BeforeValidator(_momentum)]
WarmupType = Annotated[Literal["log", "linear"], _spelling({"log": "log", "linear": "linear"})]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_strings)]
Paths = Annotated[tuple[Annotated[Name, BeforeValidator(_path)], ...], BeforeValidator(_strings)]
Size = Annotated[int, BeforeValidator(_size)]
OptimizerName = Literal["Adam", "AdamW", "Lamb", "Adagrad", "Lion", "SGD"]
OptimizerType = Annotated[OptimizerName, _spelling({name.lower(): name for name in get_args(OptimizerName)})]
_DTYPE_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
SumDtype = Annotated[Literal["fp32", "bf16", "fp16"], _spelling(_DTYPE_NAMES)]


# -- blocks -------------------------------------------------------------------------------------------


def _keys(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_CHANGES = "would change what is learned and is not supported; remove it, or switch it off"


class Block(BaseModel):
    """A block of the config; beside its fields it knows keys without effect and keys that it must refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    TUNING: ClassVar[tuple[str, ...]] = ()
    """Accepted: they tune what is decided here without them."""
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()
    """Accepted: what they switch on is missing here, and the bits are the same without it."""
    REFUSED: ClassVar[dict[str, str]] = {}
    """Refused unless switched off, with what to say."""
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    INSTEAD: ClassVar[Mapping[str, Any]] = {}
    """What to write where a value came in place of the block: the first key is that of the value."""
    OWN_AUTO: ClassVar[tuple[str, ...]] = ()
    """Fields in which "auto" is a value; in all others it means the default."""


class OffloadParam(Block):
    """Where the weights live."""

    TUNING = ("pin_memory",)
    INSTEAD: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    device: Tier = Field("none", description="home of the weights: none (compute device), cpu, nvme")
    nvme_path: Paths = Field((), description="folder or list of folders for swap files; one per drive")
    max_in_cpu: Elements | None = Field(
        None,
        description="elements of weights on nvme that have room in host memory too; default: what host_memory leaves",
    )
    buffer_count: Count | None = Field(None, description="with buffer_size: another way to say max_in_cpu")
    buffer_size: Count | None = Field(None, description="elements; units may be larger than that")


class OffloadOptimizer(Block):
    """Where the optimizer states live."""

    TUNING = _keys(
        """pin_memory buffer_count buffer_size fast_init pipeline pipeline_read pipeline_write super_offload
        cpuadam_cores_perc"""
    )
    INSTEAD: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    device: Tier = Field("none", description="home of residual and moments: none (compute device), cpu, nvme")
    nvme_path: Paths = Field((), description="folder or list of folders for swap files; one per drive")
    ratio: Annotated[Number, Field(le=1)] = Field(
        1.0, description="share of the states that goes there, by bytes; the first units' stay on the compute device"
    )


class LeafModule(Block):
    """Modules that move as one unit."""

    REFUSED: ClassVar[dict[str, str]] = {"name_suffixes": 'is not supported; give whole names in "names"'}

    classes: Names = Field((), description="class names of modules that are one unit each")
    names: Names = Field((), description="names of modules that are one unit each")


class ZeroOptimization(Block):
    """ZeRO: what is partitioned, and where it lives."""

    TUNING = _keys(
        """stage3_model_persistence_threshold model_persistence_threshold contiguous_gradients
        reduce_bucket_size overlap_comm reduce_scatter allgather_partitions allgather_bucket_size
        use_multi_rank_bucket_allreduce round_robin_gradients ignore_unused_parameters load_from_fp32_weights
        memory_efficient_linear override_module_apply stage3_module_granularity_threshold
        module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
        stage3_allgather_sequential allgather_sequential log_trace_cache_warnings enable_sanity_checks
        pipeline_loading_checkpoint elastic_checkpoint legacy_stage1 save_muon_momentum_buffer_in_memory
        zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather cpu_offload_use_pin_memory"""
    )
    REFUSED: ClassVar[dict[str, str]] = dict.fromkeys(
        _keys(
            """zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param
            zenflow"""
        ),
        _CHANGES,
    )

    OLD_NAMES: ClassVar[dict[str, str]] = {
        name.removeprefix("stage3_"): name
        for name in _keys(
            """stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters
            stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save"""
        )
    } | {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}

    INSTEAD: ClassVar[Mapping[str, Any]] = {"stage": 3}

    stage: Annotated[Whole, Field(ge=0, le=3)] = Field(
        0, description="0 to 3; on one process all stages train the same way"
    )
    offload_param: OffloadParam = Field(OffloadParam(), description="see below")
    offload_optimizer: OffloadOptimizer = Field(OffloadOptimizer(), description="see below")
    leaf_module: LeafModule = Field(LeafModule(), description="see below")
    sub_group_size: Count | None = Field(
        None, description="elements of a tile of the update at most; default: 16 MiB of all states"
    )
    stage3_prefetch_bucket_size: Elements | None = Field(
        None, description="elements brought ahead at most, one unit at least; 0: none; default: what memory allows"
    )
    stage3_param_persistence_threshold: Elements = Field(
        0, description="units of at most so many elements stay on the compute device"
    )
    stage3_max_live_parameters: Count | None = Field(
        None, description="elements on the compute device at most, beside those at home there; one unit at least"
    )
    stage3_max_reuse_distance: Elements | None = Field(
        None, description="a unit leaves the device at once if more elements are used before it is used again"
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None, description="false: save_16bit_model writes nothing in stage 3, as in DeepSpeed; default: it writes"
    )


Beta = Annotated[Number, Field(lt=1)]

OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True, "bias_correction": True},
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True, "bias_correction": True},
    "Lamb": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "bias_correction": True,
    },
    "Adagrad": {"eps": 1e-10, "weight_decay": 0.0, "lr_decay": 0.0},
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
    "SGD": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
"""The hyperparameters of each type beside the learning rate, and what they are where a file does not say."""


class OptimizerParams(Block):
    """Hyperparameters, named as in torch.optim; those of the other types are errors."""

    TUNING = ("torch_adam", "fp32_optimizer_states", "fused", "foreach", "capturable", "differentiable")
    REFUSED: ClassVar[dict[str, str]] = {
        "max_grad_norm": 'has another name in DeepSpeed files: "gradient_clipping", at top level',
        "amsgrad": _CHANGES,
        "maximize": _CHANGES,
    }
    INSTEAD: ClassVar[Mapping[str, Any]] = {"lr": 3e-4}

    lr: Number | None = Field(None, description="learning rate; needed unless optimizer= is passed")
    betas: tuple[Beta, Beta] | None = Field(
        None,
        description="Adam, AdamW, Lamb, Lion: decay of the moments, each at least 0 and below 1; default [0.9, 0.999], "
        "of Lion [0.9, 0.99]",
    )
    eps: Number | None = Field(
        None,
        description="Adam, AdamW, Lamb, Adagrad: added to the root of the second moment; default 1e-8, Adagrad's 1e-10",
    )
    weight_decay: Number | None = Field(
        None, description="default 0; decoupled for AdamW, Lamb, Lion, and for Adam with adam_w_mode"
    )
    adam_w_mode: bool | None = Field(None, description="Adam: true by default; false adds the decay to the gradient")
    bias_correction: Literal[True] | None = Field(None, description="Adam, AdamW, Lamb: only true")
    max_coeff: Number | None = Field(None, description="Lamb: bound of the trust ratio, default 10")
    min_coeff: Number | None = Field(None, description="Lamb: bound of the trust ratio, default 0.01")
    lr_decay: Number | None = Field(None, description="Adagrad: default 0")
    momentum: Number | None = Field(None, description="SGD: default 0, which keeps no moment")
    dampening: Number | None = Field(None, description="SGD: default 0")
    nesterov: bool | None = Field(None, description="SGD: default false; needs a momentum, and no dampening")


class OptimizerBlock(Block):
    """The optimizer: Adam, AdamW, Lamb, Adagrad, Lion or SGD."""

    TUNING = ("legacy_fusion",)
    INSTEAD: ClassVar[Mapping[str, Any]] = {"type": "AdamW", "params": {"lr": 3e-4}}

    type: OptimizerType = Field("AdamW", description="Adam, AdamW, Lamb, Adagrad, Lion or SGD, in any case of letters")
    params: OptimizerParams = Field(OptimizerParams(), description="see below")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> OptimizerBlock:
        known = OPTIMIZER_DEFAULTS[self.type]
        for name in self.params.model_fields_set:
            if name != "lr" and name not in known and getattr(self.params, name) is not None:
                raise ValueError(f"has params.{name}, which {self.type} has not; it has lr, {', '.join(known)}")
        settings = self.settings
        if settings.get("nesterov") and (not settings["momentum"] or settings["dampening"]):
            raise ValueError("has params.nesterov, which needs a momentum above 0 and a dampening of 0")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The hyperparameters of the type beside the learning rate."""
        given = {name: getattr(self.params, name) for name in OPTIMIZER_DEFAULTS[self.type]}
        return {
            name: value if given[name] is None else given[name] for name, value in OPTIMIZER_DEFAULTS[self.type].items()
        }


class ScheduleParams(Block):
    """The params of a schedule, which has the type that it is listed under in `SCHEDULES`."""

    ORDERED: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields, of which the first is not above the second."""


class RangeTestParams(ScheduleParams):
    """LRRangeTest: rises without an end, to find the largest learning rate that trains."""

    lr_range_test_min_lr: Rates = Field(1e-3, description="learning rate at the start")
    lr_range_test_step_size: Count = Field(2000, description="steps in which it rises by min_lr * step_rate")
    lr_range_test_step_rate: Number = Field(1.0, description="how fast it rises")
    lr_range_test_staircase: bool = Field(False, description="rise only at the end of each step_size")


class OneCycleParams(ScheduleParams):
    """OneCycle: up and down once, the momentum the other way round; then a decay."""

    ORDERED = (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom"))

    cycle_min_lr: Rates = Field(description="learning rate at both ends of the cycle; needed")
    cycle_max_lr: Rates = Field(description="learning rate in the middle; needed")
    decay_lr_rate: Number = Field(
        0.0, description="after the cycle: cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size)"
    )
    cycle_first_step_size: Count = Field(2000, description="steps up")
    cycle_second_step_size: Count | None = Field(None, description="steps down; default: as many as up")
    cycle_first_stair_count: Elements = Field(0, description="stairs on the way up; 0: each step rises")
    cycle_second_stair_count: Elements | None = Field(None, description="stairs down; default: as many as up")
    decay_step_size: Elements = Field(0, description="steps of the decay's unit; 0: no decay")
    cycle_momentum: bool = Field(True, description="whether the momentum, betas[0], moves too")
    cycle_min_mom: Momentum = Field(0.8, description="momentum in the middle")
    cycle_max_mom: Momentum = Field(0.9, description="momentum at both ends of the cycle")
    decay_mom_rate: Number = Field(
        0.0, description="after the cycle: cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size)"
    )


_MAX_LR = 'where it rises to; "auto": each group\'s own learning rate'
_WARM_UP = "steps of the warm-up, 1 counts as 2"
_WARMUP_TYPE = "log: fast at first; linear: evenly"
_TOTAL = "steps of the whole training; needed, but for `offload train`, which gives its --steps"


class WarmupParams(ScheduleParams):
    """WarmupLR: rises, and stays."""

    ORDERED = (("warmup_min_lr", "warmup_max_lr"),)
    OWN_AUTO = ("warmup_max_lr",)

    warmup_min_lr: Rates = Field(0.0, description="learning rate at the start")
    warmup_max_lr: RatesOrAuto = Field("auto", description=_MAX_LR)
    warmup_num_steps: Count = Field(1000, description=_WARM_UP)
    warmup_type: WarmupType = Field("log", description=_WARMUP_TYPE)


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR: rises, and falls to 0 in a line."""

    total_num_steps: Count = Field(description=_TOTAL)
    warmup_max_lr: RatesOrAuto = Field(1e-3, description=_MAX_LR)


class WarmupCosineParams(ScheduleParams):
    """WarmupCosineLR: rises to each group's own learning rate, and falls along a cosine."""

    total_num_steps: Count = Field(description=_TOTAL)
    warmup_min_ratio: Ratio = Field(0.0, description="share of the learning rate at which the warm-up begins")
    warmup_num_steps: Count = Field(1000, description=_WARM_UP)
    cos_min_ratio: Ratio = Field(1e-4, description="share of the learning rate at which the cosine ends")
    warmup_type: WarmupType = Field("log", description=_WARMUP_TYPE)


SCHEDULES: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": RangeTestParams,
}
TORCH_SCHEDULES = _keys(
    """StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR CosineAnnealingWarmRestarts
    CyclicLR OneCycleLR"""
)
"""Those of torch.optim.lr_scheduler that are made from an optimizer and numbers."""


class SchedulerBlock(Block):
    """The schedule of learning rates, which `engine.step()` advances; without this block they stay as they are."""

    INSTEAD: ClassVar[Mapping[str, Any]] = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}

    type: Annotated[str, AfterValidator(_schedule)] = Field(
        description="`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`, `LRRangeTest`, or of "
        f"torch.optim.lr_scheduler {', '.join(f'`{name}`' for name in TORCH_SCHEDULES)}"
    )
    params: dict[Any, Any] = Field({}, description="see below; those of torch's schedules are torch's")


_AUTO_CAST = "whether `engine(...)` casts floating-point inputs to the dtype of the weights"


class Bf16(Block):
    """bf16 weights with split fp32 masters."""

    TUNING = _keys("immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states")
    INSTEAD: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether the mode is on")
    auto_cast: bool = Field(False, description=_AUTO_CAST)


class Fp16(Block):
    """fp16 weights with fp32 masters, and a scaled loss."""

    TUNING = _keys("fused_mode fp16_master_weights_and_grads")
    INSTEAD: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether the mode is on")
    auto_cast: bool = Field(False, description=_AUTO_CAST)
    loss_scale: Number = Field(0.0, description="factor of the loss; 0: dynamic, found while training")
    initial_scale_power: Annotated[Elements, Field(le=32)] = Field(
        16, description="a dynamic scale begins with 2 to that power"
    )
    loss_scale_window: Count = Field(1000, description="steps without an overflow after which the scale doubles")
    hysteresis: Count = Field(2, description="overflows up to which the scale stays; that one halves it")
    consecutive_hysteresis: bool = Field(
        False, description="whether a step without an overflow gives the hysteresis back, not only a whole window"
    )
    min_loss_scale: Annotated[Number, Field(gt=0)] = Field(1.0, description="the least that a dynamic scale becomes")


class TorchAutocast(Block):
    """fp32 weights, and torch's autocast round each forward of the engine."""

    TUNING = ("lower_precision_safe_modules",)
    INSTEAD: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether `engine(...)` runs the model under torch.autocast")
    dtype: Annotated[Literal["bf16", "fp16"], _spelling(_DTYPE_NAMES)] = Field(
        "bf16", description="what is cast to; fp16 is refused: it needs a loss scale, which the fp16 block has"
    )


class DataTypes(Block):
    """Dtypes beside that of the mode."""

    INSTEAD: ClassVar[Mapping[str, Any]] = {"grad_accum_dtype": "fp32"}

    param_dtype: SumDtype | None = Field(
        None, description="dtype of the weights, which bf16 or fp16 say: another than theirs is an error"
    )
    grad_accum_dtype: SumDtype | None = Field(
        None,
        description="dtype in which micro-batches are added: fp32 by default, that of the weights for a single one",
    )
    buffer_dtype: SumDtype | None = Field(
        None, description="dtype of floating-point buffers (BatchNorm's statistics): as they are by default"
    )


class Aio(Block):
    """How swap files are read and written; `offload tune` finds what suits a drive."""

    TUNING = ("single_submit", "overlap_events", "use_gds")
    OLD_NAMES: ClassVar[dict[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Annotated[Size, Field(ge=4096)] | None = Field(
        None, description="bytes of one read or write; rounded down to a multiple of 4096"
    )
    queue_depth: Annotated[Count, Field(le=4096)] | None = Field(None, description="blocks in flight for each thread")
    intra_op_parallelism: Annotated[Count, Field(le=64)] | None = Field(
        None, description="threads that hand blocks to the kernel; older name: thread_count"
    )


class _Folder(Block):
    """Where each step's numbers go."""

    INSTEAD: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether they are written")
    output_path: Annotated[str, BeforeValidator(_path)] = Field("runs", description="folder of all jobs")
    job_name: str | None = Field(None, description="folder in it; default: the name of the run")


class TensorBoard(_Folder):
    """Numbers of each step for TensorBoard; see guides/monitor.md. Needs `pip install 'offload[monitor]'`."""


class CsvMonitor(_Folder):
    """Numbers of each step, a CSV file for each of them; see guides/monitor.md."""


class Wandb(Block):
    """Numbers of each step for Weights & Biases; see guides/monitor.md. Needs `pip install wandb`."""

    INSTEAD: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether they are sent")
    project: str = Field("offload", description="project")
    team: str | None = Field(None, description="whose project it is; default: that of the login")
    group: str | None = Field(None, description="group of runs")
    name: str | None = Field(None, description="name of the run; default: one that wandb makes")


class Debug(Block):
    """Switches that find faults."""

    poison: bool = Field(False, description="fill freed device memory with NaN and place weights at random addresses")
    overlap: bool = Field(True, description="run updates while the next forward does")


class Every(Block):
    """How often a step is committed, in place of a word."""

    every: Count = Field(description="steps from one commit to the next: a kill loses those since the last")


class OffloadBlock(Block):
    """All keys that DeepSpeed does not have."""

    OWN_AUTO = ("run", "resume", "io_backend")

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] = Field(
        "default", description="name of the run: its folder under each nvme_path"
    )
    nvme_path: Paths = Field(
        (), description="folder or list of folders for swap files, where the blocks above name none"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="compute device; auto takes cuda where there is one"
    )
    host_memory: Size | None = Field(
        None,
        description="host budget of the process, as '16GiB'; default: what is needed, at most 80 % of what is free",
    )
    device_memory: Size | None = Field(
        None, description="device budget for weights; default: states at home there and three of the largest unit"
    )
    durability: Literal["auto", "step", "none"] | Every = Field(
        "auto",
        description='step: every step survives a kill; {"every": 10}: every tenth; none: half the disk, no resume; '
        "auto: step where it fits",
    )
    resume: Literal["never", "auto", "must"] = Field(
        "never", description="whether to go on with the run that the swap files hold"
    )
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = Field(
        0, description="seed of weights made by offload.init and of the loader"
    )
    io_backend: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        "auto", description="how swap files are reached; auto takes the first that the system grants"
    )
    units: Names = Field((), description="names or classes of modules that are one unit each")
    trace: Annotated[Name, BeforeValidator(_path)] | None = Field(
        None, description="file for a time line of the run; see guides/timeline.md"
    )
    on_nonfinite: Literal["raise", "skip"] = Field("raise", description="what a gradient norm of inf or NaN does")
    debug: Debug = Field(Debug(), description="see below")

    @property
    def wants_store(self) -> bool:
        """Whether a store is asked for, whatever is at home on disk."""
        return self.durability == "step" or isinstance(self.durability, Every)

    @property
    def commit_every(self) -> int:
        """Steps from one commit to the next where there is a store with two slots."""
        return self.durability.every if isinstance(self.durability, Every) else 1


class _Found(NamedTuple):
    """Dotted names of keys that were there and are not in the values."""

    tuning: list[str]
    unsupported: list[str]
    auto: list[str]
    """Those with an effect whose value was "auto"."""


def _nothing_found() -> _Found:
    return _Found([], [], [])


class Config(Block):
    """The whole config, with what it means."""

    TUNING = _keys("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer")
    UNSUPPORTED = _keys(
        """dump_state log_level vocabulary_size timers comms_logger checkpoint prescale_gradients
        gradient_predivide_factor communication_data_type sparse_gradients disable_allgather
        seq_parallel_communication_data_type
        seq_parallel_comm_data_type use_data_before_expert_parallelism graph_harvesting activation_checkpointing nebula
        comet flops_profiler autotuning datastates_ckpt"""
    )
    REFUSED: ClassVar[dict[str, str]] = dict.fromkeys(
        _keys(
            """amp sparse_attention compression_training weight_quantization quantize_training data_efficiency
            curriculum_learning elasticity progressive_layer_drop eigenvalue pipeline hybrid_engine expert_parallel
            tensor_parallel compile zenflow"""
        ),
        _CHANGES,
    )
    OLD_NAMES: ClassVar[dict[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: Count | None = Field(None, description="samples of a step on all ranks")
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="samples of a forward on one rank")
    gradient_accumulation_steps: Count | None = Field(None, description="micro-batches of a step")
    managed_gradient_accumulation: Literal[True] = Field(
        True, description="only true; a loop ends steps itself by `engine.set_gradient_accumulation_boundary`"
    )
    gradient_clipping: Number = Field(1.0, description="largest global norm of the gradient; 0 leaves it as it is")
    gradient_allreduce_op: Literal["mean"] = Field("mean", description="of several ranks' gradients: only mean")
    dataloader_drop_last: bool = Field(
        True, description="the loader leaves the last incomplete batch out; false is named in a line"
    )
    optimizer: OptimizerBlock | None = Field(None, description="see below")
    scheduler: SchedulerBlock | None = Field(None, description="see below")
    bf16: Bf16 = Field(Bf16(), description="bf16 weights with split fp32 masters; older name: bfloat16")
    fp16: Fp16 = Field(Fp16(), description="fp16 weights with fp32 masters, and a scaled loss")
    torch_autocast: TorchAutocast = Field(
        TorchAutocast(), description="fp32 weights, and torch's autocast round each forward"
    )
    data_types: DataTypes = Field(DataTypes(), description="see below")
    aio: Aio = Field(Aio(), description="see below")
    steps_per_print: Annotated[int, BeforeValidator(_steps), Field(ge=0)] | None = Field(
        None,
        description="steps from one line about training to the next; 0 or Infinity: none; default: none, "
        "and 10 with one of the next two",
    )
    wall_clock_breakdown: bool = Field(
        False, description="measure the phases of a step and what it waits for; see guides/monitor.md"
    )
    memory_breakdown: bool = Field(False, description="have the peaks of memory in the line")
    tensorboard: TensorBoard = Field(TensorBoard(), description="see below")
    csv_monitor: CsvMonitor = Field(CsvMonitor(), description="see below")
    wandb: Wandb = Field(Wandb(), description="see below")
    zero_optimization: ZeroOptimization = Field(ZeroOptimization(), description="see below")
    offload: OffloadBlock = Field(OffloadBlock(), description="see below")
    _found: _Found = PrivateAttr(default_factory=_nothing_found)

    @property
    def weight_tier(self) -> Tier:
        return self.zero_optimization.offload_param.device

    @property
    def optimizer_tier(self) -> Tier:
        return self.zero_optimization.offload_optimizer.device

    @property
    def drives(self) -> tuple[str, ...]:
        """Folders of the swap files: the ordered union, the optimizer's first."""
        zero = self.zero_optimization
        named = (*zero.offload_optimizer.nvme_path, *zero.offload_param.nvme_path)
        return tuple(dict.fromkeys(named or self.offload.nvme_path))

    @property
    def dtype(self) -> Literal["bf16", "fp16", "fp32"]:
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def casts_inputs(self) -> bool:
        """Whether inputs take the dtype of the weights."""
        return (self.bf16.enabled and self.bf16.auto_cast) or (self.fp16.enabled and self.fp16.auto_cast)

    @property
    def steps_per_line(self) -> int:
        """Steps from one line about training to the next; 0: there is none."""
        if self.steps_per_print is None:
            return 10 if self.wall_clock_breakdown or self.memory_breakdown else 0
        return self.steps_per_print

    @property
    def units(self) -> tuple[str, ...]:
        """Modules that the user names as units."""
        leaf = self.zero_optimization.leaf_module
        return tuple(dict.fromkeys((*self.offload.units, *leaf.classes, *leaf.names)))

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each kind of key that has no effect here."""
        zero, (tuning, unsupported, _) = self.zero_optimization, self._found
        named = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
        on_disk = "nvme" in (self.weight_tier, self.optimizer_tier) or self.offload.wants_store
        lines = (
            (tuning, f"decided by this library itself, so without effect: {', '.join(sorted(tuning))}"),
            (unsupported, f"not supported and ignored: {', '.join(sorted(unsupported))}"),
            (
                zero.stage < 3 and zero.offload_param.device != "none",
                f"offload_param is honoured at ZeRO stage {zero.stage} too, since there is one process",
            ),
            (named and not on_disk, "nvme_path is ignored: no state lives on nvme"),
            (
                not self.dataloader_drop_last,
                "dataloader_drop_last false is ignored: the loader of training_data leaves the last incomplete batch "
                "out; pass batches of a loader of your own to keep it",
            ),
        )
        return tuple(line for holds, line in lines if holds)


class Batch(NamedTuple):
    """The three batch sizes; total = micro * accumulation * world size."""

    micro: int
    accumulation: int
    total: int


def resolve_batch(config: Config, world_size: int) -> Batch:
    """Derive what is missing of the three batch sizes, as DeepSpeed does; with none given all are 1 a rank."""
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro, accumulation, micro * accumulation * world_size)
    if micro is None:
        accumulation = accumulation or 1
        micro = _share(total, "gradient_accumulation_steps", accumulation, world_size)
    elif accumulation is None:
        accumulation = _share(total, "train_micro_batch_size_per_gpu", micro, world_size)
    if micro * accumulation * world_size != total:
        raise ConfigError(
            f"train_batch_size must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, but it is "
            f"{total}, and {micro} * {accumulation} * {world_size} is {micro * accumulation * world_size}; "
            f"change one of the three, or leave one out that the others determine"
        )
    return Batch(micro, accumulation, total)


def _share(total: int, name: str, given: int, world_size: int) -> int:
    """The third of the batch sizes."""
    if total % (given * world_size):
        raise ConfigError(
            f"train_batch_size must be a multiple of {name} * ranks, but it is {total}, and {given} * {world_size} is "
            f"{given * world_size}; change one of them"
        )
    return total // (given * world_size)


def effective(config: Config, batch: Batch, world_size: int) -> str:
    """One line of what a file does not say itself: batch sizes, what "auto" became, a default that was once another."""
    parts = [
        f"{batch.total} samples a step = {batch.micro} of a micro-batch * {batch.accumulation} of them * {world_size} "
        f"{'rank' if world_size == 1 else 'ranks'}"
    ]
    if "gradient_clipping" not in config.model_fields_set:
        parts.append(f"gradient_clipping {config.gradient_clipping:g} by default, which was 0 in older DeepSpeed")
    became = [f"{name} {_words(_value(config, batch, name))}" for name in config._found.auto]
    if became:
        parts.append(f'"auto": {", ".join(became)}')
    return f"config: {'; '.join(parts)}"


def _value(config: Config, batch: Batch, name: str) -> Any:
    """What the key of that dotted name has come to."""
    sizes = dict(
        zip(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), batch, strict=True)
    )
    if name in sizes:
        return sizes[name]
    block, _, key = name.rpartition(".")
    if block == "optimizer.params" and config.optimizer is not None:
        return "that of the optimizer given" if key == "lr" else config.optimizer.settings.get(key)
    if block == "scheduler.params" and config.scheduler is not None:
        return getattr(schedule_params(SCHEDULES[config.scheduler.type], config.scheduler.params), key)
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _words(value: Any) -> str:
    if value is None:
        return "(decided here)"
    return "(its defaults)" if isinstance(value, Block) else json.dumps(value)


# -- reading ------------------------------------------------------------------------------------------


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Read a config from a JSON file's path, or from its content as a dict.

    Comments (`//`, `#`, `/* */`) and a comma after the last item are allowed; a key that appears twice is not. Raises
    `ConfigError` that names the key, what was expected and what came.
    """
    content = source if isinstance(source, Mapping) else read_json(source)
    found = _nothing_found()
    try:
        config = Config.model_validate(_sort_out(Config, _in_new_form(content), "", found))
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error)) from error
    config._found = found
    if config.scheduler is not None and config.scheduler.type in SCHEDULES:
        schedule_params(SCHEDULES[config.scheduler.type], config.scheduler.params, "scheduler.params.", found)
    if config.fp16.enabled and config.bf16.enabled:
        raise ConfigError("fp16 and bf16 are both enabled; leave one of them on")
    if config.torch_autocast.enabled and config.dtype != "fp32":
        raise ConfigError(
            f"torch_autocast and {config.dtype} are both enabled: autocast is for fp32 weights; leave one of them on"
        )
    if config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16":
        raise ConfigError(
            "torch_autocast.dtype is fp16, whose gradients need a loss scale that only the fp16 block has; set it to "
            "bf16, or enable fp16 in place of torch_autocast"
        )
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.dtype:
        mode = "switch bf16 and fp16 off" if wanted == "fp32" else f'set "{wanted}": {{"enabled": true}}'
        raise ConfigError(
            f"data_types.param_dtype is {wanted}, but the weights are {config.dtype}; {mode}, or leave it out"
        )
    for name, tier in (("offload_param", config.weight_tier), ("offload_optimizer", config.optimizer_tier)):
        if tier == "nvme" and not config.drives:
            raise ConfigError(
                f'zero_optimization.{name}.device is nvme, but no "nvme_path" is given; set it beside the device, or '
                'once in the "offload" block'
            )
    return config


P = TypeVar("P", bound=ScheduleParams)


def schedule_params(model: type[P], content: Mapping[Any, Any], path: str = "", found: _Found | None = None) -> P:
    """The params of a schedule, of a file (at `path` in it) or of a script. Raises `ConfigError`."""
    try:
        params = model.model_validate(_sort_out(model, content, path, found or _nothing_found()))
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, path)) from error
    for low, high in model.ORDERED:
        check_order(path + low, getattr(params, low), path + high, getattr(params, high))
    return params


def check_order(low: str, lows: Any, high: str, highs: Any) -> None:
    """Raise `ConfigError` where one of `lows` is above its one of `highs`; "auto" is above nothing."""
    of_each = isinstance(lows, list | tuple) and isinstance(highs, list | tuple)  # as many as groups, or refused there
    alone, other = (rates if isinstance(rates, list | tuple) else (rates,) for rates in (lows, highs))
    for least, most in zip(alone, other, strict=False) if of_each else itertools.product(alone, other):
        if most != "auto" and least > most:
            raise ConfigError(f"{low} {least:g} is above {high} {most:g}; exchange them, or change one")


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a config file: JSON with comments, in which no key appears twice."""
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the config must be a dict or the path of a JSON file, got {type(source).__name__}")
    name = os.fspath(source)
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # a path may hold a null byte, a file anything
        raise ConfigError(f"cannot read the config {name}: {error}") from error
    content = _parse(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"the config must be a JSON object, got {type(content).__name__}")
    return content


_STRING = r'("(?:\\.|[^"\\\n])*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")


def _parse(text: str, name: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise ConfigError(f"{name}: the key {key!r} appears twice in one block; keep one of them")
            seen[key] = value
        return seen

    def blank(match: re.Match[str]) -> str:
        return match[1] or re.sub(r"[^\n]", " ", match[0])  # keeps line numbers right

    try:
        return json.loads(_LAST_COMMA.sub(blank, _COMMENT.sub(blank, text)), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not a config: its blocks are nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{name} is not a config: {error}") from error


def _in_new_form(content: Mapping[str, Any]) -> dict[str, Any]:
    """`true` for ZeRO and `cpu_offload` are how older files say what blocks say now."""
    content = dict(content)
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):
        content["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        content["zero_optimization"] = zero = dict(zero)
        for old, new in _OLD_SWITCHES.items():
            if _is_on(zero.pop(old, False)):
                if zero.get(new) is not None:
                    raise ConfigError(f"zero_optimization has both {old} and {new}; leave {old} out")
                zero[new] = {"device": "cpu"}
    return content


_OLD_SWITCHES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def _sort_out(model: type[Block], content: Mapping[str, Any], path: str, found: _Found) -> dict[str, Any]:
    """What of `content` is for the fields of `model`: no defaults, and no key without effect; raises at a bad one."""
    kept: dict[str, Any] = {}
    tuned = "enabled" not in model.model_fields or _is_on(content.get("enabled"))  # what is off needs no word
    for key, value in content.items():
        name, dotted = model.OLD_NAMES.get(key, key), f"{path}{key}"
        if name in model.REFUSED:
            if _is_on(value):
                raise ConfigError(f'"{dotted}" {model.REFUSED[name]}')
        elif name in model.TUNING:
            found.tuning.extend([dotted] * tuned)
        elif name in model.UNSUPPORTED:
            found.unsupported.extend([dotted] * _is_on(value))
        elif name not in model.model_fields:
            near, homes = _nearest(model, str(key)), _homes(model, str(key), path)
            if path or near or not isinstance(key, str):
                raise ConfigError(_unknown(model, near, homes, dotted))
            # somebody else's block, or a note: as in DeepSpeed no error
            found.unsupported.append(f"{dotted} (did you mean {homes}?)" if homes else dotted)
        elif name in kept or (name != key and name in content):
            raise ConfigError(f'"{dotted}" is the older name of "{path}{name}", which is there too; keep one of them')
        elif _means_default(value, name, model):
            found.auto.extend([f"{path}{name}"] * (value is not None))
        else:
            inner = _inner(model, name)
            is_block = inner is not None and isinstance(value, Mapping)
            kept[name] = _sort_out(inner, value, f"{dotted}.", found) if inner and is_block else value
    return kept


def _means_default(value: Any, name: str, model: type[Block]) -> bool:
    if value is None:
        return name != "gradient_clipping"  # null could be meant as "no clipping", and is not
    return isinstance(value, str) and value == "auto" and name not in model.OWN_AUTO


def _inner(model: type[Block], name: str) -> type[Block] | None:
    """The block that the field is, if it is one."""
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Block)), None)


def _is_on(value: Any) -> bool:
    """Whether a key that is not supported asks for anything."""
    if not isinstance(value, Mapping):
        return bool(value) and value != "auto"
    if "enabled" in value:
        return _is_on(value["enabled"])
    switches = list(_switches(value))
    return any(switches) if switches else any(_is_on(inner) for inner in value.values())


def _switches(block: Mapping[str, Any]) -> Iterator[bool]:
    for key, value in block.items():
        if key in ("enabled", "deepcompile"):
            yield _is_on(value)
        elif isinstance(value, Mapping):
            yield from _switches(value)


def _nearest(model: type[Block], key: str) -> str | None:
    known = (*model.model_fields, *model.OLD_NAMES, *model.TUNING, *model.UNSUPPORTED, *model.REFUSED)
    return next(iter(difflib.get_close_matches(key, known, 1, 0.6)), None)


def _homes(model: type[Block], key: str, path: str) -> str:
    """Where in the blocks of `model` a key of this very name is known; "" if nowhere, or in many."""
    inside = [name for name, block in _blocks(model, "") if name and key in block.model_fields]
    return " or ".join(f"{path}{name}.{key}" for name in inside) if len(inside) <= 3 else ""


def _unknown(model: type[Block], near: str | None, homes: str, dotted: str) -> str:
    if homes:
        return f"unknown key {dotted}; did you mean {homes}?"
    hint = f'did you mean "{near}"?' if near else f"remove it; keys with an effect are {', '.join(model.model_fields)}"
    return f"unknown key {dotted}; {hint}"


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
    "model_type": "should be a block, as {...}",
    "dict_type": "should be a block, as {...}",
    "tuple_type": "should be a list",
    "missing": "is needed",
}
_ADVICE = {
    "gradient_clipping": "0 switches clipping off",
    "gradient_allreduce_op": "for a sum multiply the loss by the number of ranks",
    "managed_gradient_accumulation": "to say where a step ends, call engine.set_gradient_accumulation_boundary",
    "offload.run": "it names a folder: letters, digits, '.', '_' and '-', the first a letter or digit",
    "offload.durability": 'give "auto", "step", "none", or {"every": 10}, which commits every tenth step',
    "scheduler.params.total_num_steps": 'give the steps of the whole training; "auto" is for `offload train` to fill',
    "optimizer.type": "set one of these, or pass optimizer= to offload.initialize",
}


def _explain(error: pydantic.ValidationError, path: str = "") -> str:
    """The first error in words: the key's path from `path` on, what was expected, what came, and what to do."""
    errors = error.errors(include_url=False)
    # Of a field that is a word or a block there is one for each: a block was meant where one came.
    several = len(errors) > 1 and _is_choice(errors[0]["loc"][-1]) and isinstance(errors[0]["input"], Mapping)
    first = errors[1] if several else errors[0]
    key = path + ".".join(str(part) for part in first["loc"] if not _is_choice(part))
    ours = first["type"] == "value_error"  # it may say already what came; of a whole block it names the key
    said = first["type"] == "missing" or (
        ours and (repr(first["input"]) in first["msg"] or isinstance(first["input"], Mapping))
    )
    got = "" if said else f", got {first['input']!r}"
    expected = re.sub("^(Value error, |Input |String |Tuple )", "", first["msg"]).replace(
        " after validation, not", ", not"
    )
    expected = _EXPECTED.get(first["type"], expected)
    advice = next((f"; {words}" for name, words in _ADVICE.items() if key == name or key.startswith(f"{name}.")), "")
    if first["type"] == "model_type" and not path:
        advice = _instead(key, first["input"]) or advice
    return f"{key} {expected}{got}{advice}"


def _instead(key: str, value: Any) -> str:
    """What to write for a block in whose place `value` came."""
    block = dict(_blocks(Config, "")).get(key)
    if block is None or not block.INSTEAD:
        return ""
    first = next(iter(block.INSTEAD))
    content = {**block.INSTEAD, first: value}
    try:
        block.model_validate(content)
    except pydantic.ValidationError:
        content = dict(block.INSTEAD)
    return f'; write "{key.rpartition(".")[2]}": {json.dumps(content)}'


def _is_choice(part: object) -> bool:
    """Whether a part of a location is no key but one of the types that a value may have."""
    return isinstance(part, str) and (part.startswith("literal[") or part == Every.__name__)


# -- documentation ------------------------------------------------------------------------------------

_INTRODUCTION = """# Configuration

A DeepSpeed JSON file works as it is. Here is every key that has an effect, with its default, and every key that is
accepted without one. An unknown key is an error that names the nearest one; at the top level, where other tools
keep their blocks, one that is like no known key is named in a line at the start instead. `"auto"` and `null` mean
the default, integers may be written as `1e8`, comments (`//`, `#`, `/* */`) are allowed. A learning rate of
`"auto"` must come from `--lr` or from an optimizer that is passed to `offload.initialize`. Older names hold:
`bfloat16` for `bf16`, and in `zero_optimization` `cpu_offload` and `cpu_offload_params`, which put one of the two
blocks on `cpu`.

This file is written by `python -m offload.config` from `offload/config.py`.
"""


def document() -> str:
    """docs/configuration.md."""
    tables: list[str] = [_INTRODUCTION]
    tuning: list[str] = []
    refused: list[str] = []
    for path, model in _blocks(Config, ""):
        title = f"`{path}`" if path else "Top level"
        tables.append(_section(title, model))
        if model is SchedulerBlock:
            tables.extend(_section(f"`{path}.params` of {name}", params) for name, params in SCHEDULES.items())
        for lines, keys in ((tuning, (*model.TUNING, *model.UNSUPPORTED)), (refused, model.REFUSED)):
            lines.extend([f"* {title}: {', '.join(f'`{key}`' for key in keys)}"] if keys else [])
    return "\n".join(
        [
            *tables,
            "## Accepted without effect\n\nThey tune what this library sizes by itself, or switch on what is not here "
            "and would not change a bit; one line at the start names those that a file has:\n\n" + "\n".join(tuning),
            "\n## Refused unless switched off\n\nWithout them training would be another one:\n\n" + "\n".join(refused),
            "",
        ]
    )


def _section(title: str, model: type[Block]) -> str:
    return f"## {title}\n\n{(model.__doc__ or '').splitlines()[0]}\n\n{_table(model)}"


def _table(model: type[Block]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        block = isinstance(field.default, Block) or field.is_required()
        default = "" if block else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def _blocks(model: type[Block], path: str) -> Iterator[tuple[str, type[Block]]]:
    """The block and all blocks in it, with their dotted names."""
    yield path, model
    for name in model.model_fields:
        if inner := _inner(model, name):
            yield from _blocks(inner, f"{path}.{name}" if path else name)


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "configuration.md").write_text(document(), encoding="utf-8")
