"""A file that is open twice: with O_DIRECT for aligned bytes, buffered for the rest."""

from __future__ import annotations

import contextlib
import errno
import os
from types import TracebackType
from typing import NamedTuple

from offload.errors import IoError

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW


class Descriptors:
    """Numbers of open files, closed with their last owner: a `DirectFile`, or a request in flight on it.

    Closed under a request, a number could by then be that of another file.
    """

    __slots__ = ("buffered", "direct", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.buffered = self.direct = -1  # none

    def close(self) -> None:
        """Close them now: nobody uses them, or this is a forked child, in which no request runs."""
        numbers, self.buffered, self.direct = (self.direct, self.buffered), -1, -1
        for descriptor in numbers:
            if descriptor >= 0:
                with contextlib.suppress(OSError):  # what a close could report, a sync has reported before
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class Piece(NamedTuple):
    """A stretch of one file, as the native queue takes it. `owner` keeps the descriptors open."""

    owner: Descriptors
    direct: int
    buffered: int
    offset: int
    nbytes: int


class DirectFile:
    """A file for an `IoQueue`. Requests in flight when it is closed still end as they would have.

    `create` makes a missing file, with mode 0600, and never truncates one that is there. `direct` is False where the
    file system refuses O_DIRECT (tmpfs); everything then goes through the page cache. Errors are `IoError`.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False, writable: bool = True) -> None:
        self.path = os.fspath(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | _SAFE
        self.descriptors = Descriptors(self.path)
        self.descriptors.buffered = self._open(flags | (os.O_CREAT if create else 0))
        try:
            self.descriptors.direct = self._open_again(flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._error(error, 0, "open") from error

    @property
    def direct(self) -> bool:
        """Whether aligned bytes go past the page cache."""
        return self.descriptors.direct >= 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.descriptors.buffered < 0

    def size(self) -> int:
        """Bytes of the file."""
        try:
            return os.fstat(self._buffered()).st_size
        except OSError as error:
            raise self._error(error, 0, "stat") from error

    def identity(self) -> tuple[int, int]:
        """Device and inode: two names of one file have the same."""
        found = os.fstat(self._buffered())
        return found.st_dev, found.st_ino

    def reserve(self, nbytes: int) -> None:
        """Make the first `nbytes` bytes really there: new ones read as zero. Never shrinks the file."""
        if nbytes <= 0:
            return
        try:
            os.posix_fallocate(self._buffered(), 0, nbytes)
        except OSError as error:
            raise self._error(error, nbytes, "reserve") from error

    def sync(self) -> None:
        """Make every write that has completed durable, through either descriptor: they are one file."""
        try:
            os.fdatasync(self._buffered())
        except OSError as error:
            raise self._error(error, 0, "sync") from error

    def close(self) -> None:
        """Close both descriptors, or let the last request in flight do so; idempotent."""
        self.descriptors = Descriptors(self.path)

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Where `nbytes` bytes from `offset` on lie: here, all of them."""
        own = self.descriptors
        return [Piece(own, own.direct, own.buffered, offset, nbytes)]

    def parts(self) -> list[DirectFile]:
        """The files that this one is made of."""
        return [self]

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _buffered(self) -> int:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.descriptors.buffered

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags, 0o600)
        except OSError as error:
            raise self._error(error, 0, "open") from error

    def _open_again(self, flags: int) -> int:
        """The same file, whatever its name is by now: somebody may have renamed another one to it."""
        first = self.descriptors.buffered
        try:
            return os.open(f"/proc/self/fd/{first}", flags & ~os.O_NOFOLLOW)
        except FileNotFoundError:  # no /proc
            second = os.open(self.path, flags)
        if not os.path.samestat(os.fstat(first), os.fstat(second)):
            os.close(second)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return second

    def _error(self, error: OSError, nbytes: int, operation: str) -> IoError:
        return IoError(self.path, 0, nbytes, error.errno or errno.EIO, operation)
