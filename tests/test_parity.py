"""Training by the engine is training by PyTorch: the same losses, norms and weights as the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import models
from tests.oracle import Result, plain_loop, run

DISK = ("nvme", "nvme")


def _relative(mine: list[float], plain: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, plain, strict=True))


def _distance(mine: Result, plain: Result) -> float:
    """The 2-norm of the difference of all weights, relative to that of the weights."""
    difference = sum(float((mine.weights[n].double() - w.double()).square().sum()) for n, w in plain.weights.items())
    return float((difference / sum(float(w.double().square().sum()) for w in plain.weights.values())) ** 0.5)


def test_fp32_equals_pytorch(tmp_path: Path) -> None:
    """20 steps of gpt2-tiny: lr 1e-3, decay 0.1, accumulation 4, and the clip acts at every step."""
    job = models.TINY
    plain = plain_loop(job)
    mine = run(job, DISK, tmp_path)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    assert _relative(mine.losses, plain.losses) < 1e-5
    assert _relative(mine.norms, plain.norms) < 1e-5
    for name, weight in plain.weights.items():
        expected, found = models.without_key_bias(name, weight), models.without_key_bias(name, mine.weights[name])
        difference = float((found - expected).abs().max())
        assert difference <= 1e-5 * float(expected.abs().max()), name
    assert _distance(mine, plain) < 1e-5


def test_bf16_follows_the_loop_with_fp32_masters(tmp_path: Path) -> None:
    """bf16 keeps 8 bits, so one flipped rounding changes a gradient by 2**-9 and Adam's direction where it is noise.

    The masters agree to a rounding each step (the clip's norm is summed in fp64 here and in fp32 there). Over 20 steps
    of at most lr = 1e-3 each that stays below 1 % of the weights' norm, and the losses within bf16's own 2**-8 of a
    difference of means over 512 tokens: 1e-4.
    """
    job = models.TINY._replace(dtype="bf16")
    plain = plain_loop(job)
    mine = run(job, DISK, tmp_path)
    assert _relative(mine.losses, plain.losses) < 1e-4
    assert _relative(mine.norms, plain.norms) < 5e-3
    assert _distance(mine, plain) < 1e-2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tied_frozen_unused_and_scalar_parameters(dtype: str, tmp_path: Path) -> None:
    """Nothing in this model is noise, so bf16 too must agree to a rounding of its last bit."""
    job = models.MIXTURE._replace(dtype=dtype)
    plain = plain_loop(job)
    mine = run(job, DISK, tmp_path)
    bound = {"fp32": 1e-5, "bf16": 2**-7}[dtype]
    assert _relative(mine.losses, plain.losses) < bound
    for name, weight in plain.weights.items():
        difference = float((mine.weights[name].double() - weight.double()).abs().max())
        assert difference <= bound * float(weight.double().abs().max()), name
    torch.manual_seed(job.seed)
    start = job.model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).state_dict()
    for name in ("blocks.1.0.weight", "blocks.2.0.weight", "unused.weight", "unused.bias"):
        assert torch.equal(mine.weights[name], start[name]), f"{name} must not change"
    assert not torch.equal(mine.weights["blocks.2.0.bias"], start["blocks.2.0.bias"])


def test_dropout_draws_what_pytorch_draws(tmp_path: Path) -> None:
    job = models.DROPOUT
    assert _relative(run(job, DISK, tmp_path).losses, plain_loop(job).losses) < 1e-5
