"""A run of `offload train`: its output to the user, to a log and as JSON, and how signals and errors end it."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import resource
import signal
import stat
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from offload.cli.console import BAD_INPUT, FAILED, code_of, make_table, with_option
from offload.cli.options import too_long
from offload.cli.signals import AT_ONCE, ENDING, exit_on_signal, handlers, in_finalizer
from offload.errors import ConfigError, IoError, OffloadError, is_damage, naming_memory, printable
from offload.fileio import atomic_write
from offload.fileio.jsonl import hold_log, json_line
from offload.finetune.options import Options, in_options
from offload.interrupts import exit_on_next_signal, signal_later
from offload.launch.environment import rank_number
from offload.notices import ENDS, shell_command
from offload.report.figures import compare, early_updates, early_words, forecast, warning, words
from offload.report.log import median_rates, rate_words
from offload.report.phases import Bound, advice, bound
from offload.sizes import MIB, count_of, format_decimal, format_share, format_size

if TYPE_CHECKING:
    from offload.finetune.corpus.chats import Example
    from offload.hardware.probe import Others


# -- train progress ------------------------------------------------------------------------------------
#
# Output of `offload train` for each step: a line in a log, and a progress line or plain lines for the user.


_MOST_WAITING = 64 * MIB
"""Bytes of a log that may wait for room on its drive."""


class StepLog:
    """The log of steps. Lines that find no room on the drive wait in memory for it, and training continues."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        # Held until the end, so that no other run writes to the file; a device or a pipe cannot be.
        self._file: IO[str] | None = None if path is None else hold_log(path) or open(path, "a", encoding="utf-8")
        self._waiting = bytearray()
        """The lines that are not in the file yet; the first may be there in part."""
        self._warned = False

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._write_waiting(last=True)

    def write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._waiting += f"{json_line(content)}\n".encode()
            self._write_waiting()

    def _write_waiting(self, last: bool = False) -> None:
        """Writes the lines that wait. `last` closes the file, as an error does that no room would cure."""
        if self._file is None:
            return
        descriptor = self._file.fileno()
        try:
            while self._waiting:
                del self._waiting[: os.write(descriptor, self._waiting)]
            self._warned = False
        except OSError as error:
            # A pipe whose reader has gone stays so.
            last = last or len(self._waiting) > _MOST_WAITING or not stat.S_ISREG(os.fstat(descriptor).st_mode)
            if last or not self._warned:
                then = "its last lines are missing" if last else "training continues, and its lines wait for room"
                self._say(f"warning: cannot write --log {self._path}: {error.strerror}; {then}")
            self._warned = True
        if last:
            self._file.close()
            self._file = None


class ProgressLine:
    """A progress line in a terminal; without a terminal a plain line every few seconds."""

    def __init__(self, console: Console, job: Any, every: int | None) -> None:
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
        self._console.print(text, markup=False)

    def show(self, report: Any) -> None:
        gpu, device = "", self._job.engine.device
        if device.type != "cpu":
            import torch

            gpu = f"  GPU {format_size(torch.get_device_module(device).memory_reserved(device))}"
        rate = f"  {words}" if (words := rate_words(report.measured)) else ""
        text = (
            f"loss {report.loss:.4f}  lr {report.lr:.2e}  norm {report.grad_norm:.2f}  "
            f"{report.tokens / report.seconds:,.0f} tokens/s{rate}{gpu}  "
            f"RAM {format_size(self._process.memory_info().rss)}  "
            f"read {report.read_bytes / report.seconds / 1e9:.2f} GB/s  "
            f"write {report.written_bytes / report.seconds / 1e9:.2f} GB/s"
        )
        if report.predicted_seconds is not None:
            text += f"  {report.seconds:.3g} s, predicted {report.predicted_seconds:.3g}"
        if (used := report.measured.get("drive_budget_used")) is not None:
            text += f"  drive budget {format_share(used)}"
        if given_back := report.measured.get("host_given_back_bytes"):
            text += f"  {format_size(given_back)} of RAM given back"
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step, description=text)
        # A monotonic clock: the wall clock may be set during a training.
        now, last = time.monotonic(), report.step == self._job.steps
        if self._every is not None:
            due = last or report.step % self._every == 0
        else:  # five seconds keep log files of batch systems short
            due = self._progress is None and (last or now - self._last_printed > 5)
        if due:
            self._last_printed = now
            self.print(f"step {report.step}/{self._job.steps}  {text}")


# -- train summary -------------------------------------------------------------------------------------
#
# The summary of `offload train`: the limiting phase of the steps, the wear of drives, and the prediction.


_STEADY = 3
"""Number of steps of a process after which the bytes written per step are known."""


def wear(job: Any, reports: Sequence[Any]) -> Iterator[str]:
    """Yields a warning for each drive of which the run will use more than `drive_share` of the rated endurance.

    Warnings are computed only after step `_STEADY` of a process, so each appears once.
    """
    block = job.engine.config["offload"]
    if len(reports) != _STEADY or block["drive_tbw"] is None:
        return
    ranks = rank_number(os.environ, "LOCAL_WORLD_SIZE", 1)  # set by torchrun; each rank writes the same amount
    first, last = reports[0], reports[-1]
    left = max(job.steps - last.step, 0)
    for path, so_far in last.drives.items():
        a_step = (so_far - first.drives[path]) / (
            last.step - first.step
        )  # a mean, since writes may end in a later step
        words = warning(
            forecast(path, ranks * so_far, ranks * a_step, left, block["drive_tbw"]),
            block["drive_share"],
            left * last.seconds,
        )
        if words is not None:
            yield words


def facts(job: Any, reports: Sequence[Any]) -> dict[str, Any]:
    """Returns the summary's fields of `--json`."""
    by = _bound(reports)
    return {
        "bound_by": None if by is None else by.by,
        "step_parts_seconds": {} if by is None else dict(by.parts),
        **early_updates([report.line() for report in reports]),
        "predicted": compare(job.predicted, _steady(reports)),
        "doubts": list(job.predicted.get("doubts", ())),
    }


def rows(reports: Sequence[Any], result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the summary's rows of the table: name and value."""
    by = _bound(reports)
    if by is not None:
        yield "bound by", by.words()
        yield "to be faster", advice(by.by, result["others_share"])
    early = early_words(result)
    if early is not None:
        yield "updates under the backward", early
    for path, nbytes in result["drive_written_bytes"].items():
        so_far = f", {format_decimal(nbytes['life'])} in the life of the run" if nbytes["life"] > nbytes["run"] else ""
        yield "written in all", f"{format_decimal(nbytes['run'])} to {path}{so_far}"
    for index, prediction in enumerate(result["predicted"]):
        predicted, measured, difference = words(prediction)
        told = f"{prediction['what']}: {predicted}, {measured}" + (f" ({difference})" if difference else "")
        yield "" if index else "predicted, measured", told
    if result["predicted"]:
        for doubt in result["doubts"]:
            yield "", doubt


def _bound(reports: Sequence[Any]) -> Bound | None:
    return bound(_steady(reports))


def _steady(reports: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the log's values of all steps but the first, which records the access order."""
    return [report.line() for report in reports[1:] or reports]


# -- train run -----------------------------------------------------------------------------------------


_NOT_BEGUN = "stopped before the first step; earlier commits are unchanged"


class Stopped(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP as an exception. The exit code is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _quit(error: BaseException, code: int, options: Options) -> NoReturn:
    named = {"--log": options.log, "--output": options.output}
    print(f"error: {printable(with_option(in_options(str(error), options), named))}", file=sys.stderr)
    raise typer.Exit(code)


class Signals:
    """A context in which the first SIGINT, SIGTERM or SIGHUP raises `Stopped`. Main thread only.

    Inside `hold` the exception is delayed until the end of `hold`. A second signal ends the process immediately, with
    a line, except for SIGHUP, which a terminal that closes may send twice. A signal that the process ignores stays
    ignored.
    """

    def __init__(self) -> None:
        self._holding = False
        self._held: Stopped | None = None
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> Signals:
        self._before = handlers(*ENDING)
        for number in self._before:
            signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handles the first signal, and makes a second one end the process at once."""
        if in_finalizer(frame):
            signal_later(number)
            return
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if signal.SIGHUP in self._before:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._undo = exit_on_next_signal(AT_ONCE, *(number for number in self._before if number != signal.SIGHUP))
        self._held = Stopped(number)
        if not self._holding:
            raise self._held

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._held is not None:
            raise self._held


def _leave_closed_terminal() -> None:
    """Redirects stdout and stderr to /dev/null if their terminal was closed, where every print raises."""
    for output in (1, 2):
        try:
            os.write(output, b"")  # writes nothing, but fails on a terminal that was closed
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)


@dataclasses.dataclass(kw_only=True)
class _Result:
    """Fields of the `--json` line. All fields are always present; without a step most are empty."""

    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    read_bytes: list[int] = dataclasses.field(default_factory=list)
    written_bytes: list[int] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval_loss: float | None = None
    """Loss of the last evaluation."""
    parameters: int | None = None
    peak_rss_bytes: int | None = None
    host_budget_bytes: int | None = None
    device_budget_bytes: int | None = None
    first_step: int | None = None
    steps: int | None = None
    """Steps that the run has made in all its processes."""
    total_steps: int | None = None
    """Steps that were requested."""
    tokens_per_second: float | None = None
    tflops: float | None = None
    """Median over the steps after the first; None where operations are not counted."""
    mfu: float | None = None
    """The same, of the peak of the device."""
    run: str | None = None
    saved: str | None = None
    bound_by: str | None = None
    step_parts_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    early_updates: int = 0
    """Updates of units under the backward that their steps confirmed."""
    early_updates_dropped: int = 0
    """Updates of units under the backward that came to nothing, as in a step that clips."""
    early_updates_dropped_steps: int = 0
    """Steps that dropped such updates."""
    drive_written_bytes: dict[str, Any] = dataclasses.field(default_factory=dict)
    predicted: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    doubts: list[str] = dataclasses.field(default_factory=list)
    """Sentences on what disturbed the probe that the run's prediction uses."""
    others_share: float | None = None
    """Fraction of the cores that other processes used; None if unknown, or with several ranks."""


_NOTICES = logging.getLogger("offload.notices")
"""Notices of the start are lines of this command, so the logger must not repeat them, nor the line of the end."""


class Output(Console):
    """A console that raises an error if its output was closed, so that the run keeps its steps and reports the error.

    rich itself would end the process without a message.
    """

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise IoError("the output", 0, 0, errno.EPIPE, "write") from None


@dataclasses.dataclass
class Training:
    """One run of a job, with output to the user and to a log."""

    console: Console
    json_output: bool
    reports: list[Any] = dataclasses.field(default_factory=list)
    evaluations: list[Any] = dataclasses.field(default_factory=list)
    shares: list[float] = dataclasses.field(default_factory=list)
    """For each step, the fraction of the cores that other processes used."""

    def go(self, options: Options) -> None:
        """Runs the job. Errors and signals end the process with their message and exit code."""
        from offload.config import read_json
        from offload.finetune.corpus.chats import Example
        from offload.finetune.job import prepare
        from offload.finetune.output import Finished

        logging.getLogger("offload").setLevel(logging.WARNING)
        _NOTICES.setLevel(logging.ERROR)
        ENDS.setLevel(logging.ERROR)
        try:
            with Signals() as signals:
                # Before the first step nothing needs cleaning up, so a signal may end the process inside native code.
                try:
                    with exit_on_signal(_NOT_BEGUN):
                        content = None if options.config is None else read_json(options.config)
                        job = prepare(options, content, self._say)
                except (OffloadError, OSError) as error:
                    if too_long(error):
                        raise
                    closed = isinstance(error, OSError) and error.errno == errno.EPIPE
                    _quit(error, FAILED if closed else code_of(error, BAD_INPUT), options)
                # `prepare` found an identical job that has ended: the JSON line appears in this case too.
                if isinstance(job, Finished):
                    self.console.print(job.message, markup=False)
                    result = _Result(run=job.run, saved=_path(job.output), steps=job.steps, total_steps=job.total_steps)
                    self._json(vars(result))
                    return
                if isinstance(job, Example):
                    self._show_example(job)
                    self._json({"row": job.heading, "parts": [part._asdict() for part in job.parts]})
                    return
                self._train(job, options, signals)
        except Stopped as stopped:
            # The exit code that a shell reports for a process ended by this signal.
            raise typer.Exit(128 + stopped.number) from None

    def _say(self, line: str) -> None:
        """Prints a line of the start; a warning stands out in a terminal, and so do an example's learned tokens."""
        from offload.finetune.corpus.chats import Example
        from offload.finetune.job import WARNING

        if isinstance(line, Example):
            self._show_example(line)
            return
        self.console.print(line, markup=False, style="bold yellow" if line.startswith(WARNING) else None)

    def _show_example(self, example: Example) -> None:
        """Prints an example: learned tokens bold and green in a terminal, else between [[ and ]]."""
        how = "in green" if self.console.color_system else "between [[ and ]]"
        self.console.print(f"{example.heading}, its learned tokens {how}:", markup=False)
        if self.console.color_system:
            text = Text("  ")
            for part in example.parts:
                text.append(part.text, "bold green" if part.learned else "dim")
            self.console.print(text)
            return
        # The encoding of a log may lack characters of the data, and rich would replace `:bug:` by a picture.
        encoding = self.console.encoding
        shown = example.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(f"  {shown}", markup=False, emoji=False)

    def _train(self, job: Any, options: Options, signals: Signals) -> None:
        engine = job.engine
        ended = engine.global_steps >= job.steps
        # From now on to the end of the process: the last commit may have something to say too, also after an error.
        _NOTICES.setLevel(logging.INFO)
        with (
            self._ended_on_error(job, options),
            StepLog(options.log, lambda words: print(words, file=sys.stderr, flush=True)) as log,
            ProgressLine(self.console, job, options.log_every) as line,
        ):
            if ended:
                line.print(f"already at step {engine.global_steps} of {job.steps}; nothing to do")
            line.print(f"{options.model}: {_count(engine)}")
            from offload.finetune.loop import StepReport, about, steps
            from offload.hardware.probe import Others

            # Only the first line of each process contains the facts on the run; `offload report` merges them.
            first = {"about": about(job)}
            # With several ranks, other processes cannot be told apart from the other ranks.
            others = Others() if engine.world_size == 1 else None

            for report in steps(job, signals.hold):
                if not isinstance(report, StepReport):
                    self._between_steps(report, log, line)
                    continue
                self.reports.append(report)
                log.write(report.line() | self._others(others) | first)
                first, others = {}, Others() if others else None
                line.show(report)
                for words in wear(job, self.reports):
                    self.console.print(words, markup=False)
        # From now on a signal takes effect only after the model is saved and the run is closed.
        with signals.hold():
            remove = not (options.keep or ended)
            with self._ended_on_error(job, options):
                job.save_model()
                # Most numbers are read now, since `job.finish` closes the engine.
                result = self._facts(job)
                job.finish(remove)
                # With the last commit, which the end makes.
                result.drive_written_bytes = {
                    drive.path: {"run": drive.run_bytes, "life": drive.life_bytes}
                    for drive in job.engine.drive_writes()
                }
            try:
                self._show(job, result, remove)
            except OSError as error:  # the run itself has ended well
                _quit(error, FAILED, options)
        if options.push_to_hub is not None and engine.global_rank == 0:
            try:
                self._push(job, options, options.push_to_hub, result)
            except (ConfigError, OSError) as error:
                _quit(error, FAILED, options)

    def _others(self, others: Others | None) -> dict[str, float]:
        """Returns the log's field on the work of other processes during a step, and keeps it; nothing if unknown."""
        share = None if others is None else others.share()
        if share is None:
            return {}
        self.shares.append(share)
        return {"others_share": round(share, 3)}

    def _between_steps(self, report: Any, log: StepLog, line: ProgressLine) -> None:
        from offload.finetune.corpus.token_stream import EvaluationReport

        if isinstance(report, EvaluationReport):
            self.evaluations.append(report)
            log.write(report.line() | {"time": time.time()})
            line.print(f"step {report.step}: evaluation loss {report.loss:.4f}")
        else:
            line.print(f"step {report.step}: saved in {report.folder}")

    @contextmanager
    def _ended_on_error(self, job: Any, options: Options) -> Iterator[None]:
        """Commits and keeps the complete steps if an error or a signal ends the job inside the context."""
        try:
            with naming_memory():
                yield
        except (OffloadError, OSError) as error:
            self._end(job, is_damage(error))
            _quit(error, FAILED, options)
        except Stopped:
            self._end(job)
            raise

    def _show(self, job: Any, result: _Result, remove: bool) -> None:
        self._table(result)
        if job.folder and not remove:
            delete = shell_command("rm", job.folder)
            self.console.print(f"the swap files are kept in {job.folder}; delete them with: {delete}", markup=False)
        if job.output is not None:
            chats = getattr(job.tokenizer, "chat_template", None) is not None
            try_it = (
                shell_command("chat", job.output) if chats else f"{shell_command('generate', job.output)} --prompt …"
            )
            self.console.print(f"saved in {job.output}; try it: {try_it}", markup=False)
        elif remove:
            self.console.print("what was trained is not saved; --output FOLDER saves it", markup=False)
        self._json(vars(result))

    def _push(self, job: Any, options: Options, repository: str, result: _Result) -> None:
        """Sends the output to the hub, with a card of the base model, the data and the losses."""
        from offload.hub import push

        what, library = ("model", "transformers") if options.lora is None else ("adapter", "peft")
        about = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["offload"]}
        if "/" in options.model and not os.path.exists(options.model):
            about["base_model"] = options.model  # a name of the hub
            if options.lora is not None:
                # By this name, whoever fetches the adapter finds its base model.
                config = job.output / "adapter_config.json"
                content = json.loads(config.read_text()) | {"base_model_name_or_path": options.model}
                atomic_write(config, json.dumps(content, indent=2))
        files = ", ".join(path.name for path in options.data or options.text)
        card = {
            "base model": Path(options.model).name if "base_model" not in about else options.model,
            "data": "; ".join((files, *(line[6:] for line in job.data.lines if line.startswith("data: ")))),
            "steps": str(result.steps),
            "loss": f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}" if result.losses else "",
            "evaluation loss": "" if result.eval_loss is None else f"{result.eval_loss:.4f}",
        }
        lines = "".join(f"| {name} | {value.replace('|', ' ')} |\n" for name, value in card.items() if value)
        text = f"# {repository}\n\nThis {what} was trained by `offload train`.\n\n| | |\n|---|---|\n{lines}"
        url = push(job.output, repository, about, text)
        self.console.print(f"sent to {url}", markup=False)

    def _end(self, job: Any, damaged: bool = False) -> None:
        """Commits the complete steps, keeps the swap files, and prints how to resume."""
        try:
            job.engine.destroy(remove=False)
        except (OffloadError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
        if job.folder and damaged:
            print(
                f"stopped; bytes are damaged or cannot be read: `{shell_command('verify', job.folder)}` names them, "
                "the next command, and the step from which the same command with --resume auto goes on",
                file=sys.stderr,
            )
        elif job.folder:
            print(
                f"stopped; the last committed step is kept in {job.folder}: resume with the same command and "
                f"--resume auto, or delete the run with: {shell_command('rm', job.folder)}",
                file=sys.stderr,
            )
        else:
            print("stopped; nothing is kept: no step was committed to resume from", file=sys.stderr)

    def _facts(self, job: Any) -> _Result:
        """Returns the numbers of the run; must be called before the engine is closed."""
        reports, engine = self.reports, job.engine
        seconds, rates = [report.seconds for report in reports], median_rates(_steady(reports))
        return _Result(
            losses=[report.loss for report in reports],
            grad_norms=[report.grad_norm for report in reports],
            step_seconds=seconds,
            read_bytes=[report.read_bytes for report in reports],
            written_bytes=[report.written_bytes for report in reports],
            tflops=rates["tflops"],
            mfu=rates["mfu"],
            **facts(job, reports),
            others_share=statistics.fmean(self.shares[1:] or self.shares) if self.shares else None,
            parameters=engine.parameter_count,
            # Linux reports ru_maxrss in KiB.
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            host_budget_bytes=engine.host_memory,
            device_budget_bytes=engine.device_memory,
            first_step=reports[0].step if reports else None,
            steps=engine.global_steps,
            total_steps=job.steps,
            tokens_per_second=sum(report.tokens for report in reports) / sum(seconds) if reports else None,
            evaluations=[evaluation.line() for evaluation in self.evaluations],
            eval_loss=self.evaluations[-1].loss if self.evaluations else None,
            run=job.run,
            saved=_path(job.output),
        )

    def _table(self, result: _Result) -> None:
        if not self.reports:
            return
        # The first step records the access order.
        steady = self.reports[1:] or self.reports
        seconds = statistics.median(report.seconds for report in steady)
        read, written = (statistics.median(getattr(r, f"{name}_bytes") for r in steady) for name in ("read", "written"))
        rate = rate_words(vars(result))
        evaluated = []
        if self.evaluations:
            last, best = self.evaluations[-1], min(self.evaluations, key=lambda evaluation: evaluation.loss)
            lowest = f", least {best.loss:.4f} at step {best.step}" if best is not last else ""
            evaluated = [("evaluation loss", f"{last.loss:.4f}{lowest}")]
        table = [
            ("steps", f"{self.reports[0].step} to {self.reports[-1].step}"),
            ("loss", f"{self.reports[0].loss:.4f} to {self.reports[-1].loss:.4f}"),
            *evaluated,
            ("median step", f"{seconds:.3f} s, {steady[-1].tokens / seconds:,.0f} tokens/s"),
            *((("rate", rate),) if rate else ()),
            ("read, written a step", f"{format_size(read)}, {format_size(written)}"),
            ("bytes a parameter and step", f"{(read + written) / (result.parameters or 1):.1f}"),
            (
                "peak RAM",
                f"{format_size(result.peak_rss_bytes or 0)}, host budget {format_size(result.host_budget_bytes or 0)}",
            ),
            *rows(self.reports, vars(result)),
        ]
        self.console.print(make_table((), table))

    def _json(self, content: Mapping[str, Any]) -> None:
        if self.json_output:
            # `json_line` writes NaN as null, which every JSON parser accepts.
            print(json_line(dict(content)), flush=True)


def _path(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.absolute())


def _count(engine: Any) -> str:
    training = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    some = f", {training:,} of them train" if training < engine.parameter_count else ""
    return f"{count_of(engine.parameter_count, 'parameter')}{some}"
