"""One fused pass of an optimizer over a partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.kernels import _native
from offload.kernels.arrays import BF16, FLOAT, FLOATS, INT16, address, element, length
from offload.kernels.steps import RULES, AdagradStep, AdamWStep, LambStep, Segment, Step


class Partition(NamedTuple):
    """Flat contiguous CPU tensors of one length, (numel,), that do not overlap.

    A bf16 `weight` has its `residual` (int16), an fp16 one its `master` (fp32); an fp32 one is its own master.
    `moments` are as many as the rule has, all fp32, or for AdamW all bf16. `grad` is only read.
    """

    weight: torch.Tensor  # (numel,) fp32, bf16 or fp16
    grad: torch.Tensor  # (numel,) fp32, bf16 or fp16
    moments: tuple[torch.Tensor, ...]  # (numel,) each
    residual: torch.Tensor | None = None  # (numel,) int16
    master: torch.Tensor | None = None  # (numel,) fp32


def update(partition: Partition, segments: Sequence[Segment]) -> None:
    """Do the step of each segment to its elements: unscale, decay, moments, weight, all in one pass, in place.

    Segments are in order, do not overlap, and are of one rule; elements outside of them are left alone. A segment may
    end and another begin anywhere: no bit depends on it.
    """
    numel = length("weight", partition.weight)
    if not segments:
        return
    rule, moments = check_segments(segments, numel)
    run(rule, moments, partition, segments)


def probe(partition: Partition) -> None:
    """Read and write what a step of AdamW does, with no arithmetic to speak of: the bound of a step's time.

    Finite values stay what they are. For benchmarks.
    """
    numel = length("weight", partition.weight)
    run("probe", 2, partition, [(0, numel, (0.0,))])


class Addresses(NamedTuple):
    """A partition as the native code takes it; a pair is an address and an element type."""

    weight: tuple[int, int]
    beside: int
    moments: list[int]
    moment_type: int
    grad: tuple[int, int]
    numel: int


def addresses(rule: str, moments: int, partition: Partition) -> Addresses:
    """Check the tensors for a rule with so many moments."""
    numel = length("weight", partition.weight)
    if len(partition.moments) != moments:
        raise ValueError(f"moments: expected {moments} for {rule}, got {len(partition.moments)}")
    weight, beside = _weight(partition, numel)
    first = partition.moments[0].dtype if partition.moments else torch.float32
    allowed = (first,) if first in (torch.float32, torch.bfloat16) and rule == "adamw" else FLOAT
    return Addresses(
        weight,
        beside,
        [address(f"moments[{i}]", moment, allowed, numel) for i, moment in enumerate(partition.moments)],
        element(first) if first in FLOATS else 0,
        (address("grad", partition.grad, FLOATS, numel), element(partition.grad.dtype)),
        numel,
    )


def run(rule: str, moments: int, partition: Partition, segments: Sequence[tuple[int, int, Sequence[float]]]) -> None:
    """Run a native rule over segments, whose settings are its own."""
    arrays = addresses(rule, moments, partition)
    if arrays.numel:
        given = [(start, stop, [float(value) for value in settings]) for start, stop, settings in segments]
        _native.update(rule, *arrays, given)


def adamw(
    weight: torch.Tensor,  # (numel,) bf16, or fp32 without a residual
    residual: torch.Tensor | None,  # (numel,) int16, the other half of a bf16 weight's master
    exp_avg: torch.Tensor,  # (numel,) fp32
    exp_avg_sq: torch.Tensor,  # (numel,) fp32
    grad: torch.Tensor,  # (numel,) bf16 or fp32; only read
    step: AdamWStep,
) -> None:
    """`update` of all elements by one step of AdamW."""
    numel = length("weight", weight)
    if residual is None:
        address("weight", weight, FLOAT, numel, "without a residual, ")
    else:
        address("weight", weight, BF16, numel, "with a residual, ")
    moments = (exp_avg, exp_avg_sq)
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        address(name, moment, FLOAT, numel)
    update(Partition(weight, grad, moments, residual), [Segment(0, numel, step)])


def check_segments(segments: Sequence[Segment], numel: int) -> tuple[str, int]:
    """The native rule of the segments and how many moments it has; raises where they are not as `update` says."""
    kind, end = type(segments[0].step), 0
    if kind not in RULES:
        raise TypeError(f"step: expected one of {', '.join(each.__name__ for each in RULES)}, got {kind.__name__}")
    for start, stop, step in segments:
        if not end <= start <= stop <= numel:
            raise ValueError(f"segments: expected them in order within {numel} elements, got [{start}, {stop})")
        if type(step) is not kind:
            raise TypeError(f"step: expected {kind.__name__} in all segments, got {type(step).__name__}")
        _check_counted(step)
        end = stop
    return RULES[kind]


def _check_counted(step: Step | LambStep) -> None:
    if isinstance(step, AdamWStep | AdagradStep) and step.step < 1:
        raise ValueError(f"step: expected a number from 1, got {step.step}")


def _weight(partition: Partition, numel: int) -> tuple[tuple[int, int], int]:
    """The address and element of the weight, and the address of what is beside it."""
    weight, dtype = partition.weight, partition.weight.dtype
    check_beside(partition)
    beside = 0
    if partition.residual is not None:
        beside = address("residual", partition.residual, INT16, numel)
    elif partition.master is not None:
        beside = address("master", partition.master, FLOAT, numel)
    return (address("weight", weight, FLOATS, numel), element(dtype)), beside


def check_beside(partition: Partition) -> None:
    """`TypeError` where the residual or the master is missing, or there is one too many."""
    dtype = partition.weight.dtype
    for name, given, wanted in (
        ("residual", partition.residual, dtype is torch.bfloat16),
        ("master", partition.master, dtype is torch.float16),
    ):
        if (given is not None) != wanted:
            raise TypeError(f"{name}: expected {'one' if wanted else 'none'} for a weight of {dtype}")
