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
    """Yields the limit of each of this process's cgroups and the bytes that the cgroup uses; not of their parents."""
    for line in _read("/proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            folder, limit_name, used_name = f"/sys/fs/cgroup{path}", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = f"/sys/fs/cgroup/memory{path}"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path may be the one on the host: then the mount itself is the cgroup of this process.
        for place in (folder, folder[: -len(path)]):
            limit, used = _read(f"{place}/{limit_name}").strip(), _read(f"{place}/{used_name}").strip()
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used)


def _read(path: str) -> str:
    """Returns the text of a file; an empty string if the file cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
