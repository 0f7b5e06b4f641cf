"""Checks of `TrainingArguments` and of the model, and the config values that the arguments determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.config.script_values import ScriptValue, refuse_commits, refuse_sequences, value_of
from offload.engine.engine import Engine
from offload.engine.params import handle_of
from offload.errors import ConfigError
from offload.hf.auto_values import DEFAULT_OPTIMIZER, batch_values, optimizer_values

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
    "torch_compile": "weights are paged; compile blocks of the model before the Trainer receives it",
    "fp16_full_eval": "an evaluation runs in the dtype of the training; leave it out",
    "bf16_full_eval": "an evaluation runs in the dtype of the training; leave it out",
}


def check_arguments(args: Any) -> None:
    """Checks that the arguments are compatible with an engine.

    Args:
        args: transformers' `TrainingArguments`.

    Raises:
        ConfigError: if an argument is not compatible; the message names the argument and the reason.
    """
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
    """Checks that an engine can be built for the model.

    Args:
        model: the Trainer's model; None if `model_init` makes the model later.

    Raises:
        ConfigError: if `model` is an engine, or an engine holds its parameters.
    """
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
    """Checks that config and arguments name the same optimizer and the same schedule.

    An argument with its default value is compatible with every config, since the script may not have set it.

    Args:
        content: the config.
        args: transformers' `TrainingArguments`.

    Raises:
        ConfigError: if a block of the config names another kind than the arguments.
    """
    for block, argument, defaults, kinds in (
        ("optimizer", "optim", _ADAMW, _OPTIMIZER_KINDS),
        ("scheduler", "lr_scheduler_type", ("linear",), _SCHEDULE_KINDS),
    ):
        asked = getattr(args, argument)
        # The arguments hold an enum or a string, depending on how they were set.
        name = str(getattr(asked, "value", asked))
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
    """Returns all config values that the arguments determine, except those of the schedule.

    Args:
        content: the config.
        args: transformers' `TrainingArguments`.

    Raises:
        ConfigError: if the config asks for commits or a resume from swap files; the Trainer has checkpoints for that.
    """
    refuse_sequences(content, "OffloadTrainer")
    refuse_commits(content, "OffloadTrainer", "train(resume_from_checkpoint=True)", "save_steps")
    values = batch_values(content, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size)
    values += optimizer_values(content, args)
    values.append(ScriptValue("gradient_clipping", args.max_grad_norm or 0, "max_grad_norm"))
    if not value_of(content, "torch_autocast.enabled"):
        values.append(ScriptValue("bf16.enabled", bool(args.bf16), "bf16"))
        values.append(ScriptValue("fp16.enabled", bool(args.fp16), "fp16"))
    values.append(ScriptValue("offload.device", args.device.type, "the device of the arguments"))
    # The Trainer resumes from its own checkpoints, so commits of the engine would only cost writes.
    values.append(
        ScriptValue("offload.durability", "none", "the durability of a Trainer, which resumes from its checkpoints,")
    )
    return values
