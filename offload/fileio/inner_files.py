"""Files and folders below one that a user names: opened from there on, one name at a time.

Whoever may write a folder on the way could put a link, a pipe, or a file of somebody else in the place of one of ours.
So what lies below the folder that a user has named is reached from its descriptor: no link is followed, a file must
be a regular one, its size is known before it is read, and nothing waits for another process.

`ours` is for files that this process writes, and whose contents it trusts. Folders and files must then be this user's,
or root's, and others must not be able to write them. Files that are only read may be anybody's. Their contents are
checked as an enemy's, and a file must belong to the owner of its folder, or to root, since another user could have
linked it there.

Models are read through links, as in the cache of Hugging Face: `open_regular` and `read_bounded` look at
the file alone.

The first names of a path are the user's, and may be links: `depth` is the number of names at its end that are not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from offload.errors import StoreError
from offload.sizes import MIB, format_size

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_SMALL, _HOLES = 64 * MIB, 64
"""A file of more than `_SMALL` bytes must take at least a fraction of 1 / `_HOLES` of its bytes on its drive."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SAMPLES = 4
_SAMPLE_NBYTES = 1 << 16


def inner_name(name: str) -> str:
    """Returns `name` if it can name one file or folder; raises `ValueError` for a path and control characters."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(os.fsencode(name)) > 255:
        raise ValueError(f"expected the name of a file, without a slash and control characters, got {name[:80]!r}")
    return name


@contextlib.contextmanager
def inner_folder(path: Path, depth: int, ours: bool = False) -> Iterator[int]:
    """Yields the descriptor of a folder.

    Links among the last `depth` names, which the user has not given, are not followed.

    With `ours` each of these folders must be this user's alone; see the module's text.

    Raises:
        OSError: If there is no such folder, or a link in the place of one.
        StoreError: If a folder is not this user's.
    """
    path = Path(os.path.abspath(path))
    names = path.parts[1:]
    outer = Path(path.anchor, *names[: len(names) - depth])
    here = os.open(outer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[len(names) - depth :]:
            outer /= name
            with _naming(outer):
                inner = _open_folder(name, here)
                os.close(here)
                here = inner
            if ours:
                check_ours(outer, here)
        yield here
    finally:
        os.close(here)


def open_inner(path: Path, depth: int, flags: int = os.O_RDONLY, mode: int = 0o600, *, ours: bool = False) -> int:
    """Returns the descriptor of a regular file, reached without links; see the module's text.

    `flags` are those of `os.open`: with O_CREAT a missing file is made, with `mode`.

    Raises:
        OSError: If there is no such file, or something else in the place of one.
        StoreError: If a file or a folder is not this user's.
    """
    with inner_folder(path.parent, depth - 1, ours) as folder, _naming(path):
        file = os.open(path.name, flags | _SAFE, mode, dir_fd=folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "the path is not a regular file", str(path))
            owner = os.fstat(folder).st_uid
            if ours:
                check_ours(path, file, owner)
            elif owner not in (status.st_uid, 0) and status.st_uid:
                raise OSError(
                    errno.EPERM, f"the file is of {owner_name(status.st_uid)}, in a folder of {owner_name(owner)}"
                )
            # With O_NONBLOCK, io_uring would give up a read of a regular file that has to wait for the drive.
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_NONBLOCK)
            return file
        except BaseException:
            os.close(file)
            raise


def inner_opener(depth: int, *, ours: bool = False) -> Callable[[str, int, int], int]:
    """Returns `open_inner` in the form that `DirectFile` takes."""
    return lambda path, flags, mode: open_inner(Path(path), depth, flags, mode, ours=ours)


def read_inner(path: Path, depth: int, most: int, *, whole: bool = True) -> bytes:
    """Returns the bytes of a regular file that may be anybody's, reached without links.

    More than `most` bytes are an error, or, without `whole`, left out.

    Raises:
        OSError: If there is no such file, or it is too large, or something else is in its place.
    """
    descriptor = open_inner(path, depth)
    try:
        size = os.fstat(descriptor).st_size
        if whole and size > most:
            raise OSError(errno.EFBIG, f"the file has {size} bytes, expected at most {format_size(most)}", str(path))
        check_holes(descriptor, path)
        # At most the bytes of the size: another process may write to the file meanwhile.
        data = bytearray()
        while (left := min(size, most) - len(data)) > 0 and (part := os.read(descriptor, left)):
            data += part
        return bytes(data)
    finally:
        os.close(descriptor)


def check_holes(descriptor: int, path: Path) -> None:
    """Raises `OSError` for a file that is almost all holes, which would be read for hours."""
    status = os.fstat(descriptor)
    if status.st_size > max(_SMALL, status.st_blocks * 512 * _HOLES):
        stored = format_size(status.st_blocks * 512)
        raise OSError(
            errno.EFBIG, f"the file has {format_size(status.st_size)}, all but {stored} of which are holes", str(path)
        )


def inner_status(path: Path, depth: int) -> os.stat_result | None:
    """Returns the status of a file, a folder or a link, reached without links; None if there is nothing.

    Raises:
        OSError: If a folder on the way is none, or cannot be read.
    """
    try:
        with inner_folder(path.parent, depth - 1) as folder, _naming(path):
            return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def real_path(path: Path) -> Path:
    """Returns a user's path without links. A path with links in a circle is returned as it is.

    `Path.resolve` would raise `RuntimeError` for such a path, which is no `OSError`.
    """
    return Path(os.path.realpath(path))


# -- files that are read through links ---------------------------------------------------------------


def sampled_crc32(path: Path, crc: int = 0) -> int:
    """Returns the CRC-32 `crc`, continued by samples of a regular file: its first bytes, its last, and some between.

    They distinguish large files of models in little time. Damage elsewhere does not change the result.
    """
    with open_regular(path) as file:
        most = max(os.fstat(file.fileno()).st_size - _SAMPLE_NBYTES, 0)
        for sample in range(_SAMPLES):
            file.seek(sample * most // (_SAMPLES - 1))
            crc = zlib.crc32(file.read(_SAMPLE_NBYTES), crc)
    return crc


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading. The open of a pipe would wait for a writer.

    Raises:
        OSError: If there is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_data(path: Path) -> BinaryIO:
    """Opens data of the user for reading: a file, or a pipe, through links.

    Raises:
        OSError: If it cannot be opened, or is a file of holes, whose first line could take all memory.
    """
    file = path.open("rb")
    try:
        check_holes(file.fileno(), path)
        return file
    except BaseException:
        file.close()
        raise


def read_bounded(path: Path, most_nbytes: int) -> bytes:
    """Returns the bytes of a regular file; a sparse file may claim terabytes.

    Raises:
        OSError: If there is no regular file, or it cannot be read.
        ValueError: If the file is larger than `most_nbytes`.
    """
    with open_regular(path) as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise ValueError(f"it has more than {most_nbytes} bytes")
    return data


# -- owners -------------------------------------------------------------------------------------------


def check_ours(path: Path, descriptor: int, owner: int = 0) -> None:
    """Checks that a file or folder is this user's, or root's, and removes other users' right to write it.

    `owner` is the owner of a file's folder, which was checked before.

    Raises:
        StoreError: If it is another user's, or others may write it and this user cannot change that.
    """
    status = os.fstat(descriptor)
    if status.st_uid not in (os.geteuid(), 0, owner) and status.st_uid != _owner_of_new(descriptor):
        raise StoreError(
            f"{path} is of {owner_name(status.st_uid)}, who could change it at any time; expected one of "
            f"{owner_name(os.geteuid())}: choose another name or another folder, or, if what it contains is right, "
            f"change its owner with `sudo chown -R {os.geteuid()} {path}`"
        )
    if status.st_mode & _OTHERS:
        # An umask, or the group of a Kubernetes volume, may have given others the right to write. The owner removes it.
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_OTHERS)
        if os.fstat(descriptor).st_mode & _OTHERS:
            raise StoreError(
                f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):o}), and this user cannot "
                f"change that: run `chmod go-w {path}` as its owner, or choose another folder"
            )


def foreign_owner(folder: Path) -> str | None:
    """Returns the name of the other user to whom a folder belongs, or a link in its place; None if it is this user's.

    For a folder of root, and for a missing folder, it returns None too.
    """
    try:
        owners = {os.lstat(folder).st_uid, os.stat(folder).st_uid} - {os.geteuid(), 0}
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if owners else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    if here is None:
        return None
    try:
        return next((owner_name(owner) for owner in sorted(owners) if owner != _owner_of_new(here)), None)
    finally:
        os.close(here)


def _owner_of_new(folder: int) -> int | None:
    """Returns the user to whom a new file in a folder belongs; None if there cannot be one.

    A network file system may give all files to one user, whoever makes them, as NFS does with root_squash.
    """
    name = f".owner-{os.urandom(8).hex()}"
    with contextlib.suppress(OSError):
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            os.unlink(name, dir_fd=folder)
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
    return None


def owner_name(uid: int) -> str:
    """Returns a user's name and number for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _open_folder(name: str, above: int) -> int:
    """Returns the descriptor of a folder in an open one; raises `OSError`, ELOOP for a link."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=above)
    except NotADirectoryError:
        # The system raises the same error for a file. A link must not pass for a missing folder.
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives errors of the system the whole path; they contain only its last name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        if error.errno in (errno.ELOOP, errno.ENXIO):
            error.strerror = "it is a symbolic link" if error.errno == errno.ELOOP else "the path is not a regular file"
        raise
