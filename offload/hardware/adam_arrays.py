"""Tensors of an optimizer step, for benchmarks and for the probe."""

from __future__ import annotations

import torch

from offload import kernels
from offload.aio import aligned_empty
from offload.kernels import AdamWStep, Partition
from offload.kernels.update import blocks_of, encode_moments

STEP = AdamWStep(1e-4, 0.9, 0.999, 1e-8, 0.01, 11)


_NOISE = 1 << 22


class Arrays:
    """Tensors with values as in training: weights around 0.02, gradients around 1e-3, and matching moments.

    No value is denormal in fp32, the dtype in which kernels compute. All tensors are allocated on 2 MiB pages, like the
    host arena of the engine. bf16 weights have low bits of their masters too, in `low_bits`, and fp16 weights masters.
    Moments in int8 are codes in blocks.
    """

    def __init__(
        self,
        numel: int,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        moment_dtype: torch.dtype = torch.float32,
        low_bits: torch.dtype = torch.int16,
    ) -> None:
        self.master = _noise(numel, 0.02)
        self.grad = aligned_like(numel, grad_dtype).copy_(_noise(numel, 1e-3))
        first, second = _noise(numel, 1e-3), _noise(numel, 1e-3).square_()
        self.scales: torch.Tensor | None = None
        if moment_dtype is torch.int8:
            self.exp_avg, self.exp_avg_sq = aligned_like(numel, torch.int8), aligned_like(numel, torch.uint8)
            self.scales = torch.zeros(blocks_of(numel), 2, dtype=torch.float32, device="cpu")
            encode_moments(first, self.exp_avg, self.scales, 0)
            encode_moments(second, self.exp_avg_sq, self.scales, 1)
        else:
            self.exp_avg, self.exp_avg_sq = _as(moment_dtype, first), _as(moment_dtype, second)
        self.weight = self.master
        self.residual = self.half_master = None
        if weight_dtype is torch.bfloat16:
            self.weight, self.residual = aligned_like(numel, torch.bfloat16), aligned_like(numel, low_bits)
            kernels.split_master(self.master, self.weight, self.residual)
        elif weight_dtype is torch.float16:
            self.weight, self.half_master = aligned_like(numel, torch.float16).copy_(self.master), self.master

    @property
    def partition(self) -> Partition:
        """Returns the tensors as an argument of `kernels.update`."""
        moments = (self.exp_avg, self.exp_avg_sq)
        return Partition(self.weight, self.grad, moments, self.residual, self.half_master, self.scales)

    @property
    def bytes_per_parameter(self) -> int:
        """Returns the bytes that a step must read and write for each parameter."""
        beside = 4 if self.half_master is not None else 0 if self.residual is None else self.residual.itemsize
        written = self.weight.itemsize + beside + 2 * self.exp_avg.itemsize
        read = written - (2 if self.half_master is not None else 0)  # an fp16 weight is only written
        return written + read + self.grad.itemsize


def aligned_like(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a zeroed (numel,) CPU tensor on 2 MiB pages, which the tensor owns."""
    return torch.frombuffer(aligned_empty(numel * dtype.itemsize), dtype=dtype)


def _as(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype is dtype else aligned_like(len(values), dtype).copy_(values)


def _noise(numel: int, scale: float) -> torch.Tensor:
    """Returns (numel,) fp32 of normally distributed values with standard deviation `scale`."""
    values, generator = aligned_like(numel, torch.float32), torch.Generator().manual_seed(0)
    # In chunks: a call that takes long would delay signals such as Ctrl-C.
    for start in range(0, numel, _NOISE):
        values[start : start + _NOISE].normal_(0, scale, generator=generator)
    return values
