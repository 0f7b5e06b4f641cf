"""The first unit of the next forward is on the device, or on its way, before the forward asks; no bit changes by it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.sizes import MIB
from offload.swapper.table import Residency
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    Job,
    assert_same,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    trained,
)

ON_DEVICE = (Residency.UPLOADING, Residency.DEVICE)
JOB = models.GPT2._replace(dtype="bf16", steps=5)


def first_unit(engine: offload.Engine) -> int:
    return testing.inspect(engine).access_order[0]


def residency_of_first(engine: offload.Engine) -> Residency:
    return testing.inspect(engine).residency(first_unit(engine))


class Chain(nn.Module):
    """Blocks of which the first does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


def chain_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(step))
    return models.token_loss(model(ids), ids)


CHAIN = Job(Chain, chain_loss, dtype="bf16", steps=4)


@pytest.mark.cpu_only("the engine is on the late device")
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_the_first_unit_of_the_next_forward_is_on_its_way_when_step_returns(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not train waits for no update, where updates leave it a host buffer."""
    device = LateDevice(0, 0.0)
    use_device(monkeypatch, device)
    # Without it the default has two host buffers, which updates under the backward may hold when the step returns.
    host_memory = least_host_memory(CHAIN, tmp_path, (tier, tier)) + MIB
    engine = start(CHAIN, (tier, tier), tmp_path, device_memory=room_for(CHAIN, 2), host_memory=host_memory)
    with Ticks(device):
        for step in range(CHAIN.steps):
            train_step(engine, CHAIN, step)
            pager = testing.inspect(engine).pager
            assert pager.sizes[first_unit(engine)].name == "embedding"
            assert residency_of_first(engine) in (*ON_DEVICE, Residency.READING)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.cpu_only("the engine is on the late device")
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_the_first_unit_of_the_next_forward_comes_with_its_update(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(0, 0.0)
    use_device(monkeypatch, device)
    engine = start(JOB, (tier, tier), tmp_path, device_memory=room_for(JOB, 2))
    with Ticks(device):
        for step in range(JOB.steps):
            train_step(engine, JOB, step)
            testing.settle(engine, commit=False)
            assert residency_of_first(engine) is Residency.DEVICE
            assert not device.broken
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.cpu_only("the engine is on the late device")
@pytest.mark.parametrize("seed", range(8))
def test_late_reads_and_late_copies_change_no_bit(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    chance = random.Random(seed)
    job = chance.choice(
        [JOB, CHAIN, models.MIXTURE._replace(dtype="bf16", steps=4, accumulation=chance.choice([1, 2]))]
    )
    placement = (chance.choice(["cpu", "nvme"]), chance.choice(["cpu", "nvme"]))
    expected = run(job, ("none", "none"), tmp_path)
    device = LateDevice(seed, chance.choice([0.3, 0.9]))
    use_device(monkeypatch, device)
    use_queue(monkeypatch, lambda: LateQueue(seed, 0.002))
    engine = start(job, placement, tmp_path, device_memory=room_for(job, chance.choice([2, 3, 5])))
    with Ticks(device):
        result = trained(engine, job)
    engine.destroy(remove=True)
    assert not device.broken
    assert_same(expected, result, f"{placement}, late")
