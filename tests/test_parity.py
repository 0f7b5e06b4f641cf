"""Training by the engine is training by PyTorch: the same losses, norms and weights as the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import bounds, models
from tests.oracle import plain_loop, run

DISK = ("nvme", "nvme")


def test_fp32_equals_pytorch(tmp_path: Path) -> None:
    """Steps of gpt2-tiny: lr 1e-3, decay 0.1, accumulation 4, and the clip acts at every step."""
    job = models.TINY
    plain = plain_loop(job)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    bounds.same_training(run(job, DISK, tmp_path), plain, job)


def test_bf16_follows_the_loop_with_fp32_masters(tmp_path: Path) -> None:
    """20 steps of a small GPT-2: some processors multiply in bf16 at a hundredth of what others do.

    The masters agree to a rounding each step (the clip's norm is summed in fp64 here and in fp32 there). One flipped
    rounding of a weight changes a gradient by 2**-9, and Adam's direction where it is noise.
    """
    job = models.GPT2._replace(dtype="bf16", steps=20, accumulation=4, clip=0.5)
    plain = plain_loop(job)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    bounds.same_training(run(job, DISK, tmp_path), plain, job)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tied_frozen_unused_and_scalar_parameters(dtype: str, tmp_path: Path) -> None:
    job = models.MIXTURE._replace(dtype=dtype)
    plain = plain_loop(job)
    mine = run(job, DISK, tmp_path)
    bounds.same_training(mine, plain, job)
    torch.manual_seed(job.seed)
    start = job.model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).state_dict()
    for name in ("blocks.1.0.weight", "blocks.2.0.weight", "unused.weight", "unused.bias"):
        assert torch.equal(mine.weights[name], start[name]), f"{name} must not change"
    assert not torch.equal(mine.weights["blocks.2.0.bias"], start["blocks.2.0.bias"])


def test_dropout_draws_what_pytorch_draws(tmp_path: Path) -> None:
    job = models.DROPOUT
    bounds.same_training(run(job, DISK, tmp_path), plain_loop(job), job)
