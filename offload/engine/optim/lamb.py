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
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps, partition_of, segments_in
from offload.kernels import LambSegment, LambStep, Partition
from offload.kernels.lamb import BLOCK
from offload.states import State
from offload.swapper.modes import Mode


class LambUpdates:
    """The strategy of LAMB."""

    scratch_nbytes = 0

    def __init__(self, *, mode: Mode) -> None:
        self._mode = mode

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state."""
        return range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit: two passes, unless the ratios are known or one tile holds all of it."""
        return _LambSteps(update, self._mode, 1 if update.ratios or update.numel <= tile_numel else 2)


class _LambSteps:
    """One unit's steps. Of two passes the first makes norms alone, on copies of the moments."""

    in_place = False

    def __init__(self, update: UnitUpdate, mode: Mode, passes: int) -> None:
        self._update, self._mode = update, mode
        self._trust = Trust(update.ratios)
        self.passes = passes
        self.drafts: Sequence[State] = mode.moments

    def run(self, tile: TileContent, last: bool) -> None:
        """Adds the tile to the norms, and moves its weights in the `last` pass."""
        segments = segments_in(self._update, tile)
        if not segments:
            return
        assert tile.gradient is not None
        partition = partition_of(self._mode, tile.states, tile.gradient)
        if last:
            self._trust.move(partition, segments, tile.start, weighed=self.passes > 1)
        else:
            self._trust.weigh(partition, segments, tile.start)


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
