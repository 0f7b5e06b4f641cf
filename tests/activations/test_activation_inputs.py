"""Inputs of blocks that are computed again wait in any tier, in any form, and come back with their bits."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from offload.errors import UsageError
from tests.support.modules.checkpointed import JOB, MEMORY, WIDTH, Block, Stack, batch, running, small_inputs_move
from tests.support.oracle import Job, assert_same, run, train_step
from tests.support.processes.device_process import engine_device

AREA = "Activation checkpointing"
TIERS = ("cpu", "nvme")

CPU_ONLY = ("complex", "negated", "sparse")
"""What the test device has no kernels for."""


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


class Reformed(Stack):
    """A model that gives each block its hidden states in another form, and takes the output back."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(self.reform(hidden))
        return hidden


class Transposed(Reformed):
    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.t().contiguous().t()


class Strided(Reformed):
    """Every second column of a larger tensor: not dense."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack((hidden, -hidden), -1)[..., 0]


class Expanded(Reformed):
    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(0, keepdim=True).expand_as(hidden) + hidden.mean(1, keepdim=True).expand_as(hidden)


class ExpandedAlone(Reformed):
    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden * 2).mean(0, keepdim=True).expand_as(hidden)


class Sliced(Reformed):
    """A part of a larger tensor that is dense by itself."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden, -hidden))[16 : 16 + len(hidden)]


class Complex(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.real + hidden.imag.sin())


class Conjugated(Reformed):
    """Complex inputs, some of which are only marked as conjugated."""

    def block(self, index: int) -> nn.Module:
        return Complex()

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.complex(hidden, hidden * 0.5).conj()


class Negated(Reformed):
    """The imaginary part of a conjugated tensor, which is only marked as negated."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.stack((hidden, hidden * 0.5), -1)).conj().imag * 1.0 + hidden

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(torch.complex(hidden, hidden * 0.5).conj().imag)
        return hidden


class FromSparse(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.to_dense())


class SparseInputs(Reformed):
    def block(self, index: int) -> nn.Module:
        return FromSparse()

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.relu().to_sparse()


class Halved(Reformed):
    """Inputs of two dtypes and sizes in turn."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden) if index % 2 else block(hidden[: 8 * (index + 1)]).repeat(9, 1)[: len(hidden)]
        return hidden


class ChannelsLast(nn.Module):
    """A CNN with BatchNorm in channels_last, whose kernels depend on strides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            hidden = block(hidden)
        assert hidden.is_contiguous(memory_format=torch.channels_last) or not hidden.is_cpu
        return self.head(hidden.mean((2, 3)))


def images_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, micro, (4, 3, 8, 8))).float().square().mean()
    return loss


def _job(model: type[nn.Module]) -> Job:
    return JOB._replace(model=model)


FORMS = {
    "inputs with permuted strides": _job(Transposed),
    "inputs that are not dense": _job(Strided),
    "expanded inputs": _job(Expanded),
    "inputs that are one row, expanded": _job(ExpandedAlone),
    "inputs that are a part of a tensor": _job(Sliced),
    "complex inputs, conjugated": _job(Conjugated),
    "inputs that are marked as negated": _job(Negated),
    "sparse inputs": _job(SparseInputs),
    "inputs of several sizes": _job(Halved),
    "a CNN with BatchNorm in channels_last": JOB._replace(model=ChannelsLast, loss=images_loss),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("tier", ["device", *TIERS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in FORMS])
def test_inputs_of_every_form_keep_the_bits(name: str, tier: str, tmp_path: Path) -> None:
    if engine_device() != "cpu" and any(word in name for word in CPU_ONLY):
        pytest.skip("the test device has no kernels for such tensors")
    job = FORMS[name]
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


class Pair(NamedTuple):
    x: torch.Tensor
    scale: float


@dataclasses.dataclass
class State:
    x: torch.Tensor
    scale: float


class Takes(Block):
    """A block with arguments of many kinds, that notes what it has seen in a list of the caller."""

    def forward(self, hidden: torch.Tensor, *rest: Any, notes: list[torch.Tensor], **named: Any) -> torch.Tensor:  # type: ignore[override]
        pair, state, inner = rest[0], named["state"], named["inner"]
        hidden = hidden + pair.x * pair.scale + state.x * state.scale + inner["deep"][0] + inner["deep"][1]
        output = super().forward(hidden)
        notes.append(output.square().mean())
        return output


class Passes(Stack):
    """The mean of what the blocks have noted is part of the output, as a loss of experts is."""

    def block(self, index: int) -> nn.Module:
        return Takes()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        notes: list[torch.Tensor] = []
        for block in self.blocks:
            half = hidden * 0.5
            inner = collections.OrderedDict(deep=(half, hidden[0]), other=None)
            hidden = block(hidden, Pair(half, 0.1), notes=notes, state=State(half * 2, 0.2), inner=inner)
        assert len(notes) == len(self.blocks)
        return hidden + torch.stack(notes).mean()


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "inputs in tuples, dictionaries, dataclasses, and a list that a block extends", "right")
@pytest.mark.parametrize("tier", ["device", *TIERS])
def test_arguments_of_every_kind_keep_the_bits(tier: str, tmp_path: Path) -> None:
    job = _job(Passes)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


BUFFERS_TIERS = ("device", "cpu", "nvme")


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
@pytest.mark.parametrize("tier", BUFFERS_TIERS)
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
@pytest.mark.parametrize("tier", BUFFERS_TIERS)
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
@pytest.mark.parametrize("tier", BUFFERS_TIERS)
def test_a_table_that_grows_keeps_the_bits(tier: str, tmp_path: Path) -> None:
    job = _stack(Table)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        assert [train_step(engine, job, step) for step in range(job.steps)] == plain.losses
