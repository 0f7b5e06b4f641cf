"""Prefetch and eviction are pure functions of order, sizes and residency: nearest first, furthest away."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from offload.swapper.memory.allocator import Allocator, free_regions
from offload.swapper.policy import (
    NEVER,
    AccessOrder,
    Floor,
    Limits,
    UnitBlock,
    _best_place,
    _places,
    _Question,
    find_room,
    keeps,
    largest_beside,
    next_to_fetch,
    victims,
)

PAGE = 4096
orders = st.lists(st.integers(0, 9), min_size=1, max_size=40)
sizes = st.lists(st.integers(1, 9), min_size=10, max_size=10)


def _filled(pages: list[int], present: set[int], total: int = 40) -> tuple[Allocator, list[UnitBlock]]:
    space = Allocator(total * PAGE, random.Random(0))
    blocks = [
        UnitBlock(unit, offset, pages[unit] * PAGE)
        for unit in sorted(present)
        if (offset := space.take(pages[unit] * PAGE)) is not None
    ]
    return space, blocks


@given(orders, sizes, st.sets(st.integers(0, 9)), st.integers(1, 40), st.integers(-1, 20))
def test_victims_make_room_and_no_more_than_that(
    order: list[int], pages: list[int], present: set[int], wanted: int, beyond: int
) -> None:
    trace = AccessOrder.of(order)
    space, blocks = _filled(pages, present)
    going = victims(space, wanted * PAGE, blocks, trace.distance, beyond)
    later = [block for block in blocks if trace.distance(block.unit) > beyond]
    if going is None:
        assert not space.could_take(wanted * PAGE, (block[1:] for block in later))
        return
    gone = [block for block in blocks if block.unit in going]
    assert all(block in later for block in gone)
    for block in gone:
        others = [other[1:] for other in gone if other is not block]
        assert not space.could_take(wanted * PAGE, others), "each of them was needed"
    for block in gone:
        space.give(*block[1:])
    assert space.take(wanted * PAGE) is not None


@given(orders, sizes, st.sets(st.integers(0, 9), min_size=1))
def test_one_victim_of_equal_size_is_the_one_used_last(order: list[int], pages: list[int], present: set[int]) -> None:
    trace = AccessOrder.of(order)
    space, blocks = _filled([4] * 10, present, total=4 * len(present))
    (going,) = victims(space, 4 * PAGE, blocks, trace.distance)
    assert trace.distance(going) == max(trace.distance(unit) for unit in present)


@given(orders, sizes, st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(1, 20), st.booleans())
def test_a_place_is_free_once_its_victims_are_gone(
    order: list[int], pages: list[int], present: set[int], used: set[int], wanted: int, scatter: bool
) -> None:
    trace = AccessOrder.of(order)
    space, blocks = _filled(pages, present)
    space.scatter = random.Random(1) if scatter else None
    free = [block for block in blocks if block.unit not in used]
    place = find_room(space, wanted * PAGE, free, trace, Floor(0, 40 * PAGE, 9 * PAGE))
    if place is None:
        assert not space.could_take(wanted * PAGE, (block[1:] for block in free))
        return
    going = [block for block in free if block.unit in place.victims]
    assert len(going) == len(place.victims)
    for block in going:
        space.give(*block[1:])
    space.take_at(place.offset, wanted * PAGE)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(9, 17), st.booleans())
def test_two_units_that_have_room_together_can_be_in_use(uses: list[int], room: int, scatter: bool) -> None:
    """Whatever came and went before; the arena has room for the largest, or for more, up to the two largest."""
    pages = [2, 3, 5, 6, 8, 9]
    ascending = [(size * PAGE, unit) for unit, size in enumerate(pages)]
    space = Allocator(room * PAGE, random.Random(2) if scatter else None)
    trace = AccessOrder.of(uses)
    at: dict[int, int] = {}
    held: list[int] = []
    for unit in uses:
        if unit not in at:
            free = [UnitBlock(other, offset, pages[other] * PAGE) for other, offset in at.items() if other not in held]
            floor = Floor(0, room * PAGE, largest_beside(unit, pages[unit] * PAGE, ascending, room * PAGE))
            place = find_room(space, pages[unit] * PAGE, free, trace, floor)
            if place is None:
                assert pages[unit] + sum(pages[other] for other in held) > room
                held = []
                continue
            for victim in place.victims:
                space.give(at.pop(victim), pages[victim] * PAGE)
            space.take_at(place.offset, pages[unit] * PAGE)
            at[unit] = place.offset
        held = [unit]  # the next one comes while this one is in use


def test_the_largest_unit_beside_another_is_one_that_has_room() -> None:
    ascending = [(2 * PAGE, 3), (4 * PAGE, 0), (4 * PAGE, 1), (9 * PAGE, 2)]

    def beside(unit: int, nbytes: int, room: int) -> int:
        return largest_beside(unit, nbytes, ascending, room * PAGE) // PAGE

    assert beside(0, 4 * PAGE, 13) == 9 and beside(0, 4 * PAGE - 1, 13) == 9
    assert beside(0, 4 * PAGE, 12) == 4 and beside(1, 4 * PAGE, 12) == 4, "not the largest, which has no room"
    assert beside(2, 9 * PAGE, 13) == 4 and beside(2, 9 * PAGE, 12) == 2 and beside(2, 9 * PAGE, 10) == 0
    assert beside(3, 2 * PAGE, 100) == 9 and beside(2, 9 * PAGE, 100) == 4, "itself is none"


def test_the_nearest_that_is_not_there_comes_first() -> None:
    trace = AccessOrder.of([0, 1, 2, 3])

    def brought(ahead: int | None, here: set[int]) -> int | None:
        return next_to_fetch(trace, lambda unit: 2 * PAGE, lambda unit: unit not in here, Limits(ahead))

    assert brought(None, {0, 1, 2}) == 3 and brought(None, {0, 1, 2, 3}) is None
    assert brought(4 * PAGE, {0}) == 1 and brought(4 * PAGE, {0, 1}) is None, "the limit is of bytes"
    assert brought(1, set()) == 0 and brought(1, {0}) is None, "one unit at least"
    assert brought(0, set()) is None


@given(orders, st.integers(0, 9), st.integers(0, 30))
def test_a_unit_stays_where_its_next_use_is_near(order: list[int], unit: int, reuse: int) -> None:
    trace = AccessOrder.of(order)
    near = trace.distance(unit) < NEVER and trace.distance(unit) * PAGE <= reuse * PAGE
    assert keeps(trace, unit, lambda _: PAGE, Limits(reuse=reuse * PAGE)) == near
    assert keeps(trace, unit, lambda _: PAGE, Limits())


@given(orders, orders, sizes, st.sets(st.integers(0, 9)), st.integers(1, 20), st.integers(-1, 20))
def test_a_choice_is_the_same_when_it_is_made_again(
    order: list[int], uses: list[int], pages: list[int], present: set[int], wanted: int, beyond: int
) -> None:
    """Choices are remembered; the present order, distances and free memory are part of the question."""
    trace = AccessOrder.of(order)
    space, blocks = _filled(pages, present)
    space.scatter = None
    floor = Floor(0, 40 * PAGE, 9 * PAGE)
    for unit in uses:
        remembered = find_room(space, wanted * PAGE, blocks, trace, floor, beyond)
        _best_place.cache_clear()
        assert find_room(space, wanted * PAGE, blocks, trace, floor, beyond) == remembered
        if blocks:
            space.give(*blocks.pop()[1:])
        trace.use(unit)


@given(st.integers(0, 2**32), st.booleans())
def test_the_best_of_many_places_is_found_without_a_look_at_each(seed: int, ahead: bool) -> None:
    """With hundreds of evictable units of several sizes, some of them used at the same distance."""
    chance = random.Random(seed)
    blocks, holes, offset = [], [], 0
    for unit in range(chance.randint(120, 260)):
        pages, kind = chance.choice((1, 1, 1, 2, 5)), chance.random()
        if kind < 0.8:
            blocks.append(UnitBlock(unit, offset, pages * PAGE))
        elif kind < 0.9:
            holes.append((offset, offset + pages * PAGE))
        offset += pages * PAGE
    question = _Question(
        nbytes=PAGE * chance.choice((1, 2, 5)),
        holes=tuple(free_regions(holes, [])),
        evictable=tuple(blocks),
        distances=tuple(chance.choice((chance.randint(0, 400), chance.randint(0, 400), NEVER)) for _ in blocks),
        floor=Floor(0, offset, PAGE * chance.choice((1, 5, 40))),
        beyond=chance.randint(0, 400) if ahead else -1,
    )
    scores = {place: score[:3] for score, place in _places(question)}
    found = _best_place(question)
    assert (found is None) == (not scores)
    assert found is None or scores[found] == max(scores.values())
