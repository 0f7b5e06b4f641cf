"""Files that are written or replaced completely or not at all, and are durable afterwards."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def atomic_write(path: Path, text: str, *, durable: bool = True) -> None:
    """Replaces the file at `path` by `text`; a reader, or a kill in between, finds the old file or the new one.

    The text is written to a file beside `path`, which is then renamed. A symbolic link is kept, and the file that the
    link names is replaced. The mode of an existing file is kept, and its owner if the system permits that. A device or
    a pipe is written directly.

    Args:
        path: In a folder that exists.
        text: Written as UTF-8, with its line ends unchanged.
        durable: True if the file must survive a power cut once this returns; costs two syncs.

    Raises:
        OSError: If the file cannot be written. The old file is then unchanged, and nothing is left beside it.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
        return
    path = path.resolve()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8", newline="") as file:
            if path.exists():
                _keep_mode_and_owner(path, file.fileno())
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if durable:
            replace_durably(new, path)
        else:
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _keep_mode_and_owner(path: Path, descriptor: int) -> None:
    """Gives the open file of `descriptor` the mode of the file at `path`, and its owner if that is permitted."""
    before = path.stat()
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    with contextlib.suppress(PermissionError):  # another user's file; this process then owns the new one
        os.fchown(descriptor, before.st_uid, before.st_gid)


def replace_durably(new: Path, path: Path) -> None:
    """Renames the file `new`, which is durable and in the same folder, to `path`; the name is durable on return."""
    os.replace(new, path)
    sync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that must not exist yet and syncs its bytes.

    The name of the file is durable only after `sync_folder` of its folder. After an error the incomplete file remains.

    Raises:
        OSError: If the file cannot be written; `FileExistsError` if the name is taken.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        done = 0
        # A write may end early, for example at a signal or at the 2 GiB limit of one call.
        while done < len(data):
            done += os.write(descriptor, memoryview(data)[done:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
