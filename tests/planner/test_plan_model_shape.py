"""The shape of a model shows its blocks, MLPs and attention, and is that of any other length by arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.planner.model_shape import from_count, from_name
from tests.planner.activation_plans import llama


def test_a_shape_of_another_length_is_that_of_a_count_of_it() -> None:
    counted, scaled = from_count(10**9, 16, 2048), from_count(10**9, 16, 512).at(2048)
    assert counted._replace(uses=()) == scaled._replace(uses=())
    for one, other in zip(counted.uses, scaled.uses, strict=True):
        assert other.choice == one.choice
        assert other[:-1] == pytest.approx(one[:-1])


def test_a_model_shows_its_blocks_its_mlps_and_its_attention(tmp_path: Path) -> None:
    """No matrix of tokens times tokens is counted: bytes grow with the tokens."""
    short, long = (from_name(llama(tmp_path), tokens) for tokens in (512, 2048))
    assert [block.name for block in short.blocks] == [f"model.layers.{index}" for index in range(3)]
    assert short.positions == 8192 and short.itemsize == 2
    for one, four in zip(short.uses[2:], long.uses[2:], strict=True):
        assert four.saved == pytest.approx(4 * one.saved, rel=1e-3)
    layer, tokens = short.uses[2], 512
    assert layer.attention == 4 * tokens * tokens * 256 and long.uses[2].attention == 16 * layer.attention
    assert layer.mlp_flops == 2 * tokens * 3 * 256 * 768
    assert layer.mlp_saved == 2 * tokens * (256 + 4 * 768), "its input, and four tensors of its width"
    assert layer.mlp_largest == 2 * tokens * 768 and layer.largest == 4 * tokens * 256, "of a norm, in fp32"
