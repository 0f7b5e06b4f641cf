"""Fused optimizer steps: one pass over a partition."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from offload.kernels import _native

# -- noise ---------------------------------------------------------------------------------------------
#
# Random bits that round moments and masters: see [Note: stochastic rounding] in native/noise.h.


_WORD = (1 << 64) - 1
_RANGE = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15


class Noise(NamedTuple):
    """The random bits of a segment: a stream, and the number of the segment's first element in the stream."""

    stream: int
    """Selects one of 2**64 streams; see `noise_stream`."""
    element: int
    """From 0 to below 2**64."""

    def after(self, count: int) -> Noise:
        """Returns the noise from `count` elements on."""
        return Noise(self.stream, self.element + count)


class Keyed(NamedTuple):
    """Elements [start, stop) whose numbers in their stream agree in all but the lower 32 bits, and their key."""

    start: int
    stop: int
    before: int
    between: int
    element: int
    """The lower 32 bits of the number of element `start`."""


def keyed(start: int, stop: int, noise: Noise) -> Iterator[Keyed]:
    """Yields the parts of a segment, usually one part. The noise of each part has one key."""
    stream, element = noise
    while start < stop:
        high, low = divmod(element, _RANGE)
        key = _mixed(stream + _GOLDEN * high & _WORD)
        end = min(stop, start + _RANGE - low)
        yield Keyed(start, end, key % _RANGE, key // _RANGE, low)
        element += end - start
        start = end


def noise_stream(seed: int, unit: int, step: int) -> int:
    """Returns the stream of an update of a unit's parameter; `step` is the number of its updates, this one included."""
    # SplitMix64: the streams of neighbouring numbers are unrelated.
    stream = 0
    for part in (seed, unit, step):
        stream = _mixed((stream ^ part) + _GOLDEN & _WORD)
    return stream


def master_stream(stream: int) -> int:
    """Returns the stream that rounds masters, as in native/noise.h; `stream` rounds moments."""
    return _mixed(stream ^ 0x6D6173746572)


def _mixed(value: int) -> int:
    """Returns the finalizer of SplitMix64, as `mixed` of native/noise.h computes it."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


# -- steps ---------------------------------------------------------------------------------------------
#
# Hyperparameters of one step of each update rule, named as in `torch.optim`.


class AdamWStep(NamedTuple):
    """A step of AdamW (Loshchilov & Hutter 2019), or of Adam with `decoupled=False`. Moments: exp_avg, exp_avg_sq."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0
    """Factor of the gradient: the clip coefficient over the loss scale."""
    decoupled: bool = True
    """False adds the decay to the gradient (L2), as `torch.optim.Adam` does."""


class AdagradStep(NamedTuple):
    """A step of `torch.optim.Adagrad` (Duchi, Hazan & Singer 2011). Moment: the sum of squares."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0


class LionStep(NamedTuple):
    """A step of Lion (Chen et al. 2023) with decoupled decay. Moment: exp_avg."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    grad_scale: float = 1.0


class SGDStep(NamedTuple):
    """A step of `torch.optim.SGD` with momentum. Moment: momentum_buffer."""

    lr: float
    momentum: float
    """With 0, the momentum buffer stays as it is, and nothing is dampened."""
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    """True in the first step, which sets the momentum buffer to the gradient."""
    grad_scale: float = 1.0


class PlainSGDStep(NamedTuple):
    """A step of `torch.optim.SGD` without momentum. No moments."""

    lr: float
    weight_decay: float
    grad_scale: float = 1.0


class LambStep(NamedTuple):
    """A step of LAMB (You et al. 2020). Its length is corrected for the bias, as in DeepSpeed: see `kernels.lamb`.

    Moments: exp_avg, exp_avg_sq.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0
    min_ratio: float = 0.01
    max_ratio: float = 10.0
    """Upper bound of the trust ratio; `min_ratio` is the lower bound. Both defaults are DeepSpeed's."""


# The rules that need one pass over the elements. LAMB needs two: see `kernels.lamb`.
Step: TypeAlias = AdamWStep | AdagradStep | LionStep | SGDStep | PlainSGDStep


class Writes(enum.IntEnum):
    """The states that an update writes; `Writes` of native/update.h has the same numbers."""

    ALL = 0
    WEIGHTS = 1
    """The weight, and its residual or master."""
    MOMENTS = 2
    """The moments, with their scales."""


def has_two_passes(step: Step | LambStep) -> bool:
    """Returns True if `update` may write the weights of a step first, and its moments in a second pass.

    The second pass has the old moments and the gradient, but no longer the old weights. So a decay that is added to the
    gradient needs both at once.
    """
    match step:
        case AdamWStep():
            return step.decoupled or not step.weight_decay
        case LionStep():
            return True
        case AdagradStep() | SGDStep():
            return not step.weight_decay
    return False  # no moments, or a trust ratio between two passes of its own


RULES: dict[type, tuple[str, int]] = {
    AdamWStep: ("adamw", 2),
    AdagradStep: ("adagrad", 1),
    LionStep: ("lion", 1),
    SGDStep: ("sgd", 1),
    PlainSGDStep: ("plain_sgd", 0),
}
"""Name of the native rule and number of moments for each kind of step."""

ROOTS: dict[str, tuple[bool, ...]] = {
    "adamw": (False, True),
    "adagrad": (True,),
    "lion": (False,),
    "sgd": (False,),
    "lamb": (False, True),
    "probe": (False, True),
}
"""For each moment of a native rule, True if its 8-bit codes hold the root, since the moment has no sign."""


class Segment(NamedTuple):
    """A range of elements, [start, stop), and the step to perform on them."""

    start: int
    stop: int
    step: Step | LambStep
    """Hyperparameters. `update` does not accept a `LambStep`, since LAMB needs two passes."""
    noise: Noise | None = None
    """Rounds bf16 and 8-bit moments, and bf24 masters; None if all are fp32, where noise has no effect."""


# -- arrays --------------------------------------------------------------------------------------------
#
# Validation of tensors for the native kernels, which receive addresses.


FLOAT = (torch.float32,)
BF16 = (torch.bfloat16,)
INT16 = (torch.int16,)
INT8 = (torch.int8,)
UINT8 = (torch.uint8,)
CODES = (*INT8, *UINT8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number that the native code uses for each of `FLOATS`."""
CODE_ELEMENT = 3
"""The number that the native code uses for moments in 8 bits."""
BF24_ELEMENT = 4
"""The number that the native code uses for bf16 weights whose masters have 8 low bits."""
LOW_BITS = (*INT16, *INT8)
"""Dtypes of the low bits of a bf16 weight's master: of 16 bits, or of 8."""


def element(dtype: torch.dtype) -> int:
    """Returns the number that the native code uses for `dtype`."""
    return ELEMENTS[dtype]


def length(name: str, tensor: torch.Tensor) -> int:
    """Returns the number of elements of `tensor`; raises `TypeError` if the argument is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return tensor.numel()


def address(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int, when: str = "") -> int:
    """Returns the address of the data of `tensor`, once every property that the native code relies on is checked.

    `when` states for messages the condition under which `dtypes` are required.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong device, shape, stride or storage.
    """
    if type(tensor) is not torch.Tensor:
        length(name, tensor)  # a Parameter or another subclass is accepted
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected {when}a tensor of {expected}, got {tensor.dtype}")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.dim() != 1 or tensor.numel() != numel:
        raise ValueError(f"{name}: expected shape ({numel},), got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {tensor.stride()}")
    if tensor.is_neg():
        raise ValueError(f"{name}: expected a tensor whose bytes are its values: call .resolve_neg()")
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + numel) * tensor.itemsize:
        raise ValueError(f"{name}: its storage was resized and does not hold {numel} elements")
    return tensor.data_ptr()


# -- moments -------------------------------------------------------------------------------------------
#
# Moments in 8 bits: codes in blocks of 256 elements, with a scale for each block and moment.
#
# The scales of a block's moments follow one another. See [Note: codes of moments] in native/moments.h.


BLOCK = 256
"""Elements of a block."""


def blocks_of(numel: int) -> int:
    """Returns the number of blocks of `numel` elements."""
    return -(-numel // BLOCK)


def encode_moments(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, moment: int) -> None:
    """Writes the codes and scales of values, rounded to nearest: each error is at most half of the block's scale.

    Codes without a sign store the root. For them the bound applies to the roots, and the smallest nonzero code stands
    for all smaller nonzero values. A value of inf or NaN makes its block NaN.

    Args:
        values: (numel,) fp32 on the CPU, only read; from 0 on for codes without a sign. The first value is the first of
            a block.
        codes: (numel,) int8, or uint8 for roots; overwritten.
        scales: (blocks, moments) fp32; the column of this moment is overwritten.
        moment: number of the moment, from 0.
    """
    numel = length("values", values)
    at = address("values", values, FLOAT, numel)
    _native.encode_moments(at, _coded(codes, scales, moment, numel, 0), numel)


def decode_moments(
    codes: torch.Tensor, scales: torch.Tensor, moment: int, values: torch.Tensor, offset: int = 0
) -> None:
    """Writes the values of moments from their codes, with the same bits on every processor.

    Args:
        codes: (numel,) int8, or uint8 for roots; only read.
        scales: (blocks, moments) fp32, only read.
        moment: number of the moment, from 0.
        values: (numel,) fp32 on the CPU, overwritten.
        offset: number of the first code in the first block of `scales`.
    """
    numel = length("values", values)
    at = address("values", values, FLOAT, numel)
    _native.decode_moments(_coded(codes, scales, moment, numel, offset), offset, at, numel)


def _coded(
    codes: torch.Tensor, scales: torch.Tensor, moment: int, numel: int, offset: int
) -> tuple[int, int, int, bool]:
    """Returns a moment's native arguments: addresses of codes and scales, distance of scales, True for roots."""
    blocks, moments = blocks_of(offset + numel), scales.shape[-1]
    if tuple(scales.shape) != (blocks, moments) or not 0 <= moment < moments or not 0 <= offset < BLOCK:
        raise ValueError(
            f"scales: expected shape ({blocks}, moments), got {tuple(scales.shape)}, with moment {moment} and offset "
            f"{offset}"
        )
    at = address("codes", codes, CODES, numel)
    first = address("scales", scales.view(-1), FLOAT, blocks * moments)
    return at, first + moment * scales.itemsize, moments, codes.dtype is torch.uint8


# -- update --------------------------------------------------------------------------------------------


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


def update(partition: Partition, segments: Sequence[Segment], writes: Writes = Writes.ALL) -> None:
    """Performs the step of each segment in one pass, in place: unscale, decay, moments, weight.

    Elements outside of the segments are left alone. Results do not depend on how elements are divided into segments.
    With moments in 8 bits a segment begins at the first element of a block, and shares no block with another one.

    A call that writes the weights, and a second one that writes the moments, give the bits of one that writes all. The
    first moves 18 of the 26 bytes of a bf16 parameter with fp32 moments, the second 18 too.

    Args:
        partition: CPU tensors of one length.
        segments: ordered and disjoint, all of one rule.
        writes: the tensors to write; the others are only read. For less than all, `has_two_passes` of every step.

    Raises:
        TypeError: mixed or unknown rules, or a tensor of a wrong dtype.
        ValueError: segments out of order or within a block, a tensor of a wrong shape, stride or device, moments in 16
            or 8 bits, or masters in bf24, without noise, or moments apart from weights that they depend on.
    """
    numel = length("weight", partition.weight)
    if not segments:
        return
    rule, moments = check_segments(segments, numel)
    check_noise(partition, segments)
    check_blocks(partition, segments)
    if writes is not Writes.ALL and not all(has_two_passes(segment.step) for segment in segments):
        raise ValueError(
            f"writes: expected all of them, since the moments of {rule} depend on the weight or there are none, got "
            f"{writes.name}"
        )
    native = [(segment.start, segment.stop, segment.step, segment.noise) for segment in segments]
    run(rule, moments, partition, native, writes)


def probe(partition: Partition) -> None:
    """Reads and writes the bytes of an AdamW step as they are: the lower bound of a step's time, for benchmarks."""
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
    """Checks the tensors for `rule`, which has `moments` moments, and returns their addresses."""
    numel = length("weight", partition.weight)
    if len(partition.moments) != moments:
        raise ValueError(f"moments: expected {moments} for {rule}, got {len(partition.moments)}")
    weight, beside = _weight(partition, numel)
    first = partition.moments[0].dtype if partition.moments else torch.float32
    # All moments of a call have the same form.
    allowed = [BF16 if first is torch.bfloat16 else FLOAT] * moments
    if first in CODES:
        allowed = [UINT8 if root else INT8 for root in ROOTS[rule]]
    moment_addresses = [
        address(f"moments[{i}]", moment, allowed[i], numel) for i, moment in enumerate(partition.moments)
    ]
    check_scales(partition, numel)
    scales = partition.scales
    return Addresses(
        weight,
        beside,
        moment_addresses,
        CODE_ELEMENT if first in CODES else element(first) if first in FLOATS else 0,
        0 if scales is None else address("scales", scales.view(-1), FLOAT, scales.numel()),
        (address("grad", partition.grad, FLOATS, numel), element(partition.grad.dtype)),
        numel,
    )


NativeSegment: TypeAlias = tuple[int, int, Sequence[float], Noise | None]
"""Start, stop, settings in the order that the rule takes, and the noise of moments and masters."""


def native_segment(segment: NativeSegment) -> tuple[int, int, list[float], tuple[int, int]]:
    """Returns a segment in the form of the native code."""
    start, stop, settings, noise = segment
    return start, stop, [float(value) for value in settings], noise or (0, 0)


def run(
    rule: str, moments: int, partition: Partition, segments: Sequence[NativeSegment], writes: Writes = Writes.ALL
) -> None:
    """Runs a native rule of native/module.cpp, which has `moments` moments, over segments."""
    arrays = addresses(rule, moments, partition)
    if arrays.numel:
        _native.update(rule, *arrays, [native_segment(segment) for segment in segments], int(writes))


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
    """Returns the native rule of the segments and its number of moments."""
    kind = type(segments[0].step)
    if kind not in RULES:
        raise TypeError(
            f"step: expected one of {', '.join(rule_type.__name__ for rule_type in RULES)}, got {kind.__name__}"
        )
    check_ranges(segments, numel)
    for _, _, step, _ in segments:
        if type(step) is not kind:
            raise TypeError(f"step: expected {kind.__name__} in all segments, got {type(step).__name__}")
        if isinstance(step, AdamWStep | AdagradStep) and step.step < 1:  # other rules count no steps
            raise ValueError(f"step: expected a number from 1, got {step.step}")
    return RULES[kind]


def check_ranges(segments: Sequence[_Ranged], numel: int) -> None:
    """Raises `ValueError` unless the segments are ordered, disjoint and within `numel` elements."""
    end = 0
    for segment in segments:
        # Threads divide the segments among them, so no element may belong to two.
        if not end <= segment.start <= segment.stop <= numel:
            place = f"[{segment.start}, {segment.stop})"
            raise ValueError(f"segments: expected them in order within {numel} elements, got {place}")
        end = segment.stop


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
    # Moments rounded to nearest would not change in most steps.
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
    for name, tensor, wanted in (
        ("residual", partition.residual, dtype is torch.bfloat16),
        ("master", partition.master, dtype is torch.float16),
    ):
        if (tensor is not None) != wanted:
            raise TypeError(f"{name}: expected {'one' if wanted else 'none'} for a weight of {dtype}")
