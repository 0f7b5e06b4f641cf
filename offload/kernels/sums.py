"""Split masters, gradients that add up, and their sums of squares."""

from __future__ import annotations

import torch

from offload.kernels import _native
from offload.kernels.arrays import BF16, FLOAT, FLOATS, INT16, address, element, length


def split_master(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Write `master` (numel,) fp32 as `weight` (numel,) bf16 and `residual` (numel,) int16.

    weight = (bits(master) + 0x8000) >> 16, residual = bits(master) - (weight << 16). The weight is
    `master.to(torch.bfloat16)` except at exact ties, which round up in the bit pattern. Every NaN
    becomes weight 0x7FC0, residual 0.
    """
    numel = length("master", master)
    _native.split_master(
        address("master", master, FLOAT, numel),
        address("weight", weight, BF16, numel),
        address("residual", residual, INT16, numel),
        numel,
    )


def join_master(weight: torch.Tensor, residual: torch.Tensor, master: torch.Tensor) -> None:
    """Write to `master` (numel,) fp32 what `split_master` split: the same bits, but for NaNs."""
    numel = length("weight", weight)
    _native.join_master(
        address("weight", weight, BF16, numel),
        address("residual", residual, INT16, numel),
        address("master", master, FLOAT, numel),
        numel,
    )


def accumulate(out: torch.Tensor, grad: torch.Tensor, *, add: bool) -> float:
    """Set `out` to `grad`, or with `add` to `out + grad`; return the sum of the squares of the new `out`.

    Both are (numel,), each bf16, fp16 or fp32. The sum is taken in fp32 and rounded once, to even, to
    out's dtype. The squares are those of the values as stored, added in float64 in a fixed order; where
    one of them is inf or NaN, so is their sum.
    """
    numel = length("out", out)
    return _native.accumulate(
        address("out", out, FLOATS, numel),
        element(out.dtype),
        address("grad", grad, FLOATS, numel),
        element(grad.dtype),
        numel,
        add,
    )


def sum_squares(x: torch.Tensor) -> float:
    """The sum of the squares of `x` (numel,) bf16, fp16 or fp32, in float64, added in a fixed order."""
    numel = length("x", x)
    return _native.sum_squares(address("x", x, FLOATS, numel), element(x.dtype), numel)
