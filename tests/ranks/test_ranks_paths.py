"""Ranks may use other modules, look or save alone: nobody waits for ever, and all have the same weights."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import EngineFailed, RankError
from tests.support import rounding_bounds
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import Job, Result, assert_same
from tests.support.ranks.rank_jobs import JOBS, rows_loss
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

DISK = ("nvme", "nvme")


# -- different paths ----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer whose experts are units of their own; each rank goes through others, in another order."""

    def __init__(self, paths: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 61)
        self.paths = paths

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for expert in self.paths[rank_and_size()[0]]:
            hidden = hidden + self.experts[expert](hidden)
        return self.head(hidden)


def one_path() -> nn.Module:
    return Experts(((0, 1, 2, 3), (0, 1, 2, 3)))


def other_experts() -> nn.Module:
    return Experts(((0, 2), (1, 2)))


def other_order() -> nn.Module:
    return Experts(((0, 1, 2), (2, 0, 3)))


class Parts(nn.Module):
    """A block, which is one unit; each rank goes through other parts of it."""

    def __init__(self) -> None:
        super().__init__()
        # Names of their own: the modules of a list would be units.
        self.part_0, self.part_1, self.part_2, self.part_3 = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number in ((0, 2, 3), (1, 3))[rank_and_size()[0]]:
            hidden = hidden + self.get_submodule(f"part_{number}")(hidden)
        return hidden


def other_parts() -> nn.Module:
    """A rank has no gradients of parts at the start of a unit, in it, and at its end: others have used the memory."""
    return nn.Sequential(nn.Embedding(61, 64), Parts(), Parts(), Parts(), nn.Linear(64, 61))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [one_path, other_experts, other_order])
@pytest.mark.works("Several ranks", "experts that only some ranks use, in any order", "right")
@pytest.mark.numeric
def test_ranks_may_use_different_modules(model: Any, ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(train, Job(model, rows_loss, steps=4), DISK, tmp_path)
    assert_same(one, other)
    plain = train_plainly(Job(model, rows_loss, steps=4))
    rounding_bounds.same_training(one, plain, Job(model, rows_loss, steps=4), reordered=True)


@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.numeric
def test_ranks_may_use_different_parts_of_a_unit(stage: int, ranks: RankPool, tmp_path: Path) -> None:
    job = Job(other_parts, rows_loss, steps=3, accumulation=1 + (stage == 1), stage=stage)
    one, other = ranks.run(train, job, DISK, tmp_path)
    assert_same(one, other)
    rounding_bounds.same_training(one, train_plainly(job), job, reordered=True)


def train_plainly(job: Job) -> Result:
    """Both ranks' losses in one process, of ordinary PyTorch."""
    torch.manual_seed(job.seed)
    model = job.model()
    decayed = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay)
    losses, norms = [], []
    try:
        for step in range(job.steps):
            total = torch.zeros(())
            for rank, micro in itertools.product(range(2), range(job.accumulation)):
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
                total = total + job.loss(model, step, micro) / (2 * job.accumulation)
            total.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.clip)))
            decayed.step()
            decayed.zero_grad()
            losses.append(float(total.detach()))
    finally:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    return Result(losses, norms, model.state_dict())


def evaluate_alone(folder: Path) -> tuple[list[float], int]:
    """Rank 0 looks at weights and runs the model by itself between steps."""
    job = JOBS["gpt2"]._replace(steps=4)
    engine = start(job, DISK, folder)
    losses, seen = [], 0
    for step in range(job.steps):
        loss = job.loss(engine, step, 0)
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(float(loss.detach())))
        if engine.global_rank == 0:
            with torch.no_grad():
                job.loss(engine, 100, 0)
            seen += sum(value.numel() for value in engine.module.state_dict().values())
    engine.destroy(remove=True)
    return losses, seen


@pytest.mark.works("Several ranks", "evaluation, `state_dict()` on one rank alone", "right")
def test_one_rank_may_read_weights_alone(ranks: RankPool, tmp_path: Path) -> None:
    (losses, seen), (same, nothing) = ranks.run(evaluate_alone, tmp_path / "alone")
    assert losses == same and seen > 0 and nothing == 0
    assert losses == ranks.run(train, JOBS["gpt2"]._replace(steps=4), DISK, tmp_path / "never")[0].losses


def look_while_others_update(folder: Path) -> float:
    """Rank 0 takes the weights at once after a step, which rank 1, whose requests are late, has not updated yet."""
    job = JOBS["gpt2"]._replace(steps=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank_and_size()[0] == 1:
            use_queue(patch, lambda: LateQueue(0, 0.05))
        engine = start(job, DISK, folder)
    engine.backward(job.loss(engine, 0, 0))
    engine.step()
    if engine.global_rank == 0:
        engine.module.state_dict()
    engine.mean(0.0)
    mean = engine.mean(float(engine.global_rank))  # to serve others has left nothing half done
    engine.destroy(remove=True)
    return mean


def test_a_rank_that_serves_others_waits_for_its_own_updates(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(look_while_others_update, tmp_path) == [0.5, 0.5]


def save_at_the_end(folder: Path) -> int:
    """Rank 0 takes the weights while rank 1 is closing its engine already; a loop with `zero_grad` in it."""
    job = JOBS["gpt2"]._replace(steps=2)
    engine = start(job, DISK, folder)
    for step in range(job.steps):
        engine.zero_grad()
        engine.backward(job.loss(engine, step, 0))
        engine.step()
    seen = 0
    if engine.global_rank == 0:
        time.sleep(0.3)
        seen = sum(value.numel() for value in engine.module.state_dict().values())
    engine.destroy(remove=True)
    return seen


@pytest.mark.works("Several ranks", "`torch.save(state_dict())` on one rank before the end", "right")
def test_one_rank_may_save_while_others_close(ranks: RankPool, tmp_path: Path) -> None:
    seen, nothing = ranks.run(save_at_the_end, tmp_path)
    assert seen > 0 and nothing == 0


def late_zero_grad(folder: Path) -> list[float]:
    """Rank 0 evaluates, serves rank 1's whole next micro-batch meanwhile, and then calls `zero_grad` for itself."""
    job = JOBS["gpt2"]._replace(steps=3)
    engine = start(job, DISK, folder)
    norms = []
    for step in range(job.steps):
        if engine.global_rank == 0 and step:
            engine.module.state_dict()
        engine.zero_grad()
        engine.backward(job.loss(engine, step, 0))
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    engine.destroy(remove=True)
    return norms


def test_zero_grad_leaves_what_others_have_given(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(late_zero_grad, tmp_path / "late")
    assert one == other == ranks.run(train, JOBS["gpt2"]._replace(steps=3), DISK, tmp_path / "plain")[0].norms


def interrupted(folder: Path) -> str:
    """A Ctrl-C while a rank waits for the others, which the user catches."""
    rank, _ = rank_and_size()
    job = JOBS["gpt2"]
    engine = start(job, DISK, folder)
    message = ""
    try:
        engine.backward(job.loss(engine, 0, 0))
        if rank == 0:
            time.sleep(1.5)
        else:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            engine.step()
        except KeyboardInterrupt:
            engine.step()
        job.loss(engine, 1, 0)
    except (RankError, EngineFailed) as error:
        message = str(error)
    finally:
        with contextlib.suppress(RankError):
            engine.destroy()
    return message


def test_an_interrupt_between_ranks_ends_the_run_on_all(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(interrupted, tmp_path)
    assert re.search(r"rank 1 \(process .*\) has ended", one)
    assert "stopped" in other
