"""`offload` as a command, in a process of its own or, by torchrun, in several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import warm

_TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m", "--", "offload")


def begin(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.Popen[str] | warm.Process:
    """`offload` with these arguments in this folder; `finish` waits for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if ranks == 1:
        return warm.begin(["-m", "offload", *arguments], cwd=folder, env=environment, **streams)
    command = [sys.executable, *_TORCHRUN, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams)


def finish(process: subprocess.Popen[str] | warm.Process) -> str:
    """What it said; it must end well."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def losses(log: Path) -> list[float]:
    """Of each step so far; a line that is being written does not count yet."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]
