"""Every private name of torch that this library uses, with the reason: a new version of torch affects one folder.

`tests/repository/test_imports.py` checks that no other file of the package uses one.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from offload.torch_internals.graphs import (
    are_of_checkpoint,
    call_after_backward,
    checkpointing,
    count_saved_tensor_hooks,
    graph_is_retained,
    inside_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saves_checkpoint_input,
    top_saved_tensor_hooks,
    without_saved_tensor_hooks,
)
from offload.torch_internals.modes import (
    active_modes,
    is_optimized_module,
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
    global_module_hooks,
    has_no_storage,
    in_second_storage,
    inner_tensors,
    is_fake,
    make_subclass,
    make_wrapper,
    module_call,
    owns_its_memory,
    plain_tensors,
    rebuild_tensor,
    set_data,
    storage_key,
    stored_at,
    swap_parameters,
    tensor_hooks_of,
    tensors_in,
)
