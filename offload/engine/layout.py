"""How a unit's parameters lie in one flat stretch of elements, and which part of it this rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from offload.sizes import align_up

_ALIGNMENT = 32
"""Elements: 64 bytes in 16 bits, 128 in fp32. A misaligned fp32 `F.linear` was seen to change bits."""

_PARTITION_ALIGNMENT = 2048
"""Elements: 4096 bytes of the smallest state, so that every state of every partition is an extent."""


class Segment(NamedTuple):
    """One parameter's place in its unit, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    trainable: bool

    @property
    def stop(self) -> int:
        return self.start + self.numel


class UnitLayout(NamedTuple):
    """A unit's flat layout: trainable segments first, so that the states cover a prefix; then frozen ones.

    What lies between segments and after them is padding: zero at the start, never read.
    """

    name: str
    segments: tuple[Segment, ...]
    numel: int
    """Padded to a multiple of world size times 2048."""
    trainable_stop: int
    """Where the trainable prefix ends; a multiple of 2048, zero in a unit that is all frozen."""

    def partition(self, rank: int, world_size: int) -> range:
        """This rank's elements of the unit."""
        length = self.numel // world_size
        return range(rank * length, (rank + 1) * length)

    def trainable(self, rank: int, world_size: int) -> range:
        """This rank's elements that have states beside their weight, a prefix of its partition."""
        part = self.partition(rank, world_size)
        return range(part.start, max(part.start, min(part.stop, self.trainable_stop)))


def lay_out(name: str, parameters: Iterable[tuple[str, nn.Parameter]], world_size: int) -> UnitLayout:
    """Place `parameters` one after the other, each at a multiple of 32 elements."""
    end = trainable_stop = 0
    segments: list[Segment] = []
    for parameter_name, parameter in sorted(parameters, key=lambda item: not item[1].requires_grad):
        numel = parameter.numel()
        segments.append(Segment(parameter_name, tuple(parameter.shape), end, numel, parameter.requires_grad))
        end = align_up(end + numel, _ALIGNMENT)
        if parameter.requires_grad:
            trainable_stop = end = align_up(end, _ALIGNMENT)
    step = _PARTITION_ALIGNMENT * world_size
    numel = max(align_up(end, step), step)
    return UnitLayout(name, tuple(segments), numel, min(align_up(trainable_stop, _PARTITION_ALIGNMENT), numel))
