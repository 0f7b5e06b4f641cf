"""What autograd saves for a backward: views of weights as handles, anything else as it is.

A saved view of a slice is packed as (unit, update count, dtype, size, stride, offset) and made again from the unit's
weights, wherever they then lie; so a graph holds no weights. Saved-tensor hooks switch off torch's own check for
in-place changes, so any other tensor is packed with its version, which is compared at unpack. Where other hooks are
active, of the user (`save_on_cpu`) or of checkpointing, these get it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.engine.params.paged_parameter import Place, place_of
from offload.engine.params.unit_views import Bindings
from offload.errors import UsageError
from offload.swapper.pager import Pager
from offload.torch_internals import (
    has_no_storage,
    plain_tensors,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)


class _Handle(NamedTuple):
    """A saved view of a slice."""

    unit: int
    updates: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, within the unit


class _Saved(NamedTuple):
    """Any other saved tensor, detached (the graph must not hold itself), and its version."""

    tensor: torch.Tensor
    version: int


class _Packed(NamedTuple):
    """What the user's own hook made of a tensor, and the hook that gives it back."""

    value: Any
    unpack: Callable[[Any], torch.Tensor]


class _Pack:
    """A pack hook: handles for views of weights, and for the rest what the hooks round it do."""

    def __init__(self, saved: SavedTensors, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.saved, self._outer = saved, outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        handle = self.saved.handle(tensor)
        if handle is not None:
            return handle
        if self._outer is None:
            return _Saved(tensor.detach(), tensor._version)
        pack, unpack = self._outer
        return _Packed(pack(tensor), unpack)


class SavedTensors:
    """Packs on the thread that runs a forward, unpacks on autograd's."""

    def __init__(
        self,
        names: Sequence[str],
        places: Sequence[Sequence[Place]],
        bindings: Bindings,
        pager: Pager,
        compute: ComputeSpans = NO_SPANS,
    ) -> None:
        """`compute` shows of which unit a backward has asked for weights."""
        self._names, self._bindings, self._pager, self._compute = names, bindings, pager, compute
        self._placeholders = {place.storage_address: place.name for unit in places for place in unit}

    def push(self) -> bool:
        """Push the hooks on the calling thread, round those that are active, unless ours are; whether that was done.

        So checkpointing and hooks of the user, outside of the model or within it, see all that is no weight: in a
        recomputation the same tensors as in the forward.
        """
        if self._active:
            return False
        outer = top_saved_tensor_hooks()
        try:
            push_saved_tensor_hooks(_Pack(self, outer), self.unpack)
        except RuntimeError as error:
            raise UsageError(
                f"the model cannot run here, since its graph would have to hold its weights: {error} Use "
                f"torch.autograd.grad instead of torch.func, or a copy.deepcopy of the part in question"
            ) from error
        return True

    @property
    def _active(self) -> bool:
        top = top_saved_tensor_hooks()
        return top is not None and isinstance(top[0], _Pack) and top[0].saved is self

    def pop_left(self) -> None:
        """Pop what an interrupt has left, where no site runs."""
        while self._active:
            self.pop()

    @staticmethod
    def pop() -> None:
        """Pop one pair of hooks, if there is one: torch has taken some away after an exception in a backward."""
        if top_saved_tensor_hooks() is not None:
            pop_saved_tensor_hooks()

    def handle(self, tensor: torch.Tensor) -> _Handle | None:
        """The handle of a view of weights; None for any other tensor."""
        place = place_of(tensor)
        if place is not None and place.bound and getattr(tensor, "own", None) is None:
            tensor = place.parameter.detach()  # `.data` that was asked for before its weights were brought
        address = storage_address(tensor)
        binding = self._bindings.binding_at(address)
        if binding is not None:
            unit, shape, stride = binding.unit, tuple(tensor.shape), tuple(tensor.stride())
            offset = int(tensor.storage_offset())
            return _Handle(unit, self._pager.updates(unit), tensor.dtype, shape, stride, offset)
        used = self._placeholders.get(address)
        if used is not None:
            raise UsageError(
                f"parameter {used} is used by compiled code while no module that owns it runs; call that module, name "
                f'the one that uses it in "units" of the "offload" block, or tell by '
                f"offload.register_external_parameter(module, parameter)"
            )
        return None

    def unpack(self, packed: _Handle | _Saved | _Packed) -> torch.Tensor:
        """The saved tensor again."""
        if isinstance(packed, _Saved):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    f"a tensor of shape {list(packed.tensor.shape)} that backward needs was changed in place: it is "
                    f"at version {packed.tensor._version}, expected {packed.version}"
                )
            return packed.tensor
        if isinstance(packed, _Packed):
            return packed.unpack(packed.value)
        if self._pager.updates(packed.unit) != packed.updates:
            raise UsageError(
                f"backward through a graph made before step(): the weights of {self._names[packed.unit]} have changed "
                f"since"
            )
        self._compute.leave_for(packed.unit)  # before the wait for the weights, which is no unit's compute
        view = self._bindings.view(packed.unit, packed.dtype, packed.size, packed.stride, packed.offset)
        self._compute.turn_to(packed.unit)
        return view


def storage_address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 for one without memory of its own: sparse, of torch.func, a wrapper."""
    if tensor.layout is not torch.strided:
        return 0
    with plain_tensors():  # a placeholder would bring its weights
        if has_no_storage(tensor):
            return 0
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a subclass that wraps other tensors (`_make_wrapper_subclass`) has none to ask
            return 0
