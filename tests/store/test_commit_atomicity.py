"""A commit contains one moment: a step that breaks in its middle is not committed, and the message says so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import offload
from offload import testing
from offload.engine.update import UpdateWorker
from offload.errors import EngineFailed
from offload.swapper.store import Store

STEPS = 6


class Breaks(lr_scheduler.LambdaLR):
    """Moves the learning rate each step; once, it is interrupted before or after it has."""

    whens: ClassVar[list[str]] = []  # no part of its state

    def step(self, epoch: Any = None) -> None:
        when = self.whens.pop() if self.last_epoch == 2 and self.whens else ""
        if when == "before":
            raise KeyboardInterrupt
        super().step(epoch)
        if when:
            raise KeyboardInterrupt


class Halves:
    """A schedule as a script writes it: where it is nobody can ask."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2


def breaks(optimizer: torch.optim.Optimizer) -> Breaks:
    return Breaks(optimizer, lambda step: 1 / (1 + step))


def begin(folder: Path, schedule: Callable[[Any], Any] | None = breaks, **options: Any) -> offload.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto", **options},
    }

    return offload.initialize(model=nn.Linear(4, 1), lr_scheduler=schedule, config=config).engine


def train_step(engine: offload.Engine) -> tuple[float, float, int]:
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.global_steps))
    loss = engine(rows).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item(), engine.get_lr()[0], getattr(engine.lr_scheduler, "last_epoch", 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("leave", ["destroy", "exit"])
def test_a_step_whose_schedule_was_interrupted_is_not_committed(when: str, leave: str, tmp_path: Path) -> None:
    unbroken = begin(tmp_path / "whole")
    expected = [train_step(unbroken) for _ in range(STEPS)]
    unbroken.destroy()
    engine = begin(tmp_path / "cut")
    Breaks.whens.append(when)
    seen = [train_step(engine) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        train_step(engine)
    with pytest.raises(EngineFailed):
        train_step(engine)
    engine.destroy() if leave == "destroy" else testing.leave(engine)
    again = begin(tmp_path / "cut")
    assert again.global_steps == again.lr_scheduler.last_epoch == 2
    seen += [train_step(again) for _ in range(2, STEPS)]
    again.destroy()
    assert seen == expected


def test_a_worker_that_is_late_commits_no_step_before_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked for a commit, found no work, and lies asleep until the next step and its blob are there."""
    late, delivered, commits = threading.Event(), threading.Event(), []
    look, commit, deliver = UpdateWorker._commit, Store.commit, UpdateWorker.deliver_blob

    def look_late(self: UpdateWorker) -> bool:
        if late.is_set() and not self._busy and self._commit_step is None:
            late.clear()
            assert delivered.wait(60)
        return look(self)

    def deliver_and_say(self: UpdateWorker, blob: Any) -> None:
        deliver(self, blob)
        delivered.set()

    def remember(self: Store, epoch: int, contents: Any) -> None:
        commits.append((epoch, self.durable is None or self.newest != list(self.durable.slots)))
        commit(self, epoch, contents)

    monkeypatch.setattr(UpdateWorker, "_commit", look_late)
    monkeypatch.setattr(UpdateWorker, "deliver_blob", deliver_and_say)
    engine = begin(tmp_path, None)
    train_step(engine)
    testing.settle(engine)
    monkeypatch.setattr(Store, "commit", remember)
    delivered.clear()
    late.set()
    while late.is_set():  # until the worker has looked
        with testing.inspect(engine).pager.lock:
            testing.inspect(engine).update_worker._wake()
        time.sleep(0.001)
    train_step(engine)
    train_step(engine)
    engine.destroy()
    assert commits == [(2, True), (3, True)]


def test_a_step_that_was_not_counted_stops_nothing(tmp_path: Path) -> None:
    """What raises before the step is decided is a mistake of the loop, and it goes on."""
    engine = begin(tmp_path)
    train_step(engine)
    engine.backward(engine(torch.full((2, 4), torch.inf)).square().mean())
    with pytest.raises(offload.errors.NumericsError):
        engine.step()
    assert engine.lr_scheduler.last_epoch == 1
    train_step(engine)
    engine.destroy()


def test_the_final_message_names_the_committed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(tmp_path / "whole")
    for _ in range(3):
        train_step(engine)
    with caplog.at_level(logging.WARNING, "offload"):
        testing.leave(engine)
    assert "at step 3: " in caplog.text and "a start without it begins anew" in caplog.text
    caplog.clear()
    engine = begin(tmp_path / "failed", durability={"every": 2})
    for _ in range(4):
        train_step(engine)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    testing.fail(engine, RuntimeError("of the test"))
    with caplog.at_level(logging.WARNING, "offload"):
        testing.leave(engine)
    assert "at step 4, the last committed one of 5: " in caplog.text
    assert "a start without it is refused while the run is there" in caplog.text
    again = begin(tmp_path / "failed")
    assert again.global_steps == 4
    again.destroy()


def test_a_schedule_that_cannot_be_saved_is_reported_at_the_start_and_at_the_resume(tmp_path: Path) -> None:
    engine = begin(tmp_path / "run", Halves)
    assert sum("Halves has no state_dict()" in line for line in engine.notices) == 1
    train_step(engine)
    engine.destroy()
    again = begin(tmp_path / "run", Halves)
    assert sum("Halves keeps the state that this script created, at step 1" in line for line in again.notices) == 1
    again.destroy()
    for engine in (begin(tmp_path / "held"), begin(tmp_path / "none", None)):
        assert not any("schedule" in line for line in engine.notices)
        engine.destroy()
    free = begin(tmp_path / "free", Halves, durability="none", resume="never")
    assert not any("Halves" in line for line in free.notices), "nothing is held there at all"
    free.destroy()
