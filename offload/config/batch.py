"""The three batch sizes, and other values that a config file leaves open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.config.blocks import SCHEDULES, Block
from offload.config.load import schedule_params
from offload.config.schema import Config
from offload.errors import ConfigError
from offload.sizes import count_of


class Batch(NamedTuple):
    """The three batch sizes; total = micro * accumulation * world size."""

    micro: int
    accumulation: int
    total: int


def resolve_batch(config: Config, world_size: int) -> Batch:
    """Returns the three batch sizes with missing ones derived as DeepSpeed does; 1 for each rank if none is given.

    Raises:
        ConfigError: the sizes that are given contradict each other.
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro, accumulation, micro * accumulation * world_size)
    if micro is None:
        accumulation = accumulation or 1
        micro = _third_size(total, "gradient_accumulation_steps", accumulation, world_size)
    elif accumulation is None:
        accumulation = _third_size(total, "train_micro_batch_size_per_gpu", micro, world_size)
    # Also reached with a derived size, which then fits by construction.
    if micro * accumulation * world_size != total:
        raise ConfigError(
            f"train_batch_size must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, but it is "
            f"{total}, and {micro} * {accumulation} * {world_size} is {micro * accumulation * world_size}; "
            f"change one of the three, or leave one out that the others determine"
        )
    return Batch(micro, accumulation, total)


def _third_size(total: int, name: str, size: int, world_size: int) -> int:
    """Returns the third batch size, given the total and the size `size` of key `name`.

    Raises `ConfigError` if the total is not divisible.
    """
    if total % (size * world_size):
        raise ConfigError(
            f"train_batch_size must be a multiple of {name} * ranks, but it is {total}, and {size} * {world_size} is "
            f"{size * world_size}; change one of them"
        )
    return total // (size * world_size)


def effective(config: Config, batch: Batch, world_size: int) -> str:
    """Returns a line about values that a file leaves open: batch sizes, resolved "auto" keys, a changed default."""
    parts = [
        f"{count_of(batch.total, 'sample')} a step = {batch.micro} in a micro-batch * "
        f"{count_of(batch.accumulation, 'micro-batch', 'micro-batches')} * {count_of(world_size, 'rank')}"
    ]
    # DeepSpeed changed this default, so a file without the key may train differently than before.
    if "gradient_clipping" not in {*config.model_fields_set, *config.left_open}:
        parts.append(f"gradient_clipping {config.gradient_clipping:g} by default, which was 0 in older DeepSpeed")
    resolved = [f"{name} {_describe(name, _value(config, batch, name))}" for name in config.left_open]
    if resolved:
        parts.append(f'"auto": {", ".join(resolved)}')
    return f"config: {'; '.join(parts)}"


def _value(config: Config, batch: Batch, name: str) -> Any:
    """Returns the resolved value of the key with dotted name `name`."""
    sizes = dict(
        zip(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), batch, strict=True)
    )
    if name in sizes:
        return sizes[name]
    block, _, key = name.rpartition(".")
    # Defaults of params depend on the type of the optimizer or schedule, so the attributes of the block lack them.
    if block == "optimizer.params" and config.optimizer is not None:
        return config.optimizer.settings.get(key)
    if block == "scheduler.params" and config.scheduler is not None:
        return getattr(schedule_params(SCHEDULES[config.scheduler.type], config.scheduler.params), key)
    value: Any = config
    for part in name.split("."):
        # A block keeps the name that it has in the file, which may be an older one.
        value = getattr(value, value.OLD_NAMES.get(part, part))
    return value


def _describe(name: str, value: Any) -> str:
    """Returns the value of the key `name` for people, as in the line of `effective`."""
    if name == "optimizer.params.lr":
        return "(that of optimizer=)"
    if value is None:
        return "(its default)"  # the absence of a block, of a bound or of a file, or a choice of this library
    return "(its defaults)" if isinstance(value, Block | Mapping) else json.dumps(value)
