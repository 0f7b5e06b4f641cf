"""Where the elements of a parameter lie among the partitions of all ranks.

Pure: from the layouts that a store or a checkpoint describes, whatever model or number of ranks is there now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from offload.layout.flat_layout import Segment, UnitLayout


class Piece(NamedTuple):
    """Elements of a parameter that one rank holds, one behind the other."""

    rank: int
    position: int
    """The first of them in the parameter."""
    start: int
    """The first of them in the rank's partition of the unit, of WEIGHT, or of any state where the parameter trains."""
    numel: int


def pieces(
    layout: UnitLayout, world_size: int, segment: Segment, start: int = 0, stop: int | None = None
) -> Iterator[Piece]:
    """The pieces that make up elements [start, stop) of a parameter, in order."""
    stretch = range(layout.trainable_stop) if segment.trainable else range(layout.trainable_stop, layout.numel)
    share = len(stretch) // world_size
    before = 0 if segment.trainable else layout.trainable_stop // world_size  # a partition's trainable part is first
    first = segment.start + start
    last = segment.stop if stop is None else segment.start + stop
    while first < last:
        rank, within = divmod(first - stretch.start, share)
        numel = min(last - first, share - within)
        yield Piece(rank, first - segment.start, before + within, numel)
        first += numel
