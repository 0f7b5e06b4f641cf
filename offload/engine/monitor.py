"""Where the numbers of each step go: a line for people, TensorBoard, CSV files, JSON lines, Weights & Biases.

    Meter ─► Record ─► Reporter ─┬─► Line                          at once, on the thread that trains
                                 └─► all others   on a thread of its own, one record after the other

A record is numbers by name; `events` gives them the names that DeepSpeed's files have. The x of all events is samples,
as there. Rank 0 alone has a reporter.

Two rules make it safe to leave switched on:

* A writer that fails (a full disk, a server that is gone) is told of in one warning and gets no more records. Training
  goes on, and so do the other writers.
* A step is never there twice. A run that goes on from a commit or a checkpoint trains some steps again: the first
  record of each stretch of steps takes away what was written of the same steps before, and of later ones.
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
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from offload.config import Config
from offload.engine.json_lines import check_log, cut_log, json_line
from offload.errors import ConfigError
from offload.fileio import atomic_write
from offload.sizes import format_size

logger = logging.getLogger("offload")


class Record(NamedTuple):
    """The numbers of one step."""

    step: int
    samples: int
    """Of all steps up to this one, on all ranks."""
    values: Mapping[str, float]
    """By plain names: seconds in `*seconds`, bytes in `*_bytes`, means over the micro-batches."""
    drives: Mapping[str, int] = MappingProxyType({})
    """Bytes that the run has written to each drive so far, before it was resumed too."""


class Writer(Protocol):
    """What keeps records. All calls come from one thread, but that it is made by another."""

    def write(self, record: Record) -> None:
        """Keep one more. Whatever it raises ends this writer, and nothing else."""

    def close(self) -> None:
        """No more will come."""


_DEEPSPEED: dict[str, tuple[str, float]] = {
    "loss": ("train_loss", 1),
    "lr": ("lr", 1),
    "loss_scale": ("loss_scale", 1),
    "forward_seconds": ("elapsed_time_ms_forward", 1000),
    "backward_seconds": ("elapsed_time_ms_backward", 1000),
    "step_seconds": ("elapsed_time_ms_step", 1000),
}
"""Numbers that DeepSpeed writes too: how it calls them, and its unit."""


def events(record: Record) -> dict[str, float]:
    """The numbers of a record by the names of events: DeepSpeed's where it has one, else `Offload/` and ours."""
    named: dict[str, float] = {}
    for name, value in record.values.items():
        if name in _DEEPSPEED:
            theirs, unit = _DEEPSPEED[name]
            named[f"Train/Samples/{theirs}"] = value * unit
        else:
            named[f"Offload/{name}"] = value
    return named


# -- the line -----------------------------------------------------------------------------------------

_PHASES = ("forward", "backward", "step")


class Line:
    """A line each `every` steps: to the log where somebody listens to it, else to the console (stderr)."""

    def __init__(self, every: int, samples: int, memory: bool) -> None:
        """`samples` are those of the first step; `memory` has peaks of it in the line."""
        self._every, self._samples, self._memory = every, samples, memory
        self._since: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._last: Record | None = None

    def write(self, record: Record) -> None:
        if self._last is not None and record.samples > self._last.samples:  # else a load has gone back
            self._samples = record.samples - self._last.samples
        self._last = record
        self._steps += 1
        self._since["samples"] += self._samples
        for name, value in record.values.items():
            if name.endswith(("seconds", "_bytes")):
                self._since[name] += value
        if record.step % self._every == 0:
            mean = {name: total / self._steps for name, total in self._since.items()}
            self._since.clear()
            self._steps = 0
            _say(line(record, mean, mean["samples"], self._memory))

    def close(self) -> None:
        pass


def line(record: Record, mean: Mapping[str, float], samples: float, memory: bool) -> str:
    """What a person reads: loss and such of this step; seconds, bytes, samples by their mean over the steps since."""
    values = record.values
    words = [f"{name.replace('_', ' ')} {values[name]:.4g}" for name in ("loss", "lr", "grad_norm") if name in values]
    if values.get("skipped_steps"):
        words.append(f"{values['skipped_steps']:.0f} skipped")
    words.append(f"{mean['seconds']:.3f} s a step, {samples / max(mean['seconds'], 1e-9):.1f} samples/s")
    words.append(f"{format_size(round(mean['read_bytes']))} read, {format_size(round(mean['written_bytes']))} written")
    parts = [f"step {record.step}: {', '.join(words)}"]
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
        peaks = [f"{words} {format_size(int(values[name]))}" for name, words in names.items() if name in values]
        parts.append(f"peak of {', '.join(peaks)}")
    return "; ".join(parts)


def _say(words: str) -> None:
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(words)
    elif logger.level <= logging.INFO:  # nobody has asked this library to be silent
        print(words, file=sys.stderr, flush=True)


# -- writers ------------------------------------------------------------------------------------------


def _replaces(first: Record) -> int:
    """The samples from which on a stretch of steps replaces what was written before; of a run that begins, all."""
    return first.samples if first.step > 1 else 0


class TensorBoard:
    """Event files in `folder`, by torch's own writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Any = None
        self._last = 0

    def write(self, record: Record) -> None:
        if self._files is None or record.samples <= self._last:  # its viewer drops what it has from here on
            self.close()
            board = importlib.import_module("torch.utils.tensorboard")
            self._files = board.SummaryWriter(str(self._folder), purge_step=_replaces(record))
        for name, value in events(record).items():
            self._files.add_scalar(name, value, record.samples)
        self._files.flush()
        self._last = record.samples

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None


class CsvFiles:
    """A file for each event in `folder`, of lines `step,value`, where step is samples."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: int | None = None

    def write(self, record: Record) -> None:
        if self._last is None or record.samples <= self._last:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._folder.glob("*.csv")):
                cut(path, _replaces(record))
        for event, value in events(record).items():
            path, header = self._folder / f"{event.replace('/', '_')}.csv", ("step", event.rpartition("/")[2])
            with path.open("a", newline="", encoding="utf-8") as file:
                lines = csv.writer(file)
                if file.tell() == 0:
                    lines.writerow(header)
                lines.writerow((record.samples, value))
        self._last = record.samples

    def close(self) -> None:
        pass


def cut(path: Path, samples: int) -> None:
    """Keep the whole lines of a CSV file of ours that come before `samples`.

    Where none is left an earlier run of this name has written it, and it is kept beside it, as `.csv.old`.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header, *lines = file.read().split("\n")  # after the last one there is nothing, or what a kill has torn
    name = header.rstrip("\r").partition(",")
    if name[0] != "step" or not path.stem.endswith(name[2]):
        return  # somebody else's
    kept = [text for text in lines[:-1] if _samples_of(text) < samples]
    if lines[len(kept) :] == [""]:
        return
    if not kept and len(lines) > 1:
        os.replace(path, path.with_name(f"{path.name}.old"))
        return
    atomic_write(path, "".join(f"{text}\n" for text in (header, *kept)))


def _samples_of(text: str) -> float:
    """Where a line stands; infinity for one that is none."""
    try:
        return float(text.partition(",")[0])
    except ValueError:
        return math.inf


class JsonLines:
    """A file with a JSON object a step, which `offload report` makes a page of."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """`about` the run goes into the first line of each process."""
        self._path, self._about = path, about
        self._last: int | None = None

    def write(self, record: Record) -> None:
        more: dict[str, Any] = {} if self._last is not None else {"about": self._about}
        if self._last is None or record.step <= self._last:
            cut_log(self._path, record.step - 1)
        with self._path.open("a", encoding="utf-8") as file:
            head = {"step": record.step, "samples": record.samples, "time": time.time()}
            file.write(json_line({**head, **record.values, "drives": dict(record.drives), **more}) + "\n")
        self._last = record.step

    def close(self) -> None:
        pass


class Wandb:
    """A run of Weights & Biases: the one that the user has begun, or one of our own, ended by `close`."""

    def __init__(self, **settings: str | None) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._own = wandb.run is None
        try:
            self._run = wandb.init(**settings) if self._own else wandb.run
        except Exception as error:  # classes of its own: no login, no server
            raise ConfigError(
                f"wandb does not begin a run: {error}; log in (`wandb login`), set WANDB_MODE=offline, or leave the "
                f'"wandb" block out'
            ) from error

    def write(self, record: Record) -> None:
        self._run.log(events(record), step=record.samples)  # of a step that it has seen it takes nothing

    def close(self) -> None:
        if self._own:
            self._run.finish()


# -- from a config ------------------------------------------------------------------------------------

_PACKAGES = {"tensorboard": "offload[monitor]", "wandb": "wandb"}


def check_monitor(config: Config) -> None:
    """Raise `ConfigError` where what the config asks for is not installed, or cannot be written. Nothing is made."""
    for package, what in _PACKAGES.items():
        if getattr(config, package).enabled and not _is_installed(package):
            raise ConfigError(
                f'"{package}" is enabled, but the package {package} is not installed: run `pip install "{what}"`, or '
                f'set "enabled": false'
            )
    if config.offload.log is not None:
        check_log(Path(config.offload.log).absolute())
    for key in ("tensorboard", "csv_monitor"):
        if getattr(config, key).enabled:
            folder = _folder(config, key)
            there = next(path for path in (folder, *folder.parents) if path.exists())
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                raise ConfigError(
                    f'"{key}" cannot be written to {folder}: {there} is no folder that you may write; change its '
                    f'"output_path"'
                )


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder that is called so, such as wandb makes, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _folder(config: Config, key: str) -> Path:
    block = getattr(config, key)
    job = config.offload.run if block.job_name is None else block.job_name
    return Path(block.output_path, job).absolute()


def make_reporter(config: Config, samples: int) -> Reporter | None:
    """What gives records to all that the config names; None where nothing is to be measured. `samples`: of a step."""
    writers: dict[str, Callable[[], Writer]] = {}
    if config.tensorboard.enabled:
        writers["tensorboard"] = lambda: TensorBoard(_folder(config, "tensorboard"))
    if config.csv_monitor.enabled:
        writers["csv_monitor"] = lambda: CsvFiles(_folder(config, "csv_monitor"))
    if config.wandb.enabled:
        block = config.wandb
        writers["wandb"] = lambda: Wandb(project=block.project, entity=block.team, group=block.group, name=block.name)
    ours, log = config.offload, config.offload.log
    if log is not None:
        about = {"run": ours.run, "drive_tbw": ours.drive_tbw, "drive_share": ours.drive_share}
        writers["log"] = lambda: JsonLines(Path(log).absolute(), {**about, "samples_a_step": samples})
    every = config.steps_per_line
    shown = Line(every, samples, config.memory_breakdown) if every else None
    return Reporter(shown, writers) if shown is not None or writers or config.wall_clock_breakdown else None


# -- the reporter -------------------------------------------------------------------------------------


class Reporter:
    """Gives each record to a line and to writers. All methods belong to the thread that trains."""

    def __init__(self, shown: Writer | None, writers: Mapping[str, Callable[[], Writer]]) -> None:
        """`writers` are made by `open`, and named in warnings."""
        self._shown, self._makers = shown, writers
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Make the writers, and the thread that they are called on. Raises `ConfigError`."""
        writers: dict[str, Writer] = {}
        try:
            for name, make in self._makers.items():
                writers[name] = make()
        except BaseException:
            for name, writer in writers.items():
                _close(name, writer)
            raise
        if writers:
            self._thread = threading.Thread(target=self._run, args=(writers,), name="offload-monitor", daemon=True)
            self._thread.start()

    def tell(self, record: Record) -> None:
        """Show the record, and have it written."""
        if self._shown is not None:
            try:
                self._shown.write(record)
            except OSError as error:  # a console that is gone
                self._shown = None
                logger.warning("no more lines about steps: %s", error)
        if self._thread is not None:
            self._records.put(record)

    def close(self) -> None:
        """Wait until all is written, and close the writers. Idempotent."""
        if self._thread is not None:
            self._records.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, writers: dict[str, Writer]) -> None:
        while (record := self._records.get()) is not None:
            for name, writer in list(writers.items()):
                try:
                    writer.write(record)
                except Exception as error:
                    logger.warning(
                        'nothing more is written for "%s" after step %d, and training goes on: %s',
                        name,
                        record.step - 1,
                        error,
                    )
                    del writers[name]
                    with contextlib.suppress(Exception):
                        writer.close()
        for name, writer in writers.items():
            _close(name, writer)


def _close(name: str, writer: Writer) -> None:
    try:
        writer.close()
    except Exception as error:
        logger.warning('"%s" was not closed as it should be: %s', name, error)
