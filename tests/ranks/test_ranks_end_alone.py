"""A rank that ends alone, where ranks compute one batch together, leaves a run that goes on and nobody who waits."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.errors import IoError, OffloadError, RankError
from tests.support.oracle import Job, train_step
from tests.support.ranks import sequence_parallel as sp
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_pool import pool, rank_and_size

DISK = ("nvme", "nvme")
JOB = Job(tp.Net, tp.one_loss, lr=3e-4)


def start(kind: str, folder: Path, **options: Any) -> offload.Engine:
    if kind == "sequence":
        return sp.start(sp.JOBS["llama"], 2, DISK, folder, **options)
    return tp.start(JOB, "weights", 2, DISK, folder, **options)


def edit_beside_a_lost_rank(folder: Path) -> None:
    """Rank 0 fails with its first commit; rank 1 edits, and ends."""
    if rank_and_size()[0] == 0:
        with pytest.MonkeyPatch.context() as patches, pytest.raises(IoError):
            testing.replace(patches, "store.commit", fail_to_commit)
            start("tensor", folder)
    else:
        engine = start("tensor", folder)
        weight = engine.module.head.weight
        offload.safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
        with contextlib.suppress(RankError):
            engine.destroy()


def fail_to_commit(*_: Any) -> None:
    raise IoError("commit", 0, 4096, errno.EIO, "write")


def begin_again(folder: Path) -> None:
    engine = start("tensor", folder, resume="auto")
    assert engine.global_steps == 0 and engine.module.head.weight.any()
    engine.destroy(remove=True)


def test_an_edit_is_committed_by_all_ranks_or_none(tmp_path: Path) -> None:
    """Another rank may have ended before its last commit, to which a resume then goes back."""
    for function in (edit_beside_a_lost_rank, begin_again):
        with pool(2) as ranks:
            ranks.run(function, tmp_path)


def edit_beside_a_lost_step(folder: Path) -> None:
    """Rank 0 fails with the commit of the second step, which rank 1 makes; then rank 1 edits two units, and ends."""
    rank, _ = rank_and_size()
    engine = start("tensor", folder)
    losses = [train_step(engine, JOB, step) for step in range(2)]
    (folder / f"losses{rank}").write_text(repr(losses))
    if rank == 0:
        with pytest.MonkeyPatch.context() as patches, contextlib.suppress(OffloadError):
            testing.replace(patches, "store.commit", fail_to_commit)
            engine.destroy()
        return
    for weight in (engine.module.head.weight, engine.module.embed.weight):
        offload.safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    assert not offload.safe_get_full_fp32_param(engine.module.head.weight).any()
    with contextlib.suppress(RankError):
        engine.destroy()


def repeat_the_lost_step(folder: Path) -> None:
    engine = start("tensor", folder, resume="auto")
    assert engine.global_steps == 1
    again = train_step(engine, JOB, 1)
    engine.destroy(remove=True)
    assert (folder / f"losses{rank_and_size()[0]}").read_text().endswith(f", {again!r}]")


def test_an_edit_takes_nothing_from_the_step_that_another_rank_resumes_from(tmp_path: Path) -> None:
    """It is written where the step before last is."""
    for function in (edit_beside_a_lost_step, repeat_the_lost_step):
        with pool(2) as ranks:
            ranks.run(function, tmp_path)


def end_in_a_batch(kind: str, how: str, folder: Path) -> None:
    """Rank 0 ends after an error in the middle of a batch, while rank 1 answers nobody."""
    engine = start(kind, folder)
    ended = folder / "ended"
    if rank_and_size()[0] == 0:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                sys.exit(1) if how == "exit" else engine.destroy()
        testing.leave(engine)
        ended.touch()
        return
    while not ended.exists():
        time.sleep(0.01)
    with pytest.raises(RankError, match="its engine was closed at step 0, after KeyboardInterrupt"):
        engine.destroy()


@pytest.mark.parametrize("how", ["destroy", "exit"])
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_an_end_after_an_error_waits_for_nobody(kind: str, how: str, tmp_path: Path) -> None:
    with pool(2) as ranks:
        ranks.run(end_in_a_batch, kind, how, tmp_path)
