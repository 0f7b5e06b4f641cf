"""A job trained with updates under its backward, after it and in memory, which must be the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import models
from tests.support.early_updates import (
    counts,
    train_step,
)
from tests.support.oracle import Job, Result, assert_same, start, weights_of

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = models.GPT2._replace(steps=5, clip=0.0)
Between = Callable[[Any, int], None]


def trained(
    job: Job,
    placement: tuple[str, str],
    folder: Path,
    between: Between | None = None,
    more: int = 0,
    seen: list[tuple[int, int]] | None = None,
    **options: Any,
) -> Result:
    """Trains `job`; `seen` receives hits and misses of each step."""
    engine = start(job, placement, folder, **options)
    losses, norms = [], []
    try:
        for step in range(job.steps):
            before = counts(engine)
            losses.append(train_step(engine, job, step, between, more))
            norms.append(engine.get_global_grad_norm())
            after = counts(engine)
            if seen is not None:
                seen.append((after.hits - before.hits, after.misses - before.misses))
        return Result(losses, norms, weights_of(engine))
    finally:
        engine.destroy(remove=True)


def in_all_ways(
    job: Job, folder: Path, between: Between | None = None, more: int = 0, **options: Any
) -> list[tuple[int, int]]:
    """Asserts the same bits in memory, on disk, and on disk with updates under the backward; returns their counts."""
    seen: list[tuple[int, int]] = []
    memory = trained(job, MEMORY, folder / "memory", between, more, **options)
    late = trained(job, DISK, folder / "late", between, more, speculate=False, **options)
    early = trained(job, DISK, folder / "early", between, more, seen, speculate=True, **options)
    assert_same(memory, late, "memory and disk")
    assert_same(memory, early, "memory and disk, updated under the backward")
    return seen
