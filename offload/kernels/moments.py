"""Moments in 8 bits: codes in blocks of 256 elements, with a scale for each block and moment.

The scales of a block's moments follow one another. See [Note: codes of moments] in native/moments.h.
"""

from __future__ import annotations

import torch

from offload.kernels import _native
from offload.kernels.arrays import CODES, FLOAT, address, length

BLOCK = 256
"""Elements of a block."""


def blocks_of(numel: int) -> int:
    """Returns the number of blocks that `numel` elements have."""
    return -(-numel // BLOCK)


def encode_moments(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, moment: int) -> None:
    """Rounds values to nearest: each differs from its code's by at most half of the block's scale.

    The root is stored for codes without a sign: there the bound is one of the roots, and the least code that is not
    zero stands for all smaller values but zero. A value of inf or NaN makes its block NaN.

    Args:
        values: (numel,) fp32 on the CPU, only read; from 0 on for codes without a sign. The first is one of a block.
        codes: (numel,) int8, or uint8 for roots; overwritten.
        scales: (blocks, moments) fp32; the column of this moment is overwritten.
        moment: number of the moment, from 0.

    Raises:
        TypeError: a tensor of a wrong dtype.
        ValueError: a tensor of a wrong shape, stride or device.
    """
    numel = length("values", values)
    at = address("values", values, FLOAT, numel)
    _native.encode_moments(at, _coded(codes, scales, moment, numel, 0), numel)


def decode_moments(
    codes: torch.Tensor, scales: torch.Tensor, moment: int, values: torch.Tensor, offset: int = 0
) -> None:
    """Writes the moments that codes stand for, with the same bits on every processor.

    Args:
        codes: (numel,) int8, or uint8 for roots; only read.
        scales: (blocks, moments) fp32, only read.
        moment: number of the moment, from 0.
        values: (numel,) fp32 on the CPU, overwritten.
        offset: number of the first code in the first block of `scales`.

    Raises:
        TypeError: a tensor of a wrong dtype.
        ValueError: a tensor of a wrong shape, stride or device.
    """
    numel = length("values", values)
    at = address("values", values, FLOAT, numel)
    _native.decode_moments(_coded(codes, scales, moment, numel, offset), offset, at, numel)


def _coded(
    codes: torch.Tensor, scales: torch.Tensor, moment: int, numel: int, offset: int
) -> tuple[int, int, int, bool]:
    """Returns a moment as the native code takes it: codes, first scale, distance of two scales, whether roots."""
    blocks, moments = blocks_of(offset + numel), scales.shape[-1]
    if tuple(scales.shape) != (blocks, moments) or not 0 <= moment < moments or not 0 <= offset < BLOCK:
        raise ValueError(
            f"scales: expected shape ({blocks}, moments), got {tuple(scales.shape)}, with moment {moment} and offset "
            f"{offset}"
        )
    at = address("codes", codes, CODES, numel)
    first = address("scales", scales.view(-1), FLOAT, blocks * moments)
    return at, first + moment * scales.itemsize, moments, codes.dtype is torch.uint8
