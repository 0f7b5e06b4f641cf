"""Output of `offload train` for each step: a line in a log, and a progress line or plain lines for the user."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from offload.sizes import format_size


class StepLog:
    """The log of steps. After a failed write the log is closed with a warning, and training continues."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file: TextIO | None = None if path is None else open(path, "a", encoding="utf-8")

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, content: Mapping[str, Any]) -> None:
        """Appends `content` as one line of JSON and flushes the file."""
        from offload.fileio.jsonl import json_line

        if self._file is None:
            return
        try:
            print(json_line(content), file=self._file, flush=True)
        except OSError as error:
            self._close()
            self._say(
                f"warning: cannot write the log {self._path}: {error.strerror}; training continues, and nothing more "
                f"is written to the log"
            )

    def _close(self) -> None:
        if self._file is not None:
            # close() tries to write the rest again and fails again; `write` has warned already.
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


class ProgressLine:
    """A progress line in a terminal; without a terminal a plain line every few seconds."""

    def __init__(self, console: Console, job: Any, every: int | None) -> None:
        """Prepares the line of `job`.

        Args:
            console: the console to print to.
            job: the job that runs.
            every: steps between plain lines, which then appear in a terminal too; None for the default.
        """
        self._console, self._job, self._every = console, job, every
        self._process = psutil.Process()
        self._last_printed = 0.0
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            # A narrow terminal cuts the end of this column.
            rest = Column(ratio=1, no_wrap=True)
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(10),
                TextColumn("{task.description}", table_column=rest),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(
                "", total=self._job.steps, completed=min(self._job.engine.global_steps, self._job.steps)
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def print(self, text: str) -> None:
        """Prints a plain line above the progress line."""
        self._console.print(text, markup=False)

    def show(self, report: Any) -> None:
        """Shows the report of one step."""
        gpu = f"  GPU {format_size(self._on_gpu())}" if self._job.engine.device.type != "cpu" else ""
        text = (
            f"loss {report.loss:.4f}  lr {report.lr:.2e}  norm {report.grad_norm:.2f}  "
            f"{report.tokens / report.seconds:,.0f} tokens/s{gpu}  "
            f"RAM {format_size(self._process.memory_info().rss)}  "
            f"read {report.read_bytes / report.seconds / 1e9:.2f} GB/s  "
            f"write {report.written_bytes / report.seconds / 1e9:.2f} GB/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step, description=text)
        if self._is_due(report.step):
            # A monotonic clock: the wall clock may be set during a training.
            self._last_printed = time.monotonic()
            self.print(f"step {report.step}/{self._job.steps}  {text}")

    def _is_due(self, step: int) -> bool:
        """Returns True if the step gets a plain line: every `every` steps, or every few seconds without a terminal."""
        if self._every is not None:
            return step % self._every == 0 or step == self._job.steps
        # Five seconds keep log files of batch systems short.
        return self._progress is None and (step == self._job.steps or time.monotonic() - self._last_printed > 5)

    def _on_gpu(self) -> int:
        """Returns the bytes of GPU memory that torch has reserved."""
        import torch

        device = self._job.engine.device
        return int(torch.get_device_module(device).memory_reserved(device))
