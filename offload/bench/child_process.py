"""Parts of a benchmark that run in separate processes. Each process writes its figures into a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.launch.commands import module_command

_LAST_LINES = 15


def run_child(module: str, job: Mapping[str, Any], figures: Path, seconds: float, **environment: str) -> dict[str, Any]:
    """Runs `python -m MODULE JOB FIGURES` for at most `seconds`, and returns its "state", "seconds" and "figures".

    The job is passed as JSON. After a failure the result contains the exit code and the last lines of the output too.
    """
    command = [*module_command(sys.executable, module), json.dumps(job), str(figures)]
    log, start = figures.with_suffix(".log"), time.monotonic()
    # A file instead of a pipe: the output is not read while the process runs, and a full pipe would block it.
    with log.open("w") as words:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                timeout=max(seconds, 0.0),
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
                check=False,
            )
            state = "failed" if done.returncode else "done"
        except subprocess.TimeoutExpired:
            state = "stopped"
    result: dict[str, Any] = {"state": state, "seconds": time.monotonic() - start, "figures": None}
    if figures.exists():
        result["figures"] = json.loads(figures.read_text())
    if state == "failed":
        result["exit_code"] = done.returncode
        result["last_lines"] = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return result


_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def growing_segments() -> dict[str, str]:
    """Returns the environment in which torch's GPU memory grows as in an engine, for a part that uses CUDA before."""
    return {} if _ALLOCATOR in os.environ else {_ALLOCATOR: "expandable_segments:True"}


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into `SystemExit` inside the context: the running part is then ended and its files are removed."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON. The file is replaced atomically, so it is complete at any time, even after a kill."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(beside, path)
