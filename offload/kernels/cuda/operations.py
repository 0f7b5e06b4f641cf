"""Public operations on torch tensors, which check their arguments and queue kernels on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from offload.errors import ConfigError
from offload.kernels.cuda import driver, nvrtc
from offload.kernels.cuda.kernels import BLOCK, GRADS, MOMENTS, WEIGHTS, Kernels
from offload.kernels.steps import AdamWStep, Segment
from offload.kernels.update import Partition, check_beside, check_blocks, check_noise, check_scales, check_segments


def update(partition: Partition, segments: Sequence[Segment]) -> None:
    """Queues AdamW steps on torch's current stream, in place: `kernels.update` for CUDA tensors.

    Returns once the work is queued.

    Args:
        partition: contiguous (numel,) tensors on one CUDA device; the moments are exp_avg and exp_avg_sq,
            both fp32 or both bf16, or codes (int8 and uint8) with their scales.
        segments: ordered, disjoint ranges of elements, each with an `AdamWStep`; of codes whole blocks.

    Raises:
        ValueError: wrong device, shape or order of segments.
        TypeError: wrong dtype or another rule than AdamW.
        ConfigError: NVRTC or the driver's library is missing, or torch is built for ROCm.
        RuntimeError: the driver refuses.
    """
    weight, grad = partition.weight, partition.grad
    beside = partition.residual if partition.residual is not None else partition.master
    tensors = [each for each in (weight, grad, *partition.moments, beside, partition.scales) if each is not None]
    for tensor in tensors:
        if not tensor.is_cuda or tensor.device != weight.device or not tensor.is_contiguous():
            raise ValueError(
                f"expected contiguous tensors on {weight.device}, a CUDA device; got one on {tensor.device}"
            )
        if tensor is not partition.scales and (tensor.shape != weight.shape or tensor.dim() != 1):
            raise ValueError(f"expected shape {tuple(weight.shape)} of all tensors, got {tuple(tensor.shape)}")
    check_segments(segments, weight.numel())
    check_noise(partition, segments)
    check_beside(partition)
    check_scales(partition, weight.numel())
    check_blocks(partition, segments)
    for name, given, dtypes in (
        ("weight", weight, tuple(WEIGHTS)),
        ("grad", grad, tuple(GRADS)),
        ("residual", partition.residual, (torch.int16, torch.int8)),
        ("master", partition.master, (torch.float32,)),
        ("scales", partition.scales, (torch.float32,)),
    ):
        if given is not None and given.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {given.dtype}")
    if any(not isinstance(segment.step, AdamWStep) for segment in segments):
        raise TypeError("step: expected AdamWStep")
    if tuple(moment.dtype for moment in partition.moments) not in MOMENTS:
        raise TypeError("moments: expected two of torch.float32, two of torch.bfloat16, or torch.int8 and torch.uint8")
    device = weight.device
    _kernels(device.index).update(partition, segments, torch.cuda.current_stream(device).cuda_stream)


def sum_squares(values: torch.Tensor, chunk: int) -> torch.Tensor:
    """Queues the sum of squares of each chunk of `values` on torch's current stream: `kernels.sum_squares` for CUDA.

    Args:
        values: (numel,) bf16, fp16 or fp32, contiguous on a CUDA device.
        chunk: elements of a chunk; the last one may be shorter.

    Returns:
        (ceil(numel / chunk),) float64 on the device. Readable on the same stream; the call does not wait.

    Raises:
        ValueError: wrong device, shape, dtype or stride.
        ConfigError: NVRTC or the driver's library is missing, or torch is built for ROCm.
        RuntimeError: the driver refuses.
    """
    if not values.is_cuda or not values.is_contiguous() or values.dim() != 1 or values.dtype not in GRADS:
        raise ValueError(
            f"expected (numel,) contiguous bf16, fp16 or fp32 on a CUDA device, got {tuple(values.shape)} of "
            f"{values.dtype} on {values.device}"
        )
    device = values.device
    return _kernels(device.index).sum_squares(values, chunk, torch.cuda.current_stream(device).cuda_stream)


def why_not(device: torch.device) -> str | None:
    """Returns the reason why these kernels cannot run on a device, or None if a trial run succeeds."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    expected = 9.0 * (BLOCK + 1)
    try:
        # Waits for the device once, at the start: a kernel that fails does so after its launch.
        squares = sum_squares(torch.full((BLOCK + 1,), 3.0, dtype=torch.float32, device=device), 2 * BLOCK).item()
    except (ConfigError, RuntimeError) as error:  # torch's errors of CUDA are RuntimeErrors, and so are ours
        return str(error)
    return None if squares == expected else f"a trial of the kernels gave {squares} in place of {expected}"


@cache
def _kernels(device: int) -> Kernels:
    """Returns the kernels of a device.

    Raises:
        ConfigError: a library is missing, or torch is built for ROCm.
        RuntimeError: the driver refuses.
    """
    if torch.version.hip is not None:
        raise ConfigError("kernels on the GPU need CUDA: torch is built for ROCm, on which they were never tested")
    assert torch.version.cuda is not None  # the tensors are on a CUDA device
    compiler = nvrtc.load(torch.version.cuda)
    context = driver.load().primary_context(device)
    return Kernels(context=context, compiler=compiler, capability=torch.cuda.get_device_capability(device))
