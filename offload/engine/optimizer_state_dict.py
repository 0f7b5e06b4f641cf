"""The optimizer states of one parameter, in RAM, as in the `state_dict` of an optimizer of torch.

`Optimizer.state_dict` and `load_state_dict` use this module, for code that reads an optimizer's states or loads the
states of a plain optimizer of torch. Commits and checkpoints store the states without this module, even states that
exceed the RAM.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.access import ParamAccess
from offload.engine.params import ParamHandle
from offload.engine.state import TrainingState
from offload.errors import UsageError
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import Mode
from offload.layout.optimizer_states import states_of
from offload.states import State

_STEP = "step"
_MOST_STEPS = 2**53
"""Bound of a count: torch's optimizers keep it as a float, which is exact below."""


class OptimizerStates:
    """Access to all optimizer states of a parameter. Every rank calls each method for the same parameters."""

    def __init__(
        self, param_access: ParamAccess, layouts: Sequence[UnitLayout], mode: Mode, training_state: TrainingState
    ) -> None:
        self._param_access, self._layouts, self._mode = param_access, layouts, mode
        self._training_state = training_state

    def read(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Returns copies of the states on the CPU, by name; none before the first update and for a frozen parameter."""
        handle = self._handle(parameter)
        count = self._steps(handle)
        if not count:
            return {}
        if State.PACKED in self._mode.moments:
            part = handle.parts[0]
            fields = self._layouts[part.unit].segments[part.position].kept
            states = {field.name: self._param_access.read_state(handle, field.name) for field in fields}
            # torch's own code keeps the count among its states, if it counts.
            return {name: value.cpu() for name, value in states.items() if value is not None}
        # torch's optimizers keep the count as a floating-point tensor.
        values = {_STEP: torch.tensor(float(count), dtype=torch.float32, device="cpu")}
        for name, state in self._moments(handle).items():
            value = self._param_access.read(handle, state)
            assert value is not None
            values[name] = value.cpu()
        return values

    def check(self, parameter: nn.Parameter, state: Mapping[str, Any], number: int) -> None:
        """Checks that `state` contains each moment of the optimizer in the parameter's shape, and a valid count.

        Args:
            parameter: a parameter of the model.
            state: moments by name, each of the parameter's shape, and optionally "step", the number of updates; empty
                for the state before the first step.
            number: the parameter's number in the state dict, for the error.

        Raises:
            UsageError: if a moment is missing or has another shape; if "step" is not a whole number of at least 0; if
                the parameter is frozen, or the optimizer has no kernel.
        """
        handle = self._handle(parameter)
        if not state and not self._steps(handle):
            return
        if State.PACKED in self._mode.moments:
            raise UsageError(
                "the states of an optimizer without a kernel can be read but not set; engine.load_checkpoint loads them"
            )
        # An empty state resets a parameter that was updated, so there is nothing to compare.
        names = list(self._moments(handle)) if state else []
        shape = handle.shape
        for name in names:
            value = state.get(name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(
                    f"state {number}, of parameter {handle.name}, must contain {', '.join(names)}, each a tensor of "
                    f"shape {list(shape)}; its {name} is {got}"
                )
        if names and not handle.trainable:
            raise UsageError(
                f"state {number}, of parameter {handle.name}, cannot be set: the parameter is frozen and has no "
                "optimizer states; leave its state out of the dict"
            )
        # Here and not in `write`, which would have replaced moments by the time that it reads the count.
        if state and _count(state) is None:
            raise UsageError(
                f"state {number}, of parameter {handle.name}, may contain {_STEP!r}, the whole number of updates, got "
                f"{state[_STEP]!r}"
            )

    def write(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replaces the states of a parameter. Entries of other names have no effect.

        Args:
            parameter: a parameter of the model.
            state: a state that `check` has accepted; an empty one resets the parameter to before the first step.
        """
        handle = self._handle(parameter)
        if not state and not self._steps(handle):
            return
        shape = handle.shape
        # A parameter that trained in an earlier run and is frozen now has a count to reset, but no moments.
        for name, moment in self._moments(handle).items() if handle.trainable else ():
            value = state[name].float() if state else torch.zeros(shape, dtype=torch.float32, device="cpu")
            self._param_access.write(handle, moment, value)
        count = _count(state) if state else 0
        assert count is not None, "check has accepted the state"
        for part in handle.parts:
            self._training_state.parameter_steps[part.unit][part.position] = count

    def _steps(self, handle: ParamHandle) -> int:
        """Returns the largest number of updates of a parameter's parts; 0 if it is frozen."""
        return max(self._training_state.parameter_steps[part.unit][part.position] for part in handle.parts)

    def _moments(self, handle: ParamHandle) -> dict[str, State]:
        """Returns the moments of a parameter by the names that torch gives them."""
        part = handle.parts[0]  # all have the same states
        layout = self._layouts[part.unit]
        return states_of(self._mode, layout, layout.segments[part.position])

    def _handle(self, parameter: nn.Parameter) -> ParamHandle:
        handle = self._param_access.handle(parameter)
        assert handle is not None, "the groups contain the parameters of the engine"
        return handle


def _count(state: Mapping[str, Any]) -> int | None:
    """Returns the number of updates in a state that is not empty; None if its "step" is not a whole number >= 0."""
    # A state without a count, such as SGD's, counts as one update, so that `read` finds it again.
    count = state.get(_STEP, 1)
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    number: float
    if isinstance(count, numbers.Integral):
        number = int(count)
    elif isinstance(count, numbers.Real):
        number = float(count)
    else:
        return None
    # The bound is first: it is False for NaN and inf, which no integer represents.
    return int(number) if 0 <= number < _MOST_STEPS and number == int(number) else None
