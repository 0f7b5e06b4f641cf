"""Where not every step is committed, states in memory are written at commits alone, and nothing else changes."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from tests.support.models import GPT2, LORA, MIXTURE
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    kill_and_resume,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)

EVERY = {"every": 3}
PLACEMENTS = [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme")]
"""In the last one, states on the drive stay in memory, since the budget has room."""
JOB = GPT2._replace(steps=8)


def begin(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> offload.Engine:
    return start(job, placement, folder, durability=EVERY, host_memory="256MiB", **options)


def written(engine: offload.Engine) -> int:
    engine.synchronize()
    return sum(drive.life_bytes for drive in engine.drive_writes())


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids="/".join)
@pytest.mark.parametrize("job", [JOB, LORA._replace(steps=8)], ids=["all", "lora"])
def test_a_step_between_commits_writes_nothing(job: Job, placement: tuple[str, str], tmp_path: Path) -> None:
    usual = run(job, placement, tmp_path / "usual")
    engine = begin(job, placement, tmp_path)
    amounts, losses, norms = [written(engine)], [], []
    for step in range(job.steps):
        losses.append(train_step(engine, job, step))
        norms.append(engine.get_global_grad_norm())
        amounts.append(written(engine))
    weights = weights_of(engine)
    engine.destroy(remove=True)
    steps = [after - before for before, after in itertools.pairwise(amounts)]
    # The first call after a step delivers the blob, so the commit of step 3 may count in step 4; no states do.
    states = sum(t.numel() for t in job.model().parameters() if t.requires_grad) * 12
    assert steps[2] + steps[3] >= states and steps[5] + steps[6] >= states
    assert max(steps[0], steps[1], steps[4], steps[7]) < states / 4
    assert_same(usual._replace(losses=losses, norms=norms, weights=weights), usual)


def test_updates_have_ended_before_a_commit_writes_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, computes, commits, committed = threading.Event(), threading.Event(), threading.Event(), list[int]()
    computes.set()

    def update(real: Any, *args: Any, **options: Any) -> Any:
        computes.wait(60)
        return real(*args, **options)

    def commit(real: Any, *args: Any, **options: Any) -> None:
        held.set()
        commits.wait(20)
        real(*args, **options)
        committed.append(1)

    testing.intercept(monkeypatch, "kernel.update", update)
    engine = begin(JOB, ("cpu", "cpu"), tmp_path)
    for step in range(2):
        train_step(engine, JOB, step)
    engine.synchronize()  # else the next forward waits for updates that are held
    testing.intercept(monkeypatch, "store.commit", commit)
    computes.clear()
    train_step(engine, JOB, 2)
    engine.wake()  # the first call after the step delivers the blob while the updates go on
    computes.set()
    worker = testing.inspect(engine).update_worker
    assert worker is not None
    worker.finish(commit=False)
    assert not committed, "the wait for updates was no wait for the drives"
    assert held.wait(60)
    commits.set()
    engine.synchronize()
    assert committed == [1]
    engine.destroy(remove=True)


def test_a_killed_run_resumes_at_its_commit(tmp_path: Path) -> None:
    usual = run(JOB, ("cpu", "cpu"), tmp_path / "usual")
    killed = kill_and_resume(JOB, ("cpu", "nvme"), tmp_path, kills=1, durability=EVERY, host_memory="256MiB")
    assert_same(killed, usual)


def test_experts_that_no_token_visits_are_written_once(tmp_path: Path) -> None:
    job = MIXTURE._replace(steps=5)
    usual = run(job, ("cpu", "cpu"), tmp_path / "usual")
    engine = begin(job, ("cpu", "cpu"), tmp_path)
    for step in range(4):
        train_step(engine, job, step)
    engine.destroy(remove=False)
    engine = begin(job, ("cpu", "cpu"), tmp_path, resume="must")
    assert engine.global_steps == 4
    train_step(engine, job, 4)
    assert_same_tensors(weights_of(engine), usual.weights)
    engine.destroy(remove=True)


def trained(folder: Path, steps: int, placement: tuple[str, str] = ("cpu", "nvme")) -> offload.Engine:
    engine = begin(JOB, placement, folder)
    for step in range(steps):
        train_step(engine, JOB, step)
    return engine


def finish(engine: offload.Engine) -> dict[str, torch.Tensor]:
    for step in range(engine.global_steps, JOB.steps):
        train_step(engine, JOB, step)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return weights


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids="/".join)
def test_a_save_between_commits_has_the_newest_states(placement: tuple[str, str], tmp_path: Path) -> None:
    usual = run(JOB, placement, tmp_path / "usual")
    engine = trained(tmp_path, 5, placement)
    engine.save_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(finish(engine), usual.weights)
    engine = trained(tmp_path, 4, placement)  # between commits too
    engine.load_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=False)
    engine = begin(JOB, placement, tmp_path, resume="must")
    assert engine.global_steps == 5
    assert_same_tensors(finish(engine), usual.weights)


def test_an_edit_between_commits_is_kept(tmp_path: Path) -> None:
    expected = None
    for durability in ("step", EVERY):
        engine = start(JOB, ("cpu", "nvme"), tmp_path, durability=durability, host_memory="256MiB")
        for step in range(4):
            train_step(engine, JOB, step)
        parameter = next(engine.module.parameters())
        values = offload.safe_get_full_fp32_param(parameter)
        assert values is not None
        offload.safe_set_full_fp32_param(parameter, torch.ones_like(values))
        engine.destroy(remove=False)
        engine = begin(JOB, ("cpu", "nvme"), tmp_path, resume="must")
        weights = finish(engine)
        assert_same_tensors(weights, expected or weights)
        expected = weights


def test_a_load_of_weights_alone_moves_the_other_states_along(tmp_path: Path) -> None:
    engine = trained(tmp_path, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=True)
    expected = None
    for durability in ("step", EVERY):
        engine = start(JOB, ("cpu", "nvme"), tmp_path, durability=durability, host_memory="256MiB")
        for step in range(3):
            train_step(engine, JOB, step)
        engine.synchronize()  # committed: the load writes the other slot
        engine.load_checkpoint(str(tmp_path / "saved"), load_module_only=True)
        engine.destroy(remove=False)
        weights = finish(begin(JOB, ("cpu", "nvme"), tmp_path, resume="must"))
        assert_same_tensors(weights, expected or weights)
        expected = weights


def test_a_sleeping_engine_has_its_states_on_the_drive(tmp_path: Path) -> None:
    usual = run(JOB, ("cpu", "cpu"), tmp_path / "usual")
    engine = trained(tmp_path, 4)
    engine.sleep(host=True)
    assert_same_tensors(finish(engine), usual.weights)


def test_memory_that_another_engine_takes_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    usual = run(JOB, ("cpu", "cpu"), tmp_path / "usual")
    measured = begin(JOB, ("cpu", "nvme"), tmp_path)
    budget = measured.host_memory
    measured.destroy(remove=True)
    engine = start(JOB, ("cpu", "nvme"), tmp_path, durability=EVERY, host_memory=budget)
    for step in range(4):
        train_step(engine, JOB, step)
    other_engine = start(JOB, ("nvme", "nvme"), tmp_path, run="other", host_memory=budget)
    assert engine.host_memory < budget, "the other engine has taken the states' memory"
    train_step(other_engine, JOB, 0)
    other_engine.destroy(remove=True)
    assert_same_tensors(finish(engine), usual.weights)
