"""On two ranks micro-batches that take turns give the bits of one after the other that add up before a reduction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.oracle import Job, accumulated_step, assert_same_tensors, weights_of
from tests.support.param_states import gpt2
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import RankPool, start


def loss_from_the_second_step_on(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns a loss whose gradients are zero in the first step, which runs one micro-batch after the other."""
    return language_rows_loss(model, step, micro) * min(step, 1)


JOB = Job(gpt2, loss_from_the_second_step_on, accumulation=4, steps=3)


def train(
    job: Job, folder: Path, schedule: str, options: dict[str, str]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start(job, ("nvme", "nvme"), folder, schedule=schedule, **options)
    losses = [accumulated_step(engine, job, step) for step in range(job.steps)]
    found = losses, weights_of(engine)
    engine.destroy(remove=True)
    return found


@pytest.mark.parametrize(("dtype", "options"), [("bf16", {}), ("fp32", {"activations": "cpu"})])
def test_two_ranks_have_the_same_bits(ranks: RankPool, dtype: str, options: dict[str, str], tmp_path: Path) -> None:
    """In stage 1 each rank has all sums; in stages 2 and 3 those of one or two units at a time, by turns."""
    job = JOB._replace(dtype=dtype)
    plain = ranks.run(train, job._replace(stage=1), tmp_path / "sums", "micro_batch_major", options)
    for stage in (2, 3):
        in_turns = ranks.run(train, job._replace(stage=stage), tmp_path / str(stage), "layer_major", options)
        for one, other in zip(plain, in_turns, strict=True):
            assert one[0] == other[0]
            assert_same_tensors(one[1], other[1])
