"""The AdamW step and sums of squares on a CUDA device, bitwise equal to those of the CPU.

The kernels need CuPy: pip install 'offload[cuda12]' or [cuda13]. They are not yet verified on a GPU. The arithmetic was
run on a CPU, compiled as C++ (tests/test_kernels_cuda.py). NVRTC compiles it for each architecture without a fused or
approximate operation (tests/test_kernels_nvrtc.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError
from offload.kernels.steps import AdamWStep, Segment
from offload.kernels.update import Partition, check_beside, check_segments

BLOCK = 4096
"""Elements of a block whose squares are added lane by lane: see [Note: sums] in native/sums_body.h."""
WEIGHTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRADS = WEIGHTS
_THREADS, _MOST_BLOCKS = 256, 1 << 16
# The kernels round through intrinsics. These options keep the compiler from fusing or approximating anything else.
_OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """The numbers of a step as the kernel takes them: computed in double, rounded to fp32 once (native/adamw.cpp)."""

    grad_scale: float
    keep: float
    weight_decay: float
    lerp_factor: float
    beta2: float
    one_minus_beta2: float
    root_correction2: float
    eps: float
    minus_step_size: float
    lerp_from_grad: bool
    l2: bool

    @classmethod
    def of(cls, step: AdamWStep) -> Scalars:
        """Returns the scalars of `step`."""
        l2 = not step.decoupled and step.weight_decay != 0
        weight = np.float32(1 - step.beta1)
        far = abs(float(weight)) >= 0.5  # Tensor.lerp_ switches its formula at 0.5
        return cls(
            grad_scale=step.grad_scale,
            keep=1.0 if l2 else 1 - step.lr * step.weight_decay,
            weight_decay=step.weight_decay,
            lerp_factor=float(-(np.float32(1) - weight) if far else weight),
            beta2=step.beta2,
            one_minus_beta2=1 - step.beta2,
            root_correction2=math.sqrt(1 - step.beta2**step.step),
            eps=step.eps,
            minus_step_size=-(step.lr / (1 - step.beta1**step.step)),
            lerp_from_grad=far,
            l2=l2,
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """Floating-point arguments of the kernel, in the order of `adamw.cu`."""
        return (
            self.grad_scale,
            self.keep,
            self.weight_decay,
            self.lerp_factor,
            self.beta2,
            self.one_minus_beta2,
            self.root_correction2,
            self.eps,
            self.minus_step_size,
        )

    @property
    def choices(self) -> tuple[bool, ...]:
        """Integer arguments of the kernel, which follow the numbers."""
        return self.lerp_from_grad, self.l2


def update(partition: Partition, segments: Sequence[Segment]) -> None:
    """Queues AdamW steps on torch's current stream, in place: `kernels.update` for CUDA tensors.

    Returns once the work is queued.

    Args:
        partition: contiguous (numel,) tensors on one CUDA device; the moments are exp_avg and exp_avg_sq in fp32.
        segments: ordered, disjoint ranges of elements, each with an `AdamWStep`.

    Raises:
        ValueError: wrong device, shape or order of segments.
        TypeError: wrong dtype or another rule than AdamW.
        ConfigError: CuPy is not installed.
    """
    weight, grad = partition.weight, partition.grad
    beside = partition.residual if partition.residual is not None else partition.master
    tensors = [weight, grad, *partition.moments, *([] if beside is None else [beside])]
    for tensor in tensors:
        if not tensor.is_cuda or tensor.device != weight.device or not tensor.is_contiguous():
            raise ValueError(
                f"expected contiguous tensors on {weight.device}, a CUDA device; got one on {tensor.device}"
            )
        if tensor.shape != weight.shape or tensor.dim() != 1:
            raise ValueError(f"expected shape {tuple(weight.shape)} of all tensors, got {tuple(tensor.shape)}")
    check_segments(segments, weight.numel())
    check_beside(partition)
    for name, given, dtypes in (
        ("weight", weight, tuple(WEIGHTS)),
        ("grad", grad, tuple(GRADS)),
        ("residual", partition.residual, (torch.int16,)),
        ("master", partition.master, (torch.float32,)),
    ):
        if given is not None and given.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {given.dtype}")
    if any(not isinstance(segment.step, AdamWStep) for segment in segments):
        raise TypeError("step: expected AdamWStep")
    if len(partition.moments) != 2 or any(moment.dtype is not torch.float32 for moment in partition.moments):
        raise TypeError("moments: expected two of torch.float32")
    kernel = _kernel("adamw", WEIGHTS[weight.dtype], GRADS[grad.dtype])
    # One launch for each segment, all on one stream, so that the stream orders them with the work around.
    for start, stop, step in segments:
        assert isinstance(step, AdamWStep)
        if start == stop:
            continue
        arrays = (weight, beside, *partition.moments, grad)
        addresses = [0 if tensor is None else tensor[start:stop].data_ptr() for tensor in arrays]
        scalars = Scalars.of(step)
        numbers = [np.float32(value) for value in scalars.numbers]
        choices = [np.int32(value) for value in scalars.choices]
        _launch(kernel, stop - start, weight.device, (*addresses, np.uint64(stop - start), *numbers, *choices))


def sum_squares(values: torch.Tensor, chunk: int) -> torch.Tensor:
    """Queues `kernels.sum_squares` of each `chunk` elements of `values` on torch's current stream.

    Args:
        values: (numel,) bf16, fp16 or fp32, contiguous on a CUDA device.
        chunk: elements of a chunk; the last one may be shorter.

    Returns:
        (ceil(numel / chunk),) float64 on the device. Readable on the same stream; the call does not wait.

    Raises:
        ValueError: wrong device, shape, dtype or stride.
        ConfigError: CuPy is not installed.
    """
    if not values.is_cuda or not values.is_contiguous() or values.dim() != 1 or values.dtype not in GRADS:
        raise ValueError(
            f"expected (numel,) contiguous bf16, fp16 or fp32 on a CUDA device, got {tuple(values.shape)} of "
            f"{values.dtype} on {values.device}"
        )
    device, numel = values.device, values.numel()
    chunk = max(min(chunk, numel), 1)
    chunks, of_chunk = -(-numel // chunk), -(-chunk // BLOCK)
    sums = torch.empty(chunks * of_chunk, dtype=torch.float64, device=device)
    totals = torch.empty(chunks, dtype=torch.float64, device=device)
    # Two launches: sums of blocks, then of chunks. Each sum has one thread, so its order of additions is fixed.
    if numel:
        grad = GRADS[values.dtype]
        addresses = values.data_ptr(), sums.data_ptr()
        _launch(_kernel("block_sums", 0, grad), len(sums), device, (*addresses, np.uint64(numel), np.uint64(chunk)))
        addresses = sums.data_ptr(), totals.data_ptr()
        _launch(_kernel("chunk_sums", 0, grad), chunks, device, (*addresses, np.uint64(chunks), np.uint64(of_chunk)))
    # `sums` is freed on return. torch's allocator reuses the memory on this stream alone, after the second kernel.
    return totals


def why_not(device: torch.device) -> str | None:
    """Returns the reason why these kernels cannot run on a CUDA device, or None if a trial run succeeds."""
    try:
        sum_squares(torch.zeros(1, device=device), BLOCK)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # CuPy has an exception for each mismatch with CUDA
        return f"CuPy cannot run a kernel: {type(error).__name__}: {error}"
    return None


def _launch(kernel: Any, count: int, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """Starts `kernel` on torch's current stream, with one thread for each of `count` elements up to a bound.

    Addresses are passed as plain numbers: making CuPy arrays would let the streams of CuPy and torch wait for each
    other.
    """
    cupy = _cupy()
    blocks = min(-(-count // _THREADS), _MOST_BLOCKS)
    # torch allocated and wrote the tensors on this stream, so no event is needed to order the kernel after them.
    stream = torch.cuda.current_stream(device).cuda_stream
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream, device.index):
        kernel((blocks,), (_THREADS,), arguments)


def source(name: str) -> str:
    """Returns the CUDA source that contains the kernel `name`."""
    files = ("floats", "adamw") if name == "adamw" else ("floats", "sums")
    return "\n".join(Path(__file__).with_name(f"{file}.cu").read_text() for file in files)


# NVRTC compiles at the first launch of each variant, which takes seconds; the cache keeps the compiled kernel.
@cache
def _kernel(name: str, weight: int, grad: int) -> Any:
    options = (*_OPTIONS, f"-DWEIGHT={weight}", f"-DGRAD={grad}")
    return _cupy().RawKernel(source(name), name, options=options)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError("kernels on the GPU need CuPy: pip install 'offload[cuda12]', or [cuda13]") from error
    return cupy
