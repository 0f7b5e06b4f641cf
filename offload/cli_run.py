"""A run of `offload train`, told to a person, to a log and as JSON; and what ends it: signals, errors, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from offload import cli_summary
from offload.cli_machine import BAD_INPUT, FAILED
from offload.cli_signals import obeyed
from offload.errors import BudgetError, ConfigError, OffloadError, StoreError, UsageError
from offload.sizes import count_of, format_size

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


class _Log:
    """The log of steps. One that cannot be written any more is given up with a line: training goes on."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file: TextIO | None = None if path is None else open(path, "a", encoding="utf-8")

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, content: Mapping[str, Any]) -> None:
        """Add a line."""
        from offload.engine.json_lines import json_line

        if self._file is None:
            return
        try:
            print(json_line(content), file=self._file, flush=True)
        except OSError as error:
            self._close()
            self._say(
                f"warning: cannot write the log {self._path}: {error.strerror}; training goes on, and nothing more is "
                f"written to it"
            )

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is tried once more, and was told of
                self._file.close()
        self._file = None


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


@dataclasses.dataclass(kw_only=True)
class _Facts:
    """The line of `--json`, which always has these fields: of a run without a step most are empty."""

    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    read_bytes: list[int] = dataclasses.field(default_factory=list)
    written_bytes: list[int] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval_loss: float | None = None
    """Of the last evaluation."""
    parameters: int | None = None
    peak_rss_bytes: int | None = None
    host_budget_bytes: int | None = None
    device_budget_bytes: int | None = None
    first_step: int | None = None
    steps: int | None = None
    """That the run has made in all."""
    total_steps: int | None = None
    """That were asked for."""
    tokens_per_second: float | None = None
    run: str | None = None
    saved: str | None = None
    bound_by: str | None = None
    step_parts_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    drive_written_bytes: dict[str, Any] = dataclasses.field(default_factory=dict)
    predicted: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Training:
    """One run of the job, told to a person and to a log."""

    console: Console
    json_output: bool
    reports: list[Any] = dataclasses.field(default_factory=list)
    evaluations: list[Any] = dataclasses.field(default_factory=list)

    def go(self, options: Any) -> None:
        """Run, and end the process with the right code and words."""
        from offload.finetune.job import Finished, prepare

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
                    self._result(_Facts(run=job.run, saved=_path(job.output), total_steps=job.steps))
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
            _Log(options.log, self._warn) as log,
            _Line(self.console, job, options.log_every) as line,
        ):
            from offload.finetune.loop import StepReport, about, steps

            first = {"about": about(job)}

            for report in steps(job, signals.hold):
                if not isinstance(report, StepReport):
                    self._between(report, log, line)
                    continue
                self.reports.append(report)
                log.write(report.line() | first)
                first = {}
                line.show(report)
                for words in cli_summary.wear(job, self.reports):
                    self.console.print(words, markup=False)
        with signals.hold(), self._kept(job):
            job.save_model()
            self._finish(job, remove=not (options.keep or ended))

    def _between(self, report: Any, log: _Log, line: _Line) -> None:
        """Tell of what was done between two steps."""
        from offload.finetune.evaluation import Evaluation

        if isinstance(report, Evaluation):
            self.evaluations.append(report)
            log.write(report.line() | {"time": time.time()})
            line.print(f"step {report.step}: evaluation loss {report.loss:.4f}")
        else:
            line.print(f"step {report.step}: saved in {report.folder}")

    def _warn(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

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
        job.finish(remove)
        self._table(result)
        if job.output is not None:
            self.console.print(f"saved in {job.output}", markup=False)
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
        else:
            print("stopped; nothing is kept: no step was committed to go on from", file=sys.stderr)

    def _facts(self, job: Any) -> _Facts:
        reports, engine = self.reports, job.engine
        lists: dict[str, Any] = {key: [getattr(report, field) for report in reports] for key, field in _LISTS.items()}
        seconds = sum(lists["step_seconds"])
        return _Facts(
            **lists,
            **cli_summary.facts(job, reports),
            parameters=engine.parameter_count,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            host_budget_bytes=engine.host_memory,
            device_budget_bytes=engine.device_memory,
            first_step=reports[0].step if reports else None,
            steps=engine.global_steps,
            total_steps=job.steps,
            tokens_per_second=sum(r.tokens for r in reports) / seconds if reports else None,
            evaluations=[each.line() for each in self.evaluations],
            eval_loss=self.evaluations[-1].loss if self.evaluations else None,
            run=job.run,
            saved=_path(job.output),
        )

    def _table(self, result: _Facts) -> None:
        if not self.reports:
            return
        steady = self.reports[1:] or self.reports  # the first step records the order of uses
        seconds = statistics.median(report.seconds for report in steady)
        read, written = (statistics.median(getattr(r, f"{name}_bytes") for r in steady) for name in ("read", "written"))
        table = Table(show_header=False, box=None)
        for name, value in (
            ("steps", f"{self.reports[0].step} to {self.reports[-1].step}"),
            ("loss", f"{self.reports[0].loss:.4f} to {self.reports[-1].loss:.4f}"),
            *self._evaluated(),
            ("median step", f"{seconds:.3f} s, {steady[-1].tokens / seconds:,.0f} tokens/s"),
            ("read, written a step", f"{format_size(read)}, {format_size(written)}"),
            ("bytes a parameter and step", f"{(read + written) / (result.parameters or 1):.1f}"),
            (
                "peak RAM",
                f"{format_size(result.peak_rss_bytes or 0)}, host budget {format_size(result.host_budget_bytes or 0)}",
            ),
            *cli_summary.rows(self.reports, vars(result)),
        ):
            table.add_row(name, value)
        self.console.print(table)

    def _evaluated(self) -> Iterator[tuple[str, str]]:
        if self.evaluations:
            best = min(self.evaluations, key=lambda each: each.loss)
            where = f", least {best.loss:.4f} at step {best.step}" if best is not self.evaluations[-1] else ""
            yield "evaluation loss", f"{self.evaluations[-1].loss:.4f}{where}"

    def _result(self, result: _Facts) -> None:
        if self.json_output:
            from offload.engine.json_lines import json_line

            print(json_line(vars(result)), flush=True)


def _path(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.absolute())


def _count(engine: Any) -> str:
    """How many parameters, and how many of them train."""
    training = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    some = f", {training:,} of them train" if training < engine.parameter_count else ""
    return f"{count_of(engine.parameter_count, 'parameter')}{some}"


class _Line:
    """The progress line of a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, console: Console, job: Any, every: int | None) -> None:
        """With `every` there is a plain line each so many steps, also in a terminal."""
        self._console, self._job, self._every = console, job, every
        self._process = psutil.Process()
        self._said = 0.0
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> _Line:
        if self._console.is_terminal:
            rest = Column(ratio=1, no_wrap=True)  # in a narrow terminal its end is what is cut
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

    def print(self, words: str) -> None:
        """A plain line, above the progress line."""
        self._console.print(words, markup=False)

    def show(self, report: Any) -> None:
        """Tell of one step."""
        gpu = f"  GPU {format_size(self._on_gpu())}" if self._job.engine.device.type == "cuda" else ""
        words = (
            f"loss {report.loss:.4f}  lr {report.lr:.2e}  norm {report.grad_norm:.2f}  "
            f"{report.tokens / report.seconds:,.0f} tokens/s{gpu}  "
            f"RAM {format_size(self._process.memory_info().rss)}  "
            f"read {report.read_bytes / report.seconds / 1e9:.2f} GB/s  "
            f"write {report.written_bytes / report.seconds / 1e9:.2f} GB/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step, description=words)
        if self._is_due(report.step):
            self._said = time.monotonic()
            self.print(f"step {report.step}/{self._job.steps}  {words}")

    def _is_due(self, step: int) -> bool:
        """Whether this step has a line of its own: as asked for, or every few seconds where no line moves."""
        if self._every is not None:
            return step % self._every == 0 or step == self._job.steps
        return self._progress is None and (step == self._job.steps or time.monotonic() - self._said > 5)

    def _on_gpu(self) -> int:
        """What torch has taken of the GPU."""
        import torch

        return torch.cuda.memory_reserved(self._job.engine.device)
