"""Updates of states in memory and of states on drives go side by side, in two lanes, and change no bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import kernels, testing
from offload.aio import IoQueue
from offload.layout.update_order import Lane, next_lane
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import Job, assert_same, config, run, small_pieces, trained

_LONGEST_HOLD = 30.0
"""Seconds after which reads that are held go on, so that a fault fails the test and does not stop it."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


class Chain(nn.Module):
    """Layers that the forward uses in the order of their registration, or the last one first."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self._reverse = reverse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self._reverse else self.layers:
            x = torch.tanh(layer(x))
        return x


def forwards() -> nn.Module:
    return Chain(reverse=False)


def backwards() -> nn.Module:
    return Chain(reverse=True)


def chain_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return model(torch.randn(4, 128, generator=generator)).square().mean()


def mixed(job: Job, folder: Path) -> offload.Engine:
    """Starts an engine that keeps the states of the first units in memory and those of the others on the drive."""
    torch.manual_seed(job.seed)
    given = config(job, ("none", "nvme"), folder, durability="none")
    given["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    return offload.initialize(model=job.model(), config=given)[0]


def lanes(engine: offload.Engine) -> list[Lane]:
    """Returns the lane of each unit that trains, in the order of the model."""
    inspected = testing.inspect(engine)
    return [inspected.update_lane(unit) for unit, part in enumerate(inspected.trainable) if part]


# -- the time line ------------------------------------------------------------------------------------


class HeldRead:
    """A read that has ended once nobody holds reads any more."""

    def __init__(self, future: Any, go: threading.Event) -> None:
        self._future, self._go = future, go

    def done(self) -> bool:
        return self._go.is_set() and bool(self._future.done())

    def wait(self, timeout: float | None = None) -> int:
        self._go.wait()
        return int(self._future.wait(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


class HoldingQueue:
    """A queue whose reads do not end while `go` is clear."""

    def __init__(self) -> None:
        self._inner, self.go, self.held = IoQueue(), threading.Event(), 0
        self.backend, self.refusals, self.window_bytes = self._inner.backend, self._inner.refusals, 0
        self.go.set()

    def read(self, *args: Any, **options: Any) -> HeldRead:
        self.held += not self.go.is_set()
        return HeldRead(self._inner.read(*args, **options), self.go)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("model", [forwards, backwards], ids=["memory is used first", "drives are used first"])
def test_states_in_memory_are_updated_while_others_are_read(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order of use: no drive is idle while memory is updated, and memory does not wait for drives."""
    job = Job(model, chain_loss, steps=2)
    queue = HoldingQueue()
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: queue)
    engine = mixed(job, tmp_path)
    found = lanes(engine)
    assert found == [Lane.MEMORY] * 3 + [Lane.STREAMED] * 3
    in_memory = sum(len(part) for part in testing.inspect(engine).trainable[:3])
    losses = [float(job.loss(engine, 0, 0).detach())]
    engine.backward(job.loss(engine, 0, 0))

    numels, reads, all_updated = list[int](), list[int](), threading.Event()
    update = kernels.update

    def counted(partition: kernels.Partition, segments: Sequence[kernels.Segment], *writes: kernels.Writes) -> None:
        reads.append(queue.held)
        update(partition, segments, *writes)
        numels.append(len(partition.weight))
        if sum(numels) >= in_memory:
            all_updated.set()

    testing.replace(monkeypatch, "kernel.update", counted)
    queue.go.clear()
    engine.step()
    in_time = all_updated.wait(_LONGEST_HOLD)
    queue.go.set()
    assert in_time, "updates of memory have waited for reads"
    assert reads[0] > 0, "the drives were idle while the first unit in memory was updated"
    losses.append(float(job.loss(engine, 1, 0).detach()))
    engine.backward(job.loss(engine, 1, 0))
    engine.step()
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy(remove=True)
    alone = run(job, ("none", "none"), tmp_path / "memory")
    assert losses == alone.losses
    assert all(torch.equal(weights[name], value) for name, value in alone.weights.items())


# -- bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("AdamW", "bf16"), ("Lamb", "fp32"), ("Muon", "fp32")], ids=["AdamW", "Lamb", "Muon"]
)
def test_both_lanes_have_the_bits_of_memory(
    optimizer: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads end late and in any order, so tiles of both lanes are computed in turns."""
    job = models.GPT2._replace(optimizer=optimizer, dtype=dtype, steps=6)
    alone = run(job, ("none", "none"), tmp_path / "memory")
    use_queue(monkeypatch, lambda: LateQueue(0, 0.003))
    engine = mixed(job, tmp_path / "mixed")
    assert {*lanes(engine)} == {*Lane}
    try:
        assert_same(alone, trained(engine, job), "in memory and in two lanes")
    finally:
        engine.destroy(remove=True)


# -- the next tile ------------------------------------------------------------------------------------

BOTH = (Lane.MEMORY, Lane.STREAMED)


@pytest.mark.parametrize(
    ("begun", "reads_ended", "awaited", "last", "expected"),
    [
        ((), True, None, None, None),
        ((Lane.STREAMED,), False, None, None, Lane.STREAMED),
        ((Lane.MEMORY,), True, None, Lane.STREAMED, Lane.MEMORY),
        (BOTH, False, Lane.STREAMED, Lane.MEMORY, Lane.MEMORY),
        (BOTH, True, None, Lane.STREAMED, Lane.STREAMED),
        (BOTH, True, Lane.STREAMED, Lane.STREAMED, Lane.STREAMED),
        (BOTH, True, Lane.MEMORY, Lane.MEMORY, Lane.STREAMED),
        (BOTH, True, Lane.MEMORY, Lane.STREAMED, Lane.MEMORY),
    ],
)
def test_the_lane_of_the_next_tile(
    begun: tuple[Lane, ...], reads_ended: bool, awaited: Lane | None, last: Lane | None, expected: Lane | None
) -> None:
    """A tile that has been read comes first, and an awaited unit in memory at least every second time."""
    assert next_lane(begun, reads_ended, awaited, last) is expected
