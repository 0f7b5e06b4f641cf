"""Zero-bubble schedules compute gradients of weights when they have time, by the bits of one backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import testing
from offload.parallel.pipeline import split
from tests.support.oracle import Job, assert_same
from tests.support.ranks import pipelines
from tests.support.ranks.pipelines import JOB, Plan
from tests.support.ranks.rank_pool import RankPool

DISK = ("nvme", "nvme")


class Shared(nn.Module):
    """Weights that are used twice, one below the other, and a weight beside the path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.first(self.second(hidden) + hidden) * (self.scale * 2).exp()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def test_each_half_computes_its_own_gradients() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    given = torch.randn(4, 8)
    model(x).backward(given)
    whole, of_inputs = gradients(model), x.grad
    model.zero_grad()
    output = model(x)
    halves = split([output], [x, "no tensor"], model.parameters())
    assert halves is not None
    found = halves.inputs([output], [given], [x, "no tensor"])
    assert torch.equal(found[0], of_inputs) and found[1] is None and gradients(model) == {}
    halves.weights()
    # The gradients of a weight of two uses are added up, in one order or the other.
    torch.testing.assert_close(gradients(model), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(gradients(model)["second.weight"], whole["second.weight"])


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: Doubled.apply(model(x)),
        lambda model, x: checkpoint(model, x, use_reentrant=True),
        lambda model, x: model(x.detach()),
    ],
    ids=["a function of Python", "a forward that is computed again", "inputs without a gradient"],
)
def test_what_would_give_other_gradients_is_not_split(forward: Callable[..., torch.Tensor]) -> None:
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    assert split([forward(model, x)], [x], model.parameters()) is None


def test_an_output_beside_the_path_is_not_split() -> None:
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    outputs = [model.second(x), model.first(torch.ones(8))]
    assert split(outputs, [x], model.parameters()) is None
    assert split(outputs[:1], [x], model.parameters()) is not None


class DoubledBlock(pipelines.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubled.apply(x))


def doubled() -> nn.Module:
    model = pipelines.whole()
    return pipelines.Layers(
        {name: DoubledBlock(32) if name.startswith("block") else each for name, each in model.named_children()}
    )


def in_both_schedules(job: Job, folder: Path, options: dict[str, Any]) -> list[bool]:
    """For each backward of a stage behind the first True if it ran in two halves."""
    plain = pipelines.train(job, Plan("Interleaved1F1B", stages=4), DISK, folder / "plain", **options)
    ran: list[bool] = []

    def counted(*arguments: Any) -> Any:
        halves = split(*arguments)
        ran.append(halves is not None)
        return halves

    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "pipeline.split_backward", counted)
        found = pipelines.train(job, Plan("InterleavedZeroBubble", stages=4), DISK, folder / "zero", **options)
    assert_same(found, plain)
    return ran


CASES: dict[str, tuple[Job, dict[str, Any], bool]] = {
    "as it is": (JOB, {}, True),
    "clipped, in bf16": (JOB._replace(clip=0.05, dtype="bf16"), {}, True),
    "a function of Python": (JOB._replace(model=doubled), {}, False),
    "blocks computed again": (JOB, {"activations": "nvme", "units": ["Block"]}, True),
}


@pytest.mark.works("Several ranks", "zero-bubble schedules with a backward in two halves, and as one", "right")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "as it is" else pytest.mark.slow) for each in CASES]
)
def test_a_schedule_trains_by_the_bits_of_whole_backwards(name: str, ranks: RankPool, tmp_path: Path) -> None:
    job, options, splits = CASES[name]
    first, second = ranks.run(in_both_schedules, job, tmp_path, options)
    # Stage 0 has no inputs with gradients: torch runs all of its backward in the second half.
    assert len(first) == JOB.steps * JOB.accumulation and len(second) == 2 * len(first)
    assert set(first + second) == {splits}
