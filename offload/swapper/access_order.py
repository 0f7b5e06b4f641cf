"""The recorded order in which a run over the model uses its units, and queries about next uses.

    train    one optimizer step: the forwards and backwards of all of its micro-batches
    eval     one forward without a graph: evaluation, one token of a generation

Each kind of run has an order of its own, so an evaluation between two steps does not disturb the order of the step.
The order is advice about the next uses, never a promise. A mispredicted use is served like any other, so a model
that branches stays correct and only reads a little more.

Which experts of a layer come next is known before they are used (`expect`): from the router, not from the run before.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

NEVER = 1 << 62
"""Distance of a unit that the recorded order does not use again."""

_LONGEST = 1 << 20
"""Limit on the number of recorded uses: a loop that never steps must not fill the memory."""


class PassKind(enum.Enum):
    """Kind of a run over the model; each kind has its own recorded order."""

    TRAIN = "train"
    EVAL = "eval"


class _Order:
    """Recorded order of one kind of run, and the current position of the run in that order."""

    def __init__(self, wraps: bool) -> None:
        self.uses: tuple[int, ...] = ()
        self.wraps = wraps
        """True if the first use follows the last one with the same weights (no update in between)."""
        self.cursor = 0
        self._recording: list[int] = []
        # Every decision asks for distances, so they are kept up to date by position instead of searched.
        self._first: dict[int, int] = {}
        """Position of each unit's first use."""
        self._following: list[int] = []
        """For each position, that of the next use of the same unit; beyond the end it is in the repeated run."""
        self._next: dict[int, int] = {}
        """For each unit, the position of its next use at or after the cursor, counted in the same way."""
        self._expected: list[int] = []
        """Units of a group that come before all else, nearest first; see `expect`."""
        self._backwards: dict[int, tuple[Sequence[int], Collection[int]]] = {}
        """For each unit that was expected: all units that were, and their group. Their backward has not begun."""

    def expect(self, units: Sequence[int], group: Collection[int]) -> None:
        """Predicts that `units` are the next uses of `group`; a run's next uses of the same units are in reverse."""
        self._pass_over(group)
        self._expected = list(units)
        for unit in group:
            self._backwards.pop(unit, None)
        self._backwards |= dict.fromkeys(units, (tuple(units), group))

    def _pass_over(self, group: Collection[int]) -> None:
        """Moves the cursor behind uses of `group`: they are what the run before chose."""
        while self.cursor < len(self.uses) and self.uses[self.cursor] in group:
            self._next[self.uses[self.cursor]] = self._following[self.cursor]
            self.cursor += 1

    def _use_expected(self, unit: int) -> bool | None:
        """Returns whether `unit` was the next one expected; None if it was not expected at all."""
        if not self._expected and unit in self._backwards:
            units, group = self._backwards[unit]
            for each in units:
                del self._backwards[each]
            self._pass_over(group)
            self._expected = list(reversed(units))
        if unit not in self._expected:
            return None
        position = self._expected.index(unit)
        del self._expected[: position + 1]
        return position == 0

    def use(self, unit: int) -> bool:
        """Records a use. Returns False if the order predicted another unit."""
        # Consecutive uses of one unit count once: no other unit is needed between them.
        if self._recording and self._recording[-1] == unit:
            self._use_expected(unit)  # the last of a forward is the first of its backward
            return True
        if len(self._recording) < _LONGEST:
            self._recording.append(unit)
        expected = self._use_expected(unit)
        if expected is not None:
            return expected
        self._expected = []
        # A mispredicted use moves the cursor to the next recorded use of this unit, so that a skipped branch costs
        # one misprediction and not one for each unit in the branch.
        found = self._next.get(unit, NEVER)
        foreseen = found == self.cursor < len(self.uses)
        if found < len(self.uses):
            for passed in range(self.cursor, found + 1):
                self._next[self.uses[passed]] = self._following[passed]
            self.cursor = found + 1
        return foreseen or not self.uses

    def finish(self) -> None:
        """Ends the run: the recording replaces the order. An empty recording leaves the order unchanged."""
        if self._recording:
            self.uses = tuple(self._recording)
            self._first = {unit: position for position, unit in reversed(list(enumerate(self.uses)))}
            following = {unit: len(self.uses) + position for unit, position in self._first.items()}
            self._following = [0] * len(self.uses)
            for position in reversed(range(len(self.uses))):
                unit = self.uses[position]
                self._following[position], following[unit] = following[unit], position
        self.restart()

    def restart(self) -> None:
        """Restarts the run and discards its recording: an interrupted run predicts nothing."""
        self._recording, self._expected, self._backwards = [], [], {}
        self.cursor = 0
        self._next = dict(self._first)

    def distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`, assuming that the run repeats; NEVER if unknown."""
        if unit in self._expected:
            return self._expected.index(unit)
        position = self._next.get(unit)
        return NEVER if position is None else position - self.cursor + len(self._expected)

    def distances(self, units: Iterable[int]) -> tuple[int, ...]:
        """Returns `distance` of each of `units`, in one call."""
        if self._expected:
            return tuple([self.distance(unit) for unit in units])
        positions, cursor = self._next, self.cursor
        return tuple([positions[unit] - cursor if unit in positions else NEVER for unit in units])

    def until(self, unit: int) -> Iterator[int]:
        """Yields every use before the next use of `unit`, which must be in the order; a unit may occur repeatedly."""
        expected = len(self._expected)
        for distance in range(self.distance(unit)):
            if distance < expected:
                yield self._expected[distance]
            else:
                # The modulo crosses the end of the run: after a step, the next step repeats the order.
                yield self.uses[(self.cursor + distance - expected) % len(self.uses)]

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units of the remaining uses, nearest first; an order that wraps adds the earlier uses."""
        seen: set[int] = set()
        for unit in self._remaining():
            if unit not in seen:
                seen.add(unit)
                yield unit

    def nearest(self, wanting: Callable[[int], bool]) -> int | None:
        """Returns the first of `upcoming` that `wanting` accepts; None if there is none."""
        return next(filter(wanting, self._remaining()), None)

    def _remaining(self) -> Iterator[int]:
        """Returns the uses that `upcoming` is about. Each decision asks for them, so no Python code runs for a use."""
        rest = itertools.islice(self.uses, self.cursor, None)
        again = itertools.islice(self.uses, self.cursor if self.wraps else 0)
        return itertools.chain(self._expected, rest, again)


class AccessOrder:
    """Recorded orders of unit uses, one for each kind of run.

    `use(unit)` records a use. `finish()` ends the run, whose order then predicts the next run of its kind. Not
    thread-safe: the pager's lock guards every call.
    """

    def __init__(self) -> None:
        self._orders = {PassKind.TRAIN: _Order(wraps=False), PassKind.EVAL: _Order(wraps=True)}
        self.kind = PassKind.TRAIN
        # The order of `kind`, which every use asks several times: a look-up by an enum runs Python code.
        self._now = self._orders[self.kind]
        self.unforeseen = 0
        """Number of mispredicted uses so far."""

    @classmethod
    def of(cls, uses: Sequence[int], kind: PassKind = PassKind.TRAIN) -> AccessOrder:
        """Returns an access order that predicts `uses` for runs of `kind`."""
        trace = cls()
        trace.begin(kind)
        for unit in uses:
            trace.use(unit)
        trace.finish()
        return trace

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the uses of the last finished run of the current kind."""
        return self._now.uses

    def begin(self, kind: PassKind) -> None:
        """Assigns the next uses to a run of `kind`. A step resumes at its position, an evaluation starts over."""
        self.kind = kind
        self._now = self._orders[kind]
        if kind is PassKind.EVAL:
            self._now.restart()

    def use(self, unit: int) -> None:
        """Records a use of `unit` in the current run."""
        if not self._now.use(unit):
            self.unforeseen += 1

    def expect(self, units: Sequence[int], group: Collection[int]) -> None:
        """Predicts that `units` are the next uses of `group` in the current run, and that those after are in reverse.

        Args:
            units: units of `group`, in the order of their uses.
            group: units of which the run uses some, others each time: the experts of a layer.
        """
        self._now.expect(units, group)

    def finish(self) -> None:
        """Ends the current run; its order predicts the next run of this kind."""
        self._now.finish()

    def distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`, assuming that the run repeats; NEVER if unknown."""
        return self._now.distance(unit)

    def distances(self, units: Iterable[int]) -> tuple[int, ...]:
        """Returns `distance` of each of `units`, in one call."""
        return self._now.distances(units)

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units that the run will use with their present weights, nearest first."""
        return self._now.upcoming()

    def nearest(self, wanting: Callable[[int], bool]) -> int | None:
        """Returns the first of `upcoming` that `wanting` accepts; None if there is none."""
        return self._now.nearest(wanting)

    def until(self, unit: int) -> Iterator[int]:
        """Yields every use before the next use of `unit`, which must be in the order; a unit may occur repeatedly."""
        return self._now.until(unit)
