"""Quantized weights on two ranks, and the bytes that a step reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.layout.flat_layout import layouts_of
from offload.layout.frozen.choice import stored_weights
from offload.layout.units import find_units
from tests.support import rank_pool
from tests.support.oracle import assert_same_tensors, least_host_memory, start, train_step, weights_of
from tests.support.quantized_models import InMemory, folder, job
from tests.support.rank_jobs import language_rows_loss

AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")


def _rows(
    values: Path, path: Path, form: str, first: int, last: int, tiers: tuple[str, str] = DISK
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Some steps of two ranks: mean losses and weights."""
    this = job(values, form)._replace(loss=language_rows_loss)
    engine = rank_pool.start(this, tiers, path, resume="auto", durability="step")
    assert engine.global_steps == first
    losses = []
    for step in range(first, last):
        loss = this.loss(engine, step, 0)
        engine.backward(loss)
        losses.append(engine.mean(float(loss.detach())))
        engine.step()
    weights = weights_of(engine)
    engine.destroy()
    return losses, weights


def _first_loss(values: Path, form: str) -> float:
    this = job(values, form)._replace(loss=language_rows_loss)
    return float(this.loss(InMemory(this), 0, 0).detach())


@pytest.mark.works(AREA, "two ranks, resumed too", "right")
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_two_ranks_divide_the_bytes(form: str, tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
    with rank_pool.pool(2) as ranks:
        expected = ranks.run(_rows, values, tmp_path / "unbroken", form, 0, 3)
        found = ranks.run(_rows, values, tmp_path / "broken", form, 0, 2)
        resumed = ranks.run(_rows, values, tmp_path / "broken", form, 2, 3)
        device = ranks.run(_rows, values, tmp_path / "device", form, 0, 3, ("none", "cpu"))
        first = ranks.run(_first_loss, values, form)
    assert expected[0][0][0] == pytest.approx(sum(first) / 2, rel=1e-6)
    for rank, (losses, weights) in enumerate(expected):
        assert found[rank][0] + resumed[rank][0] == losses == device[rank][0]
        assert_same_tensors(weights, resumed[rank][1])
        assert_same_tensors(weights, device[rank][1])


def _read_of_a_step(path: Path, values: Path, form: str | None) -> tuple[int, int]:
    """Returns the bytes that a step over frozen weights on disk reads, and those of the frozen weights themselves."""
    this = job(values, form or "nf4", r=1, target_modules=["q_proj"])
    if form is None:
        this = this._replace(model=lambda: in_values(values))
    model = this.model()
    layouts = layouts_of(model, find_units(model), stored=stored_weights(model, None, torch.bfloat16))
    frozen = sum(2 * (layout.numel - layout.trainable_stop) for layout in layouts if ".layers." in layout.name)
    least = least_host_memory(this, path, ("nvme", "cpu"))
    engine = start(this, ("nvme", "cpu"), path, host_memory=least, device_memory=4 << 20, optimizer_host=True)
    train_step(engine, this, 0)
    queue = engine._core.components.queue
    assert queue is not None
    before = queue.read_bytes
    train_step(engine, this, 1)
    read = queue.read_bytes - before
    engine.destroy(remove=True)
    return read, frozen
