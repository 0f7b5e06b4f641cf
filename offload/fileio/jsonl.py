"""Step logs with one JSON object on each line, cut back to the last commit when a run resumes.

A run that begins moves the log of an earlier one aside. The run that writes a log holds a lock on it, so that no other
run takes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from itertools import count
from pathlib import Path
from typing import IO, Any

from offload.errors import ConfigError
from offload.fileio import atomic_write, check_writable, real_path

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


def check_log(log: Path, option: str = '"log"') -> None:
    """Checks that `log` can be written, replaces no file that is no step log, and is written by no other run.

    `option` is what the user calls the file.
    """
    check_writable(log, option)
    if log.is_file():
        with log.open(errors="replace") as file:
            first = file.readline()
            if first.strip() and not step_of(first) and not _is_cut_off(first):
                raise ConfigError(f"{log} is not the log of a run, and would be overwritten; give another file")
            if not _lock(file):
                raise ConfigError(
                    f"{log} is the log of a run that is under way{_holder(file)}; give another file, or end that run"
                )


def cut_log(path: Path, steps: int) -> Path | None:
    """Deletes cut-off lines and those of steps after `steps`, so that a resumed run appends to the committed steps.

    A log that would become empty is moved aside: log.jsonl becomes log.1.jsonl, or the next free number.

    Returns:
        The new name of a log that was moved aside, or None.

    Raises:
        OSError: If the log cannot be written, or another run holds it.
    """
    if not path.is_file():
        return None  # none yet, or a device or pipe
    try:
        # Line by line: the log of a run of weeks is larger than its process should become.
        with path.open(errors="replace") as lines:
            if not _lock(lines):
                raise OSError(errno.EBUSY, f"another run{_holder(lines)} writes it; give another file")
            if steps == 0 and any(step_of(line) > 0 for line in lines):
                return _move_aside(real_path(path))
            lines.seek(0)
            atomic_write(path, (line.rstrip("\n") + "\n" for line in lines if 0 < step_of(line) <= steps))
    except OSError as error:
        raise OSError(error.errno, f"cannot write the log: {error.strerror}", str(path)) from error
    return None


def hold_log(path: Path) -> IO[str] | None:
    """Locks the log for this process, until the returned file is closed. Returns None for a device or a pipe.

    Raises:
        OSError: If another run holds the log.
    """
    if path.exists() and not path.is_file():
        return None
    file = path.open("a", encoding="utf-8")
    if not _lock(file):
        holder = _holder(file)
        file.close()
        raise OSError(errno.EBUSY, f"another run{holder} writes the log; give another file", str(path))
    return file


def _lock(file: IO[str]) -> bool:
    # The kernel drops the lock when the process ends, however it ends.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _holder(file: IO[str]) -> str:
    """Returns " (process N)" for the process that holds the lock of a file; "" if the kernel does not say."""
    about = os.fstat(file.fileno())
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    try:
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    # number: FLOCK ADVISORY WRITE process major:minor:inode start end
    return next(
        (f" (process {words[4]})" for words in map(str.split, locks) if words[1] == "FLOCK" and place in words), ""
    )


def _move_aside(log: Path) -> Path:
    # A number that is taken may be the log of another run, and is never replaced.
    for number in count(1):
        aside = log.with_name(f"{log.stem}.{number}{log.suffix}")
        if not os.path.lexists(aside):
            return log.rename(aside)
    raise AssertionError("unreachable")


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
