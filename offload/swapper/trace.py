"""The ordered uses of one step, recorded once, and what follows from it.

A use that was not foreseen is just a use now: the order is advice about what comes next, never a
promise, so a model that branches stays right and only reads a little more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

NEVER = 1 << 62
"""The distance of a unit that the trace does not use again."""


class Trace:
    """Uses of units, in the order in which a step makes them.

    `use(unit)` tells of each; `finish()` ends the step and makes its order the prediction for the next.
    Not thread-safe: the pager's lock guards it.
    """

    def __init__(self) -> None:
        self._recording: list[int] = []
        self._order: tuple[int, ...] = ()
        self._positions: dict[int, list[int]] = {}
        self._cursor = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The uses of the last finished step."""
        return self._order

    def use(self, unit: int) -> None:
        """`unit` is used now. A repeated use of the same unit in a row counts once."""
        if not self._recording or self._recording[-1] != unit:
            self._recording.append(unit)
        positions = self._positions.get(unit, [])
        index = bisect_left(positions, self._cursor)
        if index < len(positions):
            self._cursor = positions[index] + 1

    def finish(self) -> None:
        """The step is over. An empty one (a step without any forward) leaves the prediction as it is."""
        if self._recording:
            self._order = tuple(self._recording)
            self._positions = {}
            for position, unit in enumerate(self._order):
                self._positions.setdefault(unit, []).append(position)
        self._recording = []
        self._cursor = 0

    def distance(self, unit: int) -> int:
        """Uses between now and the next use of `unit`; the next step follows this one. NEVER if unknown."""
        positions = self._positions.get(unit)
        if not positions:
            return NEVER
        index = bisect_left(positions, self._cursor)
        if index < len(positions):
            return positions[index] - self._cursor
        return len(self._order) - self._cursor + positions[0]

    def upcoming(self, count: int) -> Iterator[int]:
        """The next `count` distinct units of this step, nearest first."""
        seen: set[int] = set()
        for unit in self._order[self._cursor :]:
            if len(seen) == count:
                return
            if unit not in seen:
                seen.add(unit)
                yield unit


def furthest(units: Iterable[int], trace: Trace, beyond: int = -1) -> int | None:
    """The unit whose next use is furthest from now (Belady's choice), if further than `beyond` uses.

    Ties go to the lowest index, so that equal traces give equal choices.
    """
    best, best_distance = None, beyond
    for unit in sorted(units):
        distance = trace.distance(unit)
        if distance > best_distance:
            best, best_distance = unit, distance
    return best
