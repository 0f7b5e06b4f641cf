"""Merge of a script's values into a config.

A key that the config leaves out or sets to "auto" takes the script's value; two different values are an error. Pure
functions, which do not depend on transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from offload.config import OPTIMIZER_DEFAULTS, SCHEDULES, read_json
from offload.config.blocks.values import spelled_number
from offload.errors import ConfigError
from offload.sizes import count_of

DEFAULT_OPTIMIZER = "AdamW"
"""The `optimizer.type` of a config whose block `optimizer` has no type."""


class ScriptValue(NamedTuple):
    """A value that the script determines for one key of the config."""

    key: str
    """Path of the key, with dots between blocks."""
    value: Any
    argument: str
    """Name of the value in the script, for errors."""


def content_of(config: Any) -> dict[str, Any]:
    """Returns a copy of the config, given as a path or a mapping, with "bfloat16" renamed to "bf16"."""
    content = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else read_json(config)
    if "bfloat16" in content and "bf16" not in content:
        content["bf16"] = content.pop("bfloat16")
    return content


def filled(content: Mapping[str, Any], values: Iterable[ScriptValue]) -> dict[str, Any]:
    """Returns a copy of `content` in which the values of the script replace "auto", null and missing keys.

    Args:
        content: the config.
        values: values of the script.

    Raises:
        ConfigError: if a value of the config differs from that of the script; the message lists all such keys.
    """
    result = copy.deepcopy(dict(content))
    wrong: list[str] = []
    for key, value, argument in values:
        *path, last = key.split(".")
        block: Any = result
        for name in path:
            inner = block.get(name)
            # A block may be missing, null or "auto" in JSON; each becomes a new block.
            inner = {} if inner in (None, "auto") else inner
            if not isinstance(inner, Mapping):
                break  # such as "bf16": true, which `load_config` refuses with the right spelling
            # Python assigns from left to right: first the copy is stored in its parent, then `block` becomes the copy.
            block[name] = block = dict(inner)
        else:
            if block.get(last) in (None, "auto"):
                block[last] = value
            elif not _equal(block[last], value):
                wrong.append(f"{key} is {block[last]!r} in the config, and {argument} is {value!r} in the script")
    if wrong:
        raise ConfigError(
            f"the config and the script disagree: {'; '.join(wrong)}. Make them equal, or set the key in "
            f'the config to "auto", which takes the value of the script'
        )
    return result


def _equal(mine: Any, theirs: Any) -> bool:
    """Returns True if two values of JSON mean the same: a list and a tuple, "1e-3" and 0.001, but not True and 1."""
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))
    same = mine == theirs or spelled_number(mine) == spelled_number(theirs)
    # In Python True == 1; in a config they are different values.
    return bool(same) and isinstance(mine, bool) == isinstance(theirs, bool)


def value_of(content: Mapping[str, Any], key: str) -> Any:
    """Returns the config's value at a dotted key; None for "auto" and for a key that is missing."""
    value: Any = content
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == "auto" else value


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


def without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the config without the blocks `names`."""
    return {key: value for key, value in content.items() if key not in names}


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
