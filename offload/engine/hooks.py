"""Hooks that put a unit's weights under its modules when they run, and take them away afterwards.

Between uses, a parameter is a NaN placeholder: right shape and dtype, four bytes, no memory of its own.

    forward    a site's pre-hook acquires its units and makes their parameters views of the device arena;
               its post-hook releases them, and a unit that nobody uses gets its placeholders back.
    backward   a view that autograd saved was packed as a handle; unpacking it *holds* the unit: acquires it
               until its last gradient is there, or autograd reaches the unit's input, or the backward ends.
               Inside a backward nothing else releases, so that a recomputed graph keeps what it saved.

[Note: saved tensors] Saved-tensor hooks replace the views that autograd would keep alive, and with them
torch's own check for in-place changes; so any other tensor is packed with its version, which is compared at
unpack. The hooks are pushed by the outermost site and popped by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.engine.gradients import Gradients
from offload.engine.layout import UnitLayout
from offload.errors import UsageError
from offload.swapper.pager import Pager

_NO_GRAPH_TASK = -1


class _Handle(NamedTuple):
    """A saved view of a slice: enough to make it again, wherever the unit then lies."""

    unit: int
    updates: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in bytes, within the unit


class _Saved(NamedTuple):
    """Any other saved tensor, detached (the graph must not hold itself), and its version."""

    tensor: torch.Tensor
    version: int


class _Placeholder(NamedTuple):
    """What a parameter is between its uses: one NaN, expanded to the parameter's shape."""

    parameter: nn.Parameter
    nan: torch.Tensor  # ()
    expanded: torch.Tensor


class _Unit:
    """What the hooks know of one unit."""

    def __init__(self, layout: UnitLayout, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.layout = layout
        self.parameters = parameters
        self.dtype = dtype
        self.uses = 0  # forwards under way
        self.held = False  # by the backward under way
        self.awaited: set[int] = set()  # trainable segments without a gradient since it is held
        self.trainable = {i for i, segment in enumerate(layout.segments) if segment.trainable}


class _Nesting(threading.local):
    """Of the thread that runs a forward."""

    depth = 0
    """Sites that were entered and not left."""
    pushed = 0
    """Pairs of saved-tensor hooks that were pushed, 0 or 1."""

    def __init__(self) -> None:
        self.entered: list[nn.Module] = []
        """The sites that were entered and not left, outermost first."""


class Hooks:
    """Installs all hooks on a model; `remove` takes them away.

    Forward hooks run on the caller's thread, all others on autograd's; one backward runs at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: dict[str, tuple[int, ...]],
        layouts: Sequence[UnitLayout],
        pager: Pager,
        gradients: Gradients | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pager, self._gradients = pager, gradients
        self._lock = threading.RLock()
        self._local = _Nesting()
        self._in_backward = False
        self._task_seen = False
        self.backward_count = 0
        """Outermost backwards in which a gradient arrived."""
        self.entered: Callable[[], None] = self.reset_aborted
        """Called at the entry of each outermost forward."""
        self._units = [
            _Unit(layout, [model.get_parameter(s.name) for s in layout.segments], dtype) for layout in layouts
        ]
        self._placeholders: dict[int, _Placeholder] = {}
        self._removers: list[Callable[[], None]] = []
        modules = dict(model.named_modules())
        own = {layout.name: index for index, layout in enumerate(layouts)}
        # The root is a site even without units of its own: saved tensors of all of a forward are packed.
        for name, units in ({"": ()} | sites).items():
            self._hook_module(modules[name], units, own.get(name))
        for index, unit in enumerate(self._units):
            for segment, parameter in zip(unit.layout.segments, unit.parameters, strict=True):
                nan = torch.full((), torch.nan, dtype=dtype, device=device)
                self._placeholders[id(parameter)] = _Placeholder(parameter, nan, nan.expand(segment.shape))
            self._unbind(unit)
            if gradients is not None:
                for position in sorted(unit.trainable):
                    handle = unit.parameters[position].register_post_accumulate_grad_hook(
                        self._gradient_hook(index, position)
                    )
                    self._removers.append(handle.remove)
        self._placeholder_storages = {
            place.nan.untyped_storage().data_ptr(): place.parameter for place in self._placeholders.values()
        }

    def remove(self) -> None:
        """Take every hook away. Parameters stay placeholders."""
        for remover in self._removers:
            remover()
        self._removers.clear()

    def reset_aborted(self) -> None:
        """Release what an aborted forward or backward left behind. Does nothing inside of a backward."""
        if inside_backward():
            return
        left = self._in_backward or any(unit.uses or unit.held for unit in self._units)
        if left or self._local.depth:
            self._reset()

    def _reset(self) -> None:
        with self._lock:
            for unit in self._units:
                if unit.uses or unit.held:
                    unit.uses, unit.held = 0, False
                    self._unbind(unit)
            self._pager.unpin_all()
            self._in_backward = self._task_seen = False
        depth = self._local.depth
        if depth:
            for _ in range(self._local.pushed):
                torch._C._autograd._pop_saved_tensors_default_hooks()
            self._local.depth = self._local.pushed = 0
            self._local.entered.clear()

    def check_placeholders(self) -> None:
        """Raise `UsageError` where somebody wrote to a parameter between its uses: the edit would be lost."""
        for parameter, nan, expanded in self._placeholders.values():
            if parameter.data_ptr() != expanded.data_ptr() or not bool(nan.isnan()):
                name = self._name_of(parameter)
                self._unbind_parameter(parameter)
                raise UsageError(
                    f"parameter {name} was changed outside of the engine; its weights live in the swap tiers, so "
                    f"the change would be lost"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        for unit in self._units:
            for segment, mine in zip(unit.layout.segments, unit.parameters, strict=True):
                if mine is parameter:
                    return segment.name
        return "?"

    # -- placeholders and views ---------------------------------------------------------------------

    def _bind(self, unit: _Unit, memory: torch.Tensor) -> None:
        """Make the unit's parameters views of `memory`, (bytes of the unit,) uint8."""
        flat = memory.view(unit.dtype)
        for segment, parameter in zip(unit.layout.segments, unit.parameters, strict=True):
            parameter.data = flat[segment.start : segment.stop].view(segment.shape)

    def _unbind(self, unit: _Unit) -> None:
        for parameter in unit.parameters:
            self._unbind_parameter(parameter)

    def _unbind_parameter(self, parameter: nn.Parameter) -> None:
        place = self._placeholders[id(parameter)]
        if not bool(place.nan.isnan()):
            place.nan.fill_(torch.nan)
        parameter.data = place.expanded

    # -- forward ------------------------------------------------------------------------------------

    def _hook_module(self, module: nn.Module, units: tuple[int, ...], own: int | None) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter()
            entered = []
            try:
                for index in units:
                    self._use(index)
                    entered.append(index)
                if own is not None and torch.is_grad_enabled() and not inside_backward():
                    self._watch_inputs(own, args, kwargs)
            except BaseException:
                # torch calls the post-hook even so; `after` then finds that this site was not entered.
                for index in reversed(entered):
                    self._unuse(index)
                self._leave()
                raise
            self._local.entered.append(module)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            entered = self._local.entered
            if not entered or entered[-1] is not module:
                return output
            entered.pop()
            try:
                output = self._own_memory(output)
            finally:
                for index in reversed(units):
                    self._unuse(index)
                outermost = self._leave()
            if outermost and torch.is_grad_enabled() and not inside_backward():
                self._watch_outputs(output)
            return output

        self._removers.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        self._removers.append(module.register_forward_hook(after, always_call=True).remove)

    def _enter(self) -> None:
        """Count nested sites; the outermost pushes the saved-tensor hooks."""
        depth = self._local.depth
        if depth == 0:
            self.entered()
            self._local.pushed = 0
            if not _checkpoint_hooks_active():
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
                self._local.pushed = 1
        self._local.depth = depth + 1

    def _leave(self) -> bool:
        depth = self._local.depth
        if depth == 0:
            return False  # reset() came in between
        self._local.depth = depth - 1
        if depth == 1 and self._local.pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._local.pushed = 0
        return depth == 1

    def _use(self, index: int) -> None:
        unit = self._units[index]
        with self._lock:
            if inside_backward():
                self._hold(index)
            unit.uses += 1
            if unit.uses > 1:
                return
        try:
            memory = self._pager.acquire(index)
        except BaseException:
            unit.uses -= 1
            raise
        self._bind(unit, memory)

    def _unuse(self, index: int) -> None:
        unit = self._units[index]
        with self._lock:
            if unit.uses == 0:
                return  # reset() came in between
            unit.uses -= 1
            if unit.uses == 0:
                self._pager.release(index)
                if not unit.held:
                    self._unbind(unit)

    def _own_memory(self, output: Any) -> Any:
        """Clone what in a module's output aliases the arena: it would change when the slice is used again."""
        arena = self._pager.arena.storage_address

        def own(value: Any) -> Any:
            aliases = isinstance(value, torch.Tensor) and _storage_address(value) == arena
            return value.clone() if aliases else value

        if isinstance(output, torch.Tensor):
            return own(output)
        if any(isinstance(leaf, torch.Tensor) and _storage_address(leaf) == arena for leaf in tree_leaves(output)):
            return tree_map(own, output)
        return output

    # -- backward -----------------------------------------------------------------------------------

    def _watch_outputs(self, output: Any) -> None:
        """The outermost outputs' nodes run first in a backward: there it begins."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(lambda grads: self._begin_backward())

    def _watch_inputs(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """When autograd reaches what made the unit's input, its nodes have run: nothing more is needed of it."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(lambda grads: self._reach_input(index))
                return

    def _reach_input(self, index: int) -> None:
        with self._lock:
            if self._units[index].held and self._units[index].uses == 0:
                self._unhold(index)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        with self._lock:
            for index, unit in enumerate(self._units):
                if unit.held:
                    self._unhold(index)
            if self._task_seen:
                self.backward_count += 1
            self._in_backward = self._task_seen = False

    def _hold(self, index: int) -> None:
        """Acquire a unit for the backward under way and bind its parameters. The lock is held."""
        unit = self._units[index]
        if unit.held:
            return
        self._begin_backward()
        memory = self._pager.acquire(index)
        unit.held = True
        unit.awaited = set(unit.trainable)
        self._bind(unit, memory)

    def _unhold(self, index: int) -> None:
        unit = self._units[index]
        unit.held = False
        self._pager.release(index)
        if unit.uses == 0:
            self._unbind(unit)

    def _gradient_hook(self, index: int, position: int) -> Callable[[torch.Tensor], None]:
        unit = self._units[index]

        def hook(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert self._gradients is not None
            if gradient is not None:
                self._gradients.add(index, position, gradient)
            with self._lock:
                self._begin_backward()
                self._task_seen = True
                unit.awaited.discard(position)
                if unit.held and not unit.awaited and unit.uses == 0:
                    self._unhold(index)

        return hook

    # -- saved tensors ------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Handle | _Saved:
        """See [Note: saved tensors]."""
        address = _storage_address(tensor)
        if address == self._pager.arena.storage_address:
            at = self._pager.unit_at(int(tensor.storage_offset()) * tensor.element_size())
            if at is None:
                raise UsageError("autograd saves a view of weights that are not in use any more")
            unit, offset = at
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            return _Handle(unit, self._pager.updates(unit), tensor.dtype, shape, stride, offset)
        used = self._placeholder_storages.get(address)
        if used is not None:
            raise UsageError(
                f"parameter {self._name_of(used)} is used while no module that owns it runs, so it is a NaN there; "
                f'call that module, or name the one that uses it in "units" of the "offload" block'
            )
        return _Saved(tensor.detach(), tensor._version)

    def _unpack(self, packed: _Handle | _Saved) -> torch.Tensor:
        if isinstance(packed, _Saved):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    f"a tensor of shape {list(packed.tensor.shape)} that backward needs was changed in place: it is "
                    f"at version {packed.tensor._version}, expected {packed.version}"
                )
            return packed.tensor
        if self._pager.updates(packed.unit) != packed.updates:
            name = self._units[packed.unit].layout.name
            raise UsageError(f"backward through a graph made before step(): the weights of {name} have changed since")
        if not inside_backward():
            memory = self._pager.acquire(packed.unit)
            try:
                return self._view(memory, packed).clone()
            finally:
                self._pager.release(packed.unit)
        with self._lock:
            self._hold(packed.unit)
            return self._view(self._pager.view(packed.unit), packed)

    @staticmethod
    def _view(memory: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """The saved view again, over the unit's bytes as they lie now."""
        flat = memory.view(handle.dtype)
        offset = flat.storage_offset() + handle.offset // handle.dtype.itemsize
        return torch.as_strided(flat, handle.size, handle.stride, offset)


def inside_backward() -> bool:
    """Whether the calling thread runs a backward."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _checkpoint_hooks_active() -> bool:
    """Whether a region of non-reentrant checkpointing is under way: its own hooks must see what is saved."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"
