"""Models of transformers whose MLPs are computed in chunks, by the config or by hand."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import transformers
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job

TIERS = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")]
DISK = ("nvme", "nvme")


def of(kind: str, **more: Any) -> nn.Module:
    """Returns a small causal language model of a family."""
    made = getattr(transformers, f"{kind}Config")(**{**models.DECODER, "pad_token_id": 0, **more})
    return getattr(transformers, f"{kind}ForCausalLM")(made)  # type: ignore[no-any-return]


def qwen2() -> nn.Module:
    return of("Qwen2")


def recomputed(reentrant: bool) -> nn.Module:
    model: Any = models.llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its new name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model  # type: ignore[no-any-return]


def recomputed_by_hooks() -> nn.Module:
    return recomputed(False)


def recomputed_by_a_function() -> nn.Module:
    model: Any = recomputed(True)
    model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def lora_in_mlps() -> nn.Module:
    adapters = peft.LoraConfig(r=4, target_modules=["up_proj", "q_proj"], init_lora_weights=False)
    return peft.get_peft_model(models.llama(), adapters)  # type: ignore[no-any-return, arg-type]


JOBS = {
    "llama": Job(models.llama, models.language_loss, steps=3, accumulation=2),
    "llama, bf16": Job(models.llama, models.language_loss, steps=3, accumulation=2, dtype="bf16"),
    "llama, fp16": Job(models.llama, models.language_loss, steps=3, dtype="fp16"),
    "gpt2": Job(models.gpt2, models.language_loss, steps=3),
    "qwen2": Job(qwen2, models.language_loss, steps=3),
    "lora": Job(lora_in_mlps, models.language_loss, steps=3),
    "recomputed": Job(recomputed_by_hooks, models.language_loss, steps=3),
    "recomputed, reentrant": Job(recomputed_by_a_function, models.language_loss, steps=3),
}


def tiled_by_hand() -> nn.Module:
    model: Any = models.llama()
    for layer in model.model.layers:
        offload.tiled(layer.mlp, chunks=3)
    return model  # type: ignore[no-any-return]
