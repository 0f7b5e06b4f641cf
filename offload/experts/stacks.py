"""Stacked parameters whose rows are units of their own: the model and the user still see one parameter.

The parameter of the model is always a placeholder. Each row has a parameter of its own, outside of the model, with a
handle like any other. While a module runs, `stack[expert]` gives the row's parameter, whose unit is then on the device;
any other use of the stack, such as a product over all experts, gives all rows joined. Between steps a read joins the
rows, and an edit divides its values among them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.callbacks import Extension
from offload.engine.gradients import GradientAccumulator
from offload.engine.params import ParamHandle, StorageForm
from offload.errors import BudgetError, UsageError
from offload.interrupts import uninterrupted
from offload.layout.experts import LOOP, is_parameter_adapter
from offload.layout.flat_layout import UnitLayout
from offload.swapper.pager import Pager
from offload.torch_internals import outside_of_compiled_code, plain_tensors

# -- rows ----------------------------------------------------------------------------------------------


class StackedRows(StorageForm):
    """The form of a stacked parameter: each of its rows is a parameter of its own, in a unit of its own."""

    def __init__(self, rows: Sequence[ParamHandle], experts: Collection[int]) -> None:
        """Joins rows.

        `experts` are the units of all experts of the model. In a module the unit of one expert makes room for the next.
        """
        self._rows, self._experts = tuple(rows), experts

    def parts(self, handle: ParamHandle) -> Sequence[ParamHandle]:
        """Returns the handles of the rows."""
        return self._rows

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
        row = self._rows[index]
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

    def here(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns all rows as one tensor with their graph, if a module or a backward runs; None otherwise.

        Raises `BudgetError` if they do not fit on the device together.
        """
        tensors = [values for row in self._rows if (values := row.here()) is not None]
        if len(tensors) < len(self._rows):
            return None
        with plain_tensors():
            trains = handle.parameter.requires_grad
        for row, values in zip(self._rows, tensors, strict=True):
            if values is not row.parameter:  # a view of a frozen one, which pins its unit
                continue
            if not row.materialized:
                raise BudgetError(
                    f"all experts of {handle.name} are used at once, and they do not fit on the device together; raise "
                    '"device_memory" in the "offload" block, or use an implementation that takes them one by one'
                )
            row.parameter.requires_grad_(trains)
        return torch.stack(tensors)

    def fetch(self, handle: ParamHandle, stays: bool) -> bool:
        """Returns False if neither a module nor a backward runs. A stack has no memory that could be fetched.

        Raises `UsageError` if a module or a backward runs.
        """
        if handle.engine.hooks.runs_now():
            raise UsageError(
                f"the memory of {handle.name} was asked for, or changed, while the model runs, but each of its experts "
                'is paged by itself; set "experts": "whole" in the "offload" block'
            )
        return False

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy of the newest weights of all rows, on the compute device."""
        return torch.stack([row.read() for row in self._rows])

    def edit(self, handle: ParamHandle, values: torch.Tensor) -> None:
        """Replaces the weights of all rows by `values`, which must have the parameter's shape.

        Raises `UsageError` if a module or a backward runs.
        """
        handle.fetch()
        for row, row_values in zip(self._rows, values, strict=True):
            row.edit(row_values)

    def unit_for_others(self, handle: ParamHandle) -> int:
        """Raises `UsageError`: a module that does not own the stack cannot name the rows that it will use."""
        raise UsageError(
            f"{handle.name} cannot be registered with another module, since each of its experts is paged by "
            'itself; set "experts": "whole" in the "offload" block'
        )


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
    rows: dict[str, list[ParamHandle]] = {}
    # Experts of a stack are units one after the other, so that its rows come in their order.
    for layout, unit_handles in zip(layouts, handles, strict=True):
        for segment, handle in zip(layout.segments, unit_handles, strict=True):
            if segment.stack:
                rows.setdefault(segment.stack, []).append(handle)
    stacks = [
        ParamHandle(
            parameter=model.get_parameter(name),
            name=name,
            form=StackedRows(row_handles, units),
            unit=-1,
            position=-1,
            dtype=row_handles[0].dtype,
            shape=(len(row_handles), *row_handles[0].shape),
            device=row_handles[0].device,
        )
        for name, row_handles in rows.items()
    ]
    ParamHandle.release(stacks)
    return stacks


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
                if segment.stack and segment.trainable and segment.numel:
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
