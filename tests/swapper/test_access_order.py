"""The access order predicts the last run of each kind; a misprediction is counted and does no harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import testing
from offload.swapper.policy import NEVER, AccessOrder, PassKind

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


def test_experts_that_are_expected_come_first_and_backwards_again() -> None:
    """Units 10 to 15 are the experts of a layer; the run before has used 11 and 13."""
    trace = AccessOrder.of([0, 11, 13, 1, 2, 1, 13, 11, 0])
    trace.use(0)
    trace.expect([10, 12, 14], range(10, 16))
    assert list(trace.upcoming()) == [10, 12, 14, 1, 2, 13, 11, 0], "what the run before chose here is passed over"
    assert [trace.distance(unit) for unit in (10, 12, 14, 1, 2)] == [0, 1, 2, 3, 4]
    assert trace.distances([10, 1, 13, 15]) == (0, 3, 6, NEVER)
    assert list(trace.until(1)) == [10, 12, 14] and list(trace.until(12)) == [10]
    for unit in (10, 12, 14, 1, 2, 1):
        assert trace.distance(unit) == 0
        trace.use(unit)
    trace.use(14)  # its backward, of which the run before knew nothing
    assert list(trace.upcoming()) == [12, 10, 0]
    for unit in (12, 10, 0):
        trace.use(unit)
    assert trace.unforeseen == 0
    trace.finish()
    assert list(trace.order) == [0, 10, 12, 14, 1, 2, 1, 14, 12, 10, 0]


def test_the_last_expert_of_a_forward_is_the_first_of_its_backward() -> None:
    trace = AccessOrder()
    for step in ([3, 5], [4, 5]):
        trace.expect(step, range(3, 6))
        for unit in (*step, *reversed(step)):
            trace.use(unit)
        trace.finish()
    assert list(trace.order) == [4, 5, 4]


@given(orders, st.lists(st.tuples(st.sets(st.integers(4, 7)), orders), max_size=8))
def test_expected_experts_never_fail(order: list[int], steps: list[tuple[set[int], list[int]]]) -> None:
    """Whatever is used, and whatever was expected, the order answers every question."""
    trace = AccessOrder.of(order)
    for expected, uses in steps:
        trace.expect(sorted(expected), range(4, 8))
        for unit in uses:
            trace.use(unit)
            ahead = list(trace.upcoming())
            assert len(ahead) == len(set(ahead))
            for other in range(8):
                distance = trace.distance(other)
                assert distance >= 0 and (distance == NEVER or len(list(trace.until(other))) == distance)
    trace.finish()
    assert list(trace.order) == (
        _without_repeats([unit for _, uses in steps for unit in uses]) or _without_repeats(order)
    )


@pytest.mark.parametrize("kind", PassKind)
def test_a_run_that_never_ends_records_a_bounded_number_of_uses(
    kind: PassKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loop that runs forwards with a graph, and never steps."""
    testing.replace(monkeypatch, "size.access_order", 10)
    trace = AccessOrder()
    trace.begin(kind)
    for use in range(100):
        trace.use(use % 7)
    trace.finish()
    assert trace.order == tuple(use % 7 for use in range(10))
