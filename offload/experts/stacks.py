"""Stacked parameters whose experts, or groups of them, are units: the model and the user still see one parameter.

A stack is a parameter in parts (`engine/parts.py`). While a module runs, `stack[expert]` gives the expert's row, whose
unit is then on the device; any other use of the stack, such as a product over all experts, gives all rows joined.

The modules of transformers go from part to part by another implementation: the loop over experts, or `by_group`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.distributed.process_group import Ranks
from offload.engine.callbacks import Extension
from offload.engine.gradients import GradientAccumulator
from offload.engine.params import ParamHandle, handle_of
from offload.engine.parts import PartsForm, composed_handle, parts_of
from offload.errors import UsageError
from offload.experts.exchange import exchange_tokens
from offload.interrupts import uninterrupted
from offload.layout.experts import (
    LOOP,
    is_parameter_adapter,
    makes_grouped_products,
    multiplies_by_part,
    parameter_adapters,
)
from offload.layout.flat_layout import UnitLayout
from offload.swapper.pager import Pager
from offload.torch_internals import inside_backward, outside_of_compiled_code, plain_tensors

# -- rows ----------------------------------------------------------------------------------------------


class StackedRows(PartsForm):
    """The form of a stacked parameter: each row, or each group of rows, is a parameter, in a unit of its own."""

    parts_words, key = "experts", "experts"

    def __init__(
        self,
        parts: Sequence[ParamHandle],
        experts: Collection[int],
        size: int | None,
        owners: Ranks,
        adapters: Sequence[SplitAdapter] = (),
    ) -> None:
        """Joins rows, or groups of `size` rows, to whose products `adapters` add theirs.

        `experts` are the units of all experts of the model. In a module the unit of one part makes room for the next.
        `owners` are the ranks that own one group each; one rank if all ranks divide each part.
        """
        super().__init__(parts)
        self._experts, self._size, self.owners, self.adapters = experts, size, owners, adapters

    def here(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns all parts as one tensor, as `PartsForm.here`; raises `UsageError` where other ranks own some."""
        if self.owners.size > 1 and handle.engine.hooks.runs_now():
            raise self._owned(handle)
        return super().here(handle)

    def leaves(self, handle: ParamHandle) -> list[torch.Tensor]:
        """Returns copies of the parts; raises `UsageError` where other ranks own some."""
        if self.owners.size > 1:
            raise self._owned(handle)
        return super().leaves(handle)

    def _owned(self, handle: ParamHandle) -> UsageError:
        return UsageError(
            f"experts of {handle.name} that other ranks own are used while the model runs, or with their gradients, "
            f"and each rank owns {self._size} of {handle.shape[0]}: leave expert_parallel out, or read them between "
            "steps under torch.no_grad()"
        )

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(values)) if self._size is None else torch.cat(list(values))

    def divide(self, values: torch.Tensor) -> Iterable[torch.Tensor]:
        return values if self._size is None else values.split(self._size)

    def item(self, handle: ParamHandle, index: Any) -> torch.Tensor | None:
        """Returns one row, on the device until the next part is requested; None unless a module or a backward runs.

        For an index that is no integer the result is None.
        """
        if isinstance(index, torch.Tensor):
            if index.ndim or index.is_floating_point() or index.dtype is torch.bool:
                return None
            index = int(index)
        if type(index) is not int:
            return None
        if self._size is None:
            return self.part(handle, index)
        values = self.part(handle, index % handle.shape[0] // self._size)
        return None if values is None else values[index % self._size]

    def part(self, handle: ParamHandle, number: int) -> torch.Tensor | None:
        """Returns a part, on the device until the next one is requested; None unless a module or a backward runs."""
        if self.owners.size > 1 and number != self.owners.rank:
            raise self._owned(handle)
        part = self.parts(handle)[number]
        if not handle.engine.hooks.turn_to(part.unit, self._experts):
            return None
        if not part.materialized:  # frozen, in a recomputation
            return part.engine.unit_views.frozen_view(part.unit, part.position)
        parameter = part.parameter
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
    owners: Ranks,
) -> list[ParamHandle]:
    """Returns a handle for each parameter whose rows are units, and makes it a placeholder.

    `experts` contains the units of each module whose experts, or groups of them, are units. `owners` as in
    `StackedRows`.
    """
    units = frozenset(unit for of_module in experts.values() for unit in of_module)
    composed = []
    for name, parts in parts_of(layouts, handles).items():
        if (first := parts[0]).unit in units:
            rows = layouts[first.unit].segments[first.position].rows
            size = None if rows is None else len(rows)
            shape = (len(parts), *first.shape) if size is None else (len(parts) * size, *first.shape[1:])
            module, _, own = name.rpartition(".")
            targeting = [wrapper for wrapper in parameter_adapters(model, module) if wrapper.parameter_name == own]
            adapters = list(map(SplitAdapter, targeting))
            composed.append(composed_handle(model, name, StackedRows(parts, units, size, owners, adapters), shape))
    return composed


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
        experts: Mapping[str, range],
    ) -> None:
        """Finds the parts. This rank updates the elements `trainable` of each unit; gradients arrive on `device`.

        `experts` contains the units of each module whose experts, or groups of them, are units.
        """
        self._layouts, self._trainable, self._gradients, self._device = layouts, trainable, gradients, device
        self._rows: dict[str, list[tuple[int, int]]] = {}
        """Unit and position of each part of a parameter, by the parameter's name."""
        for unit in (unit for of_module in experts.values() for unit in of_module):
            for position, segment in enumerate(layouts[unit].segments):
                if segment.trainable and segment.numel:
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
                self._gradients.put(unit, position, start - segment.start, zeros, complete=True)
        if self._rows:
            self._gradients.receive_totals()


# -- implementation ------------------------------------------------------------------------------------
#
# How the modules of transformers compute: by a loop over experts, or by grouped products of one group after the other.


_BY_GROUP = "offload_by_group"
"""Name under which transformers finds `by_group`."""


def use_implementation(module: nn.Module, by_part: bool) -> Callable[[], None]:
    """Makes the forward of a module of stacked experts use one part after the other, instead of all at once.

    The module gets a config of its own, since other models may share its present config. The returned function gives
    the module its config back. With `by_part` the code is `by_group`, else the loop over experts.
    """
    theirs: Any = getattr(module, "config", None)
    if by_part:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # late: other models need no transformers

        ALL_EXPERTS_FUNCTIONS.register(_BY_GROUP, by_group)
    elif getattr(theirs, "_experts_implementation", LOOP) == LOOP:
        return lambda: None
    own = copy.deepcopy(theirs)
    own._experts_implementation = _BY_GROUP if by_part else LOOP
    module.config = own
    return lambda: setattr(module, "config", theirs)


def by_group(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Returns what transformers' grouped products return, with one group of experts after the other on the device.

    Tokens are sorted by expert once, so that each group computes consecutive rows. All sums are those of
    `grouped_mm_experts_forward`, in the same order. A group without a token is not used. If ranks own the groups,
    tokens travel to the ranks of their experts, and each rank uses its group.

    Args:
        module: a module of stacked experts whose groups are units.
        hidden_states: (tokens, features).
        top_k_index: (tokens, k), the experts of each token; the number of experts stands for none.
        top_k_weights: (tokens, k).
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    first, down = _part_of(module, "gate_up_proj" if module.has_gate else "up_proj"), _part_of(module, "down_proj")
    if first is None or down is None:  # a copy of the model, which has weights of its own
        at_once: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return at_once
    compute = functools.partial(_by_group, module, first, down)
    assert isinstance(first.weight.form, StackedRows)
    owners = first.weight.form.owners
    if owners.size == 1:
        return compute(hidden_states, top_k_index, top_k_weights)
    size = module.num_experts // owners.size
    own = range(owners.rank * size, (owners.rank + 1) * size)
    output = exchange_tokens(compute, hidden_states, top_k_index, top_k_weights, own, owners.size, owners.route)
    return output.to(hidden_states.dtype)


def _by_group(
    module: Any,
    first: _Projection,
    down: _Projection,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Returns what `by_group` returns, on this rank; `first` and `down` are the projections of the module."""
    count = top_k_index.size(-1)
    experts, order = torch.sort(top_k_index.reshape(-1))
    tokens = torch.bincount(experts, minlength=module.num_experts)[: module.num_experts]
    # Each group's ends of its experts, counted from the group's first row.
    ends = tokens.view(first.groups, -1).cumsum(1, dtype=torch.int32)
    sizes = ends[:, -1].tolist()
    rows = hidden_states[order // count]
    outputs = []
    for group, (inputs, of_rows) in enumerate(
        zip(rows[: sum(sizes)].split(sizes), experts[: sum(sizes)].split(sizes), strict=True)
    ):
        if len(inputs):
            of_rows = of_rows - group * (module.num_experts // first.groups)
            inner = first.product(group, inputs, ends[group], of_rows)
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            outputs.append(down.product(group, inner, ends[group], of_rows))
    if sum(sizes) < len(rows):  # choices of no expert come last
        outputs.append(rows.new_zeros(len(rows) - sum(sizes), hidden_states.size(-1)))
    if not outputs:
        return torch.zeros_like(hidden_states)
    weighted = torch.cat(outputs) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    summed = weighted[place].view(len(hidden_states), count, -1).sum(dim=1)
    return summed.to(hidden_states.dtype)


class _Projection(NamedTuple):
    """A projection of all experts of a module."""

    weight: ParamHandle
    bias: ParamHandle | None
    is_transposed: bool
    """True if each expert's matrix is (inputs, outputs)."""

    @property
    def groups(self) -> int:
        return len(self.weight.parts)

    def product(self, group: int, inputs: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns the products of a group's tokens, (tokens, outputs).

        Args:
            inputs: (tokens, inputs), sorted by expert.
            ends: (experts of the group,) int32, the end of each expert's tokens.
            experts: (tokens,), the expert of each token within the group.
        """
        bias = None if self.bias is None else _values(self.bias, group)[experts]
        weight = _values(self.weight, group)
        product = _grouped_products(inputs, weight, ends, bias, self.is_transposed)
        assert isinstance(self.weight.form, StackedRows)
        for adapter in self.weight.form.adapters:
            first = group * len(weight)
            product = adapter.add(product, inputs.to(weight.dtype), range(first, first + len(weight)), ends)
        return product


def _grouped_products(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Returns transformers' grouped products, or those of one expert after the other where torch makes none."""
    from transformers.integrations.moe import _grouped_linear

    if makes_grouped_products(weight.dtype, weight.device):
        product: torch.Tensor = _grouped_linear(inputs, weight, ends, bias, is_transposed)
        return product
    matrices = weight if is_transposed else weight.transpose(-2, -1)
    product = torch.ops.transformers.grouped_mm_fallback(inputs.to(weight.dtype), matrices, offs=ends)
    return product if bias is None else product + bias


def _part_of(module: Any, name: str) -> _Projection | None:
    """Returns a projection of a module; None if it is an ordinary parameter."""
    weight, bias = (handle_of(getattr(module, own, None)) for own in (name, f"{name}_bias"))
    return None if weight is None else _Projection(weight, bias if module.has_bias else None, module.is_transposed)


def _values(stack: ParamHandle, group: int) -> torch.Tensor:
    assert isinstance(stack.form, StackedRows)
    values = stack.form.part(stack, group)
    assert values is not None, "the hooks of the module make the engine run"
    return values if stack.form._size is not None else values.unsqueeze(0)  # one expert


# -- the experts of a model ------------------------------------------------------------------------------
#
# The experts that a forward will use are known once the router has chosen: they are fetched ahead, in their order.


class StackedExperts(Extension):
    """The modules of stacked experts: loops over experts or groups, for which the router's choice is fetched ahead."""

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[UnitLayout],
        experts: Mapping[str, range],
        pager: Pager,
        zeros: ZeroGradients | None,
    ) -> None:
        """Hooks the modules, which are sites of the engine already, and makes their forwards go from part to part.

        `experts` contains the units of each module whose experts, or groups of them, are units, in the experts' order.
        `zeros` makes gradients of experts without a token; None if these are not updated.
        """
        self._pager, self._zeros = pager, zeros
        self._undo: list[Callable[[], None]] = []
        for name, units in experts.items():
            module, rows = model.get_submodule(name), layouts[units[0]].segments[0].rows
            size = 1 if rows is None else len(rows)
            self._undo.append(use_implementation(module, multiplies_by_part(model, name, rows is not None)))
            if layouts[units[0]].ep_size == 1:  # else each forward uses the only unit
                self._undo.append(self._hook(module, units, size))
            for parameter in module.parameters(recurse=False):
                stack = handle_of(parameter)
                assert stack is not None and isinstance(stack.form, StackedRows)
                self._undo += [remove for adapter in stack.form.adapters for remove in adapter.hook()]

    def add_gradients(self, present: Sequence[set[int]]) -> None:
        """Adds gradients of zeros for experts without a token, unless those are not updated."""
        if self._zeros is not None:
            self._zeros.add(present)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _hook(self, module: nn.Module, units: range, size: int) -> Callable[[], None]:
        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                self._expect(units, size, (*args, *kwargs.values()))

        return module.register_forward_pre_hook(outside_of_compiled_code(before), with_kwargs=True).remove

    @uninterrupted
    def _expect(self, units: range, size: int, values: tuple[Any, ...]) -> None:
        """Passes the units, of `size` experts each, that a forward with these arguments uses to the pager."""
        choice = next((value for value in values if _is_choice(value)), None)
        if choice is None:
            return
        # Sorted, as the loop over them goes; a number that is no expert stands for a token without one.
        numbers = choice.div(size, rounding_mode="floor").unique().tolist()
        chosen = [units[number] for number in numbers if 0 <= number < len(units)]
        # In a recomputation the backward of these uses comes next: what it needs again must not leave for other blocks.
        with self._pager.lock:
            self._pager.table.access_order.expect(chosen, units, at_once=inside_backward())
        self._pager.prefetch()


def _is_choice(value: Any) -> bool:
    """Returns True for the router's choice: the argument that contains whole numbers."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


# -- adapters of groups -----------------------------------------------------------------------------------
#
# In each forward peft adds the product of an adapter's factors to the whole stack that it targets
# (`target_parameters`). Here a group adds the products of its tokens with the two factors instead, so no sum is made.


class SplitAdapter:
    """An adapter of peft for a stack whose groups are units."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._active: list[tuple[bool, list[str]]] = []
        """For each forward of the wrapper under way, whether it had been disabled, and the names that apply."""

    def hook(self) -> list[Callable[[], None]]:
        """Makes the wrapper call the module inside as it is, and `add` apply. The returned functions revert it."""
        wrapper, active = self._wrapper, self._active

        def before(called: Any, args: tuple[Any, ...]) -> None:
            if called is not wrapper:
                return
            off = called.disable_adapters or called.merged
            names = [] if off else [name for name in called.active_adapters if name in called.lora_A]
            active.append((called.disable_adapters, names))
            called._disable_adapters = called.disable_adapters or bool(names)

        def after(called: Any, args: tuple[Any, ...], output: Any) -> None:
            if called is wrapper and active:
                called._disable_adapters, _ = active.pop()

        return [
            wrapper.register_forward_pre_hook(outside_of_compiled_code(before)).remove,
            wrapper.register_forward_hook(outside_of_compiled_code(after), always_call=True).remove,
        ]

    def add(self, product: torch.Tensor, inputs: torch.Tensor, rows: range, ends: torch.Tensor) -> torch.Tensor:
        """Returns a product plus those of the adapters that apply, as `_Projection.product` takes them.

        `rows` are the experts of the group.
        """
        wrapper = self._wrapper
        for name in self._active[-1][1] if self._active else ():
            down, up, rank = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.r[name]
            # peft's factors of all experts are (experts * rank, inputs) and (outputs, rank * experts).
            down = down[rows.start * rank : rows.stop * rank].view(len(rows), rank, -1).to(inputs.dtype)
            up = up.view(len(up), rank, -1)[:, :, rows.start : rows.stop].permute(2, 0, 1).to(inputs.dtype)
            # Grouped products take rows of whole 16 bytes.
            padding = -rank % (16 // inputs.element_size())
            down, up = nn.functional.pad(down, (0, 0, 0, padding)), nn.functional.pad(up, (0, padding)).contiguous()
            inner = _grouped_products(inputs, down, ends)
            product = torch.add(product, _grouped_products(inner, up, ends), alpha=wrapper.scaling[name])
        return product


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
        while self._removers:
            self._removers.pop()()
