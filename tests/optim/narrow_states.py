"""Runs whose moments or masters have fewer bytes than fp32: one of each rule with a kernel."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from offload import testing
from tests.support import models
from tests.support.early_updates import finish_step_before
from tests.support.oracle import Job, start, train_step

JOB = models.GPT2._replace(dtype="bf16", steps=4)
RULES = {
    "AdamW": JOB,
    "Adam": JOB._replace(optimizer="Adam", params=(("adam_w_mode", False),)),
    "Lion": JOB._replace(optimizer="Lion", lr=1e-4),
    "Lamb": JOB._replace(optimizer="Lamb", lr=1e-2),
    "Adagrad": JOB._replace(optimizer="Adagrad", lr=1e-2),
    "momentum": JOB._replace(optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "bf24": {"master": "bf24"},
    "bf24, int8": {"master": "bf24", "moments": "int8"},
}
"""Options of the block "offload"."""


class Bytes(NamedTuple):
    """What a parameter costs a drive."""

    moved: float
    """Read and written, in a step."""
    stored: float


def bytes_of_a_parameter(folder: Path, job: Job = JOB, **options: Any) -> Bytes:
    """Trains with everything on disk, and counts by the queue and the store; nearly all parameters are matrices."""
    job = job._replace(model=lambda: models.gpt2(layers=4, width=256), steps=1)
    engine = start(job, ("nvme", "nvme"), folder, speculate=False, **options)
    store, queue = testing.inspect(engine).store, testing.inspect(engine).queue
    assert store is not None and queue is not None
    numel = sum(len(part) for part in testing.inspect(engine).trainable)
    totals = [0]
    for step in range(5):  # three count: the first records the order, the second has no update beside it yet
        train_step(engine, job, step)
        finish_step_before(engine)
        totals.append(queue.read_bytes + queue.written_bytes)
    # On a busy machine a step may read a unit again that was read ahead of it too early.
    moved = min(after - before for before, after in pairwise(totals[2:]))
    found = Bytes(moved / numel, store.spec.nbytes / numel)
    engine.destroy(remove=True)
    return found
