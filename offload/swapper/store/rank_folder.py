"""The folder of a rank on a drive: private, locked by one process, its small files replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offload.errors import IoError, StoreError
from offload.fileio import DirLock, LockHeldError, holder_of, replace_durably, sync_folder, this_process

FILES = ("commit", "manifest.json", "states", "blob.0", "blob.1", "suspect", "lock")
"""Everything that a rank's folder may hold, beside what replaces one of them (`*.tmp`)."""


class Lock:
    """The one process that may touch a rank's folder.

    Raises `StoreError` that names who has it, `FileNotFoundError` where the folder is not there (any more).
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._lock = DirLock(folder / "lock")
        except LockHeldError as error:
            raise _in_use(folder, error.holder) from None
        if self._lock.refused is not None:
            self._lock.close()
            raise _in_use(folder, "another process")

    @property
    def held(self) -> bool:
        return self._lock.held

    def release(self) -> None:
        """Give it back; idempotent."""
        self._lock.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_folders(folders: Sequence[Path]) -> list[Lock]:
    """Makes the folders of a rank and locks all of them, in order.

    Raises:
        StoreError: If one is named twice, cannot be made, or is in use.
    """
    if len({folder.parent.parent.resolve() for folder in folders}) < len(folders):
        raise StoreError(f"nvme_path names a folder twice: {', '.join(str(f.parent.parent) for f in folders)}")
    while True:
        make_folders(folders)
        locks: list[Lock] = []
        try:
            for folder in folders:
                locks.append(Lock(folder))
            return locks
        except BaseException as error:
            for lock in locks:
                lock.release()
            # A process that removed its run may have deleted the folder after it was made here: make it again.
            if not isinstance(error, FileNotFoundError):
                raise


def _in_use(folder: Path, who: str) -> StoreError:
    end = "an engine of this process has it: destroy() it" if who == this_process() else "end it"
    return StoreError(f"{folder} is in use by {who}; {end}, or choose another run name")


def holder(folder: Path) -> str | None:
    """Returns who holds the rank's folder, as it has written itself down; None where nobody does. Keeps nothing."""
    return holder_of(folder / "lock")


# -- folders ------------------------------------------------------------------------------------------


def make_folders(folders: Sequence[Path]) -> None:
    """Make the folder of a rank on each drive, mode 0700; raises `StoreError` that says what to do."""
    for folder in folders:
        try:
            _make_folder(folder)
        except OSError as error:
            raise StoreError(
                f"cannot make the swap folder {folder}: {error.strerror}; set nvme_path to a folder "
                f"on a local drive that you may write"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StoreError(f"the swap folder {folder} is not writable; set nvme_path to one that is")


def _make_folder(folder: Path) -> None:
    while True:
        new = [each for each in folder.parents if not each.exists()]
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            for each in new:  # a power cut must not lose the folders themselves
                sync_folder(each.parent)
            return
        except (FileNotFoundError, FileExistsError):
            if folder.parent.exists() and not folder.parent.is_dir():
                raise  # else another rank has just removed the empty folder of the run before


def remove_files(folder: Path, names: Sequence[str] = FILES) -> None:
    """Delete what is a store's in a rank's folder, and the folder itself unless something else is in it."""
    for path in (*(folder / name for name in names), *folder.glob("*.tmp")):
        path.unlink(missing_ok=True)
    sync_folder(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


# -- small files --------------------------------------------------------------------------------------


def read_whole(path: Path) -> bytes:
    """The bytes of a regular file; raises `OSError` for anything else, a link too, and never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_in_place(path: Path, data: bytes, offset: int = 0) -> None:
    """Write `data` at `offset` of `path`, whatever lies there, and make it durable.

    A tear is found by the checksum that the reader compares.
    """
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, memoryview(data)[done:], offset + done)
        os.fsync(descriptor)
    except OSError as error:
        raise IoError(str(path), offset, len(data), error.errno or errno.EIO, "write") from error
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)


def reserve(path: Path, nbytes: int) -> None:
    """Make room for `nbytes` bytes of `path`, so that a disk that is full later is no obstacle."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        os.fsync(descriptor)
    except OSError as error:
        raise IoError(str(path), 0, nbytes, error.errno or errno.EIO, "reserve") from error
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    write_in_place(temporary, data)
    replace_durably(temporary, path)


# -- forked children ----------------------------------------------------------------------------------


class Closable(Protocol):
    """What has open files that a forked child must not keep."""

    def close_in_child(self) -> None: ...


close_in_children: weakref.WeakSet[Closable] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(close_in_children):
        with contextlib.suppress(OSError):
            each.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


_FICLONERANGE = 0x4020940D


_RANGE = struct.Struct("=qQQQ")  # descriptor, offset and bytes of what is cloned, offset in the clone


def clone_range(source: int, start: int, nbytes: int, destination: int, offset: int) -> bool:
    """Let bytes of `destination` be those of `source`, without a copy; False where the file systems cannot.

    Both are open descriptors; offsets and `nbytes`, which is above 0, are multiples of 4096.
    """
    try:
        fcntl.ioctl(destination, _FICLONERANGE, _RANGE.pack(source, start, nbytes, offset))
    except OSError:
        return False  # another file system, or one that does not share: whoever asks copies, and meets real errors then
    return True
