"""Budgets become smaller and larger between steps, with the same bits, and without a state being moved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import testing
from offload.aio import resident_bytes
from offload.errors import BudgetError, ConfigError, UsageError
from offload.sizes import KIB, MIB
from offload.states import State, Tier
from tests.support import models
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    Result,
    assert_same,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    trained,
)
from tests.support.ranks.rank_pool import shared_pool

JOB = models.GPT2._replace(dtype="bf16")
PROMOTED = 4 * MIB
"""A host budget with room for all states of the job."""


def resident(engine: offload.Engine) -> int:
    arena = testing.inspect(engine).host_arena
    return resident_bytes(arena.address, arena.nbytes)


def least_of(engine: offload.Engine, budget_name: str = "host_memory") -> int:
    """Returns the smallest budget of an engine, as the error names it; 0 for a device that uses host buffers alone."""
    sizes = testing.inspect(engine).sizes
    if budget_name == "device_memory" and all(size.device_resident and size.tier is Tier.HOST for size in sizes):
        return 0
    with pytest.raises(BudgetError, match=r"budget is .* the least that works is [^(]*\(\d+ bytes\)") as caught:
        engine.resize(**{budget_name: 1})
    return int(str(caught.value).partition("the least that works is ")[2].partition("(")[2].split()[0])


def in_memory(engine: offload.Engine) -> int:
    """Number of optimizer states in RAM."""
    return sum(state is not State.GRAD for _, state in testing.inspect(engine).residents)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("weights", "states"), PLACEMENTS)
def test_a_run_whose_budgets_change_at_random_has_the_bits_of_an_undisturbed_one(
    weights: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    placement, chance = (weights, states), random.Random(f"{weights}-{states}")
    # With every second step durable, the budget holds whole layers, and with each step moments alone.
    durability: Any = chance.choice(["step", {"every": 2}])
    options: dict[str, Any] = {"host_memory": PROMOTED, "durability": durability, "debug": {"poison": False}}
    options["device_memory"] = 4 * room_for(JOB, 3) + (PROMOTED if "none" in placement else 0)
    expected = run(JOB, placement, tmp_path / "calm", **options)
    engine = start(JOB, placement, tmp_path / "breathes", **options)
    first = engine.resize()
    seen = set()

    def step(engine: Any, job: Any, number: int) -> float:
        for _ in range(3):
            for budget_name, most in first._asdict().items():
                if chance.random() < 0.5:
                    least = least_of(engine, budget_name)
                    asked = chance.choice([least, chance.randint(least, most), most])
                    taken = getattr(engine.resize(**{budget_name: asked}), budget_name)
                    assert taken <= asked and (taken == asked or asked not in (least, most))
                    assert getattr(engine, budget_name) == taken
                    seen.add((budget_name, taken))
        return train_step(engine, job, number)

    assert_same(trained(engine, JOB, step), expected)
    assert {which for which, _ in seen} == set(first._fields)
    assert testing.inspect(engine).unaccounted_memory()["host"] == 0
    engine.destroy(remove=True)


def test_a_shrunk_cache_gives_its_pages_back_and_a_grown_one_reads_as_little_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory=PROMOTED)
    first, states = engine.host_memory, in_memory(engine)
    least = least_of(engine)
    assert states and least < first

    def read_by_a_step() -> int:
        before = engine.io_bytes().read
        train_step(engine, JOB, 0)
        testing.settle(engine)
        return engine.io_bytes().read - before

    calm = [read_by_a_step() for _ in range(3)][-1]
    full = resident(engine)
    assert engine.resize(host_memory=least).host_memory == least
    assert full - resident(engine) >= first - least - 64 * KIB and in_memory(engine) == 0
    assert read_by_a_step() > calm
    assert engine.resize(host_memory=first).host_memory == first and in_memory(engine) == states
    assert [read_by_a_step() for _ in range(3)][-1] == calm
    engine.destroy()
    engine = start(JOB, ("nvme", "nvme"), tmp_path, resume="must", host_memory=PROMOTED)
    assert engine.global_steps == 7
    engine.destroy(remove=True)


def test_a_budget_that_no_engine_can_have_is_an_error_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory=PROMOTED, debug={"poison": False})
    before, used = engine.resize(), resident(engine)
    least = least_of(engine)
    for wrong in (least - 1, before.host_memory * 64, PROMOTED * 64):
        with pytest.raises(BudgetError, match="the host budget"):
            engine.resize(host_memory=wrong)
    with pytest.raises(BudgetError, match=r"the device budget is 1 B .*the least that works is"):
        engine.resize(host_memory=least, device_memory=1)
    for wrong_size in ("many", True, "50%"):
        with pytest.raises(ConfigError, match="expected a"):
            engine.resize(host_memory=wrong_size)
    with pytest.raises(
        ConfigError, match=r"expected a size .*'50%' \(of the weights\) or a number of bytes, got 'auto'"
    ):
        engine.resize(device_memory="auto")
    assert engine.resize() == before and resident(engine) == used
    engine.backward(JOB.loss(engine, 0, 0))
    with pytest.raises(UsageError, match=r"resize was called while gradients wait for step\(\)"):
        engine.resize(device_memory=before.device_memory)
    assert engine.resize(host_memory=f"{least}").host_memory == least, "between micro-batches"
    engine.step()
    engine.destroy(remove=True)


def test_while_a_graph_holds_weights_the_device_budget_cannot_change(tmp_path: Path) -> None:
    engine = start(JOB, ("none", "none"), tmp_path)
    loss = JOB.loss(engine, 0, 0)
    with pytest.raises(UsageError, match=r"a view of some is held .*a graph whose backward has not run"):
        engine.resize(device_memory=engine.device_memory)
    engine.backward(loss)
    engine.step()
    assert engine.resize(device_memory=engine.device_memory) == engine.resize()
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)


def test_a_percentage_is_the_share_of_the_weights_on_the_device(tmp_path: Path) -> None:
    job = JOB._replace(model=lambda: models.gpt2(layers=12))
    options = {"host_memory": 64 * MIB, "debug": {"poison": False}}
    engine = start(job, ("nvme", "nvme"), tmp_path, device_memory="50%", **options)
    half = engine.device_memory
    sizes = [engine.resize(device_memory=share).device_memory for share in ("20%", "40%", "50%")]
    assert sizes == sorted(set(sizes)) and sizes[-1] == half

    for step, share in enumerate(("1%", "50%")):
        engine.resize(device_memory=share)
        train_step(engine, job, step)
    engine.destroy(remove=True)


def test_another_engine_may_take_what_was_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    engine = start(JOB, ("nvme", "nvme"), tmp_path / "whole", host_memory=PROMOTED)
    before, least = engine.host_memory, least_of(engine)
    engine.destroy(remove=True)
    budget = before + least // 2
    expected = run(JOB, ("nvme", "nvme"), tmp_path / "expected", host_memory=budget)
    first = start(JOB, ("nvme", "nvme"), tmp_path / "first", host_memory=budget)
    assert first.host_memory == before
    kept = first.resize(host_memory=least_of(first)).host_memory
    second = start(JOB, ("nvme", "nvme"), tmp_path / "second", host_memory=budget)
    assert second.host_memory <= budget - kept
    with pytest.raises(
        BudgetError, match=r"Other engines of this process use|another engine of this process has taken"
    ):
        first.resize(host_memory=before)
    assert first.host_memory == kept
    second.destroy(remove=True)
    assert first.resize(host_memory=before).host_memory == before
    assert_same(trained(first, JOB), expected)
    first.destroy(remove=True)


def change_between_steps(job: Job, folder: Path, changes: bool) -> Result:
    """Trains on one of several ranks. The device's budget falls to the least and rises again, the host's too."""
    engine = start(job, ("nvme", "nvme"), folder, host_memory=16 * MIB, debug={"poison": False})
    first = engine.resize()

    def step(engine: Any, job: Any, number: int) -> float:
        if changes:
            for budget_name, most in first._asdict().items():
                engine.resize(**{budget_name: most if number % 2 else least_of(engine, budget_name)})
        return train_step(engine, job, number)

    result = trained(engine, job, step)
    engine.destroy(remove=True)
    return result


@pytest.mark.slow
def test_ranks_change_their_budgets_together(tmp_path: Path) -> None:
    with shared_pool(2) as two:
        calm, changed = (two.run(change_between_steps, JOB, tmp_path / str(how), how) for how in (False, True))
    for result, expected in zip(changed, calm, strict=True):
        assert_same(result, expected)
