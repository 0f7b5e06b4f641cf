"""A log of steps: a JSON object a line, cut to what was committed before a run goes on with it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.fileio import atomic_write


def json_line(content: Any) -> str:
    """JSON in which a number that is not finite is null: the standard has no other word for it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), allow_nan=False)


def check_log(log: Path) -> None:
    """Raise `ConfigError` where the log cannot be written, or would take the place of another file."""
    if log.is_dir() or not os.access(log if log.exists() else log.resolve().parent, os.W_OK):
        raise ConfigError(f"cannot write the log {log}: give a file in a folder that exists and that you may write")
    if log.is_file():
        with log.open(errors="replace") as file:
            first = file.readline()
        if first.strip() and not step_of(first):
            raise ConfigError(f"{log} is no log of a run, and would be overwritten; give another file")


def cut_log(path: Path, steps: int) -> None:
    """Keep the whole lines of steps up to `steps`, so that a resumed run appends to what was committed."""
    if not path.is_file():
        return  # none yet, or a device or pipe
    lines = path.read_text(errors="replace").split("\n")
    try:
        atomic_write(path, "".join(f"{line}\n" for line in lines if 0 < step_of(line) <= steps))
    except OSError as error:
        raise OSError(error.errno, f"cannot write the log: {error.strerror}", str(path)) from error


def step_of(line: str) -> int:
    """The step that a line of the log tells of; 0 for one that a kill has torn."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return 0
    return step if isinstance(step, int) else 0
