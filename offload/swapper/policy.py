"""What to bring before it is used, and what must go for it: pure decisions over the order of next uses.

    reads     what is used next, nearest first, as far as leases go round that hold nothing used sooner
    uploads   the same with slices of the device, placed so that what is in use leaves room for any other unit
    victims   whose next use is furthest from now (Belady's choice), as few as make room in one piece

The pager carries them out on memory, `simulate` on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from offload.sizes import align_up
from offload.swapper.access_order import NEVER, Trace
from offload.swapper.memory.allocator import Space


class Block(NamedTuple):
    """Memory of a unit that may be taken from it."""

    unit: int
    offset: int
    nbytes: int


class Limits(NamedTuple):
    """What a config may ask for beside the budgets; in bytes of weights, None for what memory allows."""

    ahead: int | None = None
    """How much of what comes next is brought before its use: one unit at least, 0 for none."""
    reuse: int | None = None
    """A unit leaves the device at its release if more than this is used before it is used again."""


class Place(NamedTuple):
    """Where a unit may lie once the blocks of `victims` are given back."""

    offset: int
    victims: tuple[int, ...]


class Floor(NamedTuple):
    """The stretch in which units come and go, and the bytes of the largest beside the one to be placed."""

    start: int
    stop: int
    largest: int


def victims(
    space: Space, nbytes: int, takeable: Sequence[Block], distance: Callable[[int], int], beyond: int = -1
) -> tuple[int, ...] | None:
    """Units that must give their blocks so that `nbytes` fit in one piece, of those next used after `beyond` uses.

    `distance` says after how many uses that is, of each unit. As few as do, furthest next use first; ties go to the
    lowest index, so that equal traces give equal choices. None where not even all of them would do.
    """
    if space.could_take(nbytes, ()):
        return ()
    distances = {block.unit: distance(block.unit) for block in takeable}
    going: list[Block] = []
    for block in sorted(takeable, key=lambda block: (-distances[block.unit], block.unit)):
        if distances[block.unit] <= beyond:
            return None
        going.append(block)
        if space.could_take(nbytes, (piece[1:] for piece in going)):
            break
    else:
        return None
    for block in reversed(going[:-1]):  # what does not lie beside the others need not go
        fewer = [other for other in going if other is not block]
        if space.could_take(nbytes, (piece[1:] for piece in fewer)):
            going = fewer
    return tuple(block.unit for block in going)


def find_place(
    space: Space, nbytes: int, takeable: Sequence[Block], trace: Trace, floor: Floor, beyond: int = -1
) -> Place | None:
    """Where `nbytes` may lie, at the cost of blocks whose next use is after `beyond` uses; None where nowhere.

    What is in use cannot be moved, so it should not lie in the middle. First comes a place that leaves room for the
    largest other unit when nothing else is in use any more: so two units have room at a time in what the two largest
    take, whatever came and went; nothing is brought ahead elsewhere. Then one that leaves it now; then, that what goes
    is used late, and that little goes.
    With `space.scatter`, one of the places that are best in the first two is chosen by chance.
    """
    nbytes = align_up(max(nbytes, 1))
    stretches = space.stretches(block[1:] for block in takeable)
    lengths = sorted((stop - start for start, stop in stretches), reverse=True)
    found: list[tuple[tuple[bool, bool, int, int], Place]] = []
    for start, stop in stretches:
        if stop - start < nbytes:
            continue
        elsewhere = next((length for length in _without(lengths, stop - start)), 0)
        inside = [block for block in takeable if start <= block.offset < stop]
        ends = {start, stop, *(b.offset for b in inside), *(b.offset + align_up(b.nbytes) for b in inside)}
        for offset in sorted({*ends, *(end - nbytes for end in ends)}):
            if offset < start or offset + nbytes > stop:
                continue
            going = [b for b in inside if b.offset < offset + nbytes and offset < b.offset + align_up(b.nbytes)]
            nearest = min((trace.distance(block.unit) for block in going), default=NEVER + 1)
            if nearest > beyond:
                left = max(elsewhere, offset - start, stop - offset - nbytes)
                alone = max(offset - floor.start, floor.stop - offset - nbytes) >= floor.largest
                if alone or beyond < 0:
                    score = (alone, left >= floor.largest, nearest, -sum(b.nbytes for b in going))
                    found.append((score, Place(offset, tuple(block.unit for block in going))))
    if not found:
        return None
    if space.scatter is not None:
        best = max((*score[:2], -len(place.victims)) for score, place in found)
        return space.scatter.choice([p for score, p in found if (*score[:2], -len(p.victims)) == best])
    return max(found, key=lambda each: each[0])[1]


def _without(lengths: Sequence[int], one: int) -> Iterator[int]:
    """`lengths` without `one` of them, once."""
    skipped = False
    for length in lengths:
        if length == one and not skipped:
            skipped = True
        else:
            yield length


def next_to_bring(
    trace: Trace, nbytes: Callable[[int], int], wanting: Callable[[int], bool], limits: Limits
) -> int | None:
    """The nearest unit within the limit that is `wanting` where it should be brought."""
    total = 0
    for unit in trace.upcoming():
        if limits.ahead is not None:
            total += nbytes(unit)
            if total > limits.ahead and (total > nbytes(unit) or not limits.ahead):
                return None
        if wanting(unit):
            return unit
    return None


def keeps(trace: Trace, unit: int, nbytes: Callable[[int], int], limits: Limits) -> bool:
    """Whether a unit that is released now stays on the device until its room is needed."""
    if limits.reuse is None:
        return True
    if trace.distance(unit) >= NEVER:
        return False
    between = 0
    for other in trace.until(unit):
        between += nbytes(other)
        if between > limits.reuse:
            return False
    return True
