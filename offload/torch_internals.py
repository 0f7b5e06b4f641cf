"""Every private name of torch that this library uses, with the reason, so that a new version of torch affects one file.

`tests/test_torch_internals.py` checks that no other file of the package uses one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import __file__ as _module_file
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "NO_TORCH_FUNCTION",
    "SHALLOW_COPY_QUERY",
    "StorageReference",
    "StorageUsers",
    "TorchDispatchMode",
    "are_of_checkpoint",
    "call_after_backward",
    "checkpointing",
    "fake_tensors",
    "flatten_state_dict",
    "has_no_storage",
    "in_second_storage",
    "inner_tensors",
    "inside_backward",
    "make_subclass",
    "make_wrapper",
    "module_call",
    "outside_of_compiled_code",
    "outside_of_modes",
    "plain_tensors",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "rebuild_tensor",
    "saves_checkpoint_input",
    "set_data",
    "stored_at",
    "tensor_hooks_of",
    "tensors_in",
    "top_saved_tensor_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "under_modes",
    "under_transforms",
    "without_modes",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# -- tensors -----------------------------------------------------------------------------------------

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
    """Returns the record by which torch.distributed.checkpoint finds an entry in a folder.

    Args:
        file: Name of a file in the folder.
        start: First byte of what `torch.save` has written there.
        nbytes: Number of bytes.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, nbytes)


RESHAPED = torch.ops.aten._unsafe_view.default
"""A view that torch does not call one: it moves nothing."""
SHALLOW_COPY_QUERY = torch._has_compatible_shallow_copy_type
"""The check that `nn.Module._apply` and `.data = …` make first. A subclass answers it in `__torch_function__`."""


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
        if weakref.getweakrefs(parameter) and parameter._use_count() == 1:  # type: ignore[attr-defined]
            # torch.utils.swap_tensors refuses such a parameter, and each of an nn.GRU is one. But a weak reference is
            # to the object of Python, which stays; no graph refers to the tensor that is swapped away.
            torch._C._swap_tensor_impl(parameter, fresh)
        else:
            attributes = dict(parameter.__dict__)
            torch.utils.swap_tensors(parameter, fresh)
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
    """Returns a tensor of a subclass with `__torch_dispatch__`, without memory and outside of autograd.

    Args:
        kind: the subclass.
        geometry: gives shape, strides, offset and dtype.
        device: device on which the tensor is, as far as it tells.
    """
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


def module_call() -> types.FrameType:
    """Returns the Python frame in which torch calls the module whose hook runs now."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != _module_file:
        frame = frame.f_back
    return frame


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a module's output, including those in the fields of a dataclass."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type) and not isinstance(output, dict):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


# -- torch.compile ------------------------------------------------------------------------------------


def outside_of_compiled_code(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `hook`, disabled as by `torch.compiler.disable`, at a fraction of the cost where no compiled code runs.

    A hook of each module is called often, and `disable` changes and restores the state of the compiler at each call.
    """
    from torch._dynamo.decorators import skip  # imports sympy, which takes long

    disabled = torch.compiler.disable(hook)
    compiles = torch._C._dynamo.eval_frame.get_eval_frame_callback

    def call(*args: Any) -> Any:
        return hook(*args) if compiles() is None else disabled(*args)

    # With `skip` the compiler does not compile `call` itself, but it does compile functions that `call` calls: hence
    # `disabled`.
    skipped: Callable[..., Any] = skip(call)
    return skipped


# -- modes of dispatch -------------------------------------------------------------------------------

_dispatch_modes = torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack


def under_modes() -> bool:
    """Returns True if a dispatch mode or a transform of torch.func is active on this thread."""
    return _dispatch_modes() > 0 or _interpreter() is not None


def under_transforms() -> bool:
    """Returns True if a transform of torch.func is active on this thread."""
    return _interpreter() is not None


@contextmanager
def without_modes() -> Iterator[None]:
    """Suspends all dispatch modes and transforms of torch.func on this thread while the context is open."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def outside_of_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes `function` run without dispatch modes and torch.func, which must not see the engine's own copies."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not under_modes():
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return call


# -- autograd ----------------------------------------------------------------------------------------

# `torch.autograd.graph.saved_tensors_hooks` is a context manager. Our hooks are pushed in one hook of a module and
# popped in another, and must know whose hooks are on top of the stack.


top_saved_tensor_hooks: Callable[[], Any] = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""Returns the active pair of hooks of this thread, or None."""


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Activates a pair of hooks on this thread. Raises `RuntimeError` under torch.func."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Removes the active pair of hooks, which must exist."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward that runs on this thread has ended, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def inside_backward() -> bool:
    """Returns True if this thread runs a backward."""
    # Thread-local, and set on the engine's own threads too; -1 outside of a backward.
    return torch._C._current_graph_task_id() != -1


# -- checkpointing of activations ---------------------------------------------------------------------

# `torch.utils.checkpoint.checkpoint` calls the function that it checkpoints. A hook before a module and one after it
# need the two halves apart: the generator below is what torch's own composable `checkpoint(module)` uses.
_generator = torch_checkpoint._checkpoint_without_reentrant_generator
_KNOWS_EARLY_STOP = "early_stop" in inspect.signature(_generator).parameters  # torch 2.6 does not

_FRAMES = 4
"""Python frames between a pack hook and the code of checkpointing, at most."""


def checkpointing(recompute: Callable[..., Any], *inputs: Any) -> Generator[None, None, None]:
    """Returns a generator: from its first `next` to its second, the graph keeps `inputs` instead of what it saves.

    Non-reentrant checkpointing of torch, with its random generators, autocast, early stop, and check of shapes.

    Args:
        recompute: computes again, from `inputs`, what is computed between the two calls.
        inputs: tensors are saved through the active saved-tensor hooks, other values by reference.
    """
    context = torch_checkpoint.noop_context_fn
    early_stop = (True,) if _KNOWS_EARLY_STOP else ()
    generator: Generator[None, None, None] = _generator(
        recompute, True, context, "default", False, *early_stop, *inputs
    )
    return generator


def are_of_checkpoint(hooks: Any) -> bool:
    """Returns True if a pair of saved-tensor hooks belongs to non-reentrant checkpointing; False for None."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch_checkpoint.__name__


def saves_checkpoint_input() -> bool:
    """Returns True if the pack hook that calls this runs because checkpointing, of either kind, saves its inputs.

    Torch has no such query; the callers of the hook tell.
    """
    # A double backward on a thread of autograd's saves tensors without a Python function below.
    frame = sys._getframe(1).f_back
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch_checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
