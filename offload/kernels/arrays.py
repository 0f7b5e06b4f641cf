"""Validation of tensors for the native kernels, which receive addresses."""

from __future__ import annotations

import torch

FLOAT = (torch.float32,)
BF16 = (torch.bfloat16,)
INT16 = (torch.int16,)
INT8 = (torch.int8,)
UINT8 = (torch.uint8,)
CODES = (*INT8, *UINT8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number that the native code uses for each of `FLOATS`."""
CODE_ELEMENT = 3
"""The number that it uses for moments in 8 bits."""
BF24_ELEMENT = 4
"""The number that it uses for bf16 weights whose masters have 8 low bits."""
LOW_BITS = (*INT16, *INT8)
"""Dtypes of the low bits of a bf16 weight's master: of 16 bits, or of 8."""


def element(dtype: torch.dtype) -> int:
    """Returns the number that the native code uses for `dtype`."""
    return ELEMENTS[dtype]


def length(name: str, tensor: torch.Tensor) -> int:
    """Returns the number of elements of `tensor`.

    Args:
        name: name of the argument, for the message.
        tensor: any tensor.

    Raises:
        TypeError: the argument is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return tensor.numel()


def address(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int, when: str = "") -> int:
    """Returns the address of the data of `tensor`, once every property that the native code relies on is checked.

    Args:
        name: name of the argument, for messages.
        tensor: (numel,), contiguous, on the CPU; the caller remains its owner.
        dtypes: dtypes that are allowed.
        numel: expected number of elements.
        when: words for messages that explain under which condition `dtypes` holds.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong device, shape, stride or storage.
    """
    if type(tensor) is not torch.Tensor:
        length(name, tensor)  # a Parameter or another subclass is accepted
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
