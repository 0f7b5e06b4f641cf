"""Real file systems of a few megabytes; where there are none to be had, a test is skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

EXT4 = ("mkfs.ext4", "-q", "-m", "0")
"""All of its room is anybody's."""


@contextlib.contextmanager
def mounted(folder: Path, *what: str) -> Iterator[Path]:
    """Mounts on `folder`/mount with the arguments `what`, and yields the mount point."""
    place = folder / "mount"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", *what, str(place)], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)  # lazily: a failed test may hold files


@contextlib.contextmanager
def disk(folder: Path, nbytes: int, make: Sequence[str] = EXT4) -> Iterator[Path]:
    """Yields a file system of `nbytes` bytes in the file `folder`/image."""
    if shutil.which(make[0]) is None:
        pytest.skip(f"there is no {make[0]}")
    image = folder / "image"
    image.touch()
    os.truncate(image, nbytes)
    subprocess.run([*make, str(image)], check=True, capture_output=True)
    with mounted(folder, "-o", "loop", str(image)) as place:
        yield place


def sync(place: Path) -> None:
    """Writes out the data of this file system alone."""
    subprocess.run(["sync", "--file-system", str(place)], check=True)
