"""On two ranks micro-batches that take turns give the bits of one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.oracle import Job, accumulated_step, assert_same_tensors, weights_of
from tests.support.param_states import gpt2
from tests.support.rank_jobs import language_rows_loss
from tests.support.rank_pool import RankPool, pool, start

JOB = Job(gpt2, language_rows_loss, accumulation=4, steps=3, dtype="bf16")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with pool(2) as two:
        yield two


def train(folder: Path, schedule: str, activations: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    options = {} if activations is None else {"activations": activations}
    engine = start(JOB, ("nvme", "nvme"), folder, schedule=schedule, **options)
    losses = [accumulated_step(engine, JOB, step) for step in range(JOB.steps)]
    found = losses, weights_of(engine)
    engine.destroy(remove=True)
    return found


@pytest.mark.parametrize("activations", [None, "cpu"])
def test_two_ranks_have_the_same_bits(ranks: RankPool, activations: str | None, tmp_path: Path) -> None:
    plain, layered = (
        ranks.run(train, tmp_path / schedule, schedule, activations)
        for schedule in ("micro_batch_major", "layer_major")
    )
    for one, other in zip(plain, layered, strict=True):
        assert one[0] == other[0]
        assert_same_tensors(one[1], other[1])
