"""Destinations of the numbers of each step: a line for people, TensorBoard, CSV files, JSON lines, Weights & Biases.

    Meter ─► Record ─► Reporter ─┬─► Line                          at once, on the thread that trains
                                 └─► all others   on a thread of its own, one record after the other

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
import importlib
import importlib.util
import logging
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offload.config import Config
from offload.engine.metrics.writers import CsvFiles, Evaluated, JsonLines, Record, TensorBoard, Wandb, Writer
from offload.errors import ConfigError
from offload.fileio.jsonl import check_log
from offload.notices import show
from offload.sizes import format_size

logger = logging.getLogger("offload")


# -- line for people ----------------------------------------------------------------------------------

_PHASES = ("forward", "backward", "step")


class Line:
    """Writer of a line every `every` steps: to the log if a handler takes lines of level INFO, otherwise to stderr."""

    def __init__(self, every: int, samples: int, memory: bool) -> None:
        """Creates the writer, with no record in the means yet.

        Args:
            every: steps for each line.
            samples: samples of the first step.
            memory: True to include peaks of memory.
        """
        self._every, self._samples, self._memory = every, samples, memory
        self._since: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._last: Record | None = None

    def write(self, record: Record) -> None:
        """Adds a record to the means, and writes a line if one is due."""
        if self._last is not None and record.samples > self._last.samples:  # otherwise a load went back
            self._samples = record.samples - self._last.samples
        self._last = record
        self._steps += 1
        self._since["samples"] += self._samples
        for name, value in record.values.items():
            if name.endswith(("seconds", "_bytes", "collectives")):
                self._since[name] += value
        if record.step % self._every == 0:
            mean = {name: total / self._steps for name, total in self._since.items()}
            self._since.clear()
            self._steps = 0
            show(line(record, mean, mean["samples"], self._memory), logger)

    def write_evaluation(self, evaluation: Evaluated) -> None:
        """Does nothing: the loop that evaluates shows its result itself."""

    def close(self) -> None:
        """Does nothing: every line is written at once."""


def line(record: Record, mean: Mapping[str, float], samples: float, memory: bool) -> str:
    """Returns the line for a person: numbers of this step; seconds, bytes, collectives and samples as means."""
    values = record.values
    texts = [f"{name.replace('_', ' ')} {values[name]:.4g}" for name in ("loss", "lr", "grad_norm") if name in values]
    if values.get("skipped_steps"):
        texts.append(f"{values['skipped_steps']:.0f} skipped")
    texts.append(f"{mean['seconds']:.3f} s a step, {samples / max(mean['seconds'], 1e-9):.1f} samples/s")
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
            # The folder is created later, by its writer, so the nearest parent that exists decides.
            there = next(path for path in (folder, *folder.parents) if path.exists())
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                raise ConfigError(
                    f'"{key}" cannot be written to {folder}: {there} is not a folder that you may write; change its '
                    '"output_path"'
                )


def _is_installed(package: str) -> bool:
    """Returns True if a package can be imported. A folder of that name, such as wandb makes, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _folder(config: Config, key: str) -> Path:
    """Returns the folder of a config block's files."""
    block = getattr(config, key)
    job = config.offload.run if block.job_name is None else block.job_name
    return Path(block.output_path, job).absolute()


def make_reporter(config: Config, samples: int, facts: Mapping[str, Any]) -> Reporter | None:
    """Returns the reporter for everything that the config names, or None if nothing is to be measured.

    Args:
        config: the config.
        samples: samples of a step.
        facts: facts on the run for the log.
    """
    writers: dict[str, Callable[[], Writer]] = {}
    if config.tensorboard.enabled:
        writers["tensorboard"] = lambda: TensorBoard(_folder(config, "tensorboard"))
    if config.csv_monitor.enabled:
        writers["csv_monitor"] = lambda: CsvFiles(_folder(config, "csv_monitor"))
    if config.wandb.enabled:
        block = config.wandb
        writers["wandb"] = lambda: Wandb(project=block.project, entity=block.team, group=block.group, name=block.name)
    log = config.offload.log
    if log is not None:
        writers["log"] = lambda: JsonLines(Path(log).absolute(), facts)
    every = config.steps_per_line
    shown = Line(every, samples, config.memory_breakdown) if every else None
    return Reporter(shown, writers) if shown is not None or writers or config.wall_clock_breakdown else None


# -- the reporter -------------------------------------------------------------------------------------


_MOST_PENDING = 1024
"""Records that may wait for a slow writer. Beyond that a step waits for the writer, so that no record is lost."""


class Reporter:
    """Distributor of each record to a line and to writers. All methods belong to the thread that trains."""

    def __init__(self, shown: Writer | None, writers: Mapping[str, Callable[[], Writer]]) -> None:
        """Stores the writers' factories.

        Args:
            shown: the line, or None.
            writers: factory of each writer, by the name for warnings; called by `open`.
        """
        self._shown, self._makers = shown, writers
        # None ends the thread.
        self._records: queue.Queue[Record | Evaluated | None] = queue.Queue(_MOST_PENDING)
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Creates the writers, and the thread that calls them.

        Raises:
            ConfigError: if a writer cannot be created.
        """
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

    def report(self, record: Record) -> None:
        """Shows the record, and queues it for the writers."""
        if self._shown is not None:
            try:
                self._shown.write(record)
            except OSError as error:  # the console is gone
                self._shown = None
                logger.warning("steps are no longer logged: %s", error)
        if self._thread is not None:
            self._records.put(record)

    def report_evaluation(self, evaluation: Evaluated) -> None:
        """Queues an evaluation for the writers."""
        if self._thread is not None:
            self._records.put(evaluation)

    def close(self) -> None:
        """Waits until everything is written, and closes the writers. Idempotent."""
        if self._thread is not None:
            self._records.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, writers: dict[str, Writer]) -> None:
        """Writes every record with every writer, on the reporter's thread."""
        while (record := self._records.get()) is not None:
            # A copy of the items, since a writer that fails is removed in the loop.
            for name, writer in list(writers.items()):
                try:
                    if isinstance(record, Record):
                        writer.write(record)
                    else:
                        writer.write_evaluation(record)
                except Exception as error:
                    logger.warning(
                        'writing to "%s" stopped after step %d, training continues: %s',
                        name,
                        record.step - isinstance(record, Record),
                        error,
                    )
                    del writers[name]
                    # The failure is reported already; an error while closing would add nothing.
                    with contextlib.suppress(Exception):
                        writer.close()
        for name, writer in writers.items():
            _close(name, writer)


def _close(name: str, writer: Writer) -> None:
    """Closes a writer; a failure becomes a warning."""
    try:
        writer.close()
    except Exception as error:
        logger.warning('closing "%s" failed: %s', name, error)
