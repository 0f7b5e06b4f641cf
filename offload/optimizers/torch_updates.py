"""Updates by a torch optimizer without a kernel here: a tile is an entire unit, whose parameters step one by one.

See `of_torch` for the step of one parameter apart from the others. Of several ranks each has a tile of all its elements
of a unit. A parameter that they divide steps on one of them, its home (see `matrices.Exchange`), which keeps all its
states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.engine.optimizer import Rule, is_finite, numbers_of
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.errors import UsageError
from offload.layout.flat_layout import Segment, StateField, pack, unpack
from offload.layout.modes import TORCH
from offload.layout.optimizer_states import join, split
from offload.optimizers.matrices import Exchange, carve
from offload.optimizers.of_torch import TorchStep, attributes_of, cause, find_kept, likeness
from offload.states import State


@dataclass(frozen=True, kw_only=True)
class TorchRule(Rule):
    """The rule of an optimizer of torch, which runs by its own code."""

    optimizer: torch.optim.Optimizer
    """The user's optimizer, cloned for each step."""

    @property
    def required(self) -> tuple[str, ...]:
        """Keys that every group has."""
        return self.defaults

    def refused(self, group: Mapping[str, Any]) -> str | None:
        """Returns None: its own code implements its options."""
        return None

    def is_valid(self, key: str, value: Any) -> bool:
        """Returns True unless a number is not finite."""
        # Its own code knows how many numbers it reads, and None may be one of them (Adafactor's eps).
        items = list(value) if isinstance(value, list | tuple) else [value]
        return all(item is None or is_finite(item) for item in items) and (key != "betas" or len(items) >= 2)

    def plain(self, value: Any) -> Any:
        """Returns a group's number as a float; an integer, with which its own code may count, stays one."""
        return value if type(value) is int else super().plain(value)

    def packed(self, names: Mapping[int, str]) -> dict[str, tuple[StateField, ...]]:
        """Returns the states that its own code keeps, which a dry run finds and which may draw random numbers."""
        return find_kept(self.optimizer, names)

    def notices(self) -> tuple[str, ...]:
        """Returns a line about the time that its own code takes."""
        return (
            f"{self.known_as} has no kernel for these options: its own code updates parameter by parameter on the CPU",
        )

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> TorchStep:
        """Returns the arguments of a step by torch's own code."""
        # Copies: the user may change the group and the optimizer while the update is in flight.
        return TorchStep(numbers_of(group), grad_scale, attributes_of(parameter), dict(vars(self.optimizer)))

    def steps_whole(self, step: Any) -> bool:
        """Returns True: its own code steps whole parameters."""
        return True

    def strategy(self, setting: UpdateSetting) -> TorchUpdates:
        """Returns the strategy of optimizers of torch."""
        return TorchUpdates(self.optimizer, setting)


def by_itself(optimizer: torch.optim.Optimizer) -> TorchRule:
    """Returns the rule of an optimizer without a kernel.

    Any number of a group may change between steps, also one that is an integer now, such as torch's `weight_decay=0`.
    Flags are no numbers.
    """
    scheduled = sorted(
        {key for group in optimizer.param_groups for key, value in group.items() if _is_number_of(key, value)}
    )
    defaults = [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]
    return TorchRule(
        name=TORCH,
        scheduled=tuple(scheduled),
        known_as=type(optimizer).__name__,
        defaults=tuple(defaults),
        optimizer=optimizer,
    )


def _is_number_of(key: str, value: Any) -> bool:
    """Returns True if a group's entry is an integer, or is or contains a float, but no parameter, name or flag."""
    return key not in ("params", "param_names") and (type(value) is int or _is_float(value))


def _is_float(value: Any) -> bool:
    """Returns True for a float, a floating-point tensor of one element, or a sequence that contains one of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float) or (isinstance(value, tuple | list) and any(map(_is_float, value)))


class TorchUpdates:
    """Strategy of torch's optimizers. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(self, optimizer: torch.optim.Optimizer, setting: UpdateSetting) -> None:
        """Divides the scratch memory: gradient and master of the largest parameter, and what ranks exchange.

        Args:
            optimizer: the user's optimizer, cloned for each step.
            setting: the parts of the engine.
        """
        mode, whole, ranks = setting.mode, setting.whole, setting.ranks
        self._optimizer, self.layouts, self._rank = optimizer, setting.layouts, ranks.shard
        # Masters that have memory of their own take none: then the gradient's serves, which nobody asks for.
        copied = State.MASTER_LOW_BITS in mode.weights or ranks.size > 1
        sizes = (whole.parameter, whole.parameter if copied else 0, 2 * whole.traded)
        self.gradient, self.master, traded = carve(setting.scratch, *sizes)
        self.exchange = Exchange(ranks=ranks, layouts=setting.layouts, mode=mode, memory=traded)
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
        steps = {segment.parameter: segment for segment in self._update.segments}
        for index, segment in steps.items():
            if index not in self._update.shared:
                self._step(self._segments[index], tile, segment)
        if self._update.shared:
            self._trade(tile, steps)

    def _step(self, parameter: Segment, tile: TileContent, segment: ParameterStep) -> None:
        """Steps a parameter of which this rank has all elements."""
        states, gradient = _content(tile, segment)
        # A copy of the gradient, because an optimizer may write into it. In fp32 the master is the weight itself.
        own = self._updates.gradient[: len(gradient)].copy_(gradient)
        master = join(states, self._updates.master[: len(gradient)])
        _store(self._updates.step(parameter, master, own, _words(tile, parameter, own), segment.step), states)

    def _trade(self, tile: TileContent, steps: Mapping[int, ParameterStep]) -> None:
        """Steps the parameters that several ranks divide: master and gradient go to a home, the master comes back."""
        exchange, shared = self._updates.exchange, self._update.shared
        masters, gradients = (
            exchange.begin(self._update.unit, shared, torch.float32, number, of=2) for number in range(2)
        )
        away = [index for index in masters.away if index in steps]
        for index in away:
            states, gradient = _content(tile, steps[index])
            place = masters.part(index, exchange.rank)
            place.copy_(join(states, place))
            gradients.part(index, exchange.rank).copy_(gradient)
        masters.go()
        gradients.go()
        for divided in masters.here:
            parameter, segment = self._segments[divided.number], steps[divided.number]
            states, gradient = _content(tile, segment)
            master, whole = (memory[: parameter.numel] for memory in (self._updates.master, self._updates.gradient))
            for rank, position, numel in divided.parts:
                here = slice(position, position + numel)
                if rank == exchange.rank:
                    master[here].copy_(join(states, master[here]))
                    whole[here].copy_(gradient)
                else:
                    master[here].copy_(masters.part(divided.number, rank))
                    whole[here].copy_(gradients.part(divided.number, rank))
            after = self._updates.step(parameter, master, whole, _words(tile, parameter, whole), segment.step)
            for rank, position, numel in divided.parts:
                here = slice(position, position + numel)
                if rank == exchange.rank:
                    split(after[here], states)
                else:
                    masters.part(divided.number, rank).copy_(after[here])
        masters.back()
        for index in away:
            split(masters.part(index, exchange.rank), _content(tile, steps[index])[0])


def _content(tile: TileContent, segment: ParameterStep) -> tuple[dict[State, torch.Tensor], torch.Tensor]:
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
