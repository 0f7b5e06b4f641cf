"""On a CPU one thread at a time has an OpenMP team: more teams than cores make each operation wake its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload.swapper.memory.device import Device

ELEMENTS = 1 << 20
"""Of a tensor that torch computes with by several threads."""


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
