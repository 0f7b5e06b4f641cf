"""Bytes that wear drives out are counted, by drive, over the life of a run, and large wear is warned of."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload.aio import IoQueue, aligned_empty
from offload.cli.main import app
from offload.report.figures import forecast, warning
from offload.runs.inspection import inspect
from offload.swapper.store import DriveByteCounter, Rating
from offload.swapper.store.spill_file import SpillFile
from tests.support.oracle import Job, start, train_step

DISK = ("nvme", "nvme")


def model() -> nn.Module:
    """Large enough for a few stripes."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def loss(net: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + micro)
    value: torch.Tensor = net(torch.randn(4, 256, generator=generator)).pow(2).mean()
    return value


JOB = Job(model, loss, steps=3)


def begin(folder: Path, drives: int = 1, **more: Any) -> offload.Engine:
    """An engine over swap files in the folders a and b, or in a alone."""
    paths = [str(folder / name) for name in "ab"[:drives]]
    return start(JOB, DISK, folder, **{"nvme_path": paths, **more})


@pytest.mark.parametrize("drives", [1, 2])
def test_what_goes_to_each_drive_is_what_was_asked_for_and_commits(
    drives: int, tmp_path: Path, equal_drives: None
) -> None:
    # Else a row of stripes may be so long, by what was measured, that all of so small a store lies on the first.
    engine = begin(tmp_path, drives)
    before = engine.io_bytes().written, sum(each.run_bytes for each in engine.drive_writes())
    for step in range(3):
        train_step(engine, JOB, step)
    engine.state_dict()  # all updates are written
    found = engine.drive_writes()
    grown = engine.io_bytes().written - before[0]
    commits = sum(each.run_bytes for each in found) - before[1] - grown
    assert [Path(each.path).name for each in found] == ["a", "b"][:drives]
    assert all(each.run_bytes == each.life_bytes for each in found)
    assert grown > 2 * sum(p.numel() for p in model().parameters()) * 12
    assert 2 * 4096 < commits < 3 * 100_000, "records and blobs of two or three commits"
    if drives == 2:
        assert min(each.run_bytes for each in found) > grown / 10
    engine.destroy(remove=True)


def test_a_resumed_run_goes_on_counting_and_inspect_tells(tmp_path: Path) -> None:
    engine = begin(tmp_path, durability="step", drive_tbw=2)
    for step in range(2):
        train_step(engine, JOB, step)
    (first,) = engine.drive_writes()
    engine.destroy()
    engine = begin(tmp_path, durability="step", resume="must")
    (again,) = engine.drive_writes()
    assert again.run_bytes == 0 and again.life_bytes >= first.run_bytes - 200_000
    train_step(engine, JOB, 2)
    engine.destroy()
    (later,) = engine.drive_writes()
    assert later.life_bytes == again.life_bytes + later.run_bytes and later.run_bytes > 0
    (rank,) = inspect(tmp_path / "a")["runs"][0]["ranks"]
    assert again.life_bytes < rank["written_bytes"][0] <= later.life_bytes and rank["rated_bytes"] is None
    words = CliRunner().invoke(app, ["inspect", str(tmp_path / "a" / "default")]).stdout
    assert "in the life of the run" in words


def test_inspect_tells_of_the_rated_life(tmp_path: Path) -> None:
    engine = begin(tmp_path, durability="step", drive_tbw=1e-3)
    train_step(engine, JOB, 0)
    engine.destroy()
    (rank,) = inspect(tmp_path / "a")["runs"][0]["ranks"]
    assert rank["rated_bytes"] == 1e9
    assert (
        "of the 1 GB that it is rated for"
        in CliRunner().invoke(app, ["inspect", str(tmp_path / "a" / "default")]).stdout
    )


def test_a_commit_of_before_these_counts_begins_at_nothing() -> None:
    counts = DriveByteCounter(["/a"])
    counts.add(0, 7)
    counts.go_on(None)
    assert counts.drives()[0].life_bytes == 7
    after = DriveByteCounter(["/a"])
    after.go_on(counts.pack())
    assert after.drives()[0][1:] == (0, 7)


def test_gradients_that_wait_on_a_drive_count(tmp_path: Path) -> None:
    counts = DriveByteCounter([tmp_path])
    with IoQueue() as queue:
        scratch = SpillFile([tmp_path], {0: 8192}, queue, counts)
        scratch.write(0, 0, memoryview(aligned_empty(8192))).wait()
        scratch.close()
    assert counts.drives()[0].run_bytes == 8192


def test_a_life_is_warned_of_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    counts = DriveByteCounter(["/mnt/a", "/mnt/b"], Rating(1e12, 0.1, ranks=2))
    with caplog.at_level(logging.WARNING):
        counts.add(0, 40 * 10**9)
        assert not caplog.records
        counts.add(0, 20 * 10**9)
        counts.add(0, 20 * 10**9)
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith("/mnt/a: this run has written 120 GB to this drive, 12.0 % of its rated 1 TB")


def test_two_threads_that_exceed_a_life_at_once_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    """One of them is stopped where it knows that the rating is exceeded, until the other has added too."""

    class Slow(Rating):
        def used(self, nbytes: float) -> float:
            if not second.is_alive():
                second.start()
                second.join(0.2)
            return super().used(nbytes)

    counts = DriveByteCounter(["/mnt/a"], Slow(1e12, 0.1))
    second = threading.Thread(target=counts.add, args=(0, 10**11))
    with caplog.at_level(logging.WARNING):
        counts.add(0, 2 * 10**11)
        second.join()
    assert len(caplog.records) == 1


def test_a_run_is_foreseen_to_its_end() -> None:
    use = forecast("/mnt/a", 1e9, 1e9, 99, tbw=0.5)
    assert (use.at_end_bytes, use.share) == (1e11, 0.2)
    words = warning(use, 0.1, seconds_left=7200)
    assert (
        words is not None
        and "in 2.0 hours, this run will have written 100 GB to this drive, 20.0% of its rated 500 GB" in words
    )
    assert warning(use, 0.2, 7200) is None and warning(dataclasses.replace(use, rated_bytes=None), 0.1, 7200) is None
