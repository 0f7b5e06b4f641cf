"""Several ranks read a model from a folder, and write it into one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from offload.errors import OffloadError
from tests import models, rank_pool
from tests.oracle import train_step
from tests.pretrained import CAUSAL, FAMILIES, T, end_engines, loaded, written

pytestmark = pytest.mark.usefixtures("_ended")


@pytest.fixture
def _ended() -> Iterator[None]:
    yield
    end_engines()


def _on_ranks(given: Path, folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())  # what ranks draw differs
    engine = loaded(given, folder, "bf16")
    state = engine.module.state_dict()
    engine.save_pretrained(folder / "start", dtype="fp32")
    for step in range(2):
        train_step(engine, FAMILIES["llama"].job(), step)
    engine.save_pretrained(folder / "out", max_shard_size="20KB")
    engine.save_16bit_model(folder / "half")
    end = engine.module.state_dict()
    try:
        engine.save_pretrained(folder / "out" / "config.json")
    except OffloadError as error:
        assert "is not a folder" in str(error)
    with_hole = engine.module.state_dict()
    engine.destroy(remove=True)
    assert with_hole.keys() == end.keys()
    return {**{f"0.{name}": value for name, value in state.items()}, **end}


def test_several_ranks_read_and_write_the_same(tmp_path: Path) -> None:
    """The head is missing: all ranks draw the same one."""
    given = written(tmp_path / "given", T.LlamaModel(models.llama().config))
    with rank_pool.pool(2) as ranks:
        first, second = ranks.run(_on_ranks, tmp_path / "given", tmp_path / "swap")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[f"0.model.{name}"], value.bfloat16()) for name, value in given.items())
    start = safetensors.torch.load_file(tmp_path / "swap" / "start" / "model.safetensors")
    assert all(torch.equal(start[f"model.{name}"], value) for name, value in given.items()), "exact masters"
    model = CAUSAL.from_pretrained(tmp_path / "swap" / "out")
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    half = safetensors.torch.load_file(tmp_path / "swap" / "half" / "model.safetensors")
    assert half.keys() == {name for name in first if not name.startswith("0.")}
    assert all(torch.equal(value, first[name]) for name, value in half.items())
