"""Costs of each step: seconds, bytes and peaks of memory; with a breakdown also phases and waits.

A `Meter` records nothing; a `StepMeter` does. Each cost is a sum that only grows, in nanoseconds or bytes, and each sum
belongs to one thread at a time. The end of a step reads all sums and subtracts their values at the previous end. So
nothing is locked or reset, no device is waited for, and a step costs microseconds. With a breakdown, a `Relay` is the
engine's timeline and passes spans and marks to the meter on the threads that make them.

    seconds = forward + backward + step + all else: the loader, evaluations, the user's own code
              └ waits are within these three ┘      waits of an evaluation are not counted

Updates run at the same time on their own thread; its seconds are summed separately.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from offload.metrics.flops import StepProfiler
from offload.metrics.writers import EvaluationRecord, Reporter, StepRecord
from offload.swapper.store import DriveWrites
from offload.timeline import OFF, Phase, Row, Timeline, now
from offload.torch_internals import inside_backward

# -- step meter ----------------------------------------------------------------------------------------


_WAITS = (
    ("waits for read of ", "wait_for_reads"),
    ("waits for a streamed unit", "wait_for_reads"),
    ("waits for the read of ", "wait_for_reads"),
    ("waits for update of ", "wait_for_updates"),
    ("waits for all updates", "wait_for_updates"),
    ("waits for the commit", "wait_for_commits"),
    ("waits for a host buffer for ", "wait_for_memory"),
    # A thread that waits for a write of gradients or inputs to DISK needs the host memory that they leave.
    ("waits for the write of ", "wait_for_memory"),
    ("waits for upload of ", "wait_for_uploads"),
    ("waits for an upload ahead", "wait_for_uploads"),
    ("waits for a copy of weights", "wait_for_uploads"),
)
"""Waits of the training thread: beginning of the span's name, and name of the sum. The first match counts."""
_WORKER = (
    ("kernel of ", "update_kernels"),
    ("copy of states", "update_copies"),
    ("waits for reads of ", "update_waits_for_reads"),
    ("waits for writes of ", "update_waits_for_writes"),
    ("waits for ", "update_waits"),
)
"""The same for spans of the update worker."""
_SECONDS = (
    *("forward", "backward", "step"),
    *dict.fromkeys(name for _, name in _WAITS),
    *dict.fromkeys(name for _, name in _WORKER),
)
"""Names of all sums of seconds, without duplicates."""
_BYTES = ("uploaded", "downloaded", "gradients")

wall_clock = time.perf_counter_ns


class Stepped(NamedTuple):
    """The engine's facts about a step that was just decided."""

    step: int
    samples: int
    """Samples of this step and all before, on all ranks."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    grad_norm: float
    """Norm before the clip; not finite if the step was skipped."""
    skipped_steps: int
    loss_scale: float | None = None
    """None in a mode without a loss scale."""
    early_updates: tuple[int, int] | None = None
    """Units updated under the backward whose update the step confirmed, and dropped; None if the run makes none."""
    drive_budget: float | None = None
    """The fraction of the drive budget that its present period has used; None without a budget."""
    host_given_back: int = 0
    """Bytes of the host budget that the system has back, since memory is short."""
    mended: int = 0
    """Damaged places of swap files that were mended so far; see `Store.mended`."""


class Meter:
    """Receives the steps of an engine, and records nothing."""

    @property
    def measured(self) -> Mapping[str, float]:
        """Numbers of the last step; none before it."""
        return {}

    def begin(self) -> None:
        """Begins the first step."""

    def close(self) -> None:
        """Ends the last step. Idempotent."""

    def add_loss(self, loss: torch.Tensor, first: bool) -> None:
        """Adds the loss of a backward; the `first` since the last step drops the losses of abandoned micro-batches."""

    def end_step(self, stepped: Stepped) -> None:
        """Ends a step."""

    def pause(self) -> AbstractContextManager[None]:
        """Returns a context that costs the next step nothing. No update may be in progress when it begins."""
        return nullcontext()

    def evaluated(self, step: int, samples: int, loss: Any, seconds: float) -> None:
        """Receives an evaluation between two steps; the arguments are the numbers of an `EvaluationRecord`."""


class StepMeter(Meter):
    """A listener of the timeline that measures steps and passes a record of each to the `reporter`, until `close`."""

    def __init__(
        self,
        device: torch.device,
        io_bytes: Callable[[], tuple[int, int]],
        drives: Callable[[], Sequence[DriveWrites]],
        sent: Callable[[], tuple[int, int]] | None,
        breakdown: bool,
        reporter: Reporter,
        profiler: StepProfiler | None = None,
    ) -> None:
        """Prepares the sums.

        `io_bytes` returns the bytes read and written so far, `drives` the bytes written to each drive, `sent` the
        collectives and the bytes sent in them; `sent` is None for a process that trains alone. The `profiler` counts
        the operations of a step.
        """
        self._profiler = profiler
        self._device, self._io_bytes, self._drives = device, io_bytes, drives
        self._sent = sent
        self._breakdown, self._reporter = breakdown, reporter
        self._measured: Mapping[str, float] = {}
        self._sums = dict.fromkeys((*_SECONDS, *_BYTES, Phase.EVALUATION.value), 0)
        self._last: dict[str, int] = {}
        self._began: dict[Phase, int] = {}
        """Phases under way, each with its start."""
        self._loss: torch.Tensor | None = None

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def begin(self) -> None:
        """Opens the reporter; the first step begins now. Raises `ConfigError` if a writer cannot be created."""
        self._reporter.open()
        if self._profiler is not None:
            self._profiler.begin()
        self._last = self._taken()

    def close(self) -> None:
        """Waits until all records are written, and closes the reporter. Idempotent."""
        if self._profiler is not None:
            self._profiler.close()
        self._reporter.close()

    # -- events of a step ---------------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor, first: bool) -> None:
        part = loss.detach().to(torch.float32).sum()  # in memory of its own, which the user cannot change
        self._loss = part if first or self._loss is None else self._loss + part

    def on_phase_begin(self, phase: Phase) -> None:
        self._began[phase] = wall_clock()

    def on_phase_end(self, phase: Phase) -> None:
        start = self._began.pop(phase, None)
        if start is not None:
            self._sums[phase.value] += wall_clock() - start

    def on_gradient(self, nbytes: int) -> None:
        self._sums["gradients"] += nbytes

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        """Adds a span of the timeline, on the thread that has ended it. Rows without a sum are ignored."""
        if row is Row.UPLOADS:
            self._sums["uploaded"] += nbytes
        elif row is Row.DOWNLOADS:
            self._sums["downloaded"] += nbytes
        elif row is Row.COMPUTE:  # the only such span here is the engine's own end of a step
            self._sums["step"] += nanoseconds
        else:
            # update thread: works during an evaluation too. Waits of the evaluation itself are no cost of a step.
            cause = cause_of(row, name)
            if cause is not None and (row is Row.WORKER or Phase.EVALUATION not in self._began):
                self._sums[cause] += nanoseconds

    # -- the end of a step --------------------------------------------------------------------------

    def end_step(self, stepped: Stepped) -> None:
        """Makes the record of this step and passes it to the reporter."""
        taken, loss = self._taken(), self._loss
        # other threads: add to the sums meanwhile. Sums only grow, so an addition missed here counts for the next step.
        gone = {name: taken[name] - self._last[name] for name in taken}
        self._last, self._loss = taken, None
        values = {"lr": stepped.lr, "grad_norm": stepped.grad_norm, "skipped_steps": float(stepped.skipped_steps)}
        if loss is not None:
            values["loss"] = float(loss)  # no wait: the norm is known, and the device computed the loss before
        if stepped.loss_scale is not None:
            values["loss_scale"] = stepped.loss_scale
        if stepped.early_updates is not None:
            values["early_updates"], values["early_updates_dropped"] = map(float, stepped.early_updates)
        if stepped.drive_budget is not None:
            values["drive_budget_used"] = stepped.drive_budget
        if stepped.host_given_back:
            values["host_given_back_bytes"] = float(stepped.host_given_back)
        if stepped.mended:
            values["mended"] = float(stepped.mended)
        values |= {"seconds": gone["seconds"] / 1e9, "read_bytes": gone["read"], "written_bytes": gone["written"]}
        if self._sent is not None:
            values |= {"collectives": float(gone["collectives"]), "sent_bytes": gone["sent"]}
        if self._profiler is not None:
            values |= self._profiler.end_step(stepped.samples, values["seconds"])
        values |= self._peaks()
        if self._breakdown:
            values |= {f"{name}_seconds": gone[name] / 1e9 for name in _SECONDS}
            values |= {f"{name}_bytes": gone[name] for name in _BYTES}
            # `update_waits` is reported as a total: the two specific causes are added to all others.
            for what in ("reads", "writes"):
                values["update_waits_seconds"] += values[f"update_waits_for_{what}_seconds"]
        drives = {drive.path: drive.life_bytes for drive in self._drives()}
        self._measured = values
        self._reporter.report(StepRecord(stepped.step, stepped.samples, values, drives))

    @contextmanager
    def pause(self) -> Iterator[None]:
        before = self._taken()
        yield
        after = self._taken()
        self._last = {name: last + after[name] - before[name] for name, last in self._last.items()}

    def evaluated(self, step: int, samples: int, loss: Any, seconds: float) -> None:
        self._reporter.report_evaluation(EvaluationRecord(step, samples, float(loss), seconds))

    def _taken(self) -> dict[str, int]:
        read, written = self._io_bytes()
        collectives, sent = (0, 0) if self._sent is None else self._sent()
        moved = {"read": read, "written": written, "collectives": collectives, "sent": sent}
        return {**self._sums, "seconds": wall_clock(), **moved}

    def _peaks(self) -> dict[str, float]:
        # getrusage reports bytes on macOS and KiB on Linux.
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = {"host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            peaks["device_peak_bytes"] = float(module.max_memory_allocated(self._device))
        return peaks


def cause_of(row: Row, name: str) -> str | None:
    """Returns the name of the sum that a span belongs to, or None."""
    causes = _WAITS if row is Row.WAITS else _WORKER if row is Row.WORKER else ()
    return next((cause for words, cause in causes if name.startswith(words)), None)


# -- compute spans -------------------------------------------------------------------------------------
#
# Spans of the model's compute: the forward of each module, and the backward, unit by unit.
#
# forward     a module's span excludes the fetch of its own weights, since the hooks of the span run inside the engine's
# backward    a unit's span begins with the first view of its weights, or its first gradient, and ends when the backward
#             asks for another unit, when a forward is run again, or when the backward ends


class ComputeSpans:
    """The timeline's row of the model's compute. One thread at a time runs a model: the caller's, or autograd's."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        """Prepares the row; `names` are the units' names, as the timeline shows them."""
        self._timeline = timeline
        self._names = [f"backward {name}" for name in names]
        self._entered: list[tuple[nn.Module, int]] = []
        """Forwards that have begun, with their start; one that Ctrl-C has ended stays until an enclosing one ends."""
        self._unit: int | None = None
        """The unit of the backward's present span, or None."""
        self._since = 0
        self._removers: list[Callable[[], None]] = []

    def install(self, modules: Mapping[str, nn.Module], sites: Iterable[str]) -> None:
        """Records the forwards of the modules that `sites` names, until `remove`.

        The engine's own hooks enclose these: torch runs the engine's pre-hooks first, and these post-hooks first.
        """
        for name in sites if self._timeline is not OFF else ():
            self._hook(modules[name], f"forward {name}".rstrip())

    def remove(self) -> None:
        while self._removers:
            self._removers.pop()()

    def _hook(self, module: nn.Module, title: str) -> None:
        def before(called: nn.Module, args: Any) -> None:
            if called is module:  # a deep copy carries the hooks, but is another module
                self._enter(module)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module:
                self._leave(module, title)

        # Appended pre-hook and prepended post-hook, the reverse of the engine's, so that the engine's are outside.
        self._removers += [
            module.register_forward_pre_hook(torch.compiler.disable(before)).remove,
            module.register_forward_hook(torch.compiler.disable(after), prepend=True, always_call=True).remove,
        ]

    def _enter(self, module: nn.Module) -> None:
        # A forward inside of a backward is a recomputation, which ends the backward's present span.
        if not inside_backward():
            self._unit = None  # left over from an aborted backward
        self.end_span()
        self._entered.append((module, now()))

    def _leave(self, module: nn.Module, title: str) -> None:
        """Ends a forward's span, and drops the spans of inner forwards that never ended."""
        self.end_span()
        # A module may be entered twice: the innermost entry is the one that ends.
        for position in reversed(range(len(self._entered))):
            if self._entered[position][0] is module:
                self._timeline.add(Row.COMPUTE, title, self._entered[position][1], now())
                del self._entered[position:]
                return

    def leave_for(self, unit: int) -> None:
        """Ends the span of any other unit, since the backward asks for `unit`."""
        if self._unit != unit:
            self.end_span()

    def turn_to(self, unit: int) -> None:
        """Begins the span of `unit`, unless one is under way. Does nothing outside of a backward."""
        if self._unit is None and self._timeline is not OFF and inside_backward():
            self._unit, self._since = unit, now()

    def end_span(self) -> None:
        """Ends the backward's present span, if there is one."""
        if self._unit is not None:
            self._timeline.add(Row.COMPUTE, self._names[self._unit], self._since, now())
            self._unit = None


NO_SPANS = ComputeSpans(OFF, ())
"""Records nothing and installs no hook."""


def compute_spans(timeline: Timeline, names: Sequence[str]) -> ComputeSpans:
    """Returns a recorder of compute in `timeline`, or `NO_SPANS` if the timeline records nothing.

    A listener of the timeline does not receive these spans: for the meter, the row contains the ends of steps only.
    """
    # A `Relay` records nothing itself; the timeline that it forwards to may.
    recorded = timeline.recorded
    return NO_SPANS if recorded is OFF else ComputeSpans(recorded, names)


# -- span relay ----------------------------------------------------------------------------------------
#
# A timeline with a listener: the meter of steps receives each span and mark as it is recorded.


class Listener(Protocol):
    """Receiver of spans and marks, on the thread that makes them."""

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        """Notes a span that has ended."""

    def on_phase_begin(self, phase: Phase) -> None:
        """Notes the start of a phase. An earlier start without an end counts as abandoned."""

    def on_phase_end(self, phase: Phase) -> None:
        """Notes the end of a phase, if the phase has begun."""

    def on_gradient(self, nbytes: int) -> None:
        """Notes a gradient of `nbytes`."""


class Relay(Timeline):
    """A timeline that reports spans and marks to a listener, and passes spans and counters on to another timeline."""

    def __init__(self, onto: Timeline, listener: Listener) -> None:
        super().__init__(onto.path)
        self.notices = onto.notices
        self._onto, self._listener = onto, listener

    @property
    def recorded(self) -> Timeline:
        return self._onto

    @property
    def started(self) -> bool:
        return self._onto.started

    def start(self) -> None:
        self._onto.start()

    def begin(self, row: Row, name: str) -> None:
        self._onto.begin(row, name)

    def end(self, row: Row, name: str) -> None:
        self._onto.end(row, name)

    def add(self, row: Row, name: str, start: int, end: int, nbytes: int = 0) -> None:
        self._listener.on_span(row, name, end - start, nbytes)
        self._onto.add(row, name, start, end, nbytes)

    def count(self, name: str, value: int) -> None:
        self._onto.count(name, value)

    def begin_phase(self, phase: Phase) -> None:
        self._listener.on_phase_begin(phase)

    def end_phase(self, phase: Phase) -> None:
        self._listener.on_phase_end(phase)

    def add_gradient(self, nbytes: int) -> None:
        self._listener.on_gradient(nbytes)

    def close(self) -> None:
        self._onto.close()
