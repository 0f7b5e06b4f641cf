"""Weights first, moments under the backward: what a forward waits for, and the same bits in the end."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import kernels, testing
from offload.engine.update import UnitJob
from offload.engine.update_strategy import UnitUpdate
from offload.errors import EngineFailed
from offload.kernels import Writes
from offload.layout.update_order import SecondPasses
from offload.sizes import MIB
from tests.planner.test_simulate_engine import Apart
from tests.support import models
from tests.support.devices.late_device import use_device
from tests.support.early_updates import counts, worker_of
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)

_LONGEST = 60.0
"""Seconds after which a kernel that is held goes on, so that a fault fails the test and does not stop it."""
JOB = models.SHALLOW._replace(dtype="bf16")
IN_MEMORY = ("cpu", "cpu")


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with memory of its own: where the CPU computes, every update takes one pass."""
    small_pieces(monkeypatch)
    use_device(monkeypatch, Apart())


class Kernels:
    """The host's kernel. It notes what it writes, and holds calls back until `may_run` returns True."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, may_run: Callable[[Writes], bool] = lambda _: True) -> None:
        self.calls: list[tuple[Writes, int]] = []
        self.late = 0
        """Calls that nothing but the end of a test's patience let run."""
        self.may_run, self._real = may_run, kernels.update
        testing.replace(monkeypatch, "kernel.update", self)

    def __call__(
        self, partition: kernels.Partition, segments: Sequence[kernels.Segment], writes: Writes = Writes.ALL
    ) -> None:
        stop = time.monotonic() + _LONGEST
        while not self.may_run(writes) and time.monotonic() < stop:
            time.sleep(0.001)
        self.late += time.monotonic() >= stop
        self._real(partition, segments, writes)
        self.calls.append((writes, len(partition.weight)))

    def numel(self, writes: Writes) -> int:
        return sum(numel for each, numel in self.calls if each is writes)


def always_behind(engine: offload.Engine) -> Callable[[Writes], bool]:
    """Holds each kernel that writes weights until a thread waits for them."""
    updates = testing.inspect(engine).pager.weight_updates
    return lambda writes: writes is Writes.MOMENTS or updates.awaited_unit() is not None


def test_the_forward_waits_for_no_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Kernels(monkeypatch)
    engine = start(JOB, IN_MEMORY, tmp_path, durability="none")
    losses = [train_step(engine, JOB, 0)]
    testing.settle(engine)
    held.calls.clear()
    weights_go, moments_go = always_behind(engine), threading.Event()
    held.may_run = lambda writes: moments_go.is_set() if writes is Writes.MOMENTS else weights_go(writes)
    part = JOB.loss(engine, 1, 0)
    engine.backward(part)
    engine.step()
    losses.append(float(part.detach()))
    part = JOB.loss(engine, 2, 0)  # uses the weights of every unit
    assert held.numel(Writes.MOMENTS) == held.late == 0
    units = [len(trainable) for trainable in testing.inspect(engine).trainable]
    assert held.numel(Writes.WEIGHTS) + held.numel(Writes.ALL) == sum(units)
    assert held.numel(Writes.WEIGHTS) >= sum(units) - max(units), "only the first unit is updated before a thread waits"
    moments_go.set()
    engine.backward(part)
    engine.step()
    losses.append(float(part.detach()))
    held.may_run = lambda _: True
    losses.append(train_step(engine, JOB, 3))
    testing.settle(engine)
    assert held.numel(Writes.MOMENTS) > 0
    engine.destroy(remove=True)
    assert losses == run(JOB._replace(steps=4), ("none", "none"), tmp_path / "alone").losses


CASES: dict[str, tuple[Job, dict[str, Any]]] = {
    "AdamW": (JOB, {}),
    "AdamW, fp32": (JOB._replace(dtype="fp32"), {}),
    "AdamW, bf16 moments": (JOB, {"moments": "bf16"}),
    "AdamW, int8 moments and bf24": (JOB, {"moments": "int8", "master": "bf24"}),
    "Lion, clipped": (JOB._replace(optimizer="Lion", lr=1e-3, clip=0.05), {}),
    "AdamW, micro-batches": (JOB._replace(accumulation=3), {}),
    "AdamW, every second step is committed": (JOB, {"durability": {"every": 2}}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "by"), [*((name, train_step) for name in CASES), ("AdamW, micro-batches", accumulated_step)]
)
def test_two_passes_have_the_bits_of_one(name: str, by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second pass is so late that a gradient which did not wait for it would take its place."""
    job, options = CASES[name]
    options = {**options, **({"schedule": "layer_major"} if by is accumulated_step else {})}
    alone = run(job, ("none", "none"), tmp_path / "alone", by, **options)
    held = Kernels(monkeypatch)
    engine = start(job, IN_MEMORY, tmp_path / "two", **{"durability": "none", **options})
    weights_go = always_behind(engine)

    def may_run(writes: Writes) -> bool:
        if writes is Writes.MOMENTS:
            time.sleep(0.01)
            return True
        # The last step is followed by no forward.
        return engine.global_steps == job.steps or weights_go(writes)

    held.may_run = may_run
    try:
        assert_same(alone, trained(engine, job, by), "in one pass and in two")
    finally:
        engine.destroy(remove=True)
    assert held.numel(Writes.MOMENTS) == held.numel(Writes.WEIGHTS) > 0


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (JOB._replace(params=(("adam_w_mode", False),), optimizer="Adam", weight_decay=0.1), {"durability": "none"}),
        (JOB, {"durability": "step"}),
    ],
    ids=["moments depend on the weight", "a store has the states of one step"],
)
def test_other_updates_take_one_pass(
    job: Job, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Kernels(monkeypatch)
    engine = start(job, IN_MEMORY, tmp_path, **options)
    behind = always_behind(engine)
    held.may_run = lambda writes: engine.global_steps == job.steps or behind(writes)
    trained(engine, job)
    engine.destroy(remove=True)
    assert {writes for writes, _ in held.calls} == {Writes.ALL} and held.late == 0


def test_a_commit_has_the_moments_of_its_second_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(JOB._replace(steps=4), ("none", "none"), tmp_path / "alone")
    held = Kernels(monkeypatch)
    for steps in (3, 4):  # between two commits, then at one
        options = {"durability": {"every": 2}, "resume": "auto"}
        engine = start(JOB, IN_MEMORY, tmp_path, **options)
        weights_go = always_behind(engine)
        held.may_run = functools.partial(_late, engine, steps, weights_go)
        for step in range(engine.global_steps, steps):
            train_step(engine, JOB, step)
        weights = weights_of(engine)
        engine.destroy(remove=False)
    assert held.numel(Writes.MOMENTS) > 0
    assert_same_tensors(weights, alone.weights)


def _late(engine: offload.Engine, steps: int, weights_go: Callable[[Writes], bool], writes: Writes) -> bool:
    """Holds second passes for a while, and others until a thread waits."""
    if writes is Writes.MOMENTS:
        time.sleep(0.01)
        return True
    return engine.global_steps == steps or weights_go(writes)


def test_a_read_of_moments_waits_for_the_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def moments(engine: offload.Engine) -> list[torch.Tensor]:
        train_step(engine, JOB, 0)
        JOB.loss(engine, 1, 0)  # a forward takes the weights
        moments_read = [offload.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in engine.module.parameters()]
        engine.destroy(remove=True)
        return [each for each in moments_read if each is not None]

    expected = moments(start(JOB, ("none", "none"), tmp_path / "alone"))
    held = Kernels(monkeypatch)
    engine = start(JOB, IN_MEMORY, tmp_path / "two", durability="none")
    behind = always_behind(engine)
    held.may_run = lambda writes: time.sleep(0.05) is None if writes is Writes.MOMENTS else behind(writes)
    assert all(torch.equal(one, other) for one, other in zip(moments(engine), expected, strict=True))
    assert held.numel(Writes.MOMENTS) > 0


def test_gradients_of_earlier_micro_batches_wait_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no host memory that a second pass reads, and `zero_grad` drops them there."""
    job = JOB._replace(accumulation=2)

    def weights(engine: offload.Engine, end: Callable[[], None]) -> dict[str, torch.Tensor]:
        train_step(engine, job, 0)
        engine.backward(job.loss(engine, 1, 0))
        engine.zero_grad()
        end()
        engine.step()
        engine.backward(job.loss(engine, 1, 1))
        engine.step()
        values = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy(remove=True)
        return values

    expected = weights(start(job, ("none", "none"), tmp_path / "alone"), lambda: None)
    held = Kernels(monkeypatch)
    engine = start(job, IN_MEMORY, tmp_path / "two", durability="none", device_memory="8MiB")  # room for the totals
    behind, go = always_behind(engine), threading.Event()

    def end() -> None:
        assert not go.is_set() and held.late == 0 and held.numel(Writes.WEIGHTS) > held.numel(Writes.MOMENTS) == 0
        go.set()

    def may_run(writes: Writes) -> bool:
        return go.is_set() or (writes is not Writes.MOMENTS and behind(writes))

    held.may_run = may_run
    waiting = weights(engine, end)
    assert all(torch.equal(waiting[name], value) for name, value in expected.items())


def test_updates_under_the_backward_begin_beside_pending_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most units are in memory, the last ones on the drive; moments are so late that the backward meets them."""
    job = JOB._replace(model=functools.partial(models.gpt2, layers=8), steps=4, clip=0.0)
    alone = run(job, ("none", "none"), tmp_path / "alone")
    options: dict[str, Any] = {"durability": "none", "speculate": True}
    least = least_host_memory(job, tmp_path / "least", IN_MEMORY, **options)
    held = Kernels(monkeypatch)
    engine = start(job, IN_MEMORY, tmp_path / "two", host_memory=least + 7 * MIB // 2, **options)
    offers, updates = worker_of(engine).offers, testing.inspect(engine).pager.weight_updates
    offered, backward, offer, begin = threading.Event(), threading.Event(), offers.offer, offers.begin
    moments_before: list[int] = []
    """Elements of moments that were written when the first early update of the step began."""

    def offering(update: UnitUpdate) -> None:
        offer(update)
        offered.set()

    def beginning(early: UnitJob) -> None:
        moments_before.append(held.numel(Writes.MOMENTS))
        begin(early)

    monkeypatch.setattr(offers, "offer", offering)
    monkeypatch.setattr(offers, "begin", beginning)

    def may_run(writes: Writes) -> bool:
        if writes is Writes.MOMENTS and not offered.is_set():
            # A forward still needs the units on the drive, whose tiles come first once they have been read.
            time.sleep(0.03)
            return offered.is_set() or updates.awaited_unit() is not None
        return backward.is_set() or writes is not Writes.WEIGHTS or updates.awaited_unit() is not None

    losses, norms, beside = [], [], 0
    for step in range(job.steps):
        loss = job.loss(engine, step, 0)
        backward.set()
        engine.backward(loss)
        testing.settle_early_updates(engine)
        testing.settle(engine)
        # `begin` is called by the thread of the kernel: what came later was pending.
        beside += bool(moments_before) and held.numel(Writes.MOMENTS) > moments_before[0]
        moments_before.clear()
        held.may_run = may_run if step + 1 < job.steps else lambda _: True  # the last step is followed by no forward
        backward.clear()
        offered.clear()
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    hits = counts(engine)
    assert_same(alone, Result(losses, norms, weights_of(engine)), "beside moments, and after them")
    engine.destroy(remove=True)
    assert beside > 0 and held.late == 0, "an early update begins while moments are pending"
    assert hits.hits > 0 and not hits.misses


def test_an_error_in_a_second_pass_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Kernels(monkeypatch)
    engine = start(JOB, IN_MEMORY, tmp_path, durability="none")
    behind = always_behind(engine)

    def may_run(writes: Writes) -> bool:
        if writes is Writes.MOMENTS:
            raise ArithmeticError("no moments today")
        return behind(writes)

    held.may_run = may_run
    with pytest.raises(EngineFailed) as raised:
        for step in range(2):
            train_step(engine, JOB, step)
    assert isinstance(raised.value.__cause__, ArithmeticError)
    testing.abandon(engine, remove=True)


# -- how many -----------------------------------------------------------------------------------------


def step(passes: SecondPasses, worked: float = 0.0, waited: float = 0.0) -> int:
    """A step of eight updates that all would take two passes; threads have waited for a part of the second ones."""
    passes.begin_step()
    begun = sum(passes.begin(10) for _ in range(8))
    for number in range(begun):
        assert passes.pending
        if waited and not number:
            passes.waited(waited)
        passes.end(10, worked / begun)
    assert not passes.pending
    return 10 * begun


def test_second_passes_are_as_many_as_no_thread_waits_for() -> None:
    passes = SecondPasses(80)
    assert step(passes) == step(passes) == 80
    assert step(passes, worked=2.0, waited=0.9) == 80
    # What was hidden is 55 %. From there on it grows by 5 in each step.
    assert [step(passes) for _ in range(9)] == [40, 40, 50, 50, 60, 60, 70, 70, 80]
    assert step(passes, worked=1.0, waited=3.0) == 80
    assert [step(passes) for _ in range(4)] == [0, 0, 10, 10]
