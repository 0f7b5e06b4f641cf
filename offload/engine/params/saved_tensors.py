"""Saved-tensor hooks of the engine: a view of weights is saved as a handle, any other tensor as it is.

A saved view of a device buffer is packed as (unit, update count, dtype, size, stride, offset). Unpacking makes the view
again from the unit's weights, in whatever tier they are by then; so a graph contains no weights. A wrapper of views of
weights (`_make_wrapper_subclass`) is packed as its class and its packed inner tensors. Saved-tensor hooks
disable torch's own check for in-place changes, so any other tensor is packed with its version, which is compared at
unpack. If other hooks are active, of the user (`save_on_cpu`) or of checkpointing, other tensors are passed to those.

Autograd saves dozens of tensors in a block. Native hooks (`native/module.cpp`) see all of them, pack and unpack
the two kinds that are nearly all, and leave the others to this module.

If no unit comes and goes and no other hooks are active, there are no hooks: graphs hold weights that never move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.activations.kept_inputs import InputView, KeptInputs
from offload.engine import _native
from offload.engine._native import Handle, Pack, Plain, Unpack
from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.engine.params.paged_parameter import ParamHandle, handle_of
from offload.engine.params.unit_views import UnitViews
from offload.errors import UsageError
from offload.interrupts import uninterrupted
from offload.swapper.pager import Pager
from offload.torch_internals import (
    has_no_storage,
    inner_tensors,
    plain_tensors,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saves_checkpoint_input,
    top_saved_tensor_hooks,
    tree_leaves,
    tree_map,
    under_modes,
)


class _Packed(NamedTuple):
    """The result of an outer pack hook for a tensor, and the outer hook that unpacks it."""

    value: Any
    unpack: Callable[[Any], torch.Tensor]


class _Wrapped(NamedTuple):
    """A wrapper of other tensors, at least one of which is a view of weights."""

    kind: Any
    inner: dict[str, Any]
    """The packed inner tensors, by name."""
    others: dict[str, Any]
    """Inner values that are no tensors, by name."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class _Pack:
    """A pack hook that makes handles of views of weights, and leaves other tensors to the enclosing hooks."""

    def __init__(self, saved: SavedTensors, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.saved, self.outer = saved, outer
        self._bindings, self._placeholders = saved.bindings, saved.placeholders
        # Within another checkpoint or hooks of the user, those decide about the inputs too.
        self._inputs = saved.inputs if outer is None else None

    def native(self, arena: Sequence[tuple[int, int]]) -> Callable[[torch.Tensor], Any]:
        """Returns the native hook that calls this one for what is no ordinary tensor and no view of bound weights.

        Args:
            arena: first and last address of each allocation that contains weights.
        """
        innermost = self.outer is None and self._inputs is None
        bindings, placeholders = self._bindings, self._placeholders
        return Pack(torch.Tensor, nn.Parameter, bindings, placeholders, arena, innermost, self).pack

    # torch refuses a pack hook in which its tensor changes, as weights do when a handler destroys the engine.
    @uninterrupted
    def __call__(self, tensor: torch.Tensor) -> Any:
        handle = self.saved.handle(tensor)
        if handle is not None:
            return handle
        if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter:
            if self._inputs is not None and tensor.requires_grad and saves_checkpoint_input():
                kept = self._inputs.keep(tensor)
                if kept is not None:
                    return kept
        elif self.saved.wraps_weights(tensor):
            return self._wrapped(tensor)
        # Weights never reach the outer hooks: `save_on_cpu` would copy them to the host.
        if self.outer is None:
            return _native.plain_of(tensor)
        pack, unpack = self.outer
        return _Packed(pack(tensor), unpack)

    def _wrapped(self, tensor: torch.Tensor) -> _Wrapped:
        """Packs each inner tensor of a wrapper by itself, as if autograd had saved it."""
        found = inner_tensors(tensor)
        assert found is not None, "only a wrapper wraps weights"
        inner = {name: self(each) for name, each in found[0].items() if isinstance(each, torch.Tensor)}
        others = {name: each for name, each in found[0].items() if name not in inner}
        return _Wrapped(type(tensor), inner, others, found[1], tensor.size(), tensor.stride())


class SavedTensors:
    """The saved-tensor hooks of one engine. Packs on the thread that runs a forward, unpacks on autograd's."""

    def __init__(
        self,
        handles: Sequence[Sequence[ParamHandle]],
        unit_views: UnitViews,
        pager: Pager,
        compute: ComputeSpans = NO_SPANS,
        inputs: KeptInputs | None = None,
        wrapped: bool = False,
    ) -> None:
        """Prepares the hooks.

        Args:
            handles: the parameters of each unit.
            unit_views: makes views of weights.
            pager: knows how often the weights of a unit have changed.
            compute: records the unit whose weights a backward uses.
            inputs: keeps the inputs of checkpointed modules off the device; None if they stay there.
            wrapped: True if modules compute with wrappers of weights, such as DTensors. Torch would not notice that
                weights have changed in which a graph holds a wrapper.
        """
        self.inputs = inputs
        self._unit_views, self._pager, self._compute = unit_views, pager, compute
        self._moves = wrapped or inputs is not None or not all(pager.stays(unit) for unit in range(len(handles)))
        """True if weights of any unit come and go, or inputs of checkpointed modules."""
        self.bindings = unit_views.bindings
        # By address, since compiled code passes tensors that have lost their class.
        self.placeholders = {handle.storage_address: handle.name for unit in handles for handle in unit}
        """Name of each parameter, by the address of its placeholder's memory."""
        self._parameters = {handle.storage_address: (unit, handle) for unit, of in enumerate(handles) for handle in of}

    def push(self) -> bool:
        """Pushes the hooks on the calling thread, around the active ones. Returns False if there is no need.

        So hooks of checkpointing and of the user, outside of the model or within it, receive every tensor that is no
        weight: in a recomputation the same ones as in the forward.
        """
        if self.settled:
            return False
        # torch calls the innermost hooks only, so these call the enclosing ones themselves.
        outer = top_saved_tensor_hooks()
        try:
            pack = _Pack(self, outer).native(self._pager.arena.addresses())
            views = self._unit_views
            if self._compute is NO_SPANS:
                unpack = Unpack(views.view, self.unpack, views, under_modes)
            else:
                unpack = Unpack(self._view, self.unpack, None, under_modes)
            push_saved_tensor_hooks(pack, unpack.unpack)
        except RuntimeError as error:
            raise UsageError(
                f"the model cannot run here, since its graph would have to hold its weights: {error} Use "
                "torch.autograd.grad instead of torch.func, or a copy.deepcopy of the submodule in question"
            ) from error
        return True

    @property
    def settled(self) -> bool:
        """True if the innermost hooks of the calling thread are this object's, or none where no unit moves.

        A graph may hold weights that never move. Torch itself notices that they have changed since: see
        `UnitViews.outdate`.
        """
        top = top_saved_tensor_hooks()
        if top is None:
            return not self._moves
        ours = _ours(top)
        return ours is not None and ours.saved is self

    @staticmethod
    def pop() -> None:
        """Pops one pair of hooks, if there is one: torch removes some itself after an exception in a backward."""
        if top_saved_tensor_hooks() is not None:
            pop_saved_tensor_hooks()

    def handle(self, tensor: torch.Tensor) -> Handle | None:
        """Returns the handle of a view of weights, or None for any other tensor.

        Raises:
            UsageError: if compiled code uses a parameter while no module that owns it runs.
        """
        handle = handle_of(tensor)
        if handle is not None and handle.materialized and getattr(tensor, "own", None) is None:
            # `.data`, or a view of it, that was taken before the weights were fetched.
            tensor = handle.parameter.detach().view(tensor.shape)
        address = storage_address(tensor)
        binding = self._unit_views.binding_at(address)
        if binding is not None:
            return _native.handle_of(binding.unit, self._pager.updates(binding.unit), tensor)
        # Compiled code calls no `__torch_function__`, so it can reach a placeholder's own memory, which is NaN.
        used = self.placeholders.get(address)
        if used is not None:
            # An argument of a checkpointed function, which fetches the weights once it uses them.
            if saves_checkpoint_input() and (argument := self._argument(address, tensor)) is not None:
                return argument
            raise UsageError(
                f"parameter {used} is used by compiled code while no module that owns it runs; call that module, name "
                'the one that uses it in "units" of the "offload" block, or call '
                "offload.register_external_parameter(module, parameter)"
            )
        return None

    def _argument(self, address: int, tensor: torch.Tensor) -> Handle | None:
        """Returns the handle of a parameter's weights, of whose placeholder `tensor` is; None for a part of it."""
        unit, handle = self._parameters[address]
        if tensor.shape != handle.shape:
            return None
        return _native.handle_of(unit, self._pager.updates(unit), self._unit_views.place(unit, handle))

    def without_views(self, output: Any) -> Any:
        """Returns a module's output with clones of weights: a view would pin their device buffer while it lives."""
        if type(output) is torch.Tensor and storage_address(output) not in self.bindings:
            return output  # nearly all
        if isinstance(output, torch.Tensor):
            return output.clone() if self._is_view(output) else output
        if any(self._is_view(leaf) for leaf in tree_leaves(output)):
            return tree_map(lambda leaf: leaf.clone() if self._is_view(leaf) else leaf, output)
        return output

    def _is_view(self, value: Any) -> bool:
        """Returns True for a placeholder and for a view of a materialized unit."""
        if not isinstance(value, torch.Tensor):
            return False
        return handle_of(value) is not None or self._unit_views.binding_at(storage_address(value)) is not None

    def wraps_weights(self, tensor: torch.Tensor) -> bool:
        """Returns True for a wrapper that contains a view of weights, directly or in an inner wrapper."""
        found = inner_tensors(tensor)
        return found is not None and any(
            isinstance(each, torch.Tensor) and (self.handle(each) is not None or self.wraps_weights(each))
            for each in found[0].values()
        )

    @uninterrupted
    def unpack(self, packed: Handle | Plain | _Packed | _Wrapped | InputView) -> torch.Tensor:
        """Returns the saved tensor, for whose weights the calling thread may wait.

        Raises:
            RuntimeError: if a tensor was changed in place since it was saved, as torch raises it.
            UsageError: if the weights have changed since the forward.
        """
        if isinstance(packed, Handle):
            return self._view(packed)
        if isinstance(packed, InputView):
            assert self.inputs is not None
            return self.inputs.fetch(packed)
        if isinstance(packed, _Packed):
            return packed.unpack(packed.value)
        if isinstance(packed, _Wrapped):
            inner = {name: self.unpack(each) for name, each in packed.inner.items()} | packed.others
            wrapper: torch.Tensor = packed.kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
            return wrapper
        tensor = packed.tensor
        if tensor._version != packed.version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place: it is at version "
                f"{tensor._version}, expected {packed.version}"
            )
        return tensor

    @uninterrupted
    def _view(self, packed: Handle) -> torch.Tensor:
        """Returns a view of weights."""
        if self._compute is NO_SPANS:
            return self._unit_views.view(packed)
        self._compute.leave_for(packed.unit)  # before the wait for weights, which is no compute
        view = self._unit_views.view(packed)
        self._compute.turn_to(packed.unit)
        return view


def _ours(hooks: Any) -> _Pack | None:
    """Returns the pack hook of an engine in a pair of saved-tensor hooks; None for hooks of others."""
    native = getattr(hooks[0], "__self__", None)
    return native.other if isinstance(native, Pack) else None


def other_hooks() -> Any:
    """Returns the innermost pair of saved-tensor hooks of the calling thread that is no engine's, or None."""
    top = top_saved_tensor_hooks()
    while top is not None and (ours := _ours(top)) is not None:
        top = ours.outer
    return top


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's storage; 0 if it has none: a sparse tensor, one of torch.func, a wrapper."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:  # nearly all; torch refuses those without a storage
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:
            return 0
    if tensor.layout is not torch.strided:
        return 0
    with plain_tensors():  # otherwise a placeholder would fetch its weights
        if has_no_storage(tensor):
            return 0
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a wrapper of other tensors (`_make_wrapper_subclass`) has no storage
            return 0
