"""Whether something else ran while a machine was measured: the same rates twice, and what else its cores did."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_APART = 1.2
"""So many times as fast is another machine, as a plan sees it."""
_SHARE = 0.15
"""Of the cores, that others may take."""
_CURE = "run `offload probe` again when nothing else runs"


def apart(name: str, first: float, last: float, words: Callable[[float], str]) -> list[str]:
    """A sentence where a rate was not the same at the beginning and at the end."""
    if max(first, last) <= _APART * min(first, last):
        return []
    return [f"{name}: {words(first)} at the beginning of the probe, {words(last)} at its end; {_CURE}"]


class Others:
    """What other processes do on the cores that are ours to use, from now on."""

    def __init__(self) -> None:
        self._busy, self._mine, self._start = _busy(), time.process_time(), time.perf_counter()

    def doubts(self) -> list[str]:
        """A sentence where they took more than a little. Nothing where nobody can tell."""
        busy = _busy()
        if self._busy is None or busy is None:
            return []
        seconds = (time.perf_counter() - self._start) * len(_cores())
        share = (busy - self._busy - (time.process_time() - self._mine)) / seconds
        return [f"other processes took {share:.0%} of the cores during the probe; {_CURE}"] if share > _SHARE else []


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _busy() -> float | None:
    """Seconds that these cores have worked, for anybody; None where it is not told, or a quota has other cores too."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        if _has_quota():
            return None
        each = psutil.cpu_times(percpu=True)
        idle = ("idle", "iowait", "guest", "guest_nice")  # a guest's seconds are also in user
        return sum(sum(value for name, value in each[core]._asdict().items() if name not in idle) for core in _cores())
    return None


def _has_quota() -> bool:
    """Whether this process may use less than the cores that it sees: then most of their work is not beside it."""
    limits = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    told = [path.read_text().split()[0] for path in limits if path.is_file()]
    return any(each not in ("max", "-1") for each in told)
