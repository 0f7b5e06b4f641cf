"""Folders that bitsandbytes has quantized are read unit by unit; checkpoints keep the bytes of quantized weights."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn

import offload
from tests.support.oracle import assert_same_tensors, start, trained
from tests.support.quantized_models import WITH_BITSANDBYTES, folder, job, loaded

pytestmark = WITH_BITSANDBYTES

AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")
FORMS = ("nf4", "nf4, scales quantized too", "nf4 in bf16", "int8")


def quantized_folder(path: Path, form: str) -> Path:
    """Writes a model as transformers saves a quantized one."""
    model = loaded(folder(path / "values"), form, "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.unload().save_pretrained(path / "quantized")  # type: ignore[operator]
    return path / "quantized"


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model.config.use_cache = False
    return peft.get_peft_model(model, adapters).train()  # type: ignore[arg-type]


def by_transformers(path: Path) -> nn.Module:
    auto = transformers.AutoModelForCausalLM
    return adapted(auto.from_pretrained(path, dtype=torch.bfloat16, device_map={"": "cpu"}))


def by_load_pretrained(path: Path) -> nn.Module:
    return adapted(offload.load_pretrained(transformers.AutoModelForCausalLM, path, dtype=torch.bfloat16))


def inside_of_init(path: Path) -> nn.Module:
    with offload.init():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return adapted(model)


def bits(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Codes in elements of bf16 may be NaN, which equals nothing."""
    return {name: value.contiguous().view(-1).view(torch.uint8) for name, value in weights.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "a folder of bitsandbytes: load_pretrained, and from_pretrained in offload.init", "right")
@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_folder_trains_as_the_model_that_transformers_loads(form: str, tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, form)
    found = []
    for number, make in enumerate((by_transformers, by_load_pretrained, inside_of_init)):
        this = job(path, form)._replace(model=lambda make=make: make(path))
        engine = start(this, DISK, tmp_path / str(number))
        found.append(trained(engine, this))
        engine.destroy(remove=True)
    for other in found[1:]:
        assert other.losses == found[0].losses and other.norms == found[0].norms
        assert_same_tensors(bits(found[0].weights), bits(other.weights))
