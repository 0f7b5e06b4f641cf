"""An error while an engine is made or closed gives back its thread, hooks, memory and lock."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio.shared_queue import SharedQueue
from offload.config import Config
from offload.engine import assembly, setup
from offload.engine import engine as core
from offload.errors import BudgetError, ConfigError, StoreError
from offload.swapper.memory.host_arena import process_memory
from tests.support import models
from tests.support.oracle import assert_same_tensors, config, start, train_step, weights_of

DISK = ("nvme", "nvme")


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of the test")


def workers() -> int:
    return sum(thread.name == "offload-update" for thread in threading.enumerate())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(
            (assembly, "compute_spans"),
            (assembly, "KeptInputs"),
            (assembly, "ModuleHooks"),
            (assembly, "WeightEdits"),
            (assembly, "UpdateWorker"),
        ),
        *((assembly, "_meter"), (core, "OptimizerStep"), (setup, "Engine")),
    ],
)
def test_a_start_that_fails_late_leaves_nothing(
    where: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[nn.Module] = []
    job = models.GPT2._replace(model=lambda: made.append(models.GPT2.model()) or made[-1])
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        with pytest.raises(RuntimeError, match="of the test"):
            start(job, DISK, tmp_path, activations="nvme")
    assert not workers() and not list(tmp_path.rglob("states"))
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in made[0].modules())
    start(job, DISK, tmp_path).destroy(remove=True)


def _without_json(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    made = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    made.history = torch.zeros(3)  # type: ignore[attr-defined]
    return made


@pytest.mark.sample(1)
@pytest.mark.parametrize("reason", ["the schedule's state", "memory", "room"])
def test_a_start_that_is_refused_late_keeps_the_run_that_it_would_replace(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed run, which a start with "resume": "never" replaces."""
    job = models.GPT2
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    before = weights_of(engine)
    engine.destroy()
    content = config(job, DISK, tmp_path)
    with monkeypatch.context() as patch, pytest.raises((ConfigError, BudgetError, StoreError)):
        if reason == "memory":
            testing.replace(patch, "device.arena", mock.Mock(side_effect=BudgetError("of the test")))
        if reason == "room":
            testing.replace(patch, "drives.free", lambda paths: [(0, 0) for _ in paths])
        schedule = _without_json if reason == "the schedule's state" else None
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)) if reason == "room" else job.model()
        offload.initialize(model=model, lr_scheduler=schedule, config=content)
    again = start(job, DISK, tmp_path, resume="must")
    assert again.global_steps == 1
    assert_same_tensors(weights_of(again), before)
    again.destroy(remove=True)


@pytest.mark.parametrize("name", ["_written", "_meter", "Store"])
def test_a_start_that_fails_early_leaves_no_queue_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[SharedQueue] = set()
    make, close = assembly._queue, SharedQueue.close

    def made(config: Config) -> SharedQueue:
        opened.add(queue := make(config))
        return queue

    testing.replace(monkeypatch, "io.open_queue", made)
    testing.replace(monkeypatch, "io.close_queue", lambda queue: (close(queue), opened.discard(queue)))
    monkeypatch.setattr(assembly, name, fails)
    with pytest.raises(RuntimeError, match="of the test"):
        start(models.GPT2, DISK, tmp_path)
    assert not opened


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", ["update_worker", "gradients", "pager", "queue"])
def test_a_component_that_cannot_be_closed_keeps_nothing_open(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    it = getattr(testing.inspect(engine), part)
    closed = it.close
    monkeypatch.setattr(it, "close", lambda: (closed(), fails()))
    with pytest.raises(RuntimeError, match="of the test"):
        engine.destroy()
    assert not workers() and testing.inspect(engine).host_arena not in process_memory().arenas
    again = start(models.GPT2, DISK, tmp_path, resume="must")  # the lock is free
    again.destroy(remove=True)
