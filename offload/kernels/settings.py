"""Number of threads and instruction set of the kernels, from the environment and the cores of this process."""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
MOST_THREADS = 1024
"""Largest accepted OFFLOAD_THREADS. A larger number is probably a typo, and with some tens of thousands of threads
OpenMP, which torch uses, ends the process.
"""


def available_cores(cgroups: Path = _CGROUPS) -> int:
    """Returns the cores that this process may use: its CPU affinity, limited by its cgroup's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cgroup_quota(cgroups)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _cgroup_quota(cgroups: Path) -> float | None:
    """Returns the quota in cores, of cgroup v2 or v1 as seen inside a container; None without a limit."""
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroups / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroups / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (quota.isdigit() and period.isdigit()):  # "max", or -1
        return None
    return int(quota) / int(period) if int(period) else None


def threads_from(environment: dict[str, str] | os._Environ[str]) -> int:
    """Returns OFFLOAD_THREADS, or the number of available cores if the variable is empty.

    Raises `ConfigError` if the value is no whole number in range.
    """
    text = environment.get("OFFLOAD_THREADS", "")
    if not text:
        return available_cores()
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_THREADS):
        raise ConfigError(f"OFFLOAD_THREADS: expected a whole number from 1 to {MOST_THREADS}, got {text!r}")
    return int(text)


def threads_beside_device(environment: dict[str, str] | os._Environ[str], cores: int) -> int:
    """Returns the kernels' number of threads if another device computes: OFFLOAD_THREADS, or fewer than all cores.

    The thread that gives work to the device must find a core at once: while it waits for a core, the device is idle.
    From 16 cores on, the kernels leave a second core to the threads that receive gradients and start reads. Memory then
    limits an update long before all cores compute. With fewer than 4 cores the kernels leave none, since each core is a
    large part of the update's speed.
    """
    if environment.get("OFFLOAD_THREADS", ""):
        return threads_from(environment)
    return cores - (2 if cores >= 16 else 1 if cores >= 4 else 0)


def isa_from(environment: dict[str, str] | os._Environ[str], supported: list[str]) -> str:
    """Returns OFFLOAD_ISA, or the best of `supported` (ordered worst to best) if the variable is empty.

    Raises `ConfigError` if the value is unknown or not supported.
    """
    name = environment.get("OFFLOAD_ISA", "")
    if not name:
        return supported[-1]
    if name not in ("scalar", "avx2", "avx512", "neon"):
        raise ConfigError(f"OFFLOAD_ISA: expected 'scalar', 'avx2', 'avx512' or 'neon', got {name!r}")
    if name not in supported:
        raise ConfigError(f"OFFLOAD_ISA={name}: this machine supports only {', '.join(supported)}; unset it")
    return name
