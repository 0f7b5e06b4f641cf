"""Every private name of torch that this library uses, with the reason: a new version of torch affects one folder.

`tests/repository/test_torch_internals.py` checks that no other file of the package uses one.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from offload.torch_internals.graphs import (
    are_of_checkpoint,
    call_after_backward,
    checkpointing,
    count_saved_tensor_hooks,
    inside_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saves_checkpoint_input,
    top_saved_tensor_hooks,
    without_saved_tensor_hooks,
)
from offload.torch_internals.modes import (
    outside_of_compiled_code,
    outside_of_modes,
    under_modes,
    under_transforms,
    without_modes,
)
from offload.torch_internals.tensors import (
    NO_TORCH_FUNCTION,
    RESHAPED,
    SHALLOW_COPY_QUERY,
    StorageReference,
    StorageUsers,
    fake_tensors,
    first_state_dict_hook,
    flatten_state_dict,
    has_no_storage,
    in_second_storage,
    inner_tensors,
    make_subclass,
    make_wrapper,
    module_call,
    plain_tensors,
    rebuild_tensor,
    set_data,
    storage_key,
    stored_at,
    swap_parameters,
    tensor_hooks_of,
    tensors_in,
)

__all__ = [
    "NO_TORCH_FUNCTION",
    "RESHAPED",
    "SHALLOW_COPY_QUERY",
    "StorageReference",
    "StorageUsers",
    "TorchDispatchMode",
    "are_of_checkpoint",
    "call_after_backward",
    "checkpointing",
    "count_saved_tensor_hooks",
    "fake_tensors",
    "first_state_dict_hook",
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
    "storage_key",
    "stored_at",
    "swap_parameters",
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
    "without_saved_tensor_hooks",
]
