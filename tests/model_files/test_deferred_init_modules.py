"""Modules of torch that keep, tie or reshape their parameters are built inside `offload.init`, or are an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import offload
from offload.errors import ConfigError
from tests.support import models
from tests.support.oracle import assert_same_tensors, config


def _begins_with(model: Callable[[], nn.Module], folder: Path) -> dict[str, torch.Tensor]:
    with offload.init(None):
        built = model()
    engine = offload.initialize(model=built, config=config(models.GPT2, ("nvme", "nvme"), folder))[0]
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    return weights


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_begin_as_in_torch(kind: Callable[..., nn.Module], tmp_path: Path) -> None:
    found = _begins_with(lambda: nn.Sequential(kind(8, 8, num_layers=2)), tmp_path)
    torch.manual_seed(0)  # the seed of the first unit
    assert_same_tensors(found, nn.Sequential(kind(8, 8, num_layers=2)).state_dict())


def test_weights_of_recurrent_modules_are_written_by_hand(tmp_path: Path) -> None:
    def model() -> nn.Module:
        gru = nn.GRU(4, 4)
        nn.init.constant_(gru.weight_ih_l0, 3.0)
        gru.bias_hh_l0.data.uniform_(5.0, 6.0)
        nn.init.orthogonal_(gru.weight_hh_l0)
        return nn.Sequential(gru)

    found = _begins_with(model, tmp_path)
    square = found["0.weight_hh_l0"].t() @ found["0.weight_hh_l0"]
    assert torch.allclose(square, torch.eye(4), atol=1e-5)
    assert bool((found["0.weight_ih_l0"] == 3).all())
    assert 5 <= float(found["0.bias_hh_l0"].min()) and float(found["0.bias_hh_l0"].max()) <= 6


class Head(nn.Module):
    """A head with a bias, whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in "12")
        self.head = nn.Linear(16, 500)
        self.head.weight = self.embedding.weight


def test_the_bias_of_a_tied_head_has_the_range_of_torch(tmp_path: Path) -> None:
    found = _begins_with(Head, tmp_path)
    bias = found["head.bias"]
    assert 0.24 < float(bias.max()) <= 0.25 and -0.25 <= float(bias.min()) < -0.24
    assert torch.equal(found["head.weight"], found["embedding.weight"])


def _weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_weight_norm, r"^Linear makes its parameter weight_g .*outside of offload\.init"),
        (
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8))),
            r"makes its parameter original0 .*outside of offload\.init",
        ),
        (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8))), r"buffer .*outside\s+of it"),
        (
            lambda: nn.Sequential(prune.random_unstructured(nn.Linear(8, 8), "weight", 0.3)),
            r"buffer 0\.weight_mask .*outside\s+of it",
        ),
    ],
)
def test_modules_that_compute_with_weights_are_named(model: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _begins_with(model, tmp_path)


class Parent(nn.Module):
    """Writes the weights of modules below it, which are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in "123")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)


def _table() -> torch.Tensor:
    return torch.arange(64.0).view(8, 8)


class ByReset(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.layers[1].weight.copy_(_table())
            self.head.weight[1].fill_(-2.5)


class ByName(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.init_weights(1)

    def init_weights(self, layer: int) -> None:
        self.layers[layer].weight.data.copy_(_table())
        nn.init.constant_(self.head.weight, -2.5)


class ByVisit(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, -2.5)
        if module is self:
            nn.init.zeros_(self.layers[1].weight)
            with torch.no_grad():
                self.layers[1].weight.add_(_table())


class ByCopy(nn.Module):
    """Contains a copy of a parent, and not the parent that has written."""

    def __init__(self) -> None:
        super().__init__()
        self.part = copy.deepcopy(ByReset())


class Overwritten(ByReset):
    """Draws the weights once more after its parent has written them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].reset_parameters()


@pytest.mark.parametrize("model", [ByReset, ByName, ByVisit, ByCopy])
def test_what_a_module_writes_into_others_below_it_is_kept(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    found = _begins_with(model, tmp_path)
    prefix = "part." if model is ByCopy else ""
    assert torch.equal(found[f"{prefix}layers.1.weight"], _table())
    assert bool((found[f"{prefix}head.weight"][1] == -2.5).all())
    others = found[f"{prefix}layers.0.weight"]
    assert bool((others == -2.5).all()) if model is ByVisit else 0 < float(others.abs().max()) <= 8**-0.5


def test_the_last_initializer_counts(tmp_path: Path) -> None:
    found = _begins_with(Overwritten, tmp_path)
    assert 0 < float(found["layers.1.weight"].abs().max()) <= 8**-0.5
    assert bool((found["head.weight"][1] == -2.5).all())


def test_what_a_function_of_the_script_writes_is_kept(tmp_path: Path) -> None:
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 1.5)

    found = _begins_with(lambda: Parent().apply(init_weights), tmp_path)
    assert all(
        bool((value == 1.5).all()) for name, value in found.items() if name in ("layers.0.weight", "head.weight")
    )


def test_a_transformer_of_torch_begins_as_in_torch(tmp_path: Path) -> None:
    """Its constructor draws all matrices of its layers anew, which are much wider than those of a Linear."""
    plain = nn.Transformer(32, 4, 2, 2, 256, batch_first=True).state_dict()
    found = _begins_with(lambda: nn.Transformer(32, 4, 2, 2, 256, batch_first=True), tmp_path)
    for name, values in plain.items():
        bound = (6 / sum(values.shape)) ** 0.5 if values.dim() > 1 else 1.0
        assert float(found[name].abs().max()) <= bound, name
        if values.dim() > 1:
            assert float(found[name].abs().max()) > 0.95 * bound, name


def test_an_initializer_leaves_buffers_and_values_of_others_as_they_are(tmp_path: Path) -> None:
    def model() -> nn.Module:
        built = ByReset()
        built.norm.running_mean.fill_(4.0)
        nn.init.constant_(built.layers[2].weight, 6.0)
        return built

    found = _begins_with(model, tmp_path)
    assert bool((found["norm.running_mean"] == 4.0).all()) and bool((found["layers.2.weight"] == 6.0).all())


def test_values_that_are_computed_from_another_unit_are_an_error(tmp_path: Path) -> None:
    class Doubled(Parent):
        def __init__(self) -> None:
            super().__init__()
            self.reset_parameters()

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.layers[1].weight.copy_(2 * self.layers[0].weight)

    with pytest.raises(ConfigError, match="reset_parameters of Doubled computes with values of parameters of another"):
        _begins_with(Doubled, tmp_path)
