"""Random runs in random weather lose nothing, and a storm notices what it promises to notice."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from offload.errors import IoError
from tests.storm import trial
from tests.storm.division import is_of_a_lost_rank
from tests.storm.life import FAILED, causes_of
from tests.storm.plan import KINDS, Fault, Plan, draw, simpler
from tests.storm.trial import Life, faults
from tests.support.drives.rot import KINDS as ROT

KILLED = -signal.SIGKILL
PLAN = draw(0)._replace(
    ranks=1, steps=2, placement=("nvme", "nvme"), options={"durability": "step"}, faults=(Fault("kill", 5),)
)
CALM = [
    [["begin", 0], ["step", 0, 3.0, 1.0], ["step", 1, 2.0, 1.0], ["weights", 2, {"a": 7, "b": 8}], ["left", -1, []]]
]


def verdict(
    first: list[Any], second: list[Any], statuses: tuple[int | None, int] = (KILLED, 0), plan: Plan = PLAN
) -> list[str]:
    """What is wrong in a run of two lives, of these lines and statuses."""
    return faults(plan, CALM, [Life((statuses[0],), (first,)), Life((statuses[1],), (second,))])


@pytest.mark.parametrize("seed", [209, 364])
def test_a_storm_loses_nothing(seed: int, tmp_path: Path) -> None:
    assert trial.run(draw(seed), tmp_path / "storm") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_a_hundred_storms_lose_nothing(seed: int, tmp_path: Path) -> None:
    assert trial.run(draw(seed), tmp_path / "storm") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2000, 2010))
def test_ten_storms_of_each_kind_lose_nothing(seed: int, kind: str, tmp_path: Path) -> None:
    assert trial.run(draw(seed, kind), tmp_path / "storm") == []


def test_a_run_that_was_killed_and_went_on_is_right() -> None:
    assert verdict(CALM[0][:2], CALM[0]) == []
    assert verdict(CALM[0][:2], [["begin", 1], *CALM[0][2:]]) == []


def test_what_is_lost_is_told() -> None:
    assert "though 2 steps had ended" in verdict(CALM[0][:3], CALM[0])[0]
    every = PLAN._replace(options={"durability": {"every": 2}})
    assert verdict(CALM[0][:3], CALM[0], plan=every) == []


def test_a_step_that_ends_between_a_power_cut_and_its_kill_is_not_lost() -> None:
    plan = PLAN._replace(faults=(Fault("power", 5),))
    begun, first, second = CALM[0][:3]
    assert verdict([begun, first, ["cut", -1], second], CALM[0], plan=plan) == []
    assert "though 2 steps had ended" in verdict([begun, first, second], CALM[0], plan=plan)[0]


def test_wrong_bits_are_told() -> None:
    assert (
        "step of step 1 is [2.5, 1.0] in place of [2.0, 1.0]"
        in verdict(CALM[0][:2], [["begin", 1], ["step", 1, 2.5, 1.0], *CALM[0][3:]])[0]
    )
    wrong = [["begin", 1], CALM[0][2], ["weights", 2, {"a": 7, "b": 9}], CALM[0][4]]
    assert "weights of step 2 is otherwise in b" in verdict(CALM[0][:2], wrong)[0]


def test_what_a_life_has_left_is_told() -> None:
    assert "left ['thread x']" in verdict(CALM[0][:2], [*CALM[0][:4], ["left", -1, ["thread x"]]])[0]


def test_what_a_step_keeps_is_told() -> None:
    kept = [*CALM[0][:2], ["kept", 0, {"host": 512}]]
    assert "keeps inputs of blocks after a step: {'host': 512}" in verdict(kept, CALM[0])[0]


@pytest.mark.parametrize(
    ("fault", "status", "line", "words"),
    [
        ("kill", FAILED, ["error", -1, "EngineFailed", "stopped", []], "failed though nothing had failed"),
        ("error", FAILED, ["error", -1, "EngineFailed", "stopped", []], "does not name the request that failed"),
        ("lost", FAILED, ["error", -1, "EngineFailed", "stopped", []], "does not name the bytes that the drive has"),
        ("error", KILLED, ["begin", 0], "was killed in a life of error"),
        ("kill", 1, ["traceback", -1, "AssertionError"], "AssertionError"),
        ("kill", None, ["begin", 0], "waits, and had not ended"),
    ],
)
def test_an_end_that_no_weather_explains_is_told(fault: str, status: int | None, line: list[Any], words: str) -> None:
    found = verdict([line], CALM[0], (status, 0), PLAN._replace(faults=(Fault(fault, 5),)))
    assert any(words in each for each in found), found


def test_bytes_that_a_drive_has_changed_are_named_before_a_result_of_theirs() -> None:
    """The run may be refused from then on."""
    plan, damage = PLAN._replace(faults=(Fault("bit", 5),)), ["error", -1, "EngineFailed", "stopped", ["IoError: use"]]
    assert verdict([*CALM[0][:2], damage], [damage], (FAILED, FAILED), plan) == []
    assert verdict([*CALM[0][:2], damage], CALM[0], (FAILED, 0), plan) == []
    silent = [CALM[0][0], ["step", 0, 3.5, 1.0], damage]
    assert "step of step 0 is [3.5, 1.0]" in verdict(silent, [damage], (FAILED, FAILED), plan)[0]
    assert {fault.what for seed in range(200) for fault in draw(seed).faults} >= set(ROT)


def end_at_once(*_: Any) -> None:
    os._exit(FAILED)


def test_lives_of_two_storms_keep_their_statuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python would let the start of the second read the status of the first in the middle of the first's own read."""
    real, reading, taken = forkserver.read_signed, threading.Event(), threading.Event()  # type: ignore[attr-defined]

    def read_signed(fd: int) -> int:
        if sys._getframe(1).f_code.co_name != "poll":
            return int(real(fd))
        if not reading.is_set():
            reading.set()
            taken.wait(1)
            return int(real(fd))
        try:
            return int(real(fd))
        finally:
            taken.set()

    monkeypatch.setattr(trial, "live", end_at_once)
    monkeypatch.setattr(forkserver, "read_signed", read_signed)
    for name in "ab":
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(trial._live, PLAN, 0, tmp_path / "a")
        assert reading.wait(60)
        assert trial._live(PLAN, 0, tmp_path / "b").statuses == (FAILED,)
        assert first.result().statuses == (FAILED,)


def test_causes_of_an_error_are_told_once_though_each_is_the_others() -> None:
    first, second = RuntimeError("first"), IoError("file", 0, 1, 5, "read")
    first.__cause__, second.__context__ = second, first
    assert [each.split(":")[0] for each in causes_of(first)] == ["IoError"]


def test_an_error_of_a_lost_rank_is_known_by_its_causes() -> None:
    """Torch's schedules put an error of their own in front."""
    outer = RuntimeError("failed to run the forward of a stage")
    assert not is_of_a_lost_rank(outer)
    outer.__cause__ = IoError("file", 0, 1, 5, "read")
    assert is_of_a_lost_rank(outer)
    assert is_of_a_lost_rank(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_storm_is_drawn_for_any_seed(kind: str) -> None:
    plans = [draw(seed, kind) for seed in range(50)]
    assert all(plan.ranks > 1 for plan in plans)
    assert {plan.stage == 0 for plan in plans} >= {kind == "stage"}
    assert all((plan.node == 2) == (kind == "node") for plan in plans if kind != "sequence")
    assert all(plan.division.what == (kind if kind in ("sequence", "tensor", "pipeline") else "") for plan in plans)


def test_a_seed_is_a_plan_and_simpler_plans_end() -> None:
    plan = draw(11)
    assert plan == draw(11) and plan != draw(12)
    length = 0
    while (plan := next(simpler(plan), plan)) and next(simpler(plan), None) is not None:  # type: ignore[truthy-bool]
        length += 1
    assert (plan.faults, plan.deeds, plan.options, plan.model) == ((), (), {}, "gpt2") and length > 5
