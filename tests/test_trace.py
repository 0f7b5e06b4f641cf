"""The trace foresees the order of the last step, and the choice of a victim is Belady's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.swapper.trace import NEVER, Trace, furthest

orders = st.lists(st.integers(0, 7), min_size=1, max_size=40)


def _recorded(order: list[int]) -> Trace:
    trace = Trace()
    for unit in order:
        trace.use(unit)
    trace.finish()
    return trace


def _without_repeats(order: list[int]) -> list[int]:
    return [unit for i, unit in enumerate(order) if i == 0 or order[i - 1] != unit]


@given(orders)
def test_a_step_that_repeats_the_last_is_foreseen_exactly(order: list[int]) -> None:
    trace, uses = _recorded(order), _without_repeats(order)
    assert list(trace.order) == uses
    for position, unit in enumerate(uses):
        rest = uses[position:]
        assert trace.distance(unit) == 0
        assert list(trace.upcoming(99)) == list(dict.fromkeys(rest))
        for other in range(8):
            ahead = [*rest, *uses]
            assert trace.distance(other) == (ahead.index(other) if other in uses else NEVER)
        trace.use(unit)


@given(orders, orders)
def test_any_other_order_never_fails(order: list[int], other: list[int]) -> None:
    trace = _recorded(order)
    for unit in other:
        trace.use(unit)
        assert trace.distance(unit) >= 0
    trace.finish()
    assert list(trace.order) == _without_repeats(other)


@given(orders, st.sets(st.integers(0, 9), min_size=1), st.integers(-1, 20))
def test_the_victim_is_the_unit_used_last(order: list[int], units: set[int], beyond: int) -> None:
    trace = _recorded(order)
    victim = furthest(units, trace, beyond)
    most = max(trace.distance(unit) for unit in units)
    if most <= beyond:
        assert victim is None
    else:
        assert victim in units and trace.distance(victim) == most


def test_an_empty_step_keeps_the_prediction() -> None:
    trace = _recorded([0, 1, 2])
    trace.finish()
    assert trace.order == (0, 1, 2)


def test_nothing_is_known_before_the_first_step() -> None:
    trace = Trace()
    assert trace.distance(0) == NEVER and list(trace.upcoming(3)) == []
