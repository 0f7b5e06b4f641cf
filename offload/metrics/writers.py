"""Destinations of the numbers of each step: a line for people, TensorBoard, CSV files, JSON lines, Weights & Biases.

    StepMeter ─► StepRecord ─► Reporter ─┬─► ConsoleWriter    at once, on the thread that trains
                                         └─► all others       on a thread of its own, one record after the other

A record contains numbers by name; `events` gives them the names of DeepSpeed's files. The x axis of all events is
samples, as in DeepSpeed. Only rank 0 has a reporter.

Two rules make a reporter safe to leave on:

* A writer that fails (a full disk, a lost server) is reported in one warning and receives no more records. Training
  continues, and so do the other writers.
* No step appears twice in a file. A run that resumes from a commit or a checkpoint trains some steps again: the first
  record of each sequence of steps removes earlier records of the same steps and of later ones. Weights & Biases keeps
  the first record of each step instead.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import logging
import math
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from offload.config import Config
from offload.errors import ConfigError
from offload.fileio import atomic_write, open_inner
from offload.fileio.jsonl import check_log, cut_log, hold_log, json_line
from offload.notices import Headline, announce, show
from offload.report.log import rate_words
from offload.sizes import format_share, format_size
from offload.threads import Thread

# -- writers -------------------------------------------------------------------------------------------
#
# Files and services that receive the numbers of each step.


class StepRecord(NamedTuple):
    """The numbers of one step."""

    step: int
    samples: int
    """Samples of all steps up to this one, on all ranks."""
    values: Mapping[str, float]
    """Numbers of the step by plain names: `*seconds` are seconds, `*_bytes` are bytes."""
    drives: Mapping[str, int] = MappingProxyType({})
    """Bytes that the run has written to each drive so far, including those before a resume."""


class EvaluationRecord(NamedTuple):
    """The numbers of an evaluation between two steps."""

    step: int
    """Steps before the evaluation."""
    samples: int
    """Samples of these steps, on all ranks."""
    loss: float
    seconds: float

    @property
    def values(self) -> Mapping[str, float]:
        """The numbers by plain names, as in a `StepRecord`."""
        return {"eval_loss": self.loss, "eval_seconds": self.seconds}


class MetricWriter:
    """A destination of records. All calls come from one thread; another thread may create the writer.

    An exception of a method ends this writer, and nothing else.
    """

    _last: int | None = None
    """Samples of the last record of this process."""

    def write(self, record: StepRecord) -> None:
        """Writes a record. Before the first one, and one after a return to an earlier step, calls `begin`."""
        if self._last is None or record.samples <= self._last:
            self.begin(record)
        self.add(record)
        self._last = record.samples

    def write_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Writes an evaluation, unless it precedes the first record of this process, which would remove it."""
        if self._last is not None:
            self.add(evaluation)

    def begin(self, first: StepRecord) -> None:
        """Removes what was written of the steps from `first` on."""

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        """Writes one more record."""
        raise NotImplementedError

    def close(self) -> None:
        """Flushes and closes; no record follows."""


_DEEPSPEED: dict[str, tuple[str, float]] = {
    "loss": ("train_loss", 1),
    "lr": ("lr", 1),
    "loss_scale": ("loss_scale", 1),
    "forward_seconds": ("elapsed_time_ms_forward", 1000),
    "backward_seconds": ("elapsed_time_ms_backward", 1000),
    "step_seconds": ("elapsed_time_ms_step", 1000),
}
"""Numbers that DeepSpeed writes too: DeepSpeed's name, and the factor to its unit."""


def events(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Returns the numbers of a record by event name: DeepSpeed's name if it has one, otherwise `Offload/` and ours."""
    named: dict[str, float] = {}
    for name, value in record.values.items():
        if name in _DEEPSPEED:
            deepspeed_name, unit = _DEEPSPEED[name]
            named[f"Train/Samples/{deepspeed_name}"] = value * unit
        else:
            named[f"Offload/{name}"] = value
    return named


def _replaces(first: StepRecord) -> int:
    """Returns the samples from which a sequence of steps replaces older data: 0, hence all, if it begins at step 1."""
    return first.samples if first.step > 1 else 0


class TensorBoardWriter(MetricWriter):
    """Writer of event files in `folder`, by torch's own writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Any = None

    def begin(self, first: StepRecord) -> None:
        self.close()
        # Imported on first use: the package is optional, and its import is slow.
        board = importlib.import_module("torch.utils.tensorboard")
        # A new file, from which on the viewer drops its points.
        self._files = board.SummaryWriter(str(self._folder), purge_step=_replaces(first))

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        for name, value in events(record).items():
            self._files.add_scalar(name, value, record.samples)
        # Flushed after each step, so that the viewer follows and a kill loses little.
        self._files.flush()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None


class CsvWriter(MetricWriter):
    """Writer of a CSV file for each event in `folder`, with lines `step,value`; step counts samples."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, first: StepRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("*.csv")):
            cut(path, _replaces(first))

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        for event, value in events(record).items():
            path, header = self._folder / f"{event.replace('/', '_')}.csv", ("step", event.rpartition("/")[2])
            # Opened for each record, so that a kill loses at most one line.
            with open(path, "a", newline="", encoding="utf-8", opener=_open_csv) as file:
                lines = csv.writer(file)
                if file.tell() == 0:
                    lines.writerow(header)
                lines.writerow((record.samples, value))


def cut(path: Path, samples: int) -> None:
    """Keeps the complete lines of a CSV file of ours that precede `samples`.

    If no line would remain, the file is renamed to `.csv.old` instead, since an earlier run of this name may have
    written it. An older `.csv.old` is replaced.
    """
    with open(path, newline="", encoding="utf-8", errors="replace", opener=_open_csv) as file:
        header, *lines = file.read().split("\n")  # the last is empty, or an incomplete line after a kill
    name = header.rstrip("\r").partition(",")
    if name[0] != "step" or not path.stem.endswith(name[2]):
        return  # not a file of ours
    # The last element is the rest after the last newline, never a complete line.
    earlier = [text for text in lines[:-1] if _samples_of(text) < samples]
    if lines[len(earlier) :] == [""]:
        return
    if not earlier and len(lines) > 1:
        # A new run under the same name must not delete the numbers of an earlier one.
        os.replace(path, path.with_name(f"{path.name}.old"))
        return
    atomic_write(path, "".join(f"{text}\n" for text in (header, *earlier)))


def _open_csv(path: str, flags: int) -> int:
    """Opens a file in a job's folder. Neither file nor folder may be a link, since anybody can guess their names."""
    return open_inner(Path(path), 2, flags, 0o666)


def _samples_of(text: str) -> float:
    """Returns the samples of a line; infinity for a line without a number, so that it is cut."""
    try:
        return float(text.partition(",")[0])
    except ValueError:
        return math.inf


class JsonWriter(MetricWriter):
    """Writer of a file with a JSON object for each step, from which `offload report` makes a page."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Prepares the writer. Each process writes the facts `about` the run into its first line: they may differ."""
        self._path, self._about = path, {"about": about}
        self._lock: IO[str] | None = None
        """The file, open while no other run may write to it."""

    def begin(self, first: StepRecord) -> None:
        self.close()  # a log that is cut is a new file, whose lock is another one
        if (earlier := cut_log(self._path, first.step - 1)) is not None:
            announce(Headline(f"the log of an earlier run is now {earlier}"))
        self._lock = hold_log(self._path)

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        content: dict[str, Any] = {"step": record.step, "time": time.time()}
        if isinstance(record, StepRecord):
            content |= {"samples": record.samples, "drives": dict(record.drives), **self._about}
            self._about = {}
        # Opened for each line, so that a kill loses at most one.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_line(content | dict(record.values)) + "\n")

    def close(self) -> None:
        """Lets other runs write to the file."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class WandbWriter(MetricWriter):
    """Writer to a run of Weights & Biases: the run that the user has begun, or one of our own, which `close` ends."""

    def __init__(self, **settings: str | None) -> None:
        """Joins the run of the user, or begins one with `settings` of `wandb.init`."""
        wandb: Any = importlib.import_module("wandb")
        self._own = wandb.run is None
        try:
            self._run = wandb.init(**settings) if self._own else wandb.run
        except Exception as error:  # wandb raises classes of its own: no login, no server
            raise ConfigError(
                f"wandb cannot begin a run: {error}; log in (`wandb login`), set WANDB_MODE=offline, or leave the "
                '"wandb" block out'
            ) from error

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        self._run.log(events(record), step=record.samples)  # wandb ignores a step below its newest

    def write_evaluation(self, evaluation: EvaluationRecord) -> None:
        self.add(evaluation)

    def close(self) -> None:
        """Ends the run if we began it."""
        if self._own:
            self._run.finish()


# -- line for people ----------------------------------------------------------------------------------

logger = logging.getLogger("offload")
_PHASES = ("forward", "backward", "step")


class ConsoleWriter:
    """Writer of a line every `steps` steps: to the log if a handler takes lines of level INFO, otherwise to stderr."""

    def __init__(self, steps: int, samples: int, memory: bool) -> None:
        self._every, self._samples, self._memory = steps, samples, memory
        self._since: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._last: StepRecord | None = None

    def write(self, record: StepRecord) -> None:
        """Adds a record to the means, and writes a line if one is due."""
        if self._last is not None and record.samples > self._last.samples:  # otherwise a load went back
            self._samples = record.samples - self._last.samples
        self._last = record
        self._steps += 1
        self._since["samples"] += self._samples
        for name, value in record.values.items():
            if name.endswith(("seconds", "_bytes", "collectives")):
                self._since[name] += value
            elif name in ("tflops", "mfu"):  # a mean over the time of the steps that have the rate
                self._since[name] += value * record.values["seconds"]
                self._since[f"{name}_time"] += record.values["seconds"]
        if record.step % self._every == 0:
            mean = {name: total / self._steps for name, total in self._since.items()}
            self._since.clear()
            self._steps = 0
            show(line(record, mean, mean["samples"], self._memory), logger)


def line(record: StepRecord, mean: Mapping[str, float], samples: float, memory: bool) -> str:
    """Returns the line for a person: numbers of this step; seconds, bytes, collectives and samples as means."""
    values = record.values
    texts = [f"{name.replace('_', ' ')} {values[name]:.4g}" for name in ("loss", "lr", "grad_norm") if name in values]
    if values.get("skipped_steps"):
        texts.append(f"{values['skipped_steps']:.0f} skipped")
    if "drive_budget_used" in values:
        texts.append(f"drive budget {format_share(values['drive_budget_used'])}")
    if "host_given_back_bytes" in values:
        texts.append(f"{format_size(values['host_given_back_bytes'])} of RAM given back")
    texts.append(f"{mean['seconds']:.3f} s a step, {samples / max(mean['seconds'], 1e-9):.1f} samples/s")
    rates = {name: mean[name] / mean[f"{name}_time"] for name in ("tflops", "mfu") if mean.get(name)}
    texts += filter(None, [rate_words(rates)])
    texts.append(f"{format_size(round(mean['read_bytes']))} read, {format_size(round(mean['written_bytes']))} written")
    if "sent_bytes" in mean:
        texts.append(f"{format_size(round(mean['sent_bytes']))} sent to ranks in {mean['collectives']:.0f} collectives")
    parts = [f"step {record.step}: {', '.join(texts)}"]
    if "forward_seconds" in mean:
        phases = {name: mean[f"{name}_seconds"] for name in _PHASES}
        phases["else"] = max(mean["seconds"] - sum(phases.values()), 0.0)
        parts.append(", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items()))
        waits = {
            name.removesuffix("_seconds").replace("wait_", ""): seconds
            for name, seconds in mean.items()
            if name.startswith("wait_") and seconds >= 0.0005
        }
        waited = ", ".join(f"{seconds:.3f} s {name.replace('_', ' ')}" for name, seconds in waits.items())
        parts.append(f"waited {waited or 'for nothing'}")
    if memory:
        names = {"host_peak_bytes": "RAM", "device_peak_bytes": "device"}
        peaks = [f"{texts} {format_size(int(values[name]))}" for name, texts in names.items() if name in values]
        parts.append(f"peak of {', '.join(peaks)}")
    return "; ".join(parts)


# -- from a config ------------------------------------------------------------------------------------

_PACKAGES = {"tensorboard": "offload[monitor]", "wandb": "wandb"}


def check_monitor(config: Config) -> None:
    """Raises `ConfigError` if a configured writer is not installed, or cannot write. Creates nothing."""
    for package, what in _PACKAGES.items():
        spec = importlib.util.find_spec(package)
        # A folder of that name, such as wandb makes, is no package.
        if getattr(config, package).enabled and (spec is None or spec.origin is None):
            raise ConfigError(
                f'"{package}" is enabled, but the package {package} is not installed: run `pip install "{what}"`, or '
                f'set "enabled": false (offload train: leave out --report-to {package})'
            )
    if config.offload.log is not None:
        check_log(Path(config.offload.log).absolute())
    for key in ("tensorboard", "csv_monitor"):
        if getattr(config, key).enabled:
            folder = _folder(config, key)
            # The folder is created later, by its writer, so the nearest parent that exists decides.
            there = next(path for path in (folder, *folder.parents) if path.exists())
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                raise ConfigError(
                    f'"{key}" cannot be written to {folder}: {there} is not a folder that you may write; change its '
                    '"output_path"'
                )


def _folder(config: Config, key: str) -> Path:
    block = getattr(config, key)
    job = config.offload.run if block.job_name is None else block.job_name
    return Path(block.output_path, job).absolute()


def make_reporter(config: Config, samples: int, facts: Mapping[str, Any]) -> Reporter | None:
    """Returns the reporter for everything that the config names, or None if nothing is to be measured."""
    writers: dict[str, Callable[[], MetricWriter]] = {}
    if config.tensorboard.enabled:
        writers["tensorboard"] = lambda: TensorBoardWriter(_folder(config, "tensorboard"))
    if config.csv_monitor.enabled:
        writers["csv_monitor"] = lambda: CsvWriter(_folder(config, "csv_monitor"))
    if config.wandb.enabled:
        block = config.wandb
        writers["wandb"] = lambda: WandbWriter(
            project=block.project, entity=block.team, group=block.group, name=block.name
        )
    log = config.offload.log
    if log is not None:
        writers["log"] = lambda: JsonWriter(Path(log).absolute(), facts)
    steps = config.steps_per_line
    shown = ConsoleWriter(steps, samples, config.memory_breakdown) if steps else None
    measures = config.wall_clock_breakdown or config.flops_profiler.enabled
    return Reporter(shown, writers) if shown is not None or writers or measures else None


# -- the reporter -------------------------------------------------------------------------------------


_MOST_PENDING = 1024
"""Records that may wait for a slow writer. Beyond that a step waits for the writer, so that no record is lost."""


class Reporter:
    """Distributor of each record to a line and to writers. All methods belong to the thread that trains."""

    def __init__(self, shown: ConsoleWriter | None, writers: Mapping[str, Callable[[], MetricWriter]]) -> None:
        """Stores the line and the factory of each writer by its name in warnings; `open` calls the factories."""
        self._shown, self._makers = shown, writers
        # None ends the thread.
        self._records: queue.Queue[StepRecord | EvaluationRecord | None] = queue.Queue(_MOST_PENDING)
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Creates the writers, and the thread that calls them.

        Raises:
            ConfigError: if a writer cannot be created.
        """
        writers: dict[str, MetricWriter] = {}
        try:
            for name, make in self._makers.items():
                writers[name] = make()
        except BaseException:
            for name, writer in writers.items():
                _close(name, writer)
            raise
        if writers:
            self._thread = Thread(target=self._run, args=(writers,), name="offload-monitor", daemon=True)
            self._thread.start()

    def report(self, record: StepRecord) -> None:
        if self._shown is not None:
            try:
                self._shown.write(record)
            except OSError as error:  # the console is gone
                self._shown = None
                logger.warning("steps are no longer logged: %s", error)
        if self._thread is not None:
            self._records.put(record)

    def report_evaluation(self, evaluation: EvaluationRecord) -> None:
        if self._thread is not None:
            self._records.put(evaluation)

    def close(self) -> None:
        """Waits until everything is written, and closes the writers. Idempotent."""
        if self._thread is not None:
            self._records.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, writers: dict[str, MetricWriter]) -> None:
        while (record := self._records.get()) is not None:
            # A copy of the items, since a writer that fails is removed in the loop.
            for name, writer in list(writers.items()):
                try:
                    if isinstance(record, StepRecord):
                        writer.write(record)
                    else:
                        writer.write_evaluation(record)
                except Exception as error:
                    logger.warning(
                        'writing to "%s" stopped after step %d, training continues: %s',
                        name,
                        record.step - isinstance(record, StepRecord),
                        error,
                    )
                    del writers[name]
                    # The failure is reported already; an error while closing would add nothing.
                    with contextlib.suppress(Exception):
                        writer.close()
        for name, writer in writers.items():
            _close(name, writer)


def _close(name: str, writer: MetricWriter) -> None:
    try:
        writer.close()
    except Exception as error:
        logger.warning('closing "%s" failed: %s', name, error)
