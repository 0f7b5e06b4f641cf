"""Updates by a torch optimizer without a kernel here: a tile is an entire unit, whose parameters step one by one.

See `torch_fallback` for the step of one parameter apart from the others, and `opaque_state` for its packed states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload.engine.optim.torch_fallback import TorchSegment, TorchStep, cause, likeness
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps
from offload.errors import UsageError
from offload.layout.flat_layout import UnitLayout
from offload.layout.master_weights import join, split
from offload.layout.opaque_state import pack, unpack
from offload.states import State


class TorchUpdates:
    """Strategy of torch's optimizers. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(
        self, *, optimizer: torch.optim.Optimizer, layouts: Sequence[UnitLayout], scratch: torch.Tensor
    ) -> None:
        """Takes over the scratch memory.

        Args:
            optimizer: the user's optimizer, cloned for each step.
            layouts: the layout of each unit.
            scratch: (n,) fp32 of the host arena, for a gradient and, if masters have no memory of their own, a master.
        """
        self._optimizer, self._layouts = optimizer, layouts
        self.scratch_nbytes = scratch.nbytes
        # One buffer for all parameters: the gradient is at its start, the master at its end.
        largest = max(s.numel for layout in layouts for s in layout.segments if s.trainable)
        self._gradient, self._master = scratch[:largest], scratch[len(scratch) - largest :]

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state but PACKED, of which a tile contains all words."""
        return range(self._layouts[unit].packed_numel) if state is State.PACKED else range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit, which one tile contains entirely."""
        return _TorchSteps(self, update)

    def step(
        self, unit: int, position: int, states: Mapping[State, torch.Tensor], gradient: torch.Tensor, step: TorchStep
    ) -> None:
        """Updates one parameter in place, by its `position` in the unit.

        Args:
            unit: index of the unit.
            position: index of the parameter in the unit.
            states: states of the unit, (numel,) each, and PACKED.
            gradient: (n,) of the parameter; not written.
            step: options of the parameter's group, and the factor of the gradient.

        Raises:
            UsageError: the optimizer's own code has raised.
        """
        segment = self._layouts[unit].segments[position]
        mine = {state: memory[segment.start : segment.stop] for state, memory in states.items()}
        # Without PACKED the parameter has no packed states: its range is empty, and any tensor serves.
        packed = states.get(State.PACKED, gradient)[segment.packed.start : segment.packed.stop].view(torch.uint8)
        # A copy of the gradient, because an optimizer may write into it. In fp32 the master is the weight itself.
        grad = self._gradient[: segment.numel].copy_(gradient).mul_(step.grad_scale)
        master = join(mine, self._master[: segment.numel])
        parameter = nn.Parameter(master.view(segment.shape))
        # Optimizers may read such attributes, for example a learning-rate factor for each layer.
        parameter.__dict__.update(step.attributes)
        parameter.grad = grad.view(segment.shape)
        alone = likeness(self._optimizer, step.options, {parameter: unpack(segment.kept, packed)})
        try:
            type(self._optimizer).step(alone)
            pack(segment.kept, alone.state[parameter], packed)
        except Exception as error:
            raise UsageError(
                f"the step of {type(self._optimizer).__name__} failed for {segment.name}: {cause(error)}"
            ) from error
        after = parameter.detach().reshape(-1)
        # An fp32 weight that was changed in place is stored already. An optimizer may also replace `parameter.data`.
        if after.data_ptr() != mine[State.WEIGHT].data_ptr():
            split(after, mine)


class _TorchSteps:
    """Steps of one unit by an optimizer of torch."""

    passes = 1
    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, updates: TorchUpdates, update: UnitUpdate) -> None:
        self._updates, self._update = updates, update

    def run(self, tile: TileContent, last: bool) -> None:
        """Steps all parameters of the unit, which the tile contains entirely."""
        assert tile.gradient is not None
        for position, segment in zip(self._update.parameters, self._update.segments, strict=True):
            if isinstance(segment, TorchSegment):
                gradient = tile.gradient[segment.start : segment.stop]
                self._updates.step(self._update.unit, position, tile.states, gradient, segment.step)
