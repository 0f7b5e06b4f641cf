"""A step whose micro-batches take turns: what it moves, in which order it returns losses, and how it ends early."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import EngineFailed, UsageError
from offload.swapper.memory.device import DeviceRoom
from tests.support import models
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.oracle import Job, accumulated_step, assert_same, room_for, start, trained, weights_of

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
JOB = models.GPT2._replace(dtype="bf16", accumulation=4, steps=4)
LAYERED: dict[str, Any] = {"schedule": "layer_major"}


class Wide(nn.Module):
    """Blocks that are most of the model, with a place at which a test may interfere."""

    at = (-1, -1)
    """The call of a block, in calls of the step, at which `interfere` runs: (in the forward, in the backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.calls = [0, 0]

    def interfere(self) -> None:
        raise RuntimeError("as the test wants it")

    def count(self, which: int) -> None:
        calls.counts[which] += 1
        if self.at[which] >= 0:
            time.sleep(0.003)  # a signal that is deferred arrives again after a millisecond
        if calls.counts[which] == self.at[which]:
            self.interfere()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            self.count(0)
            hidden = torch.tanh(Counted.apply(block(hidden), self))
        return hidden


class Calls:
    """Not on the model: it may keep nothing on its modules between two blocks."""

    counts: ClassVar[list[int]] = [0, 0]


calls = Calls()


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, model: Wide) -> torch.Tensor:
        ctx.model = model
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.model.count(1)
        return gradient, None


def wide_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + micro))
    return model(hidden).float().pow(2).mean()


WIDE = Job(Wide, wide_loss, accumulation=3, steps=4)


@pytest.fixture(autouse=True)
def _no_interference() -> Iterator[None]:
    calls.counts[:] = [0, 0]
    yield
    Wide.at = (-1, -1)
    assert [each.name for each in threading.enumerate() if each.name.startswith("offload-micro-batch")] == []


def moved(engine: offload.Engine) -> int:
    engine.synchronize()
    now = engine.io_bytes()
    return now.read + now.written


# -- what moves ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 8, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 32))])
def test_a_step_moves_26_bytes_a_parameter_whatever_the_number_of_micro_batches(
    accumulation: int, tmp_path: Path
) -> None:
    job = JOB._replace(model=lambda: models.gpt2(4, 128), accumulation=accumulation)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 3), **LAYERED)
    for step in range(2):  # the first step records the order of uses, the second waits for it
        accumulated_step(engine, job, step)
    before = moved(engine)
    for step in range(2, 5):
        accumulated_step(engine, job, step)
    assert (moved(engine) - before) / 3 / engine.parameter_count <= 26.5
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [2, 6])
def test_gradients_leave_the_device_once_a_step(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB._replace(accumulation=accumulation)
    device = LateDevice(0, 0.9)
    device.spare = DeviceRoom(0, 0)  # no memory for totals of the whole model
    use_device(monkeypatch, device, always=False)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 3), **LAYERED)
    accumulated_step(engine, job, 0)  # one micro-batch after the other, to watch the model
    before = device.downloaded
    accumulated_step(engine, job, 1)
    nbytes = engine.parameter_count * testing.inspect(engine).gradient_dtype.itemsize
    assert nbytes <= device.downloaded - before < 1.05 * nbytes  # sums of squares too
    engine.destroy(remove=True)


def test_a_part_of_a_step_leaves_no_total_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(0, 0.9)
    device.spare = DeviceRoom(0, 0)
    use_device(monkeypatch, device, always=False)
    engine = start(JOB, DISK, tmp_path, device_memory=room_for(JOB, 3), **LAYERED)
    for part in (range(2), range(2, 4)):
        engine.accumulate(part, lambda micro: JOB.loss(engine, 0, micro))
        assert testing.inspect(engine).gradient_totals == 0
        engine.step()
    engine.destroy(remove=True)


def test_losses_are_in_the_order_of_the_micro_batches(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **LAYERED)
    accumulated_step(engine, JOB, 0)
    with torch.no_grad():
        expected = [float(JOB.loss(engine, 1, micro)) for micro in range(4)]
    losses = engine.accumulate(range(4), lambda micro: JOB.loss(engine, 1, micro))
    assert [float(loss) for loss in losses] == expected and not any(loss.requires_grad for loss in losses)
    engine.destroy(remove=True)


def test_train_batch_and_parts_of_a_step_are_the_same_step(tmp_path: Path) -> None:
    def by_train_batch(engine: Any, job: Job, step: int) -> float:
        ids = [models.tokens(step, micro) for micro in range(job.accumulation)]
        return float(engine.train_batch(iter([{"input_ids": each, "labels": each} for each in ids])))

    def by_parts(engine: Any, job: Job, step: int) -> float:
        losses = []
        for part in ([0, 1, 2], [3]):
            losses += engine.accumulate(part, lambda micro: job.loss(engine, step, micro))
            engine.step()
        return float(torch.stack([loss.float() for loss in losses]).mean())

    results = []
    for number, by in enumerate((by_train_batch, by_parts)):
        engine = start(JOB, DISK, tmp_path / str(number), **LAYERED)
        results.append(trained(engine, JOB, by))
        engine.destroy(remove=True)
    assert_same(*results)


# -- what ends early ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [(9, -1), (-1, 9)], ids=["forward", "backward"])
def test_after_an_error_the_step_can_be_run_again(at: tuple[int, int], tmp_path: Path) -> None:
    undisturbed = start(WIDE, DISK, tmp_path / "undisturbed", **LAYERED)
    expected = trained(undisturbed, WIDE, accumulated_step)
    undisturbed.destroy(remove=True)

    def by(engine: Any, job: Job, step: int) -> float:
        if step == 2:
            calls.counts[:], Wide.at = [0, 0], at
            with pytest.raises(RuntimeError, match="as the test wants it"):
                accumulated_step(engine, job, step)
            Wide.at = (-1, -1)
        return accumulated_step(engine, job, step)

    engine = start(WIDE, DISK, tmp_path / "disturbed", **LAYERED)
    assert_same(expected, trained(engine, WIDE, by))
    engine.destroy(remove=True)


@pytest.mark.parametrize("at", [(9, -1), (-1, 9)], ids=["forward", "backward"])
def test_ctrl_c_ends_the_step_at_the_next_border(
    at: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(WIDE, DISK, tmp_path, **LAYERED)
    accumulated_step(engine, WIDE, 0)
    monkeypatch.setattr(Wide, "interfere", lambda self: os.kill(os.getpid(), signal.SIGINT))
    calls.counts[:], Wide.at = [0, 0], at
    with pytest.raises(KeyboardInterrupt):
        accumulated_step(engine, WIDE, 1)
    assert calls.counts[at.index(9)] <= 10
    Wide.at = (-1, -1)
    accumulated_step(engine, WIDE, 1)
    assert engine.global_steps == 2
    engine.destroy(remove=True)


def test_a_signals_handler_may_destroy_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(WIDE, DISK, tmp_path, **LAYERED)
    accumulated_step(engine, WIDE, 0)
    weights = weights_of(engine)
    monkeypatch.setattr(Wide, "interfere", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: engine.destroy(remove=False))
    try:
        calls.counts[:], Wide.at = [0, 0], (9, -1)
        with pytest.raises((UsageError, EngineFailed)):
            accumulated_step(engine, WIDE, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    Wide.at = (-1, -1)
    again = start(WIDE, DISK, tmp_path, resume="must", **LAYERED)
    assert again.global_steps == 1
    for name, value in weights_of(again).items():
        assert torch.equal(value, weights[name])
    again.destroy(remove=True)


# -- what does not fit --------------------------------------------------------------------------------


class Keeps(Wide):
    """A model that keeps a value on a module between two blocks, and reads it behind the last one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.first = hidden
        return super().forward(hidden) + self.first


class KeepsInside(Wide):
    """The same in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.context: dict[str, Any] = {"first": None}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.context["first"] = hidden
        return super().forward(hidden) + self.context["first"]


class KeepsBuffer(Wide):
    """The same in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(4, 64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.first.copy_(hidden)
        return super().forward(hidden) + self.first


class KeepsInClass(Wide):
    """The same in the class."""

    first: torch.Tensor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        KeepsInClass.first = hidden
        return super().forward(hidden) + KeepsInClass.first


class SetsUp(Wide):
    """A model that sets something up in its first forward, and keeps nothing afterwards."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "ready"):
            self.ready = True
        return super().forward(hidden)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [Keeps, KeepsInside, KeepsBuffer, KeepsInClass])
def test_a_model_that_keeps_values_on_its_modules_is_run_one_micro_batch_after_the_other(
    model: type[Wide], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = WIDE._replace(model=model)
    plain = start(job, MEMORY, tmp_path / "plain", schedule="micro_batch_major")
    expected = trained(plain, job, accumulated_step)
    plain.destroy(remove=True)
    engine = start(job, DISK, tmp_path / "layered", **LAYERED)
    with caplog.at_level(logging.WARNING, "offload"):
        assert_same(expected, trained(engine, job, accumulated_step))
    told = [each.getMessage() for each in caplog.records if "one after the other" in each.getMessage()]
    assert len(told) == 1 and ("first" in told[0] or "context" in told[0])
    assert engine.schedule == "micro_batch_major"
    engine.destroy(remove=True)


def test_a_model_may_set_something_up_in_its_first_forward(tmp_path: Path) -> None:
    job = WIDE._replace(model=SetsUp)
    engine = start(job, DISK, tmp_path, **LAYERED)
    accumulated_step(engine, job, 0)
    assert testing.inspect(engine).takes_turns
    engine.destroy(remove=True)


@pytest.mark.parametrize("asked", ["auto", "layer_major"])
def test_a_forward_hook_of_the_user_ends_turns_that_were_not_asked_for(
    asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(WIDE, DISK, tmp_path, schedule=asked, activations="device")
    seen: list[torch.Tensor] = []
    engine.module.blocks[2].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with caplog.at_level(logging.WARNING, "offload"):
        accumulated_step(engine, WIDE, 0)
    assert testing.inspect(engine).takes_turns is (asked == "layer_major")
    assert any("a forward hook of yours on blocks.2" in each.getMessage() for each in caplog.records)
    engine.destroy(remove=True)


def test_hooks_of_the_user_around_the_step_are_obeyed(tmp_path: Path) -> None:
    engine = start(WIDE, DISK, tmp_path, **LAYERED)
    accumulated_step(engine, WIDE, 0)
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        accumulated_step(engine, WIDE, 1)
    assert packed
    engine.destroy(remove=True)


def test_more_micro_batches_than_the_step_needs_are_refused_before_any_runs(tmp_path: Path) -> None:
    engine = start(WIDE, DISK, tmp_path, **LAYERED)
    calls.counts[:] = [0, 0]
    with pytest.raises(UsageError, match="got 4 micro-batches, and the step needs 3 more"):
        engine.accumulate(range(4), lambda micro: WIDE.loss(engine, 0, micro))
    with pytest.raises(UsageError, match="expects the micro-batches of a step, as a list, got int"):
        engine.accumulate(4)
    assert calls.counts == [0, 0]
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "layer_major"}, "take all 3 micro-batches of a step through"),
        ({"schedule": "auto", "activations": "device"}, "their blocks' inputs are kept at once"),
        ({"schedule": "auto"}, "one after the other: blocks keep all activations"),
    ],
)
def test_the_order_is_told_at_the_start(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    engine = start(WIDE, DISK, tmp_path, **settings)
    assert any(words in notice for notice in engine.notices)
    engine.destroy(remove=True)


def test_a_model_without_blocks_says_that_the_order_has_no_effect(tmp_path: Path) -> None:
    engine = start(WIDE._replace(model=lambda: nn.Linear(64, 64)), DISK, tmp_path, **LAYERED)
    assert any("has no effect: the model is no chain of repeated blocks" in notice for notice in engine.notices)
    engine.destroy(remove=True)


def test_calls_of_the_engine_in_the_loss_are_refused(tmp_path: Path) -> None:
    engine = start(WIDE, DISK, tmp_path, **LAYERED)
    for call in (engine.step, engine.zero_grad, lambda: engine.backward(WIDE.loss(engine, 0, 0))):

        def loss(micro: int, call: Any = call) -> torch.Tensor:
            call()
            return WIDE.loss(engine, 0, micro)

        with pytest.raises(UsageError, match="in the loss function of accumulate"):
            engine.accumulate(range(3), loss)
    assert engine.accumulate([]) == []
    accumulated_step(engine, WIDE, 0)
    engine.destroy(remove=True)


def test_a_backward_that_comes_into_another_micro_batch_is_an_error(tmp_path: Path) -> None:
    engine = start(WIDE, DISK, tmp_path, **LAYERED)
    kept: dict[str, torch.Tensor] = {}
    engine.module.blocks[2].register_forward_hook(lambda module, args, output: kept.update(feature=output))

    def loss(micro: int) -> torch.Tensor:
        return WIDE.loss(engine, 0, micro) + kept["feature"].float().pow(2).mean()

    engine.accumulate(range(3), loss)
    engine.step()
    with pytest.raises(UsageError, match="has come to a block of another"):
        engine.accumulate(range(3), loss)
    engine.destroy(remove=True)
