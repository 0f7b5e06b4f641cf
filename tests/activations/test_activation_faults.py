"""A fault of a drive under the inputs of blocks is told once, training goes on, and nothing is lost."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import offload
from offload import testing
from offload.aio import DirectFile, File
from offload.errors import IoError, StoreError, UsageError
from offload.swapper.memory.host_arena import process_memory
from offload.swapper.store.spill_file import SpillFile
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
DEEP = JOB._replace(model=stack(16))


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


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
    found: list[torch.Tensor] = []
    errors = 0
    while len(found) < times:
        try:
            if loss is None:
                loss = model(hidden).square().mean()
            found += torch.autograd.grad(loss, hidden, retain_graph=True)
        except IoError:
            errors += 1
    return found, errors


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
        found, errors = _slopes(engine, 4)
        # As above: a write that failed does no harm where its input is fetched before that.
        assert fault.failed == 1 and errors <= 1 and (errors == 1 or operation == "write")
        assert all(torch.equal(each, expected) for each in found)
        del found
        gives_back(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_request_that_cannot_start_is_told_and_training_goes_on(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory whose bytes it would have moved keeps them, and is no one else's."""
    expected = _losses(DEEP, tmp_path / "whole")
    with running(DEEP, tmp_path / "cut", activations="nvme") as engine:
        losses = [train_step(engine, DEEP, 0)]
        original, calls = getattr(SpillFile, operation), 0

        def refuse(file: SpillFile, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (3, 4, 9):
                raise OSError(errno.ENOMEM, "of the test")
            return original(file, *arguments)

        monkeypatch.setattr(SpillFile, operation, refuse)
        loss, failures = None, 0
        while loss is None or calls < 9:
            # If a read was refused, the same graph asks for the input again.
            try:
                loss = DEEP.loss(engine, 1, 0) if loss is None else loss
                torch.autograd.grad(loss, [engine.module.first.weight], retain_graph=True)
            except OSError as error:
                assert error.errno == errno.ENOMEM
                failures += 1
        assert failures == 3
        monkeypatch.undo()
        small_inputs_move(monkeypatch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        del loss
        gc.collect()
        assert [*losses, train_step(engine, DEEP, 2)] == expected
        gives_back(engine)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_are_late_change_no_bit(
    seed: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a read has ended, its memory holds NaN."""
    job = JOB._replace(model=stack(12 + seed), accumulation=2)
    expected = _losses(job, tmp_path / "plain")
    use_queue(monkeypatch, lambda: LateQueue(seed, 0.004))
    assert _losses(job, tmp_path / "late", activations=tier) == expected


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
