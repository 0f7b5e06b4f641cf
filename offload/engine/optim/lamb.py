"""LAMB over tiles: a step needs the ratio of two norms over the entire parameter, and a tile may hold a part of it.

    a unit of one tile    moments and norms ─► weights
    a larger unit         first pass: moments and norms of every tile, moments dropped
                          second pass: moments again ─► weights
    several ranks         the norms are known before (see `lamb_norms`): moments ─► weights

Sums of squares are taken over blocks whose borders do not depend on the tiles, and are added in order. The bits
therefore do not depend on the division into tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import kernels
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps, partition_of, segments_in
from offload.kernels import LambSegment, LambStep, Partition
from offload.kernels.lamb import BLOCK
from offload.layout.modes import Mode
from offload.states import State


class LambUpdates:
    """Strategy of LAMB."""

    scratch_nbytes = 0

    def __init__(self, *, mode: Mode) -> None:
        self._mode = mode

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state, and the scales of their blocks."""
        return self._mode.padded_part(state, start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit: two passes, unless the ratios are known or one tile holds the entire unit."""
        # One tile is computed at once, so its weights can follow its norms without a second read.
        return _LambSteps(update, self._mode, 1 if update.ratios or update.numel <= tile_numel else 2)


class _LambSteps:
    """Steps of one unit. The first of two passes only computes norms, on copies of the moments."""

    in_place = False
    cuts: Sequence[range] = ()

    def __init__(self, update: UnitUpdate, mode: Mode, passes: int) -> None:
        self._update, self._mode = update, mode
        self._trust = Trust(update.ratios)
        self.passes = passes
        self.drafts: Sequence[State] = mode.optimizer_states

    def run(self, tile: TileContent, last: bool) -> None:
        """Adds the tile to the norms, unless they are complete, and in the `last` pass moves its weights."""
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
    """Norms of the parameters of one unit, as far as they are known."""

    def __init__(self, ratios: Sequence[float] = ()) -> None:
        """Stores the trust ratios, if known.

        Args:
            ratios: ratio of each segment, if the sums of other ranks were needed; empty if this rank computes them.
        """
        self._ratios = ratios
        self._sums: dict[int, list[torch.Tensor]] = {}

    def weigh(self, partition: Partition, segments: Sequence[tuple[int, kernels.Segment]], start: int) -> None:
        """Updates the moments of a tile in place, and adds its sums of squares to the norms.

        Args:
            partition: states and gradient of the tile.
            segments: for each segment its number in the update and its elements in the tile.
            start: the tile's first element in the unit.
        """
        for number, segment in segments:
            self._sums.setdefault(number, []).extend(_moments(partition, segment, start))

    def move(
        self, partition: Partition, segments: Sequence[tuple[int, kernels.Segment]], start: int, weighed: bool
    ) -> None:
        """Updates moments and weights of a tile in place.

        Args:
            partition: states and gradient of the tile.
            segments: for each segment its number in the update and its elements in the tile.
            start: the tile's first element in the unit.
            weighed: True if `weigh` has seen all tiles of the unit in an earlier pass; False if this tile is the entire
                unit.
        """
        # The norms are complete, so the sums of this pass are dropped: added again they would count twice.
        if weighed or self._ratios:
            for _, segment in segments:
                _moments(partition, segment, start)
        else:
            self.weigh(partition, segments, start)
        # The noise rounds masters; the moments are rounded already.
        steps = [LambSegment(each.start, each.stop, _step(each), each.noise) for _, each in segments]
        kernels.lamb_move(partition, steps, [self._ratio(number, each) for number, each in segments])

    def _ratio(self, number: int, segment: kernels.Segment) -> float:
        """Returns the trust ratio of a segment."""
        # The ratios of several ranks win: this rank's own sums lack the shards of the others.
        return self._ratios[number] if self._ratios else kernels.lamb_ratio(_step(segment), self._sums[number])


def _moments(partition: Partition, segment: kernels.Segment, start: int) -> list[torch.Tensor]:
    """Updates the moments of a segment; returns its sums of squares, one row for each block."""
    # Blocks are counted from the unit's first element, and tiles begin at borders of blocks. If the segment begins
    # within a block, the elements up to the next border are summed apart: its other blocks are then the same for every
    # size of tiles.
    first = min(segment.stop, -(-(start + segment.start) // BLOCK) * BLOCK - start)
    cuts = [(segment.start, first), (first, segment.stop)]
    noise = segment.noise
    states = [
        LambSegment(begin, end, _step(segment), noise and noise.after(begin - segment.start))
        for begin, end in cuts
        if begin < end
    ]
    return kernels.lamb_moments(partition, states)


def _step(segment: kernels.Segment) -> LambStep:
    """Returns the step of a segment, which is one of LAMB."""
    assert isinstance(segment.step, LambStep)
    return segment.step
