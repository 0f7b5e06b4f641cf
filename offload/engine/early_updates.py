"""Updates under the backward, as the thread that runs the model sees them.

    gradients of a unit complete ─► the update that an unclipped step would make ─► offered to the update worker
    step()                       ─► equal updates are confirmed, all others dropped, and `auto` learns from it

Threads. `complete` and `changed` run on autograd's threads, everything else on the thread that calls `step()`. One
backward runs at a time, and none during `step()`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from offload.engine.gradients import GradientAccumulator
from offload.engine.optimizer import Optimizer
from offload.engine.update import HELD_IN_A_ROW, AutoSpeculation, SpeculationCounts, UpdateWorker
from offload.engine.update_strategy import UpdateBuilder
from offload.errors import UsageError
from offload.sizes import count_of

logger = logging.getLogger("offload")


class EarlyUpdates:
    """Offers of updates to the worker, and the decision whether to make any."""

    def __init__(
        self,
        *,
        worker: UpdateWorker,
        gradients: GradientAccumulator,
        builder: UpdateBuilder,
        optimizer: Optimizer,
        speculate: Literal["auto"] | bool,
    ) -> None:
        self._worker, self._gradients, self._builder, self._optimizer = worker, gradients, builder, optimizer
        self._auto = AutoSpeculation(speculate)
        self._settings: Mapping[int, Mapping[str, Any]] | None = None
        """The groups of the parameters, from the first complete unit of a step on."""
        self._changed = False
        """True if a gradient has changed since the last step after its unit was complete."""
        self._before = SpeculationCounts()
        self.last = SpeculationCounts()
        """Counts of the last step."""

    def complete(self, unit: int, counts: Sequence[int], loss_scale: float) -> None:
        """Offers the update of a unit whose gradients are complete.

        Args:
            unit: the unit.
            counts: number of updates of each parameter of the unit so far.
            loss_scale: factor of the loss.
        """
        if not self._auto.on:
            return
        if self._settings is None:
            try:
                self._optimizer.check_groups()
            except UsageError:
                return  # raised by step(), which makes the same check, where the user expects it
            self._settings = self._builder.settings()
        present = self._gradients.present(unit)
        counts = [count + (position in present) for position, count in enumerate(counts)]
        update = self._builder.update_of(unit, present, 1.0 / loss_scale, counts, self._settings)
        if update.segments:
            offers = self._worker.offers
            offers.promise(update)
            self._gradients.when_received(unit, lambda: offers.offer(update))

    def changed(self, unit: int) -> None:
        """Withdraws the update of a unit after one of its gradients has changed."""
        self._changed = True
        self._worker.offers.withdraw(unit)

    def drop(self) -> None:
        """Withdraws all updates: the gradients are dropped."""
        self._worker.offers.drop_all()
        self._forget()

    def end_step(self, step: int, reason: str | None) -> None:
        """Learns from a step whose updates have been scheduled.

        Args:
            step: number of the step.
            reason: why the step did not apply its gradients as they are; None if it did.
        """
        self._worker.offers.drop_all()  # of a step that schedules nothing
        now, before, changed = self._worker.offers.counts, self._before, self._changed
        hits, misses = now.hits - before.hits, now.misses - before.misses
        self.last = SpeculationCounts(hits=hits, misses=misses)
        was_on = self._auto.on
        self._auto = self._auto.after(reason is None and not changed and not misses)
        self._before = now
        self._forget()
        if misses:
            reason = reason or ("a gradient arrived after its unit was complete" if changed else "something changed")
            pause = (
                f"; none is made early until {HELD_IN_A_ROW} steps in a row would have held"
                if was_on and not self._auto.on
                else ""
            )
            logger.info(
                "step %d: %s under the backward of no use, %d confirmed: %s%s",
                step,
                count_of(misses, "update"),
                hits,
                reason,
                pause,
            )
        elif hits:
            logger.debug("step %d: %s under the backward confirmed", step, count_of(hits, "update"))

    def _forget(self) -> None:
        self._settings, self._changed = None, False
        if self._gradients.completion is not None:
            self._gradients.completion.end_step()
