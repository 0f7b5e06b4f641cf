"""Split masters, accumulation of gradients, and sums of squares."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.kernels import _native
from offload.kernels.update import BF16, ELEMENTS, FLOAT, FLOATS, INT8, LOW_BITS, Noise, address, element, length


def split_master(
    master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, noise: Noise | None = None
) -> None:
    """Splits fp32 masters into bf16 weights and their 16 low bits. For 8 low bits, rounds the masters to bf24 first.

    weight = (bits(master) + 0x8000) >> 16, residual = bits(master) - (weight << 16). The weight equals
    `master.to(torch.bfloat16)` except at exact ties, which round up in the bit pattern. Every NaN becomes weight
    0x7FC0, residual 0. A bf24 master is the upper 24 bits of an fp32: see [Note: bf24 master] in native/bits.h.

    Args:
        master: (numel,) fp32, only read.
        weight: (numel,) bf16, overwritten.
        residual: (numel,) int16, or int8 of bf24 masters; overwritten.
        noise: rounds bf24 masters stochastically; None rounds them to nearest. No effect on other masters.
    """
    numel = length("master", master)
    arrays = (
        address("master", master, FLOAT, numel),
        address("weight", weight, BF16, numel),
        address("residual", residual, LOW_BITS, numel),
        numel,
    )
    if residual.dtype in INT8:
        _native.split_bf24(*arrays, noise)
    else:
        _native.split_master(*arrays)


def join_master(weight: torch.Tensor, residual: torch.Tensor, master: torch.Tensor) -> None:
    """Restores the fp32 masters that `split_master` has split, bit for bit except for NaNs and rounded bits.

    Args:
        weight: (numel,) bf16, only read.
        residual: (numel,) int16, or int8 of bf24 masters; only read.
        master: (numel,) fp32, overwritten.
    """
    numel = length("weight", weight)
    join = _native.join_bf24 if residual.dtype in INT8 else _native.join_master
    join(
        address("weight", weight, BF16, numel),
        address("residual", residual, LOW_BITS, numel),
        address("master", master, FLOAT, numel),
        numel,
    )


class Sum:
    """Memory to which gradients are added, (numel,): checked once for any number of gradients."""

    def __init__(self, out: torch.Tensor) -> None:
        """Checks the memory.

        Args:
            out: (numel,) bf16, fp16 or fp32. The caller remains its owner, and does not resize its storage.
        """
        self._numel = length("out", out)
        self._address, self._element = address("out", out, FLOATS, self._numel), element(out.dtype)
        self._out = out  # keeps the memory alive as long as its address is used
        native = _native.Sum(self._address, self._element, self._numel, torch.Tensor, torch.strided, ELEMENTS)
        self.take: Callable[[torch.Tensor, bool], float | None] = native.take
        """Function of a tensor of any shape and of `add`: does what `accumulate` does, in one call, and returns the
        sum of squares. Returns None, and changes nothing, if the tensor is not dense, contiguous, on the CPU, outside
        of autograd, of as many elements, and of a dtype that the kernels add."""

    def accumulate(self, grad: torch.Tensor, *, add: bool, chunk: int) -> list[float]:
        """Sets this memory to `grad`, or adds `grad` to it: does what `accumulate` does, for all chunks in one call.

        Args:
            grad: (numel,) bf16, fp16 or fp32, only read.
            add: True adds to the memory; False overwrites it.
            chunk: number of elements of a chunk: a multiple of 4096, or a divisor of 32768.

        Returns:
            The sum of squares of each chunk, with the bits of a call for this chunk alone.
        """
        squares: list[float] = _native.accumulate(
            self._address,
            self._element,
            address("grad", grad, FLOATS, self._numel),
            element(grad.dtype),
            self._numel,
            add,
            chunk,
        )
        return squares


def accumulate(out: torch.Tensor, grad: torch.Tensor, *, add: bool) -> float:
    """Sets `out` to `grad`, or to `out + grad`, and returns the sum of squares of the new `out`.

    Each sum is computed in fp32 and rounded once, to even, to the dtype of `out`. The squares of the stored values are
    added in float64 in a fixed order.

    Args:
        out: (numel,) bf16, fp16 or fp32, overwritten.
        grad: (numel,) bf16, fp16 or fp32, only read.
        add: True adds to `out`; False overwrites it.

    Returns:
        The sum of squares; inf or NaN if any element of `out` is.
    """
    return sum(Sum(out).accumulate(grad, add=add, chunk=out.numel()), 0.0)


def sum_squares(x: torch.Tensor) -> float:
    """Returns the sum of the squares of `x`, (numel,) bf16, fp16 or fp32, added in float64 in a fixed order."""
    return sum(squares_of_chunks(x, length("x", x)), 0.0)


def squares_of_chunks(x: torch.Tensor, chunk: int) -> list[float]:
    """Returns the sum of the squares of each `chunk` elements of `x`, as `Sum.accumulate` does.

    `x` is (numel,) bf16, fp16 or fp32, and only read.
    """
    numel = length("x", x)
    return _native.sum_squares(address("x", x, FLOATS, numel), element(x.dtype), numel, chunk)
