"""Late reads and writes change no bit: every necessary wait is there, for any order of completions."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload import testing
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import Job, assert_same, room_for, run

JOBS = {"gpt2": models.GPT2, "mixture": models.MIXTURE, "dropout": models.DROPOUT._replace(accumulation=2)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", JOBS)
def test_late_io_changes_no_bit(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Job = JOBS[name]._replace(dtype="bf16" if seed % 2 else "fp32", steps=4)
    expected = run(job, ("none", "none"), tmp_path / "memory")
    use_queue(monkeypatch, lambda: LateQueue(seed, 0.01))
    found = run(job, ("nvme", "nvme"), tmp_path / "late", device_memory=room_for(job, 2))
    assert_same(expected, found, "in memory and with late I/O")


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu"), ("none", "none")])
def test_late_writes_through(placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2._replace(dtype="bf16", steps=4)
    expected = run(job, ("none", "none"), tmp_path / "memory")
    use_queue(monkeypatch, lambda: LateQueue(1, 0.01))
    assert_same(expected, run(job, placement, tmp_path / "late", durability="step"), f"{placement}")


def test_tiles_that_split_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few pages, so that every unit takes many and every tensor is cut."""

    job = models.GPT2._replace(dtype="bf16", steps=4)
    expected = run(job, ("none", "none"), tmp_path / "memory")
    testing.replace(monkeypatch, "size.update_tile", range(3 * 2048 * 12, 3 * 2048 * 12 + 1))
    use_queue(monkeypatch, lambda: LateQueue(2, 0.002))
    assert_same(expected, run(job, ("nvme", "nvme"), tmp_path / "tiles"), "whole and in tiles")
