"""`DirectFile`, a file that is opened twice: with O_DIRECT for aligned bytes, and buffered for all others."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from offload.aio.unanswered import aloud
from offload.errors import IoError

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW


def open_new(path: str, flags: int, mode: int) -> int:
    """Opens a file that must not exist yet, as an `opener` of `DirectFile`: a name that is taken is another's file."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)


class Descriptors:
    """The descriptors of an open file, closed when no `DirectFile` and no request in flight refers to them any more.

    If a descriptor were closed under a request, the kernel could reuse its number for another file.
    """

    __slots__ = ("buffered", "direct", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.buffered = self.direct = -1  # none

    def close(self) -> None:
        """Closes both descriptors now. No request may use them, which also holds in a forked child."""
        # Cleared before the calls: a second close must not close numbers that the kernel has given to another file.
        numbers, self.buffered, self.direct = (self.direct, self.buffered), -1, -1
        for descriptor in numbers:
            if descriptor >= 0:
                with contextlib.suppress(OSError):  # `sync` has reported any write error already
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class Piece(NamedTuple):
    """A range of one file in the form that the native queue takes. `owner` keeps the descriptors open."""

    owner: Descriptors
    direct: int
    buffered: int
    offset: int
    nbytes: int


class DirectFile:
    """A file for an `IoQueue`. Requests that are in flight when the file is closed complete normally.

    `direct` is False if the file system refuses O_DIRECT (tmpfs before Linux 6.6); all bytes then go through the page
    cache.

    Args:
        path: path of the file. A symbolic link in the last component is refused.
        create: create the file, with mode 0600, if it is missing. An existing file is never truncated.
        writable: open for reading and writing; otherwise for reading only.
        opener: opens the file, as that of Python's `open`, and receives its mode too. It may refuse more files.

    Raises:
        IoError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        writable: bool = True,
        opener: Callable[[str, int, int], int] = os.open,
    ) -> None:
        self.path = os.fspath(path)
        self._opener = opener
        flags = (os.O_RDWR if writable else os.O_RDONLY) | _SAFE
        self.descriptors = Descriptors(self.path)
        self.descriptors.buffered = self._open(flags | (os.O_CREAT if create else 0))
        try:
            self.descriptors.direct = self._open_again(flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            # EINVAL: the file system has no O_DIRECT, so the buffered descriptor serves every request.
            if error.errno != errno.EINVAL:
                raise self._error(error, 0, "open") from error

    @property
    def direct(self) -> bool:
        """True if aligned bytes bypass the page cache."""
        return self.descriptors.direct >= 0

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self.descriptors.buffered < 0

    def size(self) -> int:
        """Returns the size of the file in bytes.

        Raises:
            IoError: the file is closed, or fstat fails.
        """
        return self._stat().st_size

    def identity(self) -> tuple[int, int]:
        """Returns (device, inode), which are equal for two names of one file.

        Raises:
            IoError: the file is closed, or fstat fails.
        """
        found = self._stat()
        return found.st_dev, found.st_ino

    def reserve(self, nbytes: int) -> None:
        """Allocates the first `nbytes` bytes on the drive. New bytes read as zero. Never shrinks the file.

        Args:
            nbytes: bytes from the start of the file; 0 or less does nothing.

        Raises:
            IoError: the drive is full, or the file system refuses.
        """
        if nbytes <= 0:
            return
        try:
            # Blocks are allocated now, so that a later write cannot fail with ENOSPC in the middle of a step.
            with aloud(lambda: f"reservation of {nbytes} bytes for {self.path}"):
                os.posix_fallocate(self._buffered(), 0, nbytes)
        except OSError as error:
            raise self._error(error, nbytes, "reserve") from error

    def sync(self) -> None:
        """Makes every completed write durable. Covers both descriptors, since they refer to one file.

        Raises:
            IoError: fdatasync fails.
        """
        try:
            os.fdatasync(self._buffered())
        except OSError as error:
            raise self._error(error, 0, "sync") from error

    def close(self) -> None:
        """Closes both descriptors, or leaves that to the last request in flight. Idempotent."""
        # Only the reference is dropped. Each request in flight holds the old object, whose finalizer closes the
        # descriptors.
        self.descriptors = Descriptors(self.path)

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Returns the file ranges that store `nbytes` bytes from `offset` on: for a single file, one range.

        Args:
            offset: first byte in the file.
            nbytes: number of bytes.
        """
        own = self.descriptors
        return [Piece(own, own.direct, own.buffered, offset, nbytes)]

    def parts(self) -> list[DirectFile]:
        """Returns the files that store the bytes: this file."""
        return [self]

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stat(self) -> os.stat_result:
        try:
            return os.fstat(self._buffered())
        except OSError as error:
            raise self._error(error, 0, "stat") from error

    def _buffered(self) -> int:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.descriptors.buffered

    def _open(self, flags: int) -> int:
        try:
            return self._opener(self.path, flags, 0o600)
        except OSError as error:
            raise self._error(error, 0, "open") from error

    def _open_again(self, flags: int) -> int:
        """Opens the file of the buffered descriptor a second time, by descriptor rather than by name.

        The path may name another file by now, after a rename.
        """
        first = self.descriptors.buffered
        try:
            return os.open(f"/proc/self/fd/{first}", flags & ~os.O_NOFOLLOW)
        except FileNotFoundError:  # no /proc: open by name, then check that both descriptors refer to one inode
            second = self._opener(self.path, flags, 0o600)
        if not os.path.samestat(os.fstat(first), os.fstat(second)):
            os.close(second)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return second

    def _error(self, error: OSError, nbytes: int, operation: str) -> IoError:
        found = IoError(self.path, 0, nbytes, error.errno or errno.EIO, operation)
        found.strerror = error.strerror  # an opener may know more than the system's words
        return found
