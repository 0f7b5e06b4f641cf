"""An error while an engine is made or closed gives back its thread, hooks, memory and lock."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offload.aio.shared_queue import SharedQueue
from offload.config import Config
from offload.engine import core
from offload.engine.setup import assembly, initialize
from tests.support import models
from tests.support.oracle import start

DISK = ("nvme", "nvme")


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of the test")


def workers() -> int:
    return sum(thread.name == "offload-update" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(
            (assembly, "compute_spans"),
            (assembly, "ModuleHooks"),
            (assembly, "WeightEdits"),
            (assembly, "UpdateWorker"),
        ),
        *((initialize, "_meter"), (core, "OptimizerStep"), (initialize, "Engine")),
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
            start(job, DISK, tmp_path)
    assert not workers() and not list(tmp_path.rglob("states"))
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in made[0].modules())
    start(job, DISK, tmp_path).destroy(remove=True)


@pytest.mark.parametrize("name", ["_written", "_recorders", "Store"])
def test_a_start_that_fails_early_leaves_no_queue_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[SharedQueue] = set()
    make, close = initialize._queue, SharedQueue.close

    def made(config: Config) -> SharedQueue:
        opened.add(queue := make(config))
        return queue

    monkeypatch.setattr(initialize, "_queue", made)
    monkeypatch.setattr(SharedQueue, "close", lambda queue: (close(queue), opened.discard(queue)))
    monkeypatch.setattr(initialize, name, fails)
    with pytest.raises(RuntimeError, match="of the test"):
        start(models.GPT2, DISK, tmp_path)
    assert not opened


@pytest.mark.parametrize("part", ["update_worker", "gradients", "pager", "queue"])
def test_a_component_that_cannot_be_closed_keeps_nothing_open(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    it = getattr(engine._core.components, part)
    closed = it.close
    monkeypatch.setattr(it, "close", lambda: (closed(), fails()))
    with pytest.raises(RuntimeError, match="of the test"):
        engine.destroy()
    assert not workers() and engine._core.components.arena not in engine._core.components.arena._memory._arenas
    again = start(models.GPT2, DISK, tmp_path, resume="must")  # the lock is free
    again.destroy(remove=True)
