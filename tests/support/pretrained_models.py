"""Folders with models of many families, as `transformers` writes them, and engines that load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job, config

DISK = ("nvme", "nvme")
SMALL = {**models.DECODER, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}

Inputs = dict[str, torch.Tensor]


def words(ids: torch.Tensor) -> Inputs:
    return {"input_ids": ids, "labels": ids}


def pixels(ids: torch.Tensor) -> Inputs:
    generator = torch.Generator().manual_seed(int(ids.sum()))
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": ids[:, 0] % 2}


class Family:
    """A family of models: one that is built of random numbers, the class that loads it, and its inputs."""

    def __init__(self, model: Callable[[], Any], auto: Any, inputs: Callable[[torch.Tensor], Inputs] = words) -> None:
        self.model, self.auto, self.inputs = model, auto, inputs

    def loss(self, model: Any, step: int, micro: int) -> Any:
        return model(**self.inputs(models.tokens(step, micro))).loss

    def logits(self, model: Any) -> torch.Tensor:
        # Experts that are units are used one by one, which rounds otherwise than all at once.
        if isinstance(model, T.PreTrainedModel) and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        with torch.no_grad():
            return model(**self.inputs(models.tokens(9, 9))).logits.clone().cpu()

    def job(self, dtype: str = "fp32") -> Job:
        return Job(self.model, self.loss, steps=2, dtype=dtype)


T = transformers
CAUSAL = T.AutoModelForCausalLM
FAMILIES = {
    "gpt2": Family(models.shallow, CAUSAL),
    "llama": Family(models.llama, T.LlamaForCausalLM),
    "mistral": Family(lambda: T.MistralForCausalLM(T.MistralConfig(**SMALL)), CAUSAL),
    "qwen2": Family(lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**SMALL, tie_word_embeddings=True)), CAUSAL),
    "qwen3 moe": Family(lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**SMALL, **EXPERTS)), CAUSAL),
    "mixtral": Family(models.mixtral, CAUSAL),
    "gemma": Family(lambda: T.GemmaForCausalLM(T.GemmaConfig(**SMALL, head_dim=8)), CAUSAL),
    "t5": Family(models.t5, T.AutoModelForSeq2SeqLM),
    "bert": Family(lambda: T.BertForMaskedLM(T.BertConfig(**models.WIDTHS, vocab_size=128)), T.BertForMaskedLM),
    "vit": Family(
        lambda: T.ViTForImageClassification(T.ViTConfig(**models.WIDTHS, **models.IMAGES, num_labels=2)),
        T.AutoModelForImageClassification,
        pixels,
    ),
}


def written(folder: Path, model: nn.Module | None = None, seed: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Saves a model by transformers, and returns its weights."""
    torch.manual_seed(seed)
    model = models.llama() if model is None else model
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, **options)
    else:
        folder.mkdir()
        safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return {name: value.clone() for name, value in model.state_dict().items()}


_engines: list[offload.Engine] = []


def end_engines() -> None:
    """Destroys the engines that `engine_of` has made: the fixture `engines_end` calls it after a test."""
    while _engines:
        _engines.pop().destroy(remove=True)


def engine_of(model: Any, folder: Path, job: Job, placement: tuple[str, str] = DISK, **options: Any) -> offload.Engine:
    engine = offload.initialize(model=model, config=config(job, placement, folder, **options))[0]
    _engines.append(engine)
    return engine


def loaded(source: Path, folder: Path, dtype: str = "fp32", **options: Any) -> offload.Engine:
    """Returns an engine over the Llama that is stored in `source`."""
    job = FAMILIES["llama"].job(dtype)
    return engine_of(offload.load_pretrained(CAUSAL, source, **options), folder, job)


class Plain(nn.Module):
    """A module that is none of transformers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
