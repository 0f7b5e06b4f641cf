"""What a script says and a config may say too: filled in where the config has "auto" or nothing, an error where both
say something else. Pure functions; nothing here knows transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from offload.config import OPTIMIZER_DEFAULTS, SCHEDULES, read_json
from offload.errors import ConfigError
from offload.sizes import count_of


class Said(NamedTuple):
    """What the script says about one key of the config."""

    key: str
    """With dots between blocks."""
    value: Any
    argument: str
    """Its name in the script."""


def content_of(config: Any) -> dict[str, Any]:
    """A copy of the config, a path or a dict, in which bf16 has its newer name."""
    content = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else read_json(config)
    if "bfloat16" in content and "bf16" not in content:
        content["bf16"] = content.pop("bfloat16")
    return content


def filled(content: Mapping[str, Any], said: Iterable[Said]) -> dict[str, Any]:
    """A copy of `content` with all that was `said`. Raises `ConfigError` that names each pair of values that differ."""
    result = copy.deepcopy(dict(content))
    wrong: list[str] = []
    for key, value, argument in said:
        *path, last = key.split(".")
        block: Any = result
        for name in path:
            block[name] = block = dict(block.get(name) or {})
        if block.get(last) in (None, "auto"):
            block[last] = value
        elif not _equal(block[last], value):
            wrong.append(f"{key} is {block[last]!r} in the config, and {argument} is {value!r} in the script")
    if wrong:
        raise ConfigError(
            f"the config and the script do not say the same: {'; '.join(wrong)}. Make them equal, or set the key in "
            f'the config to "auto", which takes the value of the script'
        )
    return result


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return list(mine) == list(theirs)
    return bool(mine == theirs) and isinstance(mine, bool) == isinstance(theirs, bool)


def value_of(content: Mapping[str, Any], key: str) -> Any:
    """What the config has there; None for "auto", and where it has nothing."""
    value: Any = content
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == "auto" else value


def said_of_batches(content: Mapping[str, Any], micro: int, accumulation: int, ranks: int) -> list[Said]:
    """The three batch sizes by the names of `TrainingArguments`; the sum only where the config has it."""
    said = [
        Said("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"),
        Said("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps"),
    ]
    if content.get("train_batch_size") is not None:
        total = f"per_device_train_batch_size * gradient_accumulation_steps * {count_of(ranks, 'rank')}"
        said.append(Said("train_batch_size", micro * accumulation * ranks, total))
    return said


def said_of_optimizer(content: Mapping[str, Any], args: Any) -> list[Said]:
    """What `TrainingArguments` say of the config's optimizer: of Adam all, of others what they have in common."""
    block = content.get("optimizer")
    if not isinstance(block, Mapping):
        return []
    kind = {name.lower(): name for name in OPTIMIZER_DEFAULTS}.get(str(block.get("type", "AdamW")).lower(), "")
    said = [
        Said("optimizer.params.lr", args.learning_rate, "learning_rate"),
        Said("optimizer.params.weight_decay", args.weight_decay, "weight_decay"),
    ]
    if kind in ("Adam", "AdamW"):
        betas = [args.adam_beta1, args.adam_beta2]
        said.append(Said("optimizer.params.betas", betas, "adam_beta1, adam_beta2"))
        said.append(Said("optimizer.params.eps", args.adam_epsilon, "adam_epsilon"))
    return said


def said_of_schedule(content: Mapping[str, Any], args: Any, steps: int) -> list[Said]:
    """What `TrainingArguments` say of the config's schedule, in a training of so many `steps`."""
    block = content.get("scheduler")
    if not isinstance(block, Mapping):
        return []
    kind = next((name for name in SCHEDULES if name.lower() == str(block.get("type")).lower()), None)
    known = SCHEDULES[kind].model_fields if kind else {}
    said = {
        "total_num_steps": (steps, "the steps of the training"),
        "warmup_num_steps": (max(1, args.get_warmup_steps(steps)), "warmup_steps"),
        "warmup_max_lr": (args.learning_rate, "learning_rate"),
    }
    return [Said(f"scheduler.params.{name}", *pair) for name, pair in said.items() if name in known]


def without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The config less some of its blocks."""
    return {key: value for key, value in content.items() if key not in names}
