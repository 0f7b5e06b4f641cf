"""Reads and edits weights between steps: state dicts, copies, EMA, `load_state_dict`, `offload.gathered`.

`access` reads the other states of a parameter. `WeightEdits` edits them too.

A copy that is read is ordinary memory. An edit is an update without a gradient: it waits for the previous step, passes
through the update worker to the slot that the last commit does not name, and is committed with the next step, or when
the engine is destroyed. Edits of one unit are collected and written together, when another unit is edited or the engine
is called.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from offload.engine._native import handle_of
from offload.engine.callbacks import Edit, EngineCallbacks
from offload.engine.hooks import ModuleHooks
from offload.engine.params import ParamHandle
from offload.engine.unit_views import UnitViews
from offload.errors import BudgetError, UsageError
from offload.interrupts import uninterrupted
from offload.layout.flat_layout import UnitLayout
from offload.sizes import GIB, format_size
from offload.states import State
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.pager import Pager
from offload.torch_internals import first_state_dict_hook

_MOST_GATHERED = GIB
"""Bytes of pending edits above which the next edit writes them first.

A fixed number, so that all ranks write at the same point of the program.
"""


class WeightEdits:
    """The owner of a model's placeholders. Only the thread that runs the model calls it."""

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[UnitLayout],
        handles: Sequence[Sequence[ParamHandle]],
        pager: Pager,
        hooks: ModuleHooks,
        unit_views: UnitViews,
        dtypes: Sequence[torch.dtype],
        trains: bool,
        several_ranks: bool,
        callbacks: EngineCallbacks,
        composed: Sequence[ParamHandle] = (),
        coded: Sequence[range] = (),
    ) -> None:
        """Hooks the state dicts of `model` and becomes the owner of its parameters.

        If `trains` is False, every edit is refused. If `several_ranks`, other ranks must take part in every edit. The
        parts of the parameters `composed` are among `handles`. `coded` contains the elements of each unit that ranks
        gather as codes; empty if there are none.
        """
        self.pager, self._layouts, self._handles, self.hooks, self._dtypes = pager, layouts, handles, hooks, dtypes
        self._served = [*(handle for unit in handles for handle in unit), *composed]
        self._handle_of = {id(handle.parameter): handle for handle in self._served}
        self._pending: dict[tuple[int, State], torch.Tensor] = {}  # (position, state) -> values
        self._pending_unit = -1
        self._copies: weakref.WeakValueDictionary[tuple[int, int, int], torch.Tensor] = weakref.WeakValueDictionary()
        self.unit_views, self._trains, self._several_ranks = unit_views, trains, several_ranks
        self._callbacks, self._coded = callbacks, coded
        self._without_frozen = False
        """True inside of `leaving_out_frozen`."""
        self._removers: list[Callable[[], None]] = [
            # Functions, not methods: a deep copy of the model copies its hooks, and with a method this object as well.
            model.register_state_dict_pre_hook(lambda model, *_: self._check_room(model)).remove,
            model.register_load_state_dict_post_hook(lambda *_: self.flush()).remove,
        ]

        def replace(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            self._replace(module, state, prefix)

        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                # Runs before the model's own hooks, which may rename entries and compute with them.
                self._removers.append(first_state_dict_hook(module, replace).remove)
                self._removers.append(module.register_load_state_dict_pre_hook(_refuse_assign).remove)
        for handle in self._served:
            handle.attach(self)

    def remove(self) -> None:
        """Removes the hooks. Placeholders then have no owner and no weights."""
        for remover in self._removers:
            remover()
        for handle in self._served:
            handle.detach()

    # -- requests of placeholders -------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self, units: Sequence[int]) -> Iterator[None]:
        """Holds `units` while the context is open. Does nothing outside of a forward or a backward, or without room."""
        fetched: list[int] = []
        try:
            try:
                for unit in units if self.hooks.runs_now() else ():
                    self.unit_views.use(unit)
                    fetched.append(unit)
            except BudgetError:  # each module then fetches its own unit, and one that has no room raises again
                while fetched:
                    self.unit_views.release_unit(fetched.pop())
            yield
        finally:
            while fetched:
                self.unit_views.release_unit(fetched.pop())

    def on_gathered(self, parameters: Set[int]) -> AbstractContextManager[None]:
        """Returns a context that lets the model run on gathered memory, if `parameters` (ids) are all its parameters.

        A parameter in parts, or in another library's bytes, cannot have gathered memory.
        """
        complete = parameters >= self._handle_of.keys()
        return self.hooks.resting() if complete else contextlib.nullcontext()

    def miss_gradient(self, name: str) -> None:
        """Records that user code has read `.grad` of the parameter `name`, which is None."""
        self._callbacks.report_missed_gradient(name)

    def read(self, unit: int, position: int) -> torch.Tensor:
        """Returns a copy of the newest weights of one parameter, on the compute device. Pending edits are included."""
        self._callbacks.enter_weights()
        segment = self._layouts[unit].segments[position]
        if self.waits(unit, position, State.WEIGHT):
            values = self._pending[position, State.WEIGHT]
            if values.dtype == self._dtypes[unit]:
                return values.to(self._handles[unit][position].device, copy=True).view(segment.shape)
            self.flush()
        if self._layouts[unit].ep_size > 1 or (self._coded and segment.start in self._coded[unit]):
            # The device may hold the experts of this rank alone. Or it holds values decoded from codes, which must
            # neither be saved nor written back as an edit.
            return self._callbacks.read_stored(self._handles[unit][position].parameter)
        start = self._layouts[unit].device_starts[position]
        # Cloned inside of the callback: the pager's memory is valid only until the callback returns.
        copies: list[torch.Tensor] = []

        def receive(memory: torch.Tensor) -> None:
            values = memory.view(self._dtypes[unit])[start : start + segment.value_numel]
            copies.append(values.detach().clone().view(segment.shape))

        self.pager.read_weights(unit, receive)
        return copies[0]

    def read_view(self, unit: int, geometry: torch.Tensor) -> torch.Tensor:
        """Returns elements of a unit with the shape, strides, dtype and offset of `geometry`, on the compute device.

        While a forward or a backward runs, the result is a view, which pins the unit as long as the view lives.
        Otherwise the result is a copy.
        """
        if self.hooks.runs_now():
            return self.unit_views.view(handle_of(unit, self.pager.updates(unit), geometry))
        self._callbacks.enter_weights()
        copies: list[torch.Tensor] = []

        def receive(memory: torch.Tensor) -> None:
            values = memory.detach().view(geometry.dtype)
            start = values.storage_offset() + geometry.storage_offset()
            copies.append(values.as_strided(geometry.size(), geometry.stride(), start).clone())

        self.pager.read_weights(unit, receive)  # as in `read`
        return copies[0]

    def waits(self, unit: int, position: int, state: State) -> bool:
        """Returns True if an edit of this state of a parameter is pending."""
        return self._pending_unit == unit and (position, state) in self._pending

    @uninterrupted
    def edit(self, unit: int, position: int, values: torch.Tensor, state: State = State.WEIGHT) -> None:
        """Replaces the weights of one parameter, or another state of it that outlives a step, by a copy of `values`.

        `values` has the parameter's shape, any dtype and any device. Raises `UsageError` if the parameter is frozen and
        the values differ from its weights, or if a view of weights is alive when pending edits must be written.
        """
        self._callbacks.enter_weights()
        handle = self._handles[unit][position]
        values = values.detach()
        if not handle.trainable or not self._trains:
            # Equal values are allowed, since `load_state_dict` writes every parameter.
            if not torch.equal(self.read(unit, position), values.to(handle.device, self._dtypes[unit])):
                raise UsageError(
                    f"parameter {handle.name} is frozen: its weights are stored once and never written again; change "
                    "them before offload.initialize"
                )
            return
        own = values.dtype == self._dtypes[unit] and state is State.WEIGHT
        dtype = values.dtype if own else torch.float32
        waiting = self._pending.get((position, state))
        # An edit in 16 bits keeps the low bits of the master. If a pending fp32 edit defines them, flush that first.
        coarser = dtype is not torch.float32 and waiting is not None and waiting.dtype is torch.float32
        gathered = sum(pending.nbytes for pending in self._pending.values())
        if self._pending_unit != unit or gathered > _MOST_GATHERED or coarser:
            self.flush()
            self.unit_views.settle()
        self._pending[position, state] = values.to("cpu", dtype, copy=True).contiguous().view(-1)
        self._pending_unit = unit

    def end_edits(self, unit: int) -> None:
        """Ends the edits of `unit` on several ranks. All ranks apply the edits of the lowest rank that has edits."""
        if not self._several_ranks or not self._trains:
            return
        # A rank without edits of this unit still takes part in the edits of other ranks.
        if self._pending_unit != unit:
            self.flush()
            self._callbacks.apply_edits(unit, [])
        self.flush()

    def updates(self, unit: int) -> int:
        """Returns the number of times that the weights of `unit` have changed."""
        return self.pager.updates(unit)

    @uninterrupted
    def flush(self) -> None:
        """Applies the pending edits."""
        if not self._pending:
            return
        unit, pending = self._pending_unit, self._pending
        segments = self._layouts[unit].segments
        edits = [
            Edit(
                start=segments[position].start,
                stop=segments[position].stop,
                values=pending[position, state],
                state=state,
            )
            for position, state in sorted(pending, key=lambda key: (key[0], key[1].value))
        ]
        self._callbacks.apply_edits(unit, [edit for edit in edits if edit.start < edit.stop])
        self._pending, self._pending_unit = {}, -1  # last, so that edits refused by an exception stay pending

    # -- state dicts --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def leaving_out_frozen(self) -> Iterator[None]:
        """Leaves frozen parameters out of the state dicts that are made inside of the context."""
        self._without_frozen = True
        try:
            yield
        finally:
            self._without_frozen = False

    def weight(self, unit: int, position: int) -> torch.Tensor:
        """Returns a CPU copy of one parameter, in the mode's dtype.

        Returns the same tensor as long as somebody holds it, so the copies of a tied parameter are tied, as in an
        ordinary model.
        """
        if not self.hooks.running:
            self.flush()
        key = (unit, position, self.pager.updates(unit))
        copy = self._copies.get(key)
        # A nonzero version means that the user has changed the copy in place: it no longer shows the weights. Owned
        # experts are read by all ranks together, of which others may hold no copy.
        if copy is None or copy._version or self._layouts[unit].ep_size > 1:
            copy = self.read(unit, position).to("cpu")
            self._copies[key] = copy
        return copy

    def _replace(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            handle = self.handle(parameter)
            if handle is None:
                continue
            for key in handle.form.saved_keys(handle, state, prefix, name):
                if self._without_frozen and not parameter.requires_grad:
                    del state[key]
                elif not handle.gathered:
                    state[key] = handle.form.saved(handle, state[key], functools.partial(self._copy_of, handle))

    def _copy_of(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a CPU copy of a parameter, which is the same tensor as long as somebody holds it, as in `weight`."""
        if handle.unit >= 0:  # one segment, which is all of it
            return self.weight(handle.unit, handle.position)
        if not self.hooks.running:
            self.flush()
        # No count ever falls, so their sum names the weights of all parts.
        key = (-1, id(handle), sum(self.pager.updates(part.unit) for part in handle.parts))
        copy = self._copies.get(key)
        if copy is None or copy._version or self._layouts[handle.parts[0].unit].ep_size > 1:
            copy = handle.form.join([self.weight(part.unit, part.position) for part in handle.parts])
            self._copies[key] = copy
        return copy

    def handle(self, parameter: Any) -> ParamHandle | None:
        """Returns the handle of `parameter`, also while materialized; None for a parameter of a copy of the model."""
        return self._handle_of.get(id(parameter))

    def _check_room(self, model: nn.Module) -> None:
        if not any(self.handle(parameter) for parameter in model.parameters()):
            return  # the parameters are replaced by stand-ins without values
        parameters = (handle.parameter for unit in self._handles for handle in unit)
        wanted = (p for p in parameters if p.requires_grad or not self._without_frozen)
        need = sum(parameter.numel() * parameter.dtype.itemsize for parameter in wanted)
        free = free_host_memory()
        if need > free:
            raise BudgetError(
                f"state_dict() of this model takes {format_size(need)} of RAM, {format_size(free)} is free; call "
                "engine.save_pretrained(folder), which writes a few megabytes at a time, or state_dict() of one "
                "submodule after the other"
            )


def _refuse_assign(module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise UsageError(
            "load_state_dict(assign=True) would put other parameters into the model, which the engine does not "
            "manage; leave assign out: values are copied into the swap tiers"
        )
