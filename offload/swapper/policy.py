"""Pure decisions of the pager: units to prefetch, units to evict, and offsets on the device.

    reads     the next uses, nearest first, into host memory that is free or holds only units used later
    uploads   the same for device memory, at offsets that leave room for any other unit beside the pinned ones
    victims   the units whose next use is furthest away (Belady's choice), as few as free one contiguous block

The pager applies the decisions to memory, `simulate` applies them to numbers.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from offload.sizes import align_up
from offload.swapper.access_order import NEVER, AccessOrder
from offload.swapper.memory.allocator import Allocator, Region, free_regions

_ANSWERS = 4096
"""Number of choices of an offset that are remembered: those of two steps of a model of some hundreds of units."""

_LATEST = 64
"""Number of evictable units, those used latest, of which the best offset is sought first."""


class Block(NamedTuple):
    """Memory of a unit that may be evicted."""

    unit: int
    offset: int
    nbytes: int


class Limits(NamedTuple):
    """Limits that a config may set beside the budgets, in bytes of weights; None for no limit but memory."""

    ahead: int | None = None
    """Bytes of upcoming units that are prefetched: at least one unit, or none if 0."""
    reuse: int | None = None
    """Bytes used before a unit's next use, above which the unit is evicted at its release."""


class Eviction(NamedTuple):
    """Offset for a unit, free once the blocks of `victims` are freed."""

    offset: int
    victims: tuple[int, ...]


class Floor(NamedTuple):
    """Region [start, stop) in which units come and go, and the bytes of the largest unit beside the one to place."""

    start: int
    stop: int
    largest: int


def victims(
    space: Allocator, nbytes: int, evictable: Sequence[Block], distance: Callable[[int], int], beyond: int = -1
) -> tuple[int, ...] | None:
    """Returns the units to evict so that `nbytes` fit in one contiguous block; None if no eviction suffices.

    The unit with the furthest next use goes first, and as few go as suffice. Ties go to the lowest index, so that
    equal orders give equal choices.

    Args:
        space: the allocator of the memory.
        nbytes: bytes to be allocated.
        evictable: blocks of the units that may be evicted.
        distance: returns the number of uses before the next use of a unit.
        beyond: only units whose distance is larger may be evicted; -1 for all of `evictable`.
    """
    if space.could_take(nbytes, ()):
        return ()
    distances = {block.unit: distance(block.unit) for block in evictable}
    going: list[Block] = []
    for block in sorted(evictable, key=lambda block: (-distances[block.unit], block.unit)):
        if distances[block.unit] <= beyond:
            return None
        going.append(block)
        if space.could_take(nbytes, (block[1:] for block in going)):
            break
    else:
        return None
    # Eviction by distance also picks blocks that do not border on the others. Those need not go. The last block
    # chosen is never spared: without it the first loop found no room.
    for block in reversed(going[:-1]):
        fewer = [other for other in going if other is not block]
        if space.could_take(nbytes, (block[1:] for block in fewer)):
            going = fewer
    return tuple(block.unit for block in going)


def find_room(
    space: Allocator, nbytes: int, evictable: Sequence[Block], access_order: AccessOrder, floor: Floor, beyond: int = -1
) -> Eviction | None:
    """Returns the best offset for `nbytes` and the units to evict for it; None if no offset is allowed.

    A unit in use cannot be moved, so it should not be placed in the middle. Offsets are ranked by, in this order:

    1. The largest other unit, of those that the region has room for beside this one (`largest_beside`), fits once
       nothing else is in use. Two units then fit into the bytes of both, whatever came and went before. A prefetch
       uses no other offset.
    2. The largest other unit fits now, without a further eviction.
    3. The evicted units are used late.
    4. Few bytes are evicted.

    With `space.scatter`, one of the offsets that are best in the first two and evict the fewest units is drawn at
    random.

    Args:
        space: the allocator of the device arena.
        nbytes: bytes of the unit.
        evictable: blocks of the units that may be evicted.
        access_order: the access order.
        floor: the region of units that come and go.
        beyond: only units whose next use is more than `beyond` uses away may be evicted; -1 for a use on demand.
    """
    distances = access_order.distances([block.unit for block in evictable])
    if beyond >= 0 and max(distances, default=-1) <= beyond and not space.could_take(nbytes, ()):
        return None  # every second prefetch: nothing may go, and nothing is free
    question = _Question(align_up(max(nbytes, 1)), space.holes, tuple(evictable), distances, floor, beyond)
    if space.scatter is None:
        return _best_place(question)
    found = _places(question)
    best = max(((*score[:2], -len(place.victims)) for score, place in found), default=None)
    fitting = [place for score, place in found if (*score[:2], -len(place.victims)) == best]
    return space.scatter.choice(fitting) if fitting else None


def largest_beside(unit: int, nbytes: int, ascending: Sequence[tuple[int, int]], room: int) -> int:
    """Returns the bytes of the largest other unit that fits into `room` beside a unit; 0 if none does.

    Args:
        unit: the unit.
        nbytes: its bytes.
        ascending: aligned bytes and index of each unit that comes and goes, in ascending order.
        room: bytes of the region.
    """
    left = room - align_up(max(nbytes, 1))
    at = bisect.bisect_right(ascending, (left, NEVER)) - 1
    if at >= 0 and ascending[at][1] == unit:
        at -= 1
    return ascending[at][0] if at >= 0 else 0


class _Question(NamedTuple):
    """All that the choice of an offset depends on; see `find_room`."""

    nbytes: int
    holes: tuple[Region, ...]
    evictable: tuple[Block, ...]
    distances: tuple[int, ...]
    """Number of uses before the next use of each evictable unit."""
    floor: Floor
    beyond: int


_Score = tuple[bool, bool, int, int]


# Each step asks the questions of the step before, several for each use of a unit. An answer found takes some 2 µs; one
# to be computed 25 or more. Most answers are None.
@functools.lru_cache(maxsize=_ANSWERS)
def _best_place(question: _Question) -> Eviction | None:
    """Returns the offset with the best score, the lowest of equal ones; None if no offset is allowed.

    Among many evictable units more bytes may be evicted than at another offset that is as good otherwise.
    """
    if len(question.evictable) > 2 * _LATEST:
        # No offset is better than one that evicts none but the units used latest, if that leaves the room it should:
        # any other one evicts a unit that is used as soon, or sooner. Of thousands of experts, few need a look.
        by_distance = sorted(zip(question.distances, question.evictable, strict=True), key=lambda each: -each[0])
        latest = [block for _, block in by_distance[:_LATEST]]
        score, place = max(_places(question, latest), key=lambda each: each[0], default=(None, None))
        if score is not None and score[:2] == (True, True) and score[2] >= by_distance[_LATEST][0]:
            return place
    return max(_places(question), key=lambda each: each[0], default=(None, None))[1]


def _places(question: _Question, near: Sequence[Block] | None = None) -> list[tuple[_Score, Eviction]]:
    """Returns every offset that is allowed and worth a look, in ascending order, with its score.

    Args:
        question: the question.
        near: evictable blocks; if given, only offsets at their borders and at those of free memory are returned.
    """
    nbytes, holes, evictable, _, floor, beyond = question
    distances = {block.unit: distance for block, distance in zip(evictable, question.distances, strict=True)}
    if beyond >= 0:
        # Most prefetches find no room, which this test shows without a look at any offset.
        allowed = [block[1:] for block in evictable if distances[block.unit] > beyond]
        if all(stop - start < nbytes for start, stop in free_regions(holes, allowed)):
            return []
    regions = free_regions(holes, [block[1:] for block in evictable])
    # The longest region beside another one is the second where that one is the longest.
    longest, second, *_ = (*sorted((stop - start for start, stop in regions), reverse=True), 0, 0)
    found: list[tuple[_Score, Eviction]] = []
    for start, stop in regions:
        if stop - start < nbytes:
            continue
        elsewhere = second if stop - start == longest else longest
        inside = sorted((b.offset, position) for position, b in enumerate(evictable) if start <= b.offset < stop)
        firsts = [offset for offset, _ in inside]
        lasts = [offset + align_up(evictable[position].nbytes) for offset, position in inside]
        # Best offsets touch the border of a region or of an evictable block; offsets between two borders only split
        # the room.
        borders = {start, stop, *firsts, *lasts}
        if near is not None:
            borders = {start, stop}.union(*holes, *((b.offset, b.offset + align_up(b.nbytes)) for b in near))
        for offset in sorted({*borders, *(border - nbytes for border in borders)}):
            end = offset + nbytes
            if offset < start or end > stop:
                continue
            # `alone` asks what `left` asks, for the time when nothing else is in use.
            alone = max(offset - floor.start, floor.stop - end) >= floor.largest
            if beyond >= 0 and not alone:
                continue
            # Blocks lie in order: with hundreds of experts on the device, a look at each one is too slow.
            overlapping = inside[bisect.bisect_right(lasts, offset) : bisect.bisect_left(firsts, end)]
            going = [evictable[position] for position in sorted([position for _, position in overlapping])]
            nearest = min([distances[block.unit] for block in going], default=NEVER + 1)
            if nearest > beyond:
                # The largest region that stays free: elsewhere, before or behind the unit.
                left = max(elsewhere, offset - start, stop - end)
                score = (alone, left >= floor.largest, nearest, -sum([block.nbytes for block in going]))
                found.append((score, Eviction(offset, tuple([block.unit for block in going]))))
    return found


def next_to_fetch(
    access_order: AccessOrder, nbytes: Callable[[int], int], wanting: Callable[[int], bool], limits: Limits
) -> int | None:
    """Returns the nearest upcoming unit within `limits.ahead` that `wanting` accepts; None if there is none.

    Args:
        access_order: the access order.
        nbytes: returns the bytes of a unit, as `limits.ahead` counts them.
        wanting: returns True for a unit that is not yet at its goal.
        limits: limits of the config.
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


def leaves_room_ahead(capacity: int, held: Sequence[int], ahead: Iterable[int]) -> bool:
    """Returns True if buffers that cannot be evicted leave the memory for the next two reads.

    Two, since one unit is read while the one before is used; the reads of a pass then never wait for these buffers.

    Args:
        capacity: bytes of all buffers.
        held: bytes of each buffer that cannot be evicted.
        ahead: bytes of each unit that the pass will still read, nearest first.
    """
    nearest = itertools.islice(ahead, 2)
    return sum(align_up(nbytes) for nbytes in itertools.chain(held, nearest)) <= capacity


def keeps(access_order: AccessOrder, unit: int, nbytes: Callable[[int], int], limits: Limits) -> bool:
    """Returns True if a unit that is released now stays on the device until its room is needed.

    Args:
        access_order: the access order.
        unit: the unit that is released.
        nbytes: returns the bytes of a unit, as `limits.reuse` counts them.
        limits: limits of the config.
    """
    if limits.reuse is None:
        return True
    if access_order.distance(unit) >= NEVER:
        return False
    between = 0
    for other in access_order.until(unit):
        between += nbytes(other)
        if between > limits.reuse:
            return False
    return True
