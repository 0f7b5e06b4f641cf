"""The source of weights: the files from which the pager reads units of tier DISK, whatever files these are.

store         swap files of a run: this rank's partition, from the slot of the newest weights
model files   the model's own files: the pages that contain the tensors of a unit
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from offload.aio import Priority
from offload.aio.protocols import Future


class UploadPiece(NamedTuple):
    """Consecutive bytes of what a read delivers, and the bytes of the unit to which they are copied."""

    start: int
    """First byte in the host buffer."""
    target: range
    """Bytes of the unit on the device."""


def pieces_of(shard_ranges: Sequence[range]) -> tuple[UploadPiece, ...]:
    """Returns the pieces of a partition, which consists of byte ranges of its unit, one after the other."""
    ends = itertools.accumulate(map(len, shard_ranges))
    return tuple(UploadPiece(end - len(target), target) for end, target in zip(ends, shard_ranges, strict=True))


class WeightSource(Protocol):
    """Files that contain the weights of units. Any thread may submit reads and wait for them."""

    @property
    def committed(self) -> bool:
        """True if a later process can resume from these files."""

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Future:
        """Submits a read of the newest weights of a unit. The weights must not change before the read has ended.

        Args:
            start: first byte of `UnitSize.shard_nbytes`.
            buffer: receives the bytes; it belongs to the caller and must live until the future is done.

        Returns:
            The request. Its `wait` raises `IoError` if the bytes cannot be read, are damaged, or are others by now.
        """
