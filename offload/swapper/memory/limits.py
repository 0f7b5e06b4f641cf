"""Host memory that this process may still allocate, within every limit: of the machine, of cgroups, of the process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from offload.sizes import format_size


class MemoryLimit(NamedTuple):
    """A limit of host memory. Beyond the limit of a cgroup the kernel kills, without a word of the process.

    Beyond `memory.high` the kernel takes pages away and delays each allocation.
    """

    name: str
    """What sets the limit, in words."""
    nbytes: int
    used: int
    """Bytes that count against the limit already."""

    @property
    def free(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.room)

    @property
    def room(self) -> int:
        """Bytes that may still be allocated; below 0, bytes beyond the limit."""
        return self.nbytes - self.used

    def __str__(self) -> str:
        return f"{self.name} of {format_size(self.nbytes)}"


def free_host_memory() -> int:
    """Returns the bytes that this process may still allocate."""
    return tightest_limit().free


def tightest_limit(processes: int = 1) -> MemoryLimit:
    """Returns the limit that leaves this process the fewest bytes.

    `processes` share the memory of the machine and of cgroups evenly; the result is the part of one of them.
    """
    total, free = psutil.virtual_memory().total, int(psutil.virtual_memory().available)
    shared = min((MemoryLimit("this machine", total, total - free), *cgroup_limits()), key=lambda limit: limit.room)
    part = shared._replace(nbytes=shared.used + shared.room // processes)
    return min((part, *process_limits()), key=lambda limit: limit.room)


def cgroup_limits() -> Iterator[MemoryLimit]:
    """Yields the limit of each of this process's cgroups and of the groups around them.

    The used bytes do not include the kernel's cache of files, which gives way to allocations.
    """
    for place, group, version in _cgroups():
        limits, used_name, of_files = ["memory.max", "memory.high"], "memory.current", ""
        if version == 1:  # rows that include the group's children have a prefix there
            limits, used_name, of_files = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
        used = _read(f"{place}/{used_name}").strip()
        set_limits = [(name, limit) for name in limits if (limit := _read(f"{place}/{name}").strip()).isdigit()]
        if used.isdigit() and set_limits:
            rows = dict(row.split() for row in _read(f"{place}/memory.stat").splitlines())
            files = sum(int(rows.get(f"{of_files}{name}", 0)) for name in ("inactive_file", "active_file"))
            for name, limit in set_limits:
                words = f"memory.high of the cgroup {group}" if name == "memory.high" else f"the cgroup {group}"
                yield MemoryLimit(words, int(limit), max(0, int(used) - files))


def stalled() -> float:
    """Returns the share of the last 10 seconds in which a process of a cgroup of this process waited for memory.

    It is the largest of all cgroups, except for the root, which is the machine. It is 0 where the kernel does not
    measure it (PSI), as in the first version of cgroups.
    """
    shares = [0.0]
    for place, _, _ in _cgroups():
        some = _read(f"{place}/memory.pressure").partition("\n")[0]  # some avg10=0.00 avg60=0.00 avg300=0.00 total=0
        # The root has no count of its bytes. Inside a container, "/" is the name of the container's own group.
        if some.startswith("some avg10=") and _read(f"{place}/memory.current"):
            shares.append(float(some.split()[1].partition("=")[2]) / 100)
    return max(shares)


def _cgroups() -> Iterator[tuple[str, PurePosixPath, int]]:
    """Yields folder, name and version of each of this process's cgroups of memory, and of the groups around them."""
    for line in _read("/proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount, version = "/sys/fs/cgroup", 2
        elif "memory" in controllers.split(","):
            mount, version = "/sys/fs/cgroup/memory", 1
        else:
            continue
        # Inside a container the path may be the path on the host. The mount itself is then this process's cgroup.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield f"{mount}{group}".rstrip("/"), group, version


def process_limits() -> Iterator[MemoryLimit]:
    """Yields the limits of the process itself: beyond them an allocation fails."""
    # Pages of 4 KiB or the system's: all, resident, shared, code, unused, data and stack, unused.
    pages = [int(word) * os.sysconf("SC_PAGE_SIZE") for word in _read("/proc/self/statm").split()]
    for name, number, column in (("RLIMIT_AS", resource.RLIMIT_AS, 0), ("RLIMIT_DATA", resource.RLIMIT_DATA, 5)):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY and pages:
            yield MemoryLimit(f"{name} (ulimit)", limit, pages[column])


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
