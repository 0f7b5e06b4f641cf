"""A secondary partition of the weights (`zero_hpz_partition_size`) beside adapters, frozen blocks and shared sequences.

A run has the bits of one without it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.distributed.process_group import Communication
from tests.ranks.test_ranks_secondary import NODE, least
from tests.support import models
from tests.support.oracle import Job, Result, assert_same, train_step, weights_of
from tests.support.ranks import sequence_parallel as sp
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import RankPool, shared_pool, start

HOST, DISK = ("cpu", "cpu"), ("nvme", "nvme")
ADAPTERS = Job(models.lora, language_rows_loss, steps=2, accumulation=2, lr=3e-4, dtype="bf16")
SHARED = Job(sp.llama, functools.partial(sp.grouped_loss, size=2), steps=2, accumulation=2, lr=3e-4, sequence=2)
RUNS: dict[str, tuple[Job, tuple[str, str], dict[str, Any]]] = {
    "adapters": (ADAPTERS, DISK, {}),
    "adapters on frozen weights in 4 bits": (ADAPTERS, DISK, {"frozen": "nf4"}),
    "adapters on frozen weights in 8 bits": (ADAPTERS, HOST, {"frozen": "int8"}),
    "shared sequences": (SHARED, HOST, {}),
}


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Two nodes of two ranks, if the config says so."""
    with shared_pool(4) as ranks:
        yield ranks


def train(job: Job, placement: tuple[str, str], folder: Path, options: dict[str, Any]) -> tuple[Result, Communication]:
    """Trains with little room above the least, so that units leave the device between their uses."""
    room = least(job, placement, folder, **options) + (1 << 16)
    engine = start(job, placement, folder, device_memory=room, **options)
    losses, norms = [], []
    for step in range(job.steps):
        losses.append(engine.mean(train_step(engine, job, step)))
        norms.append(engine.get_global_grad_norm() or 0.0)
    found = Result(losses, norms, weights_of(engine)), engine.communication()
    engine.destroy(remove=True)
    return found


@pytest.mark.works(
    "Several ranks", "a secondary partition beside adapters, frozen weights in 4 or 8 bits, shared sequences", "right"
)
@pytest.mark.parametrize("name", RUNS)
def test_a_secondary_partition_changes_no_bit(name: str, four: RankPool, tmp_path: Path) -> None:
    job, placement, options = RUNS[name]
    plain = four.run(train, job, placement, tmp_path / "plain", options)
    kept = four.run(train, job._replace(node=NODE), placement, tmp_path / "kept", options)
    for (result, sent), (expected, without) in zip(kept, plain, strict=True):
        assert_same(result, expected)
        assert sent.node_weights.collectives and not without.node_weights.collectives
        assert sent.weights.nbytes < without.weights.nbytes
