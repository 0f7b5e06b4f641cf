"""On a device with streams nothing is read before it is there, nor written or freed before its last reader is done."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import offload
from offload import kernels, testing
from offload.errors import EngineFailed
from offload.layout.flat_layout import lay_out
from offload.layout.units import find_units
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
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)

JOB = models.GPT2._replace(steps=3, accumulation=2, dtype="bf16")


def train(job: Job, placement: tuple[str, str], folder: Path, device: LateDevice, **options: Any) -> Result:
    """Run `job` with a tick of the device's clock for every operation."""
    engine = start(job, placement, folder, **options)
    losses, norms = [], []
    try:
        with Ticks(device):
            for step in range(job.steps):
                losses.append(train_step(engine, job, step))
                norms.append(engine.get_global_grad_norm() or 0.0)
        weights = weights_of(engine)
    finally:
        engine.destroy(remove=True)
    return Result(losses, norms, weights)


def resident_on_device(placement: tuple[str, str]) -> int:
    """Bytes of residuals and moments where they live on the device."""
    model = JOB.model()
    units = [[(name, model.get_parameter(name)) for name in unit.parameters] for unit in find_units(model).units]
    return 0 if placement[1] != "none" else sum(10 * lay_out("", unit, 1).numel for unit in units)


def runs(
    patch: pytest.MonkeyPatch, folder: Path, seed: int, lateness: float, placement: tuple[str, str], **options: Any
) -> tuple[Result, LateDevice]:
    """Trains two steps, of which the second uses what the first has updated."""
    device = LateDevice(seed, lateness)
    use_device(patch, device)
    return train(JOB._replace(steps=2), placement, folder, device, **options), device


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_random_lateness_changes_no_bit(
    placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = runs(monkeypatch, tmp_path / "at once", 0, 0.0, ("none", "none"))
    for seed, lateness in enumerate((0.5, 1.0)):
        options: dict[str, Any] = {}
        if placement[0] != "none":
            options["device_memory"] = room_for(JOB, 1 + seed) + resident_on_device(placement)
        # All gradients leave alone, or some together.
        testing.replace(monkeypatch, "size.small_gradient", (0, 1 << 12)[seed])
        result, device = runs(monkeypatch, tmp_path / f"{seed}-{lateness}", seed, lateness, placement, **options)
        assert_same(expected, result)
        assert device.broken == [] and device.copies > 50


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_with_the_least_host_memory(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients spill, and units come in pieces that are copied while the next are read."""
    small_pieces(monkeypatch)
    expected, _ = runs(monkeypatch, tmp_path / "memory", 0, 0.0, ("none", "none"))
    use_device(monkeypatch, LateDevice(0, 0.0))
    least = least_host_memory(JOB, tmp_path / "least")
    result, device = runs(monkeypatch, tmp_path / "disk", seed, 0.9, ("nvme", "nvme"), host_memory=least)
    assert_same(expected, result)
    assert device.broken == [] and device.copies > 100


ALL_UNITS = 1 << 24
"""Bytes of a device that all of the model's states and gradients fit on."""


def watch_updates(patch: pytest.MonkeyPatch, device: LateDevice) -> list[int]:
    """Note what the optimizer's kernel touches, which waits for no stream; elements of each call."""
    real, numels = kernels.update, list[int]()

    def update(partition: kernels.Partition, segments: Any, *writes: kernels.Writes) -> None:
        given = [partition.weight, partition.grad, *partition.moments, *partition[3:]]
        tensors = [tensor for tensor in given if tensor is not None]
        device.check_kernel([(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors])
        numels.append(partition.weight.numel())
        device.start_kernel(lambda: real(partition, segments, *writes))

    testing.replace(patch, "kernel.update", update)
    return numels


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_lives_on_the_device_is_updated_there(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients never leave it; where each step is durable, what was updated is copied out to be written."""
    job = JOB._replace(accumulation=accumulation)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    copies = {}
    for seed, durability in enumerate(("none", "step")):
        device = LateDevice(seed, 0.9)
        with monkeypatch.context() as patch:
            use_device(patch, device)
            tiles = watch_updates(patch, device)
            options = {"device_memory": ALL_UNITS, "durability": durability}
            assert_same(expected, train(job, ("none", "none"), tmp_path / durability, device, **options))
        assert device.broken == [] and len(tiles) >= job.steps
        assert device.downloads == job.steps, "of the sums of squares"
        copies[durability] = device.copies
    states = len(("weight", "residual", "exp_avg", "exp_avg_sq"))
    assert copies["step"] == copies["none"] + len(tiles) * states


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"moments": "int8"}, {"master": "bf24", "moments": "bf16"}], ids=str)
def test_what_is_rounded_stochastically_is_updated_there_too(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(JOB, ("none", "none"), tmp_path / "plain", **options)
    device = LateDevice(0, 0.9)
    use_device(monkeypatch, device)
    tiles = watch_updates(monkeypatch, device)
    result = train(JOB, ("none", "none"), tmp_path / "late", device, device_memory=ALL_UNITS, **options)
    assert_same(expected, result)
    assert device.broken == [] and len(tiles) >= JOB.steps and device.downloads == JOB.steps


def test_gradients_that_have_no_room_there_leave_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(0, 0.9)
    use_device(monkeypatch, device)
    engine = start(JOB, ("none", "none"), tmp_path, device_memory=ALL_UNITS)
    units = len(testing.inspect(engine).layouts)
    assert all(testing.inspect(engine).gradients_stay(unit) for unit in range(units))
    used = testing.inspect(engine).device_arena.used_bytes
    engine.destroy(remove=True)
    engine = start(JOB, ("none", "none"), tmp_path, device_memory=used - 4096)
    stays = [testing.inspect(engine).gradients_stay(unit) for unit in range(units)]
    assert any(stays) and not all(stays)
    engine.destroy(remove=True)
    expected = run(JOB, ("none", "none"), tmp_path / "memory", device="cpu")
    assert_same(expected, train(JOB, ("none", "none"), tmp_path, device, device_memory=used - 4096))
    assert device.broken == []


def test_gradients_on_the_device_are_read_and_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, tuple[list[torch.Tensor], float | None]] = {}
    for name, device in (("plain", None), ("late", LateDevice(0, 0.9))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            engine = start(JOB, ("none", "none"), tmp_path / name, device_memory=ALL_UNITS)
            for micro in range(JOB.accumulation):
                engine.backward(JOB.loss(engine, 0, micro))
                if micro == 0:
                    engine.zero_grad()
                    engine.backward(JOB.loss(engine, 0, 0))
                    engine.step()
            weights = list(engine.module.parameters())
            gradients = [offload.safe_get_full_grad(weight) for weight in weights]
            offload.safe_set_full_grad(weights[0], torch.ones_like(gradients[0]))
            engine.step()
            moments = [offload.safe_get_full_optimizer_state(weight, "exp_avg") for weight in weights]
            with torch.no_grad():
                weights[1].mul_(0.5)  # an edit, which is an update without a gradient
            results[name] = ([*gradients, *moments, *engine.state_dict().values()], engine.get_global_grad_norm())
            engine.destroy(remove=True)
    assert results["plain"][1] == results["late"][1]
    assert all(
        torch.equal(one.cpu(), other) for one, other in zip(results["plain"][0], results["late"][0], strict=True)
    )


@pytest.mark.parametrize(("way", "error"), [("download", EngineFailed), ("upload", RuntimeError)])
def test_a_copy_that_fails_stops_the_engine(
    way: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fault of the GPU does: no later call waits for what will never be there. Gradients have a thread."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error")

    use_device(monkeypatch, LateDevice(0, 0.0))
    engine = start(JOB, ("cpu", "cpu"), tmp_path)
    if way == "download":
        train_step(engine, JOB, 0)
    monkeypatch.setattr(LateDevice, way, broken)
    with pytest.raises(error, match="CUDA error"):
        train_step(engine, JOB, engine.global_steps)
    for call in (engine.zero_grad, lambda: train_step(engine, JOB, 0)):
        with pytest.raises(EngineFailed, match="CUDA error"):
            call()
    engine.destroy()
    assert not [thread for thread in threading.enumerate() if thread.name == "offload-gradients"]


def test_weights_that_stay_are_not_written_before_the_compute_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation is followed by an edit: no gradient has made the host wait for the evaluation's compute."""
    device = LateDevice(0, 1.0)
    use_device(monkeypatch, device)
    engine = start(JOB, ("none", "none"), tmp_path)
    with Ticks(device), torch.no_grad():
        JOB.loss(engine, 0, 0)
    layer: Any = engine.module.transformer.h[0].mlp.c_fc
    offload.safe_set_full_fp32_param(layer.weight, torch.zeros(layer.weight.shape))
    with Ticks(device), torch.no_grad():
        JOB.loss(engine, 0, 0)
    engine.destroy(remove=True)
    assert device.broken == []


def test_a_load_writes_no_weights_that_are_still_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a step begins to upload for the next forward, which may be after a load."""
    device = LateDevice(0, 1.0)
    use_device(monkeypatch, device)
    job = JOB._replace(accumulation=1)
    engine = start(job, ("cpu", "nvme"), tmp_path / "swap")
    with Ticks(device):
        train_step(engine, job, 0)
        engine.save_checkpoint(tmp_path / "saved")
        expected = train_step(engine, job, 1)
        engine.synchronize()
        copies = device.copies
        engine.load_checkpoint(tmp_path / "saved")
        assert train_step(engine, job, 1) == expected
    assert device.broken == [] and device.copies > copies
    engine.destroy(remove=True)


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
    result, added = carry_out(plan, seed, folder / "late", device)
    assert device.broken == [], plan
    assert_same(expected, result, str(plan))
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
