"""One logical file over several drives."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from offload.aio.file import DirectFile, Piece
from offload.errors import ConfigError
from offload.sizes import MIB, PAGE

_MOST_STRIPES = 32
"""Of a row: enough for two drives to share within 3 % of any ratio."""


class Layout(NamedTuple):
    """Where bytes lie. A row is `weights[i]` stripes on each file i, one file after the other; rows repeat.

    A pure map: no file is touched.
    """

    weights: tuple[int, ...]
    stripe_bytes: int

    @property
    def shares(self) -> list[int]:
        """Bytes of a row on each file."""
        return [weight * self.stripe_bytes for weight in self.weights]

    def places(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(file, offset in it, bytes) of each stretch of the logical bytes [offset, offset + nbytes), in order."""
        if len(self.weights) == 1:
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
        """Bytes of each file where the logical one has `nbytes`."""
        rows, rest = divmod(nbytes, sum(self.shares))
        sizes = []
        for share in self.shares:
            last = min(rest, share)
            sizes.append(rows * share + last)
            rest -= last
        return sizes

    def nbytes(self, file_nbytes: Sequence[int]) -> int:
        """Bytes of the logical file, up to the first that is missing, where the files have `file_nbytes`."""
        row_nbytes, start, found = sum(self.shares), 0, []
        for share, nbytes in zip(self.shares, file_nbytes, strict=True):
            rows, rest = divmod(nbytes, share)
            found.append(rows * row_nbytes + start + rest)
            start += share
        return min(found)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in nearly the proportion of `weights`. Given again they are the same."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"expected weights above 0, one for each path, got {list(weights)}")
    most = max(_MOST_STRIPES, 4 * len(weights))
    if all(float(weight).is_integer() for weight in weights):
        divisor = math.gcd(*map(int, weights))
        whole = tuple(int(weight) // divisor for weight in weights)
        if sum(whole) <= most:
            return whole
    total = sum(weights)

    def rounded(stripes: int) -> tuple[int, ...]:
        return tuple(max(1, round(weight / total * stripes)) for weight in weights)

    def slowest(whole: tuple[int, ...]) -> float:
        """Time of the drive that ends last, as a multiple of that with exact weights."""
        return max(share / sum(whole) * total / weight for share, weight in zip(whole, weights, strict=True))

    tried = [whole for whole in map(rounded, range(len(weights), most + 1)) if sum(whole) <= most]
    best = min(map(slowest, tried))
    return next(whole for whole in tried if slowest(whole) <= best + 0.01)


class StripedFile:
    """One logical file over a file on each of several drives, for an `IoQueue`.

    `weights` say how the bytes are shared: one number for each path, proportional to what its drive moves in a second
    (`offload.aio.bandwidths` measures it); equal by default. They become small whole numbers, `layout.weights`, which
    together with `layout.stripe_bytes` and the order of the paths must be given again to open the file again: nothing
    else records them. A request goes to all drives at once; each file may or may not have O_DIRECT. Closing and errors
    as for `DirectFile`; an `IoError` names the file of the drive.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        weights: Sequence[float] | None = None,
        *,
        stripe_bytes: int = 2 * MIB,
        create: bool = False,
        writable: bool = True,
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
                self._files.append(DirectFile(path, create=create, writable=writable))
            if len({file.identity() for file in self._files}) < len(paths):
                raise _same(paths)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """The paths of all files, for messages."""
        return " + ".join(file.path for file in self._files)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return any(file.closed for file in self._files)

    def size(self) -> int:
        """Bytes of the logical file, up to the first that is missing."""
        return self.layout.nbytes([file.size() for file in self._files])

    def reserve(self, nbytes: int) -> None:
        """Make the first `nbytes` bytes really there, on every drive: new ones read as zero. Never shrinks a file."""
        for file, share in zip(self._files, self.layout.file_nbytes(nbytes), strict=True):
            file.reserve(share)

    def sync(self) -> None:
        """Make every write that has completed durable, on every drive."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close all files, or let the last request in flight do so; idempotent."""
        for file in self._files:
            file.close()

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Where `nbytes` bytes from `offset` on lie, in order."""
        owners = [file.descriptors for file in self._files]
        return [
            Piece(owners[file], owners[file].direct, owners[file].buffered, start, count)
            for file, start, count in self.layout.places(offset, nbytes)
        ]

    def parts(self) -> list[DirectFile]:
        """The files that this one is made of, in the order of the paths."""
        return list(self._files)

    def __enter__(self) -> StripedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _same(paths: Sequence[str | os.PathLike[str]]) -> ConfigError:
    return ConfigError(f"expected different files, got {[os.fspath(path) for path in paths]}")
