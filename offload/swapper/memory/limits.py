"""Host memory that this process may still allocate, within the limits of the machine and of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def free_host_memory() -> int:
    """Returns the bytes that this process may still allocate: available memory, within the limits of its cgroups."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(max(0, limit - used) for limit, used in memory_limits())])


def memory_limits() -> Iterator[tuple[int, int]]:
    """Yields the limit and the used bytes of each of this process's cgroups, without their parents.

    The used bytes do not include the kernel's cache of files, which gives way to allocations.
    """
    for line in _read("/proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            folder, limit_name, used_name, of_files = f"/sys/fs/cgroup{path}", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            folder = f"/sys/fs/cgroup/memory{path}"
            limit_name, used_name, of_files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # Inside a container the path may be the path on the host. The mount itself is then this process's cgroup.
        for place in (folder, folder[: -len(path)]):
            limit, used = _read(f"{place}/{limit_name}").strip(), _read(f"{place}/{used_name}").strip()
            if limit.isdigit() and used.isdigit():
                # Rows that include the group's children have a prefix in the first version of cgroups.
                rows = dict(row.split() for row in _read(f"{place}/memory.stat").splitlines())
                files = sum(int(rows.get(f"{of_files}{name}", 0)) for name in ("inactive_file", "active_file"))
                yield int(limit), max(0, int(used) - files)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
