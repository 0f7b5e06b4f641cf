"""Tensors as the native kernels take them: checked, then an address."""

from __future__ import annotations

import torch

FLOAT = (torch.float32,)
BF16 = (torch.bfloat16,)
INT16 = (torch.int16,)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def element(dtype: torch.dtype) -> int:
    """The number that the native code has for `dtype`."""
    return _ELEMENTS[dtype]


def length(name: str, tensor: torch.Tensor) -> int:
    """Elements of `tensor`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return tensor.numel()


def address(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int, when: str = "") -> int:
    """The address of `tensor`'s data, if it is a flat contiguous CPU tensor of `numel` elements."""
    if type(tensor) is not torch.Tensor:
        length(name, tensor)  # a Parameter or another subclass passes
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected {when}a tensor of {expected}, got {tensor.dtype}")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.dim() != 1 or tensor.numel() != numel:
        raise ValueError(f"{name}: expected shape ({numel},), got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {tensor.stride()}")
    if tensor.is_neg():
        raise ValueError(f"{name}: expected a tensor whose bytes are its values: call .resolve_neg()")
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + numel) * tensor.itemsize:
        raise ValueError(f"{name}: its storage was resized and does not hold {numel} elements")
    return tensor.data_ptr()
