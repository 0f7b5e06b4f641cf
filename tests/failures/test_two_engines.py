"""Engines of one process share one host budget and one I/O queue, and each trains as if alone."""

from __future__ import annotations

import functools
import os
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio import IoQueue
from offload.engine.update import UpdateWorker
from offload.errors import BudgetError
from offload.swapper.memory.host_arena import process_memory
from tests.support import models
from tests.support.oracle import (
    assert_same_tensors,
    config,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(dtype="bf16", steps=4)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    assert process_memory().needed_bytes == 0, "an engine of another test is still there"


@functools.cache
def enough_for_all() -> int:
    """A budget in which one engine has all of its states in memory."""
    with tempfile.TemporaryDirectory() as folder:
        engine = start(JOB, DISK, Path(folder), host_memory=64 << 20, run="measure")
        engine.destroy(remove=True)
        return engine.host_memory


def test_one_budget_for_both(tmp_path: Path) -> None:
    """The first has all of the budget, states in memory too, until the second needs some of it."""
    alone = run(JOB, ("none", "none"), tmp_path)
    budget = enough_for_all()
    one = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    assert "has room for more" in "\n".join(one.notices)
    before = one.host_memory
    losses = [train_step(one, JOB, step) for step in range(2)]
    other = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    assert one.host_memory + other.host_memory <= budget and one.host_memory < before
    generator = torch.get_rng_state()
    others = [train_step(other, JOB, step) for step in range(JOB.steps)]
    torch.set_rng_state(generator)
    losses += [train_step(one, JOB, step) for step in range(2, JOB.steps)]
    for engine in (one, other):
        engine.destroy(remove=True)
    assert losses == others == alone.losses
    assert process_memory().needed_bytes == 0


@pytest.mark.slow
def test_the_cache_is_given_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Between a forward and its backward, with updates of the step before under way."""
    alone, budget = run(JOB, DISK, tmp_path), enough_for_all()
    one = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    losses = []
    for step in range(JOB.steps):
        loss = JOB.loss(one, step, 0)
        if step == 2:
            other = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
            assert one.host_memory + other.host_memory <= budget
        one.backward(loss)
        one.step()
        losses.append(float(loss.detach()))
    weights = weights_of(one)
    one.destroy(remove=True)
    train_step(other, JOB, 0)
    other.destroy(remove=True)
    assert losses == alone.losses
    assert_same_tensors(alone.weights, weights)


def test_the_cache_is_given_between_the_updates_of_a_thread_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that begins after the wait for updates is waited for too: its updates use the promoted states."""
    alone, budget = run(JOB, DISK, tmp_path), enough_for_all()
    one = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    losses = [train_step(one, JOB, 0)]
    thread = threading.Thread(target=lambda: losses.extend(train_step(one, JOB, step) for step in range(1, JOB.steps)))
    finish, write = UpdateWorker.finish, IoQueue.write
    waits: list[bool] = []
    updating, may_write = threading.Event(), threading.Event()

    def finish_then_train(worker: UpdateWorker, commit: bool = True) -> None:
        giving = threading.current_thread() is threading.main_thread()
        if giving and waits:
            may_write.set()
        finish(worker, commit)
        if giving:
            waits.append(commit)
            if len(waits) == 1:
                thread.start()
                assert updating.wait(20)

    def late_write(*arguments: Any, **options: Any) -> Any:
        if waits and threading.current_thread() is not threading.main_thread():
            updating.set()
            may_write.wait(5)
        return write(*arguments, **options)

    testing.replace(monkeypatch, "update.finish", finish_then_train)
    with monkeypatch.context() as late:
        testing.replace(late, "io.write", late_write)
        other = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    thread.join()
    assert len(waits) > 1, "the step was not waited for"
    weights = weights_of(one)
    for engine in (one, other):
        engine.destroy(remove=True)
    assert losses == alone.losses
    assert_same_tensors(alone.weights, weights)


def test_one_queue_and_counts_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = []

    def queue(backend: str, **shape: int | None) -> IoQueue:
        queues.append(IoQueue(backend, **shape))
        return queues[-1]

    testing.replace(monkeypatch, "io.queue", queue)
    one = start(JOB, DISK, tmp_path, run="one")
    other = start(JOB, DISK, tmp_path, run="other")
    assert len(queues) == 1
    at_start = other.io_bytes()
    train_step(one, JOB, 0)
    assert other.io_bytes() == at_start and one.io_bytes().read > at_start.read
    one.destroy(remove=True)
    train_step(other, JOB, 0)
    other.destroy(remove=True)


def test_a_budget_that_others_have_used_up_is_an_error(tmp_path: Path) -> None:
    one = start(JOB, ("cpu", "cpu"), tmp_path, run="one")
    need = one.host_memory
    with pytest.raises(BudgetError, match=r"less [\d.]+ [KM]iB for other engines of this process .destroy.. frees"):
        start(JOB, ("cpu", "cpu"), tmp_path, run="other", host_memory=need, nvme_path=[])
    train_step(one, JOB, 0)
    one.destroy()


def test_memory_that_an_engine_gave_back_is_used_again(tmp_path: Path) -> None:
    budget = enough_for_all()
    owner = start(JOB, DISK, tmp_path, host_memory=budget, run="keeper")
    mappings = len(process_memory()._mappings)
    for _ in range(2):
        other = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
        assert len(process_memory()._mappings) == mappings
        train_step(other, JOB, 0)
        other.destroy(remove=True)
    owner.destroy(remove=True)
    assert process_memory()._mappings == []


def test_a_forked_child_has_a_budget_of_its_own(tmp_path: Path) -> None:
    one = start(JOB, DISK, tmp_path, run="one")
    child = os.fork()
    if child == 0:
        os._exit(0 if process_memory().needed_bytes == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process_memory().needed_bytes == one.host_memory
    one.destroy(remove=True)


def test_a_small_engine_takes_nothing_where_the_budget_has_room(tmp_path: Path) -> None:
    """The first keeps its cache, and its states in memory."""
    budget = enough_for_all()
    one = start(JOB, DISK, tmp_path, host_memory=2 * budget, run="one")
    before = one.host_memory
    other = start(JOB, DISK, tmp_path, host_memory=2 * budget, run="other")
    assert one.host_memory == before and before + other.host_memory <= 2 * budget
    for engine in (one, other):
        engine.destroy(remove=True)


def test_what_is_taken_stays_within_the_budget_whoever_comes_and_goes(tmp_path: Path) -> None:
    budget = 2 * enough_for_all()
    chance = random.Random(0)
    engines: list[offload.Engine] = []
    for number in range(10):
        if engines and chance.random() < 0.5:
            engines.pop(chance.randrange(len(engines))).destroy(remove=True)
        else:
            try:
                engines.append(start(JOB, DISK, tmp_path, host_memory=budget, run=f"run{number}"))
            except BudgetError:
                assert engines
        assert sum(engine.host_memory for engine in engines) <= budget
    for engine in engines:
        train_step(engine, JOB, 0)
        engine.destroy(remove=True)


def test_ctrl_c_while_a_cache_is_given_harms_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wait for the updates of the engine that gives can be interrupted."""
    budget = enough_for_all()
    one = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    train_step(one, JOB, 0)

    def interrupted(worker: UpdateWorker, commit: bool = True) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        testing.replace(patch, "update.finish", interrupted)
        start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    train_step(one, JOB, 1)
    other = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    train_step(other, JOB, 0)
    train_step(one, JOB, 2)
    for engine in (one, other):
        engine.destroy(remove=True)


def test_two_threads_do_not_start_within_the_same_room(tmp_path: Path) -> None:
    budget = least_host_memory(JOB, tmp_path) + 1000
    found: list[object] = []

    def begin(model: nn.Module, run: str) -> None:
        settings = config(JOB, DISK, tmp_path, host_memory=budget, run=run)
        try:
            found.append(offload.initialize(model=model, config=settings)[0])
        except BudgetError as error:
            found.append(error)

    # Made before: transformers replaces functions of torch.nn.init meanwhile, and two threads leave them replaced.
    models_of = {name: JOB.model() for name in ("one", "other")}
    threads = [threading.Thread(target=begin, args=(model, name)) for name, model in models_of.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engines = [each for each in found if isinstance(each, offload.Engine)]
    assert len(engines) == 1 and len(found) == 2
    engines[0].destroy(remove=True)
