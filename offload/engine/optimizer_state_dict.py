"""The optimizer's states as `torch.optim.Optimizer.state_dict` has them: of each parameter by its number, in RAM.

Commits and checkpoints hold them without this, and larger than the RAM. It is for code that asks an optimizer for its
state, and to take over what a plain optimizer of torch has come to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.param_access import Looking
from offload.engine.params.paged_parameter import Place
from offload.engine.training.training_state import TrainingState
from offload.errors import UsageError
from offload.layout.flat_layout import UnitLayout
from offload.states import State
from offload.swapper.modes import Mode

_STEP = "step"


class OptimizerStates:
    """Reads and sets what an optimizer keeps of parameters, all of it. Every rank calls it, for the same parameters."""

    def __init__(self, looking: Looking, layouts: Sequence[UnitLayout], mode: Mode, moment: TrainingState) -> None:
        self._looking, self._layouts, self._mode, self._moment = looking, layouts, mode, moment

    def read(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Copies, on the CPU; empty before the first step, and of a frozen parameter."""
        place = self._place(parameter)
        count = self._steps(place)
        if not count:
            return {}
        kept = self._layouts[place.unit].segments[place.position].kept
        if kept:
            found = {each.name: self._looking.read_state(place, each.name) for each in kept}
            return {name: value.cpu() for name, value in found.items() if value is not None}
        values: dict[str, Any] = {_STEP: torch.tensor(float(count), device="cpu")}
        for state in self._moments:
            value = self._looking.read(place, state)
            assert value is not None
            values[state.value] = value.cpu()
        return values

    def check(self, parameter: nn.Parameter, state: Mapping[str, Any], number: int) -> None:
        """Raise `UsageError` where `state` is none that `write` takes."""
        place = self._place(parameter)
        if not state and not self._steps(place):
            return
        if State.PACKED in self._mode.moments:
            raise UsageError(
                "the states of an optimizer without a kernel can be looked at, and not be set: engine.load_checkpoint "
                "loads them"
            )
        names = [moment.value for moment in self._moments] if state else []
        shape = self._layouts[place.unit].segments[place.position].shape
        for name in names:
            value = state.get(name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(
                    f"state {number}, of parameter {place.name}, must have {', '.join(names)}, each a tensor of shape "
                    f"{list(shape)}; its {name} is {got}"
                )

    def write(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Make `state`, which was checked, what is kept of a parameter; what else there is in it has no effect.

        An empty one is that of before the first step.
        """
        place = self._place(parameter)
        if not state and not self._steps(place):
            return
        shape = self._layouts[place.unit].segments[place.position].shape
        for moment in self._moments:
            value = state[moment.value].float() if state else torch.zeros(shape, device="cpu")
            self._looking.write(place, moment, value)
        self._moment.parameter_steps[place.unit][place.position] = int(state.get(_STEP, 1)) if state else 0

    def _steps(self, place: Place) -> int:
        """How often it was updated; never, where it is frozen."""
        return self._moment.parameter_steps[place.unit][place.position]

    @property
    def _moments(self) -> tuple[State, ...]:
        return tuple(state for state in self._mode.moments if state is not State.PACKED)

    def _place(self, parameter: nn.Parameter) -> Place:
        place = self._looking.place(parameter)
        assert place is not None, "the groups hold what the engine took over"
        return place
