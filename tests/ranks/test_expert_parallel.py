"""Ranks with batches of their own that own whole experts of each layer train as one rank with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import rounding_bounds
from tests.support.oracle import Job, Result, assert_same
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_pool import RankPool, train

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def own_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of this rank's rows of the batch."""
    return tp.row_loss(model, step, micro, 1)


JOB = Job(tp.mixture, own_loss, steps=2, accumulation=2, clip=0.05, lr=3e-4, experts=2)


def train_in_memory_and_on_disk(job: Job, folder: Path) -> Result:
    first = train(job, MEMORY, folder / "memory")
    assert_same(first, train(job, DISK, folder / "disk", device_memory=128 << 10), "disk")
    return first


@pytest.mark.numeric
def test_two_ranks_that_own_half_of_the_experts_equal_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    alone = train(JOB._replace(experts=1), DISK, tmp_path / "one")
    found = ranks.run(train_in_memory_and_on_disk, JOB, tmp_path / "two")
    assert_same(found[0], found[1], "the two ranks")
    rounding_bounds.same_training(found[0], alone, JOB, reordered=True)
