"""The end of a step: what is left of the one before is finished, this one is decided, and its updates are scheduled.

    finish the step before ─► what the ranks know of the gradients ─► norm, clip, overflow ─► updates, unit by unit

On several ranks all come here, and take the same decision.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import nn

from offload.engine.callbacks import Known
from offload.engine.metrics.step_meter import Stepped
from offload.engine.optim.lamb_norms import with_ratios
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.unit_updates import Decider, UnitUpdate, grad_scale
from offload.engine.optim.update_worker import Updater
from offload.engine.training.components import Parts
from offload.engine.training.gradient_accumulation import MicroBatches
from offload.engine.training.training_state import TrainingState
from offload.errors import NumericsError, UsageError
from offload.swapper.modes import LAMB

logger = logging.getLogger("offload")


class Boundary:
    """Ends the steps of one engine. Belongs to the thread that runs the model."""

    def __init__(
        self, parts: Parts, state: TrainingState, micro: MicroBatches, module: nn.Module, optimizer: Optimizer
    ) -> None:
        self._parts, self._state, self._micro, self._optimizer = parts, state, micro, optimizer
        self._decider = Decider(parts.layouts, parts.trainable, module, optimizer)
        self._unforeseen = 0
        self.grad_norm: float | None = None
        """Of the last one's gradient, before the clip."""
        self.applied = False
        """Whether the last `step()` updated the weights."""
        self._clip_once: float | None = None
        """To what norm the next gradient is clipped, where the user says it."""

    def clip_next(self, max_norm: float) -> None:
        """Clips the gradient of the next step to `max_norm`, 0 for not at all, in place of the config's norm."""
        self._clip_once = max_norm

    def pass_micro_batch(self) -> None:
        """Ends a `step()` that is no boundary: it updates nothing."""
        self._state.count_micro_steps(self._micro.passed(self._state.choices.accumulation))
        self.applied = False

    def forget_norm(self) -> None:
        """Drops the norm of the last gradient, after a checkpoint of another moment was loaded."""
        self.grad_norm = None

    def end_step(self) -> None:
        """Decide on the gradients since the last boundary, and schedule what they change.

        Raises `UsageError` where there can be no boundary now, and nothing has changed; `NumericsError` where the norm
        is not finite: then the gradients are dropped and nothing is updated.
        """
        parts = self._parts
        if parts.updater is None:
            raise UsageError("no parameter of this model is trainable, so there is nothing to step")
        self._micro.check_boundary(self._state.choices.accumulation)
        self._state.registered.check_complete()
        self._optimizer.check_groups()
        parts.bindings.settle()
        parts.updater.finish()
        known = self._known()
        norm = known.norm / self._state.loss_scale
        refusal = self._refusal(norm)
        try:
            self._apply(parts.updater, norm, known.present, self._order(), refused=refusal is not None)
        except BaseException as error:  # Ctrl-C: half of a boundary is none, and the last commit is whole
            parts.pager.fail(error)
            raise
        if refusal is not None:
            steps = self._state.global_steps
            raise NumericsError(
                f"the gradient norm of step {steps + 1} is {norm}: the step was not applied, and its gradients were "
                f"dropped; the weights are those of step {steps}. {refusal}"
            )
        if not self._state.choices.overlap:
            parts.updater.finish(commit=False)

    def stepped(self) -> Stepped:
        """What the last step was, for who measures it."""
        state, norm = self._state, self.grad_norm
        assert norm is not None
        return Stepped(
            state.global_steps,
            state.global_samples,
            float(self._optimizer.param_groups[0]["lr"]),
            norm,
            state.skipped_steps,
            None if state.scaler is None else state.scaler.scale,
        )

    def _known(self) -> Known:
        """What is known of the gradients, by all ranks."""
        parts, state = self._parts, self._state
        parts.gradients.end_backward()  # of one that was aborted, what it had added counts, as in torch
        known = parts.gradients.known
        try:
            if parts.rounds is None:
                return known()
            settings = self._optimizer.checksum(self._clip)
            return parts.rounds.step(self._micro.count, state.global_steps, settings, known)
        except KeyboardInterrupt as error:  # a gradient on its way from the device may be half added
            parts.pager.fail(error)
            raise

    def _order(self) -> Sequence[int]:
        """The uses of units in this step, as the next one will make them."""
        unforeseen = self._parts.pager.counts().unforeseen
        if unforeseen > self._unforeseen:
            more = unforeseen - self._unforeseen
            logger.debug("step %d: %d uses of units came otherwise than foreseen", self._state.global_steps + 1, more)
            self._unforeseen = unforeseen
        return self._parts.pager.end_step()

    @property
    def _clip(self) -> float:
        """The largest norm of the next gradient; 0 leaves it as it is."""
        return self._state.choices.clip if self._clip_once is None else self._clip_once

    def _refusal(self, norm: float) -> str | None:
        """What to do about a norm that is not finite and cannot be skipped; None where the step may go on."""
        scaler = self._state.scaler
        if math.isfinite(norm):
            return None
        if scaler is None:
            if self._state.choices.skip_nonfinite:
                return None
            return 'Lower the learning rate, look at the batch, or set "on_nonfinite": "skip" in the "offload" block'
        if not scaler.exhausted:
            return None
        return (
            f"The loss scale is {scaler.scale:g} already, the least that it may be: lower the learning rate, look at "
            f"the batch, or train in bf16"
        )

    def _apply(
        self, updater: Updater, norm: float, present: Sequence[set[int]], order: Sequence[int], refused: bool
    ) -> None:
        """Count the step and schedule its updates; drop its gradients where it is skipped or `refused`."""
        state = self._state
        micro_batches = self._micro.trained(state.choices.accumulation)
        state.count_micro_steps(self._micro.passed(state.choices.accumulation))
        self._micro.reset()
        self.applied = False
        if state.scaler is not None:
            state.scaler.forget_multiplied()
        self.grad_norm = norm
        if refused:
            self._optimizer.record(True, state.loss_scale)
            self._parts.gradients.clear()
            return
        clip, self._clip_once = self._clip, None
        finite, loss_scale = math.isfinite(norm), state.loss_scale
        state.stepped(micro_batches, overflow=not finite)
        updates: list[UnitUpdate] = []
        if finite:
            updates = self._updates(updater, present, order, grad_scale(norm, clip, loss_scale))
        else:
            self._parts.gradients.clear()
            now = state.loss_scale
            to = "" if loss_scale == now else f"; the loss scale goes from {loss_scale:g} to {now:g}"
            logger.warning("step %d skipped: its gradient norm is %s%s", state.global_steps, norm, to)
        updater.schedule(updates, state.global_steps)
        self.applied = finite

    def _updates(
        self, updater: Updater, present: Sequence[set[int]], order: Sequence[int], scale: float
    ) -> list[UnitUpdate]:
        """What each unit is told; gradients of which this rank has no part to update are dropped."""
        parts = self._parts
        updates = self._decider.updates(present, order, scale, self._state.parameter_steps)
        for update in updates:
            if not update.segments:
                parts.gradients.drop(update.unit)
        if parts.rounds is not None and parts.held.mode.optimizer == LAMB:
            return with_ratios(updates, parts.held, parts.gradients, updater, parts.rounds)
        return updates
