"""Runs of a tiny model with monitors, and the CSV files that the runs write."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.support.oracle import Job, config

DISK = ("nvme", "nvme")


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def loss(net: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + micro)
    rows = torch.randn(4, 32, generator=generator).to(next(getattr(net, "module", net).parameters()).device)
    value: torch.Tensor = net(rows).pow(2).mean()
    return value


JOB = Job(model, loss, steps=3, accumulation=2)

CSV = {"enabled": True, "job_name": "job"}


def start(
    folder: Path, job: Job = JOB, placement: tuple[str, str] = DISK, keys: Mapping[str, Any] | None = None, **more: Any
) -> offload.Engine:
    """Starts an engine that writes CSV files to `folder`/job; `keys` are top-level keys, `more` those of "offload"."""
    torch.manual_seed(job.seed)
    content = config(job, placement, folder / "swap", **more)
    content |= {"csv_monitor": {**CSV, "output_path": str(folder)}, **(keys or {})}
    return offload.initialize(model=job.model(), config=content).engine


def rows(folder: Path, event: str) -> list[tuple[int, float]]:
    """Returns the rows of an event's file after a check that the file has DeepSpeed's form."""
    with (folder / "job" / f"{event.replace('/', '_')}.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["step", event.rpartition("/")[2]]
    return [(int(samples), float(value)) for samples, value in lines]


def values(folder: Path, event: str) -> list[float]:
    return [value for _, value in rows(folder, event)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert "offload-monitor" not in {thread.name for thread in threading.enumerate()}
