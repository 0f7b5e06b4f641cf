"""`DirectFile`, a file that is opened twice: with O_DIRECT for aligned bytes, and buffered for all others."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from offload.aio.unanswered import aloud
from offload.errors import ConfigError, IoError
from offload.sizes import MIB, PAGE

# -- file ----------------------------------------------------------------------------------------------


_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW


def open_new(path: str, flags: int, mode: int) -> int:
    """Opens a file that must not exist yet: an existing file is somebody else's. An `opener` for `DirectFile`."""
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
        """Closes both descriptors now. No request may use them; a forked child has no requests."""
        # Cleared before the calls: a second close must not close numbers that the kernel has given to another file.
        numbers, self.buffered, self.direct = (self.direct, self.buffered), -1, -1
        for descriptor in numbers:
            if descriptor >= 0:
                with contextlib.suppress(OSError):  # `sync` has reported any write error already
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class FilePiece(NamedTuple):
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
        opener: opens the file, like the `opener` of Python's `open`, but also receives the mode. It may refuse further
            files.

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
        status = self._stat()
        return status.st_dev, status.st_ino

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

    def pieces(self, offset: int, nbytes: int) -> list[FilePiece]:
        """Returns the file ranges that store `nbytes` bytes from `offset` on: for a single file, one range.

        Args:
            offset: first byte in the file.
            nbytes: number of bytes.
        """
        own = self.descriptors
        return [FilePiece(own, own.direct, own.buffered, offset, nbytes)]

    def parts(self) -> list[DirectFile]:
        """Returns the files that store the bytes: this file."""
        return [self]

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
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
        io_error = IoError(self.path, 0, nbytes, error.errno or errno.EIO, operation)
        io_error.strerror = error.strerror  # an opener's text may be more specific than the system's
        return io_error


# -- stripes -------------------------------------------------------------------------------------------
#
# One logical file striped over several drives.


_MOST_STRIPES = 32
"""Most stripes of a row for up to 8 drives. The bytes of two drives are within 3 % of any ratio up to 31 to 1."""


class Layout(NamedTuple):
    """A mapping from logical bytes to files. Pure: no file is accessed.

    A row consists of `weights[i]` stripes on each file i, one file after the other. Rows repeat.
    """

    weights: tuple[int, ...]
    stripe_bytes: int

    @property
    def shares(self) -> list[int]:
        return [weight * self.stripe_bytes for weight in self.weights]

    def places(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yields (file index, offset in the file, bytes) of each range of [offset, offset + nbytes), in order."""
        if len(self.weights) == 1:
            # One drive: no row structure, so a request is never cut.
            yield 0, offset, nbytes
            return
        shares = self.shares
        starts = [0, *itertools.accumulate(shares)]
        end = offset + nbytes
        while offset < end:
            row, within = divmod(offset, starts[-1])
            file = next(i for i, share in enumerate(shares) if within < starts[i] + share)
            into = within - starts[file]
            count = min(end - offset, shares[file] - into)
            yield file, row * shares[file] + into, count
            offset += count

    def file_nbytes(self, nbytes: int) -> list[int]:
        """Returns the bytes of each file if the logical file contains `nbytes`."""
        rows, rest = divmod(nbytes, sum(self.shares))
        sizes = []
        for share in self.shares:
            last = min(rest, share)
            sizes.append(rows * share + last)
            rest -= last
        return sizes

    def nbytes(self, file_nbytes: Sequence[int]) -> int:
        """Returns the bytes of the logical file before its first missing byte, given the bytes of each file."""
        row_nbytes, start, ends = sum(self.shares), 0, []
        for share, nbytes in zip(self.shares, file_nbytes, strict=True):
            rows, rest = divmod(nbytes, share)
            # The logical position at which this file ends; the earliest such position is the end of the logical file.
            ends.append(rows * row_nbytes + start + rest)
            start += share
        return min(ends)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns small whole numbers in nearly the proportion of `weights`. Idempotent: its result maps to itself."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"expected weights above 0, one for each path, got {list(weights)}")
    most = max(_MOST_STRIPES, 4 * len(weights))
    if all(float(weight).is_integer() for weight in weights):
        divisor = math.gcd(*map(int, weights))
        whole = tuple(int(weight) // divisor for weight in weights)
        if sum(whole) <= most:
            return whole  # unchanged, so that weights read back from a store give the same layout
    total = sum(weights)

    def rounded(stripes: int) -> tuple[int, ...]:
        return tuple(max(1, round(weight / total * stripes)) for weight in weights)

    def slowest(whole: tuple[int, ...]) -> float:
        """Returns the time of the slowest drive, as a multiple of the time with exact weights."""
        return max(share / sum(whole) * total / weight for share, weight in zip(whole, weights, strict=True))

    # Rows of every length up to the bound. Rounding can exceed the bound, as each file gets at least one stripe.
    tried = [whole for whole in map(rounded, range(len(weights), most + 1)) if sum(whole) <= most]
    best = min(map(slowest, tried))
    # The smallest row within 1 % of the best: short rows spread even short requests over all drives.
    return next(whole for whole in tried if slowest(whole) <= best + 0.01)


class StripedFile:
    """One logical file striped over a file on each of several drives, for an `IoQueue`.

    The parts of a request go to their drives at once. Some of the files may support O_DIRECT and others not. Closing
    and errors are as for `DirectFile`. An `IoError` names the file of the drive; for a wrong checksum, all files.

    The layout is not recorded on the drives. To open the file again, pass the same paths in the same order with
    `layout.weights` and `layout.stripe_bytes`.

    Args:
        paths: one file for each drive.
        weights: one number for each path, proportional to the drive's bandwidth (`offload.aio.bandwidths` measures it);
            equal by default. Rounded to small whole numbers, `layout.weights`.
        stripe_bytes: bytes of a stripe, a multiple of 4096.
        create: create missing files.
        writable: open for reading and writing; otherwise for reading only.
        opener: opens each file; see `DirectFile`.

    Raises:
        ConfigError: bad weights or stripe size, no path, or two paths of one file.
        IoError: a file cannot be opened.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        weights: Sequence[float] | None = None,
        *,
        stripe_bytes: int = 2 * MIB,
        create: bool = False,
        writable: bool = True,
        opener: Callable[[str, int, int], int] = os.open,
    ) -> None:
        if not paths:
            raise ConfigError("expected at least one path")
        file_weights = [1] * len(paths) if weights is None else list(weights)
        if len(file_weights) != len(paths):
            raise ConfigError(f"expected one weight for each of {len(paths)} paths, got {len(file_weights)}")
        if stripe_bytes < PAGE or stripe_bytes % PAGE:
            raise ConfigError(f"expected stripe_bytes to be a multiple of {PAGE}, got {stripe_bytes}")
        if len({os.path.realpath(path) for path in paths}) < len(paths):
            raise _same(paths)
        self.layout = Layout(whole_weights(file_weights), stripe_bytes)
        self._files: list[DirectFile] = []
        try:
            for path in paths:
                self._files.append(DirectFile(path, create=create, writable=writable, opener=opener))
            # Hard links and bind mounts give one file several real paths; only the inode shows them.
            if len({file.identity() for file in self._files}) < len(paths):
                raise _same(paths)
        # The files that were opened before the failure must not stay open.
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Paths of all files, for messages."""
        return " + ".join(file.path for file in self._files)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return any(file.closed for file in self._files)

    def size(self) -> int:
        """Returns the bytes of the logical file before its first missing byte."""
        return self.layout.nbytes([file.size() for file in self._files])

    def reserve(self, nbytes: int) -> None:
        """Allocates the first `nbytes` logical bytes on every drive. New bytes read as zero. Never shrinks a file.

        Args:
            nbytes: bytes from the start of the logical file.
        """
        for file, share in zip(self._files, self.layout.file_nbytes(nbytes), strict=True):
            file.reserve(share)

    def sync(self) -> None:
        """Makes every completed write durable, on every drive."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Closes all files, or leaves that to the last request in flight. Idempotent."""
        for file in self._files:
            file.close()

    def pieces(self, offset: int, nbytes: int) -> list[FilePiece]:
        """Returns the file ranges that store `nbytes` bytes from `offset` on, in order.

        Args:
            offset: first logical byte.
            nbytes: number of bytes.
        """
        # Read once: another thread may close the file, which replaces `descriptors`, while the ranges are computed.
        owners = [file.descriptors for file in self._files]
        return [
            FilePiece(owners[file], owners[file].direct, owners[file].buffered, start, count)
            for file, start, count in self.layout.places(offset, nbytes)
        ]

    def parts(self) -> list[DirectFile]:
        """Returns the underlying files, in the order of the paths."""
        return list(self._files)

    def __enter__(self) -> StripedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _same(paths: Sequence[str | os.PathLike[str]]) -> ConfigError:
    return ConfigError(f"expected different files, got {[os.fspath(path) for path in paths]}")
