"""All blocks of the config inside the outermost one, and `Block`, their base class."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from offload.errors import ConfigError
from offload.sizes import MIB, parse_budget, parse_device_size, parse_size


def split_names(words: str) -> tuple[str, ...]:
    """Returns the names of keys that a string lists, separated by spaces or lines."""
    return tuple(words.split())


CHANGES_TRAINING = "changes the training and is not supported; remove it, or switch it off"


def missing(request: str, instead: str = "remove it, or switch it off") -> str:
    """Returns the reason for refusing a key: what the key asks for, and what to do instead."""
    return f"{request}, which is not supported; {instead}"


def key(meaning: str, default: Any = None) -> Any:
    """Declares a key of a block: its row of docs/reference/configuration.md, and its default."""
    return Field(default, description=meaning)


class Block(BaseModel):
    """A block of the config. Beside its fields, a block recognizes keys without effect and keys that it must refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    TUNING: ClassVar[tuple[str, ...]] = ()
    """Keys accepted without effect: they tune something that this library decides by itself."""
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()
    """Keys accepted without effect: this library lacks the feature, which would not change the bits of any result."""
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {}
    """Reasons why some keys of `TUNING` and `UNSUPPORTED` have no effect, as clauses for the reference."""
    ALWAYS: ClassVar[Mapping[str, Any]] = {}
    """Keys of `TUNING` that ask for what is done anyway, if they have this value: such a key counts as honoured."""
    REFUSED: ClassVar[dict[str, str]] = {}
    """Keys that are refused unless their value switches them off. The values end the error message after the key."""
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    """Older names of keys. The values are the names of the fields."""
    SUGGESTION: ClassVar[Mapping[str, Any]] = {}
    """Content that the error suggests if a config gives a plain value for the block. The first key gets the value."""
    OWN_AUTO: ClassVar[tuple[str, ...]] = ()
    """Fields that accept "auto" as a value; in all others "auto" means the default."""

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        return tuple(name for name, field in cls.model_fields.items() if not field.exclude)

    @classmethod
    def arranged(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content of the block, in which a key that stands for other keys is replaced by them."""
        return content

    @classmethod
    def check(cls, content: Mapping[str, Any], path: str) -> None:
        """Raises `ConfigError` if the block asks for something unsupported. Single keys are checked later."""


def inner_block(model: type[Block], name: str) -> type[Block] | None:
    """Returns the block class of the field `name`, or None if the field is no block."""
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Block)), None)


def all_blocks(model: type[Block], path: str) -> Iterator[tuple[str, type[Block]]]:
    """Yields the block and all blocks inside, each with its dotted name."""
    yield path, model
    for name in model.model_fields:
        if inner := inner_block(model, name):
            yield from all_blocks(inner, f"{path}.{name}" if path else name)


# -- values --------------------------------------------------------------------------------------------
#
# Types of config values, with the conversions from the spellings that files use.


Tier = Literal["none", "cpu", "nvme"]
TORCH_OPTIMIZERS = "torch.optim."
"""Prefix of `OptimizerBlock.type` if the type is a class of torch."""
OF_TORCH_ALONE = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
)
"""Classes of `torch.optim` that DeepSpeed's JSON names without the module. We have no type of the same name."""


def _number(value: Any) -> Any:
    """Converts `1e8` and `200000000.0` to integers. Raises `ValueError` for a boolean, which is an int in Python."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unpacked(value: Any) -> Any:
    """Returns a value of a script's dict with plain numbers in place of tensors, arrays and scalars of numpy.

    Only those without dimensions are replaced. An attribute identifies them, so neither library is imported here.
    """
    if isinstance(value, Mapping):
        return {key: unpacked(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(unpacked, value))
    return value.item() if getattr(value, "ndim", None) == 0 else value


def spelled_number(value: Any) -> Any:
    """Returns the number that a string spells, such as "1e-3"; any other value unchanged.

    JSON files that a program has made from YAML contain such strings, since YAML reads `1e-3` as a string.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _strings(value: Any) -> Any:
    return (value,) if isinstance(value, str | os.PathLike) else value


def expanded(value: Any) -> Any:
    """Expands `~` in a path."""
    return os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value


def _rates(value: Any) -> Any:
    """Returns one rate for all parameter groups, or a tuple of one rate per group. Raises `ValueError` otherwise."""
    numbers = [spelled_number(rate) for rate in (value if isinstance(value, list | tuple) else (value,))]
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
    """Returns rates that are below 1. Raises `ValueError` otherwise."""
    rates = _rates(value)
    if max(rates if isinstance(rates, tuple) else (rates,)) >= 1:
        raise ValueError("should be below 1")
    return rates


def _memory(value: Any) -> Any:
    """Parses a size. Raises `ValueError` for digits without a unit below one mebibyte: the unit was forgotten."""
    nbytes = parse_size(value)
    if isinstance(value, str) and value.strip().isdecimal() and nbytes < MIB:
        raise ValueError(f"should be a size such as 16GiB; {value} alone are bytes: give a unit")
    return nbytes


def _device_memory(value: Any) -> Any:
    """Parses a size, and checks a percentage, which stays as it is written."""
    size = parse_device_size(value)
    return size if isinstance(size, str) else _memory(value)


def _device(value: Any) -> Any:
    """Returns the type of a device, as torch names it. Raises `ValueError` for a device with an index, as "cuda:1"."""
    if isinstance(value, str) and not value.isidentifier():
        raise ValueError("should be 'auto', 'cpu', 'cuda' or the type of another accelerator, as 'xpu'")
    return value


def _tiles(value: Any) -> Any:
    """Returns "auto", False, or a number of chunks. Raises `ValueError` otherwise."""
    if value is False or value == "auto":
        return value
    chunks = None if isinstance(value, bool) else _number(value)
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError("should be 'auto', false or a number of chunks of at least 1")
    return chunks


def _drive_budget(value: Any) -> Any:
    """Returns a text that is a budget of bytes over a time. Raises `ConfigError` for any other value."""
    parse_budget(value)
    return value


def _optimizer(value: Any) -> Any:
    """Returns the name of our optimizer in our spelling, or of a class of torch with its prefix.

    Raises `ValueError` for any other name.
    """
    names = get_args(OptimizerName)
    known = {name.lower(): name for name in names}
    if value in OF_TORCH_ALONE:
        return TORCH_OPTIMIZERS + value
    if isinstance(value, str) and (value.lower() in known or value.startswith(TORCH_OPTIMIZERS)):
        return known.get(value.lower(), value)
    listed = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
    raise ValueError(f"should be {listed}, or an optimizer of torch, as '{TORCH_OPTIMIZERS}NAdam'")


def steps_or_never(value: Any) -> Any:
    """Converts infinity, which `accelerate` writes for "never", to 0."""
    return 0 if value == math.inf else _number(value)


def short_dtype(value: Any) -> Any:
    """Returns "bf16", "fp16" or "fp32" for the names of torch, such as "bfloat16" or "torch.half"; else the value."""
    return _DTYPE_NAMES.get(value.lower().removeprefix("torch."), value) if isinstance(value, str) else value


def spelling(names: Mapping[str, str]) -> BeforeValidator:
    """Returns a validator that replaces each spelling in `names`, in any case of letters, by its choice."""
    return BeforeValidator(lambda value: names.get(value.lower(), value) if isinstance(value, str) else value)


# Types of fields. A validator in front converts the spellings of files before pydantic checks the type.
Integer = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Integer, Field(gt=0)]
Elements = Annotated[Integer, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[Number, Field(le=1)]
Rates = Annotated[float | tuple[float, ...], BeforeValidator(_rates)]
RatesOrAuto = Annotated[float | tuple[float, ...] | Literal["auto"], BeforeValidator(_or_auto)]
Tiles = Annotated[Literal["auto", False] | int, BeforeValidator(_tiles)]
DeviceName = Annotated[str, BeforeValidator(_device)]
Momentum = Annotated[float | tuple[float, ...], BeforeValidator(_momentum)]
WarmupType = Annotated[Literal["log", "linear"], spelling({"log": "log", "linear": "linear"})]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_strings)]
Paths = Annotated[tuple[Annotated[Name, BeforeValidator(expanded)], ...], BeforeValidator(_strings)]
Size = Annotated[int, BeforeValidator(parse_size)]
Memory = Annotated[int, BeforeValidator(_memory)]
DeviceMemory = Annotated[int | str, BeforeValidator(_device_memory)]
OptimizerName = Literal[
    "Adam", "AdamW", "Lamb", "Adagrad", "Lion", "SGD", "Muon", "SinkGD", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"
]
OptimizerType = Annotated[str, BeforeValidator(_optimizer)]
_DTYPE_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
SumDtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(lambda value: short_dtype(value))]
Beta = Annotated[Number, Field(lt=1)]


# -- zero ----------------------------------------------------------------------------------------------
#
# Config blocks of ZeRO and of I/O: partitioning, tiers, and access to the swap files.


_PINNED = "host memory is one piece, which is pinned wherever a GPU computes; false unpins nothing"
CHUNK_SIZE = (
    "no key of DeepSpeed 0.19: stage3_prefetch_bucket_size and sub_group_size limit the elements that move at a time, "
    "and the budgets choose them"
)
"""Why `chunk_size`, of which tutorials tell, has no effect."""


class OffloadParam(Block):
    """Tier of the weights."""

    TUNING = ("pin_memory",)
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {"pin_memory": _PINNED}
    ALWAYS: ClassVar[Mapping[str, Any]] = {"pin_memory": True}
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    device: Tier = key("tier of the weights: none (compute device), cpu, nvme", "none")
    nvme_path: Paths = key("folder or list of folders for swap files; one per drive", ())
    max_in_cpu: Elements | None = key(
        "elements of weights on nvme that are also cached in host memory; default: as host_memory allows"
    )
    buffer_count: Count | None = key("with buffer_size: another way to set max_in_cpu")
    buffer_size: Count | None = key("elements of a buffer; units may be larger")


class OffloadOptimizer(Block):
    """Tier of the optimizer states."""

    TUNING = split_names(
        """pin_memory buffer_count buffer_size fast_init pipeline pipeline_read pipeline_write super_offload
        cpuadam_cores_perc"""
    )
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {"pin_memory": _PINNED}
    ALWAYS: ClassVar[Mapping[str, Any]] = {"pin_memory": True}
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    device: Tier = key("tier of master weights and moments: none (compute device), cpu, nvme", "none")
    nvme_path: Paths = key("folder or list of folders for swap files; one per drive", ())
    ratio: Annotated[Number, Field(le=1)] = key(
        "fraction of the states in this tier, by bytes; those of the first units stay on the device", 1.0
    )


class LeafModule(Block):
    """Modules that are paged as one unit each."""

    REFUSED: ClassVar[dict[str, str]] = {"name_suffixes": 'is not supported; give complete names in "names"'}

    classes: Names = key("class names of modules that are one unit each", ())
    names: Names = key("names of modules that are one unit each", ())


class ZeroOptimization(Block):
    """ZeRO: partitioning and tiers."""

    TUNING = split_names(
        """stage3_model_persistence_threshold model_persistence_threshold contiguous_gradients
        reduce_scatter allgather_partitions
        use_multi_rank_bucket_allreduce round_robin_gradients ignore_unused_parameters load_from_fp32_weights
        memory_efficient_linear override_module_apply stage3_module_granularity_threshold
        module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
        stage3_allgather_sequential allgather_sequential log_trace_cache_warnings enable_sanity_checks
        pipeline_loading_checkpoint elastic_checkpoint legacy_stage1 save_muon_momentum_buffer_in_memory
        mics_hierarchical_params_gather cpu_offload_use_pin_memory chunk_size"""
    )
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "allgather_partitions": True,
        "cpu_offload_use_pin_memory": True,
    }
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "mics_hierarchical_params_gather": "a gather is one all-gather of the replica, whose path the backend chooses",
        "reduce_scatter": "each rank gets its part of a sum, in every stage; replicas of mics_shard_size all-reduce",
        "contiguous_gradients": "the gradients of a unit that ranks reduce are always one piece of memory",
        "round_robin_gradients": "each rank has an equal part of every unit, so none has more to copy than another",
        "chunk_size": CHUNK_SIZE,
        "cpu_offload_use_pin_memory": _PINNED,
        "allgather_partitions": "the weights of a unit are always gathered by an all-gather, never by broadcasts",
    }
    REFUSED: ClassVar[dict[str, str]] = {**dict.fromkeys(("zeropp_loco_param", "zenflow"), CHANGES_TRAINING)}

    OLD_NAMES: ClassVar[dict[str, str]] = {
        name.removeprefix("stage3_"): name
        for name in split_names(
            """stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters
            stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save"""
        )
    } | {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"stage": 3}

    stage: Annotated[Integer, Field(ge=0, le=3)] = key(
        "0 to 3; on several ranks 0 and 1 reduce the gradients of a step's micro-batches once, 2 and 3 each, or once "
        "with the schedule layer_major; 0 in a file without mics_shard_size keeps all states on each "
        "rank, as that key does with 1; all else is the same in all stages",
        0,
    )
    offload_param: OffloadParam = key("see below", OffloadParam())
    offload_optimizer: OffloadOptimizer = key("see below", OffloadOptimizer())
    leaf_module: LeafModule = key("see below", LeafModule())
    overlap_comm: bool | None = key(
        "whether the reduction of a unit goes on beside the backward of the next, on several ranks; takes a second set"
        " of buffers on the device; default: true in stage 3, false in the others"
    )
    mics_shard_size: Annotated[Integer, Field(ge=-1)] = key(
        "ranks that hold one replica of weights, gradients and states, a divisor of their number; weights are gathered"
        " within a replica, and sums of gradients are added up over the replicas; -1 or 0: all ranks; default: 1 where"
        " a file says stage 0, and -1 elsewhere",
        -1,
    )
    zero_hpz_partition_size: Count = key(
        "ranks of a node, a divisor of their number: each keeps its part of the node's copy of all weights on its "
        "device, so that a step gathers each weight over all ranks once, and within the node from then on; stage 3 "
        "alone; 1: no copy",
        1,
    )
    zero_quantized_weights: bool = key(
        "whether ranks gather weights that train as int8 codes, with a scale for each 128 of them, and compute with "
        "the values of the codes; see concepts/quantized-collectives.md",
        False,
    )
    zero_quantized_nontrainable_weights: bool = key("the same for frozen weights", False)
    zero_quantized_gradients: bool = key(
        "whether ranks send gradients as such codes, whose values each rank adds up in fp32; not with "
        "communication_data_type",
        False,
    )
    sub_group_size: Count | None = key("elements of a tile of the update at most; default: 16 MiB of all states")
    reduce_bucket_size: Count | None = key(
        "elements of gradients that ranks reduce at a time at most; a unit is reduced as soon as its gradients are"
        " complete, so larger units have a notice"
    )
    allgather_bucket_size: Count | None = key(
        "elements of weights that ranks gather in one collective at most, if it has several units; at most half of the"
        " largest unit; only where all weights stay on the device; default: unit by unit"
    )
    stage3_prefetch_bucket_size: Elements | None = key(
        "elements prefetched at most, one unit at least; 0: none; default: as memory allows"
    )
    stage3_param_persistence_threshold: Elements = key(
        "units of at most so many elements stay on the compute device", 0
    )
    stage3_max_live_parameters: Count | None = key(
        "elements on the compute device at most, beside those whose tier is none; one unit at least"
    )
    stage3_max_reuse_distance: Elements | None = key(
        "a unit is evicted after its use if more elements than this are used before its next use"
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = key(
        "false: save_16bit_model writes nothing in stage 3, as in DeepSpeed; default: the model is written"
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_in_stage_0(cls, content: Any) -> Any:
        """Returns the content. If the content sets stage 0, each rank becomes a replica, as in DeepSpeed.

        The default is stage 0 too. But a user who sets no stage has not asked for all states on each rank.
        """
        if isinstance(content, Mapping) and content.get("stage") == 0 and "mics_shard_size" not in content:
            return {**content, "mics_shard_size": 1}
        return content

    @property
    def sends_codes(self) -> bool:
        return self.zero_quantized_weights or self.zero_quantized_nontrainable_weights or self.zero_quantized_gradients


OLD_SWITCHES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Older switches of "zero_optimization". The values name the blocks whose states the switches put on the CPU."""


class Aio(Block):
    """Settings of reads and writes of the swap files. `offload tune` measures the best values for a drive."""

    TUNING = ("single_submit", "overlap_events", "use_gds")
    OLD_NAMES: ClassVar[dict[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Annotated[Size, Field(ge=4096)] | None = key(
        "bytes of one read or write; rounded down to a multiple of 4096"
    )
    queue_depth: Annotated[Count, Field(le=4096)] | None = key("blocks in flight for each thread")
    intra_op_parallelism: Annotated[Count, Field(le=64)] | None = key(
        "threads that hand blocks to the kernel; older name: thread_count"
    )


# -- monitors ------------------------------------------------------------------------------------------
#
# Blocks of the monitors, which receive the numbers of each step.


class _Folder(Block):
    """A monitor that writes into a folder."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether these files are written", False)
    output_path: Annotated[str, BeforeValidator(expanded)] = key("folder of all jobs", "runs")
    job_name: str | None = key("folder in it; default: the name of the run")


class TensorBoard(_Folder):
    """Numbers of each step for TensorBoard; see guides/monitor-a-run.md. Needs `pip install 'offload[monitor]'`."""


class CsvMonitor(_Folder):
    """Numbers of each step, each kind of number in its own CSV file; see guides/monitor-a-run.md."""


class Wandb(Block):
    """Numbers of each step for Weights & Biases; see guides/monitor-a-run.md. Needs `pip install wandb`."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether the numbers are sent", False)
    project: str = key("project", "offload")
    team: str | None = key("owner of the project; default: that of the login")
    group: str | None = key("group of runs")
    name: str | None = key("name of the run; default: one that wandb makes")


class CommsLogger(Block):
    """Number and bytes of the collectives by kind; see guides/monitor-a-run.md."""

    TUNING = ("verbose", "prof_all", "prof_ops", "debug")
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = dict.fromkeys(
        TUNING, 'all collectives are counted by kind, and none is timed by itself; "trace" draws each'
    )
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key(
        "print the table when the engine is destroyed; `deepspeed.comm.log_summary` prints it too", False
    )


class FlopsProfiler(Block):
    """Operations of the model, counted in one step; see guides/monitor-a-run.md."""

    TUNING = ("recompute_fwd_factor",)
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "recompute_fwd_factor": "what is computed again in a backward is no operation of the model"
    }
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key(
        "count the operations of a step and print them by module; from then on each step has TFLOPS, and MFU where the"
        " peak of the device is known",
        False,
    )
    profile_step: Count = key("the step of this process that is counted, from 1", 1)
    module_depth: Annotated[int, Field(ge=-1)] = key("depth of the modules in the table; -1: all", -1)
    top_modules: Count = key("with detailed false: modules in the table, those with most operations", 1)
    detailed: bool = key("whether the table has each module down to module_depth", True)
    output_file: Annotated[str, BeforeValidator(expanded)] | None = key("file for the table; default: stderr")


# -- optimizer -----------------------------------------------------------------------------------------
#
# The block of the optimizer.


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
    "Lion": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "SGD": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    # DeepSpeed's defaults. Keys that DeepSpeed lacks have the defaults of torch.optim.Muon.
    "Muon": {
        "muon_lr": None,
        "adam_lr": None,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "ns_method": "standard",
        "adjust_lr_fn": "original",
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
    },
    "SinkGD": {
        "sinkgd_lr": None,
        "adam_lr": None,
        "iterations": 5,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    },
    # DeepSpeed's defaults, but for the correction of the bias: its code never makes one, whatever the key says.
    "OneBitAdam": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "freeze_step": 100_000,
        "bias_correction": False,
    },
    "ZeroOneAdam": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "var_freeze_step": 100_000,
        "var_update_scaler": 16,
        "local_step_scaler": 32_678,
        "local_step_clipper": 16,
        "bias_correction": False,
    },
    "OneBitLamb": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "freeze_step": 100_000,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "coeff_beta": 0.9,
        "factor_max": 4.0,
        "factor_min": 0.5,
        "factor_threshold": 0.1,
        "bias_correction": False,
    },
}
"""Default hyperparameters of each optimizer type, except for the learning rate."""

_OF_EVERY_TYPE = ("lr", "fp32_optimizer_states", "torch_adam")
"""Params that every type accepts: the learning rate, and two switches that are no hyperparameters."""


class OptimizerParams(Block):
    """Hyperparameters, named as in torch.optim; one that belongs to other types of optimizers only is an error."""

    TUNING = ("fused", "foreach", "capturable", "differentiable", "cuda_aware", "comm_backend_name")
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cuda_aware": "ranks exchange signs between their hosts",
        "comm_backend_name": "ranks exchange signs between their hosts, by gloo",
    }
    REFUSED: ClassVar[dict[str, str]] = {
        "max_grad_norm": 'has another name in DeepSpeed files: "gradient_clipping", at top level',
        "amsgrad": CHANGES_TRAINING,
        "eps_inside_sqrt": CHANGES_TRAINING,
        "maximize": CHANGES_TRAINING,
    }
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"lr": 3e-4}

    lr: Number | None = key(
        "learning rate; required unless optimizer= is passed. deepspeed.initialize takes DeepSpeed's default where it "
        "is absent, and says so"
    )
    betas: tuple[Beta, Beta] | None = key(
        "Adam, AdamW, Lamb, Lion, OneBitAdam, ZeroOneAdam, OneBitLamb, and of Muon and SinkGD what AdamW trains: decay"
        " of the moments, each at least 0 and below 1; default [0.9, 0.999], of Muon [0.9, 0.95]"
    )
    eps: Number | None = key(
        "Adam, AdamW, Lamb, Adagrad, and of Muon and SinkGD what AdamW trains: added to the root of the second moment;"
        " default 1e-8, of Adagrad and Muon 1e-10"
    )
    weight_decay: Number | None = key(
        "default 0, of AdamW with torch_adam 0.01; decoupled for AdamW, Lamb, Lion, Muon, SinkGD, and for Adam with "
        "adam_w_mode"
    )
    adam_w_mode: bool | None = key("Adam: true by default; false adds the decay to the gradient")
    torch_adam: bool | None = key(
        "true: the weight_decay of AdamW is by default that of torch.optim, as in DeepSpeed; the kernel stays the same"
    )
    bias_correction: bool | None = key(
        "Adam, AdamW, Lamb: only true; ZeroOneAdam, OneBitLamb: only false; OneBitAdam: default false, as DeepSpeed "
        "computes it"
    )
    freeze_step: Count | None = key(
        "OneBitAdam, OneBitLamb: steps of the warm-up, after which ranks send signs and the variance is frozen; "
        "default 100000"
    )
    var_freeze_step: Count | None = key(
        "ZeroOneAdam: step after which the variance is frozen, and ranks train by themselves between two exchanges; "
        "default 100000"
    )
    var_update_scaler: Count | None = key(
        "ZeroOneAdam: updates of the variance after which their interval doubles, from 1 step on; default 16"
    )
    local_step_scaler: Count | None = key(
        "ZeroOneAdam: steps after the freeze after which the interval of exchanges doubles, from 1 step on; default "
        "32678"
    )
    local_step_clipper: Count | None = key("ZeroOneAdam: most steps from one exchange to the next; default 16")
    fp32_optimizer_states: Literal[True] | None = key(
        'only true: moments are fp32; for bf16 leave it out, and set "moments" in the block offload'
    )
    max_coeff: Number | None = key("Lamb, OneBitLamb: bound of the trust ratio, default 10")
    min_coeff: Number | None = key("Lamb, OneBitLamb: bound of the trust ratio, default 0.01")
    coeff_beta: Beta | None = key(
        "OneBitLamb: decay of the mean of a parameter's trust ratios in the warm-up, default 0.9"
    )
    factor_max: Number | None = key("OneBitLamb: bound of the factor of that mean after the warm-up, default 4")
    factor_min: Number | None = key("OneBitLamb: bound of that factor, default 0.5")
    factor_threshold: Number | None = key(
        "OneBitLamb: largest share by which that factor changes in a step, default 0.1"
    )
    lr_decay: Number | None = key("Adagrad: default 0")
    momentum: Number | None = key("SGD: default 0, which keeps no moment; Muon: default 0.95, below 1")
    dampening: Number | None = key("SGD: default 0")
    nesterov: bool | None = key("SGD: default false; needs a momentum, and no dampening; Muon: default true")
    muon_lr: Number | None = key("Muon: learning rate of the matrices; default: lr")
    sinkgd_lr: Number | None = key("SinkGD: learning rate of the matrices; default: lr")
    adam_lr: Number | None = key("Muon, SinkGD: learning rate of what is no matrix; default: lr")
    ns_steps: Annotated[Count, Field(lt=100)] | None = key("Muon: Newton-Schulz iterations, default 5")
    ns_coefficients: tuple[float, float, float] | None = key(
        "Muon: coefficients of an iteration, default [3.4445, -4.775, 2.0315]"
    )
    ns_method: Literal["standard"] | None = key(
        'Muon: only "standard"; DeepSpeed\'s "gram" computes the same direction in fp16'
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = key(
        'Muon: factor of the matrices\' learning rate. "original" (default): the root of rows over '
        'columns, at least 1; "match_rms_adamw": 0.2 times the root of the larger of both, for AdamW\'s lr'
    )
    iterations: Count | None = key("SinkGD: normalizations of the rows and of the columns of a gradient, default 5")


SIGNED = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""Types of optimizers whose steps exchange signs among ranks that hold whole units."""
_OTHERS = ("muadam", "muadamw", "musgd")
_PASS = "use AdamW, or pass an optimizer of torch as optimizer= to offload.initialize"


class OptimizerBlock(Block):
    """The optimizer: Adam, AdamW, Lamb, Adagrad, Lion, SGD, Muon, SinkGD, OneBitAdam, ZeroOneAdam or OneBitLamb."""

    TUNING = ("legacy_fusion",)
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"type": "AdamW", "params": {"lr": 3e-4}}

    type: OptimizerType = key(
        "Adam, AdamW, Lamb, Adagrad, Lion, SGD, Muon, SinkGD, OneBitAdam, ZeroOneAdam or OneBitLamb, in any case of "
        "letters; or a class of torch, as torch.optim.NAdam or, as DeepSpeed spells it, NAdam, whose params are those "
        "of the class",
        "AdamW",
    )
    params: OptimizerParams = key("see below", OptimizerParams())
    torch_params: dict[str, Any] = Field({}, exclude=True)
    """The params of a class of torch. A file has them under "params"."""

    @classmethod
    def arranged(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content with the params of a class of torch under `torch_params`, without "auto"."""
        if "torch_params" in content:
            raise ConfigError('unknown key optimizer.torch_params; did you mean "params"?')
        params, kind = content.get("params"), content.get("type", "")
        of_torch = kind in OF_TORCH_ALONE or str(kind).startswith(TORCH_OPTIMIZERS)
        if not of_torch or not isinstance(params, Mapping):
            return content
        options = {key: value for key, value in content.items() if key != "params"}
        return {**options, "torch_params": {key: value for key, value in params.items() if value != "auto"}}

    @classmethod
    def check(cls, content: Mapping[str, Any], path: str) -> None:
        """Raises `ConfigError` for optimizers of DeepSpeed that are not supported."""
        name = str(content.get("type", "")).lower()
        if name in _OTHERS:
            raise ConfigError(f'"{path}type" {content["type"]} {missing("is an optimizer of DeepSpeed", _PASS)}')

    @pydantic.model_validator(mode="after")
    def _fits(self) -> OptimizerBlock:
        if self.of_torch:
            return self
        defaults = OPTIMIZER_DEFAULTS[self.type]
        for name in self.params.model_fields_set:
            if name not in (*_OF_EVERY_TYPE, *defaults) and getattr(self.params, name) is not None:
                raise ValueError(f"contains params.{name}, and {self.type} takes {', '.join(('lr', *defaults))}")
        settings = self.settings
        corrects = settings.get("bias_correction")
        if corrects is False and self.type not in SIGNED:
            raise ValueError(
                f"contains params.bias_correction false, and {self.type} corrects the bias of its moments; leave it out"
            )
        if corrects and self.type in ("ZeroOneAdam", "OneBitLamb"):
            raise ValueError(
                f"contains params.bias_correction true, and {self.type} corrects no bias, as in its paper; leave it out"
            )
        if self.type == "SGD" and settings["nesterov"] and (not settings["momentum"] or settings["dampening"]):
            raise ValueError("contains params.nesterov, which needs a momentum above 0 and a dampening of 0")
        if self.type == "Muon" and settings["momentum"] >= 1:
            raise ValueError(f"contains params.momentum {settings['momentum']:g}, which Muon needs to be below 1")
        return self

    @property
    def of_torch(self) -> bool:
        return self.type.startswith(TORCH_OPTIMIZERS)

    @property
    def sends_signs(self) -> bool:
        """True if ranks exchange signs in the steps of the optimizer, and so each rank holds whole units."""
        return self.type in SIGNED

    @property
    def settings(self) -> dict[str, Any]:
        """All hyperparameters of the type except for the learning rate. For a class of torch, only the params given."""
        if self.of_torch:
            return dict(self.torch_params)
        defaults = OPTIMIZER_DEFAULTS[self.type]
        set_values = {name: getattr(self.params, name) for name in defaults}
        settings = {name: value if set_values[name] is None else set_values[name] for name, value in defaults.items()}
        decoupled = self.type == "AdamW" or settings.get("adam_w_mode")
        if (
            self.params.torch_adam
            and self.type in ("Adam", "AdamW")
            and decoupled
            and set_values["weight_decay"] is None
        ):
            settings["weight_decay"] = 0.01
        return settings


# -- precision -----------------------------------------------------------------------------------------
#
# Blocks of dtypes.


_AUTO_CAST = "whether `engine(...)` casts floating-point inputs to the weights' dtype; default: yes, with a log line"


class Bf16(Block):
    """bf16 weights with split fp32 masters."""

    TUNING = split_names("immediate_grad_update check_grad_overflow")
    REFUSED: ClassVar[dict[str, str]] = {"bf16_master_weights_and_grads": missing("has no fp32 masters")}
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key(
        'whether the mode is on; "auto": off, except in `offload train` and `offload.auto_dtype`', False
    )
    auto_cast: bool | None = key(_AUTO_CAST)
    bf16_optimizer_states: bool = key(
        'whether the moments are bf16, as with "moments": "bf16" in the block offload', False
    )


class Fp16(Block):
    """fp16 weights with fp32 masters, and a scaled loss."""

    TUNING = ("fused_mode",)
    REFUSED: ClassVar[dict[str, str]] = {"fp16_master_weights_and_grads": missing("has no fp32 masters")}
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether the mode is on", False)
    auto_cast: bool | None = key(_AUTO_CAST)
    loss_scale: Number = key("factor of the loss; 0: dynamic, adjusted while training", 0.0)
    initial_scale_power: Annotated[Elements, Field(le=32)] = key("a dynamic scale begins with 2 to that power", 16)
    loss_scale_window: Count = key("steps without an overflow after which the scale doubles", 1000)
    hysteresis: Count = key("number of overflows of which the last halves the scale", 2)
    consecutive_hysteresis: bool = key(
        "whether each step without an overflow resets the hysteresis; false: only a window of them", False
    )
    min_loss_scale: Annotated[Number, Field(gt=0)] = key("lower bound of a dynamic scale", 1.0)

    @model_validator(mode="after")
    def _fits(self) -> Fp16:
        first = 2.0**self.initial_scale_power
        if self.enabled and not self.loss_scale and first < self.min_loss_scale:
            raise ValueError(
                f"contains min_loss_scale {self.min_loss_scale:g}, and initial_scale_power {self.initial_scale_power}, "
                f"whose scale of {first:g} is below it: raise the power or lower the bound"
            )
        return self


class TorchAutocast(Block):
    """fp32 weights, and torch's autocast round each forward of the engine."""

    TUNING = ("lower_precision_safe_modules",)
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether `engine(...)` runs the model under torch.autocast", False)
    dtype: Annotated[Literal["bf16", "fp16"], BeforeValidator(lambda value: short_dtype(value))] = key(
        "dtype of autocast; fp16 is refused: it needs a loss scale, which the fp16 block has", "bf16"
    )


class Compile(Block):
    """Each block of the model is compiled by itself, as `block.compile()` before `initialize` does."""

    TUNING = split_names("free_activation offload_activation offload_opt_states double_buffer debug_log")
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether torch compiles each block, also as deepcompile", False)
    backend: str = key("backend of torch.compile", "inductor")
    kwargs: dict[str, Any] = key('further keywords of torch.compile; "dynamic" is false by default', {})

    @classmethod
    def arranged(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content with `deepcompile`, DeepSpeed's compiler, as `enabled`."""
        if "deepcompile" not in content:
            return content
        others = {key: value for key, value in content.items() if key != "deepcompile"}
        return {"enabled": content["deepcompile"], **others}


class Fp8(Block):
    """Linear layers of the blocks multiply in fp8, by torchao: weights and inputs are rounded in each product."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether these layers multiply in fp8; needs torchao", False)
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "torchao's name for the scales: one a matrix, one a row, or that with gradients of weights in the dtype of the"
        " run",
        "tensorwise",
    )
    emulate: bool = key("round as fp8 does, and multiply in the dtype of the run: on any device, saves no time", False)


class TensorParallel(Block):
    """Each layer is divided over ranks, by the plan that transformers has for the class of the model (AutoTP)."""

    TUNING = split_names("dtype tp_overlap_comm keep_module_on_host vocab_parallel_lm_head vocab_parallel_ce_backend")
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "dtype": "the blocks bf16 and fp16 name the dtype",
        "vocab_parallel_lm_head": "the head is divided by the plan, and its output is gathered",
    }
    REFUSED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            split_names("partition_config preset_model injection_policy injection_policy_tuple"),
            "divides layers by a plan of its own; remove it: the plan of transformers is used; for another one call "
            "torch's parallelize_module before offload.initialize",
        ),
        **dict.fromkeys(
            split_names("replace_with_kernel_inject kernel_inject"),
            "puts kernels of DeepSpeed in place of layers; remove it",
        ),
        **dict.fromkeys(
            split_names("mpu tp_group"), "names groups; remove it: a group is autotp_size consecutive ranks"
        ),
    }
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"autotp_size": 2}

    autotp_size: Count = key(
        'ranks that compute each layer together, a divisor of their number; also as `"tp_size"`, and as `{"tp": '
        '{"tp_size": 2}}`; for models of transformers with a plan, see guides/tensor-parallelism.md',
        1,
    )

    @classmethod
    def arranged(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content with one key for the size; a block whose size is at most 1, or that is off, is empty.

        Raises `ConfigError` if two keys give two sizes.
        """
        inner = content.get("tp", content.get("tensor_parallel"))
        inner = inner if isinstance(inner, Mapping) else {}
        named = (content.get("autotp_size"), content.get("tp_size"), inner.get("tp_size"))
        sizes = [size for size in named if size not in (None, "auto", -1, 0, 1)]
        if len(set(map(str, sizes))) > 1:
            raise ConfigError(f"tensor_parallel has the sizes {sizes}; expected one: keep autotp_size")
        if not sizes or content.get("enabled", True) is False:
            return {}
        keys = {**content, **inner}
        for name in ("tp", "tensor_parallel", "tp_size", "tp_grain_size", "enabled"):
            keys.pop(name, None)
        return {**keys, "autotp_size": sizes[0]}


class ExpertParallel(Block):
    """Each rank owns whole experts of a layer, and tokens travel to them (AutoEP)."""

    TUNING = split_names(
        """preset_model use_grouped_mm disable_triton_grouped_mm async_split_plan combine_impl row_weighting_impl
        gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank validate_folding_routing"""
    )
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = key("whether experts are divided", False)
    autoep_size: Count = key(
        "ranks among which the experts of a layer are divided, for stacked experts of transformers; beside tensor "
        "parallelism the same number as `tensor_parallel.autotp_size`",
        1,
    )

    @property
    def size(self) -> int:
        """Ranks among which experts are divided; 1 if they are not."""
        return self.autoep_size if self.enabled else 1


class DataTypes(Block):
    """Dtypes other than that of the mode."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"grad_accum_dtype": "fp32"}

    param_dtype: SumDtype | None = key("dtype of the weights; an error if it is not that of the blocks bf16 and fp16")
    grad_accum_dtype: SumDtype | None = key(
        "dtype in which micro-batches are added: fp32 by default, that of the weights for one micro-batch"
    )
    buffer_dtype: SumDtype | None = key(
        "dtype of floating-point buffers (BatchNorm's statistics): unchanged by default"
    )


# -- activations ---------------------------------------------------------------------------------------
#
# The block "activation_checkpointing" of DeepSpeed.


class ActivationCheckpointing(Block):
    """Repeated blocks of the model keep their inputs, and compute everything else again in backward."""

    REFUSED: ClassVar[dict[str, str]] = {}

    number_checkpoints: Count | None = key("blocks that are computed again, the first ones of the model; default: all")
    cpu_checkpointing: bool = key('true: the same as `"activations": "cpu"` in "offload"', False)
    contiguous_memory_optimization: bool = key(
        "host memory for all inputs is allocated at once, with the first one", False
    )
    partition_activations: bool = key(
        "blocks are computed again; of their inputs each rank of tensor parallelism keeps a part, and all parts are "
        "gathered before; data-parallel ranks have inputs of their own, of which nothing is divided",
        False,
    )
    synchronize_checkpoint_boundary: bool = key(
        "wait for the device at the border of each block; slower, for measurements", False
    )
    profile: bool = key("log the seconds of each block's forward and recomputation, step by step", False)

    @property
    def computes_again(self) -> bool:
        return bool(
            self.number_checkpoints
            or self.cpu_checkpointing
            or self.contiguous_memory_optimization
            or self.partition_activations
        )


# -- scheduler -----------------------------------------------------------------------------------------
#
# The block of the learning rate schedule, and the params of each schedule.


class ScheduleParams(Block):
    """The params of a schedule; `SCHEDULES` lists its type."""

    ORDERED: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields; the first must not exceed the second."""


class RangeTestParams(ScheduleParams):
    """LRRangeTest: rises without end, to find the largest learning rate that trains."""

    lr_range_test_min_lr: Rates = key("learning rate at the start", 1e-3)
    lr_range_test_step_size: Count = key("steps in which it rises by min_lr * step_rate", 2000)
    lr_range_test_step_rate: Number = key("how fast it rises", 1.0)
    lr_range_test_staircase: bool = key("rise only at the end of each step_size", False)


class OneCycleParams(ScheduleParams):
    """OneCycle: up and down once, the momentum the other way round; then a decay."""

    ORDERED = (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom"))

    cycle_min_lr: Rates = Field(description="learning rate at both ends of the cycle; required")
    cycle_max_lr: Rates = Field(description="learning rate in the middle; required")
    decay_lr_rate: Number = key("after the cycle: cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size)", 0.0)
    cycle_first_step_size: Count = key("steps up", 2000)
    cycle_second_step_size: Elements | None = key("steps down; default: as many as up")
    cycle_first_stair_count: Elements = key("stairs on the way up; 0: each step rises", 0)
    cycle_second_stair_count: Elements | None = key("stairs down; default: as many as up")
    decay_step_size: Elements = key("steps of the decay's unit; 0: no decay", 0)
    cycle_momentum: bool = key("whether the momentum, betas[0], moves too", True)
    cycle_min_mom: Momentum = key("momentum in the middle", 0.8)
    cycle_max_mom: Momentum = key("momentum at both ends of the cycle", 0.9)
    decay_mom_rate: Number = key("after the cycle: cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size)", 0.0)


_MAX_LR = 'learning rate at the end of the warm-up; "auto": each group\'s own learning rate'
_WARM_UP = "steps of the warm-up, 1 counts as 2"
_WARMUP_TYPE = "log: fast at first; linear: evenly"
_TOTAL = "steps of the complete training; required, except in `offload train` and with a Trainer, which set it"


class WarmupParams(ScheduleParams):
    """WarmupLR: rises, and stays."""

    ORDERED = (("warmup_min_lr", "warmup_max_lr"),)
    OWN_AUTO = ("warmup_max_lr",)

    warmup_min_lr: Rates = key("learning rate at the start", 0.0)
    warmup_max_lr: RatesOrAuto = key(_MAX_LR, "auto")
    warmup_num_steps: Count = key(_WARM_UP, 1000)
    warmup_type: WarmupType = key(_WARMUP_TYPE, "log")


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR: rises, and falls to 0 in a line."""

    total_num_steps: Count = Field(description=_TOTAL)
    warmup_max_lr: RatesOrAuto = key(_MAX_LR, 1e-3)


class WarmupCosineParams(ScheduleParams):
    """WarmupCosineLR: rises to each group's own learning rate, and falls along a cosine."""

    total_num_steps: Count = Field(description=_TOTAL)
    warmup_min_ratio: Ratio = key("fraction of the learning rate at which the warm-up begins", 0.0)
    warmup_num_steps: Count = key(_WARM_UP, 1000)
    cos_min_ratio: Ratio = key("fraction of the learning rate at which the cosine ends", 1e-4)
    warmup_type: WarmupType = key(_WARMUP_TYPE, "log")


SCHEDULES: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": RangeTestParams,
}
# Other schedules of torch need functions or schedulers as arguments, which a file cannot contain.
TORCH_SCHEDULES = split_names(
    """StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR CosineAnnealingWarmRestarts
    CyclicLR OneCycleLR"""
)
"""Schedules of torch.optim.lr_scheduler whose arguments are an optimizer and numbers."""


def _schedule(name: str) -> str:
    """Returns the type of a schedule, given in any case of letters. Raises `ValueError` if the type is unknown."""
    known = {word.lower(): word for word in (*SCHEDULES, *TORCH_SCHEDULES)}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    hint = f'did you mean "{known[near[0]]}"? ' if near else ""
    raise ValueError(
        f"should be {', '.join(SCHEDULES)}, or one of torch.optim.lr_scheduler that a file can describe, got {name!r}; "
        f"{hint}Any other schedule can be passed to offload.initialize as lr_scheduler="
    )


class SchedulerBlock(Block):
    """The schedule of learning rates, which `engine.step()` advances; without this block they stay as they are."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}

    type: Annotated[str, AfterValidator(_schedule)] = Field(
        description="`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`, `LRRangeTest`, or of "
        f"torch.optim.lr_scheduler {', '.join(f'`{name}`' for name in TORCH_SCHEDULES)}"
    )
    params: dict[Any, Any] = key("see below; torch's schedules take torch's arguments", {})


# -- offload block -------------------------------------------------------------------------------------
#
# The block "offload".


class Debug(Block):
    """Switches that find faults."""

    poison: bool = key("fill freed device memory with NaN and place weights at random addresses", False)
    overlap: bool = key("run updates while the next forward runs", True)
    collectives: bool = key(
        "call the collectives of several ranks in a process that trains alone too, over a group of one", False
    )


class Every(Block):
    """The interval of commits; takes the place of a word such as "step"."""

    every: Count = Field(description="steps from one commit to the next; a kill loses the steps since the last commit")


class OffloadBlock(Block):
    """All keys that DeepSpeed does not have."""

    OWN_AUTO = ("run", "resume", "io_backend", "activations", "speculate", "tile_mlp", "keep_in_fp32")

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] = key(
        "name of the run: its folder under each nvme_path", "default"
    )
    nvme_path: Paths = key("folder or list of folders for swap files, used if the blocks above name none", ())
    device: DeviceName = key(
        "compute device: auto, cpu, cuda (ROCm too), or another accelerator of torch, such as xpu or npu; auto: the "
        "accelerator if there is one",
        "auto",
    )
    host_memory: Memory | None = key(
        "host budget of the process, as '16GiB'; default: as needed, at most the free memory but 6 GiB or 5 % of it "
        "beside a GPU, and at most 80 % where the CPU computes"
    )
    device_memory: DeviceMemory | None = key(
        "device budget for weights, as '8GiB', or '50%': that share of the model's weights stays on the device; "
        "default: states in the tier none, and three of the largest unit"
    )
    memory_watch: bool = key(
        "give clean pages of host_memory back where a limit of memory is near (the machine's, a cgroup's, its "
        "memory.high), and take them again later; false: the budget stays as it is. See concepts/memory-budgets.md",
        True,
    )
    durability: Literal["auto", "step", "none"] | Every = key(
        'step: every step survives a kill; {"every": 10}: every tenth; none: no resume, and fewer bytes on disk: half,'
        " where updates wait for the step (see speculate); auto: step where it fits",
        "auto",
    )
    keep_every: Annotated[Integer, Field(ge=0)] = key(
        "keep the state of each step that is a multiple of this, as a run RUN@STEP beside the run, which `offload "
        "fork` continues; it shares the run's bytes on XFS and btrfs, and is a copy elsewhere; 0: none. See "
        "guides/resume-a-run.md",
        0,
    )
    resume: Literal["never", "auto", "must", "restart"] = key(
        "auto: resume the run in the swap files, if there is one; must: an error if there is none; restart: replace it"
        " by a new run; never: the same, but an error if the earlier run was killed and not closed by `destroy()`, or "
        "was another job whose last step was not saved",
        "never",
    )
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = key("seed of weights made by offload.init and of the loader", 0)
    frozen: Literal["int8", "nf4"] | None = key(
        "store the frozen matrices of linear layers and of stacked experts as blocks of codes, int8 or nf4 (4 bits): a"
        " half or about a quarter of the bytes on disk, in RAM and on the bus; the device makes weights of them for "
        "each use. Default: in the dtype of the model; see guides/frozen-weights.md"
    )
    frozen_files: bool = key(
        "read frozen weights of the tier nvme from the model's own safetensors files, where these contain the bytes "
        "that the run needs, each of several ranks its partition; false: copy them to the swap files. A run that "
        "resumes keeps its own place. See guides/frozen-weights.md",
        True,
    )
    activations: Literal["device", "cpu", "nvme", "auto"] | None = key(
        "blocks of the model are computed again in backward, and their inputs wait on the device, in host memory, in "
        "files, or (auto) where there is room; default: as activation_checkpointing says, else not at all"
    )
    activation_memory: Memory | None = key(
        "host memory for these inputs, part of host_memory; default: 2 GiB or 1/32 of the budget, at most half of what"
        " it leaves, and what weights and states do not use; on a CPU without host_memory, 80 % of what is free"
    )
    experts: Literal["auto", "grouped", "each", "visited", "whole"] = key(
        "experts that transformers stacks in one parameter. grouped: at most eight groups of each layer's experts are "
        "units of their own, and multiply by grouped products; each: each expert is a unit, read only if a token "
        "visits it; visited: also, one without a token in a step is not updated; whole: the stack is part of its "
        "layer; auto: grouped for a model that trains and makes grouped products, if groups have room on the device, "
        "else each. A run that resumes keeps its own division. See guides/mixtures-of-experts.md",
        "auto",
    )
    vocabulary: Literal["auto", "whole", "pieces"] = key(
        "tables of the embedding and the head. whole: all of a table is on the device at once; pieces: pieces of its "
        "rows are units of their own, of at most 64 MiB in 16 bits, used one after the other; auto: whole, or pieces "
        "where a whole one has no room in device_memory or below a limit of memory. A run that resumes keeps its own "
        "division. See concepts/memory-budgets.md",
        "auto",
    )
    io_backend: Literal["auto", "io_uring", "libaio", "threads"] = key(
        "I/O interface of the swap files; auto: the first that the system allows", "auto"
    )
    speculate: Literal["auto"] | bool = key(
        "update a unit under the backward, as soon as its gradients are complete, before the norm is known; a step "
        "that clips makes the update again, with the same result. auto: on a GPU, until a step clips, and again after "
        "8 steps that did not; true: on a CPU too. Needs all states of a unit on nvme, with one slot more on disk "
        "where not every step is durable, if there is room; see concepts/updates-and-commits.md",
        "auto",
    )
    moments: Literal["fp32", "bf16", "int8"] | None = key(
        "form of the optimizer's moments; bf16: half their bytes; int8: a quarter, in blocks of 256 with a scale each;"
        " both are rounded stochastically, with the same bits wherever they are stored; default: fp32, or bf16 with "
        "bf16_optimizer_states. See guides/which-states-which-bytes.md"
    )
    master: Literal["fp32", "bf24"] = key(
        "form of the master of a bf16 weight; bf24: the upper 24 bits of an fp32, which are the weight and 8 more bits"
        " in place of 16, rounded stochastically in each step. See guides/which-states-which-bytes.md",
        "fp32",
    )
    gradients: Literal["auto", "fp32", "16bit"] = key(
        "how a sum of several micro-batches, made in fp32, waits for its update; 16bit: rounded once to the weights' "
        "dtype, when it is complete; fp32: not rounded; auto: 16bit for bf16 weights, unless grad_accum_dtype is set "
        "or weights that stay in fp32 train. See concepts/precision.md",
        "auto",
    )
    keep_in_fp32: Literal["auto"] | Names = key(
        "weights that stay fp32 under bf16 and fp16, such as a router's: names or classes of modules, names of "
        'parameters, or parts of a name, as "mlp.gate" (* is any text within a part). auto: those that the model\'s '
        "class lists for it, if they are fp32 in the model and others are not. See concepts/precision.md",
        "auto",
    )
    units: Names = key("names or classes of modules that are one unit each", ())
    schedule: Literal["auto", "layer_major", "micro_batch_major"] = key(
        "order of several micro-batches: layer_major: all of them pass through a block before the next block is "
        "fetched; micro_batch_major: one after the other; auto: layer_major where blocks are computed again and "
        "weights come and go, and beside weights that stay on a GPU if the activations of all fit",
        "auto",
    )
    tile_mlp: Tiles = key(
        "compute the MLPs of a decoder of transformers chunk by chunk of the sequence, and again in the backward: a "
        "number of chunks, or auto: as many tokens each as the model has features, at least 1024; see "
        "reference/python/tiles.md",
        False,
    )
    keep_attention: bool = key(
        "keep the output of attention of blocks that are computed again (activations), so that attention is not: for "
        "long sequences; a graph serves one backward; see concepts/cost-model.md",
        False,
    )
    trace: Annotated[Name, BeforeValidator(expanded)] | None = key(
        "file for a timeline of the run; see guides/find-the-bottleneck.md"
    )
    log: Annotated[Name, BeforeValidator(expanded)] | None = key(
        "file for a JSON object a step, for `offload report`; see guides/find-the-bottleneck.md"
    )
    drive_tbw: Annotated[Number, Field(gt=0)] | None = key(
        "rated endurance of each drive, in TB written (its data sheet's TBW; the least of several); see "
        "concepts/drive-wear.md"
    )
    drive_share: Annotated[Ratio, Field(gt=0)] = key("fraction of drive_tbw above which a run is warned", 0.1)
    drive_budget: Annotated[str, BeforeValidator(_drive_budget)] | None = key(
        "bytes that the run may write to each drive over a time, as 1TB/day, or over a life, as 600TB/5y. With "
        "durability auto the run commits as often as this allows, at least once a day, and host_memory goes to whole "
        "layers, whose states only commits write; a promise of durability is kept, whatever it writes. See "
        "concepts/drive-wear.md"
    )
    audit: Literal["random"] | None = key(
        "random: compute the gradient of a random block and micro-batch again, for about 0.5 % of a step at most, "
        "compare the block's weights, states and waiting gradients with what was written, and raise an AuditError "
        "before the update if a bit differs; takes the memory of one block's activations and gradients more; see "
        "concepts/bits.md"
    )
    on_nonfinite: Literal["raise", "skip"] = key("response to a gradient norm of inf or NaN", "raise")
    debug: Debug = key("see below", Debug())

    @property
    def wants_store(self) -> bool:
        promised = self.durability == "step" or isinstance(self.durability, Every)
        return promised or self.thins_commits or self.keep_every > 0

    @property
    def thins_commits(self) -> bool:
        """True if the drive budget decides which steps are committed."""
        return self.drive_budget is not None and self.durability == "auto"

    @property
    def commit_every(self) -> int:
        """Steps from one commit to the next, if there is a store with two slots and no drive budget decides."""
        return self.durability.every if isinstance(self.durability, Every) else 1
