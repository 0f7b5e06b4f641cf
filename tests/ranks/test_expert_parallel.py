"""Ranks with batches of their own that own whole experts of each layer train as one rank with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload.errors import StoreError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def own_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of this rank's rows of the batch."""
    return tp.row_loss(model, step, micro, 1)


JOB = Job(tp.mixture, own_loss, steps=2, accumulation=2, clip=0.05, lr=3e-4, experts=2)


def train_in_memory_and_on_disk(job: Job, room: int, folder: Path) -> Result:
    first = train(job, MEMORY, folder / "memory")
    assert_same(first, train(job, DISK, folder / "disk", device_memory=room << 10), "disk")
    return first


@pytest.mark.numeric
def test_two_ranks_that_own_half_of_the_experts_equal_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    alone = train(JOB._replace(experts=1), DISK, tmp_path / "one")
    found = ranks.run(train_in_memory_and_on_disk, JOB, 128, tmp_path / "two")
    assert_same(found[0], found[1], "the two ranks")
    rounding_bounds.same_training(found[0], alone, JOB, reordered=True)


def stop_and_resume(job: Job, folder: Path) -> tuple[Result, str]:
    """Returns an unbroken run, and the message to a start of its run with another number of owners."""
    unbroken = train(job, DISK, folder / "unbroken")
    engine = start(job, DISK, folder / "run")
    tp.steps(engine, job, 1, 0, 1)
    engine.destroy()
    with pytest.raises(StoreError) as other:
        start(job._replace(experts=1), DISK, folder / "run", resume="auto")
    engine = start(job, DISK, folder / "run", resume="must")
    rest = tp.steps(engine, job, 1, 1, job.steps)
    whole = engine.save_pretrained(folder / "whole")
    engine.save_checkpoint(folder / "checkpoint")
    engine.destroy(remove=True)
    assert rest.losses == unbroken.losses[1:] and rest.norms == unbroken.norms[1:]
    assert_same_tensors(rest.weights, unbroken.weights)
    return unbroken, str(other.value)


def test_resume(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(stop_and_resume, JOB, tmp_path)
    print(found[0][1])
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert_same_tensors({n: v for n, v in model.state_dict().items()}, found[0][0].weights)
    engine = start(JOB._replace(experts=1), DISK, tmp_path / "one")
    print(engine.load_checkpoint(tmp_path / "checkpoint"))
    assert_same_tensors(engine.module.state_dict(), found[0][0].weights)
    engine.destroy(remove=True)


def uneven(job, folder):
    engine = start(job, DISK, folder)
    losses = []
    rank, size = rank_and_size()
    for _ in range(3):
        ids = torch.full((1, 2 + rank), 5)
        loss = models.token_loss(engine(ids).logits, ids)
        engine.backward(loss)
        losses.append(engine.mean(loss.detach()))
        engine.step()
    sent = engine.communication()
    engine.destroy(remove=True)
    return losses, sent


def one_expert():
    return tp.mixture(chosen=1)


def test_no_token(ranks, tmp_path):
    for l, s in ranks.run(uneven, JOB._replace(model=one_expert, accumulation=1), tmp_path):
        print(l, s)
    assert 0


@pytest.mark.parametrize("case", [dict(experts=4), dict(experts=2), dict(experts=2, stage=1), dict(experts=2, stage=2, overlap=True,bucket=10**6)])
def test_four(case, four: RankPool, tmp_path: Path) -> None:
    alone = train(JOB._replace(experts=1), DISK, tmp_path / "one")
    found = four.run(train_in_memory_and_on_disk, JOB._replace(**case), 320 if case.get("stage")==1 else 224, tmp_path / "two")
    for f in found[1:]:
        assert_same(found[0], f, "the two ranks")
    rounding_bounds.same_training(found[0], alone, JOB, reordered=True)
