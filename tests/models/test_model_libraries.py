"""Models of diffusers, Liger and vision-language families keep their bits on any tier."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from offload.hf import OffloadTrainer
from tests import ROOT
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, accumulated_step, assert_same, plain_loop, run, same_bits
from tests.support.trainer_runs import FEW, MEMORY, Texts, arguments, assert_close, config, ended, result, seeded, stock

diffusers = pytest.importorskip("diffusers")

IN_MEMORY, DISK = ("none", "none"), ("nvme", "nvme")


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )


def noisy(
    step: int, micro: int, *shape: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Latents with noise, their time, the velocity from the one to the other, and the text's features."""
    draw = torch.Generator().manual_seed(10 * step + micro)
    latents, noise = torch.randn(2, *shape, generator=draw), torch.randn(2, *shape, generator=draw)
    time = torch.rand(2, generator=draw)
    share = time.view(2, *[1] * len(shape))
    text = {
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=draw),
        "pooled_projections": torch.randn(2, 32, generator=draw),
    }
    return (1 - share) * latents + share * noise, time, noise - latents, text


def flux_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    hidden, time, velocity, text = noisy(step, micro, 16, 16)
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
    output = model(hidden_states=hidden, timestep=time, return_dict=False, **text, **places)[0]
    return (output.float() - velocity).square().mean()


def sd3_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    hidden, time, velocity, text = noisy(step, micro, 4, 8, 8)
    output = model(hidden_states=hidden, timestep=1000 * time, return_dict=False, **text)[0]
    return (output.float() - velocity).square().mean()


JOBS = {"Flux": Job(flux, flux_loss, steps=3, accumulation=2), "SD3": Job(sd3, sd3_loss, steps=3, accumulation=2)}


@pytest.mark.parametrize("name", JOBS)
def test_losses_norms_and_weights_are_those_of_the_run_in_memory(name: str, tmp_path: Path) -> None:
    result = same_bits(JOBS[name], tmp_path, [IN_MEMORY, DISK])
    assert all(norm > 0 for norm in result.norms) and len(set(result.losses)) == 3


@pytest.mark.parametrize("name", JOBS)
def test_micro_batches_that_take_turns_at_each_block_change_no_bit(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    plain = run(job, IN_MEMORY, tmp_path / "plain", accumulated_step, schedule="micro_batch_major")
    assert_same(plain, run(job, DISK, tmp_path / "layered", accumulated_step, schedule="layer_major"))


FUSED_LOSS_ALONE = {"rope": False, "rms_norm": False, "swiglu": False}


def interpreted(call: str) -> None:
    """Calls a function of this file in a new process: Triton reads the variable when it is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    program = [sys.executable, "-c", f"from tests.models.test_model_libraries import *; {call}"]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def patched(**kernels: bool) -> nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model: Any = models.llama()
    apply_liger_kernel_to_llama(model=model, **kernels)
    return model  # type: ignore[no-any-return]


def fused_loss() -> nn.Module:
    return patched(**FUSED_LOSS_ALONE)


def train_in_every_tier(dtype: str) -> None:
    job = Job(fused_loss, models.language_loss, steps=3, accumulation=2, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        mine = same_bits(job, Path(folder), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
    # The reference is the model without Liger: in 16 bits both losses round their logits.
    plain = plain_loop(job._replace(model=models.llama))
    if dtype == "fp32":
        rounding_bounds.same_training(mine, plain, job._replace(model=models.llama), reordered=True)
    else:
        rounding_bounds.same_losses(mine.losses, plain.losses, job._replace(model=models.llama))


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton",
)
@pytest.mark.works(
    "Graphs",
    "a model patched by Liger, with its fused loss (where it is installed; interpreted without a GPU)",
    "right",
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_bits_do_not_depend_on_the_tier_and_losses_are_those_without_liger(dtype: str) -> None:
    interpreted(f"train_in_every_tier({dtype!r})")


def train_by_the_trainer(patched_before: bool) -> None:
    """By the Trainer's argument, or by the script before."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    logging.getLogger("offload").setLevel(logging.INFO)
    kernels = {
        "use_liger_kernel": True,
        "liger_kernel_config": {**FUSED_LOSS_ALONE, "fused_linear_cross_entropy": True},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mine = OffloadTrainer(
            model=seeded(fused_loss if patched_before else models.llama),
            args=arguments(folder / "mine", **{} if patched_before else kernels),
            train_dataset=Texts(FEW),
            offload_config=config(folder, MEMORY),
        )
        with ended(mine):
            mine.train()
            assert_close(result(mine), stock(folder / "stock", model=models.llama), models.llama, reordered=True)
    (line,) = [each for each in lines if each.startswith("the loss is ")]
    assert ("LlamaForCausalLM does not compute" if patched_before else "use_liger_kernel brings a loss") in line


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton",
)
@pytest.mark.works(
    "Trainers",
    "`use_liger_kernel`, with Liger's fused loss (where it is installed; interpreted without a GPU)",
    "right",
)
@pytest.mark.parametrize("patched_before", [False, True], ids=["by the argument", "by the script"])
@pytest.mark.numeric
def test_a_trainer_uses_the_loss_of_liger(patched_before: bool) -> None:
    interpreted(f"train_by_the_trainer({patched_before})")


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton",
)
@pytest.mark.gpu
def test_all_kernels_of_liger_on_a_gpu(tmp_path: Path) -> None:
    job = Job(patched, models.language_loss, steps=3, accumulation=2, dtype="bf16")
    options = {"device": "cuda"}
    first, second = (run(job, tiers, tmp_path / tiers[0], **options) for tiers in (("cpu", "cpu"), ("nvme", "nvme")))
    assert first.losses == second.losses and first.norms == second.norms
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


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


VISION_JOBS = {
    "LLaVA": Job(llava, llava_loss, steps=3, accumulation=2),
    "LLaVA-LoRA": Job(adapted_llava, llava_loss, steps=3, accumulation=2),
    "Qwen2-VL": Job(qwen2_vl, qwen2_vl_loss, steps=3, accumulation=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", VISION_JOBS)
def test_losses_norms_and_weights_are_those_of_the_run_in_memory_vision(name: str, tmp_path: Path) -> None:
    result = same_bits(VISION_JOBS[name], tmp_path, [IN_MEMORY, DISK])
    assert all(norm > 0 for norm in result.norms) and len(set(result.losses)) == 3
