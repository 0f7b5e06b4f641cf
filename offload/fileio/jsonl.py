"""Step logs with one JSON object on each line, cut back to the last commit when a run resumes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.fileio import atomic_write

_HEAD = '{"step": '
"""The first bytes of each line of a log."""


def json_line(content: Any) -> str:
    """Returns `content` as a line of JSON, with null for each number that is not finite, which JSON cannot express."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), allow_nan=False)


def check_log(log: Path) -> None:
    """Checks that `log` can be written and does not replace a file that is no step log.

    Raises:
        ConfigError: If the log cannot be written, or the existing file is not the log of a run.
    """
    if log.is_dir() or not os.access(log if log.exists() else log.resolve().parent, os.W_OK):
        raise ConfigError(f"cannot write the log {log}: give a file in a folder that exists and that you may write")
    if log.is_file():
        with log.open(errors="replace") as file:
            first = file.readline()
        if first.strip() and not step_of(first) and not _is_cut_off(first):
            raise ConfigError(f"{log} is not the log of a run, and would be overwritten; give another file")


def cut_log(path: Path, steps: int) -> None:
    """Deletes cut-off lines and those of steps after `steps`, so that a resumed run appends to the committed steps.

    Raises:
        OSError: If the log cannot be written.
    """
    if not path.is_file():
        return  # none yet, or a device or pipe
    try:
        # Line by line: the log of a run of weeks is larger than its process should become.
        with path.open(errors="replace") as lines:
            atomic_write(path, (line.rstrip("\n") + "\n" for line in lines if 0 < step_of(line) <= steps))
    except OSError as error:
        raise OSError(error.errno, f"cannot write the log: {error.strerror}", str(path)) from error


def _is_cut_off(line: str) -> bool:
    """Returns True if this can be a line of a log that a kill cut off: it has the first bytes of one, and no end."""
    return not line.endswith("\n") and line[: len(_HEAD)] == _HEAD[: len(line)]


def step_of(line: str) -> int:
    """Returns the step of a line of the log; 0 if the line is cut off by a kill, or is not of a step log."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return 0
    return step if isinstance(step, int) else 0
