"""An error on a background thread is raised once, with its cause; no commit is lost."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload import testing
from offload.aio import File
from offload.aio.protocols import Future
from offload.errors import EngineFailed, IoError
from offload.swapper.store import Store
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
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


@pytest.mark.sample(1)
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


class Awaited:
    """A request that fails if it is told to, and knows if somebody has waited for it."""

    def __init__(self, inner: Future, fails: bool) -> None:
        self._inner, self._fails, self.awaited = inner, fails, False

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: float | None = None) -> int:
        self.awaited = True
        moved = self._inner.wait(timeout)
        if self._fails:
            raise IoError("states", 0, moved, errno.EIO, "read")
        return moved

    def crc32c(self) -> int:
        return self._inner.crc32c()

    def page_crcs(self) -> bytes:
        return self._inner.page_crcs()

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._inner.add_done_callback(function)


@pytest.mark.parametrize("fault", ["a read fails", "a read cannot start", "a write cannot start"])
def test_no_request_of_a_failed_update_is_left_in_flight(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tile in hand neither: the buffers are freed next, and the queue may be that of other engines too."""
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    testing.settle(engine, commit=False)
    read, write = Store.read, Store.write
    requests: list[Awaited] = []
    begun: list[str] = []

    def in_worker() -> bool:
        return threading.current_thread().name == "offload-update"

    def reads(store: Store, *arguments: Any, **options: Any) -> Future:
        if not in_worker():
            return read(store, *arguments, **options)
        begun.append("read")
        if fault == "a read cannot start" and len(begun) == 2:
            raise OSError(errno.ENOMEM, "of the test")
        requests.append(Awaited(read(store, *arguments, **options), fault == "a read fails" and not requests))
        return requests[-1]

    def writes(store: Store, *arguments: Any, **options: Any) -> Future:
        begun.append("write")
        if fault == "a write cannot start" and begun.count("write") == 3:
            raise OSError(errno.ENOMEM, "of the test")
        requests.append(Awaited(write(store, *arguments, **options), False))
        return requests[-1]

    testing.replace(monkeypatch, "store.read", reads)
    testing.replace(monkeypatch, "store.write", writes)
    with pytest.raises((EngineFailed, OSError)):
        for step in range(1, 3):
            train_step(engine, models.GPT2, step)
    engine.destroy()
    assert requests and all(request.awaited for request in requests)


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
        testing.replace(patch, "update.build", _interrupt)
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
