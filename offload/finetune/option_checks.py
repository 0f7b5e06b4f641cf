"""Checks of the options of `offload train`, before a file of data is read."""

from __future__ import annotations

import math
from pathlib import Path

from offload.config import Config, resolve_batch
from offload.config.batch import Batch
from offload.errors import ConfigError
from offload.finetune.options import FLAGS, Options
from offload.sizes import format_size
from offload.swapper.memory.limits import free_host_memory

_LARGEST = 2**31 - 1
"""Largest number of steps, sequences or tokens: what numpy and torch index must not overflow."""


def check(options: Options) -> None:
    """Raises `ConfigError` for options that are out of range or contradict each other."""
    for name in ("steps", "batch_size", "accumulation", "seq_len", "save_every", "log_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if value is not None and value > _LARGEST:
            raise ConfigError(f"--{name.replace('_', '-')} must be at most {_LARGEST}, got {value}")
    for name in ("lr", "weight_decay", "grad_clip", "warmup", "eval_every"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number of at least 0, got {value}")
    if options.seq_len < 2:
        raise ConfigError("--seq-len must be at least 2: a model learns to predict the next token")
    if options.warmup is not None and options.warmup >= 1 and options.warmup % 1:
        raise ConfigError(f"--warmup must be a fraction of the steps below 1, or a number, got {options.warmup}")
    if options.epochs is not None and not (math.isfinite(options.epochs) and options.epochs > 0):
        raise ConfigError(f"--epochs must be a number above 0, got {options.epochs}")
    if options.steps is not None and options.epochs is not None:
        raise ConfigError("--steps and --epochs both set the length of the training; give one of them")
    if options.text and options.data:
        raise ConfigError("--text and --data are two ways to read: segments of text, or documents; give one of them")
    if options.eval_data and options.eval_every == 0:
        raise ConfigError("--eval-data is not used with --eval-every 0, which never evaluates; leave one of them out")
    if (
        options.log is not None
        and options.trace is not None
        and Path(options.trace).absolute() == options.log.absolute()
    ):
        raise ConfigError(f"--log and --trace need two files, got {options.log} for both")
    if options.load_in_4bit and options.load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other; give one of them")
    if options.frozen is not None and options.lora is None:
        raise ConfigError(
            f"{FLAGS[options.frozen]} stores frozen weights in fewer bits, and without --lora none is frozen; give "
            "--lora too"
        )
    if options.no_output and options.output is not None:
        raise ConfigError(f"--no-output and --output {options.output} exclude each other; give one of them")
    if options.save_every is not None and options.no_output:
        raise ConfigError("--save-every writes the model below --output, and --no-output writes none; leave one out")


def batch_of(config: Config, seq_len: int, world_size: int) -> Batch:
    """Returns the batch sizes of a run, whose token ids of a step fit into the free memory.

    Args:
        config: the config.
        seq_len: tokens of a sequence.
        world_size: number of ranks.

    Raises:
        ConfigError: the sizes contradict each other, or the ids alone do not fit.
    """
    batch = resolve_batch(config, world_size)
    ids, free = batch.micro * batch.accumulation * seq_len * 8, free_host_memory()  # int64
    if ids > free:
        raise ConfigError(
            f"--batch-size, --accumulation and --seq-len give each rank token ids of {format_size(ids)} a step, and "
            f"{format_size(free)} are free; make one of them smaller"
        )
    return batch
