"""A rank that is stopped, or that the kernel kills for its memory, ends the others within their bound, by name."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.memory_limit import MemoryLimit
from offload import testing
from offload.errors import RankError
from tests.support import models
from tests.support.oracle import train_step
from tests.support.processes.memory_limit import memory_limit
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import pool, rank_and_size, start

JOB = models.GPT2._replace(loss=language_rows_loss, steps=4, dtype="bf16")
ENOUGH = 64 << 20


def _error_of(folder: Path, group: MemoryLimit | None) -> str:
    """Trains a step; then rank 1 stops in a gather, until rank 0 has ended, or takes more memory than it may."""
    rank, _ = rank_and_size()
    engine = start(JOB, ("nvme", "nvme"), folder)
    (folder / f"process{rank}").write_text(str(os.getpid()))
    train_step(engine, JOB, 0)
    process = int((folder / f"process{1 - rank}").read_text())
    with pytest.MonkeyPatch.context() as patch:

        def stop(gather: Callable[..., Any], *arguments: Any) -> Any:
            patch.undo()
            os.kill(os.getpid(), signal.SIGSTOP)
            return gather(*arguments)

        if group is None and rank == 0:
            testing.replace(patch, "ranks.silent", 2.0)
        if group is None and rank == 1:
            testing.intercept(patch, "ranks.gather", stop)
        if group is not None and rank == 1:
            group.enter()
            bytearray(4 * ENOUGH)
        try:
            with pytest.raises(RankError) as caught:
                for step in range(1, JOB.steps):
                    train_step(engine, JOB, step)
            engine.destroy()  # raises nothing more, though a gather of rank 0 is under way
        finally:
            if group is None and rank == 0:
                os.kill(process, signal.SIGCONT)
    assert testing.inspect(engine).device_arena.blocks == [], "device memory is left"
    return str(caught.value)


def test_a_rank_that_is_stopped_is_named_and_ends_once_it_goes_on(tmp_path: Path) -> None:
    with pool(2) as ranks:
        first, second = ranks.run(_error_of, tmp_path, None)
    assert re.match(r"rank 1 \(process \d+ on .*\) has sent no heartbeat for \d+ s\. Rank 0 cannot continue", first)
    assert re.match(r"rank 0 \(process \d+ on .*\) has ended: ", second)


def test_a_rank_that_is_killed_for_its_memory_is_named(tmp_path: Path) -> None:
    with memory_limit(ENOUGH) as group:
        with pool(2) as ranks:
            for pipe in ranks.pipes:
                pipe.send((_error_of, (tmp_path, group)))
            right, message = ranks.pipes[0].recv()
            ranks.processes[1].join()
            assert ranks.processes[1].exitcode == -signal.SIGKILL
    assert right and re.match(r"rank 1 \(process \d+ on .*\) was killed or has crashed\. Rank 0 cannot", message)
