"""The access order predicts what is fetched ahead; a run that takes another way is right, and is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.swapper.caches import HostCache
from offload.swapper.policy import Limits
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import Job, assert_same, config, room_for, run, start, train_step

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(dtype="bf16", steps=5)


class Switch(nn.Module):
    """Blocks that run in the order that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 61)
        self.order = [0, 1, 2, 3, 4, 5]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for index in self.order:
            hidden = torch.tanh(self.blocks[index](hidden))
        return self.head(hidden)


ORDERS = (
    [0, 1, 2, 3, 4, 5],
    [5, 4, 3, 2, 1, 0],
    [0, 2, 4],
    [1],
    [0, 1, 2, 3, 4, 5],
    [3, 3, 0, 0, 5],
    [0, 1, 2, 3, 4, 5],
)


def switch_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    getattr(model, "module", model).order = ORDERS[step]
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(step))
    return models.token_loss(model(ids), ids)


def test_other_orders_and_skipped_units_give_the_same_bits(tmp_path: Path) -> None:
    job = Job(Switch, switch_loss, steps=len(ORDERS), dtype="bf16")
    in_memory = run(job, ("none", "none"), tmp_path)
    assert_same(in_memory, run(job, DISK, tmp_path, device_memory=room_for(job, 2)), "orders that change")


def test_a_mispredicted_use_is_counted_and_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(Switch, switch_loss, dtype="bf16")
    engine = start(job, DISK, tmp_path)
    with caplog.at_level(logging.DEBUG, "offload"):
        reported = []
        for step in (0, 0, 1, 1, 2, 2):
            before = engine.use_counts()
            train_step(engine, job, step)
            lines = [record for record in caplog.records if "were mispredicted" in record.message]
            reported.append((engine.use_counts().unforeseen - before.unforeseen > 0, len(lines)))
            caplog.clear()
    assert reported == [(False, 0), (False, 0), (True, 1), (False, 0), (True, 1), (False, 0)]
    engine.destroy(remove=True)


def test_an_evaluation_between_steps_has_an_order_of_its_own(tmp_path: Path) -> None:
    alone = run(JOB, DISK, tmp_path)
    engine = start(JOB, DISK, tmp_path)
    losses = []
    for step in range(JOB.steps):
        loss = JOB.loss(engine, step, 0)
        generator = torch.get_rng_state()
        for _ in range(2):
            with torch.no_grad():
                JOB.loss(engine, step, 0)
        torch.set_rng_state(generator)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses == alone.losses
    assert engine.use_counts().unforeseen == 0
    engine.destroy(remove=True)


def test_an_exception_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    """What was read ahead for it is used later, or given up."""
    alone = run(JOB, DISK, tmp_path)
    engine = start(JOB, DISK, tmp_path)
    hook = None

    def raise_now(*_: Any) -> None:
        raise ValueError("stop")

    losses = []
    for step in range(JOB.steps):
        generator = torch.get_rng_state()
        hook = engine.module.transformer.h[1].register_forward_pre_hook(raise_now)
        with pytest.raises(ValueError, match="stop"):
            JOB.loss(engine, step, 0)
        hook.remove()
        torch.set_rng_state(generator)
        losses.append(train_step(engine, JOB, step))
    assert losses == alone.losses
    engine.destroy(remove=True)


def _reads_on_demand(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units that somebody had to ask the disk for, and wait."""
    found: list[int] = []
    real = HostCache.start_read

    def start_read(cache: HostCache, entry: Any, buffer: Any, priority: Any) -> None:
        if priority.name == "URGENT":
            found.append(entry.index)
        real(cache, entry, buffer, priority)

    testing.replace(monkeypatch, "host.start_read", start_read)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("late", [0.0, 0.01])
def test_from_the_second_step_on_nothing_is_read_on_demand(
    late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the reads are. An update under way holds leases, for as long as it takes: each is awaited."""
    use_queue(monkeypatch, lambda: LateQueue(0, late))
    found = _reads_on_demand(monkeypatch)
    engine = start(JOB, DISK, tmp_path)
    try:
        for step in range(JOB.steps):
            train_step(engine, JOB, step)
            testing.settle(engine, commit=False)
            if step == 0:
                assert found, "nothing was foreseen yet"
            if step > 1:
                assert found == [], f"step {step}"
            found.clear()
    finally:
        engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ({}, Limits(None, None)),
        ({"stage3_prefetch_bucket_size": "auto", "stage3_max_reuse_distance": "auto"}, Limits(None, None)),
        ({"stage3_prefetch_bucket_size": 5e7, "max_reuse_distance": 1e9}, Limits(10**8, 2 * 10**9)),
        ({"prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}, Limits(0, 0)),
    ],
)
def test_deepspeeds_limits_are_inputs_and_change_no_bit(
    keys: dict[str, Any], limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(JOB, ("none", "none"), tmp_path)
    settings = config(JOB, DISK, tmp_path)
    settings["zero_optimization"] |= keys
    found = _reads_on_demand(monkeypatch)
    torch.manual_seed(JOB.seed)
    engine = offload.initialize(model=JOB.model(), config=settings)[0]
    assert testing.inspect(engine).prefetch_limits == limits
    losses = [train_step(engine, JOB, step) for step in range(JOB.steps)]
    assert losses == alone.losses
    if limits.ahead == 0:
        assert len(found) > JOB.steps, "each step asks the disk, and waits"
    engine.destroy(remove=True)
