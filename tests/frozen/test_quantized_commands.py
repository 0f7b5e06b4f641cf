"""Commands take a folder of quantized weights with adapters, and do not train it whole."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import ConfigError
from offload.finetune.model import adapt, find_folder, parse_lora
from offload.planner.model_shape import Adapters, from_adapted, from_name, from_training
from offload.presets import quantized_bits
from tests.frozen.quantized_models import WITH_BITSANDBYTES, folder, in_values, loaded, settings
from tests.support import models
from tests.support.model_folders import make_folder, write_lines

LORA = "r=4,targets=all-linear"


def says(path: Path, **quantization: object) -> Path:
    """Lets the config of a folder say how its weights are quantized."""
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, "quantization_config": quantization}))
    return path


def adapters(path: Path, frozen: str | None = None) -> int:
    """Returns the elements that a plan of adapters counts."""
    make = Adapters(lambda model: adapt(model, parse_lora(LORA)), frozen)
    return sum(layout.numel for layout in from_adapted(str(path), make, 16, torch.bfloat16).layouts)


def test_a_plan_of_a_quantized_folder_counts_its_codes(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    plain, four, eight = adapters(tmp_path), adapters(tmp_path, "nf4"), adapters(tmp_path, "int8")
    assert four < eight < plain
    assert adapters(says(tmp_path, quant_method="bitsandbytes", load_in_4bit=True)) == four
    assert adapters(says(tmp_path, quant_method="bitsandbytes", load_in_8bit=True)) == eight


def test_bits_are_those_that_the_config_says(tmp_path: Path) -> None:
    assert quantized_bits({"model_type": "llama"}) is None
    assert quantized_bits({"quantization_config": {"quant_method": "gptq", "bits": 4}}) == 4
    assert quantized_bits({"quantization_config": {"quant_method": "fp8"}}) == 8


def test_a_quantized_folder_does_not_train_without_adapters(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    assert find_folder(str(tmp_path)) == tmp_path
    says(tmp_path, quant_method="bitsandbytes", load_in_4bit=True)
    with pytest.raises(ConfigError, match="are quantized, and quantized weights do not train; train adapters on them"):
        find_folder(str(tmp_path))
    assert find_folder(str(tmp_path), adapters=True) == tmp_path
    with pytest.raises(ConfigError, match="are quantized, and quantized weights do not train; plan adapters on them"):
        from_name(str(tmp_path), 16)


@WITH_BITSANDBYTES
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_prediction_counts_the_products_of_the_values_and_the_bytes_of_the_codes(form: str, tmp_path: Path) -> None:
    values = folder(tmp_path)
    plain = from_training(in_values(values), 16, torch.bfloat16, (), {})
    model = loaded(values, form, "bf16")
    found = from_training(model, 16, torch.bfloat16, (), {})
    assert [use.flops for use in found.uses] == [use.flops for use in plain.uses]
    assert sum(layout.numel for layout in found.layouts) < sum(layout.numel for layout in plain.layouts)
    model(input_ids=torch.arange(8).view(1, 8))  # the model itself is as it was


@WITH_BITSANDBYTES
@pytest.mark.filterwarnings("ignore")
def test_train_makes_adapters_for_a_quantized_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "values", hidden_size=64, intermediate_size=128)
    auto = transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_pretrained(
            tmp_path / "values",
            dtype=torch.bfloat16,
            device_map={"": "cpu"},
            quantization_config=settings("nf4", "bf16"),
        )
        model.save_pretrained(tmp_path / "quantized")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "values")
        tokenizer.save_pretrained(tmp_path / "quantized")
    write_lines(tmp_path / "data.jsonl", [{"text": "a sentence of some words " * 6}] * 8)
    arguments = ["train", "--model", str(tmp_path / "quantized"), "--data", str(tmp_path / "data.jsonl")]
    arguments += ["--steps", "1", "--seq-len", "32", "--nvme-path", str(tmp_path / "run")]
    refused = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "whole")])
    assert refused.exit_code == 2 and "quantized weights do not train" in refused.output.replace("\n", " ")
    done = CliRunner().invoke(app, [*arguments, "--lora", LORA, "--output", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    assert "quantized weights are stored as the model has them" in done.output
    saved = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
