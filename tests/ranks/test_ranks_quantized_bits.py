"""Whole runs of ranks that send codes of 8 bits have the same bits in every tier, resumed and in every replica."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import offload
from tests.ranks.int8_collectives import ALL, DISK, HOST, JOB, MEMORY
from tests.ranks.test_ranks_killed import Run
from tests.ranks.test_ranks_overlap import train_late
from tests.ranks.test_ranks_replicas import train_and_look as train_and_sum
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, weights_of
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, pool, start, train


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks."""
    with pool(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("name", "stage", "accumulation", "dtype"),
    [("gpt2", 3, 2, "fp32"), ("gpt2", 1, 3, "bf16"), ("adapters", 2, 1, "bf16")],
)
def test_tiers_and_overlap_change_no_bit(
    name: str, stage: int, accumulation: int, dtype: str, ranks: RankPool, tmp_path: Path
) -> None:
    job = JOBS[name]._replace(steps=2, stage=stage, accumulation=accumulation, dtype=dtype, quantized=ALL)
    at_once = ranks.run(train, job._replace(overlap=False), MEMORY, tmp_path / "at once")
    beside = ranks.run(train_late, job._replace(overlap=True), DISK, tmp_path / "beside")
    exact = ranks.run(train, job._replace(quantized=""), HOST, tmp_path / "exact")
    for one, other in zip(at_once, beside, strict=True):
        assert_same(one, other)
    assert at_once[0].losses != exact[0].losses
    assert at_once[0].losses == pytest.approx(exact[0].losses, rel=0.02)


def in_turns(job: Job, placement: tuple[str, str], folder: Path) -> Result:
    engine = start(job, placement, folder, schedule="layer_major")
    losses, norms = [], []
    for step in range(job.steps):
        losses += map(float, engine.accumulate(range(job.accumulation), functools.partial(job.loss, engine, step)))
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return Result(losses, norms, weights)


def test_micro_batches_that_take_turns_send_codes_of_their_sum(ranks: RankPool, tmp_path: Path) -> None:
    """From the second step on, so the tiers alone are compared."""
    job = JOB._replace(steps=3, accumulation=2, quantized=ALL)
    for one, other in zip(
        ranks.run(in_turns, job, MEMORY, tmp_path / "memory"),
        ranks.run(in_turns, job, DISK, tmp_path / "disk"),
        strict=True,
    ):
        assert_same(one, other)


def by_a_checkpoint(job: Job, folder: Path) -> tuple[Result, Result]:
    """Returns the rest of a run, and the same after a load into a new engine."""

    def rest(engine: offload.Engine) -> Result:
        losses, norms = [], []
        for step in range(1, 3):
            loss = job.loss(engine, step, 0)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights = weights_of(engine)
        engine.destroy(remove=True)
        return Result(losses, norms, weights)

    engine = start(job, DISK, folder / "one")
    engine.backward(job.loss(engine, 0, 0))
    engine.step()
    engine.save_checkpoint(str(folder / "saved"))
    unbroken = rest(engine)
    other = start(job._replace(seed=1), HOST, folder / "two")
    other.load_checkpoint(str(folder / "saved"))
    return unbroken, rest(other)


def test_a_checkpoint_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    for unbroken, loaded in ranks.run(by_a_checkpoint, JOB._replace(dtype="bf16", quantized=ALL), tmp_path):
        assert_same(unbroken, loaded)


@pytest.mark.slow
def test_killed_and_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """Rank 1 dies when it is about to commit step 2."""
    job = JOBS["gpt2"]._replace(steps=3, dtype="bf16", quantized=ALL)
    unbroken = Run(tmp_path / "unbroken", job=job)
    unbroken.end()
    Run(tmp_path / "run", dies=(1, 2), job=job).end()
    again = Run(tmp_path / "run", job=job)
    again.end()
    assert again.resumed() in ([1, 1], [2, 2])
    losses = {step: loss for step, loss, _ in unbroken.steps()}
    assert {step: loss for step, loss, _ in again.steps()} == losses
    expected = torch.load(unbroken.log / "weights0", weights_only=True)
    assert_same_tensors(torch.load(again.log / "weights0", weights_only=True), expected)


@pytest.mark.works("Several ranks", "int8 codes beside replicas of shards (`mics_shard_size`)", "right")
@pytest.mark.parametrize("shard_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_replicas_stay_equal(shard_size: int, four: RankPool, tmp_path: Path) -> None:
    """Each adds up the same codes of all replicas' sums, in the same order."""
    job = JOB._replace(shard_size=shard_size, accumulation=2, quantized=ALL)
    memory = four.run(train_and_sum, job._replace(overlap=False), MEMORY, tmp_path / "memory")
    disk = four.run(train_and_sum, job._replace(overlap=True), DISK, tmp_path / "disk")
    for rank, (result, checksums) in enumerate(memory):
        assert_same(result, disk[rank].result)
        assert checksums == memory[rank % shard_size].checksums
    exact = four.run(train, job._replace(quantized=""), MEMORY, tmp_path / "exact")
    assert memory[0].result.losses != exact[0].losses
    assert memory[0].result.losses == pytest.approx(exact[0].losses, rel=0.02)


def test_one_rank_sends_nothing_and_keeps_every_bit(tmp_path: Path) -> None:
    exact = train(JOB, MEMORY, tmp_path)
    assert_same(train(JOB._replace(quantized=ALL), MEMORY, tmp_path), exact)
