"""Files that are written or replaced completely or not at all; durable writes and renames."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from offload.aio.unanswered import sync
from offload.errors import ConfigError, IoError, OffloadError
from offload.notices import folder_to_make

_MOST_OF_NAME = 255
"""Bytes of a name in a file system of Linux."""


@contextlib.contextmanager
def naming_errors(path: Path, operation: str, offset: int = 0, nbytes: int = 0) -> Iterator[None]:
    """Converts an `OSError` of the block into an `IoError` about `path`: errors of writes name no file.

    Libraries in Rust, such as tokenizers, raise exceptions of their own for the errors of files.
    """
    try:
        yield
    except OffloadError:
        raise
    except OSError as error:
        raise IoError(str(path), offset, nbytes, error.errno or errno.EIO, operation) from error
    except Exception as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise IoError(str(path), offset, nbytes, int(number[1]), operation) from error


def check_name(path: Path, option: str) -> None:
    """Raises `ConfigError` if the system takes no path as this one, such as with a name of more than 255 bytes.

    `option` is what the user calls the path, such as "--output".
    """
    try:
        # Below a folder that is missing, the system looks at no name.
        if any(len(os.fsencode(name)) > _MOST_OF_NAME for name in path.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be used: {error.strerror}; give another place") from error


def check_place(path: Path, option: str, folder: Path | None = None) -> None:
    """Checks that a file or folder can be made at `path`, before work that its error would lose. Leaves nothing.

    Args:
        option: What the user calls the path, such as "--output".
        folder: The folder in which something is made first; by default that of `path`.

    Raises:
        ConfigError: If nothing can be made there.
    """
    check_name(path, option)
    folder = Path(os.path.realpath(path)).parent if folder is None else folder
    if not folder.is_dir():
        why = f"{folder} is no folder; give another place" if folder.exists() else None
        raise ConfigError(f"{option} {path}: {why or f'there is no folder {folder_to_make(folder)}'}")
    # Only an attempt shows whether a folder can be written: access() is wrong for root, in /proc and on NFS.
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: no file can be made in {folder} ({error.strerror}); give another place"
        ) from error


def check_writable(path: Path, option: str) -> None:
    """Checks that a file can be written or replaced at `path`; see `check_place`. A device and a pipe pass."""
    check_name(path, option)
    if path.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: it is a folder; give a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: you may not write this file; give another file")
    if path.is_file() or not path.exists():
        check_place(path, option)


def atomic_write(path: Path, text: str | Iterable[str], *, durable: bool = True) -> None:
    """Replaces the file at `path` by `text`; a reader, or a kill in between, finds the old file or the new one.

    The text is written to a file beside `path`, which is then renamed. A symbolic link is kept, and the file that the
    link names is replaced. The mode of an existing file is kept, and its owner if the system permits that. A device or
    a pipe is written directly.

    Args:
        text: Written as UTF-8, with its line ends unchanged. Pieces of a long text are written as they come.
        durable: True if the file must survive a power cut after the return; costs two syncs.

    Raises:
        IoError: If the file cannot be written. The old file is then unchanged, and nothing is left beside it.
    """
    with naming_errors(path, "write"):
        _replace(path, (text,) if isinstance(text, str) else text, durable)


def _replace(path: Path, pieces: Iterable[str], durable: bool) -> None:
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(pieces)
        return
    path = Path(os.path.realpath(path))
    if path.is_symlink():  # a link that leads to itself names no file
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    # A name that nobody guesses, and that no other thread shares: in a folder that others may write, a link could wait.
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(new, "w", encoding="utf-8", newline="", opener=_open_new) as file:
            if path.exists():
                keep_mode_and_owner(path.stat(), file.fileno())
            file.writelines(pieces)
            file.flush()
            if durable:
                sync(file.fileno(), path)
        if durable:
            replace_durably(new, path)
        else:
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _open_new(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def keep_mode_and_owner(before: os.stat_result, new: int | Path) -> None:
    """Gives a new file or folder the mode of the one that it replaces, and the owner if that is permitted."""
    with contextlib.suppress(PermissionError):  # the old one is another user's; the new one is this user's
        os.chown(new, before.st_uid, before.st_gid)
    # Second, because a change of the owner clears bits of the mode.
    os.chmod(new, stat.S_IMODE(before.st_mode))


def replace_durably(new: Path, path: Path) -> None:
    """Renames `new` to `path`, durably. The bytes of `new` must be durable, and both must be in one folder."""
    os.replace(new, path)
    sync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that must not exist yet and syncs its bytes.

    The name of the file is durable only after `sync_folder` of its folder. After an error nothing is left.

    Raises:
        IoError: If the file cannot be written, or the name is taken.
    """
    with naming_errors(path, "write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            write_all(descriptor, 0, data)
            sync(descriptor, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def write_all(descriptor: int, offset: int, data: memoryview | bytes) -> None:
    """Writes `data` at byte `offset` of an open file. Raises `OSError`."""
    view = memoryview(data)
    done = 0
    # A write may end early, for example at a signal or at the 2 GiB limit of one call.
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)
