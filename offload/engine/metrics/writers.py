"""Files and services to which the numbers of each step are written."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Protocol

from offload.errors import ConfigError
from offload.fileio import atomic_write
from offload.fileio.jsonl import cut_log, hold_log, json_line
from offload.notices import Headline, announce


class Record(NamedTuple):
    """The numbers of one step."""

    step: int
    samples: int
    """Samples of all steps up to this one, on all ranks."""
    values: Mapping[str, float]
    """Numbers of the step by plain names: `*seconds` are seconds, `*_bytes` are bytes."""
    drives: Mapping[str, int] = MappingProxyType({})
    """Bytes that the run has written to each drive so far, including those before a resume."""


class Evaluated(NamedTuple):
    """The numbers of an evaluation between two steps."""

    step: int
    """Steps before the evaluation."""
    samples: int
    """Samples of these steps, on all ranks."""
    loss: float
    seconds: float

    @property
    def values(self) -> Mapping[str, float]:
        """The numbers by plain names, as those of a step."""
        return {"eval_loss": self.loss, "eval_seconds": self.seconds}


class Writer(Protocol):
    """Interface of a destination of records. All calls come from one thread; another thread may create the writer."""

    def write(self, record: Record) -> None:
        """Writes one more record. An exception ends this writer, and nothing else."""

    def write_evaluation(self, evaluation: Evaluated) -> None:
        """Writes an evaluation, behind the record of its step. Exceptions are as those of `write`."""

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


def events(record: Record | Evaluated) -> dict[str, float]:
    """Returns the numbers of a record by event name: DeepSpeed's name if it has one, otherwise `Offload/` and ours."""
    named: dict[str, float] = {}
    for name, value in record.values.items():
        if name in _DEEPSPEED:
            theirs, unit = _DEEPSPEED[name]
            named[f"Train/Samples/{theirs}"] = value * unit
        else:
            named[f"Offload/{name}"] = value
    return named


def _replaces(first: Record) -> int:
    """Returns the samples from which a sequence of steps replaces older data: 0, hence all, if it begins at step 1."""
    return first.samples if first.step > 1 else 0


class TensorBoard:
    """Writer of event files in `folder`, by torch's own writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Any = None
        self._last = 0

    def write(self, record: Record) -> None:
        """Writes a record. After a return to an earlier step, a new file tells the viewer to drop later points."""
        if self._files is None or record.samples <= self._last:  # the viewer drops its points from here on
            self.close()
            # Imported on first use: the package is optional, and its import is slow.
            board = importlib.import_module("torch.utils.tensorboard")
            self._files = board.SummaryWriter(str(self._folder), purge_step=_replaces(record))
        self._add(record)
        self._last = record.samples

    def write_evaluation(self, evaluation: Evaluated) -> None:
        """Writes an evaluation. One before the first record of this process is left out: the viewer would drop it."""
        if self._files is not None:
            self._add(evaluation)

    def _add(self, record: Record | Evaluated) -> None:
        for name, value in events(record).items():
            self._files.add_scalar(name, value, record.samples)
        # Flushed after each step, so that the viewer follows and a kill loses little.
        self._files.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._files is not None:
            self._files.close()
            self._files = None


class CsvFiles:
    """Writer of a CSV file for each event in `folder`, with lines `step,value`, in which step counts samples."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: int | None = None

    def write(self, record: Record) -> None:
        """Writes a record. The first one, and one after a return to an earlier step, cuts the files first."""
        if self._last is None or record.samples <= self._last:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._folder.glob("*.csv")):
                cut(path, _replaces(record))
        self._add(record)
        self._last = record.samples

    def write_evaluation(self, evaluation: Evaluated) -> None:
        """Writes an evaluation. One before the first record of this process is left out: that record cuts the files."""
        if self._last is not None:
            self._add(evaluation)

    def _add(self, record: Record | Evaluated) -> None:
        for event, value in events(record).items():
            path, header = self._folder / f"{event.replace('/', '_')}.csv", ("step", event.rpartition("/")[2])
            # Opened for each record, so that a kill loses at most one line.
            with path.open("a", newline="", encoding="utf-8") as file:
                lines = csv.writer(file)
                if file.tell() == 0:
                    lines.writerow(header)
                lines.writerow((record.samples, value))

    def close(self) -> None:
        """Does nothing: each record closes its files."""


def cut(path: Path, samples: int) -> None:
    """Keeps the complete lines of a CSV file of ours that precede `samples`.

    If no line would remain, the file is renamed to `.csv.old` instead, since an earlier run of this name may have
    written it. An older `.csv.old` is replaced.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header, *lines = file.read().split("\n")  # the last is empty, or an incomplete line after a kill
    name = header.rstrip("\r").partition(",")
    if name[0] != "step" or not path.stem.endswith(name[2]):
        return  # not a file of ours
    # The last element is the rest after the last newline, never a complete line.
    kept = [text for text in lines[:-1] if _samples_of(text) < samples]
    if lines[len(kept) :] == [""]:
        return
    if not kept and len(lines) > 1:
        # A new run under the same name must not delete the numbers of an earlier one.
        os.replace(path, path.with_name(f"{path.name}.old"))
        return
    atomic_write(path, "".join(f"{text}\n" for text in (header, *kept)))


def _samples_of(text: str) -> float:
    """Returns the samples of a line; infinity for a line without a number, so that it is cut."""
    try:
        return float(text.partition(",")[0])
    except ValueError:
        return math.inf


class JsonLines:
    """Writer of a file with a JSON object for each step, from which `offload report` makes a page."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Prepares the writer.

        Args:
            path: the file.
            about: facts about the run, written into the first line of each process.
        """
        self._path, self._about = path, about
        self._last: int | None = None
        self._held: IO[str] | None = None
        """The file, open while no other run may write to it."""

    def write(self, record: Record) -> None:
        """Writes a record. The first one, and one after a return to an earlier step, cuts the file first."""
        # The facts may differ between the processes of a run, so each process writes them again.
        more: dict[str, Any] = {} if self._last is not None else {"about": self._about}
        if self._last is None or record.step <= self._last:
            self.close()  # a log that is cut is a new file, whose lock is another one
            if (earlier := cut_log(self._path, record.step - 1)) is not None:
                announce(Headline(f"the log of an earlier run is now {earlier}"))
            self._held = hold_log(self._path)
        self._add(
            {"step": record.step, "samples": record.samples, "time": time.time()},
            record.values,
            drives=dict(record.drives),
            **more,
        )
        self._last = record.step

    def write_evaluation(self, evaluation: Evaluated) -> None:
        """Writes an evaluation. One before the first record of this process is left out: that record cuts the file."""
        if self._last is not None:
            self._add({"step": evaluation.step, "time": time.time()}, evaluation.values)

    def _add(self, head: Mapping[str, Any], values: Mapping[str, float], **more: Any) -> None:
        # Opened for each line, so that a kill loses at most one.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_line({**head, **values, **more}) + "\n")

    def close(self) -> None:
        """Lets other runs write to the file."""
        if self._held is not None:
            self._held.close()
            self._held = None


class Wandb:
    """Writer to a run of Weights & Biases: the run that the user has begun, or one of our own, which `close` ends."""

    def __init__(self, **settings: str | None) -> None:
        """Joins the run of the user, or begins one with `settings` of `wandb.init`.

        Raises:
            ConfigError: if wandb begins no run.
        """
        wandb: Any = importlib.import_module("wandb")
        self._own = wandb.run is None
        try:
            self._run = wandb.init(**settings) if self._own else wandb.run
        except Exception as error:  # wandb raises classes of its own: no login, no server
            raise ConfigError(
                f"wandb cannot begin a run: {error}; log in (`wandb login`), set WANDB_MODE=offline, or leave the "
                '"wandb" block out'
            ) from error

    def write(self, record: Record) -> None:
        """Writes a record at `step=samples`."""
        self._run.log(events(record), step=record.samples)  # wandb ignores a step below its newest

    def write_evaluation(self, evaluation: Evaluated) -> None:
        """Writes an evaluation at `step=samples`."""
        self._run.log(events(evaluation), step=evaluation.samples)

    def close(self) -> None:
        """Ends the run if we began it."""
        if self._own:
            self._run.finish()
