"""What each rank tells the others of a step: four numbers, and which gradients it has."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from offload.engine.callbacks import GradientStats
from offload.errors import UsageError

STEP_FACTS = struct.Struct("<dqqq")
"""Sum of squares, micro-batches, steps, and checksum of the optimizer's settings."""
_SAME_BATCHES = "all ranks must train on equally many micro-batches (drop_last, or a sampler that pads)"
# Name, column of `STEP_FACTS` and advice for each number that all ranks must share at a step.
_MUST_AGREE = (
    ("micro-batches since the last boundary", 1, _SAME_BATCHES),
    ("steps so far", 2, _SAME_BATCHES),
    (
        "learning rates or other settings of the optimizer (checksums)",
        3,
        "all ranks must use the same settings: take a schedule's metric from engine.mean()",
    ),
)


def pack_step(mine: GradientStats, micro_batches: int, global_steps: int, settings: int) -> bytes:
    """Returns the message of one rank."""
    flags = b"".join(bitmap(segments) for segments in mine.present)
    return STEP_FACTS.pack(mine.sum_squares, micro_batches, global_steps, settings) + flags


def add_up_step(rows: Sequence[bytes], shards: int) -> GradientStats:
    """Returns the statistics of all ranks.

    Args:
        rows: the message of each rank, in rank order.
        shards: number of ranks of a replica, which come first.

    Raises:
        UsageError: if ranks differ in a number that all must share.
    """
    facts = [STEP_FACTS.unpack_from(row) for row in rows]
    for what, column, advice in _MUST_AGREE:
        numbers = [row[column] for row in facts]
        if len(set(numbers)) > 1:
            raise UsageError(f"the ranks differ in their {what}: {', '.join(map(str, numbers))}; {advice}")
    # In rank order on every rank, so that all take the same decision; over one replica, since all have the same.
    present = union([row[STEP_FACTS.size :] for row in rows])
    return GradientStats(sum_squares=sum(row[0] for row in facts[:shards]), present=present)


def bitmap(segments: set[int]) -> bytes:
    """Returns a set of segments as a length in bytes (u32, little-endian), followed by one bit for each segment."""
    number = sum(1 << segment for segment in segments)
    length = (number.bit_length() + 7) // 8
    return struct.pack("<I", length) + number.to_bytes(length, "little")


def union(rows: Sequence[bytes]) -> list[set[int]]:
    """Returns, for each unit, the union of the segments in all rows."""
    return [set().union(*sets) for sets in zip(*(list(_segments(row)) for row in rows), strict=True)]


def _segments(row: bytes) -> Sequence[set[int]]:
    """Returns, for each unit, the segments of a row of bitmaps."""
    found, position = [], 0
    while position < len(row):
        (length,) = struct.unpack_from("<I", row, position)
        position += 4
        number = int.from_bytes(row[position : position + length], "little")
        found.append({bit for bit in range(number.bit_length()) if number >> bit & 1})
        position += length
    return found
