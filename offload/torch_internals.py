"""Every private name of torch that we use, with its reason: a new version of torch is one file's work.

`tests/test_torch_internals.py` holds that no other file of the package uses one.
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
    "top_saved_tensor_hooks",
    "tree_leaves",
    "tree_map",
    "under_modes",
    "without_modes",
]

# -- tensors -----------------------------------------------------------------------------------------

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch take a placeholder for the plain tensor that it is."""

SHALLOW_COPY_QUERY = torch._has_compatible_shallow_copy_type
"""What `nn.Module._apply` and `.data = …` ask first; a subclass answers it in `__torch_function__`."""


make_subclass = torch.Tensor._make_subclass
"""A tensor of a class of ours that shares the memory of another, as `nn.Parameter` is made."""


def has_no_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch.func, or all zeros without memory: its storage must not be asked for."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor()


def fake_tensors(allow_others: bool = False) -> Any:
    """Return the mode of tensors without values in which torch.export traces; meta fails in masks.

    Args:
        allow_others: whether functions may be given tensors with values beside those without.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy

    return FakeTensorMode(allow_non_fake_inputs=allow_others)


# -- modes of dispatch -------------------------------------------------------------------------------


def under_modes() -> bool:
    """Return whether a dispatch mode or a transform of torch.func is active on this thread."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def without_modes() -> Iterator[None]:
    """Run outside of all dispatch modes and transforms of torch.func."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


# -- autograd ----------------------------------------------------------------------------------------

# `torch.autograd.graph.saved_tensors_hooks` is a context; ours begin in one hook of a module and end in another, and
# must know whose lie on top.


def top_saved_tensor_hooks() -> Any:
    """Return the active pair of hooks of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Add a pair of hooks on this thread. Raises `RuntimeError` under torch.func."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Take the active pair away; there must be one."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs on this thread has ended, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def inside_backward() -> bool:
    """Return whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1
