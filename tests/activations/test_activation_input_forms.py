"""Inputs of blocks of every form of tensor, passed in every kind of argument, keep the bits."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support.modules.checkpointed import JOB, MEMORY, Block, Stack, batch, small_inputs_move
from tests.support.oracle import Job, assert_same, run
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
