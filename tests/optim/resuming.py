"""A run that is resumed from its swap files and loaded from a checkpoint, against one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.oracle import Job, assert_same_tensors, run, start, train_step, weights_of

DISK = ("nvme", "nvme")
SAVED = 2
"""The step that is saved."""


def assert_resumes_and_loads(job: Job, folder: Path, **elsewhere: Any) -> None:
    """Asserts the bits of `job` after a resume, and after a load into an engine with other tiers that has trained.

    Args:
        job: the job.
        folder: an empty folder.
        elsewhere: options of the engine that loads.
    """
    unbroken = run(job, DISK, folder / "whole")
    engine = start(job, DISK, folder / "run")
    losses = [train_step(engine, job, step) for step in range(SAVED)]
    engine.save_checkpoint(folder / "saved")
    engine.destroy()
    engine = start(job, DISK, folder / "run", resume="must")
    resumed = losses + [train_step(engine, job, step) for step in range(SAVED, job.steps)]
    weights = weights_of(engine)
    engine.destroy(remove=True)
    assert resumed == unbroken.losses
    assert_same_tensors(weights, unbroken.weights)
    engine = start(job, ("cpu", "none"), folder / "other", **elsewhere)
    train_step(engine, job, job.steps + 1)  # states to be replaced
    engine.load_checkpoint(folder / "saved")
    assert losses + [train_step(engine, job, step) for step in range(SAVED, job.steps)] == unbroken.losses
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)
