"""Gradients of several ranks: added up, and cut, so that each rank keeps the mean of its own part.

    .grad ─► bucket, a unit's whole gradient ─► each rank its part ─► added in fp32, in the ranks' order ─► lease

Reduce-scatter as an exchange: each rank gets what the others have for its part and adds it itself. That moves the bytes
of a ring, rounds once instead of at every hop, and gives the same bits whatever the network does. One bucket is enough:
it is reduced when all of a unit's parameters are in it, when another unit's gradient comes, when a parameter's second
one comes, or when the backward ends. Ranks need not agree on when that is, nor have the same gradients (see `rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.engine.callbacks import EngineCallbacks
from offload.engine.distributed.agreement import Rounds
from offload.engine.distributed.process_group import Ranks
from offload.engine.gradients.accumulator import Gradients, Waiting
from offload.engine.gradients.values import flat
from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.timeline import OFF, Timeline


class ReducedGradients(Gradients):
    """The mean of all ranks' gradients; see `Gradients` for who calls what.

    Holds two stretches of the device arena, each of the largest unit's gradients, `dtype` being what a backward makes.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        parts: Sequence[range],
        arena: HostArena,
        dtype: torch.dtype,
        waiting: Waiting,
        callbacks: EngineCallbacks,
        *,
        device_arena: DeviceArena,
        bucket_dtype: torch.dtype,
        ranks: Ranks,
        rounds: Rounds,
        timeline: Timeline = OFF,
        compute: ComputeSpans = NO_SPANS,
    ) -> None:
        """Takes two buckets of the device arena.

        Args:
            device_arena: the memory of the device.
            bucket_dtype: of the gradients that a backward makes.
            ranks: the processes that train together.
            rounds: this rank's side of their agreement.
            timeline: shows each gradient, as it comes.
            compute: shows of which unit a gradient is.
        """
        super().__init__(layouts, parts, arena, dtype, waiting, callbacks, timeline=timeline, compute=compute)
        self._ranks, self._rounds = ranks, rounds
        nbytes = max(layout.trainable_stop for layout in layouts) * bucket_dtype.itemsize
        self._bucket, self._received = (device_arena.keep(nbytes).view(bucket_dtype) for _ in range(2))
        self._unit = -1
        self._filled: set[int] = set()
        self._wanted = [{p for p, s in enumerate(layout.segments) if s.trainable and s.numel} for layout in layouts]
        self._seen: list[set[int]] = [set() for _ in layouts]

    def _add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        place = self._layouts[unit].segments[segment]
        if not place.numel:
            return
        if self._unit != unit or segment in self._filled:
            self._flush()
        if self._unit < 0:
            self._bucket[: self._layouts[unit].trainable_stop].zero_()
            self._unit = unit
        self._bucket[place.start : place.stop].copy_(flat(gradient))
        self._filled.add(segment)
        self._seen[unit].add(segment)
        if self._filled == self._wanted[unit]:
            self._flush()

    def _flush(self) -> None:
        if self._unit >= 0:
            self._rounds.reduce(self._unit)

    @property
    def pending_unit(self) -> int:
        return self._unit

    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        """Every rank at once: add up what `holders` have of `unit`, and keep this rank's part."""
        layout, part, size = self._layouts[unit], self._parts[unit], self._ranks.size
        received = self._received[: len(holders) * len(part)].view(len(holders), len(part))
        self._ranks.exchange(received, self._bucket[: size * len(part)].view(size, len(part)), holders)
        for position, segment in enumerate(layout.segments):
            first, last = max(segment.start, part.start), min(segment.stop, part.stop)
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                column = slice(start - part.start, stop - part.start)
                total = received[0, column].to(torch.float32, copy=True)
                for other in received[1:]:
                    total += other[column]
                total /= size
                self.put(unit, position, start - segment.start, total)
        if self._unit == unit:
            self._unit = -1
            self._filled = set()

    def _present(self) -> list[set[int]]:
        """Of what this rank had a gradient, whoever keeps it."""
        return [set(segments) for segments in self._seen]

    def replace(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        super().replace(unit, segment, first, values)
        self._seen[unit].add(segment)

    def give(self, units: Sequence[int]) -> None:
        super().give(units)
        for unit in units:
            self._seen[unit] = set()

    def drop(self, unit: int) -> None:
        super().drop(unit)
        self._seen[unit] = set()

    def forget(self) -> None:
        """Drop them on every rank, where this one has given any; what others have given alone is theirs to drop."""
        if self._unit >= 0 or any(self._seen):
            self._rounds.forget()
            self.clear()

    def clear(self) -> None:
        super().clear()
        self._unit, self._filled = -1, set()
        self._seen = [set() for _ in self._layouts]
