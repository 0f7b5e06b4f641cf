"""The job of `offload train`: a causal language model on text, from options to the last step.

prepare   check all that can be checked, then build          Job
steps     train, one `StepReport` a step
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from offload import probe, text
from offload.config import Config, load_config, resolve_batch
from offload.engine.dtype_choice import settle
from offload.engine.engine import Engine
from offload.engine.initialize import initialize
from offload.engine.json_lines import check_log, cut_log
from offload.errors import ConfigError, OffloadError
from offload.language_model import (
    build_model,
    check_model,
    find_folder,
    keeps_documents_apart,
    make_ready,
    read_tokenizer,
    without_cache,
)
from offload.lora import adapt, parse_lora, require_peft
from offload.planner.foresee import as_step, foresee
from offload.planner.report import in_short
from offload.presets import require_transformers
from offload.records import find_data, read_records
from offload.rows import Rows, encode, encode_text, notices, pack
from offload.swapper.store import run_status
from offload.swapper.timeline import path_of
from offload.train_options import Options, check, chooses_dtype, keep, merge


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
    measured: Mapping[str, float]
    """All else that the engine has measured of it; empty on other ranks than the first."""
    drives: Mapping[str, int]
    """Bytes that the run has written to each drive in its life."""

    def line(self) -> dict[str, Any]:
        """What the log has of it."""
        mine = self._asdict()
        mine |= {name: value for name, value in mine.pop("measured").items() if name not in mine}
        return mine | {"drives": mine.pop("drives"), "time": time.time()}


class Finished(NamedTuple):
    """A run that needs no training: what to say."""

    message: str


class Job(NamedTuple):
    """A run that is ready."""

    engine: Engine
    batches: text.Batches | Rows
    steps: int
    run: str
    folder: str | None
    """The run's folder, where a later process resumes; None without a store."""
    save: Path | None = None
    """Where the model is saved after the last step."""
    tokenizer: Any = None
    """Of the model's folder."""
    always: Mapping[str, Any] = {}
    """What each forward is given beside a batch."""
    predicted: Mapping[str, Any] = {}
    """What was foreseen of a step, by the log's names; empty where nothing was."""

    def save_model(self) -> None:
        """Write the model, or its adapters, and the tokenizer; nothing where nobody asked for it. All ranks call it."""
        if self.save is not None:
            self.engine.save_pretrained(self.save, tokenizer=self.tokenizer)


# -- checks and building ------------------------------------------------------------------------------


def prepare(options: Options, file: Mapping[str, Any] | None, say: Callable[[str], None]) -> Job | Finished:
    """Check everything that can be wrong, then build the model and the engine. `say` gets one line at a time."""
    check(options)
    lora = None if options.lora is None else parse_lora(options.lora)
    content, lines = merge(file, options)
    lines += keep(content) if options.keep else ()
    content |= {"steps_per_print": 0, "wall_clock_breakdown": True}  # for the log and the summary
    config = load_config(content)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    batch = resolve_batch(config, world_size)
    for line in lines:
        say(line)
    if options.log is not None:
        check_log(options.log)
    if config.offload.trace is not None:
        path_of(config.offload.trace, rank, world_size)
    files = find_data(options.data) if options.data else text.find_files(options.text or text.standard_library())
    require_transformers()
    if lora is not None:
        require_peft()
    folder = find_folder(options.model)
    tokenizer = None if folder is None else read_tokenizer(folder)
    share = _Share(batch.micro, batch.accumulation, config.offload.seed, rank, world_size)
    batches, of_data = _batches(options, files, tokenizer, share, keeps_documents_apart(folder))
    done = _finished(config)
    if done is not None:
        return done
    going_on = _goes_on(config)
    check_save(options.save, may_be_there=going_on)
    if chooses_dtype(content):
        content, choice = settle(content)
        if choice is not None:
            say(choice)
    torch.manual_seed(config.offload.seed)
    model, source = build_model(options.model, folder, content)
    check_model(model, options.seq_len, batches.largest_id)
    make_ready(model, options.activation_checkpointing)
    always = without_cache(model)
    if lora is not None:
        model = adapt(model, lora)
    predicted, foreseen = _foreseen(options, model, content, always, going_on) if world_size == 1 else ({}, ())
    engine = initialize(model=model, config=content).engine
    if rank:
        torch.manual_seed(config.offload.seed + rank)  # another dropout on each
    for line in (*engine.notices, *of_data, source, *_changed(engine, options, batches), *foreseen):
        say(line)
    _claim(engine, options.save)
    if options.log is not None and rank == 0:
        cut_log(options.log, engine.global_steps)
    kept = (options.save, tokenizer, always, predicted)
    return Job(engine, batches, options.steps, config.offload.run, engine.resumable, *kept)


class _Share(NamedTuple):
    """What of each step is this rank's."""

    micro: int
    accumulation: int
    seed: int
    rank: int
    world_size: int


def _batches(
    options: Options, files: list[Path], tokenizer: Any, share: _Share, apart: bool
) -> tuple[text.Batches | Rows, tuple[str, ...]]:
    """What is learned, and what a person should know of it. Raises `ConfigError` for a file that is malformed."""
    if options.data:
        records = read_records(files)
        packed = pack(encode(records, tokenizer), options.seq_len, apart)
        rows = Rows(packed, *share)
        rows.with_positions = apart
        return rows, notices(packed, rows, records, tokenizer)
    if tokenizer is None:
        tokens = text.read_bytes(files)
    else:
        tokens = text.read_tokens(files, lambda content: encode_text(content, tokenizer))
    stretches = text.Batches(tokens, share.micro, options.seq_len, share.seed, share.rank, share.world_size)
    return stretches, ()


def _changed(engine: Engine, options: Options, batches: text.Batches | Rows) -> tuple[str, ...]:
    """Commits hold what the text and the adapters are; a line where a resumed run goes on with others."""
    mine = {"seq-len": options.seq_len, "tokens": batches.token_count, "checksum of the text": batches.checksum}
    going_on, state = engine.global_steps > 0, engine.client_state
    held, lora = (state.get("text", mine), state.get("lora")) if going_on else (mine, options.lora)
    state |= {"text": mine, "lora": options.lora}
    changed = [f"{name} {held[name]} is now {value}" for name, value in mine.items() if held.get(name) != value]
    lines = [f"resumed with other text than the run had: {', '.join(changed)}"] if changed else []
    if lora != options.lora:
        lines.append(f"resumed with --lora {options.lora}, and the run had {lora}")
    return tuple(lines)


def _foreseen(
    options: Options, model: nn.Module, content: Mapping[str, Any], always: Mapping[str, Any], going_on: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the planner says of a step, by the log's names, and a line about it. Whatever it cannot do stops no run."""
    found = probe.kept()
    if found is None:
        return {}, ("no prediction: `offload probe` was not run on this machine; it takes a minute, once",)
    try:
        planned = foresee(
            found, model, content, options.seq_len, always, options.activation_checkpointing, going_on=going_on
        )
    except Exception as error:  # what fails here need not fail there, and is told
        kind = "" if isinstance(error, OffloadError) else f"{type(error).__name__}: "
        return {}, (f"no prediction: {kind}{error}",)
    return as_step(planned, psutil.Process().memory_info().rss), (in_short(planned),)


def _goes_on(config: Config) -> bool:
    """Whether there is a run to go on with."""
    wanted = config.offload.resume in ("auto", "must") and bool(config.drives)
    return wanted and run_status(config.drives, config.offload.run).exists


def check_save(folder: Path | None, may_be_there: bool) -> None:
    """Raise `ConfigError` where a model cannot be saved to `folder`; `may_be_there` where the run may have done it."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--save {folder} is not a folder; give a folder, or a name that is not there")
    if folder.exists() and not may_be_there and any(folder.iterdir()):
        raise ConfigError(f"--save {folder} is not empty, and nothing in it will be replaced; give another folder")
    above = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"--save {folder} cannot be made: {above} is no folder that you may write")


def _claim(engine: Engine, folder: Path | None) -> None:
    """Commits hold where the run saves its model: what lies there when it goes on is its own, else refused."""
    if folder is None:
        return
    if engine.client_state.get("save") != str(folder.absolute()):
        try:
            check_save(folder, may_be_there=False)
        except ConfigError:
            engine.destroy(remove=False)
            raise
        engine.client_state["save"] = str(folder.absolute())


def _finished(config: Config) -> Finished | None:
    """What to say where `--resume auto` finds nothing to do; with must that is an error, which `initialize` raises."""
    drives, run = config.drives, config.offload.run
    if not (drives and config.wants_store) or config.offload.resume != "auto":
        return None
    status = run_status(drives, run)
    if status.exists or status.finished is None:
        return None
    ended = f"run {run} under {drives[0]} ended at step {status.finished.get('steps')} on {status.finished.get('date')}"
    return Finished(f"{ended}; nothing to do. --resume never starts it over")


# -- steps --------------------------------------------------------------------------------------------


def about(job: Job) -> dict[str, Any]:
    """What the first line of a log says of its run."""
    engine, config = job.engine, job.engine.config
    predicted = {"predicted": dict(job.predicted)} if job.predicted else {}
    return {
        "run": job.run,
        "model": type(engine.module).__name__,
        "parameters": engine.parameter_count,
        "dtype": next((name for name in ("bf16", "fp16") if config[name]["enabled"]), "fp32"),
        "device": str(engine.device),
        "ranks": engine.world_size,
        "steps": job.steps,
        "samples_a_step": engine.train_batch_size(),
        "host_budget_bytes": engine.host_memory,
        "device_budget_bytes": engine.device_memory,
        "drive_tbw": config["offload"]["drive_tbw"],
        "drive_share": config["offload"]["drive_share"],
        **predicted,
    }


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
            inputs = job.batches.inputs(step, micro_batch)
            part = engine(**inputs, **job.always).loss
            engine.backward(part)
            loss += float(part.detach()) / accumulation
            tokens += inputs["input_ids"].numel() * engine.world_size
        loss = engine.mean(loss)
        with hold():
            engine.step()
            now, after = time.perf_counter(), engine.io_bytes()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            read, written = after.read - moved.read, after.written - moved.written
            drives = {each.path: each.life_bytes for each in engine.drive_writes()}
            yield StepReport(step, loss, norm, lr, tokens, now - last, read, written, engine.measured, drives)
            last, moved = now, after
