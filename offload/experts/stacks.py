"""Stacked parameters whose rows are units of their own: the model and the user still see one parameter.

A stack is a parameter in parts (`engine/parts.py`). While a module runs, `stack[expert]` gives the row's parameter,
whose unit is then on the device; any other use of the stack, such as a product over all experts, gives all rows joined.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.callbacks import Extension
from offload.engine.gradients import GradientAccumulator
from offload.engine.params import ParamHandle
from offload.engine.parts import PartsForm, composed_handle, parts_of
from offload.interrupts import uninterrupted
from offload.layout.experts import LOOP, is_parameter_adapter
from offload.layout.flat_layout import UnitLayout
from offload.swapper.pager import Pager
from offload.torch_internals import outside_of_compiled_code, plain_tensors

# -- rows ----------------------------------------------------------------------------------------------


class StackedRows(PartsForm):
    """The form of a stacked parameter: each of its rows is a parameter of its own, in a unit of its own."""

    parts_words, key = "experts", "experts"

    def __init__(self, rows: Sequence[ParamHandle], experts: Collection[int]) -> None:
        """Joins rows.

        `experts` are the units of all experts of the model. In a module the unit of one expert makes room for the next.
        """
        super().__init__(rows)
        self._experts = experts

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the rows as one tensor."""
        return torch.stack(list(values))

    def divide(self, values: torch.Tensor) -> Iterable[torch.Tensor]:
        """Returns the rows of a tensor."""
        return values

    def item(self, handle: ParamHandle, index: Any) -> torch.Tensor | None:
        """Returns one row, on the device until the next row is requested; None unless a module or a backward runs.

        For an index that is no integer the result is None.
        """
        if isinstance(index, torch.Tensor):
            if index.ndim or index.is_floating_point() or index.dtype is torch.bool:
                return None
            index = int(index)
        if type(index) is not int:
            return None
        row = self.parts(handle)[index]
        if not handle.engine.hooks.turn_to(row.unit, self._experts):
            return None
        if not row.materialized:  # frozen, in a recomputation
            return row.engine.unit_views.frozen_view(row.unit, row.position)
        parameter = row.parameter
        with plain_tensors():  # the stack is a placeholder, which would dispatch to a rule
            trains = handle.parameter.requires_grad
        if parameter.requires_grad is not trains:
            parameter.requires_grad_(trains)
        return parameter


def stack_handles(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    handles: Sequence[Sequence[ParamHandle]],
    experts: Mapping[str, range],
) -> list[ParamHandle]:
    """Returns a handle for each parameter whose rows are units, and makes it a placeholder.

    `experts` contains the units of each module whose experts are units.
    """
    units = frozenset(unit for of_module in experts.values() for unit in of_module)
    rows = {name: parts for name, parts in parts_of(layouts, handles).items() if parts[0].unit in units}
    return [
        composed_handle(model, name, StackedRows(parts, units), (len(parts), *parts[0].shape))
        for name, parts in rows.items()
    ]


# -- gradients of zeros ----------------------------------------------------------------------------------
#
# In torch a stacked parameter has one gradient, which is zero in the rows of experts that no token visited: their
# moments fade, and their weights move by momentum and decay. A row that is a unit then receives no gradient. Here such
# a row gets a gradient of zeros, if another row of its parameter has a gradient on any rank.


class ZeroGradients:
    """The trainable rows of all stacked parameters of one engine. Belongs to the thread that calls `step()`."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        trainable: Sequence[range],
        gradients: GradientAccumulator,
        device: torch.device,
    ) -> None:
        """Finds the rows. This rank updates the elements `trainable` of each unit; gradients arrive on `device`."""
        self._layouts, self._trainable, self._gradients, self._device = layouts, trainable, gradients, device
        self._rows: dict[str, list[tuple[int, int]]] = {}
        """Unit and position of each row of a parameter, by the parameter's name."""
        for unit, layout in enumerate(layouts):
            for position, segment in enumerate(layout.segments):
                if segment.stack and segment.rows is None and segment.trainable and segment.numel:
                    self._rows.setdefault(segment.stack, []).append((unit, position))

    def add(self, present: Sequence[set[int]]) -> None:
        """Adds zeros for each row without a gradient if another row of its parameter has one. No backward may run.

        Args:
            present: for each unit the segments that have a gradient on any rank; segments that receive zeros are added.
        """
        for rows in self._rows.values():
            missing = [(unit, position) for unit, position in rows if position not in present[unit]]
            if len(missing) == len(rows):
                continue
            for unit, position in missing:
                present[unit].add(position)
                segment, own = self._layouts[unit].segments[position], self._trainable[unit]
                start, stop = max(segment.start, own.start), min(segment.stop, own.stop)
                if start >= stop:
                    continue  # other ranks have the row
                # An update of the unit's other parameters may have begun: it lacks this one.
                self._gradients.completion.changed(unit)
                zeros = torch.zeros(stop - start, dtype=self._gradients.dtypes.values, device=self._device)
                self._gradients.put(unit, position, start - segment.start, zeros)
        if self._rows:
            self._gradients.receive_totals()


# -- implementation ------------------------------------------------------------------------------------
#
# Setting of the modules of transformers whose experts are units: the loop that takes one expert after the other.


def take_one_by_one(module: nn.Module) -> Callable[[], None]:
    """Makes the forward of a module of stacked experts use one expert after the other, instead of all at once.

    The module gets a config of its own, since other models may share its present config. The returned function gives
    the module its config back.
    """
    theirs: Any = getattr(module, "config", None)
    if getattr(theirs, "_experts_implementation", LOOP) == LOOP:
        return lambda: None
    own = copy.deepcopy(theirs)
    own._experts_implementation = LOOP
    module.config = own
    return lambda: setattr(module, "config", theirs)


# -- the experts of a model ------------------------------------------------------------------------------
#
# The experts that a forward will use are known once the router has chosen: they are fetched ahead, in their order.


class StackedExperts(Extension):
    """The modules of stacked experts: loops over experts, for which the router's choice is fetched ahead."""

    def __init__(
        self, model: nn.Module, experts: Mapping[str, range], pager: Pager, zeros: ZeroGradients | None
    ) -> None:
        """Hooks the modules, which are sites of the engine already, and makes their forwards loops over experts.

        `experts` contains the units of each module whose experts are units, expert by expert. `zeros` makes gradients
        of experts without a token; None if these are not updated.
        """
        self._pager, self._zeros = pager, zeros
        self._undo: list[Callable[[], None]] = []
        for name, units in experts.items():
            module = model.get_submodule(name)
            self._undo += [self._hook(module, units), take_one_by_one(module)]

    def add_gradients(self, present: Sequence[set[int]]) -> None:
        """Adds gradients of zeros for experts without a token, unless those are not updated."""
        if self._zeros is not None:
            self._zeros.add(present)

    def remove(self) -> None:
        """Removes the hooks, and restores the modules' own configs."""
        while self._undo:
            self._undo.pop()()

    def _hook(self, module: nn.Module, units: range) -> Callable[[], None]:
        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                self._expect(units, (*args, *kwargs.values()))

        return module.register_forward_pre_hook(outside_of_compiled_code(before), with_kwargs=True).remove

    @uninterrupted
    def _expect(self, units: range, values: tuple[Any, ...]) -> None:
        """Passes the experts that a forward with these arguments uses to the pager."""
        choice = next((value for value in values if _is_choice(value)), None)
        if choice is None:
            return
        # Sorted, as the loop over them goes; a number that is no expert stands for a token without one.
        chosen = [units[number] for number in choice.unique().tolist() if 0 <= number < len(units)]
        with self._pager.lock:
            self._pager.table.access_order.expect(chosen, units)
        self._pager.prefetch()


def _is_choice(value: Any) -> bool:
    """Returns True for the router's choice: the argument that contains whole numbers."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


# -- adapters of whole parameters ------------------------------------------------------------------------
#
# Adapters of peft that target whole parameters, such as stacks of experts (`target_parameters`). In each forward peft
# registers a parametrization of the parameter, where torch calls `parameter.set_(parameter)`. No byte changes, but
# torch counts a change in place.


class TargetedParameters(Extension):
    """Modules with parameters that adapters target: changes by peft before a forward do not count."""

    def __init__(self, model: nn.Module, handles: Iterable[Iterable[ParamHandle]]) -> None:
        """Hooks the modules; `handles` are the parameters of each unit."""
        self._removers: list[Callable[[], None]] = []
        known = {id(handle.parameter): handle for unit in handles for handle in unit}
        wrappers: list[Any] = [module for module in model.modules() if is_parameter_adapter(module)]
        for wrapper in wrappers:
            module = wrapper.get_base_layer()
            handle = known.get(id(getattr(module, wrapper.parameter_name)))
            if handle is not None:
                self._hook(module, handle)

    def _hook(self, module: nn.Module, handle: ParamHandle) -> None:
        def before(called: nn.Module, args: tuple[Any, ...]) -> None:
            if called is module:
                handle.forgive_changes()

        self._removers.append(module.register_forward_pre_hook(outside_of_compiled_code(before)).remove)

    def remove(self) -> None:
        """Removes the hooks."""
        while self._removers:
            self._removers.pop()()
