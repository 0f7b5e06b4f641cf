"""In ZeRO stages 0 and 1 each rank adds up the gradients of a step's micro-batches, which are reduced once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.errors import BudgetError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, Result, accumulated_step, assert_same, assert_same_tensors, trained, weights_of
from tests.support.ranks.rank_jobs import JOBS, my_rows
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

FP32 = 4
DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
JOB = JOBS["gpt2"]._replace(stage=1, accumulation=3, steps=2, lr=3e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_a_step_equals_one_rank_and_every_placement(dtype: str, ranks: RankPool, tmp_path: Path) -> None:
    """Within the bound of the order of additions, and bit for bit."""
    job = JOB._replace(dtype=dtype)
    alone = train(job, DISK, tmp_path / "one")
    on_disk, in_memory = (ranks.run(train, job, tiers, tmp_path / tiers[0]) for tiers in (DISK, MEMORY))
    for one, other in zip(on_disk, in_memory, strict=True):
        rounding_bounds.same_training(one, alone, job, reordered=True)
        assert_same(one, other)


# -- parameters that only some micro-batches use ------------------------------------------------------

PATHS = (((0, 1), (1,), (2,)), ((1,), (2,), ()))
"""Of each rank and micro-batch. Nobody uses the last expert, and the first has no gradient in a last micro-batch."""


class Experts(nn.Module):
    """A layer whose experts are units of their own, behind a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 61)

    def forward(self, ids: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        hidden = self.embedding(ids)
        for expert in path:
            hidden = hidden + self.experts[expert](hidden)
        return self.head(hidden)


def uneven_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = my_rows(models.tokens(step, micro, (4, 16), 61))
    return models.token_loss(model(ids, PATHS[rank_and_size()[0]][micro]), ids)


UNEVEN = Job(Experts, uneven_loss, accumulation=3, steps=3)


def train_by_schedule(job: Job, schedule: str, folder: Path) -> Result:
    engine = start(job, MEMORY, folder, schedule=schedule)
    assert engine.schedule == schedule
    result = trained(engine, job, accumulated_step)
    engine.destroy(remove=True)
    return result


@pytest.mark.numeric
def test_parameters_of_some_micro_batches_and_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """As in stage 3, where each micro-batch is reduced, unless they take turns."""
    expected = ranks.run(train_by_schedule, UNEVEN, "micro_batch_major", tmp_path)
    for stage, schedule in ((0, "micro_batch_major"), (3, "layer_major")):
        found = ranks.run(train_by_schedule, UNEVEN._replace(stage=stage), schedule, tmp_path)
        for mine, other in zip(found, expected, strict=True):
            rounding_bounds.same_training(mine, other, UNEVEN, reordered=True)


# -- between micro-batches ----------------------------------------------------------------------------


def plainly(engine: offload.Engine, micro: int) -> None:
    """Does nothing."""


def some_parameters(engine: offload.Engine) -> list[nn.Parameter]:
    """Returns parameters of several units."""
    return list(engine.module.parameters())[::9]


def read(engine: offload.Engine, micro: int) -> None:
    for parameter in some_parameters(engine):
        assert offload.safe_get_full_grad(parameter) is not None


def start_over(engine: offload.Engine, micro: int) -> None:
    """Drops the gradients of the first micro-batch, once, and makes them again."""
    if micro == 0:
        engine.zero_grad()
        engine.backward(JOB.loss(engine, engine.global_steps, micro))


def replace(engine: offload.Engine, micro: int) -> None:
    """Replaces the gradients so far by what they are."""
    for parameter in some_parameters(engine):
        gradient = offload.safe_get_full_grad(parameter)
        assert gradient is not None
        offload.safe_set_full_grad(parameter, gradient)


def train_with(between: Callable[[offload.Engine, int], None], folder: Path) -> Result:
    """Trains the job in the way of DDP: all micro-batches but the last of a step are in `no_sync`."""
    engine = start(JOB, MEMORY, folder)
    losses, norms = [], []
    for step in range(JOB.steps):
        before = engine.communication()
        with engine.no_sync():
            for micro in range(JOB.accumulation - 1):
                engine.backward(JOB.loss(engine, step, micro))
                if between is plainly:
                    assert engine.communication().gradients == before.gradients
                between(engine, micro)
        loss = JOB.loss(engine, step, JOB.accumulation - 1)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return Result(losses, norms, weights)


@pytest.mark.numeric
def test_gradients_may_be_read_replaced_and_dropped_between_micro_batches(ranks: RankPool, tmp_path: Path) -> None:
    """A read reduces what has added up so far, which changes the order of the additions alone."""
    expected = ranks.run(train_with, plainly, tmp_path)
    for between in (read, start_over, replace):
        for mine, other in zip(ranks.run(train_with, between, tmp_path), expected, strict=True):
            rounding_bounds.same_training(mine, other, JOB, reordered=True)


def train_in_turns(schedule: str, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the weights, and the reductions of all steps."""
    engine = start(JOB, ("cpu", "cpu"), folder, schedule=schedule)
    assert engine.schedule == schedule
    for step in range(JOB.steps):
        engine.accumulate(range(JOB.accumulation), functools.partial(JOB.loss, engine, step))
        engine.step()
    reductions = engine.communication().gradients.collectives
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return weights, reductions


def test_micro_batches_that_take_turns_change_no_bit(ranks: RankPool, tmp_path: Path) -> None:
    (one_by_one, reductions), _ = ranks.run(train_in_turns, "micro_batch_major", tmp_path)
    (in_turns, as_many), _ = ranks.run(train_in_turns, "layer_major", tmp_path)
    assert_same_tensors(one_by_one, in_turns)
    assert reductions == as_many == JOB.steps * len(find_units(JOB.model()).units)


# -- memory -------------------------------------------------------------------------------------------


def least_budget(folder: Path, stage: int) -> str:
    """Returns the error of an engine with no room on its device."""
    with pytest.raises(BudgetError) as caught:
        start(JOB._replace(stage=stage), DISK, folder, device_memory=4096)
    return str(caught.value)


def test_the_device_budget_holds_the_whole_gradients(ranks: RankPool, tmp_path: Path) -> None:
    """All gradients and those that a rank receives of one unit, in place of two buffers of the largest unit."""
    messages = [ranks.run(least_budget, tmp_path, stage)[0] for stage in (1, 2)]
    least = [int(re.findall(r"least that works is .*?\((\d+) bytes\)", message)[0]) for message in messages]
    model = JOB.model()
    gradients = [each.trainable_stop * FP32 for each in layouts_of(model, find_units(model), 2)]
    assert least[0] - least[1] == (sum(gradients) + max(gradients)) - 2 * max(gradients)
    assert 'set "stage": 2, which reduces each micro-batch' in messages[0] and "twice its gradients" in messages[1]
