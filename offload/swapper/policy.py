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

    def __init__(self, wraps: bool) -> None:
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
        self._expected: list[int] = []
        """Units of a group that come before all else, nearest first; see `expect`."""
        self._backwards: dict[int, tuple[Sequence[int], Collection[int]]] = {}
        """For each expected unit whose backward has not begun: all units of the same `expect` call, and their group."""

    def expect(self, units: Sequence[int], group: Collection[int], backward: bool, at_once: bool) -> None:
        """Predicts that `units` are the next uses of `group`, and with `backward` that the run then reverses them.

        With `at_once` the reverse follows the last of them, where one use serves both.
        """
        self._pass_over(group)
        self._expected = [*units, *reversed(units[:-1])] if at_once else list(units)
        for unit in group:
            self._backwards.pop(unit, None)
        if backward and not at_once:
            self._backwards |= dict.fromkeys(units, (tuple(units), group))

    def _pass_over(self, group: Collection[int]) -> None:
        """Moves the cursor past recorded uses of `group`: the run before chose these units."""
        while self.cursor < len(self.uses) and self.uses[self.cursor] in group:
            self._next[self.uses[self.cursor]] = self._following[self.cursor]
            self.cursor += 1

    def _use_expected(self, unit: int) -> bool | None:
        """Returns True if `unit` was the next expected unit, False if a later one, None if it was not expected."""
        if not self._expected and unit in self._backwards:
            units, group = self._backwards[unit]
            for choice in units:
                del self._backwards[choice]
            self._pass_over(group)
            self._expected = list(reversed(units))
        if unit not in self._expected:
            return None
        position = self._expected.index(unit)
        del self._expected[: position + 1]
        return position == 0

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
        self._expected = []
        # A mispredicted use moves the cursor to the next recorded use of this unit, so that a skipped branch costs
        # one misprediction and not one for each unit in the branch.
        position = self._next.get(unit, NEVER)
        foreseen = position == self.cursor < len(self.uses)
        if position < len(self.uses):
            for passed in range(self.cursor, position + 1):
                self._next[self.uses[passed]] = self._following[passed]
            self.cursor = position + 1
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
        self._recording, self._recorded_repeats, self._expected, self._backwards = [], [], [], {}
        self.cursor = self._repeats_left = 0
        self._next = dict(self._first)

    def distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`, assuming that the run repeats; NEVER if unknown."""
        if unit in self._expected:
            return self._expected.index(unit)
        position = self._next.get(unit)
        return NEVER if position is None else position - self.cursor + len(self._expected)

    def distances(self, units: Iterable[int]) -> tuple[int, ...]:
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
                # The modulo continues at the start of the run: after a step, the next step repeats the order.
                yield self.uses[(self.cursor + distance - expected) % len(self.uses)]

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units of the remaining uses, nearest first; an order that wraps adds the earlier uses."""
        seen: set[int] = set()
        for unit in self._remaining():
            if unit not in seen:
                seen.add(unit)
                yield unit

    def nearest(self, wanting: Callable[[int], bool]) -> int | None:
        return next(filter(wanting, self._remaining()), None)

    def _remaining(self) -> Iterator[int]:
        """Returns the uses whose units `upcoming` yields. Fast, for each decision: no Python code runs for a use."""
        rest = map(self.uses.__getitem__, range(self.cursor, len(self.uses)))  # an islice would step over all before
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
        self.kind = kind
        self._now = self._orders[kind]
        if kind is PassKind.EVAL:
            self._now.restart()

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

    @property
    def repeated(self) -> int | None:
        """The unit of the last use, if it is predicted to be used again before any other unit; else None."""
        return self._now.repeated

    def distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`, assuming that the run repeats; NEVER if unknown.

        Consecutive uses count once, so the distance of the `repeated` unit is that of its use after another unit.
        """
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


# -- policy --------------------------------------------------------------------------------------------


_ANSWERS = 4096
"""Number of cached choices of an offset: enough for two steps of a model with some hundreds of units."""

_LATEST = 64
"""Number of evictable units among which the best offset is sought first: the units whose next use is furthest away."""
_BY_SCORE = operator.itemgetter(0)


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


def victims(
    space: Allocator, nbytes: int, evictable: Sequence[UnitBlock], distance: Callable[[int], int], beyond: int = -1
) -> tuple[int, ...] | None:
    """Returns the units to evict so that `nbytes` fit in one contiguous block; None if no eviction suffices.

    The unit with the furthest next use goes first, and as few go as suffice. Ties go to the lowest index, so that equal
    orders give equal choices. Only units whose distance is larger than `beyond` may be evicted; -1 for all of
    `evictable`.
    """
    if space.could_take(nbytes, ()):
        return ()
    distances = {block.unit: distance(block.unit) for block in evictable}
    latest = sorted(
        (block for block in evictable if distances[block.unit] > beyond),
        key=lambda block: (-distances[block.unit], block.unit),
    )
    # Bytes are added before holes are sorted: too few of them fit nowhere.
    free, least = space.nbytes - space.used_bytes, 0
    while free < nbytes and least < len(latest):
        free += align_up(max(latest[least].nbytes, 1))
        least += 1
    least = max(least, 1)

    def suffice(blocks: Sequence[UnitBlock]) -> bool:
        return space.could_take(nbytes, [block[1:] for block in blocks])

    if free < nbytes or len(latest) < least:
        return None
    # The fewest of them, by bisection: what some leave free, more of them leave free too.
    if not suffice(latest[:least]):
        if not suffice(latest):
            return None
        least = bisect.bisect_left(range(len(latest)), True, least + 1, key=lambda count: suffice(latest[:count]))
    going = latest[:least]
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
    space: Allocator,
    nbytes: int,
    evictable: Sequence[UnitBlock],
    access_order: AccessOrder,
    floor: Floor,
    beyond: int = -1,
    company: tuple[Company, ...] = (),
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
    if beyond >= 0 and (repeated := access_order.repeated) is not None:
        evictable = [block for block in evictable if block.unit != repeated]
    distances = access_order.distances([block.unit for block in evictable])
    if beyond >= 0 and max(distances, default=-1) <= beyond and not space.could_take(nbytes, ()):
        return None  # every second prefetch: nothing may go, and nothing is free
    question = _Question(align_up(max(nbytes, 1)), space.holes, tuple(evictable), distances, floor, beyond, company)
    if space.scatter is None:
        return _best_place(question)
    places = list(_places(question))
    best = max(((*score[:3], -len(going)) for score, _, going in places), default=None)
    fitting = [place for place in places if (*place[0][:3], -len(place[2])) == best]
    return _eviction(question, space.scatter.choice(fitting)) if fitting else None


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
    found: dict[Company, None] = {}
    for units, largest in companions:
        offsets = [offset_of(unit) for unit, _ in units]
        pairs = list(zip(units, offsets, strict=True))
        placed = tuple([UnitBlock(unit, offset, nbytes) for (unit, nbytes), offset in pairs if offset is not None])
        missing = [nbytes for (_, nbytes), offset in pairs if offset is None] + [largest]
        found[Company(placed, tuple(sorted([align_up(size) for size in missing if size], reverse=True)))] = None
    return tuple(found)


def _has_room(company: Company, going: Sequence[UnitBlock], offset: int, end: int, floor: Floor) -> bool:
    """Returns True if a company fits next to [offset, end) in the floor's region, with nothing else in use."""
    stays = [block for block in company.placed if block not in going]
    missing = [*company.missing, *(align_up(block.nbytes) for block in company.placed if block in going)]
    taken = [(offset, end), *((block.offset, block.offset + align_up(block.nbytes)) for block in stays)]
    inside = [region for region in taken if floor.start <= region[0] < floor.stop]
    return _fit(sorted(missing, reverse=True), gaps(floor.start, floor.stop, inside))


def _fit(sizes: Sequence[int], regions: Sequence[Region]) -> bool:
    """Returns True if blocks of all `sizes` fit into free regions at once."""
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


_Score = tuple[bool, bool, bool, int, int]
_Place = tuple[_Score, int, Sequence[int]]
"""Score of an offset, the offset, and the positions in `evictable` of the blocks to evict."""


# Each step asks the questions of the step before, several for each use of a unit. A cached answer takes some 2 µs, a
# new one 25 µs or more. Most answers are None.
@functools.lru_cache(maxsize=_ANSWERS)
def _best_place(question: _Question) -> Eviction | None:
    """Returns the offset with the best score, the lowest of equal ones; None if no offset is allowed.

    With many evictable units, the offset may evict more bytes than another offset that is otherwise as good.
    """
    if len(question.evictable) > 2 * _LATEST:
        # The best offset evicts only units of `latest`, if one of these offsets leaves enough room: any other offset
        # evicts a unit whose next use is as soon or sooner. So a few of thousands of experts are looked at.
        by_distance = sorted(zip(question.distances, question.evictable, strict=True), key=lambda pair: -pair[0])
        latest = [block for _, block in by_distance[:_LATEST]]
        place = max(_places(question, latest), key=_BY_SCORE, default=None)
        if place is not None and all(place[0][:3]) and place[0][3] >= by_distance[_LATEST][0]:
            return _eviction(question, place)
    place = max(_places(question), key=_BY_SCORE, default=None)
    return None if place is None else _eviction(question, place)


def _eviction(question: _Question, place: _Place) -> Eviction:
    (safe, *_), offset, positions = place
    return Eviction(offset, tuple([question.evictable[position].unit for position in sorted(positions)]), safe)


def _places(question: _Question, near: Sequence[UnitBlock] | None = None) -> Iterator[_Place]:
    """Yields the allowed offsets among the candidates, in ascending order within a region.

    If evictable blocks are given as `near`, the candidates are the borders of these blocks and of free memory.
    """
    nbytes, holes, evictable, distances, floor, beyond, company = question
    if beyond >= 0:
        # Most prefetches find no room, which this test shows without a look at any offset.
        allowed = [block[1:] for block, distance in zip(evictable, distances, strict=True) if distance > beyond]
        if all(stop - start < nbytes for start, stop in free_regions(holes, allowed)):
            return
    regions = free_regions(holes, [block[1:] for block in evictable])
    # The longest other region: the second longest, if a region is the longest itself.
    longest, second, *_ = (*sorted((stop - start for start, stop in regions), reverse=True), 0, 0)
    by_offset = sorted((block.offset, position) for position, block in enumerate(evictable))
    for start, stop in regions:
        if stop - start < nbytes:
            continue
        elsewhere = second if stop - start == longest else longest
        inside = by_offset[bisect.bisect_left(by_offset, (start, -1)) : bisect.bisect_left(by_offset, (stop, -1))]
        firsts, positions = [offset for offset, _ in inside], [position for _, position in inside]
        lasts = [offset + align_up(evictable[position].nbytes) for offset, position in inside]
        nexts = [distances[position] for position in positions]
        ends = [0, *itertools.accumulate([evictable[position].nbytes for position in positions])]
        # Best offsets touch the border of a region or of an evictable block; offsets between two borders only split
        # the room.
        borders = {start, stop, *firsts, *lasts}
        if near is not None:
            borders = {start, stop}.union(*holes, *((b.offset, b.offset + align_up(b.nbytes)) for b in near))
        for offset in sorted({*borders, *(border - nbytes for border in borders)}):
            end = offset + nbytes
            if offset < start or end > stop:
                continue
            # `alone` tests whether the largest unit fits once nothing else is in use; `left` is about the present.
            alone = offset - floor.start >= floor.largest or floor.stop - end >= floor.largest
            if beyond >= 0 and not alone:
                continue
            # Found by bisection: with hundreds of experts on the device, a test of each block is too slow.
            first, last = bisect.bisect_right(lasts, offset), bisect.bisect_left(firsts, end)
            nearest = min(nexts[first:last], default=NEVER + 1)
            if nearest > beyond:
                going = [evictable[position] for position in positions[first:last]] if company else []
                safe = all(_has_room(one, going, offset, end, floor) for one in company)
                if beyond >= 0 and not safe:
                    continue
                # The size of the largest region that stays free: elsewhere, before or after the unit.
                left = elsewhere >= floor.largest or offset - start >= floor.largest or stop - end >= floor.largest
                score = (safe, alone, left, nearest, ends[first] - ends[max(first, last)])
                yield score, offset, positions[first:last]


def next_to_fetch(
    access_order: AccessOrder, nbytes: Callable[[int], int], wanting: Callable[[int], bool], limits: Limits
) -> int | None:
    """Returns the nearest upcoming unit within `limits.ahead` that `wanting` accepts; None if there is none.

    `wanting` accepts a unit that is not yet where the caller would move it.
    """
    if limits.ahead is None:
        return access_order.nearest(wanting)
    total = 0
    for unit in access_order.upcoming():
        total += nbytes(unit)
        # One unit is always allowed, even if it alone exceeds the limit; a limit of 0 allows none.
        if total > limits.ahead and (total > nbytes(unit) or not limits.ahead):
            return None
        if wanting(unit):
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
