"""The job of `offload train`: checks first, then construction of the model and its engine.

Building the model may take minutes, so `prepare` first checks everything that can be checked without the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from offload.config import Config, load_config
from offload.config.script_values import refuse_shared_batches
from offload.distributed.process_group import join_launcher
from offload.dtype_choice import settle
from offload.engine.engine import Engine
from offload.engine.setup import start
from offload.errors import ConfigError, OffloadError, StoreError
from offload.fileio import check_writable
from offload.fileio.jsonl import check_log, cut_log
from offload.finetune.corpus.chats import Example
from offload.finetune.corpus.data import Data, Share, find_files, read_files, steps_of
from offload.finetune.kernels import Kernels, apply_kernels, choose_kernels
from offload.finetune.model import (
    adapt,
    build_model,
    byte_tokenizer,
    check_model,
    decay_groups,
    find_folder,
    keeps_documents_apart,
    make_ready,
    parse_lora,
    read_tokenizer,
    require_peft,
    without_cache,
)
from offload.finetune.options import (
    DEFAULT_SEQ_LEN,
    DEFAULT_STEPS,
    Options,
    Start,
    as_record,
    batch_of,
    check,
    chooses_dtype,
    keep,
    merge,
    schedule,
    settings_of,
)
from offload.finetune.output import (
    MARK,
    Finished,
    Identity,
    arithmetic,
    check_apart,
    check_output,
    differences,
    find_finished,
    is_identity,
    is_marked,
    other_model,
    output_of,
    weights_of,
)
from offload.hardware import probe
from offload.hardware.system import folder_notices
from offload.hub import check_push, local_model
from offload.launch.environment import rank_number
from offload.layout.peak_memory import BesideBudgets
from offload.losses.causal_model import ChosenLoss, as_begun, choose_loss, would_be_chunked
from offload.metrics.flops import Peak, peak_of
from offload.notices import Remark
from offload.passes.layer_major import watched
from offload.planner.model_shape import config_of
from offload.planner.output import in_short
from offload.planner.predict_run import as_step, predict, step_of
from offload.planner.sustained import sustained_steps
from offload.presets import check_positions, positions_of, require_transformers
from offload.swapper.memory.device import compute_device, let_segments_grow
from offload.swapper.store import run_status
from offload.timeline import path_of

WARNING = "warning: "
"""Start of a line that warns of a risk, or of a request that is not fulfilled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that is ready to train."""

    engine: Engine
    data: Data
    steps: int
    run: str
    folder: str | None
    """Run folder from which a later process resumes; None if the run makes no commits."""
    identity: Identity
    output: Path | None = None
    """Folder for the model after the last step; None to save nothing."""
    save_every: int | None = None
    """Steps between saves into subfolders of `output`; None for no such saves."""
    eval_every: int = 0
    """Steps between evaluations; 0 for none."""
    tokenizer: Any = None
    """Tokenizer that is saved with the model: of its folder, or of bytes for a preset."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of each forward, in addition to the batch."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """Prediction of a step, under the log's keys; empty without a prediction."""
    flops: float | None = None
    """Operations of the model in a step; None where they were not counted, as on several ranks."""
    peak: Peak | None = None
    """The peak of the device in the dtype of the run; None if it is not known."""

    def save_model(self) -> None:
        """Saves the model or adapters and the tokenizer, and removes the mark, if `output` is set. All ranks call."""
        if self.output is not None:
            self.engine.save_pretrained(self.output, tokenizer=self.tokenizer)
            if self.engine.global_rank == 0:
                (self.output / MARK).unlink(missing_ok=True)

    def finish(self, remove: bool) -> None:
        """Closes the engine after the last step; `remove` deletes the swap files, and notes that the job is finished.

        Collective.
        """
        if remove:
            self.engine.finish({"job": self.identity._asdict()})
        else:
            self.engine.destroy(remove=False)


# -- checks and building ------------------------------------------------------------------------------


def prepare(options: Options, file: Mapping[str, Any] | None, say: Callable[[str], None]) -> Job | Finished | Example:
    """Checks options, config and files, then builds the model and the engine. All ranks must call.

    `file` is the content of the config file; `say` receives lines for the user, one at a time. The result is a
    `Finished` if an identical job has ended under `--resume auto`, and an example of the data for `--show-batch`.
    """
    check(options)
    if options.show_batch:  # nothing is written, so what is in the way of an output or a log does not matter
        options = replace(options, output=None, save_every=None, no_output=True, push_to_hub=None, log=None)
    lora = None if options.lora is None else parse_lora(options.lora)
    options = replace(options, model=local_model(options.model))
    folder = find_folder(options.model, adapters=lora is not None)
    join_launcher()  # no process group exists yet
    rank, world_size = (rank_number(os.environ, *variable) for variable in (("RANK", 0), ("WORLD_SIZE", 1)))
    content, lines = merge(file, options, Start.of(folder, lora is not None), world_size)
    lines += keep(content) if options.keep else ()
    # Each rank of `offload train` draws its own batches, so ranks cannot share sequences.
    refuse_shared_batches(content, "offload train")
    # The log and the summary need the phases; the command prints its own line per step.
    content |= {"steps_per_print": 0, "wall_clock_breakdown": True}
    steps = options.steps or DEFAULT_STEPS
    if options.epochs is not None:
        # The number depends on the data. The warm-up is compared with the real number later, so it must pass here.
        steps = max(DEFAULT_STEPS, int(options.warmup or 0))
    config = load_config(schedule(content, options, steps)[0])
    batch = batch_of(config, options.length, world_size)
    output, saved = output_of(options, config.offload.run)
    options = replace(options, output=output)
    _say_all(lines, say)
    # An earlier process of this run may have saved the model already.
    goes_on = False
    if config.offload.resume in ("auto", "must") and config.drives:
        status = run_status(config.drives, config.offload.run)
        goes_on = status.exists or status.finished is not None
    if not goes_on and not (output is not None and (output / MARK).exists()):
        check_output(output, may_be_there=False)
    if options.log is not None:
        check_log(options.log, "--log")
    if config.offload.trace is not None:
        check_writable(path_of(config.offload.trace, rank, world_size), '"trace"')
    # Cheap checks come first: reading the data may take minutes, and building the model longer.
    files = find_files(options)
    require_transformers()
    if options.push_to_hub is not None:
        check_push(options.push_to_hub)
    if lora is not None:
        require_peft()
    shape = config_of(options.model)
    if options.seq_len is None:
        options = replace(options, seq_len=min(DEFAULT_SEQ_LEN, positions_of(shape) or DEFAULT_SEQ_LEN))
    check_positions(shape, options.length)
    tokenizer = None if folder is None else read_tokenizer(folder)
    share = Share(batch.micro, batch.accumulation, config.offload.seed, rank, world_size)
    data = read_files(options, files, tokenizer, share, keeps_documents_apart(folder))
    if options.show_batch:
        _say_all(data.lines, say)
        return data.first_row(tokenizer)
    steps = steps_of(options, DEFAULT_STEPS, data.batches)  # with --epochs known only after the data are packed
    content, lines = schedule(content, options, steps)
    _say_all(lines, say)
    identity = _identity(options, folder, data, steps, content)
    if (done := find_finished(config, identity)) is not None:
        return done
    # This check must follow `find_finished`: the output folder of a finished run contains a model and would be refused.
    resumes = config.offload.resume in ("auto", "must") and _has_files(config)
    check_output(output, resumes or is_marked(output, identity))
    check_apart(output, config)
    say(saved)
    let_segments_grow(config.offload.device)  # before CUDA is used, for the dtype; `initialize` reports the result
    if chooses_dtype(content):
        content, choice = settle(content)
        if choice is not None:
            say(choice)
    torch.manual_seed(config.offload.seed)  # the same on all ranks here, so that all build the same initial weights
    model, source = build_model(options.model, folder, content)
    check_model(model, options.length, data.largest_id)
    make_ready(model, options.gradient_checkpointing)
    always = without_cache(model)
    if lora is not None:
        model = adapt(model, lora)
    # The prediction runs the model as it is, before placeholders replace its parameters and chunks its logits.
    forecast = Forecast()
    if world_size == 1:
        forecast = _forecast(options, model, content, always, _has_files(config))
    kernels = choose_kernels(options.kernels, config, model, compute_device(config.offload.device))
    apply_kernels(model, kernels.kind, config)
    loss = choose_loss(model, options.chunked_loss, off="--no-chunked-loss", evaluation=True)
    # Notices on swap folders that the engine will create. The engine itself warns of wrong folders.
    places = folder_notices(config.drives) if config.wants_store else ()
    new_folders = [line for line in places if isinstance(line, Remark)]
    engine = _engine(options, model, content, config, rank, say, forecast)
    resumed, identity = _resumed(engine, identity, loss, kernels.kind)
    # All that computes the steps again.
    command = {"options": as_record(replace(options, model=identity.model)), "config": dict(content)}
    engine.client_state["command"] = command | {"arithmetic": arithmetic()}
    # A resumed run takes the weights from its swap files, not from their original source.
    example = () if data.example is None else (data.example,)
    begun = resumed if engine.global_steps else (*example, source, *resumed)
    begun = begun if kernels.line is None else (*begun, kernels.line)
    # Information first, then warnings, so that the steps follow the warnings: lines that are no `Remark`s.
    remarks = [line for line in engine.notices if isinstance(line, Remark)]
    warnings = [f"{WARNING}{line}" for line in engine.notices if not isinstance(line, Remark)]
    _say_all((*remarks, *new_folders, *data.lines, *begun, *forecast.notices, *warnings), say)
    return Job(
        engine=engine,
        data=data,
        steps=steps,
        run=config.offload.run,
        folder=engine.resumable,
        identity=identity,
        output=options.output,
        save_every=options.save_every,
        eval_every=0 if data.held_out is None else options.eval_every or max(1, steps // _EVALUATIONS),
        tokenizer=byte_tokenizer() if tokenizer is None else tokenizer,
        always=always,
        predicted=forecast.predicted,
        flops=forecast.flops,
        peak=peak_of(engine.device, config.dtype),
    )


def _say_all(lines: Iterable[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line)


def _engine(
    options: Options,
    model: nn.Module,
    content: dict[str, Any],
    config: Config,
    rank: int,
    say: Callable[[str], None],
    forecast: Forecast,
) -> Engine:
    """Puts the model under an engine, and cuts the log back to the step that the engine resumes from."""
    decay = content["optimizer"].get("params", {}).get("weight_decay", 0.0)
    # The config's own check refuses a weight decay that is not a number.
    decays = isinstance(decay, int | float) and decay
    groups = decay_groups(model.parameters(), decay) if decays else None
    engine = start(
        model=model, model_parameters=groups, config=content, beside=forecast.beside, whole_steps=forecast.whole_steps
    ).engine
    if rank:
        # Each rank needs other dropout masks. The first call of a resumed engine restores the saved state.
        torch.manual_seed(config.offload.seed + rank)
    if engine.resumable is None and options.resume in ("auto", "must"):
        say(f"--resume {options.resume}: no step of this run is committed, so a stopped run starts again")
    if options.log is not None and rank == 0 and (earlier := cut_log(options.log, engine.global_steps)) is not None:
        say(f"the log of an earlier run is now {earlier}")
    return engine


_EVALUATIONS = 5
"""Default number of evaluations in a run."""


def _identity(options: Options, folder: Path | None, data: Data, steps: int, content: Mapping[str, Any]) -> Identity:
    """Returns the identity of this job, with absolute paths: a later process may have another working directory."""
    batches = data.batches
    text = {"seq-len": options.length, "tokens": batches.token_count, "checksum": batches.checksum}
    model = options.model if folder is None else str(folder.absolute())
    output = None if options.output is None else str(options.output.absolute())
    return Identity(
        model=model,
        weights=weights_of(folder),
        lora=options.lora,
        text=text,
        output=output,
        steps=steps,
        settings=settings_of(content),
        schedule=content.get("scheduler"),
        chunked_loss=options.chunked_loss,
        kernels=None if options.kernels == "auto" else options.kernels,
    )


def _resumed(
    engine: Engine, identity: Identity, loss: ChosenLoss, kernels: Kernels
) -> tuple[tuple[str, ...], Identity]:
    """Stores the job's identity in the engine for its commits. A resumed run computes its loss as it began.

    Returns lines on the loss and on each difference from the run, and the identity with the loss and the kernels of the
    run. A resumed run may have other data or adapters, but not another model.

    Raises:
        StoreError: the run belongs to another model.
        ConfigError: the output folder already contains files that are not this job's.
    """
    job = engine.client_state.get("job")
    before = dict(job) if is_identity(job) else {}
    if engine.global_steps:
        # Identities of earlier versions do not record the loss: these versions computed it from all logits.
        loss = as_begun(loss, identity.chunked_loss, bool(before.get("chunked_loss")))
    whole = identity._replace(chunked_loss=loss.chunked, kernels=kernels)
    lines = [] if loss.line is None else [loss.line]
    try:
        if before and engine.global_steps:
            other = other_model(identity, before)
            if other is not None:
                raise StoreError(
                    f"the run in {engine.resumable} belongs to another job: {other}; give that model, with its files "
                    "as they were, another --run, or --resume restart"
                )
            # Not compared here: the engine reports changed settings itself, and the number of steps may change.
            expected = before | {"settings": identity.settings, "steps": identity.steps, "schedule": identity.schedule}
            # An earlier version records neither: it had torch's own kernels, and computed the loss from all logits.
            expected["chunked_loss"] = bool(before.get("chunked_loss"))
            expected["kernels"] = before.get("kernels") or "eager"
            lines += [f"resumed, and {words}" for words in differences(whole, expected)]
        marked = identity.output is not None and is_marked(Path(identity.output), identity)
        if before.get("output") != identity.output and not marked:
            check_output(None if identity.output is None else Path(identity.output), may_be_there=False)
    except (ConfigError, StoreError):
        engine.destroy(remove=False)
        raise
    engine.client_state["job"] = whole._asdict()
    return tuple(lines), whole


class Forecast(NamedTuple):
    """What is known of a step before the first."""

    predicted: Mapping[str, Any] = {}
    """The prediction under the log's keys; empty without one."""
    notices: tuple[str, ...] = ()
    beside: Mapping[str, BesideBudgets] = {}
    """The step's memory beside the budgets."""
    whole_steps: bool = False
    """True if the model keeps no value between two blocks: micro-batches may take turns in every step."""
    flops: float | None = None
    """Operations of the model."""


def _forecast(
    options: Options, model: nn.Module, content: Mapping[str, Any], always: Mapping[str, Any], has_files: bool
) -> Forecast:
    """Returns the forecast of a step. No failure here stops the run."""
    forecast = Forecast()
    try:
        chunked = would_be_chunked(model, options.chunked_loss)
        with watched(model) as kept:
            step = step_of(model, content, options.length, always, options.gradient_checkpointing, chunked)
        step = step._replace(load=step.load._replace(whole_steps=kept == [None]))
        forecast = forecast._replace(flops=step.operations, beside=step.beside, whole_steps=step.load.whole_steps)
        rates = probe.kept()
        if rates is None:
            line = "no prediction: `offload probe` was not run on this machine; it takes a minute, once"
            return forecast._replace(notices=(line,))
        planned = predict(rates, step, has_files)
        sustained = sustained_steps(planned, assumed=False)
    except Exception as error:  # a failed prediction must not stop the run; the line contains the reason
        kind = "" if isinstance(error, OffloadError) else f"{type(error).__name__}: "
        return forecast._replace(notices=(f"no prediction: {kind}{error}",))
    resident = psutil.Process().memory_info().rss
    line = in_short(planned, sustained)
    return forecast._replace(predicted=as_step(planned, resident, sustained), notices=(line,))


def _has_files(config: Config) -> bool:
    """Returns True if the run has swap files, which a start takes over or deletes."""
    return bool(config.drives) and run_status(config.drives, config.offload.run).exists
