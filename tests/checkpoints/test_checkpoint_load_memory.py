"""A load of frozen weights takes one set of buffers, and writes only the weights that differ."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import testing
from offload.checkpoint import restore
from offload.fileio import buffered_copy as flow
from tests.checkpoints.checkpoint_runs import DISK
from tests.support import models
from tests.support.oracle import assert_same_tensors, start, train_step, weights_of


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        for layer in self.layers[1:3]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def half_frozen_loss(model: nn.Module, step: int, _: int) -> torch.Tensor:
    return model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("others", [False, True], ids=["the same frozen weights", "others"])
def test_a_load_with_frozen_weights_takes_one_set_of_buffers(
    others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(model=HalfFrozen, loss=half_frozen_loss)
    engine = start(job, DISK, tmp_path / "one")
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    engine = start(job._replace(seed=4711 if others else job.seed), DISK, tmp_path / "two")
    now, most = [0], [0]
    real = flow.aligned_empty

    def counted(nbytes: int) -> memoryview:
        memory = real(nbytes)
        now[0] += nbytes
        most[0] = max(most[0], now[0])
        weakref.finalize(memory, lambda: now.__setitem__(0, now[0] - nbytes))
        return memory

    testing.replace(monkeypatch, "checkpoint.buffer", counted)
    monkeypatch.setattr(restore, "aligned_empty", counted, raising=False)
    wrote: list[str] = []
    real_put = type(testing.inspect(engine).store).write

    def write(store: Any, unit: int, state: Any, *rest: Any) -> Any:
        wrote.append(testing.inspect(engine).sizes[unit].title)
        return real_put(store, unit, state, *rest)

    monkeypatch.setattr(type(testing.inspect(engine).store), "write", write)
    engine.load_checkpoint(tmp_path / "saved")
    assert most[0] == flow.BUFFERS * flow.BUFFER_NBYTES
    assert any("layers.1" in title for title in wrote) == others
    assert_same_tensors(expected, engine.module.state_dict())
    engine.destroy(remove=True)
