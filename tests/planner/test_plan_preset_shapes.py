"""The shape of a Llama preset in closed form is the one that a forward of the model counts, in every number."""

from __future__ import annotations

import sys

import pytest
import torch

from offload.errors import ConfigError
from offload.finetune.model import allows_chunks
from offload.planner.model_shape import Shape, from_name, from_preset
from offload.presets import LLAMA, PRESETS

_LLAMAS = sorted(name for name, preset in PRESETS.items() if preset.config == LLAMA)
_LAYERS = 3
"""The first layer differs from the others, which are alike."""


def _counted(name: str, sequence: int, dtype: torch.dtype) -> Shape:
    """Returns the shape that a forward counts: a model that is cut has no closed form."""
    return from_name(name, sequence, dtype, layers=_LAYERS)


@pytest.fixture(params=_LLAMAS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a preset, which has fewer layers for the test."""
    preset = PRESETS[request.param]._replace(settings={**PRESETS[request.param].settings, "num_hidden_layers": _LAYERS})
    monkeypatch.setitem(PRESETS, request.param, preset)
    return str(request.param)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("sequence", "dtype"), [(2, torch.bfloat16), (1023, torch.float16), (3, torch.float32), (4096, torch.bfloat16)]
)
def test_the_closed_form_is_what_is_counted(name: str, sequence: int, dtype: torch.dtype) -> None:
    assert from_preset(name, sequence, dtype.itemsize) == _counted(name, sequence, dtype)


@pytest.mark.sample(2)
def test_a_length_at_which_the_mask_has_the_shape_of_another_tensor_is_counted(name: str) -> None:
    settings = PRESETS[name].settings
    for sequence in (1, settings["hidden_size"] // settings["num_attention_heads"]):
        assert from_preset(name, sequence, 2) is None
        assert from_name(name, sequence) == _counted(name, sequence, torch.bfloat16)


def test_it_needs_no_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert allows_chunks(name) and from_name(name, 1024) == from_preset(name, 1024, 2)
    with pytest.raises(ConfigError, match="transformers"):
        from_name(name, 1024, units=["model.layers.0"])


def test_what_is_no_llama_or_too_long_is_left_to_the_forward_or_refused() -> None:
    assert from_preset("gpt2-tiny", 64, 2) is None and from_preset("/a/folder", 64, 2) is None
    with pytest.raises(ConfigError, match="--seq-len 4097 is more than the 4096 positions of this model"):
        from_preset("llama-1b", 4097, 2)
