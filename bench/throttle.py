"""A drive of a known rate: this process and those that it starts, in a cgroup whose I/O the kernel holds back.

cgroup v1's `blkio.throttle` alone, as root, where the folder is on a file system of one block device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_BLKIO = Path("/sys/fs/cgroup/blkio")


@contextlib.contextmanager
def throttled(folder: Path, rate: int) -> Iterator[None]:
    """No more than `rate` bytes a second are read from, and as many written to, the drive of `folder` inside."""
    device = os.stat(folder).st_dev
    group = _BLKIO / f"offload-bench-{os.getpid()}"
    mine = next(line.rpartition(":")[2] for line in _lines("/proc/self/cgroup") if line.split(":")[1] == "blkio")
    group.mkdir()
    try:
        for way in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {rate}"
            (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (_BLKIO / mine.lstrip("/") / "cgroup.procs").write_text(process)
        group.rmdir()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
