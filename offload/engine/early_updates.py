"""Offers updates to the update worker while the backward still runs.

    gradients of a unit complete ─► the update that an unclipped step would make ─► offered to the update worker
    step()                       ─► equal updates are confirmed, all others dropped, and `auto` learns from it

An update under the backward is a guess. It is right if no further gradient of its unit arrives, the norm clips nothing,
and no number of the optimizer changes before `step()`. The update writes a slot that is not the newest, and that the
last commit does not name. So a wrong guess costs time and bytes, but changes no bit of the result.

Threads. `complete` and `changed` run on an autograd thread. All other methods run on the thread that calls `step()`.
One backward runs at a time, and no backward runs during `step()`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from offload.engine.gradients import GradientAccumulator
from offload.engine.optimizer import Optimizer
from offload.engine.update import SpeculationCounts, UpdateWorker
from offload.engine.update_strategy import UpdateBuilder
from offload.errors import UsageError
from offload.sizes import count_of

logger = logging.getLogger("offload")

# -- rules ---------------------------------------------------------------------------------------------


HELD_IN_A_ROW = 8
"""Number of steps in a row that must hold after a miss before `auto` guesses again. A step holds if guesses are right.

By Laplace's rule of succession, the step after n steps that held fails with a probability of 1 / (n + 2), here 1 / 10.
A miss reads and writes the states of a unit once more. So the expected extra traffic is below a tenth of an update's
traffic. A smaller number would guess within bursts of large gradients, which bring clipped steps. A larger number would
give up more right guesses than it saves wrong ones.
"""


def reason_to_clip(norm: float, clip: float, scale: float, loss_scale: float) -> str | None:
    """Returns the reason why a step clips or refuses its gradients; None if it applies them unchanged.

    `scale` is the factor of every gradient, `loss_scale` the factor of the loss.
    """
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    if scale != 1.0 / loss_scale:
        return f"the gradient of norm {norm:.4g} was clipped to {clip:g}"
    return None


@dataclass(frozen=True, slots=True)
class AutoSpeculation:
    """The state between steps that decides whether the next backward may guess."""

    speculate: Literal["auto"] | bool
    steps_that_held: int = HELD_IN_A_ROW
    """Number of steps in a row whose guesses were right, or would have been; at most `HELD_IN_A_ROW`."""

    @property
    def on(self) -> bool:
        """True if the next backward may guess."""
        return self.speculate is True or (self.speculate == "auto" and self.steps_that_held == HELD_IN_A_ROW)

    def after(self, held: bool) -> AutoSpeculation:
        """Returns the state after a step. `held` is True if all guesses of the step were right, or would have been."""
        return replace(self, steps_that_held=min(self.steps_that_held + 1, HELD_IN_A_ROW) if held else 0)


# -- early updates -------------------------------------------------------------------------------------


class NoEarlyUpdates:
    """Replaces `EarlyUpdates` in a run without early updates. Its methods do nothing."""

    last: SpeculationCounts | None = None
    """Counts of the last step; None in a run without early updates."""

    def complete(self, unit: int, counts: Sequence[int], loss_scale: float) -> None:
        """Offers the update of a unit with complete gradients. `counts` are the past updates of its parameters."""

    def changed(self, unit: int) -> None:
        """Withdraws the update of a unit after one of its gradients has changed."""

    def drop(self) -> None:
        """Withdraws all updates, because the gradients are dropped."""

    def end_step(self, step: int, reason: str | None) -> None:
        """Learns from a step whose updates have been scheduled. `reason` is the result of `reason_to_clip`."""


class EarlyUpdates(NoEarlyUpdates):
    """Decides whether to make early updates, and offers them to the update worker."""

    last: SpeculationCounts

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
        """Settings of the parameters; None until the first unit of the step is complete."""
        self._changed = False
        """True if, since the last step, a gradient has changed although its unit was complete."""
        self._before = SpeculationCounts()
        self.last = SpeculationCounts()

    def complete(self, unit: int, counts: Sequence[int], loss_scale: float) -> None:
        if not self._auto.on:
            return
        if self._settings is None:
            try:
                self._optimizer.check_groups()
            except UsageError:
                return  # step() makes the same check and raises where the user expects it
            self._settings = self._optimizer.settings()
        present = self._gradients.present(unit)
        counts = [count + (position in present) for position, count in enumerate(counts)]
        update = self._builder.update_of(unit, present, 1.0 / loss_scale, counts, self._settings)
        if update.segments:
            offers = self._worker.offers
            offers.promise(update)
            self._gradients.when_received(unit, lambda: offers.offer(update))

    def changed(self, unit: int) -> None:
        self._changed = True
        self._worker.offers.withdraw(unit)

    def drop(self) -> None:
        self._worker.offers.drop_all()
        self._forget()

    def end_step(self, step: int, reason: str | None) -> None:
        self._worker.offers.drop_all()  # a step without updates leaves offers unsettled
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
        self._gradients.completion.end_step()
