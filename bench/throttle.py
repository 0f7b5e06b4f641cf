"""Drives of known rates: this process and those that it starts, in a cgroup whose I/O the kernel holds back.

cgroup v1's `blkio.throttle` alone, as root, where the folder is on a file system of one block device.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_BLKIO = Path("/sys/fs/cgroup/blkio")


_LOOK_SECONDS = 0.01
"""Seconds between two looks at the bytes that the group has written."""


@contextlib.contextmanager
def falling(folder: Path, rate: int, nbytes: int, after: int) -> Iterator[None]:
    """As `throttled`; once `nbytes` are written inside, no more than `after` bytes a second are written."""
    with throttled(folder, rate) as (group, device):
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                rows = (line.split() for line in _lines(str(group / "blkio.throttle.io_service_bytes")))
                if any(row[:2] == [device, "Write"] and int(row[2]) >= nbytes for row in rows):
                    (group / "blkio.throttle.write_bps_device").write_text(f"{device} {after}")
                    return

        thread = threading.Thread(target=watch, name="falling-drive")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def throttled(folder: Path, rate: int) -> Iterator[tuple[Path, str]]:
    """No more than `rate` bytes a second are read from, and as many written to, the drive of `folder` inside.

    Yields the folder of the group, and the drive as the group names it.
    """
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    group = _BLKIO / f"offload-bench-{os.getpid()}"
    own_cgroup = next(line.rpartition(":")[2] for line in _lines("/proc/self/cgroup") if line.split(":")[1] == "blkio")
    group.mkdir()
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {rate}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group, device
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (_BLKIO / own_cgroup.lstrip("/") / "cgroup.procs").write_text(process)
        group.rmdir()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
