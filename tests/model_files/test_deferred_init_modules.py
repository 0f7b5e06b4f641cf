"""Modules of torch that keep, tie or reshape their parameters are built inside `offload.init`, or are an error."""

from __future__ import annotations

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
