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

FIRST, LAST = 50, 200


def _held(folder: Path) -> tuple[int, int, int, list[str]]:
    gc.collect()
    process = psutil.Process()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return process.num_fds(), process.num_threads(), threading.active_count(), files


@pytest.mark.parametrize(
    "tight", [pytest.param(False, id="default budgets", marks=pytest.mark.slow), pytest.param(True, id="the least")]
)
def test_from_the_50th_step_to_the_200th(tight: bool, tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16")
    budget = {"host_memory": least_host_memory(job, tmp_path)} if tight else {}
    engine = start(job, ("nvme", "nvme"), tmp_path, **budget)
    for step in range(FIRST):
        train_step(engine, job, step)
    held, rss = _held(tmp_path), psutil.Process().memory_info().rss
    for step in range(FIRST, LAST):
        train_step(engine, job, step)
    assert _held(tmp_path) == held
    assert psutil.Process().memory_info().rss - rss <= 16 * MIB
    assert engine.global_steps == LAST
    assert engine.use_counts().unforeseen == 0
    engine.destroy(remove=True)
