"""A run of `offload train`, told to a person, to a log and as JSON; and what ends it: signals, errors, its end."""

from __future__ import annotations

import dataclasses
import logging
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from offload import cli_summary
from offload.cli_machine import BAD_INPUT, FAILED
from offload.cli_signals import obeyed
from offload.errors import BudgetError, ConfigError, OffloadError, StoreError, UsageError
from offload.sizes import format_size

_LISTS = {
    "losses": "loss",
    "grad_norms": "grad_norm",
    "step_seconds": "seconds",
    "read_bytes": "read_bytes",
    "written_bytes": "written_bytes",
}
"""The lists of `--json`, each of one field of the step reports."""


_NOT_BEGUN = "stopped before the first step; what was committed before is as it was"


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM; the exit code is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _quit(error: BaseException, code: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(code)


def _log(log: TextIO, line: str) -> None:
    try:
        print(line, file=log, flush=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the log: {error.strerror}", log.name) from error


class Signals:
    """Inside, the first SIGINT or SIGTERM raises `Stopped`, in `hold` at its end; a second one ends the process."""

    def __init__(self) -> None:
        self._holding = False
        self._held: Stopped | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self._held = Stopped(number)
        if not self._holding:
            raise self._held

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No signal raises inside; one that came raises at the end."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._held is not None:
            raise self._held


@dataclasses.dataclass
class Training:
    """One run of the job, told to a person and to a log."""

    console: Console
    json_output: bool
    reports: list[Any] = dataclasses.field(default_factory=list)

    def go(self, options: Any) -> None:
        """Run, and end the process with the right code and words."""
        from offload.train import Finished, prepare

        logging.getLogger("offload").setLevel(logging.WARNING)
        logging.getLogger("offload.notices").setLevel(logging.ERROR)  # they are printed here
        try:
            with Signals() as signals:
                try:
                    with obeyed(_NOT_BEGUN):
                        job = prepare(
                            options, self._read(options.config), lambda line: self.console.print(line, markup=False)
                        )
                except (ConfigError, BudgetError, StoreError, UsageError, OSError) as error:
                    _quit(error, BAD_INPUT)
                if isinstance(job, Finished):
                    self.console.print(job.message, markup=False)
                    self._result({key: [] for key in _LISTS} | {"steps": None})
                    return
                self._train(job, options, signals)
        except Stopped as stopped:
            raise typer.Exit(128 + stopped.number) from None

    def _read(self, path: Path | None) -> dict[str, Any] | None:
        from offload.config import read_json

        return None if path is None else read_json(path)

    def _train(self, job: Any, options: Any, signals: Signals) -> None:
        engine = job.engine
        ended = engine.global_steps >= job.steps
        if ended:
            self.console.print(f"already at step {engine.global_steps} of {job.steps}; nothing to do", markup=False)
        elif engine.global_steps:
            self.console.print(f"going on after step {engine.global_steps}", markup=False)
        self.console.print(f"{options.model}: {_count(engine)}", markup=False)
        with (
            self._kept(job),
            open(options.log, "a") if options.log else nullcontext() as log,
            _Line(self.console, job) as line,
        ):
            from offload.engine.json_lines import json_line
            from offload.train import about, steps

            first = {"about": about(job)}

            for report in steps(job, signals.hold):
                self.reports.append(report)
                if log is not None:
                    _log(log, json_line(report.line() | first))
                    first = {}
                line.show(report)
                for words in cli_summary.wear(job, self.reports):
                    self.console.print(words, markup=False)
        with signals.hold(), self._kept(job):
            job.save_model()
            self._finish(job, remove=not (options.keep or ended))

    @contextmanager
    def _kept(self, job: Any) -> Iterator[None]:
        """Whatever ends the job inside, what is complete is committed and kept."""
        try:
            yield
        except (OffloadError, OSError) as error:
            self._end(job)
            _quit(error, FAILED)
        except Stopped:
            self._end(job)
            raise

    def _finish(self, job: Any, remove: bool) -> None:
        """Close the engine after the last step, and say how it went."""
        result = self._facts(job)
        job.engine.destroy(remove=remove)
        self._table(result)
        if job.save is not None:
            self.console.print(f"saved in {job.save}", markup=False)
        if job.folder and not remove:
            self.console.print(f"the swap files are kept in {job.folder}; delete them with: offload rm {job.folder}")
        self._result(result)

    def _end(self, job: Any) -> None:
        """Commit what is complete, keep the store, say how to go on."""
        try:
            job.engine.destroy(remove=False)
        except (OffloadError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
        if job.folder:
            print(
                f"stopped; the last committed step is kept in {job.folder}: go on with the same command and "
                f"--resume auto, or delete it with: offload rm {job.folder}",
                file=sys.stderr,
            )

    def _facts(self, job: Any) -> dict[str, Any]:
        reports, engine = self.reports, job.engine
        lists = {key: [getattr(report, field) for report in reports] for key, field in _LISTS.items()}
        seconds = sum(lists["step_seconds"])
        return {
            **lists,
            "parameters": engine.parameter_count,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "host_budget_bytes": engine.host_memory,
            "device_budget_bytes": engine.device_memory,
            "first_step": reports[0].step if reports else None,
            "steps": engine.global_steps,
            "tokens_per_second": sum(r.tokens for r in reports) / seconds if reports else None,
            "run": job.run,
            "saved": None if job.save is None else str(job.save.absolute()),
            **cli_summary.facts(job, reports),
        }

    def _table(self, result: dict[str, Any]) -> None:
        if not self.reports:
            return
        steady = self.reports[1:] or self.reports  # the first step records the order of uses
        seconds = statistics.median(report.seconds for report in steady)
        read, written = (statistics.median(getattr(r, f"{name}_bytes") for r in steady) for name in ("read", "written"))
        table = Table(show_header=False, box=None)
        for name, value in (
            ("steps", f"{self.reports[0].step} to {self.reports[-1].step}"),
            ("loss", f"{self.reports[0].loss:.4f} to {self.reports[-1].loss:.4f}"),
            ("median step", f"{seconds:.3f} s, {steady[-1].tokens / seconds:,.0f} tokens/s"),
            ("read, written a step", f"{format_size(read)}, {format_size(written)}"),
            ("bytes a parameter and step", f"{(read + written) / result['parameters']:.1f}"),
            (
                "peak RAM",
                f"{format_size(result['peak_rss_bytes'])}, host budget {format_size(result['host_budget_bytes'])}",
            ),
            *cli_summary.rows(self.reports, result),
        ):
            table.add_row(name, value)
        self.console.print(table)

    def _result(self, result: dict[str, Any]) -> None:
        if self.json_output:
            from offload.engine.json_lines import json_line

            print(json_line(result), flush=True)


def _count(engine: Any) -> str:
    """How many parameters, and how many of them train."""
    training = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    some = f", {training:,} of them train" if training < engine.parameter_count else ""
    return f"{engine.parameter_count:,} parameters{some}"


class _Line:
    """The progress line of a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, console: Console, job: Any) -> None:
        self._console, self._job = console, job
        self._process = psutil.Process()
        self._said = 0.0
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> _Line:
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "", total=self._job.steps, completed=min(self._job.engine.global_steps, self._job.steps)
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, report: Any) -> None:
        """Tell of one step."""
        words = (
            f"loss {report.loss:.4f}  {report.tokens / report.seconds:,.0f} tokens/s  "
            f"read {report.read_bytes / report.seconds / 1e9:.2f} GB/s  "
            f"write {report.written_bytes / report.seconds / 1e9:.2f} GB/s  "
            f"RAM {format_size(self._process.memory_info().rss)}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step, description=words)
        elif report.step == self._job.steps or time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            self._console.print(f"step {report.step}/{self._job.steps}  {words}", markup=False)
