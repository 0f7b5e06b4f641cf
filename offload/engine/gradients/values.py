"""Values of one gradient: flat, and their squares summed."""

from __future__ import annotations

import torch

from offload import kernels
from offload.kernels import cuda
from offload.layout.placement import CHUNK


def squares_of(values: torch.Tensor) -> torch.Tensor:
    """(chunks,) float64: the sum of squares of each `CHUNK` elements of `values`, (n,), where they are.

    On a GPU nobody waits for it. The same bits everywhere, and those of `kernels.accumulate`.
    """
    if values.is_cuda:
        return cuda.sum_squares(values, CHUNK)
    parts = (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))
    return torch.tensor([kernels.sum_squares(part) for part in parts], dtype=torch.float64, device="cpu")


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """(numel,) of a gradient, dense and contiguous."""
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:  # of an embedding with sparse=True
        gradient = gradient.to_dense()
    return gradient.contiguous().view(-1)
