"""Parts of a benchmark that run in separate processes. Each process writes its figures into a file."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_LAST_LINES = 15


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a call in a new process, so that nothing else is in the process's memory."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, function, arguments))
    process.start()
    send.close()
    result = receive.recv()
    process.join()
    return result


def _send(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))


def run_child(command: Sequence[str], figures: Path, seconds: float, **environment: str) -> dict[str, Any]:
    """Runs a part's process for at most `seconds`, and returns its "state", "seconds" and "figures".

    After a failure the result contains the exit code and the last lines of the output too.
    """
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
                env=os.environ | environment,
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
