"""Micro-batches that take turns at each block give the bits of one after the other, whatever the module."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import testing
from tests.models.test_module_kinds import AREAS, DISK, MEMORY, Case
from tests.support import models
from tests.support.oracle import Job, accumulated_step, assert_same, room_for, run

BRANCHES = "branches that change from step to step"
"""Of micro-batches that leave out the last block the head comes first, so its gradients are added in another order."""

ROWS = [
    pytest.param(case, dtype, tier, id=f"{name}-{dtype}-{tier}")
    for cases in AREAS.values()
    for name, case in cases.items()
    if name != BRANCHES
    for dtype in case.dtypes
    for tier in (None, "device", "nvme")
]
LAYERED = {"schedule": "layer_major"}


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.least_kept_input", 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("case", "dtype", "tier"), ROWS)
def test_every_kind_of_module_keeps_its_bits(case: Case, dtype: str, tier: str | None, tmp_path: Path) -> None:
    job = case.job._replace(dtype=dtype, accumulation=3, steps=3)
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step, schedule="micro_batch_major", **case.options)
    options: dict[str, Any] = {"device_memory": room_for(job, case.units), **case.options, **LAYERED}
    if tier is not None:
        options["activations"] = tier
    assert_same(plain, run(job, DISK, tmp_path / "layered", accumulated_step, **options))


def mixtral() -> nn.Module:
    """Its loss has a part of the routers, which leaves each block beside the hidden state."""
    model = models.mixtral()
    model.config.output_router_logits = True
    return model


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)))


def chain_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + micro))
    return model(hidden).float().pow(2).mean()


MODELS = {
    "gpt2": models.GPT2,
    "llama": Job(models.llama, models.language_loss),
    "mixtral": Job(mixtral, models.language_loss),
    "t5": Job(models.t5, models.translation_loss),
    "lora": models.LORA,
    "dropout": models.DROPOUT,
    "sequential": Job(Chain, chain_loss),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    job = MODELS[name]._replace(dtype=dtype, accumulation=4, steps=3, clip=0.3)
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step, schedule="micro_batch_major")
    assert_same(plain, run(job, DISK, tmp_path / "layered", accumulated_step, **LAYERED))


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 2, 3, 8])
def test_any_number_of_micro_batches_gives_the_bits_of_a_loop(accumulation: int, tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16", accumulation=accumulation, steps=3)
    loop = run(job, DISK, tmp_path / "loop")
    assert_same(loop, run(job, DISK, tmp_path / "layered", accumulated_step, **LAYERED))
    assert [thread for thread in threading.enumerate() if thread.name.startswith("offload-micro-batch")] == []


def test_a_micro_batch_that_leaves_out_the_last_block_changes_the_last_bits_at_most(tmp_path: Path) -> None:
    case = AREAS["Modules"][BRANCHES]
    job = case.job._replace(accumulation=3, steps=3)
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step, schedule="micro_batch_major")
    layered = run(job, DISK, tmp_path / "layered", accumulated_step, **LAYERED)
    torch.testing.assert_close(layered.norms, plain.norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(layered.losses, plain.losses, rtol=1e-6, atol=0)
