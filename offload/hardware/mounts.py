"""The file system below a folder, and notices on folders for swap files that lie where a user may not expect them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import psutil

from offload.errors import ConfigError
from offload.notices import Remark
from offload.sizes import format_size

_FOR_DRIVES = ("/mnt", "/media", "/run/media")
"""Folders in which drives are mounted, by custom."""


class Mount(NamedTuple):
    """A mounted file system."""

    device: str
    kind: str
    point: str
    """The folder on which it is mounted."""


def mount_of(path: str | Path) -> Mount:
    """Returns the file system that contains `path`; every field is "?" if the system does not say."""
    found = [part for part in psutil.disk_partitions(all=True) if Path(path).is_relative_to(part.mountpoint)]
    # The mount point with the longest path is the innermost one. If two file systems are mounted on one folder, the
    # later mount hides the earlier one.
    longest = max(reversed(found), key=lambda part: len(part.mountpoint), default=None)
    return Mount(longest.device, longest.fstype, longest.mountpoint) if longest else Mount("?", "?", "?")


def check_folders(folders: Iterable[str]) -> None:
    """Checks that no folder for swap files is made on the drive of / where the folder above it does not exist either.

    A name in such a path is mistyped, as a rule, or its drive not mounted. On a drive of its own, and in the folder for
    temporary files, where no drive is mounted, any folder may be made.

    Raises:
        ConfigError: If one would be; nothing was made.
    """
    for name in folders:
        path = Path(os.path.realpath(name))
        there = next(each for each in path.parents if each.exists())
        if there == path.parent or not _is_with_root(there) or path.is_relative_to(os.path.realpath(gettempdir())):
            continue
        raise ConfigError(
            f"nvme_path {name} does not exist, and neither does the folder above it, {path.parent}: the first one on "
            f"that path which exists is {there}, on the drive of /; correct the path, mount the drive, or make "
            f"{path.parent}"
        )


def folder_notices(folders: Iterable[str]) -> Iterator[str]:
    """Yields a notice for each folder for swap files that is made anew, or lies on the drive of / by mistake.

    A folder beside existing ones is a `Remark`. A warning is a folder on the drive of / where a drive of its own is
    usual: it may be mistyped, or its drive not mounted.
    """
    for name in folders:
        path = Path(os.path.realpath(name))
        there = next(each for each in (path, *path.parents) if os.path.exists(each))
        mount = mount_of(there)
        on = f"the drive of {mount.point} ({mount.device}, {format_size(shutil.disk_usage(there).free)} free)"
        # The parts of the path that the start of a run will make.
        missing = list(path.relative_to(there).parts)
        if _is_with_root(there) and any(path.is_relative_to(each) for each in _FOR_DRIVES):
            why = f"{there / missing[0]} does not exist" if missing else "no drive is mounted there"
            cure = f", and delete {there / missing[0]}" if missing else ""
            yield (
                f"swap files go to {path} on {on}: {why}; if the path is mistyped or its drive not mounted, stop{cure}"
            )
        elif missing:
            yield Remark(f"{path} is made for swap files, on {on}")


def _is_with_root(path: Path) -> bool:
    """Returns True if a folder is on the file system of /."""
    return path.stat().st_dev == os.stat("/").st_dev
