"""LAMB (You et al. 2020) in two passes: a parameter's step depends on norms over all of its elements.

    u = m / (sqrt(v) + eps) + weight_decay * p
    p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * |p| / |u| * u

The moments m and v in the direction u are not corrected for their bias. As in DeepSpeed, the step's length is
corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.kernels import _native
from offload.kernels.update import (
    LambStep,
    NativeSegment,
    Noise,
    Partition,
    addresses,
    check_blocks,
    check_noise,
    check_ranges,
    run,
)

BLOCK = 4096
"""Elements of a block of the sums."""


class LambSegment(NamedTuple):
    """Elements [start, stop): an entire parameter, or a range that starts at a multiple of `BLOCK` in its parameter."""

    start: int
    stop: int
    step: LambStep
    noise: Noise | None = None
    """Rounds bf16 and 8-bit moments, and bf24 masters; None if all are fp32."""
    grad: torch.Tensor | None = None
    """(stop - start,) of the dtype of the partition's gradient, which it replaces; only read."""


def lamb(partition: Partition, segments: Sequence[LambSegment]) -> None:
    """Performs a LAMB step of each segment in place.

    A gradient with inf or NaN ruins moments and all weights of its segment: check the gradient before.

    Args:
        partition: tensors of one length; the moments are exp_avg and exp_avg_sq, both fp32, both bf16 or both codes.
        segments: ordered and disjoint; each is an entire parameter.

    Raises:
        ValueError: segments out of order, or a tensor of a wrong shape.
        TypeError: a tensor of a wrong dtype.
    """
    sums = lamb_moments(partition, segments)
    ratios = [lamb_ratio(segment.step, [own_sums]) for segment, own_sums in zip(segments, sums, strict=True)]
    lamb_move(partition, segments, ratios)


def lamb_moments(partition: Partition, segments: Sequence[LambSegment]) -> list[torch.Tensor]:
    """Updates the moments and returns sums of the squares of weights and directions: the first pass.

    Returns one (blocks, 2) float64 tensor for each segment, with a row [weight, direction] for each `BLOCK` elements
    from the segment's start. For a parameter in several segments, pass all their tensors to `lamb_ratio` in order: the
    ratio then has the bits that it would have in one segment. Arguments and errors are as for `lamb`.
    """
    arrays = addresses("lamb", 2, partition)
    _check(segments, arrays.numel)
    check_noise(partition, segments)
    check_blocks(partition, segments)
    segment_sums = []
    for start, stop, step, noise, grad in segments:
        # One row for each block of a parameter, counted from the segment's start, so that ranks can join their rows.
        sums = torch.zeros(-(-(stop - start) // BLOCK), 2, dtype=torch.float64, device="cpu")
        segment = NativeSegment(start, stop, (*step[:7], 1.0), noise, grad)
        _native.lamb_moments(*arrays, segment.native(partition.grad.dtype), sums.data_ptr())
        segment_sums.append(sums)
    return segment_sums


def lamb_ratio(step: LambStep, sums: Sequence[torch.Tensor]) -> float:
    """Returns the trust ratio |weight| / |direction| within the bounds of `step`, or 1 if either norm is zero.

    `sums` are results of `lamb_moments` for all segments of one parameter, in order.
    """
    weight = direction = 0.0
    # Added in double, one after the other: the order fixes the bits, however many segments the parameter has.
    for piece in sums:
        for w, u in piece.tolist():
            weight, direction = weight + w, direction + u
    # As in DeepSpeed: a parameter of zeros must be able to leave zero.
    if weight == 0 or direction == 0:
        return 1.0
    return min(max(math.sqrt(weight) / math.sqrt(direction), step.min_ratio), step.max_ratio)


def lamb_move(partition: Partition, segments: Sequence[LambSegment], ratios: Sequence[float]) -> None:
    """Moves the weights, each segment by its ratio: the second pass.

    Args:
        partition: the tensors that were passed to `lamb_moments`.
        segments: the segments that were passed to `lamb_moments`.
        ratios: the trust ratio of each segment.

    Raises:
        ValueError: segments out of order, a tensor of a wrong shape, or no noise where moments or masters need one.
        TypeError: a tensor of a wrong dtype.
    """
    _check(segments, partition.weight.numel())
    check_noise(partition._replace(moments=()), segments)
    run(
        "lamb",
        2,
        partition,
        # The moments are only read here, and rounded to themselves, whatever the noise.
        [
            NativeSegment(segment.start, segment.stop, (*segment.step[:7], ratio), segment.noise)
            for segment, ratio in zip(segments, ratios, strict=True)
        ],
    )


def _check(segments: Sequence[LambSegment], numel: int) -> None:
    check_ranges(segments, numel)
    for segment in segments:
        if segment.step.step < 1:
            raise ValueError(f"step: expected a number from 1, got {segment.step.step}")
