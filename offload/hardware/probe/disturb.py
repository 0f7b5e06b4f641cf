"""Detection of other work on the machine during a measurement: rates measured twice, and processor time of others."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_APART = 1.2
"""Ratio above which two measurements of a rate lead to different plans."""
FAR = 10.0
"""Ratio above which neither measurement says anything about the machine."""
SLOWEST = 1e8
"""Operations of products, and bytes of memory, a second, below which no machine is measured but its disturbance: one
core makes a hundred times as many."""
_SHARE = 0.15
"""Fraction of the cores that other processes may use."""
CURE = "run `offload probe` again while the machine is idle"


def apart(name: str, first: float, last: float, describe: Callable[[float], str]) -> list[str]:
    """Returns a sentence if a rate differs between the beginning and the end of the probe, else nothing."""
    if max(first, last) <= _APART * min(first, last):
        return []
    return [f"{name}: {describe(first)} at the beginning of the probe, {describe(last)} at its end; {CURE}"]


class Others:
    """A meter of other processes' work on the cores that this process may use, from the construction on."""

    def __init__(self) -> None:
        self._busy, self._mine, self._start = _busy(), time.process_time(), time.perf_counter()

    def share(self) -> float | None:
        """Returns the fraction of the cores that others used since the construction; None if nobody can tell."""
        busy = _busy()
        if self._busy is None or busy is None:
            return None
        seconds = (time.perf_counter() - self._start) * len(_cores())
        return max(busy - self._busy - (time.process_time() - self._mine), 0.0) / seconds if seconds else None

    def doubts(self) -> list[str]:
        """Returns a sentence if others used more than `_SHARE` of the cores; nothing if this cannot be determined."""
        share = self.share()
        if share is None or share <= _SHARE:
            return []
        return [f"other processes took {share:.0%} of the cores during the probe; {CURE}"]


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


def _busy() -> float | None:
    """Returns the seconds that these cores have worked for any process.

    None if the system does not report them, or if a CPU quota makes them meaningless.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        if _has_quota():
            return None
        each = psutil.cpu_times(percpu=True)
        idle = ("idle", "iowait", "guest", "guest_nice")  # `user` includes the seconds of guests
        return sum(sum(value for name, value in each[core]._asdict().items() if name not in idle) for core in _cores())
    return None


def _has_quota() -> bool:
    """Returns True if a cgroup limits this process to less than the cores that it sees.

    Most work on those cores then belongs to other containers and does not slow this process.
    """
    limits = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    quotas = [path.read_text().split()[0] for path in limits if path.is_file()]
    return any(each not in ("max", "-1") for each in quotas)
