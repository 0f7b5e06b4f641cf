"""The config: a DeepSpeed JSON file, or its content as a dict, read into frozen models.

    config = load_config("ds_config.json")

Every key of DeepSpeed's offload is known here: honoured, accepted because it tunes what this library decides by itself
(one notice names those), or refused with the reason. All keys that DeepSpeed does not have lie in the block "offload",
which DeepSpeed ignores. docs/configuration.md is written from the descriptions below.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from offload.errors import ConfigError
from offload.sizes import parse_size

Tier = Literal["none", "cpu", "nvme"]


def _whole(value: Any) -> Any:
    """`1e8` and `200000000.0` are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _paths(value: Any) -> Any:
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    return tuple(os.path.expanduser(path) if isinstance(path, str) else path for path in given)


def _size(value: Any) -> Any:
    return None if value is None else parse_size(value)


def _auto(value: Any) -> Any:
    return None if value == "auto" else value


Count = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
OptionalCount = Annotated[Count | None, BeforeValidator(_auto)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_paths)]
Size = Annotated[int | None, BeforeValidator(_size)]


class Block(BaseModel):
    """A block of the config. "auto" in one means its default, as in DeepSpeed."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    accepted: tuple[str, ...] = Field((), exclude=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _defaults_for_auto(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if value != "auto"}


def _only_tuning(*keys: str) -> Callable[[Any], Any]:
    """Take `keys` out of a block and remember them: they tune what is decided here without them."""

    def take(given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        found = tuple(key for key in keys if key in given)
        return {
            **{k: v for k, v in given.items() if k not in found},
            **({"accepted": found} if found else {}),
        }

    return take


_PARAM_TUNING = ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
_OPTIMIZER_TUNING = (
    *(
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "fast_init",
        "pipeline",
        "pipeline_read",
        "pipeline_write",
    ),
    *("super_offload", "cpuadam_cores_perc"),
)
_ZERO_TUNING = (
    *(
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    ),
    *("param_persistence_threshold", "stage3_model_persistence_threshold", "model_persistence_threshold"),
    *("stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance"),
    *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    *(
        "stage3_gather_fp16_weights_on_model_save",
        "contiguous_gradients",
        "reduce_bucket_size",
        "overlap_comm",
    ),
    *("reduce_scatter", "allgather_partitions", "allgather_bucket_size", "use_multi_rank_bucket_allreduce"),
    *(
        "round_robin_gradients",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
        "memory_efficient_linear",
    ),
    *("override_module_apply", "stage3_module_granularity_threshold", "module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "log_trace_cache_warnings"),
    *("enable_sanity_checks", "pipeline_loading_checkpoint", "elastic_checkpoint", "legacy_stage1"),
    *("save_muon_momentum_buffer_in_memory", "zero_hpz_partition_size"),
)


class OffloadParam(Block):
    """Where the weights live."""

    device: Tier = Field("none", description="home of the weights: none (compute device), cpu, nvme")
    nvme_path: Paths = Field((), description="folder or list of folders for swap files; one per drive")

    _tuning = pydantic.model_validator(mode="before")(_only_tuning(*_PARAM_TUNING))


class OffloadOptimizer(Block):
    """Where the optimizer states live."""

    device: Tier = Field("none", description="home of residual and moments: none (compute device), cpu, nvme")
    nvme_path: Paths = Field((), description="folder or list of folders for swap files; one per drive")
    ratio: Annotated[float, Field(ge=1.0, le=1.0)] = Field(1.0, description="share updated on the CPU; only 1.0")

    _tuning = pydantic.model_validator(mode="before")(_only_tuning(*_OPTIMIZER_TUNING))


class LeafModule(Block):
    """Modules that move as one unit."""

    classes: tuple[str, ...] = Field((), description="class names of modules that are one unit each")
    names: tuple[str, ...] = Field((), description="names of modules that are one unit each")


class ZeroOptimization(Block):
    """ZeRO: what is partitioned, and where it lives."""

    stage: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=3)] = Field(
        0, description="0 to 3; on one process all stages train the same way"
    )
    offload_param: OffloadParam = Field(OffloadParam(), description="see below")
    offload_optimizer: OffloadOptimizer = Field(OffloadOptimizer(), description="see below")
    leaf_module: LeafModule = Field(LeafModule(), description="see below")

    _tuning = pydantic.model_validator(mode="before")(_only_tuning(*_ZERO_TUNING))

    @pydantic.field_validator("offload_param", "offload_optimizer", mode="before")
    @classmethod
    def _none_is_a_default(cls, given: Any) -> Any:
        return {} if given is None else given


class OptimizerParams(Block):
    """Hyperparameters, as in torch.optim.AdamW."""

    lr: Annotated[float, Field(ge=0)] | None = Field(
        None, description="learning rate; needed unless optimizer= is passed"
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the two moments")
    eps: Annotated[float, Field(ge=0)] = Field(1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="decoupled for AdamW and for Adam with adam_w_mode"
    )
    adam_w_mode: bool = Field(True, description="false makes Adam add the decay to the gradient")
    bias_correction: Literal[True] = Field(True, description="only true")
    amsgrad: Literal[False] = Field(False, description="only false")

    _tuning = pydantic.model_validator(mode="before")(_only_tuning("torch_adam", "fp32_optimizer_states", "fused"))

    @pydantic.field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("should both be at least 0 and below 1")
        return betas


class OptimizerBlock(Block):
    """The optimizer: Adam or AdamW."""

    type: Literal["Adam", "AdamW"] = Field("AdamW", description="Adam or AdamW, in any case of letters")
    params: OptimizerParams = Field(OptimizerParams(), description="see below")

    _tuning = pydantic.model_validator(mode="before")(_only_tuning("legacy_fusion"))

    @pydantic.field_validator("type", mode="before")
    @classmethod
    def _any_case(cls, given: Any) -> Any:
        return {"adam": "Adam", "adamw": "AdamW"}.get(str(given).lower(), given)

    @property
    def decoupled(self) -> bool:
        """Whether the decay is AdamW's; DeepSpeed's "Adam" is AdamW too unless adam_w_mode is false."""
        return self.type == "AdamW" or self.params.adam_w_mode


class Precision(Block):
    """A 16-bit mode."""

    enabled: bool = Field(False, description="whether the mode is on")

    _tuning = pydantic.model_validator(mode="before")(
        _only_tuning(
            *(
                "auto_cast",
                "loss_scale",
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "min_loss_scale",
            ),
            *("consecutive_hysteresis", "fp16_master_weights_and_grads", "immediate_grad_update"),
            *("check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
        )
    )


class DataTypes(Block):
    """Dtypes beside that of the mode."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = Field(
        None,
        description="dtype in which micro-batches are added: fp32 by default, bf16 for a single micro-batch in bf16",
    )

    _tuning = pydantic.model_validator(mode="before")(_only_tuning("param_dtype", "buffer_dtype"))


class Debug(Block):
    """Switches that find faults."""

    poison: bool = Field(False, description="fill freed device memory with NaN and place weights at random addresses")
    overlap: bool = Field(True, description="run updates while the next forward does")


class OffloadBlock(Block):
    """All keys that DeepSpeed does not have."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "default", description="name of the run: its folder under each nvme_path"
    )
    nvme_path: Paths = Field(
        (), description="folder or list of folders for swap files, where the blocks above name none"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="compute device; auto takes cuda where there is one"
    )
    host_memory: Size = Field(
        None, description="host budget, as '16GiB'; default: what is needed, at most 80 % of free"
    )
    device_memory: Size = Field(
        None,
        description="device budget for weights; default: states at home there and three of the largest unit",
    )
    durability: Literal["auto", "step", "none"] = Field(
        "auto",
        description="step: every step survives a kill; none: half the disk, no resume; auto: step where it fits",
    )
    resume: Literal["never", "auto", "must"] = Field(
        "never", description="whether to go on with the run that the swap files hold"
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of weights made by offload.init and of the loader")
    units: tuple[str, ...] = Field((), description="names or classes of modules that are one unit each")
    on_nonfinite: Literal["raise", "skip"] = Field("raise", description="what a gradient norm of inf or NaN does")
    debug: Debug = Field(Debug(), description="see below")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _defaults_for_auto(cls, given: Any) -> Any:
        """ "auto" is a choice of its own here; null means the default."""
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, Mapping) else given


class Config(Block):
    """The whole config, with what it means."""

    train_batch_size: OptionalCount = Field(None, description="samples of a step on all ranks")
    train_micro_batch_size_per_gpu: OptionalCount = Field(None, description="samples of a forward on one rank")
    gradient_accumulation_steps: OptionalCount = Field(None, description="micro-batches of a step")
    gradient_clipping: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="largest global norm of the gradient; 0 leaves it as it is"
    )
    optimizer: OptimizerBlock | None = Field(None, description="see below")
    bf16: Precision = Field(Precision(), alias="bfloat16", description="bf16 weights with split fp32 masters")
    fp16: Precision = Field(Precision(), description="not supported yet")
    data_types: DataTypes = Field(DataTypes(), description="see below")
    zero_optimization: ZeroOptimization = Field(ZeroOptimization(), description="see below")
    offload: OffloadBlock = Field(OffloadBlock(), description="see below")
    ignored: tuple[str, ...] = Field((), exclude=True)

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
    def dtype(self) -> Literal["bf16", "fp32"]:
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def units(self) -> tuple[str, ...]:
        """Modules that the user names as units."""
        leaf = self.zero_optimization.leaf_module
        return tuple(dict.fromkeys((*self.offload.units, *leaf.classes, *leaf.names)))

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each kind of key that has no effect here."""
        lines = []
        tuning = sorted(_accepted(self))
        if tuning:
            lines.append(f"decided by this library itself, so without effect: {', '.join(tuning)}")
        if self.ignored:
            lines.append(f"not supported and ignored: {', '.join(self.ignored)}")
        zero = self.zero_optimization
        if zero.stage < 3 and zero.offload_param.device != "none":
            lines.append(f"offload_param is honoured at ZeRO stage {zero.stage} too, since there is one process")
        named = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
        if named and "nvme" not in (self.weight_tier, self.optimizer_tier) and self.offload.durability != "step":
            lines.append("nvme_path is ignored: no state lives on nvme")
        return tuple(lines)


def _accepted(block: BaseModel, path: str = "") -> set[str]:
    """Dotted names of every key that was accepted without effect."""
    found = {f"{path}{key}" for key in getattr(block, "accepted", ())}
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            found |= _accepted(value, f"{path}{name}.")
    return found


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
        micro = total // (accumulation * world_size)
    elif accumulation is None:
        accumulation = total // (micro * world_size)
    if micro * accumulation * world_size != total:
        raise ConfigError(
            f"train_batch_size is {total}, but train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps "
            f"{accumulation} * {world_size} ranks is {micro * accumulation * world_size}; leave one of the three out"
        )
    return Batch(micro, accumulation, total)


# -- reading ------------------------------------------------------------------------------------------

_QUIET = (
    *(
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "memory_breakdown",
        "log_level",
        "vocabulary_size",
    ),
    *(
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "aio",
        "timers",
        "comms_logger",
        "checkpoint",
    ),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type", "sparse_gradients"),
    *("dataloader_drop_last", "disable_allgather", "gradient_allreduce_op", "managed_gradient_accumulation"),
    *("seq_parallel_communication_data_type", "graph_harvesting", "activation_checkpointing", "nebula"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "autotuning", "datastates_ckpt"),
)
"""Top-level keys of DeepSpeed that do not change what is learned: accepted, and named in a notice."""

_CHANGES_TRAINING = (
    *(
        "amp",
        "sparse_attention",
        "compression_training",
        "data_efficiency",
        "curriculum_learning",
        "elasticity",
    ),
    *(
        "progressive_layer_drop",
        "eigenvalue",
        "pipeline",
        "hybrid_engine",
        "expert_parallel",
        "tensor_parallel",
    ),
    *("compile", "torch_autocast", "zenflow"),
)
"""Top-level keys that do: refused unless switched off."""


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Read a config from a JSON file's path, or from its content as a dict.

    Comments (`//`, `#`, `/* */`) are allowed; a key that appears twice is not. Raises `ConfigError` that names the key,
    what was expected and what came.
    """
    content = dict(source) if isinstance(source, Mapping) else read_json(source)
    try:
        config = Config.model_validate(_sort_out(content))
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error)) from error
    _check(config)
    return config


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a config file: JSON with comments, in which no key appears twice."""
    content = _parse(_read(source), os.fspath(source))
    if not isinstance(content, dict):
        raise ConfigError(f"the config must be a JSON object, got {type(content).__name__}")
    return content


def _read(source: str | os.PathLike[str]) -> str:
    try:
        return Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {os.fspath(source)}: {error}") from error


_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)


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
        return json.loads(_COMMENT.sub(blank, text), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error


def _sort_out(content: dict[str, Any]) -> dict[str, Any]:
    """Divide top-level keys into those that are models here, those without effect, and errors."""
    known = {name for name in Config.model_fields if name not in ("accepted", "ignored")} | {"bfloat16"}
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in content.items():
        if key in known:
            kept[key] = value
        elif key == "scheduler":
            if value:
                raise ConfigError(
                    '"scheduler" is not supported yet: pass lr_scheduler=, a torch scheduler or a function that makes '
                    "one from the optimizer, to offload.initialize"
                )
        elif key in _CHANGES_TRAINING:
            if _is_on(value):
                raise ConfigError(
                    f'"{key}" would change what is learned and is not supported; remove it, or switch it off'
                )
        elif key in _QUIET:
            if _is_on(value):
                ignored.append(key)
        elif near := difflib.get_close_matches(key, [*known, *_QUIET, "scheduler"], 1, 0.8):
            raise ConfigError(f'unknown key "{key}"; did you mean "{near[0]}"?')
        else:
            ignored.append(key)
    zero = kept.get("zero_optimization")
    if isinstance(zero, bool):
        kept["zero_optimization"] = {"stage": int(zero)}
    for name in ("optimizer", "fp16", "bf16", "bfloat16", "data_types", "zero_optimization", "offload"):
        if name in kept and kept[name] is None:
            del kept[name]
    return {**kept, "ignored": tuple(ignored)}


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("enabled", value.get("deepcompile", bool(value))))
    return bool(value)


def _explain(error: pydantic.ValidationError) -> str:
    """The first error in words: the key's dotted path, what was expected, what came."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        model: type[BaseModel] = Config
        for part in path[:-1]:
            annotation = model.model_fields[part].annotation
            candidates = [annotation, *getattr(annotation, "__args__", ())]
            model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
        near = difflib.get_close_matches(path[-1], model.model_fields, 1, 0.6)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f"; known are {', '.join(sorted(set(model.model_fields) - {'accepted'}))}"
        )
        return f"unknown key {key}{hint}"
    got = first["input"]
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key} {expected}{'' if repr(got) in expected else f', got {got!r}'}"


def _check(config: Config) -> None:
    if config.fp16.enabled:
        raise ConfigError('"fp16" is not supported yet; set "bf16": {"enabled": true} instead')
    if "nvme" in (config.weight_tier, config.optimizer_tier) and not config.drives:
        raise ConfigError(
            '"device" is nvme, but no "nvme_path" is given; set it beside the device, or once in the "offload" block'
        )


# -- documentation ------------------------------------------------------------------------------------

_INTRODUCTION = """# Configuration

A DeepSpeed JSON file works as it is. Here is every key that has an effect, with its default, and every key that is
accepted without one. `"auto"` means the default, integers may be written as `1e8`, and comments are allowed. A key that
is close to a known one but not it is an error; other unknown top-level keys are named in a line at the start.

This file is written by `make format` from `offload/config.py`.
"""


def document() -> str:
    """docs/configuration.md."""
    lines = [_INTRODUCTION]
    _document(Config, "", lines)
    lines.append("## Accepted without effect\n")
    lines.append("They tune buffers, buckets and overlaps that this library sizes by itself:\n")
    for name, keys in (
        ("top level", _QUIET),
        ("`zero_optimization`", _ZERO_TUNING),
        ("`offload_param`", _PARAM_TUNING),
        ("`offload_optimizer`", _OPTIMIZER_TUNING),
    ):
        lines.append(f"* {name}: {', '.join(f'`{key}`' for key in keys)}")
    lines.append("\n## Refused unless switched off\n")
    lines.append("They would change what is learned:\n")
    lines.append(f"{', '.join(f'`{key}`' for key in (*_CHANGES_TRAINING, 'scheduler', 'fp16'))}.")
    return "\n".join(lines) + "\n"


def _document(model: type[BaseModel], path: str, lines: list[str]) -> None:
    title = f"`{path}`" if path else "Top level"
    lines.append(f"## {title}\n\n{(model.__doc__ or '').splitlines()[0]}\n\n| key | default | meaning |\n|---|---|---|")
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        block = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        default = "" if block is not None else f"`{json.dumps(field.default)}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
        if block is not None and name != "fp16":
            inner.append((f"{path}.{name}" if path else name, block))
    lines.append("")
    for inner_path, block in inner:
        _document(block, inner_path, lines)
