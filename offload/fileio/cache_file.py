"""Paths of cached measurements and compiled kernels of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offload.errors import StoreError
from offload.fileio.atomic_write import atomic_write
from offload.fileio.inner_files import inner_folder, open_inner
from offload.sizes import MIB

_MOST = 64 * MIB
"""Bytes of a cached file at most: machine code, or a measurement."""


def cache_folder() -> Path:
    """Returns the user's cache folder of this library; it needs not exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification says to ignore a relative path
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "offload"


def cache_file(name: str) -> Path:
    """Returns the path of a JSON file of this machine in the user's cache folder; file and folder need not exist."""
    return cache_folder() / f"{name}-{platform.node() or 'machine'}.json"


def read_cache(path: Path) -> str:
    """Returns the text of a file in the user's cache folder. Its content is trusted, as machine code must be.

    Raises:
        OSError: If there is no such file, or it or a folder of it may be another user's.
        ValueError: If it is no text.
    """
    try:
        descriptor = open_inner(path, _depth(path), ours=True)
    except StoreError as error:
        raise OSError(str(error)) from error
    with open(descriptor, "rb") as file:
        return file.read(_MOST).decode()


def write_cache(path: Path, text: str) -> None:
    """Replaces a file in the user's cache folder, and makes the folders that are missing, for this user alone.

    Not synced: after a damage by a power cut, the content is measured or compiled again.
    """
    with own_cache_folder(path):
        atomic_write(path, text, durable=False)


@contextmanager
def own_cache_folder(path: Path) -> Iterator[None]:
    """Makes the folders of a file in the user's cache folder, and raises `OSError` if one is another user's."""
    try:
        for number in reversed(range(_depth(path) - 1)):
            path.parents[number].mkdir(mode=0o700, parents=True, exist_ok=True)
            with inner_folder(path.parents[number], _depth(path) - 1 - number, ours=True):
                pass
        yield
    except StoreError as error:
        raise OSError(str(error)) from error


def _depth(path: Path) -> int:
    """Returns the number of names at the end of a path that the user has not given, this library's name the first."""
    user = cache_folder().parent
    return len(path.relative_to(user).parts) if path.is_relative_to(user) else 1


# -- stamp ---------------------------------------------------------------------------------------------
#
# Properties of a file that show a change of its content.


class Stamp(NamedTuple):
    """Properties of a file that show a change of its content."""

    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)
