"""The job of `offload train`: a causal language model on text, from options to the last step.

prepare   check all that can be checked, then build          Job
steps     train, one `StepReport` a step
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from offload import probe, training_data
from offload.config import Config, load_config, resolve_batch
from offload.engine.dtype_choice import settle
from offload.engine.engine import Engine
from offload.engine.initialize import initialize
from offload.engine.json_lines import check_log, cut_log
from offload.errors import ConfigError, OffloadError, StoreError
from offload.evaluation import Evaluation
from offload.fileio import atomic_write
from offload.job_identity import Identity, differences, other_model, weights_of
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
from offload.swapper.store import run_status
from offload.swapper.timeline import path_of
from offload.train_options import (
    DEFAULT_STEPS,
    Options,
    Start,
    check,
    chooses_dtype,
    decay_groups,
    keep,
    merge,
    schedule,
    settings_of,
)
from offload.training_data import Data, Share, steps_of


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


class Saved(NamedTuple):
    """The model was written after so many steps."""

    step: int
    folder: Path


class Finished(NamedTuple):
    """A run that needs no training: what to say, and what was asked for."""

    message: str
    run: str
    steps: int
    output: Path | None


class Job(NamedTuple):
    """A run that is ready."""

    engine: Engine
    data: Data
    steps: int
    run: str
    folder: str | None
    """The run's folder, where a later process resumes; None without a store."""
    identity: Identity
    output: Path | None = None
    """Where the model is saved after the last step."""
    save_every: int | None = None
    """After how many steps each it is saved below there, too."""
    eval_every: int = 0
    """After how many steps each it is evaluated; 0 for never."""
    tokenizer: Any = None
    """Of the model's folder."""
    always: Mapping[str, Any] = {}
    """What each forward is given beside a batch."""
    predicted: Mapping[str, Any] = {}
    """What was foreseen of a step, by the log's names; empty where nothing was."""

    def save_model(self) -> None:
        """Write the model, or its adapters, and the tokenizer; nothing where nobody asked for it. All ranks call it."""
        if self.output is not None:
            self.engine.save_pretrained(self.output, tokenizer=self.tokenizer)
            if self.engine.global_rank == 0:
                (self.output / _MARK).unlink(missing_ok=True)

    def finish(self, remove: bool) -> None:
        """Close the engine after the last step. All ranks call it.

        Args:
            remove: whether the swap files go; a note stays that the job is done.
        """
        if remove:
            self.engine.finish({"job": self.identity._asdict()})
        else:
            self.engine.destroy(remove=False)


# -- checks and building ------------------------------------------------------------------------------


def prepare(options: Options, file: Mapping[str, Any] | None, say: Callable[[str], None]) -> Job | Finished:
    """Check everything that can be wrong, then build the model and the engine. `say` gets one line at a time."""
    check(options)
    lora = None if options.lora is None else parse_lora(options.lora)
    folder = find_folder(options.model)
    content, lines = merge(file, options, Start.of(folder, options.lora is not None))
    lines += keep(content) if options.keep else ()
    content |= {"steps_per_print": 0, "wall_clock_breakdown": True}  # for the log and the summary
    config = load_config(schedule(content, options, options.steps or DEFAULT_STEPS)[0])
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    batch = resolve_batch(config, world_size)
    for line in lines:
        say(line)
    if options.log is not None:
        check_log(options.log)
    if config.offload.trace is not None:
        path_of(config.offload.trace, rank, world_size)
    files = training_data.find(options)
    require_transformers()
    if lora is not None:
        require_peft()
    tokenizer = None if folder is None else read_tokenizer(folder)
    share = Share(batch.micro, batch.accumulation, config.offload.seed, rank, world_size)
    data = training_data.read(options, files, tokenizer, share, keeps_documents_apart(folder))
    steps = steps_of(options, DEFAULT_STEPS, data.batches)
    content, lines = schedule(content, options, steps)
    for line in lines:
        say(line)
    mine = _identity(options, folder, data, steps, settings_of(content))
    done = _finished(config, mine)
    if done is not None:
        return done
    going_on = _goes_on(config)
    check_output(options.output, may_be_there=going_on or _is_marked(options.output, mine))
    _check_apart(options.output, config)
    if chooses_dtype(content):
        content, choice = settle(content)
        if choice is not None:
            say(choice)
    torch.manual_seed(config.offload.seed)
    model, source = build_model(options.model, folder, content)
    check_model(model, options.seq_len, data.largest_id)
    make_ready(model, options.gradient_checkpointing)
    always = without_cache(model)
    if lora is not None:
        model = adapt(model, lora)
    predicted, foreseen = _foreseen(options, model, content, always, going_on) if world_size == 1 else ({}, ())
    decay = content["optimizer"].get("params", {}).get("weight_decay", 0.0)
    engine = initialize(model=model, model_parameters=_groups(model, decay), config=content).engine
    if rank:
        torch.manual_seed(config.offload.seed + rank)  # another dropout on each
    if engine.resumable is None and options.resume in ("auto", "must"):
        say(f"--resume {options.resume}: no step of this run is committed, so a run that is stopped begins again")
    for line in (*engine.notices, *data.lines, source, *_resumed(engine, mine), *foreseen):
        say(line)
    if options.log is not None and rank == 0:
        cut_log(options.log, engine.global_steps)
    return Job(
        engine,
        data,
        steps,
        config.offload.run,
        engine.resumable,
        mine,
        options.output,
        options.save_every,
        0 if data.held_out is None else options.eval_every or max(1, steps // _EVALUATIONS),
        tokenizer,
        always,
        predicted,
    )


_EVALUATIONS = 5
"""How often a run evaluates, by default."""


def _groups(model: nn.Module, decay: Any) -> Any:
    """The model's parameters, in groups where there is a decay; a value that is no number is the config's to refuse."""
    if not isinstance(decay, int | float) or not decay:
        return None
    return decay_groups(model.parameters(), decay)


def _identity(options: Options, folder: Path | None, data: Data, steps: int, settings: Mapping[str, Any]) -> Identity:
    batches = data.batches
    text = {"seq-len": options.seq_len, "tokens": batches.token_count, "checksum": batches.checksum}
    model = options.model if folder is None else str(folder.absolute())
    output = None if options.output is None else str(options.output.absolute())
    return Identity(model, weights_of(folder), options.lora, text, output, steps, settings)


def _resumed(engine: Engine, mine: Identity) -> tuple[str, ...]:
    """Have commits hold whose they are; lines where a resumed run goes on with other data or adapters.

    Raises `StoreError` where it is another model's run, `ConfigError` where its model would be saved among other files.
    """
    before = engine.client_state.get("job")
    lines: list[str] = []
    try:
        if before is not None and engine.global_steps:
            other = other_model(mine, before)
            if other is not None:
                raise StoreError(
                    f"the run in {engine.resumable} is another job's: {other}; give that model, another --run, or "
                    f"--resume restart"
                )
            kept = before | {"settings": mine.settings, "steps": mine.steps}  # the engine has lines for them
            lines += [f"resumed, and {words}" for words in differences(mine, kept)]
        marked = mine.output is not None and _is_marked(Path(mine.output), mine)
        if (before is None or before.get("output") != mine.output) and not marked:
            check_output(None if mine.output is None else Path(mine.output), may_be_there=False)
    except (ConfigError, StoreError):
        engine.destroy(remove=False)
        raise
    engine.client_state["job"] = mine._asdict()
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
            found, model, content, options.seq_len, always, options.gradient_checkpointing, going_on=going_on
        )
    except Exception as error:  # what fails here need not fail there, and is told
        kind = "" if isinstance(error, OffloadError) else f"{type(error).__name__}: "
        return {}, (f"no prediction: {kind}{error}",)
    return as_step(planned, psutil.Process().memory_info().rss), (in_short(planned),)


def _goes_on(config: Config) -> bool:
    """Whether there is a run to go on with."""
    wanted = config.offload.resume in ("auto", "must") and bool(config.drives)
    return wanted and run_status(config.drives, config.offload.run).exists


def check_output(folder: Path | None, may_be_there: bool) -> None:
    """Raise `ConfigError` where a model cannot be saved to `folder`; `may_be_there` where the run may have done it."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is not a folder; give a folder, or a name that is not there")
    if folder.exists() and not may_be_there and any(folder.iterdir()):
        raise ConfigError(f"--output {folder} is not empty, and nothing in it will be replaced; give another folder")
    above = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".offload-", dir=above))  # what access() says is not so for root, or on NFS
    except OSError as error:
        raise ConfigError(
            f"--output {folder} cannot be written: nothing can be made in {above} ({error.strerror}); give another "
            f"folder"
        ) from error


_MARK = ".offload-job.json"
"""In a folder of checkpoints whose job has not ended: whose they are, so that it may begin again after a kill."""


def _is_marked(folder: Path | None, mine: Identity) -> bool:
    """Whether this job, and no other, has written to the folder."""
    try:
        before = {} if folder is None else json.loads((folder / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(before, dict) and bool(before) and not [*differences(mine, before)]


def _check_apart(folder: Path | None, config: Config) -> None:
    """Raise `ConfigError` where a model would lie among the swap files, with which it would be deleted."""
    if folder is None:
        return
    for drive in config.drives:
        run = Path(drive).resolve() / config.offload.run
        if run in (folder.resolve(), *folder.resolve().parents):
            raise ConfigError(f"--output {folder} lies in the run's own folder {run}, which goes; give another folder")


def _finished(config: Config, mine: Identity) -> Finished | None:
    """What to say where `--resume auto` finds nothing to do; with must that is an error, which `initialize` raises.

    Raises `StoreError` where it was another job that ended there.
    """
    drives, run = config.drives, config.offload.run
    if not (drives and config.wants_store) or config.offload.resume != "auto":
        return None
    status = run_status(drives, run)
    if status.exists or status.finished is None:
        return None
    ended = f"run {run} under {drives[0]} ended at step {status.finished.get('steps')} on {status.finished.get('date')}"
    job = status.finished.get("job")
    if isinstance(job, dict):
        others = [*differences(mine, job)]
        if others:
            raise StoreError(
                f"{ended}, and was not this job: {'; '.join(others)}. Give another --run, or --resume restart to begin "
                f"this one in its place"
            )
        if mine.output is not None and not any(Path(mine.output, name).is_file() for name in _HEADS):
            raise StoreError(
                f"{ended}, and the model that it saved in {mine.output} is not there any more; --resume restart trains "
                f"it again"
            )
    output = None if mine.output is None else Path(mine.output)
    again = "--resume restart begins it again" + (", with another --output" if output is not None else "")
    return Finished(f"{ended}; nothing to do. {again}", run, mine.steps, output)


_HEADS = ("config.json", "adapter_config.json")
"""Of a model, and of adapters."""


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


def steps(
    job: Job, hold: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[StepReport | Evaluation | Saved]:
    """Train, one report a step, from the step after the last committed one; and one of what is between steps.

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
            inputs = job.data.batches.inputs(step, micro_batch)
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
        evaluates = job.eval_every and (step % job.eval_every == 0 or step == job.steps)
        saves = job.save_every and step % job.save_every == 0 and step < job.steps  # the last is saved for itself
        if not (evaluates or saves):
            continue
        engine.synchronize()  # what is left of the step belongs to the next one's numbers, as it does without a pause
        began, before = time.perf_counter(), engine.io_bytes()
        if evaluates:
            yield evaluate(job)
        if saves:
            with hold():
                yield _saved(job)
        after = engine.io_bytes()
        last += time.perf_counter() - began
        moved = type(moved)(moved.read + after.read - before.read, moved.written + after.written - before.written)


def evaluate(job: Job) -> Evaluation:
    """The loss on what was held out, without dropout. All ranks call it, between steps."""
    engine, held_out, begin = job.engine, job.data.held_out, time.perf_counter()
    assert held_out is not None

    def loss_of(inputs: Mapping[str, torch.Tensor]) -> float:
        return float(engine(**inputs, **job.always).loss)

    engine.eval()
    try:
        with torch.no_grad():
            loss = held_out.loss(loss_of, engine.mean)
    finally:
        engine.train()
    return Evaluation(engine.global_steps, loss, time.perf_counter() - begin)


def _saved(job: Job) -> Saved:
    """Write the model as it is after this step, whole or not at all."""
    assert job.output is not None
    folder = job.output / f"checkpoint-{job.engine.global_steps}"
    if job.engine.global_rank == 0:
        job.output.mkdir(parents=True, exist_ok=True)
        atomic_write(job.output / _MARK, json.dumps(job.identity._asdict()))
    job.engine.save_pretrained(folder, tokenizer=job.tokenizer)
    return Saved(job.engine.global_steps, folder)
