"""A module inside of its unit's module enters no site of its own, and behaves as if it did.

A layer of torch there has no hooks at all, so the user's own hooks for saved tensors see its weights, as in torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import offload
from bench.measure import settings_for
from offload import testing
from offload.engine.unit_views import UnitViews

WIDTH = 16


class Scale(nn.Module):
    """Returns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.01))

    def forward(self) -> torch.Tensor:
        return self.weight


class Again(nn.Module):
    """Calls itself within its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        x = torch.tanh(x @ self.weight)
        return self(x, times - 1) if times else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.again = nn.Linear(WIDTH, WIDTH), Scale(), Again()
        self.kept: list[torch.Tensor] = []
        self.packed: list[torch.Size] = []
        """Shapes of what hooks of the user have received, from a layer of torch."""
        self.packed_of_ours: list[torch.Size] = []
        """The same from a module of the user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def into(packed: list[torch.Size]) -> Any:
            return saved_tensors_hooks(lambda tensor: (packed.append(tensor.shape), tensor)[1], lambda tensor: tensor)

        with into(self.packed):
            x = self.linear(x)
        with into(self.packed_of_ours):
            x = self.again(x, 0)
        self.kept.append(self.scale())
        return self.again(x) * self.scale()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(torch.bfloat16)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def started(folder: Path) -> offload.Engine:
    return offload.initialize(model=model(), config=settings_for(folder, "nested", "cpu"))[0]


def test_only_the_outer_module_of_a_unit_materializes_the_unit(
    tmp_path: Path, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    real = UnitViews.use
    testing.replace(monkeypatch, "weights.use", lambda views, unit: (used.append(unit), real(views, unit))[1])
    engine = started(tmp_path)
    block: Any = engine.module[0]
    engine(batch)
    assert used == [0, 0, 1, 1], "`again` runs under hooks of the user once, within which it needs the engine's"
    used.clear()
    block.scale()
    assert used == [0], "outside of the block"
    engine.destroy(remove=True)


def test_results_are_those_of_plain_torch(tmp_path: Path, batch: torch.Tensor) -> None:
    plain, engine = model(), started(tmp_path)
    expected = plain(batch).float().sum()
    expected.backward()
    loss = engine(batch).float().sum()
    assert loss == expected
    engine.backward(loss)
    for name, parameter in engine.module.named_parameters():
        gradient = plain.get_parameter(name).grad
        assert gradient is not None and torch.equal(offload.safe_get_full_grad(parameter), gradient.float()), name
    engine.destroy(remove=True)


def test_a_weight_that_an_inner_module_returns_is_a_copy(tmp_path: Path, batch: torch.Tensor) -> None:
    """A view would hold the unit on the device, and `step()` would refuse to change it."""
    engine = started(tmp_path)
    for _ in range(2):
        engine.backward(engine(batch).float().sum())
        engine.step()
    block: Any = engine.module[0]
    first, second = block.kept
    assert torch.equal(first, torch.full((WIDTH,), 0.01, dtype=torch.bfloat16)) and not torch.equal(second, first)
    engine.destroy(remove=True)


def test_hooks_of_the_user_receive_no_weights_of_a_module_inside(tmp_path: Path, batch: torch.Tensor) -> None:
    engine = started(tmp_path)
    block: Any = engine.module[1]  # whose input needs a gradient
    engine.backward(engine(batch).float().sum())
    assert block.packed_of_ours == [batch.shape] * 2, "the input, and the result of tanh"
    assert sorted(block.packed) == sorted([batch.shape, block.linear.weight.shape]), "as in torch"
    engine.destroy(remove=True)


def test_a_layer_of_torch_that_is_called_alone_trains(tmp_path: Path, batch: torch.Tensor) -> None:
    plain, engine = model(), started(tmp_path)
    layer: Any = plain[0].linear
    layer(batch).float().sum().backward()
    engine.backward(engine.module[0].linear(batch).float().sum())
    for name, parameter in engine.module[0].linear.named_parameters():
        assert torch.equal(offload.safe_get_full_grad(parameter), layer.get_parameter(name).grad.float()), name
    engine.step()
    engine.destroy(remove=True)


class Parts(nn.Module):
    """Its units are containers, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleDict({"fixed": nn.Linear(WIDTH, WIDTH).requires_grad_(False), "learns": nn.Linear(WIDTH, WIDTH)})
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part["fixed"](x) + part["learns"](x))
        return x


def test_layers_inside_of_a_module_that_is_never_called_keep_their_hooks(tmp_path: Path, batch: torch.Tensor) -> None:
    """Units of frozen weights too are then released one after the other, so that two have room enough."""
    torch.manual_seed(0)
    settings = settings_for(tmp_path, "parts", "cpu", device_memory=2 << 12)
    engine = offload.initialize(model=Parts().to(torch.bfloat16), config=settings)[0]
    engine.backward(engine(batch).float().sum())
    engine.step()
    engine.destroy(remove=True)
