"""Gradients of several ranks: reduced and scattered, so that each rank keeps its partition of their mean.

    .grad ─► whole gradients of a unit ─► each rank its partition ─► added in fp32, in rank order ─► host buffer

The reduce-scatter is an exchange: each rank receives the others' values for its partition and adds them itself. That
moves as many bytes as a ring, rounds once instead of at every hop, and gives the same bits whatever the network does.

    each micro-batch is reduced     one bucket for all units, one after the other
    each step is reduced            a sum for each unit, to which its micro-batches are added; the last one is reduced

A unit is reduced when the backward has given gradients of all its parameters, when a gradient of another unit arrives,
or when the backward ends; from the bucket also when a second gradient of the same parameter arrives. What no gradient
of the last micro-batch has reduced is reduced before the step, or before a gradient is read. Ranks need not reach that
moment together, nor have gradients of the same parameters (see `agreement`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from offload.engine.callbacks import EngineCallbacks
from offload.engine.distributed.agreement import Agreement
from offload.engine.distributed.process_group import Ranks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.gradients.places import GradientPlaces
from offload.engine.gradients.values import flat
from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.interrupts import uninterrupted
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.timeline import OFF, Timeline


class ReduceScatterAccumulator(GradientAccumulator):
    """The mean of all ranks' gradients; see `GradientAccumulator` for the threads that may call each method.

    Takes buffers of the device arena: the bucket in the dtype of a backward, or a sum for each unit in the dtype of
    stored gradients; and another, as large as the largest of them, for values received, this rank's own among them.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        parts: Sequence[range],
        arena: HostArena,
        dtype: torch.dtype,
        waiting: GradientPlaces,
        callbacks: EngineCallbacks,
        *,
        device_arena: DeviceArena,
        bucket_dtype: torch.dtype,
        adds_up: bool,
        ranks: Ranks,
        rounds: Agreement,
        timeline: Timeline = OFF,
        compute: ComputeSpans = NO_SPANS,
    ) -> None:
        """Allocates the buffers in the device arena. Arguments not listed are those of `GradientAccumulator`.

        Args:
            device_arena: the memory of the device.
            bucket_dtype: dtype of the gradients that a backward makes.
            adds_up: True if micro-batches add up on this rank, and each step is reduced once.
            ranks: the processes that train together.
            rounds: this rank's side of the agreement between the ranks.
            timeline: records each gradient as it arrives.
            compute: records the unit to which a gradient belongs.
        """
        super().__init__(layouts, parts, arena, dtype, waiting, callbacks, timeline=timeline, compute=compute)
        self._ranks, self._rounds = ranks, rounds
        self._adds_up, kept = adds_up, dtype if adds_up else bucket_dtype
        # Trainable segments come first in a unit and end at `trainable_stop`.
        numels = [layout.trainable_stop for layout in layouts]
        memory = [device_arena.keep(numel * kept.itemsize) for numel in (numels if adds_up else [max(numels)])]
        self._memory = [each.view(kept) for each in (memory if adds_up else memory * len(layouts))]
        """For each unit the memory of its gradients: its sum, or the bucket that all units share."""
        self._received = device_arena.keep(max(numels) * kept.itemsize).view(kept)
        self._held: list[set[int]] = [set() for _ in layouts]
        """For each unit the segments that have a gradient in `_memory`."""
        self._unit = -1
        self._filled: set[int] = set()
        """Segments of `_unit` to which this backward has given a gradient."""
        self._wanted = [{p for p, s in enumerate(layout.segments) if s.trainable and s.numel} for layout in layouts]
        self._seen: list[set[int]] = [set() for _ in layouts]

    def adder(self, unit: int, segment: int) -> Callable[[torch.Tensor], None]:
        """Returns `add` for one parameter."""
        return functools.partial(self.add, unit, segment)

    def _add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Copies a gradient to the bucket, or adds it to the sum of its unit.

        Reduces the unit under way before if the gradient belongs to another one, or if it does not add up with an
        earlier one of the same parameter; and this unit afterwards if it is complete.
        """
        place = self._layouts[unit].segments[segment]
        if not place.numel:
            return
        # In the bucket, a parameter's second gradient must not overwrite its first.
        if self._unit >= 0 and (self._unit != unit or (segment in self._filled and not self._adds_up)):
            self._flush()
        if not self._held[unit]:
            # Parameters without a gradient on this rank contribute zeros to the mean.
            self._memory[unit][: self._layouts[unit].trainable_stop].zero_()
        values = self._memory[unit][place.start : place.stop]
        if segment in self._held[unit]:
            values.add_(flat(gradient))
        else:
            values.copy_(flat(gradient))
        self._held[unit].add(segment)
        self._seen[unit].add(segment)
        if self._adds_up and not self._callbacks.is_last_micro_batch():
            return
        self._unit = unit
        self._filled.add(segment)
        if self._filled == self._wanted[unit]:
            self._flush()

    def _flush(self) -> None:
        """Reduces the unit under way, if there is one, and starts the copies of small results that were set aside."""
        if self._unit >= 0:
            self._rounds.reduce(self._unit)
        super()._flush()

    @uninterrupted
    def complete(self) -> None:
        """Completes a backward, and reduces all sums of this rank that were not reduced with their last gradient."""
        self.end_backward()
        for unit, held in enumerate(self._held):
            if held:
                self._unit = unit
                self._flush()

    @property
    def pending_unit(self) -> int:
        """The unit whose gradients this rank is about to reduce, or -1."""
        return self._unit

    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        """Sums the gradients of `unit` from the ranks `holders`, and keeps this rank's partition of the mean.

        The mean is over all ranks: ranks outside `holders` contribute zeros. Every rank calls this at the same time.
        """
        layout, part, size = self._layouts[unit], self._parts[unit], self._ranks.size
        received = self._received[: len(holders) * len(part)].view(len(holders), len(part))
        self._ranks.exchange(received, self._memory[unit][: size * len(part)].view(size, len(part)), holders)
        for position, segment in enumerate(layout.segments):
            first, last = max(segment.start, part.start), min(segment.stop, part.stop)
            # In chunks, so that the fp32 sum needs little memory.
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                column = slice(start - part.start, stop - part.start)
                # Added in rank order, so that every run of the same ranks gives the same bits.
                total = received[0, column].to(torch.float32, copy=True)
                for other in received[1:]:
                    total += other[column]
                total /= size
                self.put(unit, position, start - segment.start, total)
        if self._unit == unit:
            self._unit = -1
            self._filled, self._held[unit] = set(), set()

    def present(self, unit: int) -> set[int]:
        """Returns the segments of `unit` for which this rank produced a gradient, whichever rank keeps it."""
        return set(self._seen[unit])

    def replace(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Replaces a gradient, and records it as present."""
        super().replace(unit, segment, first, values)
        self._seen[unit].add(segment)

    def give(self, units: Sequence[int]) -> None:
        """Hands the gradients of `units` to their updates; the next step starts without gradients."""
        super().give(units)
        for unit in units:
            self._seen[unit] = set()

    def drop(self, unit: int) -> None:
        """Drops the gradients of one unit."""
        super().drop(unit)
        self._seen[unit], self._held[unit] = set(), set()

    def forget(self) -> None:
        """Drops gradients as soon as every rank is about to drop its own, if this rank has contributed any.

        A rank that has contributed none returns at once, and keeps its partition of gradients from other ranks.
        """
        if self._unit >= 0 or any(self._seen):
            self._rounds.forget()
            self.clear()

    def clear(self) -> None:
        """Drops every gradient that no update has taken, and those that are not reduced."""
        super().clear()
        self._unit, self._filled = -1, set()
        self._held, self._seen = [set() for _ in self._layouts], [set() for _ in self._layouts]
