"""Frozen weights in 4 or 8 bits on two ranks, and in a process whose memory they exceed."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.errors import UsageError
from tests.frozen.test_frozen_blocks import AREA, JOB
from tests.support.frozen_blocks import dequantized
from tests.support.oracle import assert_same_tensors, weights_of
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import language_rows_loss, losses_and_weights
from tests.support.ranks.rank_pool import RankPool

ROWS = JOB._replace(loss=language_rows_loss)


def _rows(
    folder: Path, form: str | None, first: int, last: int, tiers: tuple[str, str] = ("nvme", "nvme")
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Some steps of two ranks: mean losses and weights. Without a form, over the values that nf4 makes."""
    job = ROWS if form is not None else dequantized(ROWS, "nf4")
    engine = rank_pool.start(job, tiers, folder, resume="auto", durability="step", frozen=form)
    return losses_and_weights(engine, job, first, last)


@pytest.mark.works(AREA, "two ranks, resumed too", "right")
def test_two_ranks_divide_the_blocks_and_have_the_bits_of_values(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(_rows, tmp_path / "values", None, 0, 4)
    found = ranks.run(_rows, tmp_path / "blocks", "nf4", 0, 2)
    resumed = ranks.run(_rows, tmp_path / "blocks", "nf4", 2, 4)
    device = ranks.run(_rows, tmp_path / "device", "nf4", 0, 4, ("none", "cpu"))
    for rank, (losses, weights) in enumerate(expected):
        assert found[rank][0] + resumed[rank][0] == losses == device[rank][0]
        assert_same_tensors(weights, resumed[rank][1])
        assert_same_tensors(weights, device[rank][1])


def _looked_at(folder: Path) -> tuple[bool, str]:
    """Whether a whole parameter is that of the state dict, and the error of a look at a shard of it."""
    engine = rank_pool.start(ROWS, ("nvme", "nvme"), folder, frozen="nf4")
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "k_proj" in n)
    whole = offload.safe_get_full_fp32_param(parameter)
    same = whole is not None and torch.equal(whole, engine.module.state_dict()[name].float())
    with pytest.raises(UsageError) as error:
        offload.safe_get_local_fp32_param(parameter)
    engine.destroy(remove=True)
    return same, str(error.value)


@pytest.mark.works(AREA, "a look at a shard of values: `safe_get_local_fp32_param` on several ranks", "refused")
def test_a_rank_has_no_values_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    for same, error in ranks.run(_looked_at, tmp_path):
        assert same and "read the whole parameter with safe_get_full_fp32_param" in error


def _exported_weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    engine = rank_pool.start(ROWS, ("nvme", "nvme"), folder, frozen="int8")
    engine.save_16bit_model(out)
    weights = weights_of(engine)
    engine.save_checkpoint(folder / "checkpoint")
    engine.destroy(remove=True)
    return weights


def _loaded(folder: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    engine = rank_pool.start(ROWS._replace(seed=5), ("nvme", "nvme"), folder, frozen="int8")
    engine.load_checkpoint(checkpoint)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return weights


@pytest.mark.works(AREA, "a checkpoint of two ranks on one", "right")
def test_a_checkpoint_of_two_ranks_is_loaded_by_one(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(_exported_weights, tmp_path / "two", tmp_path / "out")[0]
    found = _loaded(tmp_path / "one", tmp_path / "two" / "checkpoint")
    assert_same_tensors(expected, found)


@pytest.mark.works(AREA, "an export of two ranks", "right")
def test_two_ranks_export_values(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(_exported_weights, tmp_path / "two", tmp_path / "out")[0]
    (tag,) = (path for path in (tmp_path / "two" / "checkpoint").iterdir() if path.is_dir())
    assert CliRunner().invoke(app, ["export", str(tag), str(tmp_path / "exported")]).exit_code == 0
    for folder in ("out", "exported"):
        found = {
            name: value
            for path in (tmp_path / folder).glob("*.safetensors")
            for name, value in safetensors.torch.load_file(path).items()
        }
        assert found and all(torch.equal(value, expected[name]) for name, value in found.items())
