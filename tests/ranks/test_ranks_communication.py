"""Ranks send each other what the formulas of ZeRO say, and `communication()` counts it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from offload import testing
from offload.distributed.process_group import Communication, Sent
from tests.support.oracle import Job, Result, assert_same, trained
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, start

FP32 = 4


class Step(NamedTuple):
    """The second step of one rank."""

    sent: Communication
    measured: dict[str, float]
    """On rank 0 alone."""
    units: list[int]
    """Elements of each unit, all of which train."""
    mean: Communication
    """Sent by `engine.mean`."""


def second_step(folder: Path, stage: int, accumulation: int, schedule: str = "micro_batch_major") -> Step:
    """Trains two steps with room for all units on the device; the first records the order of uses."""
    job = JOBS["gpt2"]._replace(stage=stage, accumulation=accumulation, steps=2)
    options = {"device_memory": "64MiB", "log": str(folder / "log"), "schedule": schedule}
    engine = start(job, ("cpu", "cpu"), folder, **options)
    before = engine.communication()
    for step in range(job.steps):
        before = engine.communication()
        engine.accumulate(range(job.accumulation), functools.partial(job.loss, engine, step))
        engine.step()
    after = engine.communication()
    engine.mean(1.0)
    found = Step(
        sent=after.since(before),
        measured=dict(engine.measured),
        units=[layout.trainable_stop for layout in testing.inspect(engine).layouts],
        mean=engine.communication().since(after),
    )
    engine.destroy(remove=True)
    return found


@pytest.mark.parametrize(
    ("stage", "accumulation", "schedule", "reductions"),
    [
        (3, 1, "micro_batch_major", 1),
        (3, 4, "micro_batch_major", 4),
        (3, 4, "layer_major", 1),
        (1, 4, "micro_batch_major", 1),
    ],
)
def test_a_step_sends_what_the_formulas_of_zero_say(
    stage: int, accumulation: int, schedule: str, reductions: int, ranks: RankPool, tmp_path: Path
) -> None:
    """The volumes of ZeRO's paper (arXiv 1910.02054, section 7.2) for n ranks, where nothing is gathered twice.

    An all-gather of W bytes makes each rank send (n - 1) / n of them, and so does a reduce-scatter of G bytes, which is
    an exchange here. Weights stay on the device until the update: they are gathered once a step, not once a use.
    Gradients are reduced for each micro-batch, or, in stages 0 and 1 and where micro-batches take turns, once for each
    step.
    """
    for found in ranks.run(second_step, tmp_path, stage, accumulation, schedule):
        shard_nbytes = sum(found.units) * FP32 // 2
        assert found.sent.weights == Sent(len(found.units), shard_nbytes)
        assert found.sent.gradients == Sent(len(found.units) * reductions, shard_nbytes * reductions)
        # Statistics of the step: their length, then four numbers and a bitmap of each unit's gradients.
        assert found.sent.messages.collectives == 2
        assert found.sent.parameters == Sent()
        # One round for the mean, of seven numbers; then the value in JSON, behind its length.
        assert found.mean == Communication(agreement=Sent(1, 7 * 8), messages=Sent(2, 8 + len("1.0")))


# -- communication_data_type --------------------------------------------------------------------------

JOB = JOBS["gpt2"]._replace(steps=2, accumulation=2)


def train_in_bf16(job: Job, folder: Path, rounds: bool) -> tuple[Result, int]:
    """Trains fp32 weights; gradients are rounded to bf16 by hooks of the user, or on their way. Returns bytes sent."""
    engine = start(job, ("none", "none"), folder)
    if rounds:
        for parameter in engine.module.parameters():
            parameter.register_hook(lambda gradient: gradient.bfloat16().float())
    result = trained(engine, job)
    nbytes = engine.communication().gradients.nbytes
    engine.destroy(remove=True)
    return result, nbytes


def only_the_first_micro_batch(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return JOB.loss(model, step, micro) * (micro == 0)


def test_gradients_are_rounded_to_the_dtype_in_which_they_are_sent(ranks: RankPool, tmp_path: Path) -> None:
    """Once, from the backward into a bucket, or from a sum; the mean is that of the rounded values in fp32."""
    expected = ranks.run(train_in_bf16, JOB, tmp_path, True)
    in_bf16 = JOB._replace(sent="bf16")
    for (mine, nbytes), (other, twice) in zip(
        ranks.run(train_in_bf16, in_bf16, tmp_path, False), expected, strict=True
    ):
        assert_same(mine, other)
        assert 2 * nbytes == twice
    one = in_bf16._replace(loss=only_the_first_micro_batch)
    each = ranks.run(train_in_bf16, one, tmp_path, False)
    sums = ranks.run(train_in_bf16, one._replace(stage=1, overlap=True), tmp_path, False)
    for (mine, nbytes), (other, twice) in zip(sums, each, strict=True):
        assert_same(mine, other)
        assert 2 * nbytes == twice, "in stage 1 each step is reduced"


def test_the_record_of_a_step_has_what_rank_0_sent(ranks: RankPool, tmp_path: Path) -> None:
    first, other = ranks.run(second_step, tmp_path, 3, 1)
    total = first.sent.total
    assert (first.measured["collectives"], first.measured["sent_bytes"]) == total and total.nbytes > 0
    assert not other.measured
