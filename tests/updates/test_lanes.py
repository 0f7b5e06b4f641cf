"""Updates of states in memory and of states on drives go side by side, in two lanes, and change no bit.

No forward waits for their writes, and a log counts those that were made early.
"""

from __future__ import annotations

import functools
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
from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.early_updates import counts
from tests.support.early_updates import train_step as early_step
from tests.support.oracle import Job, assert_same, config, run, small_pieces, start, train_step, trained

_LONGEST_HOLD = 60.0
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


class Held:
    """A request that has ended once nobody holds requests any more."""

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
    """A queue whose reads, or writes, do not end while `go` is clear."""

    def __init__(self, kind: str) -> None:
        self._inner, self.go, self.held, self.held_nbytes = IoQueue(), threading.Event(), 0, 0
        self.backend, self.refusals = self._inner.backend, self._inner.refusals
        self.go.set()
        setattr(self, kind, functools.partial(self._hold, kind))

    def _hold(self, kind: str, file: Any, offset: int, buffer: memoryview, **options: Any) -> Held:
        if not self.go.is_set():
            self.held += 1
            self.held_nbytes += len(buffer)
        return Held(getattr(self._inner, kind)(file, offset, buffer, **options), self.go)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("model", [forwards, backwards], ids=["memory is used first", "drives are used first"])
def test_states_in_memory_are_updated_while_others_are_read(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order of use: no drive is idle while memory is updated, and memory does not wait for drives."""
    job = Job(model, chain_loss, steps=2)
    queue = HoldingQueue("read")
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: queue)
    engine = mixed(job, tmp_path)
    used = lanes(engine)
    assert used == [Lane.MEMORY] * 3 + [Lane.STREAMED] * 3
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("AdamW", "bf16"), ("Lamb", "fp32"), ("Muon", "fp32")], ids=["AdamW", "Lamb", "Muon"]
)
def test_both_lanes_have_the_bits_of_memory(
    optimizer: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads end late and in any order, so tiles of both lanes are computed in turns."""
    job = models.SHALLOW._replace(optimizer=optimizer, dtype=dtype)
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


def test_a_tile_that_has_been_read_comes_first() -> None:
    for begun, reads_ended, expected in (
        ((), True, None),
        ((Lane.STREAMED,), False, Lane.STREAMED),
        ((Lane.MEMORY,), True, Lane.MEMORY),
        (BOTH, False, Lane.MEMORY),
        (BOTH, True, Lane.STREAMED),
    ):
        assert next_lane(begun, reads_ended) is expected, (begun, reads_ended)


# -- writes and reports -----------------------------------------------------------------------------

JOB = models.SHALLOW


def test_the_next_forward_ends_while_every_write_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = HoldingQueue("write")
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: queue)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory="16MiB")  # room for every state
    worker = testing.inspect(engine).update_worker
    assert worker is not None
    losses = [train_step(engine, JOB, step) for step in range(2)]
    engine.synchronize()
    engine.backward(JOB.loss(engine, 2, 0))
    queue.go.clear()
    watchdog = threading.Timer(_LONGEST_HOLD, queue.go.set)
    watchdog.start()
    engine.step()
    loss = JOB.loss(engine, 3, 0)  # uses the weights of every unit
    assert not queue.go.is_set(), "the forward has waited for writes"
    tiles = -(-max(map(len, testing.inspect(engine).trainable)) // worker.tile_numel)
    assert queue.held > tiles > 3, "more tiles are in flight than there are buffers"
    spec = testing.inspect(engine).store.spec  # type: ignore[union-attr]
    assert queue.held_nbytes <= sum(sum(row.values()) for row in spec.partitions), (
        "each state is in flight once at most"
    )
    queue.go.set()
    watchdog.cancel()
    engine.backward(loss)
    engine.step()
    engine.destroy(remove=True)
    alone = run(JOB._replace(steps=4), ("none", "none"), tmp_path)
    assert [*losses, float(loss.detach())] == [*alone.losses[:2], alone.losses[3]]


@pytest.mark.parametrize(("placement", "pieces"), [(("cpu", "cpu"), 1), (("nvme", "nvme"), 4)], ids=["memory", "disk"])
def test_a_unit_of_which_nothing_is_read_or_written_is_one_tile(
    placement: tuple[str, str], pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time between two tiles many cores would compute half a million elements."""
    engine = start(JOB, placement, tmp_path)
    calls, update = list[int](), kernels.update
    testing.replace(
        monkeypatch, "kernel.update", lambda part, *args: (calls.append(len(part.weight)), update(part, *args))
    )
    train_step(engine, JOB, 0)
    engine.synchronize()
    units = [len(trainable) for trainable in testing.inspect(engine).trainable]
    assert (sorted(calls) == sorted(units)) == (pieces == 1)
    assert len(calls) >= pieces * len(units) - 3
    engine.destroy(remove=True)


CLIPPED = 2
"""The step that clips."""


@pytest.mark.parametrize("speculate", [True, False])
def test_each_update_that_held_or_did_not_is_counted(tmp_path: Path, speculate: bool) -> None:
    job = models.SHALLOW._replace(dtype="bf16", steps=4 if speculate else 1, clip=0.0)
    log = tmp_path / "log.jsonl"
    engine = start(job, ("nvme", "nvme"), tmp_path, speculate=speculate, log=str(log))
    for step in range(job.steps):
        if step == CLIPPED:
            engine.clip_grad_norm_(1e-3)
        early_step(engine, job, step)
    made = counts(engine)
    engine.destroy()
    records = read_log(log)
    seen = [(values.get("early_updates"), values.get("early_updates_dropped")) for values in records.steps]
    shown = page(records, figures(records), None)
    if not speculate:
        assert seen == [(None, None)] * job.steps and "under the backward" not in shown
        return
    hits, misses = (sum(int(count or 0) for count in column) for column in zip(*seen, strict=True))
    assert (hits, misses) == (made.hits, made.misses)
    assert [bool(dropped) for _, dropped in seen] == [step == CLIPPED for step in range(job.steps)]
    assert hits > 0
    assert f"Of updates under the backward, {hits} held, {misses} in 1 step came to nothing." in shown
