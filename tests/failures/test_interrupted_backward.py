"""Ctrl-C during a backward ends it within one unit, also on a device whose backwards torch runs on another thread."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import interrupts, testing
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import Job, room_for, start, train_step
from tests.support.processes import warm_process

BLOCKS = 6
AT = 3
"""The block in whose backward Ctrl-C comes; the blocks before it are still to come."""


class Watch:
    """The blocks whose backward began, last first, and the thread of each."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.threads: set[int] = set()
        self.armed = self.in_change = False


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@interrupts.uninterrupted
def interrupt_a_change() -> None:
    interrupt()


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, watch: Watch, block: int) -> torch.Tensor:
        ctx.watch, ctx.block = watch, block
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.watch.blocks.append(ctx.block)
        ctx.watch.threads.add(threading.get_ident())
        if ctx.watch.armed and ctx.block == AT:
            (interrupt_a_change if ctx.watch.in_change else interrupt)()
        return gradient.clone(), None, None


class Net(nn.Module):
    def __init__(self, recomputes: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(BLOCKS))
        self.watch, self._reentrant = Watch(), recomputes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self._reentrant is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self._reentrant)
            hidden = torch.tanh(Mark.apply(hidden, self.watch, index))
        return hidden


class Recomputed(Net):
    def __init__(self) -> None:
        super().__init__(False)


class Reentrant(Net):
    def __init__(self) -> None:
        super().__init__(True)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(hidden.requires_grad_()).pow(2).mean()  # a reentrant checkpoint wants an input that does


JOB = Job(Net, loss, steps=3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """A device that obeys the caller's wish for one thread, as torch does; the handler is Python's."""
    device = LateDevice(0, 0.5)
    use_device(monkeypatch, device, always=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield device
    signal.signal(signal.SIGINT, before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [Net, Recomputed, Reentrant])
def test_ctrl_c_ends_a_backward_within_one_unit(model: type[Net], device: LateDevice, tmp_path: Path) -> None:
    job = JOB._replace(model=model)
    expected = start(job, ("nvme", "nvme"), tmp_path / "whole")
    losses = [train_step(expected, job, step) for step in range(job.steps)]
    expected.destroy(remove=True)
    engine = start(job, ("nvme", "nvme"), tmp_path / "interrupted")
    with Ticks(device):
        assert train_step(engine, job, 0) == losses[0]
        watch = engine.module.watch
        watch.blocks.clear()
        watch.armed = True
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss(engine, 1, 0))
        assert watch.blocks[: BLOCKS - AT] == list(range(BLOCKS - 1, AT - 1, -1))
        assert len(watch.blocks) <= BLOCKS - AT + 1, "the next unit at most"
        watch.armed = False
        engine.zero_grad()
        assert [train_step(engine, job, step) for step in (1, 2)] == losses[1:]
    assert watch.threads == {threading.get_ident()} and device.broken == []
    engine.destroy(remove=True)


def test_a_ctrl_c_that_had_to_wait_for_a_change_is_obeyed_by_the_next_unit(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon the next units are done: the signal arrives again only after a moment."""
    testing.replace(monkeypatch, "clock.interrupts", 0.3)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, device_memory=room_for(JOB, 2))
    watch = engine.module.watch
    watch.armed = watch.in_change = True
    with Ticks(device), pytest.raises(KeyboardInterrupt):
        engine.backward(loss(engine, 0, 0))
    assert len(watch.blocks) <= BLOCKS - AT + 1
    engine.destroy(remove=True)


def test_a_backward_of_torch_is_ended_when_it_is_over(device: LateDevice, tmp_path: Path) -> None:
    """Where the loop calls `loss.backward()`: as in plain PyTorch on a GPU. Training goes on as right."""
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    watch = engine.module.watch
    watch.armed = True
    with Ticks(device):
        with pytest.raises(KeyboardInterrupt):
            loss(engine, 0, 0).backward()
        assert watch.blocks == list(range(BLOCKS - 1, -1, -1)) and threading.get_ident() not in watch.threads
        watch.armed = False
        engine.zero_grad()
        train_step(engine, JOB, 0)
    assert device.broken == []
    engine.destroy(remove=True)


def test_the_setting_of_torch_is_the_users_again(tmp_path: Path) -> None:
    engine: offload.Engine = start(JOB, ("cpu", "cpu"), tmp_path)
    engine.backward(loss(engine, 0, 0))
    assert torch._C._is_multithreading_enabled()
    engine.destroy(remove=True)


def test_a_ctrl_c_as_the_backward_ends_leaves_no_setting_behind(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path)
    setting = torch.autograd.set_multithreading_enabled
    leave = setting.__exit__

    def interrupted(self: Any, *error: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        leave(self, *error)

    ended = loss(engine, 0, 0)
    monkeypatch.setattr(setting, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(ended)
        for _ in range(1000):  # the signal arrives again a moment later
            time.sleep(0.01)
    monkeypatch.undo()
    assert torch._C._is_multithreading_enabled()
    engine.destroy(remove=True)


# -- real processes -------------------------------------------------------------------------------------


def process(device: str, folder: Path, *moments: str) -> tuple[list[str], int]:
    """Runs `slow_backward`; returns its lines and its status. Each Ctrl-C was obeyed within one unit."""
    arguments = ["-m", "tests.failures.slow_backward", device, str(folder), *moments]
    done = warm_process.run(arguments, cwd=warm_process.ROOT, timeout=300)
    lines = done.stdout.splitlines()
    obeyed = [int(line.split()[1]) for line in lines if line.startswith("obeyed")]
    assert len(obeyed) == len(moments) and max(obeyed, default=0) <= 1, (moments, lines, done.stderr[-2000:])
    return [line for line in lines if not line.startswith("obeyed")], done.returncode


def assert_obeyed(device: str, folder: Path, moments: list[str]) -> None:
    """A first Ctrl-C costs the step that is begun again, a second ends the process; nothing else changes."""
    whole, status = process(device, folder / "whole")
    assert status == 0 and len(whole) == 3 and whole[-1] == "closed []"
    for number, moment in enumerate(moments):
        if number % 2:
            assert process(device, folder / str(number), moment) == (whole, 0), moment
        else:
            lines, status = process(device, folder / str(number), moment, moment)
            assert lines == whole[: int(moment[0])] and status == -signal.SIGINT, moment


def test_a_process_obeys_each_ctrl_c_in_a_backward(tmp_path: Path) -> None:
    assert_obeyed("cpu", tmp_path, ["1:3:0", "0:4:0"])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "test"])
def test_a_process_obeys_each_ctrl_c_at_random_moments_of_a_backward(device: str, tmp_path: Path) -> None:
    chance = random.Random(28)
    moments = [f"{chance.randrange(2)}:{chance.randrange(6)}:{chance.uniform(0.0, 0.02)}" for _ in range(10)]
    assert_obeyed(device, tmp_path, moments)
