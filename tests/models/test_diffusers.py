"""Transformers of diffusers' text-to-image models, fully fine-tuned by flow matching, keep their bits on any tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.oracle import Job, accumulated_step, assert_same, run, same_bits

diffusers = pytest.importorskip("diffusers")

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")


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
    found = model(hidden_states=hidden, timestep=time, return_dict=False, **text, **places)[0]
    return (found.float() - velocity).square().mean()


def sd3_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    hidden, time, velocity, text = noisy(step, micro, 4, 8, 8)
    found = model(hidden_states=hidden, timestep=1000 * time, return_dict=False, **text)[0]
    return (found.float() - velocity).square().mean()


JOBS = {"Flux": Job(flux, flux_loss, steps=3, accumulation=2), "SD3": Job(sd3, sd3_loss, steps=3, accumulation=2)}


@pytest.mark.parametrize("name", JOBS)
def test_losses_norms_and_weights_are_those_of_the_run_in_memory(name: str, tmp_path: Path) -> None:
    result = same_bits(JOBS[name], tmp_path, [MEMORY, DISK])
    assert all(norm > 0 for norm in result.norms) and len(set(result.losses)) == 3


@pytest.mark.parametrize("name", JOBS)
def test_micro_batches_that_take_turns_at_each_block_change_no_bit(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step, schedule="micro_batch_major")
    assert_same(plain, run(job, DISK, tmp_path / "layered", accumulated_step, schedule="layer_major"))
