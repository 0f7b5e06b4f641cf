"""Count of the micro-batches since the last optimizer step, and the decision on the next `step()`.

by the count      one optimizer step every `accumulation` micro-batches, each of which ends with `step()`
by the user       `set_gradient_accumulation_boundary` decides: `step()` need not be called for each micro-batch, and
                  backwards are counted instead
`no_sync`         no optimizer step within; each backward is a micro-batch, with or without a `step()`
by a schedule     a pipeline counts complete micro-batches, of several backwards each; one `step()` follows all of them
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from offload.errors import UsageError
from offload.sizes import count_of


class GradientAccumulation:
    """Backwards of one engine, counted in micro-batches and optimizer steps."""

    def __init__(self) -> None:
        self._backwards = 0
        """Outermost backwards so far in which a gradient arrived."""
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

    def is_boundary(self, accumulation: int) -> bool:
        """Returns True if the current micro-batch ends an optimizer step.

        A micro-batch lasts from one `step()` to the end of the next.

        Args:
            accumulation: micro-batches of an optimizer step.
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

        Args:
            accumulation: micro-batches of an optimizer step.
            ahead: micro-batches before this one that are under way too, and not counted yet.
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
        """Makes each backward of the context a micro-batch. The next `step()` ends the last one.

        After an exception all of them have ended.

        Args:
            micro_batches: their number, or more.
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

        Raises:
            UsageError: the argument is neither a bool nor None.
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
            # Backwards of the context are micro-batches of their own, so `end` must not count them again.
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

        Raises:
            UsageError: several backwards ran since the last call, which may be one micro-batch or several.
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
