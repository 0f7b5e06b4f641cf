"""The command line: options in, words out. The work is in `offload.train` and the library."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import offload
from offload import cli_inspect, cli_machine, cli_plan, cli_store
from offload.cli_machine import BAD_INPUT, FAILED
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

app = typer.Typer(
    help="Train PyTorch models larger than the GPU and larger than the RAM, from NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Home(str, Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Compute(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Resume(str, Enum):
    never = "never"
    auto = "auto"
    must = "must"


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM; the exit code is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


cli_machine.register(app)
cli_plan.register(app)
app.command()(cli_inspect.inspect)
cli_store.register(app)


def main() -> None:
    """Entry point of the command `offload`."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(offload.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    model: Annotated[
        str,
        typer.Option(
            help="gpt2-tiny or -small, llama-1b, -3b, -7b, -13b, -70b; or a folder: config.json, weights, tokenizer."
        ),
    ] = "gpt2-tiny",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="Text file, or folder of *.py, *.txt, *.md; may repeat. Default: Python's own library."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps in all, those of a resumed run included.")] = 200,
    batch_size: Annotated[int | None, typer.Option(help="Sequences of a step. [default: 8]")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [default: 3e-4]")] = None,
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON file. An option that is typed overrules it, with a line.")
    ] = None,
    offload_param: Annotated[Home | None, typer.Option(help="Home of the weights. [default: nvme]")] = None,
    offload_optimizer: Annotated[
        Home | None, typer.Option(help="Home of the optimizer states. [default: nvme]")
    ] = None,
    nvme_path: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Folder for swap files, one for each drive; may repeat. [default: ./swap]"),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the weights. [default: bf16]")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host budget, as 16GiB. [default: what is needed, at most 80 % of free]")
    ] = None,
    device: Annotated[Compute | None, typer.Option(help="Where to compute. [default: auto]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and dropout. [default: 0]")] = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run's folder in the nvme path. [default: default]")
    ] = None,
    resume: Annotated[
        Resume | None, typer.Option(help="Go on with the run of that name: never, auto or must. [default: never]")
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            metavar="WORD|STEPS",
            help="step: each step survives a kill; 10: every tenth; none: half the disk, no resume. "
            "[default: step where it fits]",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the swap files after the last step.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(help="Write a JSON object a step. A resumed run goes on with the file, another starts it over."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a time line of the run, for ui.perfetto.dev; zipped where it ends in .gz."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; all else goes to stderr.")
    ] = False,
) -> None:
    """Train a causal language model on text, with weights and optimizer states in swap files."""
    from offload.train import Options

    rank = int(os.environ.get("RANK", "0"))  # of torchrun; the first one speaks for all
    options = Options(
        model=model,
        text=tuple(text or ()),
        steps=steps,
        batch_size=batch_size,
        seq_len=seq_len,
        lr=lr,
        config=config,
        offload_param=None if offload_param is None else offload_param.value,
        offload_optimizer=None if offload_optimizer is None else offload_optimizer.value,
        nvme_path=tuple(nvme_path or ()),
        dtype=None if dtype is None else dtype.value,
        host_memory=host_memory,
        device=None if device is None else device.value,
        seed=seed,
        run=run,
        resume=None if resume is None else resume.value,
        durability={"every": int(durability)} if durability is not None and durability.isdecimal() else durability,
        keep=keep,
        log=log if rank == 0 else None,
        trace=None if trace is None else str(trace),
    )
    console = Console(stderr=json_output, highlight=False, soft_wrap=True, quiet=rank > 0)
    _Training(console, json_output and rank == 0).go(options)


def _quit(error: BaseException, code: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(code)


def _log(log: TextIO, line: str) -> None:
    try:
        print(line, file=log, flush=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the log: {error.strerror}", log.name) from error


class _Signals:
    """Inside, the first SIGINT or SIGTERM raises `Stopped`, in `hold` at its end; a second one ends the process."""

    def __init__(self) -> None:
        self._holding = False
        self._held: Stopped | None = None

    def __enter__(self) -> _Signals:
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
class _Training:
    """One run of the job, told to a person and to a log."""

    console: Console
    json_output: bool
    reports: list[Any] = dataclasses.field(default_factory=list)

    def go(self, options: Any) -> None:
        """Run, and end the process with the right code and words."""
        from offload.train import Finished, prepare

        logging.getLogger("offload").setLevel(logging.WARNING)  # its notices are printed here
        try:
            with _Signals() as signals:
                try:
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

    def _train(self, job: Any, options: Any, signals: _Signals) -> None:
        engine = job.engine
        ended = engine.global_steps >= job.steps
        if ended:
            self.console.print(f"already at step {engine.global_steps} of {job.steps}; nothing to do", markup=False)
        elif engine.global_steps:
            self.console.print(f"going on after step {engine.global_steps}", markup=False)
        self.console.print(f"{options.model}: {engine.parameter_count:,} parameters", markup=False)
        with (
            self._kept(job),
            open(options.log, "a") if options.log else nullcontext() as log,
            _Line(self.console, job) as line,
        ):
            from offload.train import steps

            for report in steps(job, signals.hold):
                self.reports.append(report)
                if log is not None:
                    _log(log, _json(report._asdict()))
                line.show(report)
        with signals.hold(), self._kept(job):
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
        if job.folder and not remove:
            self.console.print(f"the swap files are kept in {job.folder}; delete them with: offload rm {job.folder}")
        self._result(result)

    def _end(self, job: Any) -> None:
        """Commit what is complete, keep the store, say how to go on."""
        try:
            job.engine.destroy()
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
        ):
            table.add_row(name, value)
        self.console.print(table)

    def _result(self, result: dict[str, Any]) -> None:
        if self.json_output:
            print(_json(result), flush=True)


def _json(content: Any) -> str:
    """JSON in which a number that is not finite is null: the standard has no other word for it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), allow_nan=False)


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


if __name__ == "__main__":
    main()
