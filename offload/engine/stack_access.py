"""Access to the values of stacked parameters whose rows are units, as to those of any other parameter.

A read joins the rows, a write divides its values among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.engine.param_access import ParamAccess
from offload.engine.param_values import check_values
from offload.engine.params.experts.stack_handle import StackHandle
from offload.engine.params.paged_parameter import ParamHandle
from offload.errors import UsageError
from offload.states import State


class StackAccess(ParamAccess):
    """Reads and sets the values of the parameters of one engine, stacked ones included."""

    def state(self, handle: ParamHandle, name: Any) -> State:
        """Returns the optimizer state of a name, which is the same for all rows."""
        return super().state(handle.rows[0] if isinstance(handle, StackHandle) else handle, name)

    def read_state(self, handle: ParamHandle, name: Any) -> torch.Tensor | None:
        """Returns a copy of an optimizer state, or None for a frozen parameter."""
        return _joined(super().read_state, handle, name)

    def read_state_local(self, handle: ParamHandle, name: Any) -> torch.Tensor | None:
        """Returns this rank's partition of an optimizer state, flat, or None for a frozen parameter."""
        return _flat(_joined(super().read_state_local, handle, name))

    def read(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        """Returns a copy of a state; the gradient of a row without one is zero if another row has one."""
        return _joined(super().read, handle, state)

    def read_local(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        """Returns this rank's partition of the result of `read`, flat."""
        return _flat(_joined(super().read_local, handle, state))

    def write(self, handle: ParamHandle, state: State, values: torch.Tensor) -> None:
        """Replaces a state."""
        if not isinstance(handle, StackHandle):
            super().write(handle, state, values)
            return
        check_values(handle.name, values, handle.shape, handle.shape)
        for row, mine in zip(handle.rows, values, strict=True):
            super().write(row, state, mine)

    def write_local(self, handle: ParamHandle, state: State, values: torch.Tensor) -> None:
        """Replaces this rank's partition of a state; that of a stack are this rank's partitions of the rows."""
        if not isinstance(handle, StackHandle):
            super().write_local(handle, state, values)
            return
        rows, numel = len(handle.rows), self._own_shard(handle.rows[0]).numel  # all rows are divided alike
        # All ranks refuse what one has passed: a row is a collective.
        with self._together("set a shard of a parameter", handle, state) as everyone:
            everyone.settle(lambda: check_values(handle.name, values, (rows * numel,), handle.shape))
        for row, mine in zip(handle.rows, values.reshape(rows, numel), strict=True):
            super().write_local(row, state, mine)

    def use_in(self, module: nn.Module, handle: ParamHandle) -> None:
        """Binds the parameter's unit also whenever `module` runs."""
        if isinstance(handle, StackHandle):
            raise UsageError(
                f"{handle.name} cannot be registered with another module, since each of its experts is paged by "
                'itself; set "experts": "whole" in the "offload" block'
            )
        super().use_in(module, handle)

    def _shape(self, handle: ParamHandle) -> tuple[int, ...]:
        return handle.shape

    def _numel(self, handle: ParamHandle) -> int:
        return handle.parameter.numel()


def _joined(read: Callable[..., torch.Tensor | None], handle: ParamHandle, what: Any) -> torch.Tensor | None:
    """Returns what `read` gives for a parameter; for a stack, the results for its rows joined.

    Args:
        read: reads one parameter.
        handle: the parameter.
        what: the second argument of `read`.
    """
    if not isinstance(handle, StackHandle):
        return read(handle, what)
    rows = [read(row, what) for row in handle.rows]
    first = next((row for row in rows if row is not None), None)
    if first is None:
        return None
    return torch.stack([torch.zeros_like(first) if row is None else row for row in rows])


def _flat(values: torch.Tensor | None) -> torch.Tensor | None:
    """Returns values as one dimension."""
    return None if values is None else values.view(-1)
