"""On two ranks the caller of a boundary changes no bit, and ranks that disagree get an error."""

from __future__ import annotations

from pathlib import Path

import torch

from offload.errors import UsageError
from tests.micro_batches.test_gradient_accumulation import as_accelerate, as_ddp, counted
from tests.support import models
from tests.support.oracle import assert_same_tensors, weights_of
from tests.support.ranks.rank_pool import RankPool, start

JOB = models.MIXTURE._replace(accumulation=4)
LOOPS = {"counted": counted, "accelerate": as_accelerate, "ddp": as_ddp}


def train(folder: Path, loop: str) -> tuple[float | None, int, int, dict[str, torch.Tensor]]:
    engine = start(JOB, ("nvme", "nvme"), folder)
    for step in range(2):
        LOOPS[loop](engine, JOB, step)
    found = engine.get_global_grad_norm(), engine.micro_steps, engine.global_samples, weights_of(engine)
    engine.destroy(remove=True)
    return found


def clip_otherwise(folder: Path) -> str:
    engine = start(JOB, ("none", "none"), folder)
    engine.clip_grad_norm_(1.0 + engine.global_rank)
    try:
        counted(engine, JOB, 0)
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_two_ranks_have_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    found = {loop: ranks.run(train, tmp_path / loop, loop) for loop in LOOPS}
    for loop, of_ranks in found.items():
        for mine, first in zip(of_ranks, found["counted"], strict=True):
            assert mine[:3] == first[:3] and mine[1:3] == (8, 16), loop
            assert_same_tensors(mine[3], first[3], loop)


def test_different_clips_on_ranks_are_an_error(ranks: RankPool, tmp_path: Path) -> None:
    assert all("settings" in text for text in ranks.run(clip_otherwise, tmp_path))
