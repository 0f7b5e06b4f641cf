"""The ordered uses of units in one run over the model, recorded, and what follows from them.

    train    one optimizer step: the forwards and backwards of all of its micro-batches
    eval     one forward without a graph: evaluation, a token of a generation

Each kind of run has an order of its own, so that an evaluation between two steps leaves the step's as it was. A use
that was not foreseen is just a use now: the order is advice about what comes next, never a promise, so a model that
branches stays right and only reads a little more.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator, Sequence

NEVER = 1 << 62
"""The distance of a unit that the trace does not use again."""

_LONGEST = 1 << 20
"""Uses that are recorded at most: of a loop that never steps nothing is learned."""


class Kind(enum.Enum):
    """What is run, as far as the order of uses goes."""

    TRAIN = "train"
    EVAL = "eval"


class _Order:
    """One kind's recorded order, and where in it the run is."""

    def __init__(self, wraps: bool) -> None:
        self.uses: tuple[int, ...] = ()
        self.wraps = wraps
        """Whether what comes after the last use is the first one, with the weights as they are now."""
        self.cursor = 0
        self._recording: list[int] = []
        self._positions: dict[int, list[int]] = {}

    def use(self, unit: int) -> bool:
        """Record a use; False where the order says that another one comes now."""
        if self._recording and self._recording[-1] == unit:
            return True  # a repeated use counts once
        if len(self._recording) < _LONGEST:
            self._recording.append(unit)
        foreseen = self.cursor < len(self.uses) and self.uses[self.cursor] == unit
        later = self._after_cursor(unit)
        if later is not None:
            self.cursor = later + 1
        return foreseen or not self.uses

    def finish(self) -> None:
        """The run is over. An empty one leaves the order as it is."""
        if self._recording:
            self.uses = tuple(self._recording)
            self._positions = {}
            for position, unit in enumerate(self.uses):
                self._positions.setdefault(unit, []).append(position)
        self.restart()

    def restart(self) -> None:
        """Begin again; what was recorded of a run that did not end is nothing to go by."""
        self._recording = []
        self.cursor = 0

    def distance(self, unit: int) -> int:
        later = self._after_cursor(unit)
        if later is not None:
            return later - self.cursor
        positions = self._positions.get(unit)
        return len(self.uses) - self.cursor + positions[0] if positions else NEVER

    def upcoming(self) -> Iterator[int]:
        seen: set[int] = set()
        for unit in self.uses[self.cursor :] + (self.uses[: self.cursor] if self.wraps else ()):
            if unit not in seen:
                seen.add(unit)
                yield unit

    def _after_cursor(self, unit: int) -> int | None:
        positions = self._positions.get(unit, ())
        index = bisect_left(positions, self.cursor)
        return positions[index] if index < len(positions) else None


class Trace:
    """Uses of units, in the order in which a run makes them.

    `use(unit)` tells of each; `finish()` ends the run and makes its order the prediction for the next of its kind. Not
    thread-safe: the pager's lock guards it.
    """

    def __init__(self) -> None:
        self._orders = {Kind.TRAIN: _Order(wraps=False), Kind.EVAL: _Order(wraps=True)}
        self.kind = Kind.TRAIN
        self.unforeseen = 0
        """Uses so far that came although the order said another."""

    @classmethod
    def of(cls, uses: Sequence[int], kind: Kind = Kind.TRAIN) -> Trace:
        """A trace that foresees `uses`."""
        trace = cls()
        trace.begin(kind)
        for unit in uses:
            trace.use(unit)
        trace.finish()
        return trace

    @property
    def order(self) -> tuple[int, ...]:
        """The uses of the last run of this kind."""
        return self._now.uses

    @property
    def _now(self) -> _Order:
        return self._orders[self.kind]

    def begin(self, kind: Kind) -> None:
        """What is used from now on belongs to a run of `kind`. A step goes on, also after an evaluation."""
        self.kind = kind
        if kind is Kind.EVAL:
            self._now.restart()

    def use(self, unit: int) -> None:
        """`unit` is used now."""
        if not self._now.use(unit):
            self.unforeseen += 1

    def finish(self) -> None:
        """The run is over."""
        self._now.finish()

    def distance(self, unit: int) -> int:
        """Uses between now and the next use of `unit`, where the run is repeated after its end. NEVER if unknown."""
        return self._now.distance(unit)

    def upcoming(self) -> Iterator[int]:
        """The distinct units that are used from now on with the weights that there are now, nearest first."""
        return self._now.upcoming()

    def until(self, unit: int) -> Iterator[int]:
        """All uses between now and the next one of `unit`, which is in the order."""
        order = self._now
        for distance in range(order.distance(unit)):
            yield order.uses[(order.cursor + distance) % len(order.uses)]
