"""Ranks that use the same units in the same order agree once for all gathers of a pass, and may leave the path."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload.engine.distributed.communication import Communication
from tests.support import rounding_bounds
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, trained, weights_of
from tests.support.rank_jobs import JOBS, rows_loss
from tests.support.rank_pool import RankPool, rank_and_size, start

ROOM = "64MiB"
"""On the device for all units of each model here."""
DISK, RAM = ("nvme", "nvme"), ("cpu", "cpu")


def sent_by_step(job: Job, folder: Path, scatter: bool = False, **options: Any) -> tuple[list[Communication], Result]:
    """Trains, and returns what each step sent; `scatter` gives each rank's arena an order of its own."""
    engine = start(job, RAM, folder, device_memory=ROOM, **options)
    if scatter:
        engine._core.components.pager.arena.space.scatter = random.Random(rank_and_size()[0])
    counts = [engine.communication()]
    losses, norms = [], []
    for step in range(job.steps):
        loss = 0.0
        for micro in range(job.accumulation):
            part = job.loss(engine, step, micro)
            engine.backward(part)
            engine.step()
            loss += float(part.detach()) / job.accumulation
        losses.append(loss)
        norms.append(engine.get_global_grad_norm() or 0.0)
        counts.append(engine.communication())
    weights = weights_of(engine)
    engine.destroy(remove=True)
    sent = [after.since(before) for before, after in itertools.pairwise(counts)]
    return sent, Result(losses, norms, weights)


@pytest.mark.parametrize("options", [{}, {"scatter": True}])
def test_a_recorded_pass_has_one_round_for_all_its_gathers(
    options: dict[str, Any], ranks: RankPool, tmp_path: Path
) -> None:
    job = JOBS["gpt2"]._replace(steps=3)
    for sent, _ in ranks.run(sent_by_step, job, tmp_path, *options.values()):
        units = sent[-1].weights.collectives
        # The first step records the order, and asks at each use and after each gather.
        assert sent[0].agreement.collectives > 3 * units
        for step in sent[1:]:
            assert step.weights.collectives == sent[0].weights.collectives, "each unit is gathered once"
            # One for all gathers, one for each reduction, and one for the step.
            assert step.agreement.collectives == 1 + step.gradients.collectives + 1


def train_in(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    engine = start(job, placement, folder, **options)
    result = trained(engine, job)
    engine.destroy(remove=True)
    return result


@pytest.mark.parametrize("name", ["gpt2", "mixture"])
def test_bits_are_those_of_a_round_for_each_use(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Where units come and go each use is a round."""
    job = JOBS[name]._replace(steps=4, dtype="bf16", accumulation=2)
    expected = ranks.run(train_in, job, DISK, tmp_path / "rounds")
    for mine, other in zip(ranks.run(sent_by_step, job, tmp_path / "series"), expected, strict=True):
        assert_same_tensors(mine[1].weights, other.weights)


# -- other paths --------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Layers of which each rank leaves some out, and passes some in another order, from the fourth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.head = nn.Linear(64, 61)
        self.forwards = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in PATHS[rank_and_size()[0] if self.forwards in (3, 5) else 2]:
            hidden = hidden + self.layers[layer](hidden)
        self.forwards += 1
        return self.head(hidden)


PATHS = ((0, 1, 3), (1, 4, 2, 0), (0, 1, 2, 3))
"""Of rank 0, of rank 1, and of both."""
BRANCHING = Job(Branching, rows_loss, steps=8)


def train_alone() -> Result:
    """Returns what both ranks' losses give one process of plain PyTorch."""
    torch.manual_seed(BRANCHING.seed)
    model = Branching()
    adamw = torch.optim.AdamW(model.parameters(), lr=BRANCHING.lr, weight_decay=BRANCHING.weight_decay)
    losses, norms = [], []
    with pytest.MonkeyPatch.context() as patch:
        for step in range(BRANCHING.steps):
            parts = []
            for rank in range(2):
                patch.setenv("RANK", str(rank))
                patch.setenv("WORLD_SIZE", "2")
                model.forwards = step
                parts.append(BRANCHING.loss(model, step, 0) / 2)
            total = parts[0] + parts[1]
            total.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), BRANCHING.clip)))
            adamw.step()
            adamw.zero_grad()
            losses.append(float(total.detach()))
    return Result(losses, norms, model.state_dict())


@pytest.mark.works("Several ranks", "a step in which a rank leaves the path of the steps before", "right")
@pytest.mark.numeric
def test_a_rank_may_leave_the_path_in_any_step(ranks: RankPool, tmp_path: Path) -> None:
    """A unit that only one rank uses, one that nobody used before, and gathers in another order."""
    expected = train_alone()
    (sent, one), (_, other) = ranks.run(sent_by_step, BRANCHING, tmp_path)
    assert_same_tensors(one.weights, other.weights)
    means = [sum(pair) / 2 for pair in zip(one.losses, other.losses, strict=True)]
    both = Result(means, one.norms, one.weights)
    rounding_bounds.same_training(both, expected, BRANCHING, reordered=True)
    rounds = [step.agreement.collectives - step.gradients.collectives for step in sent]
    assert rounds[2] == 2 and rounds[3] > 2, "the third step follows a series, the fourth leaves it"


def meet_in_between(folder: Path) -> list[float]:
    """Returns losses over all ranks, with a barrier of the user's behind each layer."""
    job = BRANCHING._replace(steps=3)
    engine = start(job, RAM, folder, device_memory=ROOM)
    engine._core.components.pager.arena.space.scatter = random.Random(rank_and_size()[0])
    for layer in engine.module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_: dist.barrier())
            layer.register_full_backward_hook(lambda *_: dist.barrier())
    losses = []
    for step in range(job.steps):
        engine.module.forwards = 0  # on one path
        loss = job.loss(engine, step, 0)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            dist.all_reduce(total := job.loss(engine, step, 1).detach().clone())
        losses.append(float(total))
    engine.destroy(remove=True)
    return losses


def test_collectives_of_the_users_own_within_a_series(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(meet_in_between, tmp_path)
    assert one == other and len(one) == 6


def evaluate_alone(folder: Path, alone: bool) -> Result:
    """Rank 0 evaluates, reads weights, or runs half a forward by itself, while rank 1 goes on."""
    job = JOBS["gpt2"]._replace(steps=6)
    engine = start(job, RAM, folder, device_memory=ROOM)
    losses, norms = [], []
    for step in range(job.steps):
        loss = job.loss(engine, step, 0)
        if alone and engine.global_rank == 0 and step == 3:
            engine.module.state_dict()
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(float(loss.detach())))
        norms.append(engine.get_global_grad_norm() or 0.0)
        if alone and engine.global_rank == 0 and step in (2, 4):
            with torch.no_grad():
                if step == 2:
                    engine.module.transformer.wte(torch.zeros(1, 3, dtype=torch.int64))
                job.loss(engine, 100, 0)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return Result(losses, norms, weights)


def test_one_rank_may_use_units_alone_within_a_series(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(evaluate_alone, tmp_path / "together", False)[0]
    for found in ranks.run(evaluate_alone, tmp_path / "alone", True):
        assert_same(found, expected)
