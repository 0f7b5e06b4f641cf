"""A model comes from a folder and goes into one: any family of models, with the bits that `transformers` has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import offload
from tests import models
from tests.oracle import Job, config, train_step

DISK = ("nvme", "nvme")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}

Inputs = dict[str, torch.Tensor]


def words(ids: torch.Tensor) -> Inputs:
    return {"input_ids": ids, "labels": ids}


def pixels(ids: torch.Tensor) -> Inputs:
    generator = torch.Generator().manual_seed(int(ids.sum()))
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": ids[:, 0] % 2}


class Family:
    """A family of models: one that is built of random numbers, the class that loads it, what it is given."""

    def __init__(self, model: Callable[[], Any], auto: Any, inputs: Callable[[torch.Tensor], Inputs] = words) -> None:
        self.model, self.auto, self.inputs = model, auto, inputs

    def loss(self, model: Any, step: int, micro: int) -> Any:
        return model(**self.inputs(models.tokens(step, micro))).loss

    def logits(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**self.inputs(models.tokens(9, 9))).logits.clone()

    def job(self, dtype: str = "fp32") -> Job:
        return Job(self.model, self.loss, steps=2, dtype=dtype)


T = transformers
CAUSAL = T.AutoModelForCausalLM
FAMILIES = {
    "gpt2": Family(models.gpt2, CAUSAL),
    "llama": Family(models.llama, T.LlamaForCausalLM),
    "mistral": Family(lambda: T.MistralForCausalLM(T.MistralConfig(**SMALL)), CAUSAL),
    "qwen2": Family(lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**SMALL, tie_word_embeddings=True)), CAUSAL),
    "qwen3 moe": Family(lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**SMALL, **EXPERTS)), CAUSAL),
    "mixtral": Family(models.mixtral, CAUSAL),
    "gemma": Family(lambda: T.GemmaForCausalLM(T.GemmaConfig(**SMALL, head_dim=8)), CAUSAL),
    "t5": Family(models.t5, T.AutoModelForSeq2SeqLM),
    "bert": Family(
        lambda: T.BertForMaskedLM(
            T.BertConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
            )
        ),
        T.BertForMaskedLM,
    ),
    "vit": Family(
        lambda: T.ViTForImageClassification(
            T.ViTConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=16,
                patch_size=8,
                num_labels=2,
            )
        ),
        T.AutoModelForImageClassification,
        pixels,
    ),
}


def written(folder: Path, model: nn.Module | None = None, seed: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Save a model by transformers; its weights."""
    torch.manual_seed(seed)
    model = models.llama() if model is None else model
    model.save_pretrained(folder, **options)
    return {name: value.clone() for name, value in model.state_dict().items()}


def engine_of(model: Any, folder: Path, job: Job, placement: tuple[str, str] = DISK, **options: Any) -> offload.Engine:
    return offload.initialize(model=model, config=config(job, placement, folder, **options))[0]


def loaded(source: Path, folder: Path, dtype: str = "fp32", **options: Any) -> offload.Engine:
    """An engine over the Llama that lies in `source`."""
    job = FAMILIES["llama"].job(dtype)
    return engine_of(offload.load_pretrained(CAUSAL, source, **options), folder, job)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_comes_and_goes(name: str, dtype: str, tmp_path: Path) -> None:
    """Loaded, trained, asked for words, saved, and loaded by transformers, which gives the same logits."""
    family = FAMILIES[name]
    job = family.job(dtype)
    given = written(tmp_path / "given", family.model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]))
    model, info = offload.load_pretrained(
        family.auto, tmp_path / "given", config(job, DISK, tmp_path), output_loading_info=True
    )
    assert info == ((), (), ()) and all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    engine = engine_of(model, tmp_path / "swap", job)
    state = engine.module.state_dict()
    assert state.keys() == given.keys() and all(torch.equal(state[key], given[key]) for key in given)
    assert torch.equal(family.logits(engine), family.logits(family.auto.from_pretrained(tmp_path / "given")))
    engine.train()
    assert all(train_step(engine, job, step) > 0 for step in range(2))
    engine.eval()
    expected = family.logits(engine)
    if engine.module.can_generate():
        assert engine.generate(models.tokens(9, 9)[:, :4], max_new_tokens=2, do_sample=False).shape[0] == 2
    engine.save_pretrained(tmp_path / "out")
    engine.destroy(remove=True)
    back, report = family.auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(family.logits(back), expected)
    assert (tmp_path / "out" / "generation_config.json").exists() == back.can_generate()
    again = offload.load_pretrained(family.auto, tmp_path / "out", output_loading_info=True)[1]
    assert again == ((), (), ())
