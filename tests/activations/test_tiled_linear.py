"""`TiledLinear` computes what `nn.Linear` computes, and trains where the layer is larger than the device budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import offload
from tests.support import rounding_bounds
from tests.support.oracle import DTYPES, Job, plain_loop, run, same_bits, start
from tests.support.rounding_bounds import unit

DISK = ("nvme", "nvme")
SPLITS = st.tuples(st.integers(1, 12), st.integers(1, 12))


def grid_of(layer: offload.TiledLinear, gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of the whole layer, or their gradients, put together from the blocks."""
    rows: list[list[Any]] = [[block for block in row] for row in layer.linears]  # type: ignore[union-attr, attr-defined]
    value = (lambda parameter: parameter.grad) if gradient else (lambda parameter: parameter.detach())
    weight = torch.cat([torch.cat([value(block.weight) for block in row], 1) for row in rows])
    bias = [value(row[-1].bias) for row in rows if row[-1].bias is not None]
    assert all(block.bias is None for row in rows for block in row[:-1])
    return weight, torch.cat(bias) if bias else None


@pytest.mark.numeric
@given(splits=SPLITS, bias=st.booleans(), name=st.sampled_from(["fp32", "bf16"]), seed=st.integers(0, 1000))
def test_values_and_gradients_differ_from_the_exact_ones_by_the_stated_bound(
    splits: tuple[int, int], bias: bool, name: str, seed: int
) -> None:
    """The bound of [Note: bits] in offload/activations/linear.py, beside that of one sum."""
    torch.manual_seed(seed)
    dtype, u, wide = DTYPES[name], unit(name), unit()
    whole = nn.Linear(19, 13, bias=bias).to(dtype)
    layer = offload.TiledLinear(19, 13, bias, *splits, init_linear=whole, dtype=dtype)
    hidden, slope = torch.randn(2, 5, 19).to(dtype).requires_grad_(), torch.randn(2, 5, 13).to(dtype)
    output = layer(hidden)
    output.backward(slope)
    x, s = (each.detach().double().flatten(0, 1) for each in (hidden, slope))
    weight = whole.weight.detach().double()
    added = torch.zeros(13) if whole.bias is None else whole.bias.detach().double()
    of_weight, of_bias = grid_of(layer, gradient=True)
    assert hidden.grad is not None
    for found, right, size, terms, parts in (
        (output, x @ weight.T + added, x.abs() @ weight.T.abs() + added.abs(), 20, splits[0]),
        (hidden.grad, s @ weight, s.abs() @ weight.abs(), 13, splits[1]),
    ):
        bound = (terms + 2) * wide + (2 * parts + 1) * u
        assert torch.all((found.flatten(0, 1).double() - right).abs() <= bound * size * 1.01)
    assert torch.all((of_weight.double() - s.T @ x).abs() <= (12 * wide + u) * (s.T.abs() @ x.abs()) * 1.01)
    if bias:
        assert of_bias is not None and torch.all(
            (of_bias.double() - s.sum(0)).abs() <= (12 * wide + u) * s.abs().sum(0)
        )


@given(splits=SPLITS, bias=st.booleans())
def test_blocks_hold_the_weights_of_the_whole_layer(splits: tuple[int, int], bias: bool) -> None:
    whole = nn.Linear(17, 12, bias=bias)
    layer = offload.TiledLinear(17, 12, bias, *splits)
    layer.copy_params_from(whole)
    weight, added = grid_of(layer)
    assert torch.equal(weight, whole.weight) and (whole.bias is None or torch.equal(added, whole.bias))
    sizes = [block.weight.shape for row in layer.linears for block in row]  # type: ignore[union-attr]
    assert len(sizes) == splits[0] * splits[1]
    assert all(max(each) - min(each) <= 1 for each in zip(*sizes, strict=True))


def test_weights_are_drawn_as_for_the_whole_layer() -> None:
    """`nn.Linear` draws from 1 / sqrt(inputs), and a block has fewer inputs than the layer."""
    torch.manual_seed(0)
    layer = offload.TiledLinear(400, 300, in_splits=4, out_splits=3)
    for each in grid_of(layer):
        assert each is not None and each.abs().max() <= 0.05
    deviation = 0.05 / 3**0.5
    assert abs(float(grid_of(layer)[0].std()) - deviation) < 6 * deviation / (2 * 400 * 300) ** 0.5
    with offload.init(None):
        deferred: Any = offload.TiledLinear(400, 300, in_splits=4, out_splits=3)
    assert deferred.linears[0][0].weight.is_meta


def test_a_second_derivative_is_that_of_the_whole_layer() -> None:
    hidden = torch.randn(3, 6, requires_grad=True, dtype=torch.float64)
    whole = nn.Linear(6, 4, dtype=torch.float64)
    layer = offload.TiledLinear(6, 4, in_splits=2, out_splits=2, init_linear=whole, dtype=torch.float64)
    found = []
    for each in (whole, layer):
        (first,) = torch.autograd.grad(each(hidden).pow(3).sum(), hidden, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), hidden)[0])
    assert torch.allclose(*found)


# -- under an engine ----------------------------------------------------------------------------------

WIDTH, WIDE = 32, 256


class Wide(nn.Module):
    """A model with one layer much larger than all others, whole or tiled."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDTH)])
        self.head = nn.Linear(WIDTH, 61)
        if tiled:  # last, so that all other weights are drawn as without
            self.layers[1] = offload.TiledLinear(WIDE, WIDE, True, 4, 2, init_linear=self.layers[1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(ids)
        inner = hidden
        for layer in self.layers:
            inner = F.gelu(layer(inner))
        return self.head(hidden + inner)  # type: ignore[no-any-return]


def whole() -> nn.Module:
    return Wide(False)


def tiled() -> nn.Module:
    return Wide(True)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(step))
    ids = ids.to(getattr(model, "device", ids.device))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


TILED, WHOLE = (Job(model, loss, steps=3) for model in (tiled, whole))
LAYER = WIDE * WIDE * 4


@pytest.mark.works("Modules", "a layer larger than the device budget, as `offload.TiledLinear`", "right")
def test_a_layer_larger_than_the_budget_trains(tmp_path: Path) -> None:
    """Whole it is refused; tiled it has the bits of any other budget and tier."""
    with pytest.raises(offload.BudgetError):
        run(WHOLE, DISK, tmp_path / "whole", device_memory=LAYER // 2)
    room = [run(TILED, DISK, tmp_path / str(share), device_memory=LAYER // share) for share in (1, 2)]
    anywhere = same_bits(TILED, tmp_path / "tiers", [("none", "none"), ("cpu", "cpu"), DISK])
    assert all(each.losses == anywhere.losses and each.norms == anywhere.norms for each in room)
    rounding_bounds.same_training(anywhere, plain_loop(TILED), TILED)


def test_training_is_that_of_the_whole_layer(tmp_path: Path) -> None:
    mine, right = run(TILED, DISK, tmp_path / "tiled"), run(WHOLE, DISK, tmp_path / "whole")
    rounding_bounds.same_losses(mine.losses, right.losses, WHOLE)
    rounding_bounds.same_norms(mine.norms, right.norms, WHOLE)


def test_parameters_of_a_paged_model_are_copied(tmp_path: Path) -> None:
    """Between steps, as edits."""
    other = nn.Linear(WIDE, WIDE)
    engine = start(TILED, DISK, tmp_path)
    layer = engine.module.layers[1]
    layer.copy_params_from(other)
    blocks = [[block.weight.clone().cpu() for block in row] for row in layer.linears]
    assert torch.equal(torch.cat([torch.cat(row, 1) for row in blocks]), other.weight)
    engine.destroy(remove=True)


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((0, 1), "in_splits of TiledLinear is from 1 to in_features, 4; got 0"),
        ((5, 1), "in_splits of TiledLinear is from 1 to in_features, 4; got 5"),
        ((1, 7), "out_splits of TiledLinear is from 1 to out_features, 6; got 7"),
    ],
)
def test_splits_that_make_no_sense_are_refused(splits: tuple[int, int], message: str) -> None:
    with pytest.raises(offload.UsageError, match=message):
        offload.TiledLinear(4, 6, True, *splits)


@pytest.mark.parametrize("other", [nn.Linear(6, 4), nn.Linear(4, 6, bias=False)])
def test_parameters_of_another_layer_are_refused(other: nn.Linear) -> None:
    layer = offload.TiledLinear(4, 6, in_splits=2)
    before = grid_of(layer)[0]
    with pytest.raises(offload.UsageError, match=r"expects a linear layer with a weight of \[6, 4\] and a bias, got"):
        layer.copy_params_from(other)
    assert torch.equal(grid_of(layer)[0], before)
