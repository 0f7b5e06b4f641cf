"""Precision, tier, accumulation, clip and model, combined: the plain loop's results, and the same bits in every tier.

Two features that work alone may not work together, so each case is one choice of every axis. The default run takes a
pairwise cover: any two choices of two axes meet in at least one case. `pytest -m slow` takes the whole product.

LoRA is the model whose frozen weights are most of it: what they take on a disk is looked at byte by byte.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from offload.swapper.states import State
from offload.swapper.store.look import look
from tests import models
from tests.faults import LateQueue, use_queue
from tests.oracle import (
    DTYPES,
    TIERS,
    Job,
    PlainEngine,
    Result,
    assert_same,
    assert_same_tensors,
    plain_loop,
    room_for,
    run,
    start,
    train_step,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers


def lora() -> nn.Module:
    """A Llama by `peft`: all is frozen but adapters of two projections in each block."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(models.llama(), adapters)


def image_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    images = torch.randn(2, 3, 32, 32, generator=generator).to(next(model.module.parameters()).dtype)
    return model(pixel_values=images, labels=torch.tensor([step % 4, micro % 4])).loss


def translation_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = models.tokens(step, micro)
    return model(input_ids=ids, labels=ids.flip(1)).loss


def rising(loss: Callable[[Any, int, int], torch.Tensor]) -> Callable[[Any, int, int], torch.Tensor]:
    """Louder at each step: else AdamW hardly feels a clip, which scales all its gradients alike."""
    return lambda model, step, micro: loss(model, step, micro) * (1 + step) ** 2


JOBS = {
    "GPT-2": models.GPT2,
    "Llama": Job(models.llama, models.language_loss),
    "Mixtral": Job(models.mixtral, models.language_loss),
    "T5": Job(models.t5, translation_loss),
    "CNN": Job(models.resnet, image_loss, buffers="same"),
    "tied": models.MIXTURE,
    "LoRA": Job(lora, models.language_loss),
}
CLIP = {name: 0.001 if name == "tied" else 0.1 for name in JOBS}
"""Below the norm of any step."""

AXES: tuple[tuple[Any, ...], ...] = (tuple(JOBS), tuple(DTYPES), TIERS, (1, 4), (True, False))

BOUNDS = {"fp32": (1e-5, 1e-3), "fp16": (2**-10, 0.1), "bf16": (2**-7, 0.1)}
"""By precision: of the losses and norms, about a rounding of a loss; of the change of the weights, where Adam scales
up the noise of gradients that are nearly zero."""


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


def _relative(mine: list[float], plain: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, plain, strict=True))


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in tensors) ** 0.5


def _off(mine: Result, plain: Result, job: Job) -> float:
    """How far the parameters are from the plain ones, as a share of how far those have come."""
    begun = {name: value.detach().float() for name, value in PlainEngine(job).module.named_parameters()}
    ends = [{name: result.weights[name].float() for name in begun} for result in (mine, plain)]
    return _norm(ends[0][n] - ends[1][n] for n in begun) / _norm(ends[1][n] - begun[n] for n in begun)


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
    few, share = BOUNDS[case.dtype]
    assert _relative(mine.losses, plain.losses) < few
    assert _relative(mine.norms, plain.norms) < 2 * few
    assert _off(mine, plain, job) < share


@pytest.mark.parametrize("model", JOBS)
def test_the_bounds_see_a_clip(model: str) -> None:
    """Else a case with a clip would show nothing."""
    with_clip, without = (Case(model, "fp32", "none", 1, clips).job for clips in (True, False))
    assert _off(plain_loop(with_clip), plain_loop(without), without) > 2 * BOUNDS["bf16"][1]


# -- LoRA on disk -------------------------------------------------------------------------------------


class Recorded(LateQueue):
    """Notes where it writes."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.writes: list[tuple[str, int, int]] = []

    def write(self, file: Any, offset: int, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        self.writes.append((Path(file.path).name, offset, memoryview(buffer).nbytes))
        return super().write(file, offset, buffer, *args, **kwargs)


class Stretch(NamedTuple):
    """Bytes of a slot of a unit's weights."""

    unit: str
    slot: int
    start: int
    stop: int

    def sha(self, rank: Path) -> str:
        with (rank / "states").open("rb") as file:
            file.seek(self.start)
            return hashlib.sha256(file.read(self.stop - self.start)).hexdigest()


def stretches(rank: Path, itemsize: int) -> tuple[list[Stretch], list[Stretch]]:
    """The frozen and the trainable ones; and no state has room for an element that is frozen."""
    manifest = look(rank).manifest
    assert manifest is not None
    frozen, trained = [], []
    for unit, row in zip(manifest.spec.fingerprint["units"], manifest.spec.places(), strict=True):
        middle = unit["trainable"] * itemsize
        for slot, place in enumerate(row[State.WEIGHT]):
            trained += [Stretch(unit["name"], slot, at, at + n) for at, n in place.stretches(0, middle)]
        frozen += [Stretch(unit["name"], 0, at, at + n) for at, n in place.stretches(middle, place.nbytes - middle)]
        assert len({tuple(each.stretches(middle, place.nbytes)) for each in row[State.WEIGHT]}) == 1, "they lie once"
        for state in (State.EXP_AVG, State.EXP_AVG_SQ):
            assert (state in row) is bool(unit["trainable"]), f"{unit['name']} has {state}"
            assert all(place.nbytes == 4 * unit["trainable"] for place in row.get(state, ()))
    return frozen, trained


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["cpu", "nvme"])
def test_frozen_weights_are_read_and_never_written(
    weights: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No states, no byte that is written after the start, and the same bytes in the end; the adapters train."""
    queues: list[Recorded] = []
    use_queue(monkeypatch, lambda: queues.append(Recorded()) or queues[-1])  # type: ignore[func-returns-value]
    job = Case("LoRA", dtype, weights, 1, True).job
    engine = start(job, (weights, "nvme"), tmp_path, durability="step", device_memory=room_for(job, 2))
    rank = tmp_path / "default" / "rank0"
    frozen, trained = stretches(rank, DTYPES[dtype].itemsize)
    assert any(each.unit not in {other.unit for other in trained} for each in frozen), "a unit that is all frozen"
    assert {each.unit for each in frozen} & {each.unit for each in trained}, "and one with adapters"
    before = {each: each.sha(rank) for each in frozen}
    first = weights_of(engine)
    for queue in queues:
        queue.writes.clear()
    for step in range(job.steps):
        train_step(engine, job, step)
    last = weights_of(engine)
    engine.destroy()
    written = [(at, at + nbytes) for queue in queues for name, at, nbytes in queue.writes if name == "states"]
    assert all(any(a < each.stop and each.start < b for a, b in written) for each in trained), "both slots of each"
    assert not [each for each in frozen if any(a < each.stop and each.start < b for a, b in written)]
    assert before == {each: each.sha(rank) for each in frozen}
    for name, value in last.items():
        assert torch.equal(value, first[name]) is ("lora_" not in name), name
    again = start(job, (weights, "nvme"), tmp_path, durability="step", resume="must")
    assert_same_tensors(last, again.module.state_dict())
    again.destroy(remove=True)
