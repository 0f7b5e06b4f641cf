"""Quantized weights on two ranks, and the bytes that a step reads."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from offload import testing
from tests.frozen.quantized_models import WITH_BITSANDBYTES, InMemory, folder, in_values, job
from tests.support.oracle import (
    Job,
    Result,
    assert_same_tensors,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import language_rows_loss, losses_and_weights
from tests.support.ranks.rank_pool import RankPool

pytestmark = WITH_BITSANDBYTES

AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")


def _rows(
    values: Path, path: Path, form: str, first: int, last: int, tiers: tuple[str, str] = DISK
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Some steps of two ranks: mean losses and weights."""
    this = job(values, form)._replace(loss=language_rows_loss)
    engine = rank_pool.start(this, tiers, path, resume="auto", durability="step")
    return losses_and_weights(engine, this, first, last)


def _first_loss(values: Path, form: str) -> float:
    this = job(values, form)._replace(loss=language_rows_loss)
    return float(this.loss(InMemory(this), 0, 0).detach())


@pytest.mark.works(AREA, "two ranks, resumed too", "right")
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_two_ranks_divide_the_bytes(ranks: RankPool, form: str, tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
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


def _frozen_and_read(this: Job, path: Path, host: int, device: int) -> tuple[int, int, Result]:
    """Returns the bytes of frozen weights, those that a step reads, and the whole run."""
    engine = start(this, DISK, path, host_memory=host, device_memory=device)
    inspected = testing.inspect(engine)
    frozen = 2 * sum(len(behind) for _, behind in inspected.shares)
    assert inspected.queue is not None
    reads, losses = [], []
    for step in range(this.steps):
        before = inspected.queue.read_bytes
        losses.append(train_step(engine, this, step))
        testing.settle(engine, commit=False)
        reads.append(inspected.queue.read_bytes - before)
    assert inspected.host_arena.nbytes + inspected.device_arena.nbytes < frozen
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return frozen, reads[-1], Result(losses, [], weights)


@pytest.mark.works(
    AREA, "codes of 4 bits that exceed both budgets; a step reads less than a third of bf16's bytes", "right"
)
def test_codes_that_exceed_both_budgets_train_and_a_step_reads_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = folder(tmp_path / "model", num_hidden_layers=24, hidden_size=128, intermediate_size=512)
    one_layer = {"r": 1, "target_modules": ["q_proj"]}
    four = job(values, "nf4, scales quantized too", **one_layer)._replace(steps=2)
    plain = four._replace(model=functools.partial(in_values, values, **one_layer))
    small_pieces(monkeypatch)
    found = {}
    for name, this, device in (("four", four, 1 << 20), ("plain", plain, 4 << 20)):
        host = least_host_memory(this, tmp_path / name, device_memory=device)
        found[name] = _frozen_and_read(this, tmp_path / name, host, device)
    expected = run(four, ("none", "none"), tmp_path / "memory")
    assert found["four"][2].losses == expected.losses
    assert_same_tensors(expected.weights, found["four"][2].weights)
    # 4 bits, and a byte of scale for each 64 values: 0.516 of 2 bytes; norms, embeddings and states come on top.
    assert found["plain"][0] / found["four"][0] > 3.4
    assert found["plain"][1] / found["four"][1] > 3.0
