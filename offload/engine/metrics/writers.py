"""Files and services that the numbers of each step are written to."""

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
from typing import Any, NamedTuple, Protocol

from offload.errors import ConfigError
from offload.fileio import atomic_write
from offload.fileio.jsonl import cut_log, json_line


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
