"""`deepspeed.checkpoint.utils`: copies of tensors that can be pickled."""

from __future__ import annotations

from typing import Any

import torch

from offload.torch_internals import tree_map


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns `item`, which may be nested, with a copy of each tensor that has memory of its own size.

    Args:
        item: tensors in lists, tuples and dicts.
        device: device of the copies.
    """
    # `copy=True`: a view on the CPU would be pickled with the memory of all.
    return tree_map(lambda each: each.detach().to(device, copy=True) if isinstance(each, torch.Tensor) else each, item)
