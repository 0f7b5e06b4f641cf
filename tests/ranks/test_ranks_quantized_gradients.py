"""Ranks send gradients as codes of 8 bits (`zero_quantized_gradients`): a gradient is the mean of their values."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import offload
from offload import testing
from offload.layout.flat_layout import UnitLayout
from tests.ranks.int8_collectives import HOST, JOB, MEMORY, flat, through_codes
from tests.support import models
from tests.support.oracle import Job, assert_same_tensors, weights_of
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start


class Made(NamedTuple):
    """Of one rank."""

    micro_batches: list[list[torch.Tensor]]
    """The gradient of each micro-batch on this rank, (numel,) for each unit."""
    mean: dict[str, torch.Tensor]
    """That of the step, which all ranks share."""
    norm: float
    layouts: tuple[UnitLayout, ...]


def local_gradients(job: Job, folder: Path) -> Made:
    engine = start(job, MEMORY, folder)
    made: dict[str, torch.Tensor] = {}

    def note(name: str, gradient: torch.Tensor) -> None:
        made[name] = gradient.detach().clone()

    for name, parameter in engine.module.named_parameters():
        parameter.register_hook(functools.partial(note, name))
    layouts, micro_batches = tuple(testing.inspect(engine).layouts), []
    for micro in range(job.accumulation):
        engine.backward(job.loss(engine, 0, micro))
        micro_batches.append([flat(layout, made) for layout in layouts])
        if micro < job.accumulation - 1:
            engine.step()
    mean = {name: offload.safe_get_full_grad(each) for name, each in engine.module.named_parameters()}
    engine.step()
    norm = engine.get_global_grad_norm() or 0.0
    engine.destroy(remove=True)
    return Made(micro_batches, {name: values for name, values in mean.items() if values is not None}, norm, layouts)


@pytest.mark.numeric
@pytest.mark.works("Several ranks", "gradients sent as int8 codes (`zero_quantized_gradients`), in any tier", "right")
@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (3, 2), (1, 2)])
def test_a_gradient_is_the_mean_of_the_values_of_codes(
    stage: int, accumulation: int, ranks: RankPool, tmp_path: Path
) -> None:
    """Each rank's codes are of a micro-batch, in stages 0 and 1 of a step; the norm is that of the mean."""
    job = Job(models.llama, language_rows_loss, stage=stage, accumulation=accumulation, clip=0.0, quantized="gradients")
    found = ranks.run(local_gradients, job, tmp_path)
    squares = 0.0
    for unit, layout in enumerate(found[0].layouts):
        steps = [[rank.micro_batches[micro][unit] for rank in found] for micro in range(accumulation)]
        if stage < 2:
            steps = [[first + second for first, second in zip(*steps, strict=True)]]
        means = []
        for contributions in steps:
            total = through_codes(contributions[0], torch.float32)
            total += through_codes(contributions[1], torch.float32)
            means.append(total / 2)
        expected = means[0] if len(means) == 1 else means[0] + means[1]
        for segment in layout.segments:
            values = expected[segment.start : segment.stop]
            squares += float(values.double().square().sum())
            for rank in found:
                assert torch.equal(rank.mean[segment.name].view(-1), values), segment.name
    assert all(abs(rank.norm - squares**0.5) <= 1e-9 * rank.norm for rank in found)


def skip_a_step(job: Job, folder: Path) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """The gradients of the last rank are inf in the first step. Returns steps skipped so far, and weights."""
    engine = start(job, HOST, folder)
    rank, size = rank_and_size()
    skipped, weights = [], [weights_of(engine)]
    for step in range(2):
        engine.backward(job.loss(engine, step, 0) * (1e30 if rank == size - 1 and step == 0 else 1e-3))
        engine.step()
        skipped.append(engine.skipped_steps)
        weights.append(weights_of(engine))
    engine.destroy(remove=True)
    return skipped, weights


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(dtype="fp16", loss_scale=0.0, quantized="weights gradients")
    for skipped, (before, after, later) in ranks.run(skip_a_step, job, tmp_path):
        assert skipped == [1, 1]
        assert_same_tensors(before, after)
        assert any(not torch.equal(later[name], value) for name, value in before.items())
