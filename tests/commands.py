"""`offload` as a command, in a process of its own or, by torchrun, in several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m", "--", "offload")


def begin(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.Popen[str]:
    """`offload` with these arguments in this folder; `finish` waits for it."""
    return subprocess.Popen(
        [sys.executable, *(_TORCHRUN if ranks == 2 else ("-m", "offload")), *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it said; it must end well."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def losses(log: Path) -> list[float]:
    """Of each step so far; a line that is being written does not count yet."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]
