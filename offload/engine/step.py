"""The optimizer step: the step before is finished, this one is decided, and its updates are scheduled.

    finish the step before ─► gradient statistics of all ranks ─► norm, clip, overflow ─► updates, unit by unit

With several ranks all of them execute the same step and take the same decision.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from offload.engine.callbacks import GradientStats
from offload.engine.components import EngineComponents
from offload.engine.gradients import GradientAccumulator, NoCompletion
from offload.engine.optimizer import Optimizer, SharedStep
from offload.engine.state import TrainingState
from offload.engine.update import SpeculationCounts, UpdateWorker
from offload.engine.update_strategy import UnitUpdate, UpdateBuilder, grad_scale
from offload.errors import EngineFailed, NumericsError, RankError, UsageError
from offload.metrics.meter import Stepped
from offload.sizes import count_of

logger = logging.getLogger("offload")

# -- gradient accumulation -----------------------------------------------------------------------------
#
# Count of the micro-batches since the last optimizer step, and the decision on the next `step()`.
#
# by the count      one optimizer step every `accumulation` micro-batches; each of these ends with `step()`
# by the user       `set_gradient_accumulation_boundary` decides: `step()` need not be called for each micro-batch, and
#                   backwards are counted instead
# `no_sync`         no optimizer step within; each backward is a micro-batch, with or without a `step()` by a schedule
# a pipeline counts complete micro-batches, of several backwards each; one `step()` follows all of them


class GradientAccumulation:
    """Backwards of one engine, counted in micro-batches and optimizer steps."""

    def __init__(self) -> None:
        self._backwards = 0
        """Outermost backwards so far that produced a gradient."""
        self._before = 0
        """Backwards before the last optimizer step."""
        self._at_step = 0
        """Backwards before the last call of `step()`."""
        self._at_passed = 0
        """Backwards before the last call of `passed()`."""
        self._declared: bool | None = None
        """True if the next `step()` is an optimizer step by the user's decision; None if the count decides."""
        self._no_sync = 0
        """Number of open `no_sync` contexts."""
        self._apart = False
        """True if a `no_sync` context was open since the last optimizer step."""
        self._until: int | None = None
        """Backwards at the end of the micro-batches that run in one call; None outside of such a call."""

    def count_backward(self) -> None:
        """Counts an outermost backward that has produced a gradient."""
        self._backwards += 1

    def count_micro_batch(self) -> None:
        """Counts a micro-batch of a pipeline, which ends by itself; the next `step()` ends the last one."""
        # As if `step()` had ended the micro-batches before it: a schedule calls it for none of them.
        self._at_step, self._backwards = self._backwards, self._backwards + 1

    @property
    def count(self) -> int:
        """Backwards since the last optimizer step."""
        return self._backwards - self._before

    @property
    def by_count(self) -> bool:
        """True if the number of micro-batches decides where a step ends, and not the user."""
        return self._declared is None and not self._no_sync

    def is_boundary(self, accumulation: int) -> bool:
        """Returns True if the current micro-batch ends an optimizer step of `accumulation` micro-batches.

        A micro-batch lasts from one `step()` to the end of the next.
        """
        if self._no_sync:
            return False
        # Counted from the last `step()`: the answer must be the same before and after the backward of a micro-batch.
        return self._at_step - self._before + 1 >= accumulation if self._declared is None else self._declared

    def ends_step(self, accumulation: int) -> bool:
        """Returns True if a call of `step()` now would update the weights."""
        if self._no_sync:
            return False
        return self.count >= accumulation if self._declared is None else self._declared

    def is_last(self, accumulation: int, ahead: int = 0) -> bool:
        """Returns True if the backward that runs now is known to be the last before an optimizer step.

        If the user says that a step ends now, and several micro-batches run in one call, this is the last of them.
        The micro-batches `ahead` of this one are under way too, and not counted yet.
        """
        if self._no_sync:
            return False
        if self._declared is None:
            return self.count + ahead + 1 >= accumulation
        return self._declared and (self._until is None or self._backwards + ahead + 1 >= self._until)

    def remaining(self, accumulation: int) -> int | None:
        """Returns the micro-batches that complete the step, at least one; None if the user decides where it ends."""
        return None if self._declared is not None or self._no_sync else max(accumulation - self.count, 1)

    def check_room(self, micro_batches: int, accumulation: int) -> None:
        """Raises `UsageError` if `micro_batches` more are too many for the step."""
        remaining = None if self.remaining(accumulation) is None else max(accumulation - self.count, 0)
        if remaining is not None and micro_batches > remaining:
            raise UsageError(
                f"accumulate got {count_of(micro_batches, 'micro-batch', 'micro-batches')}, and the step needs "
                f"{remaining} more: gradient_accumulation_steps is {accumulation} in the config. Pass as many as the "
                "step needs, and call step() after them"
            )

    @contextlib.contextmanager
    def several(self, micro_batches: int) -> Iterator[None]:
        """Makes each backward of the context, at most `micro_batches`, a micro-batch. The next `step()` ends the last.

        After an exception all of them have ended.
        """
        before = self._backwards
        self._until = before + micro_batches
        try:
            yield
        except BaseException:
            self._at_step = self._backwards
            raise
        finally:
            self._until = None
        if self._backwards > before:
            self._at_step = self._backwards - 1

    def declare(self, is_boundary: bool | None) -> None:
        """Makes the user's decision count until the next one; None lets the count decide again.

        Raises `UsageError` if the argument is neither a bool nor None.
        """
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise UsageError(f"expected a boundary of True, False or None (by the count), got {is_boundary!r}")
        self._declared = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forbids optimizer steps inside of the context."""
        self._no_sync, self._apart = self._no_sync + 1, True
        try:
            yield
        finally:
            # Each backward of the context is a micro-batch, so `end` must not count it again.
            self._no_sync -= 1
            self._at_step = self._backwards

    def check_no_sync(self) -> None:
        """Raises `UsageError` inside of `no_sync`, where no optimizer step is possible."""
        if self._no_sync:
            raise UsageError(
                "step() cannot be called inside of no_sync(): leave no_sync() before the backward that ends the step"
            )

    def end(self, accumulation: int) -> None:
        """Ends a micro-batch at a call of `step()`.

        Raises `UsageError` if several backwards ran since the last call, which may be one micro-batch or several.
        """
        since = self._backwards - self._at_step
        # With an accumulation of 1, several backwards before a step are one micro-batch with several losses.
        if since > 1 and accumulation > 1 and self._declared is None and not self._no_sync:
            raise UsageError(
                f"{count_of(since, 'backward')} ran since the last step(), gradient_accumulation_steps is "
                f"{accumulation}: the engine cannot decide whether they are one micro-batch or {since}. Call step() "
                "after every backward, or add up the losses of a micro-batch before backward()"
            )
        self._at_step = self._backwards

    def check_boundary(self, accumulation: int) -> None:
        """Raises `UsageError` if no optimizer step is possible now."""
        count = self.count
        self.check_no_sync()
        if self._declared is not None:
            if not self._declared or not count:
                why = (
                    "set_gradient_accumulation_boundary(False) was called"
                    if count
                    else "no backward ran since the last one"
                )
                raise UsageError(f"step() needs a boundary: {why}")
        # Too many backwards are an error as well: the loss would be divided by another number than that of
        # micro-batches.
        elif count < accumulation or (count > accumulation and accumulation > 1):
            raise UsageError(
                f"{count_of(count, 'backward')} ran since the last boundary, gradient_accumulation_steps is "
                f"{accumulation} in the config; call step() after every backward, or set gradient_accumulation_steps "
                "to the number of the loop (a loop of Accelerate: use offload.hf.Accelerator with the same "
                "gradient_accumulation_steps; a training_step of your own: self.accelerator.backward(loss))"
            )

    def trained(self, accumulation: int) -> int:
        """Returns the micro-batches of the optimizer step that ends.

        With an accumulation of 1 several backwards are one micro-batch, unless the user decides or `no_sync` was open.
        """
        return accumulation if self._declared is None and not self._apart else self.count

    def passed(self, accumulation: int) -> int:
        """Returns the micro-batches since the last call, at least one; called at the end of each `step()`.

        Micro-batches whose gradients were dropped count too, since their batches were taken from the data.
        """
        since, self._at_passed = self._backwards - self._at_passed, self._backwards
        several = accumulation > 1 or self._declared is not None or self._apart
        return max(since, 1) if several else 1

    def reset(self) -> None:
        """Starts a new count, after an optimizer step or after gradients were dropped."""
        self._before = self._at_step = self._backwards
        # An open context counts for the next step as well.
        self._apart = self._no_sync > 0


# -- early updates -------------------------------------------------------------------------------------
#
# Offers updates to the update worker while the backward still runs.
#
#     gradients of a unit complete ─► the update that an unclipped step would make ─► offered to the update worker
#     step()                       ─► equal updates are confirmed, all others dropped, and `auto` learns from it
#
# An update under the backward is a guess. It is right if no further gradient of its unit arrives, the norm clips
# nothing, and no number of the optimizer changes before `step()`. The update writes a slot that is not the newest, and
# that the last commit does not name. So a wrong guess costs time and bytes, but changes no bit of the result.
#
# Threads. `complete` and `changed` run on an autograd thread. All other methods run on the thread that calls `step()`.
# One backward runs at a time, and no backward runs during `step()`.


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


# -- step ----------------------------------------------------------------------------------------------


class OptimizerStep:
    """The optimizer steps of one engine. Belongs to the thread that runs the model."""

    def __init__(
        self,
        components: EngineComponents,
        state: TrainingState,
        accumulation: GradientAccumulation,
        module: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        self._components, self._state, self._accumulation, self._optimizer = components, state, accumulation, optimizer
        self._update_builder = UpdateBuilder(
            layouts=components.layouts,
            trainable=components.trainable,
            module=module,
            optimizer=optimizer,
            noise_seed=state.settings.seed if components.shards.mode.rounds else None,
        )
        self.early = NoEarlyUpdates()
        """The updates of this step under the backward."""
        if not isinstance(components.gradients.completion, NoCompletion):
            assert isinstance(components.update_worker, UpdateWorker)
            self.early = EarlyUpdates(
                worker=components.update_worker,
                gradients=components.gradients,
                builder=self._update_builder,
                optimizer=optimizer,
                speculate=state.settings.config.offload.speculate,
            )
        self._unforeseen = 0
        self.grad_norm: float | None = None
        """Norm of the last step's gradient before the clip; None before the first step and after a load."""
        self.applied = False
        """True if the last `step()` updated the weights."""
        self.clip_once: float | None = None
        """Norm that replaces the config's for the clip of the next gradient; 0 for no clip, None for the config's."""

    def pass_micro_batch(self) -> None:
        """Ends a `step()` that completes no optimizer step and updates nothing."""
        self._state.micro_steps += self._accumulation.passed(self._state.settings.accumulation)
        self.applied = False

    def end_step(self) -> None:
        """Decides on the gradients since the last optimizer step, and schedules the updates.

        Raises:
            UsageError: if the engine cannot step now. Nothing has changed then.
            NumericsError: if the norm is inf or NaN and the config does not skip such a step. Gradients are dropped and
                nothing is updated.
        """
        components, updater = self._components, self._components.update_worker
        if not isinstance(updater, UpdateWorker):
            raise UsageError("no parameter of this model is trainable, so there is nothing to step")
        self._accumulation.check_boundary(self._state.settings.accumulation)
        self._state.registered.check_complete()
        self._optimizer.check_groups()
        # calling thread: waits until the update worker has ended the step before, so at most one step is in flight.
        updater.finish()
        for extension in components.extensions:
            extension.check_step(self._state.global_steps + 1, self._accumulation.count)
        # Checks that raise come first, while nothing has changed. Then live views of weights are refused, since the
        # updates would change the memory under them.
        components.unit_views.settle()
        known = self._known()
        # Gradients were computed from the scaled loss, so their norm has the loss scale as a factor.
        norm = known.norm / self._state.loss_scale
        refusal = "" if math.isfinite(norm) else self._state.scaler.refusal
        try:
            unforeseen = components.pager.counts().unforeseen
            if unforeseen > self._unforeseen:
                more = unforeseen - self._unforeseen
                logger.debug("step %d: %d uses of units were mispredicted", self._state.global_steps + 1, more)
                self._unforeseen = unforeseen
            # The uses of units in this step are the access order predicted for the next one.
            self._apply(updater, norm, known.present, components.pager.end_step(), refused=bool(refusal))
        except BaseException as error:
            # Counters, gradients and scheduled updates may disagree, also after a Ctrl-C at a wait of `Rule.complete`.
            # Nothing may be committed after it, and the last commit stays valid.
            components.pager.fail(error)
            raise
        if refusal:
            steps = self._state.global_steps
            raise NumericsError(
                f"the gradient norm of step {steps + 1} is {norm}: the step was not applied, and its gradients were "
                f"dropped; the weights are those of step {steps}. {refusal}"
            )
        # calling thread: without overlap it waits until the updates have ended, to find faults or where it is faster.
        if not self._state.settings.overlap:
            updater.finish(commit=False)

    def stepped(self) -> Stepped:
        """Returns the facts of the last step that the step meter records."""
        state, norm, early = self._state, self.grad_norm, self.early.last
        assert norm is not None
        return Stepped(
            state.global_steps,
            state.global_samples,
            float(self._optimizer.param_groups[0]["lr"]),
            norm,
            state.skipped_steps,
            state.scaler.scale if state.scaler.kind else None,
            (early.hits, early.misses) if early is not None else None,
            self._components.update_worker.commits.budget_share,
            mended=self._components.store.mended,
        )

    def _known(self) -> GradientStats:
        components, state, gradients = self._components, self._state, self._components.gradients
        elsewhere = components.world.counted_elsewhere(components.layouts)
        settings = 0 if components.world.everyone.alone else self._optimizer.checksum(self._clip)
        # Gradients that an aborted backward has added count, as in torch.
        gradients.complete()
        local_stats = functools.partial(gradients.known, elsewhere)
        # calling thread: waits until every rank is at its step. Until then it serves gathers and reductions of others.
        stats = components.agreement.step(self._accumulation.count, state.global_steps, settings, local_stats)
        # Only now all ranks know which parameters have a gradient. The extensions add zeros, which change no norm.
        for extension in components.extensions:
            extension.add_gradients(stats.present)
        return components.world.step(stats, self._accumulation.count, state.global_steps, settings)

    @property
    def _clip(self) -> float:
        """The largest norm of the next gradient; 0 for no clip."""
        return self._state.settings.clip if self.clip_once is None else self.clip_once

    def _apply(
        self, updater: UpdateWorker, norm: float, present: Sequence[set[int]], order: Sequence[int], refused: bool
    ) -> None:
        """Counts the step and schedules its updates, in the order of the uses of units.

        Gradients are dropped if the step is skipped, because the norm is inf or NaN, or refused. `present` are the
        segments of each unit that have a gradient.
        """
        state = self._state
        micro_batches = self._accumulation.trained(state.settings.accumulation)
        state.micro_steps += self._accumulation.passed(state.settings.accumulation)
        self._accumulation.reset()
        self.applied = False
        state.scaler.forget_multiplied()
        self.grad_norm = norm
        if refused:
            self._optimizer.record(True, state.loss_scale)
            self.early.drop()
            self._components.gradients.clear()
            return
        clip, self.clip_once = self._clip, None
        finite, loss_scale = math.isfinite(norm), state.loss_scale
        state.stepped(micro_batches, overflow=not finite)
        updates: list[UnitUpdate] = []
        scale = grad_scale(norm, clip, loss_scale)
        if finite:
            components, mode = self._components, self._components.shards.mode
            several = not components.world.ranks.alone
            # Ranks that step parameters together need one order, and their predictions may differ.
            updates = self._update_builder.updates(
                present, () if several and mode.steps_whole else order, scale, state.parameter_steps
            )
            # Gradients are dropped if this rank has no partition to update with them.
            for update in updates:
                if not update.segments:
                    components.gradients.drop(update.unit)
            if several:
                step = SharedStep(
                    state.global_steps - state.skipped_steps,
                    self._optimizer.param_groups,
                    components.shards,
                    components.gradients,
                    updater,
                    components.agreement,
                )
                updates = self._optimizer.rule.complete(updates, step)
        else:
            self._components.gradients.clear()
            now = state.loss_scale
            to = "" if loss_scale == now else f"; the loss scale changes from {loss_scale:g} to {now:g}"
            logger.warning("step %d skipped: its gradient norm is %s%s", state.global_steps, norm, to)
        self._components.unit_views.outdate(update.unit for update in updates)
        updater.schedule(updates, state.global_steps)
        self.early.end_step(state.global_steps, reason_to_clip(norm, clip, scale, loss_scale))
        if any(update.shared for update in updates):
            # Ranks step these together, on their workers: no other collective may come in between.
            try:
                updater.finish(commit=False)
            except EngineFailed as error:
                if isinstance(error.__cause__, RankError):  # as from a collective of this thread
                    raise error.__cause__ from None
                raise
        self.applied = finite


# -- train batch ---------------------------------------------------------------------------------------
#
# An optimizer step as one call: the model receives micro-batches as in a loop, and its losses are collected.


def check_batches(batches: Any) -> None:
    """Raises `UsageError` if `batches` is no iterator, and so could not continue from one step to the next."""
    if not isinstance(batches, Iterator):
        raise UsageError(
            f"train_batch expects an iterator of micro-batches, got {type(batches).__name__}: make the iterator "
            "before the loop, batches = iter(loader), so that each step continues after the last one"
        )


def run(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """Returns the model's loss of `batch`.

    The model returns the loss, or an output whose `.loss`, `["loss"]` or first item is the loss. The batch is a mapping
    of keyword arguments, a tuple or list of arguments, or the only argument. Raises `UsageError` if the output contains
    no loss of one element.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    loss = _loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            "a micro-batch expects a model that returns its loss, a tensor of one element, or an output with .loss; "
            f"got {type(output).__name__}. For other models call accumulate(micro_batches, loss) with a function that "
            "returns the loss, and then step()"
        )
    return loss


def _loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, tuple | list) and output else None
