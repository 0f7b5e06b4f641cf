"""Every private name of torch that this library uses, with the reason, so that a new version of torch affects one file.

`tests/test_torch_internals.py` checks that no other file of the package uses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "SHALLOW_COPY_QUERY",
    "TorchDispatchMode",
    "call_after_backward",
    "fake_tensors",
    "has_no_storage",
    "inside_backward",
    "make_subclass",
    "plain_tensors",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "set_data",
    "top_saved_tensor_hooks",
    "tree_leaves",
    "tree_map",
    "under_modes",
    "without_modes",
]

# -- tensors -----------------------------------------------------------------------------------------

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch treat a placeholder as the plain tensor that it is."""

SHALLOW_COPY_QUERY = torch._has_compatible_shallow_copy_type
"""The check that `nn.Module._apply` and `.data = …` make first. A subclass answers it in `__torch_function__`."""


def set_data(parameter: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """Sets `parameter.data = memory`, also between types of devices for which torch refuses the assignment.

    Torch accepts it between CPU, CUDA and XPU, and within any type. Otherwise the parameter keeps its identity, its
    attributes and its hooks, and receives all else of a new parameter.

    Raises:
        RuntimeError: if torch refuses the assignment while a graph or a weak reference holds the parameter.
    """
    try:
        parameter.data = memory
    except RuntimeError:
        if SHALLOW_COPY_QUERY(parameter, memory):
            raise
        attributes = dict(parameter.__dict__)
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(memory, parameter.requires_grad))
        parameter.__dict__.update(attributes)
        # Python's lists of hooks stay with the parameter, but torch calls those of the tensor that was swapped away.
        # Each assignment makes torch call the list again.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


make_subclass = torch.Tensor._make_subclass
"""Constructor of a tensor subclass that shares the memory of another tensor, as `nn.Parameter` is made."""


def has_no_storage(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor whose storage must not be accessed: one of torch.func, or all zeros without memory."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor()


def fake_tensors(allow_others: bool = False) -> Any:
    """Returns the mode of tensors without values in which torch.export traces.

    Tensors on meta are no substitute: they fail in the code of attention masks.

    Args:
        allow_others: True lets functions mix tensors with values and tensors without.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy, which takes long

    return FakeTensorMode(allow_non_fake_inputs=allow_others)


# -- modes of dispatch -------------------------------------------------------------------------------


def under_modes() -> bool:
    """Returns True if a dispatch mode or a transform of torch.func is active on this thread."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def without_modes() -> Iterator[None]:
    """Suspends all dispatch modes and transforms of torch.func on this thread while the context is open."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


# -- autograd ----------------------------------------------------------------------------------------

# `torch.autograd.graph.saved_tensors_hooks` is a context manager. Our hooks are pushed in one hook of a module and
# popped in another, and must know whose hooks are on top of the stack.


def top_saved_tensor_hooks() -> Any:
    """Returns the active pair of hooks of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


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
