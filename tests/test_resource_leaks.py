"""A long run leaks nothing: descriptors, threads and files stay, and memory stays within 16 MiB."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil
import pytest

from offload.sizes import MIB
from tests.support import models
from tests.support.oracle import least_host_memory, start, train_step


def _held(folder: Path) -> tuple[int, int, int, list[str]]:
    gc.collect()
    process = psutil.Process()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return process.num_fds(), process.num_threads(), threading.active_count(), files


@pytest.mark.parametrize(
    ("tight", "first", "last"),
    [
        pytest.param(True, 15, 50, id="the least"),
        pytest.param(True, 50, 200, id="the least, many steps", marks=pytest.mark.slow),
        pytest.param(False, 50, 200, id="default budgets, many steps", marks=pytest.mark.slow),
    ],
)
def test_nothing_grows_from_step_to_step(tight: bool, first: int, last: int, tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16")
    budget = {"host_memory": least_host_memory(job, tmp_path)} if tight else {}
    engine = start(job, ("nvme", "nvme"), tmp_path, **budget)
    for step in range(first):
        train_step(engine, job, step)
    held, rss = _held(tmp_path), psutil.Process().memory_info().rss
    for step in range(first, last):
        train_step(engine, job, step)
    assert _held(tmp_path) == held
    assert psutil.Process().memory_info().rss - rss <= 16 * MIB
    assert engine.global_steps == last
    assert engine.use_counts().unforeseen == 0
    engine.destroy(remove=True)
