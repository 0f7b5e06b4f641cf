"""An error of a thread or of the user's code is raised once, with its cause, and nothing is left behind."""

from __future__ import annotations

import errno
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio import File
from offload.aio.protocols import Future
from offload.aio.shared_queue import SharedQueue
from offload.errors import BudgetError, ConfigError, EngineFailed, IoError, StoreError
from offload.swapper.memory.host_arena import process_memory
from offload.swapper.store import Store
from tests.failures import linear_engine
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import assert_same_tensors, config, run, start, train_step, weights_of
from tests.support.processes import warm_process

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
    job = models.GPT2._replace(steps=5)
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


@pytest.mark.sample(2)
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


@pytest.mark.works("Recovery", "Ctrl-C in the middle of `step()`", "the engine stops, the last step opens")
def test_an_interrupt_in_the_middle_of_a_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a boundary is none: the engine stops, and the run goes on from its last commit with the right bits."""
    job = models.GPT2
    unbroken = run(job, DISK, tmp_path / "whole")
    engine = start(job, DISK, tmp_path / "cut")
    losses = [train_step(engine, job, step) for step in range(2)]
    engine.backward(job.loss(engine, 2, 0))
    with monkeypatch.context() as patch:
        testing.replace(patch, "update.build", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(EngineFailed, match="last committed step"):
        engine.step()
    engine.destroy(remove=True)
    again = start(job, DISK, tmp_path / "cut", resume="must")
    assert again.global_steps == 2
    losses += [train_step(again, job, step) for step in range(2, job.steps)]
    again.destroy(remove=True)
    assert losses == unbroken.losses


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of the test")


def workers() -> int:
    return sum(thread.name == "offload-update" for thread in threading.enumerate())


@pytest.mark.parametrize("point", ["device.arena", "store.commit"])
def test_a_start_that_fails_leaves_nothing(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    opened: set[SharedQueue] = set()
    job = models.GPT2._replace(model=lambda: made.append(models.GPT2.model()) or made[-1])

    def opens(open_queue: Callable[..., SharedQueue], *arguments: Any, **options: Any) -> SharedQueue:
        opened.add(queue := open_queue(*arguments, **options))
        return queue

    def closes(close: Callable[[SharedQueue], None], queue: SharedQueue) -> None:
        close(queue)
        opened.discard(queue)

    with monkeypatch.context() as patch:
        testing.intercept(patch, "io.open_queue", opens)
        testing.intercept(patch, "io.close_queue", closes)
        testing.replace(patch, point, fails)
        with pytest.raises(RuntimeError, match="of the test"):
            start(job, DISK, tmp_path, activations="nvme")
    assert not opened and not workers() and not list(tmp_path.rglob("states"))
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


@pytest.mark.parametrize("point", ["pager.close", "io.close_queue"])
def test_a_component_that_cannot_be_closed_keeps_nothing_open(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    with monkeypatch.context() as patch:
        testing.intercept(patch, point, lambda close, component: (close(component), fails()))
        with pytest.raises(RuntimeError, match="of the test"):
            engine.destroy()
    assert not workers() and testing.inspect(engine).host_arena not in process_memory().arenas
    again = start(models.GPT2, DISK, tmp_path, resume="must")  # the lock is free
    again.destroy(remove=True)


def message_of(folder: Path, error: BaseException, rewritten: bool = False, **options: object) -> str:
    engine = start(models.GPT2, DISK, folder, **options)
    train_step(engine, models.GPT2, 0)
    testing.inspect(engine).pager.mark_rewritten(rewritten)
    testing.fail(engine, error)
    with pytest.raises(EngineFailed) as caught:
        train_step(engine, models.GPT2, 1)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_run_that_is_not_removed_after_an_error_is_reported(
    durability: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command is one for a shell, whatever the path."""
    tmp_path /= "a drive's runs"
    tmp_path.mkdir()
    engine = start(models.GPT2, DISK, tmp_path, durability=durability)
    train_step(engine, models.GPT2, 0)
    testing.settle(engine, commit=False)
    testing.fail(engine, IoError("states", 0, 1, errno.EIO, "read"))
    for _ in range(2):  # reported once
        engine.destroy(remove=True)
    messages = [each.getMessage() for each in caplog.records if "is kept" in each.getMessage()]
    folder = tmp_path / "default"
    delete = f"offload rm {shlex.quote(str(folder))}"
    kept = f"an error has stopped the engine, so the run in {folder} is kept: `{delete}` deletes it"
    assert messages == ([kept] if durability == "step" else []) and folder.exists() == bool(messages)


def test_the_last_commit_is_called_intact_only_where_it_is(tmp_path: Path) -> None:
    fault, damage = IoError("states", 0, 1, errno.EIO, "read"), IoError("states", 0, 1, errno.EBADMSG, "use a weight")
    assert message_of(tmp_path / "fault", fault).endswith("the last committed step is intact")
    message = message_of(tmp_path / "damage", damage)
    assert "intact" not in message and '"resume": "auto"' in message and "checkpoint" in message
    message = message_of(tmp_path / "none", fault, durability="none")
    assert "intact" not in message and "nothing was committed" in message
    message = message_of(tmp_path / "load", fault, rewritten=True)
    assert "intact" not in message and "replacing frozen weights" in message


SCRIPT = """
import sys, threading
from pathlib import Path
from tests.failures import linear_engine
engine = linear_engine.start(Path({folder!r}))
linear_engine.train(engine)
{ending}
"""
FAILS = {
    "words": "sys.exit('no more room')",
    "a caught error": "try:\n    raise ValueError('a bad batch')\nexcept ValueError:\n    sys.exit(2)",
}
DONE = {
    "zero": "sys.exit(0)",
    "a thread's": "thread = threading.Thread(target=sys.exit, args=[1])\nthread.start()\nthread.join()",
    "caught": "try:\n    sys.exit(1)\nexcept SystemExit:\n    linear_engine.train(engine)",
}


def ended(ending: str, folder: Path) -> tuple[int, str]:
    """Returns the status and the errors of a script that commits a step and ends as `ending` says."""
    done = warm_process.python(SCRIPT.format(folder=str(folder), ending=ending))
    return done.returncode, done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", FAILS)
def test_a_failure_keeps_the_run(how: str, tmp_path: Path) -> None:
    status, told = ended(FAILS[how], tmp_path)
    assert status == (2 if how == "a caught error" else 1) and ("no more room" in told) == (how == "words")
    assert "a start without it is refused while the run is there" in told
    with pytest.raises(StoreError, match="holds a run that did not end"):
        linear_engine.start(tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", DONE)
def test_another_end_is_an_end_of_the_run(how: str, tmp_path: Path) -> None:
    status, told = ended(DONE[how], tmp_path)
    assert status == 0 and "a start without it begins anew" in told
    linear_engine.start(tmp_path).destroy(remove=True)
