"""Seconds of the forwards of an engine, and what they waited for."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from offload.engine.metrics.step_meter import cause_of
from offload.timeline import Phase, Row, now


class PassSeconds(NamedTuple):
    """Seconds of forwards."""

    total: float
    """All forwards, from the first module to the last."""
    drive: float
    """Waits for reads of weights. A unit that is larger than a host buffer is read and copied at once: all of it."""
    copies: float
    """Copies of weights to the device, as far as the thread of the model makes them: on a CPU all of it."""

    @property
    def compute(self) -> float:
        """All else; on a GPU also waits of the device for copies, which are not measured."""
        return max(self.total - self.drive - self.copies, 0.0)

    @property
    def limit(self) -> str:
        """The largest part: "drive", "copies" or "compute"."""
        parts = {"drive": self.drive, "copies": self.copies, "compute": self.compute}
        return max(parts, key=lambda name: parts[name])

    def since(self, before: PassSeconds) -> PassSeconds:
        """Returns the seconds that came after `before`."""
        return PassSeconds(*(now - then for now, then in zip(self, before, strict=True)))


class PassMeter:
    """A listener of the timeline that adds up the forwards. The model's thread reports; another may read."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._began: int | None = None

    @property
    def seconds(self) -> PassSeconds:
        """Seconds of all forwards so far."""
        return PassSeconds(*(self._sums[name] / 1e9 for name in PassSeconds._fields))

    def on_phase_begin(self, phase: Phase) -> None:
        """Notes the start of a forward. An earlier start without an end counts as abandoned."""
        self._began = now()

    def on_phase_end(self, phase: Phase) -> None:
        """Adds a forward that has begun."""
        if self._began is not None and phase is Phase.EVALUATION:
            self._sums["total"] += now() - self._began
            self._began = None

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        """Adds a wait or a copy. Between forwards, those of prefetches are no cost of a forward."""
        if self._began is None:  # also before the first forward: the filling of host memory
            return
        # A span "in chunks" is a unit that is read and copied piece by piece, and contains its waits; its copies are
        # the smaller part.
        in_chunks = name.endswith(" in chunks")
        if row is Row.UPLOADS:
            self._sums["drive" if in_chunks else "copies"] += nanoseconds
        elif in_chunks:
            return
        elif cause_of(row, name) in ("wait_for_reads", "wait_for_memory"):
            self._sums["drive"] += nanoseconds

    def on_gradient(self, nbytes: int) -> None:
        """Ignores a gradient: nothing trains."""
