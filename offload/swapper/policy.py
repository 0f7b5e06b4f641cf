"""Pure decisions of the pager: units to prefetch, units to evict, and offsets on the device.

    reads     the next uses, nearest first, into host memory that is free or holds only units used later
    uploads   the same for device memory, at offsets that leave room for any other unit next to the pinned ones
    victims   the units whose next use is furthest away (Belady's choice), as few as free one contiguous block
    lookups   the pages that contain some rows of a unit, unless a read of the whole unit costs less

The pager applies the decisions to memory, `simulate` applies them to numbers.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from offload.sizes import PAGE, align_up
from offload.swapper.memory.allocator import Allocator, Region, free_regions, gaps

# -- access order --------------------------------------------------------------------------------------
#
# The recorded order in which a run over the model uses its units, and queries about next uses.
#
#     train    one optimizer step: the forwards and backwards of all of its micro-batches
#     eval     one forward without a graph: evaluation, one token of a generation
#
# Each kind of run has an order of its own, so an evaluation between two steps does not disturb the order of the step.
# The order is advice about the next uses, never a promise. The pager serves a mispredicted use like any other, so a
# model that branches stays correct and only reads a little more.
#
# The router, not the run before, determines which experts of a layer come next, and it does so before their use
# (`expect`).


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

    def __init__(self, wraps: bool, moved: Callable[[int], None]) -> None:
        self._moved = moved
        """Called for each unit whose next use has changed; not at `finish` and `restart`, where all may have."""
        self.uses: tuple[int, ...] = ()
        self.wraps = wraps
        """True if the first use follows the last one with the same weights (no update in between)."""
        self.cursor = 0
        self._recording: list[int] = []
        self._recorded_repeats: list[int] = []
        self._repeats: tuple[int, ...] = ()
        """For each of `uses`, how often the unit is used once more before any other unit: by the next micro-batch."""
        self._repeats_left = 0
        # Every decision asks for distances, so they are kept up to date by position instead of searched.
        self._first: dict[int, int] = {}
        """Position of each unit's first use."""
        self._following: list[int] = []
        """For each position, the position of the unit's next use; a position beyond the end is in the repeated run."""
        self._next: dict[int, int] = {}
        """For each unit, the position of its next use at or after the cursor, counted in the same way."""
        self._expected: tuple[int, ...] = ()
        """Units of a group that come before all else, nearest first; see `expect`. Those before `_passed` are over."""
        self._passed = 0
        self._next_expected: dict[int, int] = {}
        """For each expected unit, its first index at or after `_passed`."""
        self._following_expected: list[int] = []
        """For each index, the next index of the same unit; -1 if there is none."""
        self._backwards: dict[int, tuple[Sequence[int], Collection[int]]] = {}
        """For each expected unit whose backward has not begun: all units of the same `expect` call, and their group."""

    def expect(self, units: Sequence[int], group: Collection[int], backward: bool, at_once: bool) -> None:
        """Predicts that `units` are the next uses of `group`, and with `backward` that the run then reverses them.

        With `at_once` the reverse follows the last of them, where one use serves both.
        """
        self._pass_over(group)
        self._predict([*units, *reversed(units[:-1])] if at_once else units)
        for unit in group:
            self._backwards.pop(unit, None)
        if backward and not at_once:
            self._backwards |= dict.fromkeys(units, (tuple(units), group))

    def _predict(self, units: Sequence[int]) -> None:
        """Replaces the expected units that are left."""
        left = self._expected[self._passed :]
        self._expected, self._passed = tuple(units), 0
        self._next_expected, self._following_expected = {}, [-1] * len(units)
        for index in reversed(range(len(units))):
            self._following_expected[index] = self._next_expected.get(units[index], -1)
            self._next_expected[units[index]] = index
        for unit in {*left, *units}:
            self._moved(unit)

    def _pass(self, position: int) -> None:
        """Moves the cursor past the use at `position`."""
        while self.cursor <= position:
            unit = self.uses[self.cursor]
            self._next[unit] = self._following[self.cursor]
            self.cursor += 1
            self._moved(unit)

    def _pass_over(self, group: Collection[int]) -> None:
        """Moves the cursor past recorded uses of `group`: the run before chose these units."""
        while self.cursor < len(self.uses) and self.uses[self.cursor] in group:
            self._pass(self.cursor)

    def _use_expected(self, unit: int) -> bool | None:
        """Returns True if `unit` was the next expected unit, False if a later one, None if it was not expected."""
        if self._passed == len(self._expected) and unit in self._backwards:
            units, group = self._backwards[unit]
            for choice in units:
                del self._backwards[choice]
            self._pass_over(group)
            self._predict(units[::-1])
        position, first = self._next_expected.get(unit), self._passed
        if position is None:
            return None
        self._passed = position + 1
        for index in range(first, position + 1):
            passed, following = self._expected[index], self._following_expected[index]
            if following < 0:
                del self._next_expected[passed]
            else:
                self._next_expected[passed] = following
            self._moved(passed)
        return position == first

    def use(self, unit: int) -> bool:
        """Records a use. Returns False if the order predicted another unit."""
        # Consecutive uses of one unit are one position: no other unit is needed between them.
        if self._recording and self._recording[-1] == unit:
            self._use_expected(unit)  # the last of a forward is the first of its backward
            self._recorded_repeats[-1] += 1
            self._repeats_left = max(0, self._repeats_left - 1)
            return True
        if len(self._recording) < _LONGEST:
            self._recording.append(unit)
            self._recorded_repeats.append(0)
        self._repeats_left = 0
        expected = self._use_expected(unit)
        if expected is not None:
            return expected
        self._predict(())
        # A mispredicted use moves the cursor to the next recorded use of this unit, so that a skipped branch costs
        # one misprediction and not one for each unit in the branch.
        position = self._next.get(unit, NEVER)
        foreseen = position == self.cursor < len(self.uses)
        if position < len(self.uses):
            self._pass(position)
            self._repeats_left = self._repeats[position]
        return foreseen or not self.uses

    @property
    def repeated(self) -> int | None:
        """The unit of the last use, if the order predicts that it is used again before any other unit."""
        return self._recording[-1] if self._repeats_left else None

    def finish(self) -> None:
        """Ends the run: the recording replaces the order. An empty recording leaves the order unchanged."""
        if self._recording:
            self.uses, self._repeats = tuple(self._recording), tuple(self._recorded_repeats)
            self._first = {unit: position for position, unit in reversed(list(enumerate(self.uses)))}
            following = {unit: len(self.uses) + position for unit, position in self._first.items()}
            self._following = [0] * len(self.uses)
            for position in reversed(range(len(self.uses))):
                unit = self.uses[position]
                self._following[position], following[unit] = following[unit], position
        self.restart()

    def restart(self) -> None:
        """Restarts the run and discards its recording: an interrupted run predicts nothing."""
        self._recording, self._recorded_repeats, self._backwards = [], [], {}
        self._expected, self._next_expected, self._following_expected = (), {}, []
        self.cursor = self._repeats_left = self._passed = 0
        self._next = dict(self._first)

    def position(self, unit: int) -> int:
        """Returns a number that is larger the later the next use of `unit` is; NEVER if the unit has none.

        It stays the same until this use is over. Expected uses have negative positions.
        """
        index = self._next_expected.get(unit)
        return self._next.get(unit, NEVER) if index is None else index - len(self._expected)

    def in_run(self, position: int) -> bool:
        """Returns True if the use at `position` is one of those whose units `upcoming` yields."""
        return position < len(self.uses) or (self.wraps and position < NEVER)

    def distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`, assuming that the run repeats; NEVER if unknown."""
        position = self.position(unit)
        if position == NEVER:
            return NEVER
        return position + len(self._expected) - self._passed - (self.cursor if position >= 0 else 0)

    def distances(self, units: Iterable[int]) -> tuple[int, ...]:
        if self._next_expected:
            return tuple([self.distance(unit) for unit in units])
        positions, cursor = self._next, self.cursor
        return tuple([positions[unit] - cursor if unit in positions else NEVER for unit in units])

    def until(self, unit: int) -> Iterator[int]:
        """Yields every use before the next use of `unit`, which must be in the order; a unit may occur repeatedly."""
        expected = len(self._expected) - self._passed
        for distance in range(self.distance(unit)):
            if distance < expected:
                yield self._expected[self._passed + distance]
            else:
                # The modulo continues at the start of the run: after a step, the next step repeats the order.
                yield self.uses[(self.cursor + distance - expected) % len(self.uses)]

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units of the remaining uses, nearest first; an order that wraps adds the earlier uses."""
        seen: set[int] = set()
        rest = map(self.uses.__getitem__, range(self.cursor, len(self.uses)))  # an islice would step over all before
        again = itertools.islice(self.uses, self.cursor if self.wraps else 0)
        for unit in itertools.chain(self._expected[self._passed :], rest, again):
            if unit not in seen:
                seen.add(unit)
                yield unit


class AccessOrder:
    """Recorded orders of unit uses, one for each kind of run.

    `use(unit)` records a use. `finish()` ends the run, whose order then predicts the next run of its kind. Not
    thread-safe: the pager's lock guards every call.
    """

    def __init__(self) -> None:
        self._orders = {
            PassKind.TRAIN: _Order(wraps=False, moved=self._moved),
            PassKind.EVAL: _Order(wraps=True, moved=self._moved),
        }
        self._sets: list[UnitsByNextUse] = []
        self.kind = PassKind.TRAIN
        # The order of the current kind. Every use reads it several times, and a look-up by an enum runs Python code.
        self._now = self._orders[self.kind]
        self.unforeseen = 0
        """Number of mispredicted uses so far."""

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the uses of the last finished run of the current kind."""
        return self._now.uses

    def begin(self, kind: PassKind) -> None:
        """Assigns the next uses to a run of `kind`. A step resumes at its position, an evaluation starts over."""
        before, self.kind = self.kind, kind
        self._now = self._orders[kind]
        if kind is PassKind.EVAL:
            self._now.restart()
        elif before is kind:
            return  # a micro-batch goes on in the order of its step
        for units in self._sets:
            units.sort_again()

    def units(self) -> UnitsByNextUse:
        """Returns an empty set of units that this order keeps sorted."""
        self._sets.append(UnitsByNextUse(self))
        return self._sets[-1]

    def _moved(self, unit: int) -> None:
        for units in self._sets:
            units.moved(unit)

    def use(self, unit: int) -> None:
        """Records a use of `unit` in the current run."""
        if not self._now.use(unit):
            self.unforeseen += 1

    def expect(
        self, units: Sequence[int], group: Collection[int], backward: bool = True, at_once: bool = False
    ) -> None:
        """Predicts that the current run next uses `units` of `group`, and that it then uses them in reverse order.

        `units` are in the order of their uses. Each run uses some units of the group, not always the same ones: the
        experts of a layer, or the pieces of a table that a lookup fetches. A lookup needs no weights in the `backward`.
        In a recomputation the backward follows `at_once`: each unit of the block is used twice before any other block.
        """
        self._now.expect(units, group, backward, at_once)

    def finish(self) -> None:
        """Ends the current run; its order predicts the next run of this kind."""
        self._now.finish()
        for units in self._sets:
            units.sort_again()

    @property
    def repeated(self) -> int | None:
        """The unit of the last use, if it is predicted to be used again before any other unit; else None."""
        return self._now.repeated

    def distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`, assuming that the run repeats; NEVER if unknown.

        Consecutive uses count once, so the distance of the `repeated` unit is that of its use after another unit.
        """
        return self._now.distance(unit)

    def position(self, unit: int) -> int:
        """Returns a number that is larger the later the next use of `unit` is, and stays the same until this use."""
        return self._now.position(unit)

    def in_run(self, position: int) -> bool:
        """Returns True if `upcoming` yields the unit whose next use is at `position`."""
        return self._now.in_run(position)

    def distances(self, units: Iterable[int]) -> tuple[int, ...]:
        """Returns `distance` of each of `units`, in one call."""
        return self._now.distances(units)

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units that the run will use with their present weights, nearest first."""
        return self._now.upcoming()

    def until(self, unit: int) -> Iterator[int]:
        """Yields every use before the next use of `unit`, which must be in the order; a unit may occur repeatedly."""
        return self._now.until(unit)


class UnitsByNextUse:
    """A set of units in the order of their next uses: a decision looks at a few of them, not at thousands.

    `AccessOrder.units` makes it. A unit must not be added or removed, and no use recorded, while an iterator is in use.
    """

    def __init__(self, order: AccessOrder) -> None:
        self._order = order
        self._keys: dict[int, tuple[int, int]] = {}
        """Units with their keys in `_by_use`."""
        self._by_use: list[tuple[int, int]] = []
        """The furthest next use first; of units that are never used, the lowest index."""
        self._stale = False
        """True if all keys may have changed: the next look at the order sorts the units again."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, unit: object) -> bool:
        return unit in self._keys

    def put(self, unit: int, belongs: bool) -> None:
        """Adds a unit if it `belongs` to the set, or removes it."""
        if belongs is (unit in self._keys):
            return
        if belongs:
            self._keys[unit] = key = -self._order.position(unit), unit
            if not self._stale:
                bisect.insort(self._by_use, key)
        else:
            key = self._keys.pop(unit)
            if not self._stale:
                del self._by_use[bisect.bisect_left(self._by_use, key)]

    def moved(self, unit: int) -> None:
        """Follows a change of the next use of a unit."""
        if unit in self._keys and not self._stale:
            self.put(unit, False)
            self.put(unit, True)

    def sort_again(self) -> None:
        """Follows a change of all next uses."""
        self._stale = True

    def latest(self) -> Iterator[int]:
        """Yields the units, the furthest next use first; of units that are never used, the lowest index first."""
        return (unit for _, unit in self._sorted())

    def upcoming(self) -> Iterator[int]:
        """Yields the units that `AccessOrder.upcoming` yields too, nearest first."""
        for position, unit in reversed(self._sorted()):
            if not self._order.in_run(-position):
                return
            yield unit

    def _sorted(self) -> list[tuple[int, int]]:
        if self._stale:
            position = self._order.position
            self._keys = {unit: (-position(unit), unit) for unit in self._keys}
            self._by_use, self._stale = sorted(self._keys.values()), False
        return self._by_use


# -- policy --------------------------------------------------------------------------------------------


_ANSWERS = 4096
"""Number of cached choices of an offset: enough for two steps of a model with some hundreds of units."""

_LATEST = 64
"""Number of evictable units among which the best offset is sought first: the units whose next use is furthest away."""
_BY_SCORE = operator.itemgetter(0)
_BY_OFFSET = operator.itemgetter(1)


class UnitBlock(NamedTuple):
    """Memory of one unit."""

    unit: int
    offset: int
    nbytes: int


class Limits(NamedTuple):
    """Limits that a config may set in addition to the budgets, in bytes of weights; None for no limit but memory."""

    ahead: int | None = None
    """Bytes of upcoming units that are prefetched: at least one unit, or none if 0."""
    reuse: int | None = None
    """Bytes used before a unit's next use, above which the unit is evicted at its release."""


class Eviction(NamedTuple):
    """Offset for a unit, free once the blocks of `victims` are freed."""

    offset: int
    victims: tuple[int, ...]
    safe: bool = True
    """True if the companions of the unit fit as well once nothing else is in use."""


class Companions(NamedTuple):
    """Other units that a module has on the device at the same time as a unit."""

    units: tuple[tuple[int, int], ...]
    """Index and bytes of each."""
    nbytes: int = 0
    """Bytes of the largest unit that joins them, one at a time; 0 if none does."""


class Company(NamedTuple):
    """Companions of the unit to place, as far as they have a place."""

    placed: tuple[UnitBlock, ...]
    missing: tuple[int, ...]
    """Bytes of each companion without a place, the largest first."""


class Floor(NamedTuple):
    """Region [start, stop) for units that come and go, and the bytes of the largest unit except the one to place."""

    start: int
    stop: int
    largest: int


class IdleBlocks:
    """Device memory of the units that may be evicted, by next use and by offset."""

    def __init__(self, order: AccessOrder) -> None:
        self.order = order
        self._blocks: dict[int, UnitBlock] = {}
        self._units = order.units()
        self.by_offset: list[UnitBlock] = []
        self.offsets: list[int] = []
        """Of the blocks `by_offset`."""
        # Neighbours are merged as an allocator merges holes, so that few regions are left of thousands of experts.
        self._regions = Allocator(0)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: UnitBlock) -> None:
        self._blocks[block.unit] = block
        self._units.put(block.unit, True)
        at = bisect.bisect_left(self.offsets, block.offset)
        self.offsets.insert(at, block.offset)
        self.by_offset.insert(at, block)
        self._regions.give(*block[1:])

    def remove(self, unit: int) -> UnitBlock | None:
        """Removes the block of a unit and returns it; None if the unit has none here."""
        block = self._blocks.pop(unit, None)
        if block is not None:
            self._units.put(unit, False)
            at = bisect.bisect_left(self.offsets, block.offset)
            del self.offsets[at], self.by_offset[at]
            self._regions.take_at(*block[1:])
        return block

    def latest(self, count: int) -> list[UnitBlock]:
        """Returns the first `count` blocks, the furthest next use first."""
        return [self._blocks[unit] for unit in itertools.islice(self._units.latest(), count)]

    def by_unit(self) -> tuple[UnitBlock, ...]:
        return tuple(sorted(self._blocks.values()))

    def regions(self, holes: Iterable[Region]) -> list[Region]:
        """Returns the regions that are free once all blocks were freed."""
        return free_regions(holes, [(start, stop - start) for start, stop in self._regions.holes])


def victims(space: Allocator, nbytes: int, latest: Iterable[UnitBlock]) -> tuple[int, ...] | None:
    """Returns the units to evict so that `nbytes` fit in one contiguous block; None if no eviction suffices.

    `latest` yields the blocks that may go, the furthest next use first. They go in this order, and as few as suffice.
    """
    if space.could_take(nbytes, ()):
        return ()

    def suffice(blocks: Sequence[UnitBlock]) -> bool:
        return space.could_take(nbytes, [block[1:] for block in blocks])

    # Bytes are added before holes are sorted: too few of them fit nowhere.
    others, going, free = iter(latest), [], space.nbytes - space.used_bytes
    for block in others:
        going.append(block)
        free += align_up(max(block.nbytes, 1))
        if free >= nbytes:
            break
    if free < nbytes or not going:
        return None
    # The fewest of them, by bisection: what some leave free, more of them leave free too.
    if not suffice(going):
        least = len(going)
        going += others
        if not suffice(going):
            return None
        counts = range(len(going))
        going = going[: bisect.bisect_left(counts, True, least + 1, key=lambda count: suffice(going[:count]))]
    # Eviction by distance also picks blocks that do not border on the others. Such blocks need not go. The last block
    # must go: without it there was no room.
    if len(going) > 1:
        size = align_up(max(nbytes, 1))
        regions = [
            region
            for region in free_regions(space.holes, [block[1:] for block in going])
            if region[1] - region[0] >= size
        ]
        going = [block for block in going if any(start <= block.offset < stop for start, stop in regions)]
    for block in reversed(going[:-1]):
        fewer = [remaining for remaining in going if remaining is not block]
        if suffice(fewer):
            going = fewer
    return tuple(block.unit for block in going)


def find_room(
    space: Allocator, nbytes: int, idle: IdleBlocks, floor: Floor, beyond: int = -1, company: tuple[Company, ...] = ()
) -> Eviction | None:
    """Returns the best offset for `nbytes` and the units to evict for it; None if no offset is allowed.

    A unit in use cannot be moved, so it should not be placed in the middle. Offsets are ranked by, in this order:

    1. All of each `company` fit once nothing else is in use. Then they can be in use together, in any order, whatever
       came and went before.
    2. The largest other unit fits once nothing else is in use. Only units count for which the region has room next to
       this one (`largest_beside`). Two units then fit into the bytes of both. A prefetch needs both 1 and 2.
    3. The largest other unit fits now, without a further eviction.
    4. The evicted units are used late.
    5. Few bytes are evicted.

    A prefetch leaves the unit that the next micro-batch uses again (`AccessOrder.repeated`), though it is released
    meanwhile. With `space.scatter`, the result is drawn at random among the offsets that are best in the first three
    respects and evict the fewest units. Only units whose next use is more than `beyond` uses away may be evicted; -1
    for a use on demand.
    """
    repeated = idle.order.repeated if beyond >= 0 else None
    stays = None if repeated is None else idle.remove(repeated)
    try:
        return _find_room(space, align_up(max(nbytes, 1)), idle, floor, beyond, company)
    finally:
        if stays is not None:
            idle.add(stays)


def _find_room(
    space: Allocator, nbytes: int, idle: IdleBlocks, floor: Floor, beyond: int, company: tuple[Company, ...]
) -> Eviction | None:
    distance, many = idle.order.distance, len(idle) > 2 * _LATEST and space.scatter is None
    latest = idle.latest(_LATEST + 1 if many else 1)
    if beyond >= 0 and (not latest or distance(latest[0].unit) <= beyond) and not space.could_take(nbytes, ()):
        return None  # every second prefetch: nothing may go, and nothing is free
    if many:
        # The best offset evicts only units of `latest`, if one of these offsets leaves enough room: any other offset
        # evicts a unit whose next use is as soon or sooner. So a few of thousands of experts are looked at.
        nearest = distance(latest.pop().unit)
        search = _Search(nbytes, idle.regions(space.holes), idle.by_offset, idle.offsets, distance)
        borders = itertools.chain(*space.holes, *((b.offset, b.offset + align_up(b.nbytes)) for b in latest))
        place = max(_places(search, floor, beyond, company, borders), key=_BY_SCORE, default=None)
        # With `nearest` too near, no other unit may be evicted.
        if nearest <= beyond or (place is not None and all(place[0][:3]) and place[0][3] >= nearest):
            return _eviction(place)
    evictable = idle.by_unit()
    distances = idle.order.distances([block.unit for block in evictable])
    question = _Question(nbytes, space.holes, evictable, distances, floor, beyond, company)
    if space.scatter is None:
        return _best_place(question)
    places = list(_all_places(question))
    best = max(((*score[:3], -len(going)) for score, _, going in places), default=None)
    fitting = [place for place in places if (*place[0][:3], -len(place[2])) == best]
    return _eviction(space.scatter.choice(fitting)) if fitting else None


def largest_beside(unit: int, nbytes: int, ascending: Sequence[tuple[int, int]], room: int) -> int:
    """Returns the bytes of the largest other unit that fits into `room` next to a unit; 0 if none does.

    `ascending` contains the aligned bytes and the index of each unit that comes and goes.
    """
    left = room - align_up(max(nbytes, 1))
    at = bisect.bisect_right(ascending, (left, NEVER)) - 1
    if at >= 0 and ascending[at][1] == unit:
        at -= 1
    return ascending[at][0] if at >= 0 else 0


def company_of(companions: Iterable[Companions], offset_of: Callable[[int], int | None]) -> tuple[Company, ...]:
    """Returns each distinct company among `companions`; `offset_of` returns None for a unit without a place."""
    companies: dict[Company, None] = {}
    for units, largest in companions:
        offsets = [offset_of(unit) for unit, _ in units]
        pairs = list(zip(units, offsets, strict=True))
        placed = tuple([UnitBlock(unit, offset, nbytes) for (unit, nbytes), offset in pairs if offset is not None])
        missing = [nbytes for (_, nbytes), offset in pairs if offset is None] + [largest]
        companies[Company(placed, tuple(sorted([align_up(size) for size in missing if size], reverse=True)))] = None
    return tuple(companies)


def _has_room(company: Company, going: Sequence[UnitBlock], offset: int, end: int, floor: Floor) -> bool:
    """Returns True if a company fits next to [offset, end) in the floor's region, with nothing else in use."""
    stays = [block for block in company.placed if block not in going]
    missing = [*company.missing, *(align_up(block.nbytes) for block in company.placed if block in going)]
    taken = [(offset, end), *((block.offset, block.offset + align_up(block.nbytes)) for block in stays)]
    inside = [region for region in taken if floor.start <= region[0] < floor.stop]
    return _fit(sorted(missing, reverse=True), gaps(floor.start, floor.stop, inside))


def _fit(sizes: Sequence[int], regions: Sequence[Region]) -> bool:
    if not sizes:
        return True
    return any(
        stop - start >= sizes[0] and _fit(sizes[1:], [*regions[:at], (start + sizes[0], stop), *regions[at + 1 :]])
        for at, (start, stop) in enumerate(regions)
    )


class _Question(NamedTuple):
    """All that the choice of an offset depends on; see `find_room`."""

    nbytes: int
    holes: tuple[Region, ...]
    evictable: tuple[UnitBlock, ...]
    distances: tuple[int, ...]
    """Number of uses before the next use of each evictable unit."""
    floor: Floor
    beyond: int
    company: tuple[Company, ...]


class _Search(NamedTuple):
    """Memory in which an offset is sought."""

    nbytes: int
    regions: Sequence[Region]
    """The regions that are free once all blocks were freed."""
    by_offset: Sequence[UnitBlock]
    """The blocks that may be evicted."""
    offsets: Sequence[int]
    """Of these blocks."""
    distance: Callable[[int], int]


_Score = tuple[bool, bool, bool, int, int]
_Place = tuple[_Score, int, Sequence[UnitBlock]]
"""Score of an offset, the offset, and the blocks to evict."""


# Each step asks the questions of the step before, several for each use of a unit. A cached answer takes some 2 µs, a
# new one 25 µs or more. Most answers are None.
@functools.lru_cache(maxsize=_ANSWERS)
def _best_place(question: _Question) -> Eviction | None:
    """Returns the offset with the best score, the lowest of equal ones; None if no offset is allowed."""
    return _eviction(max(_all_places(question), key=_BY_SCORE, default=None))


def _eviction(place: _Place | None) -> Eviction | None:
    if place is None:
        return None
    (safe, *_), offset, going = place
    return Eviction(offset, tuple(sorted([block.unit for block in going])), safe)


def _all_places(question: _Question) -> Iterator[_Place]:
    """Yields the allowed offsets that touch any evictable block."""
    nbytes, holes, evictable, distances, floor, beyond, company = question
    if beyond >= 0:
        # Most prefetches find no room, which this test shows without a look at any offset.
        allowed = [block[1:] for block, distance in zip(evictable, distances, strict=True) if distance > beyond]
        if all(stop - start < nbytes for start, stop in free_regions(holes, allowed)):
            return
    by_offset = sorted(evictable, key=_BY_OFFSET)
    firsts = [block.offset for block in by_offset]
    lasts = [block.offset + align_up(block.nbytes) for block in by_offset]
    distance = dict(zip([block.unit for block in evictable], distances, strict=True)).__getitem__
    search = _Search(nbytes, free_regions(holes, [block[1:] for block in evictable]), by_offset, firsts, distance)
    yield from _places(search, floor, beyond, company, (*firsts, *lasts))


def _places(
    search: _Search, floor: Floor, beyond: int, company: tuple[Company, ...], borders: Iterable[int]
) -> Iterator[_Place]:
    """Yields the allowed offsets that touch one of `borders`, or the border of a region, in ascending order."""
    nbytes, regions, by_offset, offsets, distance = search
    # The longest other region: the second longest, if a region is the longest itself.
    longest, second, *_ = (*sorted((stop - start for start, stop in regions), reverse=True), 0, 0)
    # Best offsets touch the border of a region or of an evictable block; offsets between two borders only split the
    # room.
    touching = {*borders, *itertools.chain(*regions)}
    candidates = sorted({*touching, *(border - nbytes for border in touching)})
    for start, stop in regions:
        if stop - start < nbytes:
            continue
        elsewhere = second if stop - start == longest else longest
        inside = bisect.bisect_left(candidates, start), bisect.bisect_right(candidates, stop - nbytes)
        for offset in candidates[slice(*inside)]:
            end = offset + nbytes
            # `alone` tests whether the largest unit fits once nothing else is in use; `left` is about the present.
            alone = offset - floor.start >= floor.largest or floor.stop - end >= floor.largest
            if beyond >= 0 and not alone:
                continue
            # Found by bisection: with hundreds of experts on the device, a test of each block is too slow.
            first = max(bisect.bisect_right(offsets, offset) - 1, 0)
            if first < len(offsets) and offsets[first] + align_up(by_offset[first].nbytes) <= offset:
                first += 1  # the block before ends where the unit would begin, or before
            going = by_offset[first : bisect.bisect_left(offsets, end, first)]
            nearest = min([distance(block.unit) for block in going], default=NEVER + 1)
            if nearest > beyond:
                safe = all(_has_room(one, going, offset, end, floor) for one in company)
                if beyond >= 0 and not safe:
                    continue
                # The size of the largest region that stays free: elsewhere, before or after the unit.
                left = elsewhere >= floor.largest or offset - start >= floor.largest or stop - end >= floor.largest
                yield (safe, alone, left, nearest, -sum([block.nbytes for block in going])), offset, going


def next_to_fetch(
    access_order: AccessOrder, nbytes: Callable[[int], int], wanted: Iterable[int], limits: Limits
) -> int | None:
    """Returns the first of `wanted`, if it is within `limits.ahead`; else None.

    `wanted` yields the units of the remaining uses that are not yet where the caller would move them, nearest first.
    """
    nearest = next(iter(wanted), None)
    if limits.ahead is None or nearest is None:
        return nearest
    total = 0
    for unit in access_order.upcoming():
        total += nbytes(unit)
        # One unit is always allowed, even if it alone exceeds the limit; a limit of 0 allows none.
        if total > limits.ahead and (total > nbytes(unit) or not limits.ahead):
            return None
        if unit == nearest:
            return unit
    return None


def leaves_room_ahead(capacity: int, buffer_sizes: Sequence[int], ahead: Iterable[int]) -> bool:
    """Returns True if buffers that cannot be evicted leave the memory for the next two reads.

    Two reads, since one unit is read while the unit before is used. The reads of a pass then never wait for these
    buffers. `ahead` yields the bytes of each unit that the pass will still read, nearest first.
    """
    nearest = itertools.islice(ahead, 2)
    return sum(align_up(nbytes) for nbytes in itertools.chain(buffer_sizes, nearest)) <= capacity


def keeps(access_order: AccessOrder, unit: int, nbytes: Callable[[int], int], limits: Limits) -> bool:
    """Returns True if a unit that is released now stays on the device until its room is needed."""
    if limits.reuse is None or unit == access_order.repeated:
        return True
    if access_order.distance(unit) >= NEVER:
        return False
    between = 0
    for unit_between in access_order.until(unit):
        between += nbytes(unit_between)
        if between > limits.reuse:
            return False
    return True


_REQUEST_NBYTES = 64 << 10
"""Bytes that a drive reads at full speed while one more request is submitted, verified and delivered."""


def row_reads(rows: Iterable[int], row_nbytes: int, start: int, nbytes: int, most: int) -> tuple[range, ...]:
    """Returns the ranges of a partition of `nbytes` to read for a lookup; none if a read of all of it costs less.

    The ranges are ascending and disjoint, begin and end with pages, and are at most `most` bytes in all. `rows` are
    ascending; row 0 begins at byte `start`.
    """
    reads: list[range] = []
    for row in rows:
        first = start + row * row_nbytes
        first, stop = first // PAGE * PAGE, min(align_up(first + row_nbytes), nbytes)
        if reads and first - reads[-1].stop <= _REQUEST_NBYTES:
            reads[-1] = range(reads[-1].start, max(reads[-1].stop, stop))
        else:
            reads.append(range(first, stop))
    total = sum(map(len, reads))
    return tuple(reads) if total <= most and total + len(reads) * _REQUEST_NBYTES < nbytes + _REQUEST_NBYTES else ()
