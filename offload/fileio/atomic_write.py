"""Files that are written or replaced whole or not at all, and are durable then."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def atomic_write(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace the file at `path` by `text`: whoever reads it, or a kill in between, finds the old one or the new one.

    The text is written beside the file and takes its name. A symbolic link stays, and the file that it names is
    replaced. Mode and, where that is allowed, owner of a file that exists are kept. A device or pipe is written to.

    Args:
        path: in a folder that exists.
        text: written as UTF-8, with line ends as they are.
        durable: whether the file survives a power cut from the return on; costs two syncs.

    Raises:
        OSError: where it cannot be written; the old file is then as it was, and nothing lies beside it.
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
    before = path.stat()
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    with contextlib.suppress(PermissionError):  # somebody else's file: it becomes ours
        os.fchown(descriptor, before.st_uid, before.st_gid)


def replace_durably(new: Path, path: Path) -> None:
    """Gives the file `new`, which is durable and in the same folder, the name `path`; durable from the return on."""
    os.replace(new, path)
    sync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there, and makes its bytes durable; its name is once its folder is synced.

    Raises:
        OSError: where it cannot be written; `FileExistsError` where something has the name.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        done = 0
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
