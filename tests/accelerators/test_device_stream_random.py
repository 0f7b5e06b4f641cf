"""On a device with streams random plans keep every bit, and each use of a buffer comes after its event.

`LateDevice` carries a copy out as late as it may, and records what reads or writes a place too early, or frees it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload import testing
from offload.sizes import GIB, MIB
from offload.swapper.memory.device import DeviceRoom
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.least_budget import budget
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    Result,
    assert_same,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)

JOBS = {
    "gpt2": models.GPT2,
    "dropout": models.DROPOUT,
    "experts, tied and frozen": models.MIXTURE,
    "recomputation": models.MIXTURE._replace(model=models.Recomputed),
}


class Plan(NamedTuple):
    """What may be otherwise from run to run."""

    job: Job
    placement: tuple[str, str]
    host: float | None
    """How far the host budget is above the least, in times of it; None for the default."""
    device: float | None
    """The same of the device's; from 20 on it has room to add gradients up."""
    options: dict[str, Any]
    lateness: float
    spare: int
    """What the first step is said to leave of the device."""
    pieces: bool
    """Whether gradients, tiles and what streams come in tiny pieces."""
    small: int
    """Bytes below which gradients leave the device together."""
    returns: bool
    """Whether memory by which the device's budget has grown is given back before the last step."""


def draw(chance: random.Random) -> Plan:
    job = chance.choice(list(JOBS.values()))._replace(
        steps=3,
        dtype=chance.choice(["bf16", "bf16", "fp32", "fp16"]),
        accumulation=chance.choice([1, 1, 2, 3]),
        optimizer=chance.choice(["AdamW", "AdamW", "AdamW", "Lion"]),
    )
    budgets = [None, 0.0, 0.3, 2.0]
    placement = chance.choice(PLACEMENTS)
    options: dict[str, Any] = {"durability": chance.choice(["auto", "none", {"every": 2}])}
    if options["durability"] == {"every": 2} and "nvme" not in placement:
        options["durability"] = "step"
    return Plan(
        job,
        placement,
        chance.choice(budgets),
        chance.choice([*budgets, 30.0]),
        options,
        chance.choice([0.5, 0.9, 1.0]),
        chance.choice([0, GIB]),
        chance.random() < 0.5,
        chance.choice([0, 1 << 12, MIB]),
        chance.random() < 0.5,
    )


def carry_out(plan: Plan, seed: int, folder: Path, device: LateDevice) -> tuple[Result, bool]:
    """What came of it, and whether gradients were added up on the device."""
    options = dict(plan.options)
    options |= budget(plan.job, plan.placement, "device_memory", plan.device, folder, **options)
    options |= budget(plan.job, plan.placement, "host_memory", plan.host, folder, **options)
    engine = start(plan.job, plan.placement, folder, **options)
    try:
        with Ticks(device):
            losses, norms = [], []
            for step in range(plan.job.steps):
                if plan.returns and step == plan.job.steps - 1:
                    engine.empty_partition_cache()
                losses.append(train_step(engine, plan.job, step))
                norms.append(engine.get_global_grad_norm())
            result = Result(losses, norms, weights_of(engine))
        inspected = testing.inspect(engine)
        return result, any(inspected.gradients_add_up_on_device(unit) for unit in range(len(inspected.layouts)))
    finally:
        engine.destroy(remove=True)


def check(plan: Plan, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether gradients were added up on the device."""
    if plan.pieces:
        small_pieces(monkeypatch)
    expected = run(plan.job, ("none", "none"), folder / "plain")
    testing.replace(monkeypatch, "size.small_gradient", plan.small)
    device = LateDevice(seed, plan.lateness)
    device.spare = DeviceRoom(plan.spare, 0)
    use_device(monkeypatch, device)
    found, added = carry_out(plan, seed, folder / "late", device)
    assert device.broken == [], plan
    assert_same(expected, found, str(plan))
    return added


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(16))
def test_a_random_plan_keeps_every_bit(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(draw(random.Random(seed)), seed, tmp_path, monkeypatch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(500, 508))
def test_a_random_plan_that_adds_up_on_the_device(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    plan = draw(chance)
    while plan.placement == ("none", "none"):
        plan = draw(chance)
    accumulation = chance.choice([2, 3, 4])
    plan = plan._replace(job=plan.job._replace(accumulation=accumulation), device=30.0)
    assert check(plan, seed, tmp_path, monkeypatch), plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16, 216))
def test_many_random_plans(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(draw(random.Random(seed)), seed, tmp_path, monkeypatch)
