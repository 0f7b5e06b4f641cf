"""Training by the engine is training by PyTorch, in whatever precision, tier, accumulation and clip are combined."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support import models, rounding_bounds
from tests.support.oracle import (
    DTYPES,
    TIERS,
    Job,
    PlainEngine,
    assert_same,
    plain_loop,
    room_for,
    run,
    start,
    train_step,
)
from tests.support.param_states import (
    GPT2,
    MIXTURE,
    STATES,
    Found,
    everything,
    everything_of_torch,
    same_but_for_roundings,
)

pytestmark = pytest.mark.numeric

DISK = ("nvme", "nvme")


def one_block() -> nn.Module:
    """Of gpt2-tiny: as wide, less deep."""
    model = models.gpt2_tiny()
    model.transformer.h = model.transformer.h[:1]
    return model


def test_fp32_equals_pytorch(tmp_path: Path) -> None:
    """Steps of a block of gpt2-tiny: lr 1e-3, decay 0.1, accumulation 4, and the clip acts at every step."""
    job = models.TINY._replace(model=one_block, steps=3)
    plain = plain_loop(job)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    rounding_bounds.same_training(run(job, DISK, tmp_path), plain, job)


def test_bf16_follows_the_loop_with_fp32_masters(tmp_path: Path) -> None:
    """Five steps of a small GPT-2: some processors multiply in bf16 at a hundredth of what others do.

    The masters agree to a rounding each step (the clip's norm is summed in fp64 here and in fp32 there). One flipped
    rounding of a weight changes a gradient by 2**-9, and Adam's direction where it is noise.
    """
    job = GPT2._replace(dtype="bf16", steps=5, accumulation=4, clip=0.5)
    plain = plain_loop(job)
    assert min(plain.norms) > job.clip, "the clip shall act at every step"
    rounding_bounds.same_training(run(job, DISK, tmp_path), plain, job)


def test_a_step_in_bf16_has_the_masters_and_moments_of_fp32(tmp_path: Path) -> None:
    """From the same state gradients are the same: a step is off by fp32's roundings, and those of bf16 hide nothing."""
    job = GPT2._replace(dtype="bf16", accumulation=2, clip=0.5)
    engine, plain = start(job, DISK, tmp_path, gradients="fp32"), PlainEngine(job)
    for step in range(2):
        train_step(engine, job, step)
        train_step(plain, job, step)
        states = everything(engine.module)
        same_but_for_roundings(states, everything_of_torch(plain), job._replace(dtype="fp32", steps=1))
        _copy(states, plain)
    engine.destroy(remove=True)


def _copy(states: Found, plain: PlainEngine) -> None:
    """Give the plain loop the states that were found."""
    with torch.no_grad():
        for (name, _), master in zip(plain.module.named_parameters(), plain._masters, strict=True):
            master.copy_(states[f"{name} master"])
            for state in STATES:
                plain.optimizer.state[master][state].copy_(states[f"{name} {state}"])
    plain._round()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tied_frozen_unused_and_scalar_parameters(dtype: str, tmp_path: Path) -> None:
    job = MIXTURE._replace(dtype=dtype)
    plain = plain_loop(job)
    mine = run(job, DISK, tmp_path)
    rounding_bounds.same_training(mine, plain, job)
    torch.manual_seed(job.seed)
    start = job.model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).state_dict()
    for name in ("blocks.0.0.weight", "blocks.1.0.weight", "unused.weight", "unused.bias"):
        assert torch.equal(mine.weights[name], start[name]), f"{name} must not change"
    assert not torch.equal(mine.weights["blocks.1.0.bias"], start["blocks.1.0.bias"])


def test_dropout_draws_what_pytorch_draws(tmp_path: Path) -> None:
    job = models.SHALLOW_DROPOUT._replace(steps=3)
    rounding_bounds.same_training(run(job, DISK, tmp_path), plain_loop(job), job)


def image_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    images = torch.randn(2, 3, 32, 32, generator=generator).to(next(model.module.parameters()).dtype)
    return model(pixel_values=images, labels=torch.tensor([step % 4, micro % 4])).loss


def rising(loss: Callable[[Any, int, int], torch.Tensor]) -> Callable[[Any, int, int], torch.Tensor]:
    """Louder at each step: else AdamW hardly feels a clip, which scales all its gradients alike."""
    return lambda model, step, micro: loss(model, step, micro) * (1 + step) ** 2


JOBS = {
    "GPT-2": models.SHALLOW,
    "Llama": Job(models.llama, models.language_loss),
    "Mixtral": Job(models.mixtral, models.language_loss),
    "T5": Job(models.t5, models.translation_loss),
    "CNN": Job(models.resnet, image_loss, buffers="same"),
    "tied": models.MIXTURE,
    "LoRA": models.LORA,
}
CLIP = {name: 0.001 if name == "tied" else 0.1 for name in JOBS}
"""Below the norm of any step."""

AXES: tuple[tuple[Any, ...], ...] = (tuple(JOBS), tuple(DTYPES), TIERS, (1, 4), (True, False))


class Case(NamedTuple):
    model: str
    dtype: str
    tier: str
    accumulation: int
    clips: bool

    def __str__(self) -> str:
        return f"{self.model}-{self.dtype}-{self.tier}-{self.accumulation}-{'clip' if self.clips else 'no clip'}"

    @property
    def job(self) -> Job:
        job = JOBS[self.model]
        return job._replace(
            loss=rising(job.loss),
            steps=3,
            dtype=self.dtype,
            accumulation=self.accumulation,
            clip=CLIP[self.model] if self.clips else 0.0,
        )


def pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Combinations in which any two choices of two axes meet: each time the one with most pairs not met yet."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    product = list(itertools.product(*axes))
    left = set().union(*map(pairs, product))
    rows = []
    while left:
        rows.append(max(product, key=lambda row: len(pairs(row) & left)))  # the first of several
        left -= pairs(rows[-1])
    return rows


COVER = [Case(*row) for row in pairwise(AXES)]
REST = [case for case in itertools.starmap(Case, itertools.product(*AXES)) if case not in COVER]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "case", [*COVER, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)], ids=lambda case: str(case)
)
def test_as_pytorch_and_the_same_bits_in_another_tier(case: Case, tmp_path: Path) -> None:
    """In RAM or on disk there is room for two units, so that they come and go."""
    job, tier = case.job, "nvme" if case.tier == "none" else case.tier
    mine = run(job, (tier, tier), tmp_path / tier, device_memory=room_for(job, 2))
    assert_same(mine, run(job, ("none", "none"), tmp_path / "none"), f"{tier} and none")
    plain = plain_loop(job)
    assert not case.clips or min(plain.norms) > job.clip, "the clip shall act at every step"
    rounding_bounds.same_training(mine, plain, job)
