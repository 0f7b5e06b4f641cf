"""A rank whose swap files are older than a kill explains gets no useless advice."""

from __future__ import annotations

import shutil
from pathlib import Path

from offload import testing
from offload.errors import RankError, StoreError
from tests.support import models
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import pool, rank_and_size, start

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(loss=language_rows_loss)


def trained(folder: Path, steps: int) -> None:
    """Some steps more, ended as by a kill."""
    engine = start(JOB, DISK, folder, resume="auto")
    for step in range(engine.global_steps, engine.global_steps + steps):
        engine.backward(JOB.loss(engine, step, 0))
        engine.step()
    engine.mean(0.0)
    testing.settle(engine)
    testing.abandon(engine, remove=False)


def refused(folder: Path) -> str:
    try:
        start(JOB, DISK, folder, resume="auto").destroy(remove=True)
    except (RankError, StoreError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_is_far_behind_is_not_advised_to_start_again(tmp_path: Path) -> None:
    run = tmp_path / "default"
    with pool(2) as ranks:
        ranks.run(trained, tmp_path, 2)
        shutil.copytree(run / "rank1", tmp_path / "before")
        ranks.run(trained, tmp_path, 4)
        shutil.rmtree(run / "rank1")
        shutil.copytree(tmp_path / "before", run / "rank1")
        zero, one = ranks.run(refused, tmp_path)
    assert zero.startswith("StoreError: ") and "but the ranks agreed on commit" in zero
    assert one.startswith("RankError: rank 0 ") and "but the ranks agreed on commit" in one
    assert "could not start" in one and "fix that first" in one
    assert rank_and_size() == (0, 1)
