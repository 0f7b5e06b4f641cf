"""A fault of a drive, or a Ctrl-C, under the inputs of blocks is told once, training goes on, and nothing is lost."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch

import offload
from offload import testing
from offload.aio import DirectFile, File
from offload.errors import EngineFailed, IoError, StoreError, UsageError
from offload.swapper.memory.host_arena import process_memory
from offload.torch_internals import top_saved_tensor_hooks
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.checkpointed import (
    JOB,
    batch,
    gives_back,
    kept,
    running,
    small_inputs_move,
    square_loss,
    stack,
)
from tests.support.oracle import Job, train_step

AREA = "Activation checkpointing"
DEEP = JOB._replace(model=stack(12))


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _losses(job: Job, folder: Path, **options: Any) -> list[float]:
    with running(job, folder, **options) as engine:
        return [train_step(engine, job, step) for step in range(job.steps)]


class Once:
    """Fails one request of a kind, after so many that do not fail."""

    def __init__(self, operation: str, after: int) -> None:
        self._operation, self._left = operation, after
        self._lock = threading.Lock()
        self.failed = 0

    def __call__(self, operation: str, file: File, offset: int) -> bool:
        with self._lock:
            if operation != self._operation or ".offload-spill" not in str(file.path):
                return False
            self._left -= 1
            self.failed += self._left == -1
            return self._left == -1


@pytest.mark.works(AREA, "an I/O error at an input: told once, with its cause", "the step fails, training goes on")
@pytest.mark.sample(1)
@pytest.mark.parametrize("after", [0, 1, 3, 7, 11, 14, 20, 25])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_request_that_fails_is_told_once_and_training_goes_on(
    operation: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _losses(DEEP, tmp_path / "whole")
    fault = Once(operation, after)
    use_queue(monkeypatch, lambda: LateQueue(after, 0.002, fault))
    with running(DEEP, tmp_path / "cut", activations="nvme") as engine:
        told, losses = 0, []
        for step in range(DEEP.steps):
            try:
                loss = train_step(engine, DEEP, step)
            except IoError as error:
                assert (error.errno, error.operation) == (errno.EIO, operation)
                told += 1
                engine.zero_grad()
                del error
                gc.collect()
                loss = train_step(engine, DEEP, step)
            losses.append(loss)
        # A write that failed does no harm where its input is fetched before its memory is needed for another.
        assert fault.failed == 1 and told <= 1 and (told == 1 or operation == "write")
        assert losses == expected
        gives_back(engine)


def _slopes(model: Any, times: int) -> tuple[list[torch.Tensor], int]:
    """Returns the gradient at a batch, so many times through one graph, and how many other times an error came."""
    hidden = batch(0).requires_grad_()
    loss = None
    gradients: list[torch.Tensor] = []
    errors = 0
    while len(gradients) < times:
        try:
            if loss is None:
                loss = model(hidden).square().mean()
            gradients += torch.autograd.grad(loss, hidden, retain_graph=True)
        except IoError:
            errors += 1
    return gradients, errors


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("operation", "after"), [("read", 0), ("read", 5), ("read", 11), ("write", 11)])
def test_after_a_request_that_failed_the_same_graph_can_be_asked_again(
    operation: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that needs the memory of a failed write for another input tells it, and no backward does then."""
    with running(DEEP, tmp_path / "plain") as engine:
        (expected,), _ = _slopes(engine, 1)
    fault = Once(operation, after)
    use_queue(monkeypatch, lambda: LateQueue(after, 0.002, fault))
    with running(DEEP, tmp_path / "cut", activations="nvme") as engine:
        slopes, errors = _slopes(engine, 4)
        # As above: a write that failed does no harm where its input is fetched before that.
        assert fault.failed == 1 and errors <= 1 and (errors == 1 or operation == "write")
        assert all(torch.equal(slope, expected) for slope in slopes)
        del slopes
        gives_back(engine)


@pytest.mark.slow
@pytest.mark.works(AREA, "no room on the drive for the inputs", "refused")
def test_a_full_drive_is_told_and_training_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _losses(DEEP, tmp_path / "whole")
    with running(DEEP, tmp_path / "cut", activations="nvme") as engine:
        with monkeypatch.context() as patch:

            def full(file: DirectFile, nbytes: int) -> None:
                raise IoError(str(file.path), 0, nbytes, errno.ENOSPC, "write")

            testing.replace(patch, "file.reserve", full)
            for _ in range(2):
                with pytest.raises(StoreError, match="no room for inputs of checkpointed units"):
                    train_step(engine, DEEP, 0)
                engine.zero_grad()
                gc.collect()
                gives_back(engine)
        assert [train_step(engine, DEEP, step) for step in range(DEEP.steps)] == expected
        gives_back(engine)


def _failing(engine: offload.Engine) -> None:
    """Leaves a step in the middle of its backward."""

    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    hook = engine.module.blocks[5].register_full_backward_pre_hook(fail)
    loss = square_loss(engine, 0, 0)
    with pytest.raises(ValueError, match="of the test"):
        engine.backward(loss)
    hook.remove()


def _held() -> tuple[int, int, int]:
    gc.collect()
    return psutil.Process().num_fds(), threading.active_count(), process_memory().needed_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto"])
def test_after_destroy_nothing_is_held(tier: str, tmp_path: Path) -> None:
    """Files, threads and host memory, after whole steps, a failed one, and a graph that is alive."""
    _losses(JOB, tmp_path / "first", activations=tier)  # what a process makes once
    before = _held()
    with running(DEEP, tmp_path / "second", activations=tier) as engine:
        train_step(engine, DEEP, 0)
        _failing(engine)
        engine.zero_grad()
        loss = square_loss(engine, 1, 0)
    assert _held() == before
    assert not any(name.startswith(".offload-spill") for name in os.listdir(tmp_path))
    with pytest.raises(UsageError, match="destroyed"):
        loss.backward()


def _all_writes_fail(operation: str, file: File, offset: int) -> bool:
    return operation == "write" and ".offload-spill" in str(file.path)


def test_an_engine_whose_drive_is_gone_can_be_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_queue(monkeypatch, lambda: LateQueue(0, 0.001, _all_writes_fail))
    before = process_memory().needed_bytes
    with running(DEEP, tmp_path, activations="nvme") as engine:
        for _ in range(3):
            with pytest.raises(IoError, match="write"):
                train_step(engine, DEEP, 0)
            engine.zero_grad()
        assert kept(engine)
    assert process_memory().needed_bytes == before


PATIENCE = 0.5
"""Seconds after which a request goes on though nothing else has begun: somebody waits for it."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with running(DEEP, tmp_path_factory.mktemp("plain")) as engine:
        return [train_step(engine, DEEP, step) for step in range(DEEP.steps)]


class Stuck:
    """Holds one request for an input until so many others have begun after it; a Ctrl-C comes meanwhile."""

    def __init__(self, operation: str, index: int, rest: int) -> None:
        self._operation, self._index, self._others = operation, index, rest
        self._lock = threading.Lock()
        self._free = threading.Event()
        self.armed = self.reached = False

    def __call__(self, operation: str, file: File, offset: int) -> bool:
        if not self.armed or ".offload-spill" not in str(file.path):
            return False
        with self._lock:
            if self.reached:
                self._others -= 1
                if self._others <= 0:
                    self._free.set()
                return False
            self._index -= operation == self._operation
            if operation != self._operation or self._index >= 0:
                return False
            self.reached = True
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        self._free.wait(PATIENCE)
        return False


@pytest.mark.sample(1)
@pytest.mark.parametrize("rest", [2, 3, 5, 7, 9, 12, 15])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_ctrl_c_at_a_wait_leaves_the_memory_to_the_request(
    operation: str, rest: int, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(operation, 4, rest)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.0, stuck))
    with running(DEEP, tmp_path, activations="nvme") as engine:
        assert train_step(engine, DEEP, 0) == expected[0]
        stuck.armed = True
        with pytest.raises(KeyboardInterrupt):
            _interrupted(engine, 1, lambda: True)
        engine.zero_grad()
        gc.collect()
        assert stuck.reached
        assert [train_step(engine, DEEP, step) for step in (1, 2)] == expected[1:]
        gives_back(engine)


WATCHED = ("/offload/activations/", "/tests/support/drives/fault_injection.py")
"""Where calls are counted. The second has the waits for I/O."""


@contextmanager
def _signal_at(call: int, number: int, only_waits: bool = False) -> Iterator[list[int]]:
    """Sends a signal at a call of a watched function on this thread; yields the count of calls."""
    counted = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        watched = any(part in frame.f_code.co_filename for part in WATCHED)
        if event == "call" and watched and (frame.f_code.co_name == "wait" or not only_waits):
            counted[0] += 1
            if counted[0] == call:
                os.kill(os.getpid(), number)

    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def _interrupted(engine: offload.Engine, step: int, is_coming: Callable[[], bool]) -> None:
    """A forward and a backward. A signal that was sent may arrive a moment later."""
    engine.backward(square_loss(engine, step, 0))
    for _ in range(6000):  # one long sleep would miss a signal that comes just before its system call
        if not is_coming():
            break
        time.sleep(0.01)


def _goes_on(engine: offload.Engine, expected: list[float]) -> None:
    engine.zero_grad()
    gc.collect()
    assert top_saved_tensor_hooks() is None
    gives_back(engine)
    assert [train_step(engine, DEEP, step) for step in (1, 2)] == expected[1:]
    gives_back(engine)


@pytest.mark.works(AREA, "Ctrl-C in forward and backward, at any moment", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("only_waits", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 7, 10, 12, 14, 17, 30, 44, 60, 99, 150, 200, 290, 333, 404, 505])
def test_a_ctrl_c_at_a_call_gives_everything_back(
    call: int, only_waits: bool, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_queue(monkeypatch, lambda: LateQueue(call, 0.003))
    with running(DEEP, tmp_path, activations="nvme") as engine:
        assert train_step(engine, DEEP, 0) == expected[0]
        try:
            with _signal_at(call, signal.SIGINT, only_waits) as counted:
                _interrupted(engine, 1, lambda: counted[0] >= call)
        except KeyboardInterrupt:
            pass
        else:
            assert counted[0] < call, "the signal was lost"
        _goes_on(engine, expected)


@pytest.mark.works(AREA, "a handler of a signal that destroys the engine, at any moment", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("only_waits", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 12, 40, 77, 140, 222])
def test_a_handler_may_destroy_the_engine(
    call: int, only_waits: bool, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that was interrupted raises the handler's error, or that the engine is closed."""
    use_queue(monkeypatch, lambda: LateQueue(call, 0.003))
    before, stopped = process_memory().needed_bytes, threading.Event()

    class Stopped(Exception):
        pass

    with running(DEEP, tmp_path, activations="nvme") as engine:

        def stop(number: int, frame: Any) -> None:
            stopped.set()
            engine.destroy()
            if raises:
                raise Stopped

        signal.signal(signal.SIGTERM, stop)
        train_step(engine, DEEP, 0)
        sent = _signal_at(call, signal.SIGTERM, only_waits)
        with pytest.raises((Stopped, UsageError, EngineFailed)), sent as counted:
            _interrupted(engine, 1, lambda: counted[0] >= call and not stopped.is_set())  # it may never be sent
            engine.destroy()
            raise Stopped
    assert process_memory().needed_bytes == before
    assert top_saved_tensor_hooks() is None
