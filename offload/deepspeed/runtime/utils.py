"""`deepspeed.runtime.utils`: the functions that scripts import."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from offload.deepspeed.accelerator import get_accelerator
from offload.deepspeed.utils.logging import logger
from offload.sizes import format_size
from offload.torch_internals import tree_map

__all__ = [
    "clip_grad_norm_",
    "copy_to_device",
    "empty_cache",
    "ensure_directory_exists",
    "move_to_device",
    "see_memory_usage",
    "set_random_seed",
]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs the memory in use, and the most that was.

    Args:
        message: what the line begins with.
        force: False to do nothing, as in DeepSpeed.
    """
    # At the level that DeepSpeed's logger shows, since the caller has asked for the line.
    if force:
        found = get_accelerator()
        used, most = found.memory_allocated(), found.max_memory_allocated()
        logger.warning("%s: %s %s, at most %s", message, found.device_name(), format_size(used), format_size(most))


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch.

    Args:
        seed: the seed.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Returns `item`, which may be nested, with its tensors on a device.

    Args:
        item: tensors in lists, tuples and dicts.
        device: the device.
        criterion_func: returns True for what to move; by default all tensors.
    """
    chosen = criterion_func or (lambda each: isinstance(each, torch.Tensor))
    return tree_map(lambda each: each.to(device) if chosen(each) else each, item)


copy_to_device = move_to_device


def empty_cache() -> None:
    """Gives memory that torch has cached back to the device."""
    get_accelerator().empty_cache()


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Creates the folder of a file.

    Args:
        filename: path of the file.
    """
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
