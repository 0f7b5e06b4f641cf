"""Updates in two passes: the first writes the weights, for which a forward waits, the second the moments.

    in one    ─► w, m, v                                           moves 26 bytes of a bf16 parameter with fp32 moments
    in two    ─► w  (published)  …  under the backward ─► m, v     moves 18, and 18 later

Both passes compute the same function of the old moments and the gradient, so two passes have the bits of one. Together
they move more bytes. They pay while a thread waits for weights, as far as the second passes end before the backward
brings the next gradients. The update worker and its simulation decide by the same object.
"""

from __future__ import annotations


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
