"""A run's first weights are made in chunks of a unit, and are those of one chunk, wherever the unit is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio import IoQueue
from offload.engine import fill
from offload.runs.verify import RunChecking
from offload.sizes import MIB
from tests.support import models
from tests.support.frozen_blocks import deep
from tests.support.modules import mixtures
from tests.support.oracle import Job, assert_same_tensors, config, start, train_step, weights_of
from tests.support.processes.process_measures import peak_rss, resident
from tests.support.ranks.rank_pool import RankPool, rank_and_size
from tests.support.ranks.rank_pool import start as start_rank
from tests.swapper.test_memory import forked

SMALL = 4096
"""Elements of a chunk: two pages of bf16, one of the low bits of bf24."""


def deferred(model: Callable[[], nn.Module]) -> nn.Module:
    with offload.init(None):
        return model()


MODELS = {
    "given": models.llama,
    "deferred": partial(deferred, models.llama),
    "tied": models.shallow,
    "adapters": models.lora,
    "blocks": deep,
    "experts": mixtures.qwen,
}


def first_weights(job: Job, placement: tuple[str, str], folder: Path, **options: object) -> dict[str, torch.Tensor]:
    engine = start(job, placement, folder, **options)
    try:
        return weights_of(engine)
    finally:
        engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("master", ["fp32", "bf24"])
@pytest.mark.parametrize("placement", [("nvme", "nvme"), ("cpu", "nvme"), ("none", "none")], ids="-".join)
@pytest.mark.parametrize("model", MODELS)
def test_they_are_those_of_one_chunk(
    model: str, placement: tuple[str, str], master: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(MODELS[model], models.language_loss, dtype="bf16")
    options = {"master": master, **({"frozen": "nf4"} if model == "blocks" else {})}
    whole = first_weights(job, placement, tmp_path / "whole", **options)
    testing.replace(monkeypatch, "size.first_weights", SMALL)
    assert_same_tensors(first_weights(job, placement, tmp_path / "chunks", **options), whole)


def test_an_update_leaves_the_checksums_of_frozen_weights(
    queue: IoQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tiny chunks make more checksums than a slot may have, so those of neighbours are joined."""
    job = Job(deep, models.language_loss, dtype="bf16")
    testing.replace(monkeypatch, "size.first_weights", SMALL)
    testing.replace(monkeypatch, "size.least_checksum", 1 << 30)
    engine = start(job, ("nvme", "nvme"), tmp_path, run="run")
    train_step(engine, job, 0)
    engine.destroy()
    checking = RunChecking(tmp_path / "run")
    try:
        assert checking.run(queue).whole
    finally:
        checking.close()


def drawn_from(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.llama()


def of_a_rank(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the first weights, made in chunks, where each rank was given others."""
    job = Job(partial(drawn_from, rank_and_size()[0]), models.language_loss, dtype="bf16")
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.first_weights", SMALL)
        engine = start_rank(job, ("nvme", "nvme"), folder)
        try:
            return weights_of(engine)
        finally:
            engine.destroy(remove=True)


@pytest.mark.slow
def test_all_ranks_have_those_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(partial(drawn_from, 0), models.language_loss, dtype="bf16")
    single = first_weights(job, ("none", "none"), tmp_path / "one")
    for result in ranks.run(of_a_rank, tmp_path / "ranks"):
        assert_same_tensors(result, single)


def _grown(folder: str) -> tuple[int, int]:
    """Returns the elements of an embedding, and by how many bytes the start of an engine raised the peak RSS."""
    with offload.init(None):
        model = nn.Sequential(nn.Embedding(48 * 1024, 1024), nn.Linear(1024, 8))
    job = Job(lambda: model, models.language_loss, dtype="bf16")
    before = resident()
    engine = offload.initialize(model=model, config=config(job, ("nvme", "nvme"), Path(folder), host_memory="200MB"))[0]
    grown = peak_rss() - before
    engine.destroy(remove=True)
    return model[0].weight.numel(), grown


@pytest.mark.slow
def test_memory_is_that_of_the_parameter_and_a_chunk(tmp_path: Path) -> None:
    (numel, grown), _ = forked(_grown, str(tmp_path))
    assert numel > 2 * fill.CHUNK
    # The parameter in fp32, as its module makes it, then a chunk of bf16 weights and of low bits, and its fp32 copy.
    assert grown < 4 * numel + 8 * fill.CHUNK + 32 * MIB
