"""Several ranks read a model from a folder, and write it into one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch

from offload.errors import OffloadError
from tests.support import models
from tests.support.oracle import assert_same_tensors, train_step
from tests.support.pretrained_models import CAUSAL, FAMILIES, T, engine_of, loaded, written
from tests.support.ranks.rank_pool import RankPool


def _on_ranks(given: Path, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights at the start and at the end."""
    torch.manual_seed(torch.distributed.get_rank())  # what ranks draw differs
    engine = loaded(given, folder, "bf16")
    start = engine.module.state_dict()
    engine.save_pretrained(folder / "start", dtype="fp32")
    for step in range(2):
        train_step(engine, FAMILIES["llama"].job(), step)
    engine.save_pretrained(folder / "out", max_shard_size="20KB")
    engine.save_16bit_model(folder / "half")
    end = engine.module.state_dict()
    with pytest.raises(OffloadError, match="is not a folder"):
        engine.save_pretrained(folder / "out" / "config.json")
    assert_same_tensors(engine.module.state_dict(), end)
    engine.destroy(remove=True)
    return start, end


def test_several_ranks_read_and_write_the_same(ranks: RankPool, tmp_path: Path) -> None:
    """The head is missing: all ranks draw the same one."""
    given = written(tmp_path / "given", T.LlamaModel(models.llama().config))
    (start, end), second = ranks.run(_on_ranks, tmp_path / "given", tmp_path / "swap")
    assert_same_tensors(start, second[0])
    assert_same_tensors(end, second[1])
    assert all(torch.equal(start[f"model.{name}"], value.bfloat16()) for name, value in given.items())
    masters = safetensors.torch.load_file(tmp_path / "swap" / "start" / "model.safetensors")
    assert all(torch.equal(masters[f"model.{name}"], value) for name, value in given.items()), "all bits of them"
    assert_same_tensors(end, CAUSAL.from_pretrained(tmp_path / "swap" / "out").state_dict())
    assert_same_tensors(end, safetensors.torch.load_file(tmp_path / "swap" / "half" / "model.safetensors"))


def _prompts_on_ranks(folder: Path) -> torch.Tensor:
    """The prompts that peft computes from the model's encoder, which the ranks share."""
    import peft

    torch.manual_seed(0)
    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    model = peft.get_peft_model(models.llama(), settings)
    engine = engine_of(model, folder, FAMILIES["llama"].job())
    train_step(engine, FAMILIES["llama"].job(), 0)
    engine.save_pretrained(folder / "adapter")
    prompts = copy.deepcopy(model.prompt_encoder["default"])(model.prompt_tokens["default"][None])[0].detach()
    engine.destroy(remove=True)
    return prompts


def test_several_ranks_save_what_peft_computes(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_prompts_on_ranks, tmp_path)
    assert torch.equal(first, second)
    saved = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same_tensors(saved, {"prompt_embeddings": first})
