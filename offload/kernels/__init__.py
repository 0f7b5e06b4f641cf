"""The optimizer's arithmetic on the CPU: AdamW, split master weights, gradient sums.

Every function takes flat contiguous CPU tensors of one length, owned by the caller, and works in
place with the GIL released. The results have the same bits for every instruction set, number of
threads and cut of the tensors into calls. Autograd does not see the writes. Tensors must not overlap.

Environment, read at import: OFFLOAD_THREADS (default: the cores this process may use) and
OFFLOAD_ISA (scalar, avx2 or avx512; default: the best that there is).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from offload.kernels import _native
from offload.kernels.settings import isa_from, threads_from

__all__ = [
    "AdamWStep",
    "accumulate",
    "adamw",
    "join_master",
    "split_master",
    "sum_squares",
    "thread_count",
]

_native.configure(isa_from(os.environ, _native.supported_isas()), threads_from(os.environ))

_FP32 = (torch.float32,)
_BF16 = (torch.bfloat16,)
_INT16 = (torch.int16,)
_FLOAT = (torch.bfloat16, torch.float32)


class AdamWStep(NamedTuple):
    """The hyperparameters of one step, named as in `torch.optim.AdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0
    """Multiplies the gradient: the clip coefficient."""
    decoupled: bool = True
    """False: the decay is added to the gradient (L2), as `torch.optim.Adam` does."""


def adamw(
    weight: torch.Tensor,  # (numel,) bf16, or fp32 without a residual
    residual: torch.Tensor | None,  # (numel,) int16, the other half of a bf16 weight's master
    exp_avg: torch.Tensor,  # (numel,) fp32
    exp_avg_sq: torch.Tensor,  # (numel,) fp32
    grad: torch.Tensor,  # (numel,) bf16 or fp32; only read
    step: AdamWStep,
) -> None:
    """Update the weight, its residual and both moments by one step, in place.

    The formulas are those of `torch.optim.AdamW` and `Adam` (Loshchilov & Hutter 2019), in fp32.
    """
    numel = _length("weight", weight)
    if residual is None:
        weight_at, residual_at = _address("weight", weight, _FP32, numel, "without a residual, "), 0
    else:
        weight_at = _address("weight", weight, _BF16, numel, "with a residual, ")
        residual_at = _address("residual", residual, _INT16, numel)
    lr, beta1, beta2, eps, weight_decay, number, grad_scale, decoupled = step
    if number < 1:
        raise ValueError(f"step: expected a number from 1, got {number}")
    exp_avg_at = _address("exp_avg", exp_avg, _FP32, numel)
    exp_avg_sq_at = _address("exp_avg_sq", exp_avg_sq, _FP32, numel)
    grad_at = _address("grad", grad, _FLOAT, numel)
    if numel == 0:
        return
    _native.adamw(
        weight_at,
        residual_at,
        exp_avg_at,
        exp_avg_sq_at,
        grad_at,
        grad.dtype is torch.bfloat16,
        numel,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        number,
        grad_scale,
        decoupled,
    )


def split_master(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Write `master` (numel,) fp32 as `weight` (numel,) bf16 and `residual` (numel,) int16.

    weight = (bits(master) + 0x8000) >> 16, residual = bits(master) - (weight << 16). The weight is
    `master.to(torch.bfloat16)` except at exact ties, which round up in the bit pattern. Every NaN
    becomes weight 0x7FC0, residual 0.
    """
    numel = _length("master", master)
    _native.split_master(
        _address("master", master, _FP32, numel),
        _address("weight", weight, _BF16, numel),
        _address("residual", residual, _INT16, numel),
        numel,
    )


def join_master(weight: torch.Tensor, residual: torch.Tensor, master: torch.Tensor) -> None:
    """Write to `master` (numel,) fp32 what `split_master` split: the same bits, but for NaNs."""
    numel = _length("weight", weight)
    _native.join_master(
        _address("weight", weight, _BF16, numel),
        _address("residual", residual, _INT16, numel),
        _address("master", master, _FP32, numel),
        numel,
    )


def accumulate(out: torch.Tensor, grad: torch.Tensor, *, add: bool) -> float:
    """Set `out` to `grad`, or with `add` to `out + grad`; return the sum of the squares of the new `out`.

    Both are (numel,), each bf16 or fp32. The sum is taken in fp32 and rounded once, to even, to
    out's dtype. The squares are those of the values as stored, added in float64 in a fixed order.
    """
    numel = _length("out", out)
    return _native.accumulate(
        _address("out", out, _FLOAT, numel),
        out.dtype is torch.bfloat16,
        _address("grad", grad, _FLOAT, numel),
        grad.dtype is torch.bfloat16,
        numel,
        add,
    )


def sum_squares(x: torch.Tensor) -> float:
    """The sum of the squares of `x` (numel,) bf16 or fp32, in float64, added in a fixed order."""
    numel = _length("x", x)
    return _native.sum_squares(_address("x", x, _FLOAT, numel), x.dtype is torch.bfloat16, numel)


def thread_count() -> int:
    """Threads that one call may use, the calling thread included."""
    return _native.thread_count()


def _length(name: str, tensor: torch.Tensor) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return tensor.numel()


def _address(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int, when: str = "") -> int:
    """The address of `tensor`'s data, if it is a flat contiguous CPU tensor of `numel` elements."""
    if type(tensor) is not torch.Tensor:
        _length(name, tensor)  # a Parameter or another subclass passes
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected {when}a tensor of {expected}, got {tensor.dtype}")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.dim() != 1 or tensor.numel() != numel:
        raise ValueError(f"{name}: expected shape ({numel},), got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {tensor.stride()}")
    return tensor.data_ptr()
