"""Graphs and views that would show other weights, or need too many at a time, are refused; torch's own are right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import UsageError
from tests.models.test_autograd import LAYERS
from tests.models.test_module_kinds import DISK, MEMORY
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.autograd_modules import KeepsViews
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import Job, room_for, run, start, train_step


@pytest.mark.works("Graphs", "the same, with the loss still there at `step()`", "refused")
def test_a_view_in_a_graph_across_a_step_is_refused(tmp_path: Path) -> None:
    job = LAYERS._replace(model=KeepsViews)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 5))
    loss = LAYERS.loss(engine, 0, 0)
    engine.backward(loss)
    with pytest.raises(UsageError, match="save_for_backward"):
        engine.step()
    del loss
    engine.step()
    engine.destroy(remove=True)


@pytest.mark.works("Graphs", "a graph that needs more weights at a time than the device has room for", "refused")
def test_views_that_take_all_the_room_are_refused(tmp_path: Path) -> None:
    job = LAYERS._replace(model=KeepsViews)
    engine = start(job, DISK, tmp_path / "tight", device_memory=room_for(job, 2))
    with pytest.raises(offload.BudgetError, match="device_memory"):
        train_step(engine, job, 0)
    engine.destroy(remove=True)


@pytest.mark.works("Graphs", "backward after `step()` through a graph made before it", "refused")
def test_a_graph_of_old_weights_is_refused(tmp_path: Path) -> None:
    engine = start(LAYERS, DISK, tmp_path / "old", device_memory=room_for(LAYERS, 2))
    old = LAYERS.loss(engine, 9, 0)
    losses = [train_step(engine, LAYERS, 0)]
    with pytest.raises(UsageError, match=r"made before step\(\)"):
        engine.backward(old)
    engine.zero_grad()
    losses += [train_step(engine, LAYERS, step) for step in range(1, LAYERS.steps)]
    engine.destroy(remove=True)
    assert losses == run(LAYERS, DISK, tmp_path / "plain").losses


@pytest.mark.works("Graphs", "the same through a penalty on weights of before", "refused")
def test_a_penalty_on_old_weights_is_refused(tmp_path: Path) -> None:
    engine = start(LAYERS, DISK, tmp_path)
    penalty = engine.module.head.weight.square().sum()
    train_step(engine, LAYERS, 0)
    with pytest.raises(UsageError, match=r"made before step\(\): the weights of head\.weight"):
        engine.backward(penalty)
    engine.destroy(remove=True)


class Table(nn.Module):
    """Its backward needs no weights, so a graph from before a step could add to a gradient that is being read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


@pytest.mark.works("Graphs", "the same, where the backward needs no weights (an embedding)", "right")
def test_an_old_graph_that_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows it; the gradient waits until the update before has read the last."""

    def losses(placement: tuple[str, str]) -> list[float]:
        engine = start(job, placement, tmp_path / placement[0])
        old = job.loss(engine, 9, 0)
        found = [train_step(engine, job, 0)]
        engine.backward(old)
        engine.step()
        found += [train_step(engine, job, step) for step in range(1, 4)]
        engine.destroy(remove=True)
        return found

    job = Job(Table, models.mixture_loss)
    expected = losses(MEMORY)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.2))
    assert losses(DISK) == expected


@pytest.mark.works("Graphs", "a view of a weight kept across `step()`", "refused")
def test_a_view_across_a_step_is_refused(tmp_path: Path) -> None:
    engine = start(LAYERS, DISK, tmp_path / "kept")
    kept: list[torch.Tensor] = []
    handle = engine.module.layers[1].register_forward_hook(lambda m, i, o: kept.append(m.weight[0].detach()) and None)
    engine.backward(LAYERS.loss(engine, 0, 0))
    handle.remove()
    with pytest.raises(UsageError, match=r"layers\.1"):
        engine.step()
    kept.clear()
    engine.step()  # nothing was lost by asking
    losses = [train_step(engine, LAYERS, step) for step in range(1, LAYERS.steps)]
    engine.destroy(remove=True)
    assert losses == run(LAYERS, DISK, tmp_path / "plain").losses[1:]


class ShowsItsHead(Layers):
    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), self.head.weight


@pytest.mark.works("Graphs", "a weight among the model's outputs, kept across `step()`", "right")
def test_an_output_that_is_a_weight(tmp_path: Path) -> None:
    """It is a copy: what it was when the model ran."""
    job = LAYERS._replace(model=ShowsItsHead)
    engine = start(job, DISK, tmp_path)
    seen = []
    for step in range(3):
        logits, weight = engine(models.tokens(step, 0, (4, 16), 61))
        engine.backward(logits.square().mean() + weight.square().mean())
        engine.step()
        seen.append(weight)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.isfinite(torch.stack(seen)).all()
    engine.destroy(remove=True)


class Stacked(Layers):
    """One operation needs the weights of all layers."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.stack([layer.weight for layer in self.layers]).sum(0)


@pytest.mark.works("Graphs", "one operation over parameters of several modules, with too little room", "refused")
def test_an_operation_that_needs_too_much_at_a_time(tmp_path: Path) -> None:
    job = LAYERS._replace(model=Stacked)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    with pytest.raises(offload.BudgetError, match="at one time"):
        job.loss(engine, 0, 0)
    engine.destroy(remove=True)


@pytest.mark.works("Engines and processes", "weights read by another thread while the model runs", "refused")
def test_another_thread_may_not_disturb_a_forward(tmp_path: Path) -> None:
    messages: list[str] = []

    def look() -> None:
        try:
            engine.module.head.weight.detach().clone()
        except UsageError as error:
            messages.append(str(error))

    def look_from_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    engine = start(LAYERS, DISK, tmp_path / "looked at")
    hook = engine.module.layers[1].register_forward_pre_hook(look_from_elsewhere)
    losses = [train_step(engine, LAYERS, step) for step in range(LAYERS.steps)]
    hook.remove()
    look_from_elsewhere()
    assert len(messages) == LAYERS.steps and "the model runs on thread MainThread" in messages[0]
    engine.destroy(remove=True)
    assert losses == run(LAYERS, DISK, tmp_path / "plain").losses
