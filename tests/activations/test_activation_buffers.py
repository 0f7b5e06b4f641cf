"""Blocks that are computed again change their buffers once; one that also reads what it changes is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import UsageError
from tests.support.modules.checkpointed import JOB, MEMORY, WIDTH, Block, Stack, running, small_inputs_move
from tests.support.oracle import Job, assert_same, run, train_step

AREA = "Activation checkpointing"
TIERS = ("device", "cpu", "nvme")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


class Normed(Block):
    """A block with statistics that its forward changes, and does not read while it trains."""

    norm: Any = nn.BatchNorm1d
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def __init__(self) -> None:
        super().__init__()
        self.statistics = self.norm(WIDTH, **self.options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(hidden))


class Cumulative(Normed):
    options = {"momentum": None}  # noqa: RUF012


class Tracking(Normed):
    norm = nn.InstanceNorm1d
    options = {"track_running_stats": True, "affine": True}  # noqa: RUF012

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Block.forward(
            self, self.statistics(hidden.view(4, -1, WIDTH).transpose(1, 2)).transpose(1, 2).flatten(0, 1)
        )


def _stack(block: type[nn.Module]) -> Job:
    return JOB._replace(model=type("Of" + block.__name__, (Stack,), {"block": lambda self, index: block()}))


NORMS = {
    "statistics of BatchNorm": Normed,
    "statistics of BatchNorm with a cumulative mean": Cumulative,
    "statistics of InstanceNorm": Tracking,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in NORMS])
def test_statistics_are_those_of_the_plain_model(name: str, tier: str, tmp_path: Path) -> None:
    """With several micro-batches, and two forwards before a backward."""
    job = _stack(NORMS[name])._replace(accumulation=2)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert any("running_mean" in key for key in plain.weights)
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))

    def both(model: Any, step: int, micro: int) -> torch.Tensor:
        return JOB.loss(model, step, micro) + JOB.loss(model, step, micro + 2)

    job = job._replace(loss=both)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


class Counting(Block):
    """A block that reads the count that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) / self.calls


class Replacing(Counting):
    """The same by assignment."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return Block.forward(self, hidden) / self.calls


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


REFUSED = {
    "a block that changes another buffer in its forward": Counting,
    "a block that replaces another buffer in its forward": Replacing,
    "`spectral_norm` in a block": Spectral,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "refused")) for name in REFUSED]
)
def test_a_block_that_changes_another_buffer_is_refused(name: str, tier: str, tmp_path: Path) -> None:
    with running(_stack(REFUSED[name]), tmp_path, activations=tier) as engine:
        for _ in range(2):
            with pytest.raises(UsageError, match=r"blocks.0 changes its buffer .* in forward"):
                JOB.loss(engine, 0, 0)
        engine.eval()
        with torch.no_grad():
            JOB.loss(engine, 0, 0)  # is not computed again


class Table(Block):
    """A block with a table that grows with the batch, and a constant that is made anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("constant", torch.ones(1), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(hidden):
            self.table = torch.arange(len(hidden), device=hidden.device) / 64
        self.constant = torch.ones(1, device=hidden.device)
        return super().forward(hidden) + self.table[: len(hidden), None] * self.constant


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a block with a table that grows", "right")
@pytest.mark.parametrize("tier", TIERS)
def test_a_table_that_grows_keeps_the_bits(tier: str, tmp_path: Path) -> None:
    job = _stack(Table)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        assert [train_step(engine, job, step) for step in range(job.steps)] == plain.losses
