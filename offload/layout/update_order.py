"""The order of a step's updates: two lanes beside each other, and updates in two passes.

    MEMORY                                        kernel                   at the speed of memory
    STREAMED   reads of the tiles that follow ─► kernel ─► writes          at the speed of the drives

Both lanes share one kernel, and each updates its units in the order of their next use. In the lane of memory an update
may take two passes. The first writes the weights, for which a forward waits, the second the moments.

    in one    ─► w, m, v                                           moves 26 bytes of a bf16 parameter with fp32 moments
    in two    ─► w  (published)  …  under the backward ─► m, v     moves 18, and 18 later

Both passes compute the same function of the old moments and the gradient, so two passes have the bits of one. Together
they move more bytes. They pay while a thread waits for weights, as far as the second passes end before the backward
brings the next gradients. The update worker and its simulation decide by the same functions.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class Lane(enum.Enum):
    """The lane of a unit's update. The first one takes tile buffers first: it needs at most one at a time."""

    MEMORY = "memory"
    """Nothing is read from the drives, and nothing is written to them."""
    STREAMED = "streamed"
    """The drives read or write states, or read the gradient. Updates that share the drives keep their order."""


def next_lane(begun: Collection[Lane], reads_ended: bool) -> Lane | None:
    """Returns the lane whose oldest tile is computed next, or None if no tile has begun.

    `begun` are the lanes with tiles that have begun and are not computed. `reads_ended` is True if the oldest streamed
    tile has been read.
    """
    # A streamed tile gives the drives a write and a read to do, for which they need far longer than the kernel.
    if Lane.STREAMED in begun and (reads_ended or Lane.MEMORY not in begun):
        return Lane.STREAMED
    return Lane.MEMORY if begun else None


class SecondPasses:
    """The second passes of a step, and how many elements may have one in the next step.

    The number follows the run. If threads have waited for second passes, it falls by the part of their time that was
    waited for; else it grows by a sixteenth of all elements. The caller holds a lock.
    """

    def __init__(self, numel: int) -> None:
        """Begins without a limit; `numel` counts the elements of all units."""
        self._numel = self._most = numel
        self._begun = self._ended = 0
        self._worked = self._waited = 0.0

    @property
    def pending(self) -> bool:
        """True if a second pass has not ended."""
        return self._ended < self._begun

    def begin_step(self) -> None:
        """Begins a step, after all second passes of the one before have ended."""
        assert not self.pending
        if self._waited:
            self._most = int(self._begun * max(0.0, 1 - self._waited / max(self._worked, self._waited)))
        else:
            self._most = min(self._numel, self._most + -(-self._numel // 16))
        self._begun = self._ended = 0
        self._worked = self._waited = 0.0

    def begin(self, numel: int) -> bool:
        """Returns True if an update of `numel` elements may take two passes, and counts its second one as pending."""
        if self._begun + numel > self._most:
            return False
        self._begun += numel
        return True

    def end(self, numel: int, seconds: float) -> None:
        """Counts a second pass of `numel` elements, which took `seconds`, as ended."""
        self._ended += numel
        self._worked += seconds

    def waited(self, seconds: float) -> None:
        """Records that a thread has waited while a second pass was pending."""
        self._waited += seconds
