"""The job of `offload train`: a causal language model on text, from options to the last step.

merge     options and a config file to one config           (pure)
prepare   check all that can be checked, then build          Job
run       steps, each told to a `Listener`
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload import text
from offload.config import load_config, resolve_batch
from offload.engine.birth import init
from offload.engine.engine import Engine
from offload.engine.initialize import initialize
from offload.errors import ConfigError, StoreError
from offload.presets import PRESETS, build, check_name, require_transformers
from offload.swapper.store import run_status

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
    keep: bool = False
    log: Path | None = None


class StepReport(NamedTuple):
    """One step, as the log has it. Bytes and seconds are those between two returns of `step()`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    read_bytes: int
    written_bytes: int


class Finished(NamedTuple):
    """A run that needs no training: what to say."""

    message: str


class Job(NamedTuple):
    """A run that is ready."""

    engine: Engine
    batches: text.Batches
    steps: int
    run: str
    folder: str | None
    """The run's folder, where a later process resumes; None without a store."""


# -- options to one config ----------------------------------------------------------------------------

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
)


def merge(file: Mapping[str, Any] | None, options: Options) -> tuple[dict[str, Any], tuple[str, ...]]:
    """One config out of a config file's content and what was typed; and a line for each key that was overruled.

    Without a file the defaults of the command count; with one, what it does not say means what it means in DeepSpeed,
    but for the learning rate, which may be "auto" or absent.
    """
    merged: dict[str, Any] = json.loads(json.dumps(dict(file or {})))
    lines: list[str] = []
    for name, path, default in _KEYS:
        typed, before = getattr(options, name), _get(merged, path)
        if typed is not None:
            _put(merged, path, typed, f"--{name.replace('_', '-')}", lines)
        elif default is not None and (file is None or (name == "lr" and before in (None, "auto"))):
            _set(merged, path, default)
    if options.nvme_path or file is None:
        _merge_paths(merged, list(options.nvme_path) or ["./swap"], bool(options.nvme_path), lines)
    if options.dtype is not None or file is None:
        wish = (options.dtype or "bf16") == "bf16"
        (_put if options.dtype is not None else _set_quietly)(merged, ("bf16", "enabled"), wish, "--dtype", lines)
        for other in ("fp16", "bfloat16"):
            if options.dtype is not None and _get(merged, (other, "enabled")) not in (None, False):
                _put(merged, (other, "enabled"), False, "--dtype", lines)
    _merge_batch(merged, options, file is not None, lines)
    zero = merged.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        zero.setdefault("stage", 3)
    merged.setdefault("optimizer", {}).setdefault("type", "AdamW")
    return merged, tuple(lines)


def _merge_paths(merged: dict[str, Any], paths: list[str], typed: bool, lines: list[str]) -> None:
    for block in ("offload_optimizer", "offload_param"):
        place = _get(merged, ("zero_optimization", block))
        if isinstance(place, dict) and place.pop("nvme_path", None) is not None and typed:
            lines.append(f"--nvme-path overrules zero_optimization.{block}.nvme_path")
    _set(merged, ("offload", "nvme_path"), paths)


def _merge_batch(merged: dict[str, Any], options: Options, has_file: bool, lines: list[str]) -> None:
    """--batch-size is the samples of a step; the file's accumulation divides it."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if options.batch_size is None:
        if not any(merged.get(key) not in (None, "auto") for key in keys):
            merged["train_batch_size"] = DEFAULT_BATCH_SIZE
        return
    accumulation = merged.get("gradient_accumulation_steps")
    accumulation = int(accumulation) if isinstance(accumulation, int | float) else 1
    if options.batch_size % max(accumulation, 1):
        raise ConfigError(
            f"--batch-size {options.batch_size} is not a multiple of gradient_accumulation_steps {accumulation}"
        )
    if has_file and any(merged.get(key) not in (None, "auto") for key in keys):
        lines.append(f"--batch-size {options.batch_size} overrules {' and '.join(k for k in keys if k in merged)}")
    merged["train_batch_size"] = options.batch_size
    merged.pop("train_micro_batch_size_per_gpu", None)


def _get(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _set(content: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        inner = content.get(key)
        content[key] = inner if isinstance(inner, dict) else {}
        content = content[key]
    content[path[-1]] = value


def _set_quietly(content: dict[str, Any], path: tuple[str, ...], value: Any, flag: str, lines: list[str]) -> None:
    _set(content, path, value)


def _put(content: dict[str, Any], path: tuple[str, ...], value: Any, flag: str, lines: list[str]) -> None:
    """Set a value that was typed, with a line where it overrules another."""
    before = _get(content, path)
    if before is not None and before != value and before != "auto":
        lines.append(f"{flag} {value} overrules {'.'.join(path)} {before}")
    _set(content, path, value)


# -- checks and building ------------------------------------------------------------------------------


def prepare(options: Options, file: Mapping[str, Any] | None, say: Callable[[str], None]) -> Job | Finished:
    """Check everything that can be wrong, then build the model and the engine. `say` gets one line at a time."""
    _check_numbers(options)
    content, lines = merge(file, options)
    config = load_config(content)
    batch = resolve_batch(config, 1)
    for line in lines:
        say(line)
    _check_log(options.log)
    files = text.find_files(options.text or text.standard_library())
    require_transformers()
    folder = _model_folder(options.model)
    tokens = _tokens(folder, files)
    batches = text.Batches(tokens, batch.micro, options.seq_len, config.offload.seed)
    done = _finished(config.drives, config.offload.run, config.offload.resume, options.steps)
    if done is not None:
        return done
    torch.manual_seed(config.offload.seed)
    model = _model(options.model, folder, content)
    _check_model(model, options.seq_len, int(tokens.max()))
    engine = initialize(model=model, config=content).engine
    for line in engine.notices:
        say(line)
    if options.log is not None:
        cut_log(options.log, engine.global_steps)
    return Job(engine, batches, options.steps, config.offload.run, engine.resumable)


def _check_numbers(options: Options) -> None:
    for name, value in (("steps", options.steps), ("batch-size", options.batch_size), ("seq-len", options.seq_len)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if options.seq_len < 2:
        raise ConfigError("--seq-len must be at least 2: a model learns to foresee the next token")
    if options.lr is not None and not (math.isfinite(options.lr) and options.lr >= 0):
        raise ConfigError(f"--lr must be a number of at least 0, got {options.lr}")


def _check_log(log: Path | None) -> None:
    if log is not None and (log.is_dir() or not os.access(log.resolve().parent, os.W_OK)):
        raise ConfigError(f"cannot write the log {log}: give a file in a folder that exists and that you may write")


def _model_folder(name: str) -> Path | None:
    """The folder that `name` is, or None for a preset."""
    path = Path(name)
    if not path.is_dir():
        check_name(name)
        return None
    if name in PRESETS:
        return None
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json, so it is no model folder")
    return path


def _tokens(folder: Path | None, files: list[Path]) -> Any:
    if folder is None:
        return text.read_bytes(files)
    transformers = require_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the tokenizer of {folder}: {error}") from error
    return text.read_tokens(files, lambda content: tokenizer(content)["input_ids"])


def _model(name: str, folder: Path | None, content: Mapping[str, Any]) -> nn.Module:
    if folder is None:
        with init(content):
            return build(name)
    transformers = require_transformers()
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    try:
        if weights:
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
            return model
        shape = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with init(content):
            fresh: nn.Module = transformers.AutoModelForCausalLM.from_config(shape)
            return fresh
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot build the model of {folder}: {error}") from error


def _check_model(model: nn.Module, seq_len: int, largest_id: int) -> None:
    config: Any = model.config
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ConfigError(f"--seq-len {seq_len} is more than the {longest} positions that this model has")
    if largest_id >= config.vocab_size:
        raise ConfigError(f"the text has token {largest_id}, the model's vocabulary only {config.vocab_size}")
    config.use_cache = False


def _finished(drives: tuple[str, ...], run: str, resume: str, steps: int) -> Finished | None:
    """What to say where `--resume auto` finds nothing to do; `StoreError` for must."""
    if not drives or resume == "never":
        return None
    status = run_status(drives, run)
    if status.exists or status.finished is None:
        return None
    ended = f"run {run} under {drives[0]} ended at step {status.finished.get('steps')} on {status.finished.get('date')}"
    if resume == "must":
        raise StoreError(
            f"{ended}, so there is nothing to resume; choose another --run, or --resume never to start over"
        )
    return Finished(f"{ended}; nothing to do. --resume never starts it over")


# -- the log ------------------------------------------------------------------------------------------


def cut_log(path: Path, steps: int) -> None:
    """Keep the whole lines of steps up to `steps`, so that a resumed run appends to what was committed."""
    kept: list[str] = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a kill has torn
                if json.loads(line)["step"] <= steps:
                    kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# -- steps --------------------------------------------------------------------------------------------


def steps(job: Job) -> Iterator[StepReport]:
    """Train, one report a step, from the step after the last committed one."""
    engine, accumulation = job.engine, job.engine.gradient_accumulation_steps()
    engine.train()
    last, moved = time.perf_counter(), engine.io_bytes()
    while engine.global_steps < job.steps:
        step = engine.global_steps + 1
        loss, tokens, lr = 0.0, 0, engine.get_lr()[0]
        for micro_batch in range(accumulation):
            ids = job.batches.batch(step, micro_batch)
            part = engine(input_ids=ids, labels=ids).loss
            engine.backward(part)
            loss += float(part.detach()) / accumulation
            tokens += ids.numel()
            engine.step()
        now, after = time.perf_counter(), engine.io_bytes()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        yield StepReport(
            step, loss, norm, lr, tokens, now - last, after.read - moved.read, after.written - moved.written
        )
        last, moved = now, after
