"""Interface between the update worker and the arithmetic of an update.

    worker      tiles, reads, copies, writes, publication of weights, commits
    strategy    number of passes over the tiles, content of a tile for each state, arithmetic on a tile

Each way to step has one strategy: `fused` (one kernel, in one pass), `lamb` (norms first), `matrices` (Muon and SinkGD)
and `torch_updates` (an optimizer of torch). Values that a user sets are written by `EditSteps`, under every strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload import kernels
from offload.engine.callbacks import Edit
from offload.engine.optim.unit_updates import UnitUpdate
from offload.layout import optimizer_states
from offload.layout.modes import Mode
from offload.layout.optimizer_states import put_weight, split
from offload.states import State


@dataclass(frozen=True, kw_only=True, slots=True)
class TileContent:
    """Elements [start, stop) of the trainable shard of a unit, in memory on which arithmetic can work.

    The memory belongs to the worker, and is valid until `UnitSteps.run` returns.
    """

    start: int
    stop: int
    states: Mapping[State, torch.Tensor]
    """Each (n,) in the mode's dtype; n is stop - start, unless `UpdateStrategy.part` says otherwise."""
    gradient: torch.Tensor | None
    """(stop - start,); None if the update has edits."""


class UnitSteps(Protocol):
    """One unit's update in flight. The update worker alone calls it, tile after tile, in order."""

    @property
    def passes(self) -> int:
        """Number of times that all tiles of the unit are read and run. Only results of the last pass are kept."""

    @property
    def in_place(self) -> bool:
        """True if states and gradient are updated in their own memory on the device, without a copy to the host."""

    @property
    def cuts(self) -> Sequence[range]:
        """Elements of each tile, in order; empty for tiles of the worker's own size."""

    @property
    def drafts(self) -> Sequence[State]:
        """States that a pass before the last one changes.

        The worker copies them for such a pass, so that the next pass reads the originals.
        """

    def run(self, tile: TileContent, last: bool) -> None:
        """Updates the elements of a tile in place, and returns when the arithmetic is done.

        Args:
            tile: the elements; the memory is the worker's.
            last: True in the last pass, whose results are kept.
        """


class UpdateStrategy(Protocol):
    """A way to update units, one object for all units of an engine."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that the strategy takes from the host arena's class of tiles."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the elements of `state` that a tile with the elements [start, stop) of a unit contains.

        Args:
            unit: index of the unit.
            state: the state.
            start: first element of the tile, in the trainable shard.
            stop: end of the tile.
        """

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit whose update begins.

        Args:
            update: the update, which contains segments.
            tile_numel: largest number of elements of a tile.
        """


class EditSteps:
    """Writes of new values from the user in place of an optimizer's step: one pass, no gradient."""

    passes = 1
    in_place = False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, edits: Sequence[Edit], mode: Mode) -> None:
        self._edits, self._mode = edits, mode

    def run(self, tile: TileContent, last: bool) -> None:
        """Copies the values that concern the tile. Edits apply in their order, so later ones win."""
        for edit in self._edits:
            start, stop = max(edit.start, tile.start), min(edit.stop, tile.stop)
            if start < stop:
                self._set(tile, start, stop, edit.state, edit.values[start - edit.start : stop - edit.start])

    def _set(self, tile: TileContent, start: int, stop: int, state: State, values: torch.Tensor) -> None:
        """Writes the values of an edit to elements [start, stop) of a state; see `Edit.values`.

        Args:
            tile: the memory of the states.
            start: first element, in the trainable shard and inside of the tile.
            stop: end of the elements.
            state: the state to set; WEIGHT sets the master too.
            values: (stop - start,), in fp32 or the state's dtype.
        """
        part = slice(start - tile.start, stop - tile.start)
        if state is not State.WEIGHT:
            optimizer_states.write(self._mode, tile.states, state, part.start, values)
            return
        states = {state: tile.states[state][part] for state in self._mode.weights}
        # fp32 values set the master exactly. Values in the weight's dtype keep the master of elements that do not
        # change.
        if values.dtype is torch.float32:
            split(values, states)
        else:
            put_weight(values, states)


# -- for strategies that run kernels of ours ----------------------------------------------------------


def partition_of(mode: Mode, states: Mapping[State, torch.Tensor], gradient: torch.Tensor) -> kernels.Partition:
    """Returns states and gradient of some elements, (n,) each, in the form that the kernels take."""
    # Both forms of a master may be absent: in fp32 the weight is the master.
    scales = states.get(State.SCALES)
    return kernels.Partition(
        states[State.WEIGHT],
        gradient,
        tuple(states[moment] for moment in mode.moments),
        states.get(State.MASTER_LOW_BITS),
        states.get(State.MASTER),
        # Those of a tile fill whole pages.
        None if scales is None else optimizer_states.scales_of(mode, scales, len(gradient)),
    )


def segments_in(update: UnitUpdate, tile: TileContent) -> list[tuple[int, kernels.Segment]]:
    """Returns the segments of the update that overlap the tile: number in the update, and elements in the tile."""
    # Segments of torch's optimizers are skipped: their strategy cuts them itself.
    return [
        (number, _cut(each, tile.start, tile.stop))
        for number, each in enumerate(update.segments)
        if isinstance(each, kernels.Segment) and each.start < tile.stop and each.stop > tile.start
    ]


def _cut(segment: kernels.Segment, start: int, stop: int) -> kernels.Segment:
    """Returns the part of a segment within elements [start, stop), counted from `start`."""
    first = max(segment.start, start)
    noise = segment.noise and segment.noise.after(first - segment.start)
    return kernels.Segment(first - start, min(segment.stop, stop) - start, segment.step, noise)
