"""The moment at which the gradients of a unit are complete, which is a guess until `step()`.

A unit is taken for complete when the last micro-batch of the step has given as many gradients of each parameter as the
backward before. A model that branches, a second loss, or a tied weight of another unit can make this wrong: then a
gradient arrives later, and its arrival is reported.

Threads. As for `GradientAccumulator.add`: one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from offload.engine.callbacks import EngineCallbacks
from offload.interrupts import uninterrupted


class UnitCompletion:
    """Counts the gradients of each backward, and reports units that are complete."""

    def __init__(self, callbacks: EngineCallbacks) -> None:
        self._callbacks = callbacks
        self._expected: dict[int, Counter[int]] = {}
        """For each unit the gradients of each segment in the last backward that gave the unit any."""
        self._arrived: dict[int, Counter[int]] = {}
        """The same in the backward that runs."""
        self._missing: dict[int, Counter[int]] = {}
        """Gradients that have not arrived in the backward that runs; only counts above 0."""
        self._complete: set[int] = set()
        """Units that were reported since the last step."""
        self.guesses = True
        """True if arrivals decide; False while a schedule that knows better calls `unit_complete` itself."""

    def arrived(self, unit: int, segment: int) -> None:
        """Records a gradient, which has been stored or added."""
        if unit in self._complete:
            self.changed(unit)
        counted = self._arrived.get(unit)
        if counted is None:
            counted = self._arrived[unit] = Counter()
            self._missing[unit] = self._expected.get(unit, Counter()).copy()
        counted[segment] += 1
        missing = self._missing[unit]
        if segment not in missing:
            return
        missing[segment] -= 1
        if not missing[segment]:
            del missing[segment]
        if not missing and self.guesses and unit not in self._complete and self._callbacks.is_last_micro_batch():
            self.unit_complete(unit)

    def told(self, add: Callable[[torch.Tensor], None], unit: int, segment: int) -> Callable[[torch.Tensor], None]:
        """Returns `add`, after which a gradient has `arrived`."""

        @uninterrupted
        def add_and_tell(gradient: torch.Tensor) -> None:
            add(gradient)
            self.arrived(unit, segment)

        return add_and_tell

    def unit_complete(self, unit: int) -> None:
        """Reports that no further gradient of `unit` is expected in this step."""
        self._complete.add(unit)
        self._callbacks.gradients_complete(unit)

    def changed(self, unit: int) -> None:
        """Reports that the gradient of a unit that was taken for complete has changed."""
        if unit in self._complete:
            self._callbacks.gradients_changed(unit)

    def end_backward(self) -> None:
        """Ends a backward, whose gradients are what the next one is expected to give."""
        self._expected |= self._arrived
        self._arrived, self._missing = {}, {}

    def end_step(self) -> None:
        """Forgets which units are complete: a step has used their gradients, or they were dropped."""
        self._complete.clear()
