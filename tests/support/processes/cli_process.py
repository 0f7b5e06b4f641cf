"""`offload` as a command, in a process of its own or on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def begin(folder: Path, *arguments: str) -> warm_process.Process:
    """Starts `offload` with these arguments in this folder; `finish` waits for it."""
    return warm_process.begin(
        ["-m", "offload", *arguments], cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def begin_ranks(folder: Path, *arguments: str) -> list[warm_process.Process]:
    """Starts `offload` on two ranks without a launcher, which takes three imports of torch less."""
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        warm_process.begin(
            ["-m", "offload", *arguments],
            cwd=folder,
            env=_environment() | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]


def finish(*processes: warm_process.Process) -> str:
    """Waits for the processes, each of which must succeed, and returns their outputs joined."""
    output = ""
    for process in processes:
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text
        output += text or ""
    return output


def losses(log: Path) -> list[float]:
    """Returns the loss of each step so far; an unfinished last line does not count."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [each["loss"] for each in records if "loss" in each]


def evaluated(log: Path) -> list[float]:
    """Returns the loss of each evaluation."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [each["eval_loss"] for each in records if "eval_loss" in each]
