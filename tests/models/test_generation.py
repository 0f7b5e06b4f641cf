"""`generate` writes the tokens of the plain model, and training beside it continues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import models, rounding_bounds
from tests.support.oracle import Job, room_for, run, start

DISK = ("nvme", "nvme")


@pytest.mark.sample(1)
@pytest.mark.works("Graphs", "`generate` with a KV cache, in the middle of accumulation", "right")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_generation_in_the_middle_of_accumulation(dtype: str, tmp_path: Path) -> None:
    job = models.SHALLOW._replace(dtype=dtype, accumulation=2)
    engine = start(job, DISK, tmp_path / "generating", device_memory=room_for(job, 2))
    losses = []
    for step in range(job.steps):
        loss = 0.0
        for micro in range(2):
            part = job.loss(engine, step, micro)
            engine.backward(part)
            loss += float(part.detach()) / 2
            if micro == 0:
                engine.eval()
                prompt = torch.tensor([[1, 2, 3]])
                words = engine.module.generate(
                    prompt, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0
                )
                assert words.shape[1] > 3
                engine.train()
            engine.step()
        losses.append(loss)
    engine.destroy(remove=True)
    rounding_bounds.same_numbers(
        losses, run(job, DISK, tmp_path / "plain").losses, rounding_bounds.sum_error(2)
    )  # a mean of two


@pytest.mark.works("Graphs", "`generate` of an encoder and decoder: T5", "right")
def test_t5_generates_as_the_plain_model(tmp_path: Path) -> None:
    """`generate` calls the encoder by itself, never the model's forward."""
    torch.manual_seed(0)
    plain = models.t5()
    ids = models.tokens(0, 0)
    expected = plain.generate(ids, max_new_tokens=6, do_sample=False)
    job = Job(models.t5, models.language_loss)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    # As for a model of torch, on a GPU the ids are the caller's to move: the encoder is not the model.
    ids_generated = engine.module.generate(ids.to(engine.device), max_new_tokens=6, do_sample=False)
    assert torch.equal(ids_generated.cpu(), expected)
    engine.destroy(remove=True)
