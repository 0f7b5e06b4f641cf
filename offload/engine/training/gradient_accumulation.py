"""Which micro-batches were run since the last boundary, and whether the next `step()` is one.

by the count      a boundary every so many micro-batches, each of which ends with `step()`
as told           `set_boundary` says it for the loop: then `step()` need not be called for each micro-batch, and
                  backwards are counted instead
`no_sync`         none in it; each backward of it is a micro-batch, with or without a `step()`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from offload.errors import UsageError
from offload.sizes import count_of


class MicroBatches:
    """The backwards of one engine, counted in micro-batches and steps."""

    def __init__(self) -> None:
        self._backwards = 0
        """Outermost backwards so far in which a gradient arrived."""
        self._before = 0
        """Backwards before the last boundary."""
        self._at_step = 0
        """Backwards before the last call of `step()`."""
        self._at_passed = 0
        """Backwards before the last call of `passed()`."""
        self._told: bool | None = None
        """Whether the next `step()` is a boundary, as the user says; None where the count does."""
        self._no_sync = 0
        """Contexts of `no_sync` that are open."""
        self._apart = False
        """Whether there was one since the last boundary."""

    def count_backward(self) -> None:
        """Counts an outermost backward that has produced a gradient."""
        self._backwards += 1

    @property
    def count(self) -> int:
        """Backwards since the last boundary."""
        return self._backwards - self._before

    def is_boundary(self, accumulation: int) -> bool:
        """Whether the micro-batch that is under way, from one `step()` until the end of the next, ends a step."""
        if self._no_sync:
            return False
        return self._at_step - self._before + 1 >= accumulation if self._told is None else self._told

    def ends_step(self, accumulation: int) -> bool:
        """Whether a `step()` of now updates the weights."""
        if self._no_sync:
            return False
        return self.count >= accumulation if self._told is None else self._told

    def is_last(self, accumulation: int) -> bool:
        """Whether the backward that runs now is known to be the last before a boundary."""
        if self._no_sync:
            return False
        return self.count + 1 >= accumulation if self._told is None else self._told

    def tell(self, is_boundary: bool | None) -> None:
        """Have the user's word count, until another or None comes."""
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise UsageError(f"a boundary is True, False or None (by the count), got {is_boundary!r}")
        self._told = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """No boundary inside."""
        self._no_sync, self._apart = self._no_sync + 1, True
        try:
            yield
        finally:
            self._no_sync -= 1
            self._at_step = self._backwards

    def end(self, accumulation: int) -> None:
        """`step()` was called. Raises `UsageError` where it cannot be told how many micro-batches there were."""
        since = self._backwards - self._at_step
        if since > 1 and accumulation > 1 and self._told is None and not self._no_sync:
            raise UsageError(
                f"{count_of(since, 'backward')} ran since the last step(), gradient_accumulation_steps is "
                f"{accumulation}: whether they are one micro-batch or {since} cannot be known. Call step() after "
                f"every backward, or add the losses of a micro-batch up before backward()"
            )
        self._at_step = self._backwards

    def check_boundary(self, accumulation: int) -> None:
        """Raise `UsageError` where a boundary cannot be now."""
        count = self.count
        if self._no_sync:
            raise UsageError("no step is made inside of no_sync(): leave it before the backward that ends the step")
        if self._told is not None:
            if not self._told or not count:
                why = (
                    "set_gradient_accumulation_boundary(False) was called"
                    if count
                    else "no backward ran since the last"
                )
                raise UsageError(f"this is no boundary: {why}")
        elif count < accumulation or (count > accumulation and accumulation > 1):
            raise UsageError(
                f"{count_of(count, 'backward')} ran since the last boundary, gradient_accumulation_steps is "
                f"{accumulation} in the config; call step() after every backward, or set the accumulation to what the "
                f"loop does (a loop of Accelerate: by offload.hf.Accelerator, with the same "
                f"gradient_accumulation_steps)"
            )

    def trained(self, accumulation: int) -> int:
        """Micro-batches of the step that ends: with an accumulation of 1 several backwards are one, unless told."""
        return accumulation if self._told is None and not self._apart else self.count

    def passed(self, accumulation: int) -> int:
        """Micro-batches since this was last called, at the end of each `step()`: at least one.

        Those whose gradients were dropped are among them, since their batches were taken from the data.
        """
        since, self._at_passed = self._backwards - self._at_passed, self._backwards
        several = accumulation > 1 or self._told is not None or self._apart
        return max(since, 1) if several else 1

    def reset(self) -> None:
        """A boundary was passed, or the gradients since the last were dropped."""
        self._before = self._at_step = self._backwards
        self._apart = self._no_sync > 0
