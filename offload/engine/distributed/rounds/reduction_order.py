"""The order in which a backward reduces units, expected to be that of the one before."""

from __future__ import annotations


class ReductionOrder:
    """The reductions of the backward that runs, and of the one before that reduced anything."""

    def __init__(self, predicts: bool) -> None:
        """Begins without a backward. `predicts` is False where none is expected to be as the one before."""
        self._predicts = predicts
        self._before: tuple[int, ...] = ()
        self._now: list[int] = []

    def expected(self, unit: int, in_turn: bool) -> tuple[int, ...]:
        """Records a reduction, and returns all that are expected from it on; nothing but for a backward's first.

        Args:
            unit: the unit that is reduced.
            in_turn: True if micro-batches take turns, of which each reduces other units.
        """
        self._now.append(unit)
        first = self._predicts and not in_turn and len(self._now) == 1
        return self._before if first and self._before[:1] == (unit,) else ()

    def end_backward(self) -> None:
        """Ends a backward. One that has reduced nothing, as where micro-batches add up, changes nothing."""
        if self._now:
            self._before, self._now = tuple(self._now), []
