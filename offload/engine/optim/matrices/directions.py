"""The directions in which Muon and SinkGD move a matrix.

    Muon      the orthogonal matrix near the momentum, by a few Newton-Schulz iterations
    SinkGD    the gradient, with all rows of one norm and all columns of one norm

The operations of `orthogonalize` are those of `torch.optim.Muon`, in its order and in bf16 in its dtype, so that both
give the same bits. On a processor without products in bf16 the dtype is fp32, as in DeepSpeed. Versions of torch before
2.9 have no such optimizer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from offload.precision import products_in_bf16
from offload.swapper.memory.device import Device

_SMALLEST_NORM = 1e-7
"""Bound below the norm of a momentum, which is divided by it; torch's."""
_SMALLEST_LINE = 1e-20
"""Bound below the norm of a row or column. Squares of smaller elements vanish in fp32, and the norm would be 0."""


class Workspace(NamedTuple):
    """Memory for `orthogonalize`: flat tensors of one dtype on the computing device, of so many elements."""

    matrix: torch.Tensor
    """Rows times columns. The caller writes the matrix here."""
    other: torch.Tensor
    """Rows times columns."""
    polynomial: torch.Tensor
    """The square of the smaller of both."""


def in_bf16(device: Device) -> bool:
    """Returns True if a device makes the products of Muon in bf16, else in fp32."""
    # Without instructions for it a product in bf16 takes a hundred times as long as in fp32.
    return not device.host_addressable or products_in_bf16()


def orthogonalize(
    shape: tuple[int, int], workspace: Workspace, steps: int, coefficients: tuple[float, float, float]
) -> torch.Tensor:
    """Returns the matrix near the one in `workspace.matrix` whose singular values are near 1.

    Args:
        shape: rows and columns of the matrix.
        workspace: memory, whose `matrix` contains the rows of the matrix, one after the other; all is overwritten.
        steps: number of iterations.
        coefficients: of the iteration X <- aX + (bA + cA^2)X with A = XX'.

    Returns:
        (rows, columns) in the memory and dtype of the workspace; columns are contiguous if there are fewer of them.
    """
    a, b, c = coefficients
    numel, small, large = shape[0] * shape[1], min(shape), max(shape)
    tall = shape[0] > shape[1]
    given = workspace.matrix[:numel].view(shape)
    x = given.T if tall else given
    x.div_(x.norm().clamp(min=_SMALLEST_NORM))  # the largest singular value is now 1 at most
    polynomial = workspace.polynomial[: small * small].view(small, small)
    free, used = workspace.other[:numel].view(small, large), workspace.matrix[:numel].view(small, large)
    for _ in range(steps):
        # Read before the new matrix takes its place.
        gram = free.view(-1)[: small * small].view(small, small)
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(x, polynomial, x, beta=a, out=free)
        x, free, used = free, used, free
    return x.T if tall else x


def balance(gradient: torch.Tensor, iterations: int) -> None:
    """Normalizes the rows to a norm of the root of their length, then the columns, again and again, in place.

    Args:
        gradient: (rows, columns) fp32, contiguous. Rows and columns of zeros stay so.
        iterations: number of normalizations of the rows, and of the columns.
    """
    rows, columns = gradient.shape
    for _ in range(iterations):
        for dimension, length in ((1, columns), (0, rows)):
            norms = torch.linalg.vector_norm(gradient, dim=dimension, keepdim=True)
            gradient.mul_(math.sqrt(length) / norms.clamp_(min=_SMALLEST_LINE))
