"""Flattening of one gradient, the chunks of its segment, and the sums of its squares."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from offload import kernels
from offload.kernels import cuda
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that the kernels add; others are converted."""


def squares_of(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each `CHUNK` elements of `values`, (n,), as (chunks,) float64 on their device.

    On a GPU the host does not wait. The bits are the same everywhere, and equal those of `kernels.accumulate`.
    """
    if values.is_cuda:
        return cuda.sum_squares(values, CHUNK)
    parts = (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))
    return torch.tensor([kernels.sum_squares(part) for part in parts], dtype=torch.float64, device="cpu")


def total_of(
    squares: Sequence[Mapping[tuple[int, int], float | torch.Tensor]], elsewhere: Container[tuple[int, int]] = ()
) -> float:
    """Returns the sum of the squares of all gradients, all of which must be numbers by now.

    Added in layout order in float64, so that the norm has the same bits whatever order gradients arrived in.

    Args:
        squares: sums of squares of each unit's chunks, by (segment, first element).
        elsewhere: parameters that another process counts, as (unit, segment).
    """
    total = 0.0
    for unit, chunks in enumerate(squares):
        for key in sorted(chunks):
            value = chunks[key]
            assert isinstance(value, float)
            total += 0.0 if (unit, key[0]) in elsewhere else value
    return total


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as (numel,), dense and contiguous, outside of autograd."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:  # from an embedding with sparse=True
        gradient = gradient.to_dense()
    gradient = gradient.contiguous()
    return gradient if gradient.dim() == 1 else gradient.view(-1)


def borders(layout: UnitLayout, part: range) -> list[int]:
    """Returns the positions in `part` at which chunks of a gradient begin, sorted, with 0 and the end of `part`."""
    found = {0, len(part)}
    for segment in layout.segments:
        first, last = max(segment.start, part.start), min(segment.stop, part.stop)
        found.update(start - part.start for start in range(first, last, CHUNK))
    return sorted(found)


def parameter_starts(layout: UnitLayout, part: range) -> list[int]:
    """Returns the positions in `part` at which parameters begin, or go on from another rank's, sorted."""
    return sorted(
        max(segment.start, part.start) - part.start
        for segment in layout.segments
        if max(segment.start, part.start) < min(segment.stop, part.stop)
    )
