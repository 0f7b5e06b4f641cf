"""`offload.init`: a model without memory, whose weights come one unit at a time and depend on the seed alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.engine.birth import materialize
from offload.errors import ConfigError
from tests import models
from tests.oracle import Job, config


def _weights(job: Job, placement: tuple[str, str], folder: Path, **options: object) -> dict[str, torch.Tensor]:
    with offload.init(None):
        model = job.model()
    engine = offload.initialize(model=model, config=config(job, placement, folder, **options))[0]
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    return weights


@pytest.mark.parametrize("job", [models.GPT2, models.MIXTURE, Job(models.mixtral, models.language_loss)])
def test_weights_depend_on_the_seed_alone(job: Job, tmp_path: Path) -> None:
    first = _weights(job, ("none", "none"), tmp_path)
    torch.manual_seed(5)
    again = _weights(job, ("nvme", "nvme"), tmp_path)
    other = _weights(job, ("none", "none"), tmp_path, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_they_are_distributed_as_the_library_wants(tmp_path: Path) -> None:
    """Standard deviation of each matrix, ones of each norm, zeros of each bias: as when built the usual way."""
    weights = _weights(models.GPT2, ("none", "none"), tmp_path)
    torch.manual_seed(0)
    for name, usual in models.gpt2().state_dict().items():
        found = weights[name]
        assert found.shape == usual.shape
        if usual.std() == 0:
            assert torch.equal(found, usual), name
        else:
            assert abs(float(found.std() / usual.std()) - 1) < 0.2, name


def test_ties_and_buffers_stay() -> None:
    with offload.init():
        model = models.Mixture()
    assert model.head.weight is model.embedding.weight and model.embedding.weight.is_meta
    assert not model.calls.is_meta
    tied = model.embedding.weight
    materialize(model, ["embedding.weight"], 0)
    assert model.head.weight is tied and not tied.is_meta and isinstance(tied, nn.Parameter)


def test_the_generators_of_the_user_are_not_touched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with offload.init():
        model = nn.Linear(4, 4)
    materialize(model, ["weight", "bias"], 0)
    assert torch.equal(torch.rand(4), expected)


class Scale(nn.Module):
    """Has no `reset_parameters`: its constructor's values are all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.5))


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def test_values_that_cannot_be_made_again_are_kept() -> None:
    with offload.init():
        model = Scale()
    assert torch.equal(model.weight, torch.full((3,), 2.5))


def test_a_parameter_that_nobody_initializes_is_an_error() -> None:
    with offload.init():
        model = nn.Sequential(Forgetful(2, 2))
    with pytest.raises(ConfigError, match=r"0\.weight of Forgetful"):
        materialize(model, ["0.weight", "0.bias"], 0)


def test_meta_buffers_are_an_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.Mixture()
    with pytest.raises(ConfigError, match=r"calls.*offload\.init"):
        offload.initialize(model=model, config=config(models.MIXTURE, ("none", "none"), tmp_path))
