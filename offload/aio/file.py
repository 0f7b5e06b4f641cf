"""A file that is open twice: with O_DIRECT for aligned bytes, buffered for the rest."""

from __future__ import annotations

import errno
import os
from types import TracebackType

from offload.errors import IoError

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW


class DirectFile:
    """A file for an `IoQueue`. Keep it open until every request on it is done.

    `create` makes a missing file, with mode 0600, and never truncates one that is there. `direct` is False where the
    file system refuses O_DIRECT (tmpfs); everything then goes through the page cache. Errors are `IoError`.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False, writable: bool = True) -> None:
        self.path = os.fspath(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | _SAFE
        self.buffered_descriptor = self._open(flags | (os.O_CREAT if create else 0))
        self.direct_descriptor = -1
        try:
            self.direct_descriptor = self._open(flags | getattr(os, "O_DIRECT", 0))
        except IoError as error:
            if error.errno != errno.EINVAL:
                os.close(self.buffered_descriptor)
                raise

    @property
    def direct(self) -> bool:
        """Whether aligned bytes go past the page cache."""
        return self.direct_descriptor >= 0

    def size(self) -> int:
        """Bytes of the file."""
        try:
            return os.fstat(self.buffered_descriptor).st_size
        except OSError as error:
            raise self._error(error, 0, "stat") from error

    def reserve(self, nbytes: int) -> None:
        """Make the first `nbytes` bytes really there: new ones read as zero. Never shrinks the file."""
        if nbytes <= 0:
            return
        try:
            os.posix_fallocate(self.buffered_descriptor, 0, nbytes)
        except OSError as error:
            raise self._error(error, nbytes, "reserve") from error

    def sync(self) -> None:
        """Make every write that has completed durable, through either descriptor: they are one file."""
        try:
            os.fdatasync(self.buffered_descriptor)
        except OSError as error:
            raise self._error(error, 0, "sync") from error

    def close(self) -> None:
        """Close both descriptors; idempotent."""
        for descriptor in (self.direct_descriptor, self.buffered_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct_descriptor = self.buffered_descriptor = -1

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags, 0o600)
        except OSError as error:
            raise self._error(error, 0, "open") from error

    def _error(self, error: OSError, nbytes: int, operation: str) -> IoError:
        return IoError(self.path, 0, nbytes, error.errno or errno.EIO, operation)
