"""Ranks that use the same units in the same order agree once for all gathers of a pass, and may leave the path."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload import testing
from offload.distributed.process_group import Communication
from tests.support import rounding_bounds
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, trained, weights_of
from tests.support.ranks.rank_jobs import JOBS, rows_loss
from tests.support.ranks.rank_pool import RankPool, rank_and_size, shared_pool, start


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with shared_pool(4) as ranks:
        yield ranks


ROOM = "64MiB"
"""On the device for all units of each model here."""
DISK, RAM = ("nvme", "nvme"), ("cpu", "cpu")


def sent_by_step(job: Job, folder: Path, scatter: bool = False, **options: Any) -> tuple[list[Communication], Result]:
    """Trains, and returns what each step sent; `scatter` gives each rank's arena an order of its own."""
    engine = start(job, RAM, folder, device_memory=ROOM, **options)
    if scatter:
        testing.inspect(engine).device_arena.space.scatter = random.Random(rank_and_size()[0])
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
def test_a_recorded_step_has_one_round_for_its_gathers_and_one_for_its_reductions(
    options: dict[str, Any], ranks: RankPool, tmp_path: Path
) -> None:
    job = JOBS["gpt2"]._replace(steps=3)
    for sent, _ in ranks.run(sent_by_step, job, tmp_path, *options.values()):
        units = sent[-1].weights.collectives
        # The first step records the order, and asks at each use and after each gather.
        assert sent[0].agreement.collectives > 3 * units
        for step in sent[1:]:
            assert step.weights.collectives == sent[0].weights.collectives, "each unit is gathered once"
            assert step.gradients.collectives == units
            # One for all gathers, one for all reductions, and one for the step.
            assert step.agreement.collectives == 3


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
    """Layers of which each rank passes some, in another order, in the steps of `PATHS`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.head = nn.Linear(64, 61)
        self.step = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in PATHS.get(self.step, (TOGETHER, TOGETHER))[rank_and_size()[0]]:
            hidden = hidden + self.layers[layer](hidden)
        return self.head(hidden)


TOGETHER = (0, 1, 2, 3)
PATHS = {3: (TOGETHER, (0, 1, 3)), 5: ((0, 1, 3), (1, 4, 2, 0))}
"""Of both ranks: one leaves out a layer; later each takes another way, one through a layer that nobody has used."""


def branching_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    """Ranks take the ways of a step in its last micro-batch, the second where there are two."""
    getattr(model, "module", model).step = step if micro == 1 else -1
    return rows_loss(model, step, micro)


def branching_loss_at_once(model: Any, step: int, micro: int) -> torch.Tensor:
    getattr(model, "module", model).step = step
    return rows_loss(model, step, micro)


BRANCHING = Job(Branching, branching_loss_at_once, steps=8)
TWICE = Job(Branching, branching_loss, steps=8, accumulation=2)


def train_alone(job: Job, size: int = 2) -> Result:
    """Returns what the losses of all ranks give one process of plain PyTorch."""
    torch.manual_seed(job.seed)
    model = job.model()
    adamw = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay)
    losses, norms = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(size))
        for step in range(job.steps):
            total = torch.zeros(())
            for rank, micro in itertools.product(range(size), range(job.accumulation)):
                patch.setenv("RANK", str(rank))
                total = total + job.loss(model, step, micro) / size / job.accumulation
            total.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.clip)))
            adamw.step()
            adamw.zero_grad()
            losses.append(float(total.detach()))
    return Result(losses, norms, model.state_dict())


@pytest.mark.parametrize(
    "job",
    [
        BRANCHING,
        BRANCHING._replace(overlap=False),
        TWICE,
        TWICE._replace(stage=1),
        TWICE._replace(stage=1, overlap=True, shard_size=1),
    ],
)
@pytest.mark.works("Several ranks", "a step in which a rank leaves the path of the steps before", "right")
@pytest.mark.numeric
def test_a_rank_may_leave_the_path_in_any_step(job: Job, ranks: RankPool, tmp_path: Path) -> None:
    """Its gradients are reduced behind the series, in which it sends none, and none counts twice."""
    expected = train_alone(job)
    (sent, one), (_, other) = ranks.run(sent_by_step, job, tmp_path)
    assert_same_tensors(one.weights, other.weights)
    means = [sum(pair) / 2 for pair in zip(one.losses, other.losses, strict=True)]
    rounding_bounds.same_training(Result(means, one.norms, one.weights), expected, job, reordered=True)
    backwards = job.accumulation if job.stage == 3 else 1
    if job.overlap is not False:
        rounds = [step.agreement.collectives for step in sent]
        reductions = [step.gradients.collectives for step in sent]
        gathers = job.shard_size != 1  # whole weights are not gathered
        assert rounds[2] == 1 + gathers + backwards and rounds[3] > rounds[2], "the third step follows its series"
        assert reductions[3] > reductions[2], "the fourth leaves one of them"


class Crossed(Branching):
    """All layers on all ranks, and the last two in another order on each."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in ((0, 1, 2, 3, 4), (0, 1, 2, 4, 3))[rank_and_size()[0]]:
            hidden = hidden + self.layers[layer](hidden).tanh()
        return self.head(hidden)


@pytest.mark.numeric
def test_ranks_whose_orders_differ_keep_a_round_for_each(ranks: RankPool, tmp_path: Path) -> None:
    """Of equally large units, which no size tells apart."""
    job = Job(Crossed, branching_loss_at_once, steps=4)
    (sent, one), (_, other) = ranks.run(sent_by_step, job, tmp_path)
    assert_same_tensors(one.weights, other.weights)
    means = [sum(pair) / 2 for pair in zip(one.losses, other.losses, strict=True)]
    rounding_bounds.same_training(Result(means, one.norms, one.weights), train_alone(job), job, reordered=True)
    units = sent[0].weights.collectives
    assert all(step.agreement.collectives > 2 * units for step in sent)


# -- random paths -------------------------------------------------------------------------------------


class Wandering(Branching):
    """Layers in the order that `way` draws for the step and the rank."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in way(self.step, rank_and_size()[0]):
            hidden = hidden + self.layers[layer](hidden)
        return self.head(hidden)


def way(step: int, rank: int) -> list[int]:
    """Returns the way of all ranks, which changes after six steps, or in each fourth case one of this rank's own."""
    drawn = random.Random(1000 * step + rank)
    if step > 1 and drawn.random() < 0.25:
        return drawn.sample(range(5), drawn.randint(1, 5))
    return [0, 1, 2, 3] if step < 6 else [3, 1, 4]


WANDERING = Job(Wandering, branching_loss_at_once, steps=16)


def wander(job: Job, folder: Path, alone: bool) -> Result:
    """Trains; with `alone` each rank evaluates, reads weights and takes means between steps as it likes."""
    engine = start(job, RAM, folder, device_memory=ROOM)
    rank = engine.global_rank
    testing.inspect(engine).device_arena.space.scatter = random.Random(rank)
    drawn = random.Random(7 + rank)
    losses, norms = [], []
    for step in range(job.steps):
        loss = job.loss(engine, step, 0)
        if alone and drawn.random() < 0.2:
            engine.module.layers[drawn.randrange(5)].weight.detach().clone()
        engine.backward(loss)
        engine.step()
        if alone and drawn.random() < 0.3:
            with torch.no_grad():
                job.loss(engine, 100 + drawn.randrange(50), 0)
        losses.append(engine.mean(float(loss.detach())))
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return Result(losses, norms, weights)


@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.numeric
def test_any_paths_of_four_ranks_come_to_the_end(stage: int, four: RankPool, tmp_path: Path) -> None:
    """With uses of each rank's own between them, which change who reduces with whom, and so the order of sums."""
    job = WANDERING._replace(stage=stage)
    expected = train_alone(job, 4)
    for alone in (True, False):
        first, *others = four.run(wander, job, tmp_path / str(alone), alone)
        for other in others:
            assert_same(first, other)
        rounding_bounds.same_training(first, expected, job, reordered=True)


# -- what a series must not outrun ----------------------------------------------------------------------


def meet_in_between(folder: Path) -> list[float]:
    """Returns losses over all ranks, with a barrier of the user's behind each layer."""
    job = BRANCHING._replace(steps=3)
    engine = start(job, RAM, folder, device_memory=ROOM)
    testing.inspect(engine).device_arena.space.scatter = random.Random(rank_and_size()[0])
    for layer in engine.module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_: dist.barrier())
            layer.register_full_backward_hook(lambda *_: dist.barrier())
    losses = []
    for step in range(job.steps):
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
