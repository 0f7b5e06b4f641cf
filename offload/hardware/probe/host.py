"""Measurements of host memory and of the optimizer, which runs on the CPU with every compute device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload import kernels
from offload.aio import aligned_empty
from offload.hardware.adam_arrays import STEP, Arrays
from offload.hardware.probe.pace import Pace, grown, in_turns
from offload.hardware.probe.rates import DTYPES

_NUMELS = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Parameters, in growing sizes; the largest exceed any cache."""
_TILE = 1 << 20
"""Elements of an update that are computed at a time."""


class Host:
    """Arrays of an update, sized so that a pass over them takes about `pace.call` seconds on this machine."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.numel = grown(_NUMELS, float, _moving, pace.call)
        self._arrays = Arrays(self.numel, torch.bfloat16, torch.bfloat16)
        self._host_buffer = torch.frombuffer(aligned_empty(2 * self.numel), dtype=torch.bfloat16)

    def memory(self) -> float:
        """Returns the bytes a second that all threads read and write."""
        nbytes = self.numel * self._arrays.bytes_per_parameter
        return nbytes / in_turns([lambda: kernels.probe(self._arrays.partition)], self._pace.rate)[0]

    def copy(self) -> float:
        """Returns the bytes a second that are copied."""
        return (
            self._host_buffer.nbytes
            / in_turns([lambda: self._host_buffer.copy_(self._arrays.weight)], self._pace.rate)[0]
        )

    def optimizer(self, dtype: str) -> tuple[float, float]:
        """Measures AdamW and the accumulation of gradients in the dtype named `dtype`.

        Returns:
            Parameters a second that AdamW updates, and elements a second of a gradient that is stored while its
            squares are summed.
        """
        of = DTYPES[dtype]
        arrays = self._arrays if of is torch.bfloat16 else Arrays(self.numel, of, of)
        buffer = torch.frombuffer(aligned_empty(self.numel * of.itemsize), dtype=of)
        gradient = torch.ones(self.numel, dtype=of, device="cpu")  # in ordinary memory, like autograd's gradients
        size = min(_TILE, self.numel)
        tiles = [_slice_of(arrays.partition, start, start + size) for start in range(0, self.numel, size)]
        segments = [kernels.Segment(0, size, STEP)]

        def update() -> None:
            for tile in tiles:
                kernels.update(tile, segments)

        def accumulate() -> None:
            for start in range(0, self.numel, size):
                kernels.accumulate(buffer[start : start + size], gradient[start : start + size], add=False)

        updated, stored = in_turns([update, accumulate], self._pace.rate)
        return self.numel / updated, self.numel / stored


def _moving(numel: int) -> Callable[[], object]:
    arrays = Arrays(numel, torch.bfloat16, torch.bfloat16)
    return lambda: kernels.probe(arrays.partition)


def _slice_of(whole: kernels.Partition, start: int, stop: int) -> kernels.Partition:
    span = slice(start, stop)
    beside = [None if each is None else each[span] for each in (whole.residual, whole.master)]
    return kernels.Partition(whole.weight[span], whole.grad[span], tuple(each[span] for each in whole.moments), *beside)
