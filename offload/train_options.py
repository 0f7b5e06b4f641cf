"""What `offload train` was asked for, and how it becomes one config with what a config file says. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError

DEFAULT_LR = 3e-4
DEFAULT_BATCH_SIZE = 8


class Options(NamedTuple):
    """What was asked for. None is what was not typed: the config's value, or else the default, counts."""

    model: str = "gpt2-tiny"
    text: tuple[Path, ...] = ()
    steps: int = 200
    batch_size: int | None = None
    seq_len: int = 256
    lr: float | None = None
    config: Path | None = None
    offload_param: str | None = None
    offload_optimizer: str | None = None
    nvme_path: tuple[str, ...] = ()
    dtype: str | None = None
    host_memory: str | None = None
    device: str | None = None
    seed: int | None = None
    run: str | None = None
    resume: str | None = None
    durability: str | dict[str, int] | None = None
    keep: bool = False
    data: tuple[Path, ...] = ()
    lora: str | None = None
    activation_checkpointing: bool = False
    save: Path | None = None
    log: Path | None = None
    trace: str | None = None


# option, key in the config, default where neither says
_KEYS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("offload_param", ("zero_optimization", "offload_param", "device"), "nvme"),
    ("offload_optimizer", ("zero_optimization", "offload_optimizer", "device"), "nvme"),
    ("lr", ("optimizer", "params", "lr"), DEFAULT_LR),
    ("host_memory", ("offload", "host_memory"), None),
    ("device", ("offload", "device"), None),
    ("seed", ("offload", "seed"), None),
    ("run", ("offload", "run"), None),
    ("resume", ("offload", "resume"), None),
    ("durability", ("offload", "durability"), None),
    ("trace", ("offload", "trace"), None),
)


def merge(file: Mapping[str, Any] | None, options: Options) -> tuple[dict[str, Any], tuple[str, ...]]:
    """One config out of a config file's content and what was typed; and a line for each key that was overruled.

    Without a file the defaults of the command count; with one, what it does not say means what it means in DeepSpeed,
    but for the learning rate, which may be "auto" or absent, and for bf16.enabled "auto", which is --dtype auto.
    """
    merged: dict[str, Any] = json.loads(json.dumps(dict(file or {})))
    lines: list[str] = []
    for name, path, default in _KEYS:
        typed, before = getattr(options, name), _get(merged, path)
        if typed is not None:
            _overrule(merged, path, typed, f"--{name.replace('_', '-')}", lines)
        elif default is not None and (file is None or (name == "lr" and before in (None, "auto"))):
            _set(merged, path, default)
    if options.dtype is not None:
        _merge_dtype(merged, options.dtype, lines)
    elif file is None:
        _set(merged, ("bf16", "enabled"), "auto")
    _merge_paths(merged, list(options.nvme_path), lines)
    _merge_batch(merged, options.batch_size, lines)
    _merge_schedule(merged, options.steps)
    zero = merged.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        zero.setdefault("stage", 3)
    merged.setdefault("optimizer", {}).setdefault("type", "AdamW")
    if file is None:  # else the file decides, and where it does not, a line says what is done
        merged.setdefault("gradient_clipping", 1.0)
    _merge_line(merged, lines)
    return merged, tuple(lines)


_PATHS = (
    ("zero_optimization", "offload_optimizer", "nvme_path"),
    ("zero_optimization", "offload_param", "nvme_path"),
    ("offload", "nvme_path"),
)


def _merge_paths(merged: dict[str, Any], typed: list[str], lines: list[str]) -> None:
    """Typed paths stand for all three keys; the default counts where none of them is there."""
    named = {path: value for path in _PATHS if (value := _get(merged, path)) not in (None, "auto", [])}
    if typed:
        for path, value in named.items():
            if value not in (typed, *(typed if len(typed) == 1 else ())):
                lines.append(f"--nvme-path {' '.join(typed)} overrules {'.'.join(path)} {_words(value)}")
            _get(merged, path[:-1]).pop("nvme_path")
    if typed or not named:
        _set(merged, _PATHS[-1], typed or ["./swap"])


def _merge_dtype(merged: dict[str, Any], typed: str, lines: list[str]) -> None:
    """--dtype stands for the blocks of all modes; auto leaves bf16 open."""
    bf16 = "bfloat16" if "bfloat16" in merged else "bf16"
    wishes: dict[str, bool | str] = {bf16: "auto" if typed == "auto" else typed == "bf16", "fp16": typed == "fp16"}
    for mode, wish in wishes.items():
        before = _get(merged, (mode, "enabled"))
        if before not in (None, "auto", wish):
            lines.append(f"--dtype {typed} overrules {mode}.enabled {_words(before)}")
        _set(merged, (mode, "enabled"), wish)


def chooses_dtype(merged: Mapping[str, Any]) -> bool:
    """Whether a merged config leaves it to the machine: by default, by --dtype auto or by bf16.enabled "auto"."""
    return any(_get(merged, (mode, "enabled")) == "auto" for mode in ("bf16", "bfloat16"))


def _merge_batch(merged: dict[str, Any], typed: int | None, lines: list[str]) -> None:
    """--batch-size is the samples of a step; the config's accumulation divides it."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    total, micro = (merged.get(key) if isinstance(merged.get(key), int | float) else None for key in keys)
    if typed is None and (total or micro):
        return
    accumulation = merged.get("gradient_accumulation_steps")
    if not isinstance(accumulation, int | float):
        accumulation = total / micro if total and micro else 1
    wish = DEFAULT_BATCH_SIZE if typed is None else typed
    if accumulation >= 1 and wish % accumulation:
        which = "the default" if typed is None else "--batch-size"
        raise ConfigError(
            f"{which} {wish} is not a multiple of gradient_accumulation_steps {accumulation:g}; "
            f"give a --batch-size that is, the samples of a whole step"
        )
    for key, value in zip(keys, (total, micro), strict=True):
        if value is not None and value * (accumulation if key == keys[1] else 1) != wish:
            lines.append(f"--batch-size {wish} overrules {key} {value:g}")
    merged.pop(keys[1], None)
    merged |= {keys[0]: wish, "gradient_accumulation_steps": accumulation}


def _merge_schedule(merged: dict[str, Any], steps: int) -> None:
    """A schedule that asks how long training is gets --steps."""
    kind, params = _get(merged, ("scheduler", "type")), _get(merged, ("scheduler", "params"))
    if str(kind).lower() in ("warmupdecaylr", "warmupcosinelr") and (params is None or isinstance(params, dict)):
        if _get(params, ("total_num_steps",)) in (None, "auto"):
            _set(merged, ("scheduler", "params", "total_num_steps"), steps)


def _merge_line(merged: dict[str, Any], lines: list[str]) -> None:
    """This command tells of each step itself: the engine does not print another line."""
    asked = [key for key in ("wall_clock_breakdown", "memory_breakdown") if merged.get(key) is True]
    every = merged.get("steps_per_print")
    if asked or isinstance(every, int | float):
        if isinstance(every, int | float) and 0 < every < math.inf:
            asked.insert(0, "steps_per_print")
        merged["steps_per_print"] = 0
    if asked:
        lines.append(
            f"{', '.join(asked)}: this command has a progress line of its own; numbers of each step go to tensorboard, "
            f"csv_monitor and wandb"
        )


def _get(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _set(content: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(path[:-1], 1):
        inner = content.get(key)
        if inner is None or inner is True or inner is False:  # "zero_optimization": true is a stage
            inner = {} if inner is None or key != "zero_optimization" else {"stage": int(inner)}
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path[:depth])} must be a block of keys, got {_words(inner)}")
        content[key] = inner
        content = inner
    content[path[-1]] = value


def _words(value: Any) -> str:
    """A value of the config, as it stands there."""
    return value if isinstance(value, str) else json.dumps(value)


def _overrule(content: dict[str, Any], path: tuple[str, ...], value: Any, flag: str, lines: list[str]) -> None:
    """Set a value that was typed, with a line where it overrules another."""
    before = _get(content, path)
    unsaid = (None, "auto") if path[0] != "offload" else (None,)  # there "auto" is a choice of its own
    if before not in unsaid and before != value:
        lines.append(f"{flag} {_words(value)} overrules {'.'.join(path)} {_words(before)}")
    _set(content, path, value)


def check(options: Options) -> None:
    """Raise `ConfigError` for options that cannot be, or cannot go together."""
    for name, value in (("steps", options.steps), ("batch-size", options.batch_size), ("seq-len", options.seq_len)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if options.seq_len < 2:
        raise ConfigError("--seq-len must be at least 2: a model learns to foresee the next token")
    if options.text and options.data:
        raise ConfigError("--text and --data are two ways to read: stretches of text, or documents; give one of them")
    if options.lr is not None and not (math.isfinite(options.lr) and options.lr >= 0):
        raise ConfigError(f"--lr must be a number of at least 0, got {options.lr}")


def keep(content: dict[str, Any]) -> tuple[str, ...]:
    """Swap files that are to be kept must be durable; `content` asks for that, so that a lack of room is an error."""
    path = ("offload", "durability")
    wish = _get(content, path)
    if wish == "none":
        raise ConfigError("--keep with durability none: nothing could be exported or resumed; leave one of them out")
    if wish not in (None, "auto"):
        return ()
    _set(content, path, "step")
    return ("--keep: durability is step, since nothing else could be exported or resumed",)
