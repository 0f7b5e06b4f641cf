"""Parameters in parts: segments of several units, which the model and the user see as one parameter.

The parameter of the model is always a placeholder. Each part has a parameter of its own, outside of the model, with a
handle like any other. Between steps a read joins the parts, and an edit divides its values among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.engine.params import ParamHandle, StorageForm
from offload.errors import BudgetError, UsageError
from offload.layout.flat_layout import UnitLayout
from offload.torch_internals import plain_tensors


class PartsForm(StorageForm):
    """The form of a parameter whose parts are parameters of their own. Subclasses join and divide the parts."""

    parts_words = ""
    """What the parts are, for messages, such as "experts"."""
    key = ""
    """Key of the "offload" block with which the parameter is whole."""

    def __init__(self, parts: Sequence[ParamHandle]) -> None:
        """Joins parts, in their order."""
        self._parts = tuple(parts)
        self.first = self._parts[0]

    def parts(self, handle: ParamHandle) -> Sequence[ParamHandle]:
        return self._parts

    def follow(self, handle: ParamHandle) -> bool:
        """Makes each part train if the parameter does, and returns True if it does."""
        with plain_tensors():  # the parameter is a placeholder, which would dispatch to a rule
            trains = handle.parameter.requires_grad
            for part in self._parts:
                if part.parameter.requires_grad is not trains:
                    part.parameter.requires_grad_(trains)
        return trains

    def here(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns all parts as one tensor with their graph, if a module or a backward runs; None otherwise.

        Raises `BudgetError` if they do not fit on the device together.
        """
        tensors = [values for part in self._parts if (values := part.here()) is not None]
        if len(tensors) < len(self._parts):
            return None
        for part, values in zip(self._parts, tensors, strict=True):
            # A view of a frozen one pins its unit.
            if values is part.parameter and not part.materialized:
                raise BudgetError(
                    f"all {self.parts_words} of {handle.name} are used at once, and they do not fit on the device "
                    'together; raise "device_memory" in the "offload" block, or use an implementation that takes them '
                    "one by one"
                )
        self.follow(handle)
        return self.join(tensors)

    def fetch(self, handle: ParamHandle, stays: bool) -> bool:
        """Returns False if neither a module nor a backward runs. The parameter has no memory that could be fetched.

        Raises `UsageError` if a module or a backward runs.
        """
        if handle.engine.hooks.runs_now():
            raise UsageError(
                f"the memory of {handle.name} was asked for, or changed, while the model runs, but its "
                f'{self.parts_words} are paged one by one; set "{self.key}": "whole" in the "offload" block'
            )
        return False

    def read(self, handle: ParamHandle) -> torch.Tensor:
        return self.join([part.read() for part in self._parts])

    def edit(self, handle: ParamHandle, values: torch.Tensor) -> None:
        """Replaces the weights of all parts by `values`, which must have the parameter's shape.

        Raises `UsageError` if a module or a backward runs.
        """
        handle.fetch()
        for part, part_values in zip(self._parts, self.divide(values), strict=True):
            part.edit(part_values)

    def unit_for_others(self, handle: ParamHandle) -> int:
        """Raises `UsageError`: a module that does not own the parameter cannot name the parts that it will use."""
        raise UsageError(
            f"{handle.name} cannot be registered with another module, since its {self.parts_words} are paged one by "
            f'one; set "{self.key}": "whole" in the "offload" block'
        )


def parts_of(layouts: Sequence[UnitLayout], handles: Sequence[Sequence[ParamHandle]]) -> dict[str, list[ParamHandle]]:
    """Returns the handles of the parts of each parameter in parts, in their order, by the parameter's name."""
    parts: dict[str, list[ParamHandle]] = {}
    # Units of the parts of a parameter come one after the other, so that the parts come in their order.
    for layout, unit_handles in zip(layouts, handles, strict=True):
        for segment, handle in zip(layout.segments, unit_handles, strict=True):
            if segment.stack:
                parts.setdefault(segment.stack, []).append(handle)
    return parts


def composed_handle(model: nn.Module, name: str, form: PartsForm, shape: tuple[int, ...]) -> ParamHandle:
    """Returns the handle of a parameter in parts, and makes the parameter a placeholder."""
    handle = ParamHandle(
        parameter=model.get_parameter(name),
        name=name,
        form=form,
        unit=-1,
        position=-1,
        dtype=form.first.dtype,
        shape=shape,
        device=form.first.device,
    )
    ParamHandle.release([handle])
    return handle
