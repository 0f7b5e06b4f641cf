"""On a CPU one thread at a time has an OpenMP team: more teams than cores make each operation wake its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.swapper.memory.device import Device
from tests.support.oracle import Job, accumulated_step, start

ELEMENTS = 1 << 20
"""Of a tensor that torch computes with by several threads."""

MICRO_BATCHES = 4


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def on_a_thread(work: Any) -> list[int]:
    """Runs `work` on a new thread, and returns the process's threads before and after it."""
    counted: list[int] = []

    def run() -> None:
        counted.append(threads())
        work()
        counted.append(threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return counted


def test_copies_of_the_librarys_threads_take_no_team() -> None:
    device = Device(torch.device("cpu"))
    source = torch.arange(ELEMENTS).view(torch.uint8)
    destinations = [torch.empty_like(source) for _ in range(3)]

    def work() -> None:
        device.enter_thread()
        for start_copy, destination in zip((device.upload, device.download), destinations, strict=False):
            start_copy(destination, source)
        device.copy(destinations[2], source)

    before, after = on_a_thread(work)
    assert after == before
    assert all(torch.equal(destination, source) for destination in destinations)


class Wide(nn.Module):
    """Blocks whose operations torch cuts into pieces for its threads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            seen.append(threads())
        return hidden


seen: list[int] = []


def wide_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    return model(torch.ones(1024, 64)).pow(2).mean()


@pytest.mark.slow
def test_micro_batches_that_wait_keep_no_team(tmp_path: Path) -> None:
    job = Job(Wide, wide_loss, accumulation=MICRO_BATCHES)
    engine = start(job, ("nvme", "nvme"), tmp_path, schedule="layer_major")
    for step in range(2):
        before = threads()
        seen.clear()
        accumulated_step(engine, job, step)
        # A thread each, the team of the one that computes, and what has not quite ended of another's.
        assert max(seen) <= before + MICRO_BATCHES + 2
    engine.destroy(remove=True)
