"""Private names of torch for tensors, their storages, and what modules return."""

from __future__ import annotations

import dataclasses
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_T = TypeVar("_T")

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch treat a placeholder as the plain tensor that it is."""

rebuild_tensor = torch._utils._rebuild_tensor_v2
"""The function that a file of `torch.save` names for each tensor."""


def flatten_state_dict(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Returns the entries of a state dict by the names that torch.distributed.checkpoint gives them, and their keys."""
    # Imported here, because it takes a second and an export alone needs it.
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(dict(state))


def stored_at(file: str, start: int, nbytes: int) -> Any:
    """Returns the record by which torch.distributed.checkpoint finds an entry in a folder."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, nbytes)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that all tensors over one storage have, also those on meta, where no storage has an address.

    A sparse tensor has no storage, and a number of its own.
    """
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def first_state_dict_hook(module: torch.nn.Module, hook: Any) -> Any:
    """Registers a hook of `state_dict` that runs before all others of `module`; returns its handle."""
    handle = module.register_state_dict_post_hook(hook)
    hooks: Any = module._state_dict_hooks  # torch's stub says dict
    hooks.move_to_end(handle.id, last=False)
    return handle


RESHAPED = torch.ops.aten._unsafe_view.default
"""A view that torch does not call one: it moves nothing."""
SHALLOW_COPY_QUERY = torch._has_compatible_shallow_copy_type
"""The check that `nn.Module._apply` and `.data = …` make first. A subclass answers it in `__torch_function__`."""


def swap_parameters(parameter: torch.nn.Parameter, other: torch.nn.Parameter) -> None:
    """Exchanges all but the identity of two parameters, as `torch.utils.swap_tensors` does.

    Other than there, weak references to the first are no error: each parameter of an nn.GRU has one.

    Raises:
        RuntimeError: if a graph holds one of them.
    """
    if not (weakref.getweakrefs(parameter) and parameter._use_count() == 1):  # type: ignore[attr-defined]
        torch.utils.swap_tensors(parameter, other)
        return
    # A weak reference is to the object of Python, which stays; no graph refers to the tensor that is swapped away.
    parameter.__class__, other.__class__ = other.__class__, parameter.__class__
    parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, other)


def set_data(parameter: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """Sets `parameter.data = memory`, also between types of devices for which torch refuses the assignment.

    Torch accepts the assignment between CPU, CUDA and XPU, and within any type. In all other cases the parameter keeps
    its identity, attributes and hooks, and receives everything else from a new parameter.

    Raises:
        RuntimeError: if torch refuses the assignment while a graph holds the parameter.
    """
    try:
        parameter.data = memory
    except RuntimeError:
        if SHALLOW_COPY_QUERY(parameter, memory):
            raise
        fresh = torch.nn.Parameter(memory, parameter.requires_grad)
        attributes = dict(parameter.__dict__)
        swap_parameters(parameter, fresh)
        parameter.__dict__.update(attributes)
        # Python's lists of hooks stay with the parameter, but torch calls those of the tensor that was swapped away.
        # Each assignment makes torch call the list again.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def tensor_hooks_of(parameter: torch.nn.Parameter) -> bool:
    """Returns True if the user has registered hooks of `torch.Tensor.register_hook` on a parameter."""
    with plain_tensors():
        return bool(parameter._backward_hooks)


def in_second_storage(memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the memory of another, with a storage of its own that keeps the memory alive."""
    # As `torch.utils.dlpack.from_dlpack`, which looks for other protocols first.
    return torch._C._from_dlpack(torch._C._to_dlpack(memory))


class StorageReference:
    """A weak reference to a storage, which lives as long as any tensor in it."""

    # As `torch.multiprocessing.reductions.StorageWeakRef`, whose calls go through a class in Python.
    _expired: Any = torch.UntypedStorage._expired
    _free: Any = torch.UntypedStorage._free_weak_ref

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage._weak_ref()

    def expired(self) -> bool:
        """Returns True once the storage is gone."""
        return bool(self._expired(self._storage))

    def __del__(self) -> None:
        self._free(self._storage)


class StorageUsers:
    """A storage that is kept, and the number of its users: tensors, and references to its object of Python."""

    # Torch 2.6 has it in builds for GPUs alone.
    _tensors: Any = getattr(torch._C, "_storage_Use_Count", None)

    @classmethod
    def counted(cls) -> bool:
        """Returns True if this build of torch counts the users of a storage."""
        return cls._tensors is not None

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage, self._address = storage, storage._cdata

    def count(self) -> int:
        """Returns a number that is larger by 1 for each further user."""
        # One object of Python stands for the storage, and counts once however many hold it.
        return int(self._tensors(self._address)) + sys.getrefcount(self._storage)


def owns_its_memory(tensor: torch.Tensor) -> bool:
    """Returns True if torch allocated the memory of `tensor` on the CPU for this tensor alone, which fills all of it.

    References to the tensor itself do not count. False also where this build of torch cannot tell.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.is_cpu:
        return False
    if not StorageUsers.counted() or has_no_storage(tensor) or not tensor.is_contiguous() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    # Memory that torch has not allocated, such as an array of numpy, cannot be resized.
    if storage.nbytes() != tensor.numel() * tensor.itemsize or not storage.resizable():
        return False
    alone = torch.empty(1, device="cpu")
    of_alone = alone.untyped_storage()
    return StorageUsers(storage).count() == StorageUsers(of_alone).count()


make_subclass = torch.Tensor._make_subclass
"""Constructor of a tensor subclass that shares the memory of another tensor, as `nn.Parameter` is made."""


def has_no_storage(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor whose storage must not be accessed: one of torch.func, or all zeros without memory."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor()


def inner_tensors(tensor: torch.Tensor) -> tuple[dict[str, Any], Any] | None:
    """Returns the parts of a wrapper of other tensors (`_make_wrapper_subclass`); None for any other tensor.

    Returns:
        The inner values by name, almost always tensors, and the context: the arguments from which the class's
        `__tensor_unflatten__` makes the wrapper again.
    """
    # The type first: a saved tensor is nearly always a plain one, and the search for attributes takes a microsecond.
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that takes part in dispatch alone."""


def make_wrapper(kind: type[_T], geometry: torch.Tensor, device: torch.device) -> _T:
    """Returns a tensor of a subclass with `__torch_dispatch__`, without memory and outside of autograd."""
    make: Any = torch.Tensor._make_wrapper_subclass
    made: _T = make(
        kind,
        geometry.size(),
        strides=geometry.stride(),
        storage_offset=geometry.storage_offset(),
        dtype=geometry.dtype,
        layout=geometry.layout,
        device=device,
        requires_grad=False,
    )
    return made


def fake_tensors(allow_others: bool = False) -> Any:
    """Returns the mode of tensors without values in which torch.export traces.

    Tensors on meta are no substitute: they fail in the code of attention masks.

    Args:
        allow_others: True lets functions mix tensors with values and tensors without.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy, which takes long

    return FakeTensorMode(allow_non_fake_inputs=allow_others)


def is_fake(kind: type) -> bool:
    """Returns True for the class of tensors without values, with which a DTensor asks for the shape of a result."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # nothing is fake before torch has imported it
    return module is not None and issubclass(kind, module.FakeTensor)


def module_call() -> types.FrameType:
    """Returns the Python frame in which torch calls the module whose hook runs now."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != _module.__file__:
        frame = frame.f_back
    return frame


def global_module_hooks() -> list[Any]:
    """Returns the hooks that torch calls for all modules, of forwards and of backwards."""
    return [
        hook
        for hooks in (
            _module._global_forward_pre_hooks,
            _module._global_forward_hooks,
            _module._global_backward_pre_hooks,
            _module._global_backward_hooks,
        )
        for hook in hooks.values()
    ]


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a module's output, including those in the fields of a dataclass."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type) and not isinstance(output, dict):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def cpu_computes_fp16() -> bool:
    """Returns True if oneDNN multiplies fp16 on this processor, and False where torch is built without it."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return asked is not None and bool(asked())
