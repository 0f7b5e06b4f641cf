"""Block formats of frozen weights, and of values that ranks send: codes of 4 or 8 bits, with a scale for each block.

    nf4     64 values in 34 bytes: 32 of codes, the first value of each byte in its high bits, and a scale in bf16
    int8    128 values in 130 bytes: 128 signed codes, and a scale in bf16

The scale is the largest magnitude of the block, exact for weights in bf16. Blocks follow one another, so a range of
blocks is a range of bytes. nf4 uses the code book of QLoRA (arXiv 2305.14314): quantiles of a normal distribution. A
value is one product in fp32, rounded to the dtype of the weights: the same bits on every processor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from offload.kernels import _native
from offload.kernels.update import FLOATS, UINT8, address, element, length

_SCALE_NBYTES = 2

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the codes of nf4, as shares of the scale."""

_DEVICE_BLOCKS = 1 << 14
"""Blocks that are dequantized at a time on an accelerator, so that values in fp32 take a few megabytes there."""


class BlockFormat(NamedTuple):
    """A block format."""

    name: str
    number: int
    """Number that the native code uses."""
    values: int
    """Values of a block."""
    nbytes: int
    """Bytes of a block."""

    def stored_nbytes(self, numel: int) -> int:
        """Returns the bytes of `numel` values."""
        return -(-numel // self.values) * self.nbytes


BLOCK_FORMATS = {
    "nf4": BlockFormat("nf4", 0, 64, 64 // 2 + _SCALE_NBYTES),
    "int8": BlockFormat("int8", 1, 128, 128 + _SCALE_NBYTES),
}
"""The formats, by their names in configs."""


def quantize(form: BlockFormat, values: torch.Tensor, blocks: torch.Tensor) -> None:
    """Writes the codes and scales of `values` into `blocks`.

    Each code is the code with the nearest value. Of two equally near codes it is the lower one in nf4, the even one in
    int8. A block that contains inf or NaN becomes NaN.

    Args:
        values: (numel,) bf16, fp16 or fp32, only read. On an accelerator the format is int8.
        blocks: (form.stored_nbytes(numel),) uint8 on the same device, overwritten.
    """
    numel = length("values", values)
    if not values.is_cpu:
        _quantize_by_torch(form, values, blocks)
        return
    _native.quantize(
        form.number,
        address("values", values, FLOATS, numel),
        element(values.dtype),
        address("blocks", blocks, UINT8, form.stored_nbytes(numel)),
        numel,
    )


def dequantize(form: BlockFormat, blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the values of `blocks` into `values`, with the same bits on every device.

    Args:
        blocks: (form.stored_nbytes(numel),) uint8, only read.
        values: (numel,) bf16, fp16 or fp32 on the same device, overwritten.
    """
    numel = length("values", values)
    if not values.is_cpu:
        _dequantize_by_torch(form, blocks, values)
        return
    _native.dequantize(
        form.number,
        address("blocks", blocks, UINT8, form.stored_nbytes(numel)),
        address("values", values, FLOATS, numel),
        element(values.dtype),
        numel,
    )


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Returns the two values of each byte of nf4, (256, 2) fp32, so that one look-up of a byte gives both."""
    with torch.inference_mode(False):
        book = torch.tensor(NF4, dtype=torch.float32, device="cpu")
        # The copy is done when this returns, so every stream may read the table.
        return torch.stack((book.repeat_interleave(16), book.repeat(16)), 1).to(device)


@torch.no_grad()
def _quantize_by_torch(form: BlockFormat, values: torch.Tensor, blocks: torch.Tensor) -> None:
    """Quantizes to int8 like `quantize`, but with torch's operations: for accelerators, on the current stream."""
    assert form.name == "int8", "weights are stored as nf4 by the CPU alone"
    rows = blocks.view(-1, form.nbytes)
    largest = torch.finfo(torch.bfloat16).max
    for first in range(0, len(rows), _DEVICE_BLOCKS):
        into = rows[first : first + _DEVICE_BLOCKS]
        part = values[first * form.values : (first + len(into)) * form.values].float()
        part = torch.nn.functional.pad(part, (0, len(into) * form.values - len(part))).view(len(into), form.values)
        most = part.abs().amax(1, keepdim=True)
        scale = most.bfloat16()
        # The largest finite values of fp32 would round to infinity.
        scale = torch.where(scale.isinf() & most.isfinite(), largest, scale.float())
        share = torch.where(scale > 0, part / scale, 0.0) * 127.0
        # inf divided by inf is a share of NaN. Its code does not matter, since the scale makes the value a NaN.
        codes = share.nan_to_num(0.0).clamp_(-127.0, 127.0).round_()
        into[:, :-_SCALE_NBYTES].copy_(codes.to(torch.int8).view(torch.uint8))
        into[:, -_SCALE_NBYTES:].copy_(scale.bfloat16().view(torch.uint8))


@torch.no_grad()
def _dequantize_by_torch(form: BlockFormat, blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Dequantizes like `dequantize`, but with torch's operations: for accelerators, on the current stream."""
    numel = values.numel()
    rows = blocks.view(-1, form.nbytes)
    pairs = _pairs(values.device)
    for first in range(0, len(rows), _DEVICE_BLOCKS):
        part = rows[first : first + _DEVICE_BLOCKS]
        codes, scale = part[:, :-_SCALE_NBYTES], part[:, -_SCALE_NBYTES:].contiguous().view(torch.bfloat16).float()
        if form.name == "nf4":
            decoded = pairs[codes.int()].view(len(part), form.values).mul_(scale)
        else:
            decoded = codes.view(torch.int8).float().mul_(scale * (1.0 / 127.0))
        start = first * form.values
        stop = min(start + decoded.numel(), numel)
        values[start:stop].copy_(decoded.view(-1)[: stop - start])
