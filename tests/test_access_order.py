"""The access order predicts the last run of each kind; a misprediction is counted and does no harm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.swapper.access_order import NEVER, AccessOrder, PassKind

orders = st.lists(st.integers(0, 7), min_size=1, max_size=40)


def _without_repeats(order: list[int]) -> list[int]:
    return [unit for i, unit in enumerate(order) if i == 0 or order[i - 1] != unit]


@given(orders)
def test_a_step_that_repeats_the_last_is_foreseen_exactly(order: list[int]) -> None:
    trace, uses = AccessOrder.of(order), _without_repeats(order)
    assert list(trace.order) == uses
    for position, unit in enumerate(uses):
        rest = uses[position:]
        assert trace.distance(unit) == 0
        assert list(trace.upcoming()) == list(dict.fromkeys(rest)), "the next step has other weights"
        for other in range(8):
            ahead = [*rest, *uses]
            assert trace.distance(other) == (ahead.index(other) if other in uses else NEVER)
        assert trace.distances(range(8)) == tuple(trace.distance(other) for other in range(8))
        trace.use(unit)
    assert trace.unforeseen == 0


@given(orders, st.integers(0, 39))
def test_an_evaluation_comes_round_to_its_first_unit(order: list[int], passed: int) -> None:
    trace, uses = AccessOrder.of(order, PassKind.EVAL), _without_repeats(order)
    for unit in uses[:passed]:
        trace.use(unit)
    assert list(trace.upcoming()) == list(dict.fromkeys([*uses[passed:], *uses[:passed]]))


@given(orders, orders)
def test_any_other_order_never_fails(order: list[int], other: list[int]) -> None:
    trace = AccessOrder.of(order)
    for unit in other:
        trace.use(unit)
        assert trace.distance(unit) >= 0
    assert (trace.unforeseen == 0) == (
        _without_repeats(other) == _without_repeats(order)[: len(_without_repeats(other))]
    )
    trace.finish()
    assert list(trace.order) == _without_repeats(other)


@given(orders, orders, st.integers(0, 39))
def test_an_evaluation_in_the_middle_of_a_step_leaves_its_order(step: list[int], other: list[int], at: int) -> None:
    trace, uses = AccessOrder.of(step), _without_repeats(step)
    for position, unit in enumerate(uses):
        if position == at:
            for kind in (PassKind.EVAL, PassKind.TRAIN):
                trace.begin(kind)
                for used in other if kind is PassKind.EVAL else ():
                    trace.use(used)
                if kind is PassKind.EVAL:
                    trace.finish()
        trace.use(unit)
    assert trace.unforeseen == 0
    trace.finish()
    assert list(trace.order) == uses


def test_an_evaluation_that_was_interrupted_is_forgotten() -> None:
    trace = AccessOrder.of([0, 1, 2], PassKind.EVAL)
    trace.use(5)
    trace.begin(PassKind.EVAL)
    for unit in (0, 1, 2):
        trace.use(unit)
    trace.finish()
    assert trace.order == (0, 1, 2)


def test_an_empty_step_keeps_the_prediction() -> None:
    trace = AccessOrder.of([0, 1, 2])
    trace.finish()
    assert trace.order == (0, 1, 2)


def test_nothing_is_known_before_the_first_step() -> None:
    trace = AccessOrder()
    trace.use(0)
    assert trace.distance(0) == NEVER and list(trace.upcoming()) == [] and trace.unforeseen == 0
