"""Precision, tier, accumulation, clip and model, combined: the plain loop's results, and the same bits in every tier.

Two features that work alone may not work together, so each case is one choice of every axis. The default run takes a
pairwise cover: any two choices of two axes meet in at least one case. `pytest -m slow` takes the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import models, rounding_bounds
from tests.support.oracle import (
    DTYPES,
    TIERS,
    Job,
    assert_same,
    plain_loop,
    room_for,
    run,
)

pytestmark = pytest.mark.numeric


def image_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    images = torch.randn(2, 3, 32, 32, generator=generator).to(next(model.module.parameters()).dtype)
    return model(pixel_values=images, labels=torch.tensor([step % 4, micro % 4])).loss


def rising(loss: Callable[[Any, int, int], torch.Tensor]) -> Callable[[Any, int, int], torch.Tensor]:
    """Louder at each step: else AdamW hardly feels a clip, which scales all its gradients alike."""
    return lambda model, step, micro: loss(model, step, micro) * (1 + step) ** 2


JOBS = {
    "GPT-2": models.GPT2,
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


def test_the_cover_has_each_pair() -> None:
    for (i, left), (j, right) in itertools.combinations(enumerate(AXES), 2):
        assert {(case[i], case[j]) for case in COVER} == set(itertools.product(left, right))
    assert len(COVER) < 25 and len(COVER) + len(REST) == 7 * 3 * 3 * 2 * 2


@pytest.mark.sample(8)
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", JOBS)
def test_the_bounds_see_a_clip(model: str) -> None:
    """Else a case with a clip would show nothing. In bf16 what it does is below the roundings of the deepest two."""
    with_clip, without = (Case(model, "fp32", "none", 1, clips).job for clips in (True, False))
    clipped, free = plain_loop(with_clip), plain_loop(without)
    for dtype in ("fp32", "fp16") if model in ("T5", "LoRA") else DTYPES:
        with pytest.raises(AssertionError):
            rounding_bounds.same_weights(clipped.weights, free.weights, with_clip._replace(dtype=dtype))
