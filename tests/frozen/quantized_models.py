"""Models that bitsandbytes has quantized, and the same training in memory."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import offload
from tests.support import models
from tests.support.model_folders import llama_config
from tests.support.oracle import DTYPES, Job, PlainEngine, rounded

WITH_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

FOUR_BITS: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "nf4, scales quantized too": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 in bf16": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
}
"""Forms of bitsandbytes' 4 bits, as transformers configures them."""


def settings(form: str, dtype: str) -> transformers.BitsAndBytesConfig:
    """Returns the settings of a form by its name; "int8" for 8 bits."""
    if form == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=DTYPES[dtype], **FOUR_BITS[form])


def folder(path: Path, **shape: Any) -> Path:
    """Writes a model in values."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(**shape)) if shape else models.llama()
    model.save_pretrained(path)
    return path


def loaded(path: Path, form: str, dtype: str, **adapters: Any) -> nn.Module:
    """Returns a quantized model as transformers loads it, with adapters of peft."""
    return _adapted(path, {"quantization_config": settings(form, dtype), "device_map": {"": "cpu"}}, dtype, adapters)


def in_values(path: Path, dtype: str = "bf16", **adapters: Any) -> nn.Module:
    """Returns the model before quantization, with the same adapters."""
    return _adapted(path, {}, dtype, adapters)


def _adapted(path: Path, more: dict[str, Any], dtype: str, adapters: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **more)
        model.config.use_cache = False
        torch.manual_seed(1)
        wanted = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **adapters}
        return peft.get_peft_model(model, peft.LoraConfig(**wanted)).train()  # type: ignore[arg-type]


def job(path: Path, form: str, dtype: str = "bf16", **adapters: Any) -> Job:
    """Returns a job over the model of a folder, quantized."""
    made = functools.partial(loaded, path, form, dtype, **adapters)
    return Job(made, models.language_loss, steps=3, dtype=dtype)


class InMemory(PlainEngine):
    """The job in memory by bitsandbytes and peft; what is not quantized has the dtype of the weights."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.module = job.model()
        for parameter in self.module.parameters():
            if type(parameter) is nn.Parameter and parameter.is_floating_point():
                parameter.data = rounded(parameter.data.float(), DTYPES[job.dtype])

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the gradients of adapters."""
        loss.backward()
        found = {}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return found

    @torch.no_grad()
    def follow(self, engine: offload.Engine) -> None:
        """Copies the weights that train from an engine."""
        theirs = engine.module.state_dict()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(theirs[name])
