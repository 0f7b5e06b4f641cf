"""Interface between the update worker and the arithmetic of an update.

    worker      tiles, reads, copies, writes, publication of weights, commits
    strategy    number of passes over the tiles, content of a tile for each state, arithmetic on a tile

Each rule of `offload.optimizers` has a strategy. Under every strategy, `EditSteps` writes values that a user sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from offload import kernels
from offload.distributed.process_group import Ranks
from offload.engine.callbacks import Edit
from offload.engine.gradients import GradientAccumulator
from offload.engine.optimizer import Optimizer
from offload.layout import optimizer_states
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import Mode
from offload.layout.optimizer_states import WholeSizes, put_weight, split
from offload.states import State
from offload.swapper.memory.device import Device

# -- unit updates --------------------------------------------------------------------------------------
#
# An optimizer step has one update for each unit. The updates are made when the gradient norm is known, in the order in
# which the next forward uses the units.


class ParameterStep(NamedTuple):
    """The step of one parameter. [start, stop) are the parameter's elements in this rank's shard of the unit."""

    start: int
    stop: int
    step: Any
    """Arguments of the step, from `Rule.step`. The worker does not look at them."""
    noise: kernels.Noise | None
    """Noise to round moments and masters of fewer bits than fp32; None if all of them are fp32."""
    parameter: int
    """Index of the parameter in the unit."""

    def within(self, start: int, stop: int) -> ParameterStep:
        """Returns the part of this step within elements [start, stop). The result counts elements from `start`."""
        first = max(self.start, start)
        noise = self.noise and self.noise.after(first - self.start)
        return self._replace(start=first - start, stop=min(self.stop, stop) - start, noise=noise)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitUpdate:
    """Update of one unit in an optimizer step. Elements outside of all segments are copied unchanged."""

    unit: int
    numel: int
    """Elements of the trainable shard of this rank's partition."""
    segments: tuple[ParameterStep, ...] = ()
    edits: tuple[Edit, ...] = ()
    """Values that the user has set. An update has segments or edits, or neither if other ranks hold the elements."""
    shared: tuple[int, ...] = ()
    """Indices in the unit of the parameters that several ranks step together, as a whole. Equal on every rank."""

    @property
    def changes(self) -> bool:
        """True if the update changes this rank's elements, or takes part in steps of other ranks."""
        return bool(self.segments or self.edits or self.shared)


def grad_scale(norm: float, clip: float, loss_scale: float) -> float:
    """Returns the factor of every gradient: torch's `clip_grad_norm_` coefficient over the loss scale.

    `norm` is the global norm, without the loss scale. A `clip` of 0 means no clip.
    """
    # torch adds 1e-6 too, so the bits are equal.
    return (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / loss_scale


def part_of(part: range, start: int, stop: int) -> tuple[int, int]:
    """Returns the intersection of a unit's elements [start, stop) with this rank's `part`.

    Both ends are counted from the first element of `part`. If nothing intersects, start >= stop.
    """
    return max(start, part.start) - part.start, min(stop, part.stop) - part.start


def cut(edits: Sequence[Edit], part: range) -> tuple[Edit, ...]:
    """Returns the edits of a unit, limited to this rank's `part` and counted from the first element of `part`."""
    own: list[Edit] = []
    for edit in edits:
        start, stop = part_of(part, edit.start, edit.stop)
        if start < stop:
            first = start + part.start - edit.start
            values = edit.values[first : first + stop - start]
            own.append(dataclasses.replace(edit, start=start, stop=stop, values=values))
    return tuple(own)


class UpdateBuilder:
    """Builds the updates of an optimizer step. As in torch, each parameter has its own count of steps."""

    def __init__(
        self,
        *,
        layouts: Sequence[UnitLayout],
        trainable: Sequence[range],
        module: nn.Module,
        optimizer: Optimizer,
        noise_seed: int | None,
    ) -> None:
        """Looks up the parameters of each unit. `noise_seed` is None if moments and masters are fp32."""
        self._layouts, self._trainable, self._optimizer = layouts, trainable, optimizer
        self._noise_seed = noise_seed
        parameters = dict(module.named_parameters())
        self._parameters = [[parameters[segment.parameter] for segment in layout.segments] for layout in layouts]

    def updates(
        self, present: Sequence[set[int]], order: Sequence[int], scale: float, counts: list[list[int]]
    ) -> list[UnitUpdate]:
        """Returns an update for each unit with a gradient, in `order`, the order of units in the next forward.

        `present` contains the segments of each unit that have a gradient. `counts` contains the number of updates of
        each parameter, and is incremented in place.
        """
        settings = self._optimizer.settings()
        updates: dict[int, UnitUpdate] = {}
        for unit, positions in enumerate(present):
            for position in positions:
                counts[unit][position] += 1
            # Units whose gradients are all on other ranks get an empty update, because all ranks must update the same
            # units.
            if positions:
                updates[unit] = self.update_of(unit, positions, scale, counts[unit], settings)
        # The order is reversed, so that the first use of a unit overwrites its later uses.
        first_use = {unit: position for position, unit in reversed(list(enumerate(order)))}
        return [updates[unit] for unit in sorted(updates, key=lambda u: (first_use.get(u, len(order)), u))]

    def update_of(
        self,
        unit: int,
        present: set[int],
        scale: float,
        counts: Sequence[int],
        settings: Mapping[int, Mapping[str, Any]],
    ) -> UnitUpdate:
        """Returns the update of one unit.

        `counts` are the numbers of updates of its parameters, including this update.
        """
        part, rule = self._trainable[unit], self._optimizer.rule
        segments: list[ParameterStep] = []
        shared: list[int] = []
        for position in sorted(present):
            segment, parameter = self._layouts[unit].segments[position], self._parameters[unit][position]
            start, stop = part_of(part, segment.start, segment.stop)
            step = rule.step(parameter, settings[id(parameter)], counts[position], scale)
            # Every rank holds the same number of elements of a unit.
            borders = segment.start // len(part), (segment.stop - 1) // len(part)
            if rule.steps_whole(step) and segment.numel and borders[0] < borders[1]:
                shared.append(position)
            if start < stop:
                noise = self._noise(unit, counts[position], part, start)
                segments.append(ParameterStep(start, stop, step, noise, position))
        return UnitUpdate(unit=unit, numel=len(part), segments=tuple(segments), shared=tuple(shared))

    def _noise(self, unit: int, count: int, part: range, start: int) -> kernels.Noise | None:
        """Returns the noise that rounds states from element `start` of `part` on; None if all states are fp32.

        The noise depends on the element's number in the whole unit and on the parameter's count of updates, which is
        committed. So the number of ranks, the size of tiles and a resume change no bit.
        """
        if self._noise_seed is None:
            return None
        return kernels.Noise(kernels.noise_stream(self._noise_seed, unit, count), part.start + start)


# -- update strategy -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TileContent:
    """The states and the gradient of elements [start, stop) of a unit's trainable shard.

    The update worker owns the memory, which is valid until `UnitSteps.run` returns.
    """

    start: int
    stop: int
    states: Mapping[State, torch.Tensor]
    """Each state has shape (n,) and the mode's dtype. n is stop - start, or the length of `UpdateStrategy.part`."""
    gradient: torch.Tensor | None
    """The gradient, of shape (stop - start,), without the parameters in `kept`; None if the update has edits."""
    kept: Mapping[int, torch.Tensor]
    """Gradients in tensors of their own: (n,), the tile's elements of a parameter, by the parameter's index."""

    def gradient_of(self, segment: ParameterStep) -> torch.Tensor:
        """Returns the gradient of a segment that is cut `within` the tile; only read."""
        assert self.gradient is not None
        own = self.kept.get(segment.parameter)
        return self.gradient[segment.start : segment.stop] if own is None else own


class UnitSteps(Protocol):
    """The arithmetic of one unit's update. Only the update worker calls it, tile by tile, in order."""

    @property
    def passes(self) -> int:
        """Number of passes over the tiles of the unit. Only the results of the last pass are kept."""

    @property
    def in_place(self) -> bool:
        """True if the device updates the states in their own memory, without a copy to the host."""

    @property
    def cuts(self) -> Sequence[range]:
        """The elements of each tile, in order. If empty, the update worker chooses the tiles."""

    @property
    def drafts(self) -> Sequence[State]:
        """States that passes before the last one change.

        For these passes the update worker copies the states, so that the next pass reads the originals.
        """

    def run(self, tile: TileContent, last: bool) -> None:
        """Updates the elements of a tile in place, and returns when the arithmetic is done.

        `last` marks the last pass.
        """


class UpdateStrategy(Protocol):
    """Updates all units of an engine in one way."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the elements of `state` in a tile with the elements [start, stop) of a unit's trainable shard."""

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Starts an update that has segments, and returns its steps. A tile has at most `tile_numel` elements."""

    def begin_part(self, update: UnitUpdate, writes: kernels.Writes) -> UnitSteps | None:
        """Returns the steps that write only the weights, or only the moments, of states in host memory.

        The steps of the moments follow those of the weights, and find the old moments and the same gradient. Together
        they have the bits of `begin`. None if the update must write both at once.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSetting:
    """The parts of an engine that a strategy needs."""

    mode: Mode
    layouts: Sequence[UnitLayout]
    parts: Sequence[range]
    """Elements of each unit that this rank updates."""
    whole: WholeSizes
    """Sizes of the parameters that the rule steps as a whole."""
    scratch: torch.Tensor
    """Scratch memory of the strategy: (n,) fp32 in the host arena. Empty if the rule steps no parameter as a whole."""
    device: Device
    gradients: GradientAccumulator
    ranks: Ranks
    """The ranks that divide units. It contains only this rank if each rank holds whole units."""
    replicas: Ranks
    """All ranks, if each holds whole units; otherwise only this rank."""


class EditSteps:
    """Writes values that the user has set, in place of an optimizer step. It makes one pass and needs no gradient."""

    passes = 1
    in_place = False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, edits: Sequence[Edit], mode: Mode) -> None:
        self._edits, self._mode = edits, mode

    def run(self, tile: TileContent, last: bool) -> None:
        """Copies the values of all edits that overlap the tile, in the order of the edits, so that later edits win."""
        for edit in self._edits:
            start, stop = max(edit.start, tile.start), min(edit.stop, tile.stop)
            if start < stop:
                self._set(tile, start, stop, edit.state, edit.values[start - edit.start : stop - edit.start])

    def _set(self, tile: TileContent, start: int, stop: int, state: State, values: torch.Tensor) -> None:
        """Writes the values of an edit to elements [start, stop) of a state; see `Edit.values`.

        `start` and `stop` count from the start of the trainable shard, and are inside the tile. An edit of WEIGHT also
        sets the master.
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
