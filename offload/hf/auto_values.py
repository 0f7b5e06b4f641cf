"""Values of a Trainer's arguments for the keys of a config. Pure functions, which do not depend on transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.config import OPTIMIZER_DEFAULTS, SCHEDULES
from offload.config.script_values import ScriptValue, value_of
from offload.sizes import count_of

DEFAULT_OPTIMIZER = "AdamW"
"""The `optimizer.type` of a config whose block `optimizer` has no type."""


def batch_values(content: Mapping[str, Any], micro: int, accumulation: int, ranks: int) -> list[ScriptValue]:
    """Returns the batch sizes that `TrainingArguments` determine; the total only if the config names it.

    Args:
        content: the config.
        micro: samples of a micro-batch on one rank.
        accumulation: micro-batches of a step.
        ranks: number of processes.
    """
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

    Args:
        content: the config.
        args: transformers' `TrainingArguments`.
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
    """Returns the values of `TrainingArguments` for the config's schedule.

    Args:
        content: the config.
        args: transformers' `TrainingArguments`.
        steps: steps of the whole training.
    """
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
    """Returns the config of a model that does not train.

    Weights have the tiers of the model that trains; keys that concern steps are dropped. The run has a name of its own
    and is never resumed. Without `device_memory` the engine takes no more device memory than it needs.

    Args:
        config: the config of the model that trains.
        index: number of such models before this one.
    """
    kept = ("zero_optimization", "aio", "bf16", "fp16", "torch_autocast")
    block = dict(config.get("offload") or {})
    for name in ("device_memory", "trace", "log", "drive_tbw"):
        block.pop(name, None)
    name = "reference" if index == 0 else f"reference{index + 1}"
    block |= {"run": f"{value_of(block, 'run') or 'default'}-{name}", "durability": "none", "resume": "never"}
    content = {key: config[key] for key in kept if key in config}
    return {**content, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "offload": block}
