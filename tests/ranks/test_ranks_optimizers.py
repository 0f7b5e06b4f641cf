"""Two ranks in fp16, and with every optimizer, have the same bits in every placement, and refuse the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import models, rounding_bounds
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    small_pieces,
    train_step,
    weights_of,
)
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import JOBS, message_of_a_failing_drive
from tests.support.ranks.rank_pool import train

DISK = ("nvme", "nvme")
PLACES = (("none", "none"), ("nvme", "nvme"), ("cpu", "nvme"))
MIXTURE = JOBS["mixture"]._replace(model=models.Mixture, steps=3)
TRIED = {
    "fp16": MIXTURE._replace(dtype="fp16"),
    "lion, bf16": MIXTURE._replace(dtype="bf16", optimizer="Lion", lr=1e-4),
    "momentum, fp16": MIXTURE._replace(dtype="fp16", optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
    "sgd": MIXTURE._replace(optimizer="SGD", lr=0.05),
    "adagrad": MIXTURE._replace(optimizer="Adagrad", lr=1e-2),
    "lamb": MIXTURE._replace(optimizer="Lamb", lr=1e-2),
    "lamb, bf16": MIXTURE._replace(optimizer="Lamb", lr=1e-2, dtype="bf16"),
    "lamb, fp16": MIXTURE._replace(optimizer="Lamb", lr=1e-2, dtype="fp16"),
}
LAMB = TRIED["lamb, bf16"]._replace(accumulation=2, steps=5)


def everywhere(job: Job, folder: Path) -> Result:
    results = [train(job, placement, folder / "-".join(placement)) for placement in PLACES]
    for each in results[1:]:
        assert_same(results[0], each, "placements")
    return results[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TRIED)
@pytest.mark.numeric
def test_same_bits_in_some_placements(name: str, ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(everywhere, TRIED[name], tmp_path)
    assert_same(one, other, "ranks")
    alone = train(TRIED[name], ("nvme", "nvme"), tmp_path / "alone")
    rounding_bounds.same_training(one, alone, TRIED[name], reordered=True)


def in_small_pieces(folder: Path) -> tuple[Result, Result]:
    """With memory for all, and with so little that units stream and gradients wait on disk."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        least = least_host_memory(LAMB, folder)
        return train(LAMB, DISK, folder / "roomy"), train(LAMB, DISK, folder / "tight", host_memory=least)


def uneven() -> nn.Module:
    """The ratio of one rank's part of a matrix alone would be far from that of the whole."""
    model = LAMB.model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[: len(parameter) // 2] *= 8
    return model


UNEVEN = LAMB._replace(model=uneven, dtype="fp32")


@pytest.mark.numeric
def test_lamb_weighs_parameters_that_are_cut(ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    """Each rank has a part of each large parameter, in many tiles: the ratio is that of the whole parameter."""
    alone = train(UNEVEN, DISK, tmp_path / "alone")
    for result in ranks.run(train, UNEVEN, DISK, tmp_path / "two"):
        rounding_bounds.same_training(result, alone, UNEVEN, reordered=True)
    for roomy, tight in ranks.run(in_small_pieces, tmp_path):
        assert_same(roomy, tight, "memory")


def in_two_parts(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    norms = []
    for resume, steps in (("never", range(2)), ("must", range(2, LAMB.steps))):
        engine = rank_pool.start(LAMB, DISK, folder, resume=resume)
        for step in steps:
            train_step(engine, LAMB, step)
            norms.append(engine.get_global_grad_norm())
        weights = weights_of(engine)
        engine.destroy(remove=steps.stop == LAMB.steps)
    return norms, weights


@pytest.mark.slow
def test_lamb_resumes_with_the_same_bits(ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    unbroken, _ = ranks.run(train, LAMB, DISK, tmp_path / "whole")
    for norms, weights in ranks.run(in_two_parts, tmp_path / "parts"):
        assert norms == unbroken.norms
        assert_same_tensors(weights, unbroken.weights)


def refused_read(folder: Path) -> str:
    """The drive of one rank fails while parameters are weighed."""
    return message_of_a_failing_drive(rank_pool.start(LAMB, DISK, folder), LAMB, "read")


def test_a_drive_that_fails_while_lamb_weighs(ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(refused_read, tmp_path)
    assert "/drive/data" in other, other
    assert one.startswith("RankError"), one
