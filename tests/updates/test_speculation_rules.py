"""When an update may be made before its step is decided: pure decisions, without an engine."""

from __future__ import annotations

import pytest

from offload.engine.early_updates import HELD_IN_A_ROW, AutoSpeculation, reason_to_clip, run_may_speculate
from offload.engine.gradients import UnitCompletion
from offload.engine.update import unit_may_begin
from offload.engine.update_strategy import grad_scale
from offload.swapper.policy import leaves_room_ahead

RUN = {"wanted": True, "ranks": 1, "one_pass": True, "commits": True, "on_disk": True}
UNIT = {"on_disk": True, "gradient_on_host": True, "newest": 0, "target": 1}


class Calls:
    """The part of the engine that a completion calls."""

    def __init__(self, last: bool = True) -> None:
        self.last = last
        self.said: list[tuple[str, int]] = []

    def is_last_micro_batch(self) -> bool:
        return self.last

    def gradients_complete(self, unit: int) -> None:
        self.said.append(("complete", unit))

    def gradients_changed(self, unit: int) -> None:
        self.said.append(("changed", unit))


@pytest.mark.parametrize("lacking", ["wanted", "one_pass", "commits", "on_disk"])
def test_a_run_needs_every_property(lacking: str) -> None:
    assert run_may_speculate(**RUN)
    assert not run_may_speculate(**{**RUN, lacking: False})
    assert not run_may_speculate(**{**RUN, "ranks": 2})


@pytest.mark.parametrize("other", [{"on_disk": False}, {"gradient_on_host": False}, {"target": 0}], ids=str)
def test_a_unit_needs_every_property(other: dict[str, int]) -> None:
    assert unit_may_begin(**UNIT)
    assert not unit_may_begin(**{**UNIT, **other})


@pytest.mark.parametrize("loss_scale", [1.0, 3.0, 65536.0])
def test_a_step_that_does_not_clip_has_the_factor_of_the_guess(loss_scale: float) -> None:
    for norm, clip, held in ((0.5, 1.0, True), (0.0, 1.0, True), (9.0, 0.0, True), (1.5, 1.0, False)):
        scale = grad_scale(norm, clip, loss_scale)
        assert (reason_to_clip(norm, clip, scale, loss_scale) is None) is held
        assert (scale == 1.0 / loss_scale) is held
    assert reason_to_clip(float("nan"), 1.0, 1.0, 1.0) == "the gradient norm is nan"


def test_auto_pauses_for_so_many_steps_and_true_never() -> None:
    auto = AutoSpeculation("auto").after(True).after(False)
    for _ in range(HELD_IN_A_ROW):
        assert not auto.on
        auto = auto.after(True)
    assert auto.on
    assert AutoSpeculation(True).after(False).on and not AutoSpeculation(False).on


def test_a_unit_is_complete_when_it_has_what_the_backward_before_gave() -> None:
    calls = Calls(last=False)
    completion = UnitCompletion(calls)  # type: ignore[arg-type]
    for segment in (0, 1, 1):
        completion.arrived(7, segment)
    completion.end_backward()
    calls.last = True
    for segment in (1, 0):
        completion.arrived(7, segment)
    assert calls.said == []
    completion.arrived(7, 1)
    assert calls.said == [("complete", 7)]
    completion.arrived(7, 0)
    assert calls.said[1:] == [("changed", 7)]
    completion.end_backward()
    completion.end_step()
    completion.changed(7)
    assert len(calls.said) == 2


def test_a_schedule_that_knows_better_says_itself_what_is_complete() -> None:
    calls = Calls()
    completion = UnitCompletion(calls)  # type: ignore[arg-type]
    completion.guesses = False
    for _ in range(2):
        completion.arrived(3, 0)
        completion.end_backward()
    assert calls.said == []
    completion.unit_complete(3)
    assert calls.said == [("complete", 3)]


def test_fresh_weights_stay_in_memory_only_beside_the_next_two_reads() -> None:
    page = 4096
    assert leaves_room_ahead(4 * page, [page, page], [page, page, 100 * page])
    assert not leaves_room_ahead(4 * page, [page, page], [page, 2 * page])
    assert leaves_room_ahead(2 * page, [page + 1], [])
