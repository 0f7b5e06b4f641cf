"""The units of real models have the expected names, and every parameter is in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from offload.errors import ConfigError
from offload.layout.units import find_units
from tests.support import models

NAMES: dict[Callable[[], nn.Module], list[str]] = {
    models.gpt2: [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
        "transformer.ln_f",
    ],
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


@pytest.mark.parametrize("build", NAMES, ids=lambda build: build.__name__)
def test_units_have_the_expected_names(build: Callable[[], nn.Module]) -> None:
    assert [unit.name for unit in find_units(build()).units] == NAMES[build]


@pytest.mark.parametrize("build", [*NAMES, models.Mixture], ids=lambda build: build.__name__)
def test_every_parameter_is_in_one_unit(build: Callable[[], nn.Module]) -> None:
    model = build()
    taken = [name for unit in find_units(model).units for name in unit.parameters]
    assert sorted(taken) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("build", [*NAMES, models.Mixture], ids=lambda build: build.__name__)
def test_every_owner_of_parameters_is_a_site(build: Callable[[], nn.Module]) -> None:
    """Also through a second name: the module that holds a tied weight needs the unit of the first."""
    model = build()
    found = find_units(model)
    unit_of = {id(model.get_parameter(n)): i for i, unit in enumerate(found.units) for n in unit.parameters}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert unit_of[id(parameter)] in found.sites[name.rpartition(".")[0]]


def test_a_named_module_is_one_unit() -> None:
    model = models.t5()
    names = [unit.name for unit in find_units(model, ["T5Block"]).units]
    assert "encoder.block.0" in names and "encoder.block.0.layer.0" not in names


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="NoSuchBlock"):
        find_units(models.gpt2(), ["NoSuchBlock"])


def test_it_changes_nothing() -> None:
    model = models.gpt2()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    find_units(model)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
