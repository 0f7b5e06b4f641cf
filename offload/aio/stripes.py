"""One logical file striped over several drives."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from offload.aio.file import DirectFile, Piece
from offload.errors import ConfigError
from offload.sizes import MIB, PAGE

_MOST_STRIPES = 32
"""Most stripes of a row for up to 8 drives: two drives get bytes within 3 % of any ratio up to 31 to 1."""


class Layout(NamedTuple):
    """A mapping from logical bytes to files. Pure: no file is accessed.

    A row consists of `weights[i]` stripes on each file i, one file after the other. Rows repeat.
    """

    weights: tuple[int, ...]
    stripe_bytes: int

    @property
    def shares(self) -> list[int]:
        """Bytes of a row on each file."""
        return [weight * self.stripe_bytes for weight in self.weights]

    def places(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yields (file index, offset in the file, bytes) of each range that stores [offset, offset + nbytes), in order.

        Args:
            offset: first logical byte.
            nbytes: number of bytes.
        """
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
        row_nbytes, start, found = sum(self.shares), 0, []
        for share, nbytes in zip(self.shares, file_nbytes, strict=True):
            rows, rest = divmod(nbytes, share)
            # The logical position at which this file ends; the earliest such position is the end of the logical file.
            found.append(rows * row_nbytes + start + rest)
            start += share
        return min(found)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns small whole numbers in nearly the proportion of `weights`. Idempotent: its result maps to itself.

    Args:
        weights: bandwidths or other positive numbers, one for each path.

    Raises:
        ConfigError: a weight is not a finite number above 0, or there is none.
    """
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
        """Returns the time of the drive that ends last, as a multiple of the time with exact weights."""
        return max(share / sum(whole) * total / weight for share, weight in zip(whole, weights, strict=True))

    # Rows of every length up to the bound. Rounding can exceed the bound, as each file gets at least one stripe.
    tried = [whole for whole in map(rounded, range(len(weights), most + 1)) if sum(whole) <= most]
    best = min(map(slowest, tried))
    # The smallest row within 1 % of the best: short rows spread even short requests over all drives.
    return next(whole for whole in tried if slowest(whole) <= best + 0.01)


class StripedFile:
    """One logical file striped over a file on each of several drives, for an `IoQueue`.

    The parts of a request go to their drives at once. Some of the files may support O_DIRECT and others not. Closing
    and errors are as for `DirectFile`; an `IoError` names the file of the drive, for a wrong checksum all files.

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
        given = [1] * len(paths) if weights is None else list(weights)
        if len(given) != len(paths):
            raise ConfigError(f"expected one weight for each of {len(paths)} paths, got {len(given)}")
        if stripe_bytes < PAGE or stripe_bytes % PAGE:
            raise ConfigError(f"expected stripe_bytes to be a multiple of {PAGE}, got {stripe_bytes}")
        if len({os.path.realpath(path) for path in paths}) < len(paths):
            raise _same(paths)
        self.layout = Layout(whole_weights(given), stripe_bytes)
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

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Returns the file ranges that store `nbytes` bytes from `offset` on, in order.

        Args:
            offset: first logical byte.
            nbytes: number of bytes.
        """
        # Read once: another thread may close the file, which replaces `descriptors`, while the ranges are computed.
        owners = [file.descriptors for file in self._files]
        return [
            Piece(owners[file], owners[file].direct, owners[file].buffered, start, count)
            for file, start, count in self.layout.places(offset, nbytes)
        ]

    def parts(self) -> list[DirectFile]:
        """Returns the underlying files, in the order of the paths."""
        return list(self._files)

    def __enter__(self) -> StripedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _same(paths: Sequence[str | os.PathLike[str]]) -> ConfigError:
    return ConfigError(f"expected different files, got {[os.fspath(path) for path in paths]}")
