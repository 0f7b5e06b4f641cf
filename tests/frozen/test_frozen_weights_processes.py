"""Frozen weights beside adapters survive a kill, and are sharded over two ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

from offload.cli.main import app
from tests.frozen.test_frozen_weights import DISK, JOB, by_formula, exported, frozen_bytes
from tests.support.oracle import assert_same, assert_same_tensors, kill_and_resume, run, weights_of
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import RankPool


def test_a_run_that_was_killed_goes_on_with_them(tmp_path: Path) -> None:
    job = JOB._replace(steps=12)
    unbroken = run(job, DISK, tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    assert_same(unbroken, kill_and_resume(job, DISK, tmp_path / "killed", kills=1, late=0.002))


def _rows(folder: Path, first: int, last: int) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Some steps of two ranks: mean losses, weights, and the bytes of this rank's swap files, by formula and found."""
    job = JOB._replace(loss=language_rows_loss)
    engine = rank_pool.start(job, DISK, folder, resume="auto", durability="step", device_memory=1 << 20)
    assert engine.global_steps == first
    losses = []
    for step in range(first, last):
        loss = job.loss(engine, step, 0)
        engine.backward(loss)
        losses.append(engine.mean(float(loss.detach())))
        engine.step()
    weights, formula = weights_of(engine), by_formula(engine, 2, job.dtype)
    states = folder / "default" / f"rank{engine.global_rank}" / "states"
    engine.destroy()
    return losses, weights, formula, states.stat().st_size


def test_each_of_two_ranks_stores_its_shard_once(ranks: RankPool, tmp_path: Path) -> None:
    unbroken = ranks.run(_rows, tmp_path / "whole", 0, 4)
    ranks.run(_rows, tmp_path / "run", 0, 2)
    before = [frozen_bytes(tmp_path / "run" / "default" / f"rank{rank}") for rank in (0, 1)]
    found = ranks.run(_rows, tmp_path / "run", 2, 4)
    for rank, (losses, weights, formula, nbytes) in enumerate(found):
        assert formula == nbytes
        assert losses == unbroken[rank][0][2:]
        assert_same_tensors(unbroken[rank][1], weights)
        assert frozen_bytes(tmp_path / "run" / "default" / f"rank{rank}") == before[rank]
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "default")]).exit_code == 0
    weights = exported(tmp_path / "run" / "default", tmp_path / "out")
    assert weights and all(torch.equal(value, found[0][1][name]) for name, value in weights.items())
