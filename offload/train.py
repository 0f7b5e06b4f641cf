"""The job of `offload train`: a causal language model on text, from options to the last step.

merge     options and a config file to one config           (pure)
prepare   check all that can be checked, then build          Job
steps     train, one `StepReport` a step
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload import text
from offload.config import Config, load_config, resolve_batch
from offload.engine.birth import init
from offload.engine.engine import Engine
from offload.engine.initialize import initialize
from offload.errors import ConfigError, StoreError
from offload.presets import PRESETS, build, check_name, require_transformers
from offload.swapper.store import run_status
from offload.swapper.timeline import path_of

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
    log: Path | None = None
    trace: str | None = None


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
    ("durability", ("offload", "durability"), None),
    ("trace", ("offload", "trace"), None),
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
    if options.dtype is not None:
        _merge_dtype(merged, options.dtype, lines)
    elif file is None:
        _set(merged, ("bf16", "enabled"), True)
    _merge_paths(merged, list(options.nvme_path), lines)
    _merge_batch(merged, options.batch_size, lines)
    _merge_schedule(merged, options.steps)
    zero = merged.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        zero.setdefault("stage", 3)
    merged.setdefault("optimizer", {}).setdefault("type", "AdamW")
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
    """--dtype stands for the blocks of all modes."""
    for mode in ("bf16", "bfloat16", "fp16"):
        before, wish = _get(merged, (mode, "enabled")), typed == {"bfloat16": "bf16"}.get(mode, mode)
        if before not in (None, "auto", wish):
            lines.append(f"--dtype {typed} overrules {mode}.enabled {_words(before)}")
        if before is not None:
            _set(merged, (mode, "enabled"), wish)
    if "bfloat16" not in merged:
        _set(merged, ("bf16", "enabled"), typed == "bf16")
    _set(merged, ("fp16", "enabled"), typed == "fp16")


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


def _put(content: dict[str, Any], path: tuple[str, ...], value: Any, flag: str, lines: list[str]) -> None:
    """Set a value that was typed, with a line where it overrules another."""
    before = _get(content, path)
    unsaid = (None, "auto") if path[0] != "offload" else (None,)  # there "auto" is a choice of its own
    if before not in unsaid and before != value:
        lines.append(f"{flag} {_words(value)} overrules {'.'.join(path)} {_words(before)}")
    _set(content, path, value)


# -- checks and building ------------------------------------------------------------------------------


def prepare(options: Options, file: Mapping[str, Any] | None, say: Callable[[str], None]) -> Job | Finished:
    """Check everything that can be wrong, then build the model and the engine. `say` gets one line at a time."""
    _check_numbers(options)
    content, lines = merge(file, options)
    lines += _keep(content) if options.keep else ()
    config = load_config(content)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    batch = resolve_batch(config, world_size)
    for line in lines:
        say(line)
    _check_log(options.log)
    if config.offload.trace is not None:
        path_of(config.offload.trace, rank, world_size)
    files = text.find_files(options.text or text.standard_library())
    require_transformers()
    folder = _model_folder(options.model)
    tokens = _tokens(folder, files)
    batches = text.Batches(tokens, batch.micro, options.seq_len, config.offload.seed, rank, world_size)
    done = _finished(config)
    if done is not None:
        return done
    torch.manual_seed(config.offload.seed)
    model = _model(options.model, folder, content)
    _check_model(model, options.seq_len, int(tokens.max()))
    engine = initialize(model=model, config=content).engine
    if rank:
        torch.manual_seed(config.offload.seed + rank)  # another dropout on each
    for line in (*engine.notices, *_other_text(engine, batches, options.seq_len)):
        say(line)
    if options.log is not None and rank == 0:
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


def _keep(content: dict[str, Any]) -> tuple[str, ...]:
    """Swap files that are to be kept must be durable; `content` asks for that, so that a lack of room is an error."""
    path = ("offload", "durability")
    wish = _get(content, path)
    if wish == "none":
        raise ConfigError("--keep with durability none: nothing could be exported or resumed; leave one of them out")
    if wish not in (None, "auto"):
        return ()
    _set(content, path, "step")
    return ("--keep: durability is step, since nothing else could be exported or resumed",)


def _other_text(engine: Engine, batches: text.Batches, seq_len: int) -> tuple[str, ...]:
    """Commits hold what the text is; a line where a resumed run goes on with another."""
    mine = {"seq-len": seq_len, "tokens": batches.token_count, "checksum of the text": batches.checksum}
    held = engine.client_state.get("text", mine) if engine.global_steps else mine
    engine.client_state["text"] = mine
    changed = [f"{name} {held[name]} is now {value}" for name, value in mine.items() if held.get(name) != value]
    return (f"resumed with other text than the run had: {', '.join(changed)}",) if changed else ()


def _check_log(log: Path | None) -> None:
    if log is not None and (log.is_dir() or not os.access(log if log.exists() else log.resolve().parent, os.W_OK)):
        raise ConfigError(f"cannot write the log {log}: give a file in a folder that exists and that you may write")
    if log is not None and log.is_file():
        with log.open(errors="replace") as file:
            first = file.readline()
        if first.strip() and not _step_of(first):
            raise ConfigError(f"{log} is no log of a run, and would be overwritten; give another file")


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
    except Exception as error:  # tokenizers raises bare Exception
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
    except Exception as error:  # safetensors and tokenizers raise classes of their own
        raise ConfigError(f"cannot build the model of {folder}: {error}") from error


def _check_model(model: nn.Module, seq_len: int, largest_id: int) -> None:
    whole: Any = model.config
    config = whole.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ConfigError(f"--seq-len {seq_len} is more than the {longest} positions that this model has")
    if largest_id >= config.vocab_size:
        raise ConfigError(f"the text has token {largest_id}, the model's vocabulary only {config.vocab_size}")
    whole.use_cache = config.use_cache = False
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # what the library would take, after a warning


def _finished(config: Config) -> Finished | None:
    """What to say where `--resume auto` finds nothing to do; `StoreError` for must."""
    drives, run, resume = config.drives, config.offload.run, config.offload.resume
    has_store = "nvme" in (config.weight_tier, config.optimizer_tier) or config.offload.wants_store
    if not (drives and has_store) or resume == "never":
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
    path = path.resolve()
    if not path.is_file():
        return  # none yet, or a device or pipe
    lines = path.read_text(errors="replace").split("\n")
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.writelines(f"{line}\n" for line in lines if 0 < _step_of(line) <= steps)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _step_of(line: str) -> int:
    """The step that a line of the log tells of; 0 for one that a kill has torn."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return 0
    return step if isinstance(step, int) else 0


# -- steps --------------------------------------------------------------------------------------------


def steps(job: Job, hold: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[StepReport]:
    """Train, one report a step, from the step after the last committed one.

    `hold()` is a context in which no signal raises. It spans the end of a step and the use of its report, so that a
    stopped run has told of every step that it commits.
    """
    engine, accumulation = job.engine, job.engine.gradient_accumulation_steps()
    engine.train()
    last, moved = time.perf_counter(), engine.io_bytes()
    while engine.global_steps < job.steps:
        step, lr = engine.global_steps + 1, engine.get_lr()[0]
        loss, tokens = 0.0, 0
        for micro_batch in range(accumulation):
            if micro_batch:
                engine.step()
            ids = job.batches.batch(step, micro_batch)
            part = engine(input_ids=ids, labels=ids).loss
            engine.backward(part)
            loss += float(part.detach()) / accumulation
            tokens += ids.numel() * engine.world_size
        loss = engine.mean(loss)
        with hold():
            engine.step()
            now, after = time.perf_counter(), engine.io_bytes()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            read, written = after.read - moved.read, after.written - moved.written
            yield StepReport(step, loss, norm, lr, tokens, now - last, read, written)
            last, moved = now, after
