"""SIGKILL during updates that are made under the backward: the run resumes bit for bit from the commit before."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from offload import testing
from tests.support import models
from tests.support.drives.fault_injection import die, die_after_writes
from tests.support.early_updates import finish_step_before, train_step
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    dies,
    kill_and_resume,
    run,
    start,
    weights_of,
)

DISK = ("nvme", "nvme")
JOB = models.DROPOUT._replace(dtype="bf16", steps=6, clip=0.0)
KILLED = 3
"""The step whose backward is killed."""


def killed_under_a_backward(job: Job, folder: Path, writes: int, decided: bool) -> None:
    """Trains in a process that dies under a backward, before or after so many writes; with `decided` after `step()`."""
    logging.disable(logging.CRITICAL)
    engine = start(job, DISK, folder, speculate=True)
    losses = []
    for step in range(KILLED):
        losses.append((train_step(engine, job, step), engine.get_global_grad_norm()))
    (folder / "losses.json").write_text(json.dumps(losses))
    loss = job.loss(engine, KILLED, 0)
    finish_step_before(engine)
    if not decided:
        die_after_writes(writes)
    engine.backward(loss)
    testing.settle_early_updates(engine)
    if decided:
        die_after_writes(writes)
        engine.step()
        engine(models.tokens(KILLED, 0))  # the first call after a step commits it
        finish_step_before(engine)
    die()


def resumed(job: Job, folder: Path) -> Result:
    """Goes on with a run that was killed."""
    engine = start(job, DISK, folder, resume="must", speculate=True)
    assert engine.global_steps == KILLED
    found = json.loads((folder / "losses.json").read_text())
    for step in range(KILLED, job.steps):
        found.append((train_step(engine, job, step), engine.get_global_grad_norm()))
    result = Result([loss for loss, _ in found], [norm for _, norm in found], weights_of(engine))
    engine.destroy(remove=True)
    return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("writes", [1, 4, 7, 1000])
def test_a_kill_under_the_backward_resumes_at_the_step_before(tmp_path: Path, writes: int) -> None:
    """Up to 1000 writes there are none, so that the last one dies when all updates are written and none confirmed."""
    dies(killed_under_a_backward, JOB, tmp_path / "run", writes, False)
    assert_same(run(JOB, DISK, tmp_path / "whole", speculate=False), resumed(JOB, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, dtype: str, clip: float) -> None:
    """Each request is late, so that most moments lie between an update's first write and the commit."""
    job = models.DROPOUT._replace(dtype=dtype, steps=80, clip=clip)
    unbroken = run(job, DISK, tmp_path / "whole", speculate=False)
    killed = kill_and_resume(job, DISK, tmp_path, kills=2, seed=len(dtype), late=0.003, speculate=True)
    assert_same(unbroken, killed)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["micro_batch_major", "layer_major"])
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills_at_random_moments_change_nothing(tmp_path: Path, seed: int, schedule: str) -> None:
    """Ten for each seed; a part of the steps clips."""
    job = models.DROPOUT._replace(
        dtype=("bf16", "fp32")[seed % 2], steps=240, clip=1.2, accumulation=1 + 2 * (seed > 1)
    )
    plain = {"by": accumulated_step, "schedule": "micro_batch_major", "speculate": False}
    unbroken = run(job, DISK, tmp_path / "whole", **plain)
    early = {"by": accumulated_step, "schedule": schedule, "speculate": True}
    killed = kill_and_resume(job, DISK, tmp_path, kills=10, seed=seed, late=0.003, **early)
    assert_same(unbroken, killed)
