"""Updates by a torch optimizer without a kernel here: a tile is an entire unit, whose parameters step one by one.

See `torch_fallback` for the step of one parameter apart from the others, and `opaque_state` for its packed states. Of
several ranks each has a tile of all its elements of a unit. A parameter that they divide steps on one of them, its home
(see `exchange`), which keeps all its states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.distributed.process_group import Ranks
from offload.engine.update_strategy import TileContent, UnitSteps, UnitUpdate
from offload.errors import UsageError
from offload.layout.flat_layout import Segment, UnitLayout, pack, unpack
from offload.layout.modes import Mode
from offload.layout.optimizer_states import Whole, join, split
from offload.optimizers.matrices import Exchange, carve
from offload.optimizers.of_torch import TorchSegment, TorchStep, cause, likeness
from offload.states import State


class TorchUpdates:
    """Strategy of torch's optimizers. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        mode: Mode,
        layouts: Sequence[UnitLayout],
        whole: Whole,
        scratch: torch.Tensor,
        ranks: Ranks,
    ) -> None:
        """Takes over the scratch memory.

        Args:
            optimizer: the user's optimizer, cloned for each step.
            mode: the mode.
            layouts: the layout of each unit.
            whole: sizes of parameters.
            scratch: (n,) fp32 of the host arena, for a gradient and, if masters have no memory of their own, a master,
                and for what ranks exchange.
            ranks: the ranks that divide units; this one alone if each has whole units.
        """
        self._optimizer, self.layouts, self._rank = optimizer, layouts, ranks.shard
        self.scratch_nbytes = scratch.nbytes
        # Masters that have memory of their own take none: then the gradient's serves, which nobody asks for.
        copied = State.MASTER_LOW_BITS in mode.weights or ranks.size > 1
        sizes = (whole.parameter, whole.parameter if copied else 0, 2 * whole.traded)
        self.gradient, self.master, traded = carve(scratch, *sizes)
        self.exchange = Exchange(ranks=ranks, layouts=layouts, mode=mode, memory=traded)
        """Exchange of divided parameters."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state but PACKED, of which a tile contains all words."""
        return range(self.layouts[unit].packed_numel(self._rank)) if state is State.PACKED else range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit, which one tile contains entirely."""
        return _TorchSteps(self, update)

    def step(
        self, segment: Segment, master: torch.Tensor, gradient: torch.Tensor, words: torch.Tensor, step: TorchStep
    ) -> torch.Tensor:
        """Steps one parameter.

        Args:
            segment: the parameter.
            master: (numel,) fp32, which the step may change.
            gradient: (numel,) fp32, unscaled, which the step may change.
            words: the parameter's packed states, changed in place.
            step: options of the parameter's group, and the factor of the gradient.

        Returns:
            The new master, (numel,): in the memory of `master`, or of a tensor by which the optimizer has replaced it.

        Raises:
            UsageError: the optimizer's own code has raised.
        """
        packed = words.view(torch.uint8)
        parameter = nn.Parameter(master.view(segment.shape))
        # Optimizers may read such attributes, for example a learning-rate factor for each layer.
        parameter.__dict__.update(step.attributes)
        parameter.grad = gradient.mul_(step.grad_scale).view(segment.shape)
        states: dict[torch.Tensor, dict[str, Any]] = {parameter: unpack(segment.kept, packed)}
        alone = likeness(type(self._optimizer), step.optimizer, step.options, states)
        try:
            type(self._optimizer).step(alone)
            pack(segment.kept, alone.state[parameter], packed)
        except Exception as error:
            raise UsageError(
                f"the step of {type(self._optimizer).__name__} failed for {segment.name}: {cause(error)}"
            ) from error
        return parameter.detach().reshape(-1)


class _TorchSteps:
    """Steps of one unit by an optimizer of torch."""

    passes = 1
    in_place = False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, updates: TorchUpdates, update: UnitUpdate) -> None:
        self._updates, self._update = updates, update
        self._segments = updates.layouts[update.unit].segments

    def run(self, tile: TileContent, last: bool) -> None:
        """Steps all parameters of the unit, of which the tile contains all that this rank has."""
        pairs = zip(self._update.parameters, self._update.segments, strict=True)
        mine = {index: segment for index, segment in pairs if isinstance(segment, TorchSegment)}
        for index, segment in mine.items():
            if index not in self._update.shared:
                self._step(self._segments[index], tile, segment)
        if self._update.shared:
            self._trade(tile, mine)

    def _step(self, parameter: Segment, tile: TileContent, segment: TorchSegment) -> None:
        """Steps a parameter of which this rank has all elements."""
        states, gradient = _content(tile, segment)
        # A copy of the gradient, because an optimizer may write into it. In fp32 the master is the weight itself.
        own = self._updates.gradient[: len(gradient)].copy_(gradient)
        master = join(states, self._updates.master[: len(gradient)])
        _store(self._updates.step(parameter, master, own, _words(tile, parameter, own), segment.step), states)

    def _trade(self, tile: TileContent, mine: Mapping[int, TorchSegment]) -> None:
        """Steps the parameters that several ranks divide: master and gradient go to a home, the master comes back."""
        exchange, shared = self._updates.exchange, self._update.shared
        masters, gradients = (
            exchange.begin(self._update.unit, shared, torch.float32, number, of=2) for number in range(2)
        )
        away = [index for index in masters.away if index in mine]
        for index in away:
            states, gradient = _content(tile, mine[index])
            place = masters.part(index, exchange.rank)
            place.copy_(join(states, place))
            gradients.part(index, exchange.rank).copy_(gradient)
        masters.go()
        gradients.go()
        for each in masters.here:
            parameter, segment = self._segments[each.number], mine[each.number]
            states, gradient = _content(tile, segment)
            master, whole = (memory[: parameter.numel] for memory in (self._updates.master, self._updates.gradient))
            for rank, position, numel in each.parts:
                here = slice(position, position + numel)
                if rank == exchange.rank:
                    master[here].copy_(join(states, master[here]))
                    whole[here].copy_(gradient)
                else:
                    master[here].copy_(masters.part(each.number, rank))
                    whole[here].copy_(gradients.part(each.number, rank))
            after = self._updates.step(parameter, master, whole, _words(tile, parameter, whole), segment.step)
            for rank, position, numel in each.parts:
                here = slice(position, position + numel)
                if rank == exchange.rank:
                    split(after[here], states)
                else:
                    masters.part(each.number, rank).copy_(after[here])
        masters.back()
        for index in away:
            split(masters.part(index, exchange.rank), _content(tile, mine[index])[0])


def _content(tile: TileContent, segment: TorchSegment) -> tuple[dict[State, torch.Tensor], torch.Tensor]:
    """Returns the states of a master and the gradient, (n,) each, of what a tile has of a parameter."""
    assert tile.gradient is not None
    own = slice(segment.start, segment.stop)
    states: dict[State, torch.Tensor] = {
        state: memory[own] for state, memory in tile.states.items() if state is not State.PACKED
    }
    return states, tile.gradient[own]


def _words(tile: TileContent, parameter: Segment, other: torch.Tensor) -> torch.Tensor:
    """Returns the packed states of a parameter in a tile; any tensor serves for one that has none, `other` here."""
    return tile.states.get(State.PACKED, other)[parameter.packed.start : parameter.packed.stop]


def _store(master: torch.Tensor, states: Mapping[State, torch.Tensor]) -> None:
    """Writes a new master into its states."""
    # An fp32 weight that was changed in place is stored already. An optimizer may also replace `parameter.data`.
    if master.data_ptr() != states[State.WEIGHT].data_ptr():
        split(master, states)
