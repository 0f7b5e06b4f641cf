"""What two builds of a model of transformers share begins so inside `offload.init` too, in every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import offload
from offload.errors import OffloadError
from tests.support import models
from tests.support.families import FAMILIES, tiny_config
from tests.support.oracle import config

_LARGEST = 20_000_000
"""Parameters of a model that is built here; a few families stay large whatever their config says."""


def built(name: str, settings: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, name)(copy.deepcopy(settings))
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().to("cpu", copy=True) for name, value in named}


def begins_with(name: str, settings: Any, folder: Path) -> dict[str, torch.Tensor]:
    with offload.init(None):
        model = built(name, settings, 0)
    engine = offload.initialize(model=model, config=config(models.GPT2, ("none", "none"), folder))[0]
    try:
        return tensors_of(engine.module)
    finally:
        engine.destroy(remove=True)


def assert_begins_as_plain(name: str, settings: Any, folder: Path) -> None:
    one, other = (tensors_of(built(name, settings, seed)) for seed in (1, 2))
    found = begins_with(name, settings, folder)
    for each, values in one.items():
        shared = (values == other[each]) | (values.isnan() & other[each].isnan())
        # Of random values a few may be equal by chance.
        if float(shared.float().mean()) > 0.01:
            assert torch.equal(found[each][shared].nan_to_num(), values[shared].nan_to_num()), each
        if int((~shared).sum()) > 1000 and values.is_floating_point():
            assert 0.8 < float(found[each][~shared].std() / values[~shared].std()) < 1.25, each


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_draw_is_equal(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    try:
        tiny = tiny_config(getattr(transformers, settings))
        with torch.device("meta"):
            size = sum(each.numel() for each in built(name, tiny, 0).parameters())
        if size > _LARGEST:
            pytest.skip(f"{size} parameters")
        built(name, tiny, 0)
    except Exception as error:  # a family that asks for more than sizes
        pytest.skip(f"no tiny config: {error}")
    try:
        assert_begins_as_plain(name, tiny, tmp_path)
    except OffloadError as error:  # and one that needs values is refused by name
        assert "outside of offload.init" in str(error)


@pytest.mark.parametrize("family", ["whisper", "gpt2"])
def test_what_a_parent_writes_is_there(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    assert_begins_as_plain(name, tiny_config(getattr(transformers, settings)), tmp_path)
