"""Blocks that are compiled train from the disk as in memory, and as blocks that are not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import models
from tests.oracle import Job, plain_loop, room_for, run
from tests.test_modules import DISK, MEMORY, WIDTH, Layers


class Eager(Layers):
    def layer(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))


class Compiled(Eager):
    """Each layer is compiled by itself."""

    backend = "aot_eager"

    def layer(self, index: int) -> nn.Module:
        block = super().layer(index)
        block.compile(backend=self.backend)
        return block


class CompiledByFunction(Compiled):
    def layer(self, index: int) -> nn.Module:
        compiled: Any = torch.compile(Eager.layer(self, index), backend=self.backend)
        return compiled


class CompiledByInductor(Compiled):
    backend = "inductor"


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Compiled, marks=pytest.mark.works("Graphs", "`block.compile()`", "right")),
        pytest.param(CompiledByFunction, marks=pytest.mark.works("Graphs", "`torch.compile(block)`", "right")),
        pytest.param(CompiledByInductor, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks(model: Callable[[], nn.Module], dtype: str, tmp_path: Path) -> None:
    job = Job(model, models.mixture_loss, dtype=dtype)
    on_disk = run(job, DISK, tmp_path / "disk", device_memory=room_for(job, 2))
    torch.compiler.reset()
    assert on_disk.losses == run(job, MEMORY, tmp_path / "memory").losses
    eager = plain_loop(job._replace(model=Eager))
    assert on_disk.losses == pytest.approx(eager.losses, rel=1e-4 if dtype == "fp32" else 2e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works("Engines and processes", "compiled blocks, engine after engine", "right")
def test_compiled_blocks_of_engine_after_engine(tmp_path: Path) -> None:
    job = Job(Compiled, models.mixture_loss, steps=2)
    losses = []
    for turn in range(3):
        losses.append(run(job, DISK, tmp_path / str(turn)).losses)
        gc.collect()
    assert losses[0] == losses[1] == losses[2]
