"""LAMB over tiles: a parameter moves by the ratio of two norms of all of it, which a tile does not know.

    a unit of one tile      moments and norms ─► weights
    a larger one            moments and norms, which are thrown away, of every tile ─► moments again ─► weights
    on several ranks        the norms are known before (see `weighing`): moments ─► weights

The sums of squares are those of blocks that begin at the same elements however the unit is cut into tiles, and are
added in order: the bits do not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import kernels
from offload.kernels import LambSegment, LambStep, Partition
from offload.kernels.lamb import BLOCK


class Trust:
    """The norms of the parameters of one unit, as far as they are known."""

    def __init__(self, ratios: Sequence[float] = ()) -> None:
        """`ratios` of all segments, where they are known before: their sums lie on other ranks too."""
        self._ratios = ratios
        self._sums: dict[int, list[torch.Tensor]] = {}

    def weigh(self, partition: Partition, segments: Sequence[tuple[int, kernels.Segment]], start: int) -> None:
        """Update the moments of a tile that begins at element `start`, and add its sums.

        Segments are (number of the parameter, what of it lies in the tile).
        """
        for number, segment in segments:
            self._sums.setdefault(number, []).extend(_moments(partition, segment, start))

    def move(
        self, partition: Partition, segments: Sequence[tuple[int, kernels.Segment]], start: int, weighed: bool
    ) -> None:
        """Do the step of a tile. `weighed` says whether all tiles of the unit were weighed before; else this is all."""
        if weighed or self._ratios:
            for _, segment in segments:
                _moments(partition, segment, start)
        else:
            self.weigh(partition, segments, start)
        steps = [LambSegment(each.start, each.stop, _step(each)) for _, each in segments]
        kernels.lamb_move(partition, steps, [self._ratio(number, each) for number, each in segments])

    def _ratio(self, number: int, segment: kernels.Segment) -> float:
        return self._ratios[number] if self._ratios else kernels.lamb_ratio(_step(segment), self._sums[number])


def _moments(partition: Partition, segment: kernels.Segment, start: int) -> list[torch.Tensor]:
    first = min(segment.stop, -(-(start + segment.start) // BLOCK) * BLOCK - start)
    cuts = [(segment.start, first), (first, segment.stop)]
    pieces = [LambSegment(begin, end, _step(segment)) for begin, end in cuts if begin < end]
    return kernels.lamb_moments(partition, pieces)


def _step(segment: kernels.Segment) -> LambStep:
    assert isinstance(segment.step, LambStep)
    return segment.step
