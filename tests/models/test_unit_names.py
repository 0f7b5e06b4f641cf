"""The units of real models have the expected names, hold every parameter once, and are cut evenly for any ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.errors import ConfigError
from offload.layout.flat_layout import lay_out
from offload.layout.units import find_units
from tests.support import models

NAMES: dict[Callable[[], nn.Module], list[str]] = {
    models.shallow: ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f"],
    models.t5: [
        "shared",
        *[f"encoder.block.{block}.layer.{layer}" for block in (0, 1) for layer in (0, 1)],
        "encoder.final_layer_norm",
        *[f"decoder.block.{block}.layer.{layer}" for block in (0, 1) for layer in (0, 1, 2)],
        "decoder.final_layer_norm",
    ],
    models.swin: [
        "swin.embeddings.patch_embeddings.projection",
        "swin.embeddings.norm",
        "swin.encoder.layers.0.blocks.0",
        "swin.encoder.layers.0",
        "swin.encoder.layers.1.blocks.0",
        "swin.encoder.layers.1.blocks.1",
        "swin.layernorm",
        "classifier",
    ],
    models.mixtral: ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    models.llava: [
        "model.vision_tower.embeddings",
        "model.vision_tower.embeddings.patch_embedding",
        "model.vision_tower.embeddings.position_embedding",
        "model.vision_tower.pre_layrnorm",
        "model.vision_tower.encoder.layers.0",
        "model.vision_tower.encoder.layers.1",
        "model.vision_tower.post_layernorm",
        "model.multi_modal_projector.linear_1",
        "model.multi_modal_projector.linear_2",
        "model.language_model.embed_tokens",
        "model.language_model.layers.0",
        "model.language_model.layers.1",
        "model.language_model.norm",
        "lm_head",
    ],
    models.resnet: [
        "resnet.embedder.embedder.convolution",
        "resnet.embedder.embedder.normalization",
        "resnet.encoder.stages.0",
        "resnet.encoder.stages.1",
        "classifier.1",
    ],
}


def test_units_have_the_expected_names() -> None:
    build: Callable[[], nn.Module]
    for build in NAMES:
        print(build)
        assert [unit.name for unit in find_units(build()).units] == NAMES[build]


def test_every_parameter_is_in_one_unit() -> None:
    build: Callable[[], nn.Module]
    for build in (*NAMES, models.Mixture):
        print(build)
        model = build()
        taken = [name for unit in find_units(model).units for name in unit.parameters]
        assert sorted(taken) == sorted(name for name, _ in model.named_parameters())


def test_every_owner_of_parameters_is_a_site() -> None:
    """Also through a second name: the module that holds a tied weight needs the unit of the first."""
    build: Callable[[], nn.Module]
    for build in (*NAMES, models.Mixture):
        print(build)
        model = build()
        units = find_units(model)
        unit_of = {id(model.get_parameter(n)): i for i, unit in enumerate(units.units) for n in unit.parameters}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert unit_of[id(parameter)] in units.sites[name.rpartition(".")[0]]


def test_a_named_module_is_one_unit() -> None:
    model = models.t5()
    names = [unit.name for unit in find_units(model, ["T5Block"]).units]
    assert "encoder.block.0" in names and "encoder.block.0.layer.0" not in names


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="NoSuchBlock"):
        find_units(models.shallow(), ["NoSuchBlock"])


parameters = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=12)


def _parameters(sizes: list[tuple[int, bool]]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.empty(n, device="meta"), g)) for i, (n, g) in enumerate(sizes)]


@given(parameters, st.integers(1, 8))
@settings(deadline=None)
def test_segments_are_aligned_disjoint_and_inside(sizes: list[tuple[int, bool]], world_size: int) -> None:
    layout = lay_out("unit", _parameters(sizes), world_size)
    assert sorted(s.name for s in layout.segments) == sorted(f"p{i}" for i in range(len(sizes)))
    end = 0
    for segment in layout.segments:
        assert segment.start % 32 == 0 and segment.start >= end
        end = segment.stop
    assert end <= layout.numel
    assert layout.numel % (world_size * 2048) == 0


@given(parameters, st.integers(1, 8))
@settings(deadline=None)
def test_the_trainable_segments_are_a_prefix(sizes: list[tuple[int, bool]], world_size: int) -> None:
    layout = lay_out("unit", _parameters(sizes), world_size)
    assert layout.trainable_stop % 2048 == 0
    assert (layout.trainable_stop > 0) == any(n and g for n, g in sizes)
    for segment in layout.segments:
        if segment.trainable:
            assert segment.stop <= layout.trainable_stop


@given(parameters, st.integers(1, 8))
@settings(deadline=None)
def test_partitions_cover_the_unit_once(sizes: list[tuple[int, bool]], world_size: int) -> None:
    layout = lay_out("unit", _parameters(sizes), world_size)
    trained = [layout.trainable(rank, world_size) for rank in range(world_size)]
    frozen = [layout.frozen(rank, world_size) for rank in range(world_size)]
    assert trained[0].start == 0 and trained[-1].stop == frozen[0].start == layout.trainable_stop
    assert frozen[-1].stop == layout.numel
    for parts in (trained, frozen):
        assert all(left.stop == right.start for left, right in itertools.pairwise(parts))
        assert len({len(part) for part in parts}) == 1 and len(parts[0]) % 2048 == 0


def test_a_tied_or_empty_parameter_takes_no_room_twice() -> None:
    layout = lay_out("unit", _parameters([(0, True), (1, True)]), 1)
    assert layout.numel == 2048
