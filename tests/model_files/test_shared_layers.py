"""A layer that a model has under two names is in saved files under each name that a loader does not make by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from tests.support import models
from tests.support.oracle import Job, assert_same_tensors, start, train_step
from tests.support.oracle import weights_of as all_weights

DISK = ("nvme", "nvme")


def gpt2_with_a_shared_block() -> nn.Module:
    model: Any = models.gpt2()
    model.transformer.h[2] = model.transformer.h[0]
    return model


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.again = self.norm
        self.register_buffer("turned", torch.tensor([1 + 2j]).conj())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.inner(self.norm(rows))))


def norm_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).float().square().mean()


GPT2 = Job(gpt2_with_a_shared_block, models.language_loss)
NORM = Job(SharedNorm, norm_loss)


def save(engine: offload.Engine, out: Path) -> None:
    engine.save_pretrained(out)


def save_one_file(engine: offload.Engine, out: Path) -> None:
    engine.save_16bit_model(out)
    engine.module.config.save_pretrained(out)


def export(engine: offload.Engine, out: Path) -> None:
    engine.destroy()
    (run,) = out.parent.glob("swap/*")
    assert CliRunner().invoke(app, ["export", str(run), str(out)]).exit_code == 0


@pytest.mark.parametrize("way", [save, save_one_file, export])
def test_a_shared_block_comes_back(way: Callable[[offload.Engine, Path], None], tmp_path: Path) -> None:
    engine = start(GPT2, DISK, tmp_path / "swap")
    train_step(engine, GPT2, 0)
    expected = all_weights(engine)
    way(engine, tmp_path / "out")
    engine.destroy()
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(expected) - {"lm_head.weight"}, "the head alone is transformers' own tie"
    assert_same_tensors(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict(), expected)


def test_a_shared_norm_comes_back_with_its_buffers(tmp_path: Path) -> None:
    engine = start(NORM, DISK, tmp_path / "swap")
    train_step(engine, NORM, 0)
    expected = all_weights(engine)
    engine.save_16bit_model(tmp_path / "one")
    engine.save_pretrained(tmp_path / "folder")
    engine.destroy(remove=True)
    model = SharedNorm()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "one" / "model.safetensors"), strict=True)
    assert model.again is model.norm
    assert_same_tensors(model.state_dict(), expected)
    # A folder has each tensor once, and their ties in its metadata. `safetensors.torch.load_model` takes the count of
    # batches of a shared BatchNorm for unexpected, in files of its own too.
    file, other = tmp_path / "folder" / "model.safetensors", SharedNorm()
    other.load_state_dict(safetensors.torch.load_file(file), strict=False)
    assert_same_tensors(other.state_dict(), expected)
    with safetensors.safe_open(file, "pt") as opened:
        again = {name for name in expected if name.startswith("again.")}
        assert set(opened.keys()) == expected.keys() - again and opened.metadata().keys() >= again
