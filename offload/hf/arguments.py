"""Checks of `TrainingArguments` and of the model, and the config values that the arguments determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.config import OPTIMIZER_DEFAULTS, SCHEDULES
from offload.config.script_values import ScriptValue, refuse_commits, refuse_shared_batches, value_of
from offload.engine.engine import Engine
from offload.engine.params import handle_of
from offload.errors import ConfigError
from offload.sizes import count_of

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adagrad", "sgd", "rmsprop", "adafactor")
"""Values of `optim` that an engine supports: the first four by a kernel, the others by running torch's own code."""

_ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` that are transformers' default in some version."""
_OPTIMIZER_KINDS = {"adagrad": "Adagrad", "sgd": "SGD"}
"""For a value of `optim`, the equal `optimizer.type`."""
_SCHEDULE_KINDS = {"constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}
"""For a value of `lr_scheduler_type`, the equal `scheduler.type`."""

_REFUSED = {
    "deepspeed": "offload_config is in its place: give the same file there, and leave deepspeed out",
    "fsdp": "the engine shards what FSDP would; leave fsdp out",
    "parallelism_config": "the engine is data-parallel; leave it out",
    "auto_find_batch_size": "the engine begins with one batch size; set per_device_train_batch_size",
    "fp16_full_eval": "an evaluation runs in the dtype of the training; leave it out",
    "bf16_full_eval": "an evaluation runs in the dtype of the training; leave it out",
}


def check_arguments(args: Any) -> None:
    """Raises `ConfigError` if `TrainingArguments` contain an argument that an engine cannot honour."""
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigError(f"OffloadTrainer cannot be combined with {name}={value!r}: {reason}")
    # The Trainer would wrap the model in `nn.DataParallel`, which copies every parameter to each GPU.
    if args.n_gpu > 1:
        raise ConfigError(
            f"this process sees {args.n_gpu} GPUs and would copy the model to each; start one process for each by "
            f"torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )


def check_model(model: Any) -> None:
    """Raises `ConfigError` if an engine cannot be built for the model; None if `model_init` makes the model later."""
    if isinstance(model, Engine):
        raise ConfigError("OffloadTrainer makes the engine itself; give it the model, before offload.initialize")
    if model is not None and any(handle_of(parameter) is not None for parameter in model.parameters()):
        raise ConfigError(
            "this model is under an engine already; OffloadTrainer makes the engine itself: give it another model"
        )


def check_optim(name: str) -> None:
    """Raises `ConfigError` if `name`, a value of the argument `optim`, is not an optimizer that an engine supports."""
    if name not in OPTIMIZERS:
        raise ConfigError(
            f'optim="{name}" is not supported on paged states, which need no pages or 8 bits of its own; '
            f'expected one of {", ".join(OPTIMIZERS)}, or a block "optimizer" in offload_config, which also knows Lion '
            "and Lamb"
        )


def check_kinds(content: Mapping[str, Any], args: Any) -> None:
    """Raises `ConfigError` if a block of the config names another optimizer or schedule than the arguments.

    An argument with its default value is compatible with every config, since the script may not have set it.
    """
    for block, argument, defaults, kinds in (
        ("optimizer", "optim", _ADAMW, _OPTIMIZER_KINDS),
        ("scheduler", "lr_scheduler_type", ("linear",), _SCHEDULE_KINDS),
    ):
        requested = getattr(args, argument)
        # The arguments hold an enum or a string, depending on how they were set.
        name = str(getattr(requested, "value", requested))
        if not isinstance(content.get(block), Mapping) or name in defaults:
            continue
        kind, remark = value_of(content, f"{block}.type"), ""
        if kind is None:
            if block == "scheduler":
                continue  # the config is checked later, and a schedule needs a type
            kind, remark = DEFAULT_OPTIMIZER, ", the default,"
        if kinds.get(name, "").lower() != str(kind).lower():
            raise ConfigError(
                f'{block}.type is "{kind}"{remark} in the config, and {argument} is "{name}" in the script, which '
                f'would not be used: take {argument} out of the script, or the block "{block}" out of the config'
            )


def values_of_arguments(content: Mapping[str, Any], args: Any) -> list[ScriptValue]:
    """Returns all config values that the arguments determine, except those of the schedule."""
    refuse_shared_batches(content, "OffloadTrainer")
    refuse_commits(content, "OffloadTrainer", "train(resume_from_checkpoint=True)", "save_steps")
    values = batch_values(content, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size)
    values += optimizer_values(content, args)
    values.append(ScriptValue("gradient_clipping", args.max_grad_norm or 0, "max_grad_norm"))
    if not value_of(content, "torch_autocast.enabled"):
        values.append(ScriptValue("bf16.enabled", bool(args.bf16), "bf16"))
        values.append(ScriptValue("fp16.enabled", bool(args.fp16), "fp16"))
    if args.torch_compile:
        mode = {} if args.torch_compile_mode is None else {"mode": args.torch_compile_mode}
        values.append(ScriptValue("compile.enabled", True, "torch_compile"))
        values.append(ScriptValue("compile.backend", args.torch_compile_backend, "torch_compile_backend"))
        values.append(ScriptValue("compile.kwargs", mode, "torch_compile_mode"))
    values.append(ScriptValue("offload.device", args.device.type, "the device of the arguments"))
    # The Trainer resumes from its own checkpoints, so commits of the engine would only cost writes.
    values.append(
        ScriptValue("offload.durability", "none", "the durability of a Trainer, which resumes from its checkpoints,")
    )
    return values


DEFAULT_OPTIMIZER = "AdamW"
"""The `optimizer.type` of a config whose block `optimizer` has no type."""


def batch_values(content: Mapping[str, Any], micro: int, accumulation: int, ranks: int) -> list[ScriptValue]:
    """Returns the batch sizes that `TrainingArguments` determine; the total only if the config names it."""
    values = [
        ScriptValue("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"),
        ScriptValue("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps"),
    ]
    # The engine computes the total if the config leaves it out.
    if content.get("train_batch_size") is not None:
        total = f"per_device_train_batch_size * gradient_accumulation_steps * {count_of(ranks, 'rank')}"
        values.append(ScriptValue("train_batch_size", micro * accumulation * ranks, total))
    return values


def optimizer_values(content: Mapping[str, Any], args: Any) -> list[ScriptValue]:
    """Returns the values of `TrainingArguments` for the config's optimizer.

    Adam and AdamW take all of them; other optimizers take the learning rate and the weight decay.
    """
    block = content.get("optimizer")
    if not isinstance(block, Mapping):
        return []
    # Types may be written in any case.
    chosen = value_of(content, "optimizer.type") or DEFAULT_OPTIMIZER
    kind = {name.lower(): name for name in OPTIMIZER_DEFAULTS}.get(str(chosen).lower(), "")
    values = [
        ScriptValue("optimizer.params.lr", args.learning_rate, "learning_rate"),
        ScriptValue("optimizer.params.weight_decay", args.weight_decay, "weight_decay"),
    ]
    if kind in ("Adam", "AdamW"):
        betas = [args.adam_beta1, args.adam_beta2]
        values.append(ScriptValue("optimizer.params.betas", betas, "adam_beta1, adam_beta2"))
        values.append(ScriptValue("optimizer.params.eps", args.adam_epsilon, "adam_epsilon"))
    return values


def schedule_values(content: Mapping[str, Any], args: Any, steps: int) -> list[ScriptValue]:
    """Returns the values of `TrainingArguments` for the config's schedule, for a training of `steps` steps."""
    block = content.get("scheduler")
    if not isinstance(block, Mapping):
        return []
    kind = next((name for name in SCHEDULES if name.lower() == str(block.get("type")).lower()), None)
    known = SCHEDULES[kind].model_fields if kind else {}
    values = {
        "total_num_steps": (steps, "the steps of the training"),
        # The Trainer allows a warm-up of 0 steps; 1 is the least that the schedules accept.
        "warmup_num_steps": (max(1, args.get_warmup_steps(steps)), "warmup_steps"),
        "warmup_max_lr": (args.learning_rate, "learning_rate"),
    }
    return [ScriptValue(f"scheduler.params.{name}", *pair) for name, pair in values.items() if name in known]


def as_reference(config: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns the config of a model that does not train; `index` such models exist before it.

    Weights have the same tiers as in the model that trains; keys that concern steps are dropped. The run has its own
    name and is never resumed. Without `device_memory` the engine takes no more device memory than it needs.
    """
    blocks = ("zero_optimization", "aio", "bf16", "fp16", "torch_autocast")
    block = dict(config.get("offload") or {})
    for name in ("device_memory", "trace", "log", "drive_tbw", "drive_budget"):
        block.pop(name, None)
    name = "reference" if index == 0 else f"reference{index + 1}"
    block |= {"run": f"{value_of(block, 'run') or 'default'}-{name}", "durability": "none", "resume": "never"}
    content = {key: config[key] for key in blocks if key in config}
    return {**content, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "offload": block}
