"""Runs that have trained, and `offload export` of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from tests.support import models
from tests.support.oracle import Job, start, train_step, weights_of

DISK = ("nvme", "nvme")


def frozen_llama() -> nn.Module:
    """The first block and the head frozen, in one unit with trainable weights and alone."""
    model = models.llama()
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


LLAMA = Job(models.llama, models.language_loss, steps=2)
FROZEN = Job(frozen_llama, models.language_loss, steps=2)


def trained(job: Job, folder: Path, placement: tuple[str, str] = DISK, **options: Any) -> offload.Engine:
    engine = start(job, placement, folder, **options)
    for step in range(2):
        train_step(engine, job, step)
    return engine


def ended(job: Job, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Train and close; the weights and buffers of the end."""
    engine = trained(job, folder, **options)
    state = weights_of(engine)
    engine.destroy()
    return state


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def exported(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Everything in all files."""
    tensors_loaded: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        loaded = safetensors.torch.load_file(path)
        assert not tensors_loaded.keys() & loaded.keys()
        tensors_loaded |= loaded
    return tensors_loaded


def tied_by_hand() -> nn.Module:
    """Tied by the user, in a model whose config says nothing of it."""
    model = models.llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model
