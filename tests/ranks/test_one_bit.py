"""1-bit Adam: ranks send signs of their momenta, with the same bits in every placement and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.oracle import assert_same, small_pieces
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool
from tests.ranks.test_ranks_replicas import Trained, train_and_look, train_in_pieces

MEMORY, DISK, HOST = ("none", "none"), ("nvme", "nvme"), ("cpu", "cpu")
PARAMS = (("freeze_step", 2), ("weight_decay", 0.01))
JOB = JOBS["gpt2"]._replace(steps=5, lr=3e-4, shard_size=1, stage=1, optimizer="OneBitAdam", params=PARAMS)


def test_same_bits_in_every_placement(ranks: RankPool, tmp_path: Path) -> None:
    memory = ranks.run(train_and_look, JOB, MEMORY, tmp_path / "memory")
    disk = ranks.run(train_in_pieces, JOB, tmp_path / "disk")
    for one, other in zip(memory, disk, strict=True):
        assert_same(one.result, other.result, "placements")
        assert one.checksums == other.checksums
