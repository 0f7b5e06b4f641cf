"""LAMB (You et al. 2020) in two passes, since a parameter's step depends on the norms of all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.kernels import _native
from offload.kernels.steps import LambStep
from offload.kernels.update import Partition, addresses, run

BLOCK = 4096
"""Elements of a block of the sums."""


class LambSegment(NamedTuple):
    """Elements [start, stop): a whole parameter, or a piece of one that begins at a multiple of `BLOCK` in it."""

    start: int
    stop: int
    step: LambStep


def lamb(partition: Partition, segments: Sequence[LambSegment]) -> None:
    """Do the step of each segment, which is a whole parameter. Moments are exp_avg and exp_avg_sq, fp32.

    A gradient with inf or NaN spoils the moments of its segment and all its weights: decide before.
    """
    sums = lamb_moments(partition, segments)
    ratios = [lamb_ratio(each.step, [mine]) for each, mine in zip(segments, sums, strict=True)]
    lamb_move(partition, segments, ratios)


def lamb_moments(partition: Partition, segments: Sequence[LambSegment]) -> list[torch.Tensor]:
    """The first pass: update the moments, and sum the squares of weights and directions of each segment.

    One tensor for each segment, (blocks, 2) float64, a row for each `BLOCK` elements from its start. Of a parameter in
    several pieces, `lamb_ratio` takes those of all of them in order: the bits are then those of one piece.
    """
    weight, beside, moments, _, grad, numel = addresses("lamb", 2, partition)
    _check(segments, numel)
    found = []
    for start, stop, step in segments:
        sums = torch.zeros(-(-(stop - start) // BLOCK), 2, dtype=torch.float64)
        settings = [float(value) for value in (*step[:7], 1.0)]
        _native.lamb_moments(weight, beside, moments, grad, numel, (start, stop, settings), sums.data_ptr())
        found.append(sums)
    return found


def lamb_ratio(step: LambStep, sums: Sequence[torch.Tensor]) -> float:
    """|weight| over |direction| of a parameter, within the bounds of `step`; 1 where either norm is zero."""
    weight = direction = 0.0
    for piece in sums:
        for w, u in piece.tolist():
            weight, direction = weight + w, direction + u
    if weight == 0 or direction == 0:
        return 1.0
    return min(max(math.sqrt(weight) / math.sqrt(direction), step.min_ratio), step.max_ratio)


def lamb_move(partition: Partition, segments: Sequence[LambSegment], ratios: Sequence[float]) -> None:
    """The second pass: move the weights, each segment by its ratio."""
    _check(segments, partition.weight.numel())
    run(
        "lamb",
        2,
        partition,
        [(start, stop, (*step[:7], ratio)) for (start, stop, step), ratio in zip(segments, ratios, strict=True)],
    )


def _check(segments: Sequence[LambSegment], numel: int) -> None:
    end = 0
    for start, stop, step in segments:
        if not end <= start <= stop <= numel:
            raise ValueError(f"segments: expected them in order within {numel} elements, got [{start}, {stop})")
        if step.step < 1:
            raise ValueError(f"step: expected a number from 1, got {step.step}")
        end = stop
