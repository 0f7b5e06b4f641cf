"""Training by the engine is training by PyTorch: the same losses, norms and weights as the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import models, rounding_bounds
from tests.support.oracle import PlainEngine, plain_loop, run, start, train_step
from tests.support.param_states import (
    GPT2,
    MIXTURE,
    STATES,
    Found,
    everything,
    everything_of_torch,
    same_but_for_roundings,
)

pytestmark = pytest.mark.numeric

DISK = ("nvme", "nvme")


def one_block() -> nn.Module:
    """Of gpt2-tiny: as wide, less deep."""
    model = models.gpt2_tiny()
    model.transformer.h = model.transformer.h[:1]
    return model


def test_fp32_equals_pytorch(tmp_path: Path) -> None:
    """Steps of a block of gpt2-tiny: lr 1e-3, decay 0.1, accumulation 4, and the clip acts at every step."""
    job = models.TINY._replace(model=one_block, steps=4)
    plain = plain_loop(job)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    rounding_bounds.same_training(run(job, DISK, tmp_path), plain, job)


def test_bf16_follows_the_loop_with_fp32_masters(tmp_path: Path) -> None:
    """Eight steps of a small GPT-2: some processors multiply in bf16 at a hundredth of what others do.

    The masters agree to a rounding each step (the clip's norm is summed in fp64 here and in fp32 there). One flipped
    rounding of a weight changes a gradient by 2**-9, and Adam's direction where it is noise.
    """
    job = GPT2._replace(dtype="bf16", steps=8, accumulation=4, clip=0.5)
    plain = plain_loop(job)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    rounding_bounds.same_training(run(job, DISK, tmp_path), plain, job)


def test_a_step_in_bf16_has_the_masters_and_moments_of_fp32(tmp_path: Path) -> None:
    """From the same state gradients are the same: a step is off by fp32's roundings, and those of bf16 hide nothing."""
    job = GPT2._replace(dtype="bf16", accumulation=2, clip=0.5)
    engine, plain = start(job, DISK, tmp_path), PlainEngine(job)
    for step in range(3):
        train_step(engine, job, step)
        train_step(plain, job, step)
        found = everything(engine.module)
        same_but_for_roundings(found, everything_of_torch(plain), job._replace(dtype="fp32", steps=1))
        _copy(found, plain)
    engine.destroy(remove=True)


def _copy(found: Found, plain: PlainEngine) -> None:
    """Give the plain loop the states that were found."""
    with torch.no_grad():
        for (name, _), master in zip(plain.module.named_parameters(), plain._masters, strict=True):
            master.copy_(found[f"{name} master"])
            for state in STATES:
                plain.optimizer.state[master][state].copy_(found[f"{name} {state}"])
    plain._round()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tied_frozen_unused_and_scalar_parameters(dtype: str, tmp_path: Path) -> None:
    job = MIXTURE._replace(dtype=dtype)
    plain = plain_loop(job)
    mine = run(job, DISK, tmp_path)
    rounding_bounds.same_training(mine, plain, job)
    torch.manual_seed(job.seed)
    start = job.model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).state_dict()
    for name in ("blocks.0.0.weight", "blocks.1.0.weight", "unused.weight", "unused.bias"):
        assert torch.equal(mine.weights[name], start[name]), f"{name} must not change"
    assert not torch.equal(mine.weights["blocks.1.0.bias"], start["blocks.1.0.bias"])


def test_dropout_draws_what_pytorch_draws(tmp_path: Path) -> None:
    job = models.DROPOUT._replace(steps=3)
    rounding_bounds.same_training(run(job, DISK, tmp_path), plain_loop(job), job)
