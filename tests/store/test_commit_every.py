"""`"durability": {"every": N}` keeps the bits, commits every N steps, and a kill loses the steps since, no more."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.aio import DirectFile
from offload.swapper.store import Store
from offload.swapper.store.format import read_records
from tests.support import models
from tests.support.drives.fault_injection import die, die_after_writes
from tests.support.oracle import Result, assert_same, assert_same_tensors, dies, run, start, train_step, weights_of

DISK = ("nvme", "nvme")
JOB = models.DROPOUT._replace(dtype="bf16", steps=8, accumulation=2)
ONE_MICRO = JOB._replace(accumulation=1)
EVERY = {"durability": {"every": 3}}


@functools.cache
def each_step(placement: tuple[str, str]) -> Result:
    """What a run gives that commits each step: trained once, for all tests that compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        return run(JOB, placement, Path(folder), durability="step")


def recorded_epochs(folder: Path) -> list[int]:
    """The epochs of the two records, newest first."""
    return [record.step for record in read_records(folder / "default" / "rank0" / "commit").valid]


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that this process commits, in order."""
    epochs: list[int] = []
    commit = Store.commit
    monkeypatch.setattr(Store, "commit", lambda self, epoch, blob: (epochs.append(epoch), commit(self, epoch, blob))[1])
    return epochs


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "nvme"), ("nvme", "none"), ("cpu", "cpu")])
@pytest.mark.parametrize("every", [2, 100])
def test_commits_change_no_bit(every: int, placement: tuple[str, str], tmp_path: Path) -> None:
    """From the second update of a window on, a slot is read and written in place."""
    mine = run(JOB, placement, tmp_path / "every", durability={"every": every})
    assert_same(each_step(placement), mine, "each step and every")


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu")])
def test_a_commit_every_third_step_and_at_the_end(
    placement: tuple[str, str], tmp_path: Path, commits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[str] = []
    sync = DirectFile.sync
    monkeypatch.setattr(DirectFile, "sync", lambda file: (syncs.append(file.path), sync(file))[1])
    engine = start(JOB, placement, tmp_path, **EVERY)
    for step in range(JOB.steps):
        train_step(engine, JOB, step)
    assert commits == [0, 3, 6] and recorded_epochs(tmp_path) == [6, 3]
    engine.destroy()
    assert commits == [0, 3, 6, 8] and recorded_epochs(tmp_path) == [8, 6]
    assert len(syncs) == len(commits), "nothing is synced between commits"
    engine = start(JOB, placement, tmp_path, resume="must", **EVERY)
    assert engine.global_steps == 8
    for step in range(8, 10):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    assert commits == [0, 3, 6, 8, 9, 10], "every third is counted from the first step of the run"


def test_a_run_that_ends_on_a_commit_is_not_committed_twice(tmp_path: Path, commits: list[int]) -> None:
    engine = start(JOB, DISK, tmp_path, **EVERY)
    for step in range(6):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    assert commits == [0, 3, 6]


# -- killed within a window ---------------------------------------------------------------------------


def _die_after(folder: Path, placement: tuple[str, str], steps: int, writes: int, options: dict[str, Any]) -> None:
    """Train `steps` steps, then die when so many writes of the updates of the last one have ended."""
    logging.disable(logging.CRITICAL)
    engine = start(JOB, placement, folder, **options)
    for step in range(steps - 1):
        train_step(engine, JOB, step)
    if testing.inspect(engine).update_worker is not None:
        testing.settle(engine, commit=False)
    die_after_writes(writes)
    train_step(engine, JOB, steps - 1)
    engine.destroy()


@pytest.mark.sample(1)
@pytest.mark.parametrize("writes", [1, 6])
@pytest.mark.parametrize(("steps", "committed"), [(1, 0), (3, 0), (5, 3), (6, 3)])
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu")])
def test_a_kill_loses_the_steps_since_the_last_commit(
    placement: tuple[str, str], steps: int, committed: int, writes: int, tmp_path: Path
) -> None:
    dies(_die_after, tmp_path / "cut", placement, steps, writes, EVERY)
    unbroken = each_step(placement)
    engine = start(JOB, placement, tmp_path / "cut", resume="must", **EVERY)
    assert engine.global_steps == committed
    losses = [train_step(engine, JOB, step) for step in range(committed, JOB.steps)]
    weights = engine.module.state_dict()
    assert losses == unbroken.losses[committed:]
    assert_same_tensors(weights, unbroken.weights)
    engine.destroy(remove=True)


# -- edits --------------------------------------------------------------------------------------------


def _edit(engine: offload.Engine, value: float) -> None:
    for parameter in list(engine.module.parameters())[:3]:
        with offload.gathered(parameter, modify=True):
            parameter.data.add_(value)


def _train_with_edits(engine: offload.Engine, steps: range) -> list[float]:
    """An edit before steps 1, 4 and 5: in the first window, and two in the second."""
    losses = []
    for step in steps:
        if step in (1, 4, 5):
            _edit(engine, 0.01 * step)
        losses.append(train_step(engine, JOB, step))
    return losses


@functools.cache
def edited_in_memory() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all steps with their edits, and the weights: in memory, where nothing is committed."""
    engine = start(JOB, ("none", "none"), Path())
    try:
        return _train_with_edits(engine, range(8)), weights_of(engine)
    finally:
        engine.destroy()


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "nvme")])
def test_edits_in_a_window(placement: tuple[str, str], tmp_path: Path, commits: list[int]) -> None:
    """They belong to the next commit, or to that of `destroy`; one that has no step behind it too."""
    expected, _ = edited_in_memory()
    engine = start(JOB, placement, tmp_path / "disk", **EVERY)
    losses = _train_with_edits(engine, range(5))
    _edit(engine, 0.25)  # then another process goes on: it must find it
    edited = weights_of(engine)
    engine.destroy()
    assert commits[-2:] == [3, 5]
    engine = start(JOB, placement, tmp_path / "disk", resume="must", **EVERY)
    found = engine.module.state_dict()
    assert_same_tensors(found, edited)
    assert losses == expected[:5]
    engine.destroy(remove=True)


def _die_after_edits(folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    engine = start(JOB, DISK, folder, **EVERY)
    _train_with_edits(engine, range(5))
    _edit(engine, 0.5)
    engine.module.state_dict()  # the edit has been carried out, into the slots of the window
    testing.settle(engine)
    die()


def test_a_kill_takes_edits_of_the_window_with_it(tmp_path: Path) -> None:
    expected, weights = edited_in_memory()
    dies(_die_after_edits, tmp_path / "disk")
    engine = start(JOB, DISK, tmp_path / "disk", resume="must", **EVERY)
    assert engine.global_steps == 3
    assert _train_with_edits(engine, range(3, 8)) == expected[3:]
    found = engine.module.state_dict()
    assert_same_tensors(found, weights)
    engine.destroy(remove=True)


# -- a forward that is given up -----------------------------------------------------------------------


@functools.cache
def losses_in_memory(edited: bool) -> list[float]:
    """Of eight steps, with or without an edit before the sixth."""
    engine, losses = start(ONE_MICRO, ("none", "none"), Path()), []
    for step in range(ONE_MICRO.steps):
        if edited and step == 5:
            _edit(engine, 0.01)
        losses.append(train_step(engine, ONE_MICRO, step))
    engine.destroy()
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("durability", ["step", {"every": 3}], ids=str)
def test_ctrl_c_in_a_forward_and_another_process(durability: Any, edited: bool, tmp_path: Path) -> None:
    """The commit of the end is of the moment after the last step: what the forward has drawn since is drawn again."""
    job, expected = ONE_MICRO, losses_in_memory(edited)
    engine = start(job, DISK, tmp_path / "disk", durability=durability)
    losses = [train_step(engine, job, step) for step in range(5)]
    if edited:
        _edit(engine, 0.01)
    engine.module.transformer.h[2].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.loss(engine, 5, 0)
    engine.destroy()
    engine = start(job, DISK, tmp_path / "disk", resume="must", durability=durability)
    assert engine.global_steps == 5
    losses += [train_step(engine, job, step) for step in range(5, job.steps)]
    engine.destroy(remove=True)
    assert losses == expected


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# -- changes on the way -------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_window_at_a_resume(tmp_path: Path, commits: list[int]) -> None:
    """How often is no property of the store."""
    unbroken = each_step(DISK)
    losses, done = [], 0
    del commits[:]
    for steps, durability in ((2, "step"), (3, {"every": 4}), (3, "step")):
        engine = start(JOB, DISK, tmp_path / "parts", resume="auto" if done else "never", durability=durability)
        assert engine.global_steps == done
        losses += [train_step(engine, JOB, step) for step in range(done, done + steps)]
        done += steps
        engine.destroy()
    assert losses == unbroken.losses
    assert commits == [0, 1, 2, 4, 5, 6, 7, 8]
