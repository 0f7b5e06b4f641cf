"""`offload export` holds a chunk in memory, whatever the size of a parameter, and reads what it planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import kernels, testing
from offload.aio import IoQueue
from offload.model_io.source import StoreSource
from offload.runs.export import export, make_plan, read_nbytes
from tests.support import models
from tests.support.exported_runs import DISK, ended, exported, tensors
from tests.support.oracle import Job, assert_same_tensors, config
from tests.support.processes.process_measures import peak_memory, peak_rss


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run's folder."""
    ended(models.GPT2, tmp_path / "swap")
    return tmp_path / "swap" / "default"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4096, 16384, bias=False)


@pytest.mark.slow
def test_a_large_parameter_is_never_completely_in_memory(tmp_path: Path) -> None:
    """256 MiB of fp32 from 64 Mi elements: what torch and our buffers take is counted, and what is read ahead."""
    engine = offload.initialize(
        model=Wide().bfloat16(), config=config(Job(Wide, models.language_loss, dtype="bf16"), DISK, tmp_path / "swap")
    )[0]
    engine.destroy()
    (grown, nbytes), _ = peak_memory(_growth, tmp_path / "swap" / "default", tmp_path / "out")
    assert nbytes == 256 << 20
    assert grown < 160 << 20, f"{grown / 2**20:.0f} MiB, of which libraries are up to 80 in a process that is new"


def _growth(run: Path, out: Path) -> tuple[int, int]:
    """How far the peak RSS grew, and how many bytes were written."""
    small = torch.ones(8, dtype=torch.bfloat16)
    kernels.join_master(small, torch.zeros(8, dtype=torch.int16), torch.empty(8))
    before = peak_rss()
    with IoQueue() as queue:
        source = StoreSource(run, queue)
        done = export(source, out, make_plan(source, "fp32", 5_000_000_000), queue)
        source.close()
    return peak_rss() - before, done.nbytes


def test_what_is_read_is_what_was_planned(small: Path, tmp_path: Path) -> None:
    """So that a progress bar ends at its end."""
    export_report: list[int] = []
    with IoQueue() as queue:
        source = StoreSource(small, queue)
        plan = make_plan(source, "fp32", 5_000_000)
        export(source, tmp_path / "out", plan, queue, export_report.append)
        source.close()
    assert sum(export_report) == read_nbytes(plan) > 0


def test_small_chunks_give_the_same(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(small, tmp_path / "out")
    testing.replace(monkeypatch, "size.export_chunk", 2048)
    exported(small, tmp_path / "again")
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "again").keys()
    assert_same_tensors(tensors(tmp_path / "again"), tensors(tmp_path / "out"))
