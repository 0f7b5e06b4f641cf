"""Fused optimizer steps: one pass over a partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from offload.kernels import _native
from offload.kernels.arrays import (
    BF16,
    BF24_ELEMENT,
    CODE_ELEMENT,
    CODES,
    FLOAT,
    FLOATS,
    INT8,
    INT16,
    LOW_BITS,
    UINT8,
    address,
    element,
    length,
)
from offload.kernels.moments import BLOCK, blocks_of
from offload.kernels.noise import Noise
from offload.kernels.steps import ROOTS, RULES, AdagradStep, AdamWStep, LambStep, Segment, Step


class Partition(NamedTuple):
    """Flat contiguous tensors of one length, (numel,), that do not overlap and belong to the caller.

    A bf16 `weight` has a `residual`, the low bits of the master: int16, or int8 of a bf24 master, which a step rounds
    stochastically. An fp16 weight has a `master` (fp32); an fp32 weight is its own master. `moments` contains as many
    tensors as the rule has moments, all fp32, all bf16 or all codes (int8, or uint8 for the root of a moment without a
    sign), which have `scales`. `grad` is only read.
    """

    weight: torch.Tensor  # (numel,) fp32, bf16 or fp16
    grad: torch.Tensor  # (numel,) fp32, bf16 or fp16
    moments: tuple[torch.Tensor, ...]  # (numel,) each
    residual: torch.Tensor | None = None  # (numel,) int16 or int8
    master: torch.Tensor | None = None  # (numel,) fp32
    scales: torch.Tensor | None = None  # (blocks, moments) fp32


def update(partition: Partition, segments: Sequence[Segment]) -> None:
    """Performs the step of each segment in one pass, in place: unscale, decay, moments, weight.

    Elements outside of the segments are left alone. Results do not depend on how elements are divided into segments.
    With moments in 8 bits a segment begins at the first element of a block, and shares no block with another one.

    Args:
        partition: CPU tensors of one length.
        segments: ordered and disjoint, all of one rule.

    Raises:
        TypeError: mixed or unknown rules, or a tensor of a wrong dtype.
        ValueError: segments out of order or within a block, a tensor of a wrong shape, stride or device, or moments in
            16 or 8 bits, or masters in bf24, without noise.
    """
    numel = length("weight", partition.weight)
    if not segments:
        return
    rule, moments = check_segments(segments, numel)
    check_noise(partition, segments)
    check_blocks(partition, segments)
    run(rule, moments, partition, [(each.start, each.stop, each.step, each.noise) for each in segments])


def probe(partition: Partition) -> None:
    """Reads and writes the bytes of an AdamW step as they are: the lower bound of a step's time, for benchmarks.

    Args:
        partition: CPU tensors of one length, with two moments.

    Raises:
        TypeError: a tensor of a wrong dtype.
        ValueError: a tensor of a wrong shape, stride or device.
    """
    numel = length("weight", partition.weight)
    run("probe", 2, partition, [(0, numel, (0.0,), None)])


class Addresses(NamedTuple):
    """A partition as the native code takes it. Each pair is an address and an element type."""

    weight: tuple[int, int]
    beside: int
    moments: list[int]
    moment_type: int
    scales: int
    grad: tuple[int, int]
    numel: int


def addresses(rule: str, moments: int, partition: Partition) -> Addresses:
    """Checks the tensors for `rule`, which has `moments` moments, and returns their addresses.

    Raises:
        TypeError: a tensor of a wrong dtype.
        ValueError: wrong number of moments, or a tensor of a wrong shape, stride or device.
    """
    numel = length("weight", partition.weight)
    if len(partition.moments) != moments:
        raise ValueError(f"moments: expected {moments} for {rule}, got {len(partition.moments)}")
    weight, beside = _weight(partition, numel)
    first = partition.moments[0].dtype if partition.moments else torch.float32
    # All moments of a call have one form.
    allowed = [BF16 if first is torch.bfloat16 else FLOAT] * moments
    if first in CODES:
        allowed = [UINT8 if root else INT8 for root in ROOTS[rule]]
    return Addresses(
        weight,
        beside,
        [address(f"moments[{i}]", moment, allowed[i], numel) for i, moment in enumerate(partition.moments)],
        CODE_ELEMENT if first in CODES else element(first) if first in FLOATS else 0,
        _scales(partition, numel),
        (address("grad", partition.grad, FLOATS, numel), element(partition.grad.dtype)),
        numel,
    )


NativeSegment: TypeAlias = tuple[int, int, Sequence[float], Noise | None]
"""Start, stop, settings in the order that the rule takes, and the noise of moments and masters."""


def native_segment(given: NativeSegment) -> tuple[int, int, list[float], tuple[int, int]]:
    """Returns a segment in the form of the native code."""
    start, stop, settings, noise = given
    return start, stop, [float(value) for value in settings], noise or (0, 0)


def run(rule: str, moments: int, partition: Partition, segments: Sequence[NativeSegment]) -> None:
    """Runs a native rule over segments.

    Args:
        rule: name of the rule in native/module.cpp.
        moments: number of its moments.
        partition: CPU tensors of one length.
        segments: the elements and settings of each.
    """
    arrays = addresses(rule, moments, partition)
    if arrays.numel:
        _native.update(rule, *arrays, [native_segment(each) for each in segments])


def adamw(
    weight: torch.Tensor,  # (numel,) bf16, or fp32 without a residual
    residual: torch.Tensor | None,  # (numel,) int16, the other half of a bf16 weight's master
    exp_avg: torch.Tensor,  # (numel,) fp32
    exp_avg_sq: torch.Tensor,  # (numel,) fp32
    grad: torch.Tensor,  # (numel,) bf16, fp16 or fp32; only read
    step: AdamWStep,
) -> None:
    """Performs one step of AdamW on all elements, in place.

    Args:
        weight: (numel,) bf16, or fp32 without `residual`.
        residual: (numel,) int16, the low 16 bits of a bf16 weight's master; None for an fp32 weight.
        exp_avg: (numel,) fp32.
        exp_avg_sq: (numel,) fp32.
        grad: (numel,) bf16, fp16 or fp32; only read.
        step: hyperparameters.

    Raises:
        TypeError: a tensor of a wrong dtype.
        ValueError: a tensor of a wrong shape, stride or device.
    """
    numel = length("weight", weight)
    if residual is None:
        address("weight", weight, FLOAT, numel, "without a residual, ")
    else:
        address("weight", weight, BF16, numel, "with a residual, ")
    moments = (exp_avg, exp_avg_sq)
    # `update` would also accept bf16 moments and bf24 masters; this function promises fp32.
    if residual is not None:
        address("residual", residual, INT16, numel)
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        address(name, moment, FLOAT, numel)
    update(Partition(weight, grad, moments, residual), [Segment(0, numel, step)])


def check_segments(segments: Sequence[Segment], numel: int) -> tuple[str, int]:
    """Returns the native rule of the segments and its number of moments.

    Raises:
        TypeError: the segments have mixed or unknown rules.
        ValueError: the segments are not ordered, disjoint and within `numel` elements, or a step number is below 1.
    """
    kind, end = type(segments[0].step), 0
    if kind not in RULES:
        raise TypeError(f"step: expected one of {', '.join(each.__name__ for each in RULES)}, got {kind.__name__}")
    for start, stop, step, _ in segments:
        # Threads divide the segments among them, so no element may belong to two.
        if not end <= start <= stop <= numel:
            raise ValueError(f"segments: expected them in order within {numel} elements, got [{start}, {stop})")
        if type(step) is not kind:
            raise TypeError(f"step: expected {kind.__name__} in all segments, got {type(step).__name__}")
        _check_counted(step)
        end = stop
    return RULES[kind]


class _Ranged(Protocol):
    """A segment of any kernel."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def noise(self) -> Noise | None: ...


def check_noise(partition: Partition, segments: Sequence[_Ranged]) -> None:
    """Raises `ValueError` if moments are bf16 or codes, or masters bf24, and a segment has no noise to round them."""
    # Rounded to nearest they would stay where they are in most steps.
    rounded = ""
    if partition.moments and all(moment.dtype in (*BF16, *CODES) for moment in partition.moments):
        rounded = f"moments are {'bf16' if partition.moments[0].dtype is torch.bfloat16 else 'in 8 bits'}"
    elif partition.residual is not None and partition.residual.dtype in INT8:
        rounded = "masters are bf24"
    if rounded and any(segment.noise is None for segment in segments):
        raise ValueError(f"noise: expected one in each segment, since the {rounded}, got None")


def check_blocks(partition: Partition, segments: Sequence[_Ranged]) -> None:
    """Raises `ValueError` if moments are codes, and a segment or its noise begins within a block of them."""
    if partition.scales is None:
        return
    end = 0
    for segment in segments:
        if segment.start % BLOCK or segment.start < end or (segment.noise and segment.noise.element % BLOCK):
            raise ValueError(
                f"segments: expected each, and its noise, to begin at a multiple of {BLOCK}, since the moments are "
                f"codes in blocks, got [{segment.start}, {segment.stop}) with {segment.noise}"
            )
        end = segment.stop


def check_scales(partition: Partition, numel: int) -> None:
    """Raises `ValueError` for codes without scales, scales without codes, or scales of a wrong shape."""
    moments, scales = partition.moments, partition.scales
    if (scales is not None) != bool(moments and moments[0].dtype in CODES):
        raise ValueError("scales: expected them for moments in 8 bits, and for no others")
    if scales is not None and tuple(scales.shape) != (blocks_of(numel), len(moments)):
        raise ValueError(f"scales: expected shape ({blocks_of(numel)}, {len(moments)}), got {tuple(scales.shape)}")


def _scales(partition: Partition, numel: int) -> int:
    """Returns the address of the scales of codes, which `check_scales` checks; 0 for other moments."""
    check_scales(partition, numel)
    scales = partition.scales
    return 0 if scales is None else address("scales", scales.view(-1), FLOAT, scales.numel())


def _check_counted(step: Step | LambStep) -> None:
    """Raises `ValueError` if the rule counts steps and the number is below 1."""
    if isinstance(step, AdamWStep | AdagradStep) and step.step < 1:
        raise ValueError(f"step: expected a number from 1, got {step.step}")


def _weight(partition: Partition, numel: int) -> tuple[tuple[int, int], int]:
    """Returns the address and element type of the weight, and the address of its residual or master (0 without)."""
    weight, dtype = partition.weight, partition.weight.dtype
    check_beside(partition)
    # The native code distinguishes residual and master by the weight's element type; 0 means neither (fp32).
    beside = 0
    if partition.residual is not None:
        beside = address("residual", partition.residual, LOW_BITS, numel)
    elif partition.master is not None:
        beside = address("master", partition.master, FLOAT, numel)
    kind = BF24_ELEMENT if partition.residual is not None and partition.residual.dtype in INT8 else element(dtype)
    return (address("weight", weight, FLOATS, numel), kind), beside


def check_beside(partition: Partition) -> None:
    """Raises `TypeError` unless exactly the residual or master that the weight's dtype needs is given."""
    dtype = partition.weight.dtype
    for name, given, wanted in (
        ("residual", partition.residual, dtype is torch.bfloat16),
        ("master", partition.master, dtype is torch.float16),
    ):
        if (given is not None) != wanted:
            raise TypeError(f"{name}: expected {'one' if wanted else 'none'} for a weight of {dtype}")
