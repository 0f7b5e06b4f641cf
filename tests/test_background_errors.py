"""An error on a background thread is raised once, with its cause; no commit is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from offload.aio import File
from offload.errors import EngineFailed, IoError
from tests.support import models
from tests.support.fault_injection import LateQueue, use_queue
from tests.support.oracle import run, start, train_step

DISK = ("nvme", "nvme")


def failing(operation: str, after: int) -> object:
    """Says yes to every request of `operation` but the first `after`."""
    seen = 0
    lock = threading.Lock()

    def fails(what: str, file: File, offset: int) -> bool:
        nonlocal seen
        with lock:
            seen += what == operation
            return what == operation and seen > after

    return fails


@pytest.mark.sample(3)
@pytest.mark.works(
    "Recovery",
    "an I/O error on a background thread: told once, with its cause",
    "the engine stops, the last step opens",
)
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("after", [20, 33, 47])
def test_a_failed_request_stops_the_engine(
    operation: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(steps=10)
    unbroken = run(job, DISK, tmp_path / "whole")
    with monkeypatch.context() as patch:
        use_queue(patch, lambda: LateQueue(0, 0.001, failing(operation, after)))
        engine = start(job, DISK, tmp_path / "cut")
        with pytest.raises((EngineFailed, IoError)) as caught:
            for step in range(job.steps):
                train_step(engine, job, step)
        cause = caught.value if isinstance(caught.value, IoError) else caught.value.__cause__
        assert isinstance(cause, IoError) and cause.operation == operation
        with pytest.raises(EngineFailed, match="last committed step"):
            engine.step()
        engine.destroy()
    again = start(job, DISK, tmp_path / "cut", resume="must")
    losses = [train_step(again, job, step) for step in range(again.global_steps, job.steps)]
    again.destroy(remove=True)
    assert losses == unbroken.losses[job.steps - len(losses) :]


@pytest.mark.works("Engines and processes", "threads after `destroy()`: none", "right")
def test_no_thread_outlives_its_engine(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    engine.destroy()
    assert {thread.name for thread in threading.enumerate()} <= before


@pytest.mark.works("Recovery", "Ctrl-C in the middle of `step()`", "the engine stops, the last step opens")
def test_an_interrupt_in_the_middle_of_a_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a boundary is none: the engine stops, and the run goes on from its last commit with the right bits."""
    job = models.GPT2
    unbroken = run(job, DISK, tmp_path / "whole")
    engine = start(job, DISK, tmp_path / "cut")
    losses = [train_step(engine, job, step) for step in range(3)]
    engine.backward(job.loss(engine, 3, 0))
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.boundary._decider, "updates", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(EngineFailed, match="last committed step"):
        engine.step()
    engine.destroy(remove=True)
    again = start(job, DISK, tmp_path / "cut", resume="must")
    assert again.global_steps == 3
    losses += [train_step(again, job, step) for step in range(3, job.steps)]
    again.destroy(remove=True)
    assert losses == unbroken.losses


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
