"""A vision-language model of transformers, whole and with adapters, keeps its bits on any tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn

from tests.support.oracle import Job, same_bits

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
IMAGE, WORDS, PATCHES = 63, 64, 4
"""The token that stands for a patch, the number of tokens, and the patches of an image."""
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **_SIZES)
    text = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **_SIZES)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=PATCHES
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    sizes = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "mlp_ratio": 2, "patch_size": 4}
    text = {**_SIZES, "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 32}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(vision_config=sizes, text_config=text, image_token_id=IMAGE)
    return transformers.Qwen2VLForConditionalGeneration(config)


def adapted(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with adapters in its text model and in its vision tower."""
    return peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def adapted_llava() -> nn.Module:
    return adapted(llava)


def tokens(draw: torch.Generator) -> torch.Tensor:
    """Two texts, each with an image near its beginning."""
    ids = torch.randint(2, 60, (2, 12), generator=draw)
    ids[:, 2 : 2 + PATCHES] = IMAGE
    return ids


def llava_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + micro)
    ids, pixels = tokens(draw), torch.randn(2, 3, 8, 8, generator=draw)
    loss: torch.Tensor = model(input_ids=ids, pixel_values=pixels, labels=ids.masked_fill(ids == IMAGE, -100)).loss
    return loss


def qwen2_vl_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + micro)
    ids, grid = tokens(draw), torch.tensor([[1, 4, 4]] * 2)
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=draw)
    labels = ids.masked_fill(ids == IMAGE, -100)
    kinds = (ids == IMAGE).int()
    loss: torch.Tensor = model(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grid, labels=labels, mm_token_type_ids=kinds
    ).loss
    return loss


JOBS = {
    "LLaVA": Job(llava, llava_loss, steps=3, accumulation=2),
    "LLaVA-LoRA": Job(adapted_llava, llava_loss, steps=3, accumulation=2),
    "Qwen2-VL": Job(qwen2_vl, qwen2_vl_loss, steps=3, accumulation=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", JOBS)
def test_losses_norms_and_weights_are_those_of_the_run_in_memory(name: str, tmp_path: Path) -> None:
    result = same_bits(JOBS[name], tmp_path, [MEMORY, DISK])
    assert all(norm > 0 for norm in result.norms) and len(set(result.losses)) == 3
