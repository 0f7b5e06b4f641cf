"""The AdamW step on a CUDA device, with the bits of the CPU's. Needs CuPy: pip install 'offload[cuda12]' or [cuda13].

Not verified on a GPU yet: its arithmetic was run on a CPU, compiled as C++ (tests/test_kernels_cuda.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.errors import ConfigError
from offload.kernels.steps import AdamWStep, Segment
from offload.kernels.update import Partition, check_beside, check_segments

SOURCE = Path(__file__).with_name("adamw.cu")
WEIGHTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRADS = WEIGHTS
_THREADS, _MOST_BLOCKS = 256, 1 << 16
# Rounding is that of the intrinsics; these are for what a compiler might do beside them.
_OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


class Scalars(NamedTuple):
    """A step's numbers as the kernel takes them: computed in double, rounded to fp32 once (native/adamw.cpp)."""

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
        """Those of `step`."""
        l2 = not step.decoupled and step.weight_decay != 0
        weight = np.float32(1 - step.beta1)
        far = abs(float(weight)) >= 0.5  # where Tensor.lerp_ changes its formula
        return cls(
            step.grad_scale,
            1.0 if l2 else 1 - step.lr * step.weight_decay,
            step.weight_decay,
            float(-(np.float32(1) - weight) if far else weight),
            step.beta2,
            1 - step.beta2,
            math.sqrt(1 - step.beta2**step.step),
            step.eps,
            -(step.lr / (1 - step.beta1**step.step)),
            far,
            l2,
        )


def update(partition: Partition, segments: Sequence[Segment]) -> None:
    """`kernels.update` for AdamW, of tensors on one CUDA device, on torch's current stream. fp32 moments.

    Returns when the work is queued. `ConfigError` without CuPy.
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
    cupy = _cupy()
    with cupy.cuda.Device(weight.device.index), torch.cuda.device(weight.device):
        kernel = _kernel(WEIGHTS[weight.dtype], GRADS[grad.dtype], weight.device.index)
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        for start, stop, step in segments:
            assert isinstance(step, AdamWStep)
            if start == stop:
                continue
            arrays = [
                _array(cupy, None if tensor is None else tensor[start:stop], weight)
                for tensor in (weight, beside, *partition.moments, grad)
            ]
            numbers = [np.float32(value) for value in Scalars.of(step)[:-2]]
            choices = [np.int32(value) for value in Scalars.of(step)[-2:]]
            blocks = min(-(-(stop - start) // _THREADS), _MOST_BLOCKS)
            kernel((blocks,), (_THREADS,), (*arrays, np.uint64(stop - start), *numbers, *choices), stream=stream)


def _array(cupy: Any, tensor: torch.Tensor | None, weight: torch.Tensor) -> Any:
    """The same memory, by DLPack; 16-bit floats as their bits, which every version of CuPy takes."""
    if tensor is None:
        tensor = weight[:0]  # the kernel does not look at it
    bits = tensor.view(torch.int16) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    return cupy.from_dlpack(bits.detach())


@cache
def _kernel(weight: int, grad: int, device: int) -> Any:
    options = (*_OPTIONS, f"-DWEIGHT={weight}", f"-DGRAD={grad}")
    return _cupy().RawKernel(SOURCE.read_text(), "adamw", options=options)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError("a step on the GPU needs CuPy: pip install 'offload[cuda12]', or [cuda13]") from error
    return cupy
