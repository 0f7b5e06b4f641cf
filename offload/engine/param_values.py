"""Checks of values that a user gives for a parameter, and of the memory for a copy of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from offload.errors import BudgetError, UsageError
from offload.sizes import format_size
from offload.swapper.memory.limits import free_host_memory

_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that fp32 represents exactly."""


def check_values(name: str, values: Any, shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Checks the values that a user gives for a state of a parameter.

    Args:
        name: name of the parameter.
        values: the values.
        shape: the shape that they must have.
        whole: shape of the parameter; `shape` is another one if the values are those of one rank.

    Raises:
        UsageError: `values` is no tensor, or has another shape, or a dtype that fp32 does not represent.
    """
    of = "" if shape == whole else f"this rank's shard of the {math.prod(whole)} elements of "
    expected = f"values of {of}parameter {name} must be a tensor of shape {list(shape)} in fp32"
    if not isinstance(values, torch.Tensor):
        raise UsageError(f"{expected}, got {type(values).__name__}")
    if tuple(values.shape) != shape:
        raise UsageError(f"{expected}, got shape {list(values.shape)}")
    if values.dtype not in _EXACT:
        raise UsageError(f"{expected}, or in bf16 or fp16, got {values.dtype}; convert it first: value.float()")


def check_room(name: str, numel: int) -> None:
    """Raises `BudgetError` if the RAM has no room for so many elements of a parameter in fp32."""
    need = numel * torch.float32.itemsize
    free = free_host_memory()
    if need > free:
        raise BudgetError(
            f"parameter {name} takes {format_size(need)} of RAM in fp32, {format_size(free)} is free; lower "
            '"host_memory" in the "offload" block, or end other programs that use memory'
        )
