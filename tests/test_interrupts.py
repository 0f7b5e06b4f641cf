"""Ctrl-C at any moment: training goes on with the right bits, or the engine says that it stopped, and resume is right.

A `KeyboardInterrupt` is raised where CPython may raise one: at a function's begin, after a call, where a loop turns;
in any frame of ours, and in threading's.
"""

from __future__ import annotations

import dis
import random
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import EngineFailed
from tests.late_device import LateDevice, use_device
from tests.oracle import Job, start, train_step

STEPS = 5
_CHECKS = ("RESUME", "JUMP_BACKWARD", "CALL")


class Net(nn.Module):
    """Small, with dropout, so that a lost or repeated forward shows in the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return self.head(hidden)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    torch.manual_seed(100 + step)  # dropout depends on the step alone, however often it is begun
    return model(torch.randn(2, 32, generator=generator)).pow(2).mean()


JOB = Job(Net, loss, steps=STEPS)


class Interrupt:
    """A trace function that raises `KeyboardInterrupt` at the `at`-th moment at which a signal could be handled."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.where = at, 0, ""
        self._last: dict[int, str] = {}
        self._codes: dict[Any, dict[int, str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "/offload/" not in name and not name.endswith("threading.py"):
            return None
        frame.f_trace_opcodes = True
        return self._local

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            self._last[id(frame)] = ""  # a call that raises is not followed by a look for signals
        if event != "opcode":
            return self._local
        code = frame.f_code
        names = self._codes.get(code)
        if names is None:
            names = self._codes[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        before = self._last.get(id(frame), "RESUME")
        self._last[id(frame)] = names.get(frame.f_lasti, "")
        if before.startswith(_CHECKS):
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                self.where = f"{code.co_filename.rsplit('/', 1)[1]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._local


def _steps(engine: offload.Engine, first: int) -> dict[int, float]:
    return {step: train_step(engine, JOB, step) for step in range(first, STEPS)}


def _moments(folder: Path, **options: Any) -> int:
    engine = start(JOB, ("nvme", "nvme"), folder, **options)
    interrupt = Interrupt(-1)
    train_step(engine, JOB, 0)
    sys.settrace(interrupt)
    train_step(engine, JOB, 1)
    sys.settrace(None)
    engine.destroy(remove=True)
    return interrupt.seen


def _interrupted(interrupt: Interrupt, folder: Path, expected: dict[int, float], **options: Any) -> str | None:
    """Interrupt the second or third step and go on; what was wrong, or None."""
    engine = start(JOB, ("nvme", "nvme"), folder, **options)
    train_step(engine, JOB, 0)
    sys.settrace(interrupt)
    try:
        train_step(engine, JOB, 1)
        train_step(engine, JOB, 2)
    except (KeyboardInterrupt, EngineFailed):
        pass
    finally:
        sys.settrace(None)
    try:
        engine.zero_grad()
        found = _steps(engine, engine.global_steps)
        stopped = False
    except EngineFailed:
        stopped = True
    finally:
        engine.destroy()
    if stopped:
        engine = start(JOB, ("nvme", "nvme"), folder, resume="must")
        engine.zero_grad()  # the first call, which restores the generators: the loss seeds them itself
        found = _steps(engine, engine.global_steps)
        engine.destroy()
    wrong = {step: value for step, value in found.items() if value != expected[step]}
    return f"{interrupt.at} at {interrupt.where}: {'resumed' if stopped else 'went on'} with {wrong}" if wrong else None


def _whole(folder: Path) -> dict[int, float]:
    engine = start(JOB, ("nvme", "nvme"), folder)
    found = _steps(engine, 0)
    engine.destroy(remove=True)
    return found


def _try(seed: int, count: int, folder: Path, **options: Any) -> None:
    threads = threading.active_count()
    expected, moments = _whole(folder / "whole"), _moments(folder / "moments", **options)
    chance = random.Random(seed)
    wrong = []
    for trial in range(count):
        at = chance.randrange(1, 2 * moments)
        interrupt = Interrupt(at)
        try:
            wrong.append(_interrupted(interrupt, folder / str(trial), expected, **options))
        except Exception as error:
            wrong.append(f"{at} at {interrupt.where}: {type(error).__name__} {error}")
    wrong = [words for words in wrong if words]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])
    assert threading.active_count() == threads


@pytest.mark.works("Recovery", "Ctrl-C at any moment of a forward, a backward or a step", "right or refused")
def test_interrupts(tmp_path: Path) -> None:
    _try(0, 40, tmp_path)


def test_interrupts_on_a_device_with_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, lambda: LateDevice(0, 0.5))
    _try(0, 40, tmp_path)


def test_interrupts_beside_a_time_line(tmp_path: Path) -> None:
    _try(0, 40, tmp_path, trace=str(tmp_path / "trace.json"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_interrupts(seed: int, tmp_path: Path) -> None:
    _try(seed, 200, tmp_path)
