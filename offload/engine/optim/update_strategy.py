"""How the parameters of a unit are updated: the part of an update that the worker does not know.

    worker      tiles, reads, copies, writes, publishing, commits
    strategy    how many passes over the tiles there are, what a tile holds of a state, and the arithmetic on a tile

There is one strategy for each way to do a step: `fused` (one kernel, in one pass), `lamb` (norms first) and
`torch_update` (an optimizer of torch). Values that a user sets are carried out here, beside whichever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload import kernels
from offload.engine.callbacks import Edit
from offload.engine.optim.unit_updates import UnitUpdate
from offload.layout.master_weights import put_weight, split
from offload.states import State
from offload.swapper.modes import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class TileContent:
    """Elements [start, stop) of this rank's trainable part of a unit, in memory that arithmetic can work on.

    The memory belongs to the worker; it is valid until `UnitSteps.run` returns.
    """

    start: int
    stop: int
    states: Mapping[State, torch.Tensor]
    """(n,) each, of the dtype that the mode has for it; n is stop - start, unless `UpdateStrategy.part` differs."""
    gradient: torch.Tensor | None
    """(stop - start,); None where the update has edits."""


class UnitSteps(Protocol):
    """The update of one unit under way. Called by the update worker alone, tile after tile, in order."""

    @property
    def passes(self) -> int:
        """Times that all tiles of the unit are read and run. Results of the last pass alone are kept."""

    @property
    def in_place(self) -> bool:
        """Whether states and gradient are worked on where they live, on the device, and are not copied to the host."""

    @property
    def drafts(self) -> Sequence[State]:
        """States that a pass before the last changes. They are copied for it, so that the next reads them unchanged."""

    def run(self, tile: TileContent, last: bool) -> None:
        """Does the arithmetic of a tile, in place; returns when it is done. `last` tells the pass that is kept."""


class UpdateStrategy(Protocol):
    """One way to update units, for all units of an engine."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the host arena's class of tiles that are the strategy's own."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the elements of `state` that a tile of the elements [start, stop) of a unit holds."""

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit whose update begins; `update` has segments, a tile at most `tile_numel`."""


class EditSteps:
    """New values of a user in place of an optimizer's step: one pass, no gradient."""

    passes = 1
    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, edits: Sequence[Edit], mode: Mode) -> None:
        self._edits, self._mode = edits, mode

    def run(self, tile: TileContent, last: bool) -> None:
        """Copies the values that lie in the tile, in the order of the edits."""
        for edit in self._edits:
            start, stop = max(edit.start, tile.start), min(edit.stop, tile.stop)
            if start < stop:
                self._set(tile, start, stop, edit.state, edit.values[start - edit.start : stop - edit.start])

    def _set(self, tile: TileContent, start: int, stop: int, state: State, values: torch.Tensor) -> None:
        """Gives elements [start, stop) of a state the values of an edit; see `Edit.values`."""
        part = slice(start - tile.start, stop - tile.start)
        if state is not State.WEIGHT:
            tile.states[state][part].copy_(values)
            return
        states = {state: tile.states[state][part] for state in self._mode.weights}
        if values.dtype is torch.float32:
            split(values, states)
        else:
            put_weight(values, states)


# -- for strategies that run kernels of ours ----------------------------------------------------------


def partition_of(mode: Mode, states: Mapping[State, torch.Tensor], gradient: torch.Tensor) -> kernels.Partition:
    """Returns the states and the gradient of some elements, (n,) each, as the kernels take them."""
    return kernels.Partition(
        states[State.WEIGHT],
        gradient,
        tuple(states[moment] for moment in mode.moments),
        states.get(State.RESIDUAL),
        states.get(State.MASTER),
    )


def segments_in(update: UnitUpdate, tile: TileContent) -> list[tuple[int, kernels.Segment]]:
    """Returns each segment of the update that lies in the tile: its number in the update, and its part in the tile."""
    return [
        (number, kernels.Segment(max(each.start - tile.start, 0), min(each.stop, tile.stop) - tile.start, each.step))
        for number, each in enumerate(update.segments)
        if isinstance(each, kernels.Segment) and each.start < tile.stop and each.stop > tile.start
    ]
