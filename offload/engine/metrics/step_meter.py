"""What a step has cost: seconds, bytes, peaks of memory; with a breakdown its phases too, and what was waited for.

Without a meter none of this runs. With one, each number is a sum that only grows, of nanoseconds or bytes, and each sum
belongs to one thread at a time. The end of a step takes all of them and subtracts those of the end before: so nothing
is locked or reset, no device is waited for, and a step costs microseconds. With a breakdown a `Relay` is the engine's
time line: spans and marks that parts make in place come here by it.

    seconds = forward + backward + step + all else: the loader, evaluations, the user's own
              └─ waits lie in these three ─┘        what an evaluation waits for is not counted

Updates run beside all of that, on a thread of their own, whose seconds are sums of their own.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload.engine.metrics.reporter import Reporter
from offload.engine.metrics.writers import Record
from offload.swapper.store import DriveWrites
from offload.timeline import Phase, Row

_WAITS = (
    ("waits for read of ", "wait_for_reads"),
    ("waits for a unit that is streamed", "wait_for_reads"),
    ("waits for update of ", "wait_for_updates"),
    ("waits for all updates", "wait_for_updates"),
    ("waits for the commit", "wait_for_commits"),
    ("waits for a lease for ", "wait_for_memory"),
    ("waits for upload of ", "wait_for_uploads"),
)
_WORKER = (
    ("kernel of ", "update_kernels"),
    ("copy of states", "update_copies"),
    ("waits for reads of ", "update_waits_for_reads"),
    ("waits for writes of ", "update_waits_for_writes"),
    ("waits for ", "update_waits"),
)
_SECONDS = (
    *("forward", "backward", "step"),
    *dict.fromkeys(name for _, name in _WAITS),
    *dict.fromkeys(name for _, name in _WORKER),
)
_BYTES = ("uploaded", "gradients")

now = time.perf_counter_ns


class Stepped(NamedTuple):
    """What the engine knows of a step that it has just decided."""

    step: int
    samples: int
    """Of this step and all before."""
    lr: float
    """The learning rate of the first group, which this step has used."""
    grad_norm: float
    """Before the clip; not finite where the step was skipped."""
    skipped_steps: int
    loss_scale: float | None = None
    """None in a mode that has none."""


class Meter:
    """A listener of the time line that measures steps and gives the `reporter` a record of each, until `close`."""

    def __init__(
        self,
        device: torch.device,
        io_bytes: Callable[[], tuple[int, int]],
        drives: Callable[[], Sequence[DriveWrites]],
        breakdown: bool,
        reporter: Reporter,
    ) -> None:
        self._device, self._io_bytes, self._drives = device, io_bytes, drives
        self._breakdown, self._reporter = breakdown, reporter
        self.last: Record | None = None
        """Of the last step."""
        self._sums = dict.fromkeys((*_SECONDS, *_BYTES, Phase.EVALUATION.value), 0)
        self._last: dict[str, int] = {}
        self._began: dict[Phase, int] = {}
        """Phases under way, each with its start."""
        self._loss: torch.Tensor | None = None

    def begin(self) -> None:
        """Open what records go to; the first step begins here. Raises `ConfigError` where that is refused."""
        self._reporter.open()
        self._last = self._taken()

    def close(self) -> None:
        """Let all records be written, and close what they go to. Idempotent."""
        self._reporter.close()

    # -- what happens in a step ---------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor, first: bool) -> None:
        """What a backward has begun from; the `first` since the last boundary forgets those that were given up."""
        part = loss.detach().to(torch.float32).sum()  # memory of its own
        self._loss = part if first or self._loss is None else self._loss + part

    def on_phase_begin(self, phase: Phase) -> None:
        """Notes the start of a phase. One that has not ended by then was given up."""
        self._began[phase] = now()

    def on_phase_end(self, phase: Phase) -> None:
        """Adds the time of a phase that has begun."""
        start = self._began.pop(phase, None)
        if start is not None:
            self._sums[phase.value] += now() - start

    def on_gradient(self, nbytes: int) -> None:
        """Adds the bytes of a gradient."""
        self._sums["gradients"] += nbytes

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        """Adds a span of the time line, on the thread that has ended it. Rows that no sum is made of are ignored."""
        if row is Row.UPLOADS:
            self._sums["uploaded"] += nbytes
        elif row is Row.COMPUTE:  # what the engine itself calls so: the end of a step
            self._sums["step"] += nanoseconds
        else:
            cause = cause_of(row, name)
            if cause is not None and (row is Row.WORKER or Phase.EVALUATION not in self._began):
                self._sums[cause] += nanoseconds

    # -- the end of a step --------------------------------------------------------------------------

    def end_step(self, stepped: Stepped) -> None:
        """Give the record of this step away."""
        taken, loss = self._taken(), self._loss
        gone = {name: taken[name] - self._last[name] for name in taken}
        self._last, self._loss = taken, None
        values = {"lr": stepped.lr, "grad_norm": stepped.grad_norm, "skipped_steps": float(stepped.skipped_steps)}
        if loss is not None:
            values["loss"] = float(loss)  # the norm is known, so the device has computed this too
        if stepped.loss_scale is not None:
            values["loss_scale"] = stepped.loss_scale
        values |= {"seconds": gone["seconds"] / 1e9, "read_bytes": gone["read"], "written_bytes": gone["written"]}
        values |= self._peaks()
        if self._breakdown:
            values |= {f"{name}_seconds": gone[name] / 1e9 for name in _SECONDS}
            values |= {f"{name}_bytes": gone[name] for name in _BYTES}
            for what in ("reads", "writes"):
                values["update_waits_seconds"] += values[f"update_waits_for_{what}_seconds"]
        drives = {each.path: each.life_bytes for each in self._drives()}
        self.last = Record(stepped.step, stepped.samples, values, drives)
        self._reporter.tell(self.last)

    def _taken(self) -> dict[str, int]:
        """Every sum, as it is now."""
        read, written = self._io_bytes()
        return {**self._sums, "seconds": now(), "read": read, "written": written}

    def _peaks(self) -> dict[str, float]:
        """The most memory that the process has had so far."""
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = {"host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
        if self._device.type == "cuda":
            peaks["device_peak_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return peaks


def cause_of(row: Row, name: str) -> str | None:
    """The sum to which a span belongs; None where it belongs to none."""
    causes = _WAITS if row is Row.WAITS else _WORKER if row is Row.WORKER else ()
    return next((cause for words, cause in causes if name.startswith(words)), None)
