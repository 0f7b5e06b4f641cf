"""Reduces and scatters the gradients of several ranks. Each rank keeps its partition of the mean.

    .grad ─► whole gradients of a unit ─► each rank its partition ─► added in fp32, in rank order ─► host buffer

The reduce-scatter is an exchange: each rank receives the others' values for its partition and adds them itself. This
moves as many bytes as a ring, rounds once instead of at every hop, and gives the same bits whatever the network does.
With several replicas of the model, each replica reduces its own gradients, and `ReplicaSums` adds up the results.

    each micro-batch is reduced     buckets that all units use in turn
    each step is reduced            a sum for each unit, to which its micro-batches are added; the last one is reduced
    micro-batches take turns        buckets that are sums: all micro-batches pass through a unit before the next, and
                                    the last one is reduced; if the buckets have the dtype of sums

A unit is reduced when the backward has given gradients of all its parameters, when a gradient of another unit arrives,
or when the backward ends. A unit in a bucket is also reduced when a second gradient of a parameter arrives. The sum of
a step is not reduced beside another unit's gradient while it contains a parameter whose last gradient is to come: in
two parts it would be rounded twice, and otherwise than where micro-batches take turns. All other gradients are reduced
before the step, or before a gradient is read. Ranks need not reach this moment together, nor have
gradients of the same parameters (see `agreement`). The sum of a step is sent by all ranks together, also by those whose
last micro-batch leaves out the unit.

    overlap_comm        reduce 1: start 1    reduce 2: start 2, add 1    ...    end: add the last
    otherwise           reduce 1: start 1, add 1    reduce 2: start 2, add 2    ...

With `overlap_comm` an exchange is under way during the backward of the next unit. Its values are added when the next
unit is reduced, at the end of the backward, or before a gradient or the memory is needed, whichever comes first. All
ranks start the same exchanges in the same order. Each rank adds the values in its own time: additions wait for the
exchange and keep the order of the exchanges, so the sums have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from offload.distributed.agreement import Rounds
from offload.distributed.process_group import CollectiveWork, Ranks
from offload.engine.callbacks import GradientStats
from offload.engine.gradients import AddGradient, GradientAccumulator, flat
from offload.errors import RankError
from offload.interrupts import uninterrupted
from offload.kernels.blocks import dequantize, quantize
from offload.layout.placement import CHUNK
from offload.layout.tiers import CODES, Reduction
from offload.swapper.memory.device import DONE, Device, Event
from offload.swapper.memory.device_arena import DeviceArena
from offload.timeline import Row

# -- gradients -----------------------------------------------------------------------------------------
#
# Gradients travel between ranks as values or as codes of 8 bits (qgZ of ZeRO++, arXiv 2306.10209).
#
#     values of a unit ─► codes ─► exchange ─► codes from each rank ─► values in fp32, added in rank order
#
# A gradient becomes codes once, on the rank that has computed it, and the sum is not rounded again. A block of 128
# values with inf or NaN arrives as NaN, so an overflow on one rank is seen by the rank that adds up.


class GradientExchange(NamedTuple):
    """A reduction that has begun, and whose received values are not added up yet."""

    unit: int
    complete: bool
    """True if the sums of the step are complete with these values. They may be added in a later micro-batch."""
    received: torch.Tensor
    """(contributing ranks, or 1 for a sum over replicas; numel of this rank's partition, or bytes of its codes)."""
    sent: torch.Tensor | None
    """Memory of the values that this rank has sent; None if it sends nothing, or if the memory is free already."""
    work: CollectiveWork


class ExchangeMemory:
    """Memory for the rows that this rank sends and receives in exchanges under way."""

    def __init__(
        self, reduction: Reduction, largest: int, rounded: Sequence[torch.Tensor], keep: Callable[[int], torch.Tensor]
    ) -> None:
        """Takes the memory, a tensor for each exchange that may be under way.

        Values are rounded into the memory `rounded` before they are sent. `rounded` is empty if values are sent as they
        are.
        """
        self.form, nbytes = reduction.form, reduction.sent_nbytes(largest)
        # Gradients of any dtype become codes.
        self._sent = deque([keep(nbytes) for _ in range(reduction.coded)] or rounded)
        self._received = deque(keep(nbytes) for _ in range(reduction.received))
        """The memory of the oldest exchange comes first, as in `_sent` and `_received`."""

    def send(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the rows that are sent for `values`, (shards, numel), as codes or in `dtype`.

        A later call reuses the memory, and compute orders this later use after the present one.
        """
        if not self._sent:
            return values
        # This write is ordered after the exchange that last sent from this memory, as all additions are.
        memory = self._sent[0]
        self._sent.rotate(-1)
        if self.form is None:
            return memory.view(dtype)[: values.numel()].view_as(values).copy_(values)
        # A shard is a whole number of blocks, so all rows together have the same codes as row by row.
        rows = memory[: self.form.stored_nbytes(values.numel())]
        quantize(self.form, values.view(-1), rows)
        return rows.view(len(values), -1)

    def receive(self, senders: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for one row from each sender, (senders, ...): `numel` elements of `dtype`, or their codes."""
        memory = self._received[0]
        self._received.rotate(-1)
        if self.form is None:
            return memory.view(dtype)[: senders * numel].view(senders, numel)
        width = self.form.stored_nbytes(numel)
        return memory[: senders * width].view(senders, width)


def values_of(row: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Returns elements [first, stop) of a received row: a view, or new fp32 values if the row holds codes (uint8)."""
    if row.dtype is not torch.uint8:
        return row[first:stop]
    start = first // CODES.values * CODES.values
    numel = -(-(stop - start) // CODES.values) * CODES.values
    values = torch.empty(numel, dtype=torch.float32, device=row.device)
    at = start // CODES.values * CODES.nbytes
    dequantize(CODES, row[at : at + CODES.stored_nbytes(numel)], values)
    return values[first - start : stop - start]


def mean_of(received: torch.Tensor, first: int, stop: int, ranks: int, in_place: bool) -> torch.Tensor:
    """Returns the fp32 mean over `ranks` ranks of elements [first, stop) of the rows that some of them sent.

    The rows are added up in the order of the ranks, so that every run of the same ranks gives the same bits. With
    `in_place`, the mean may overwrite the first row's values where these are fp32, since new memory costs more than the
    arithmetic.
    """
    # Each operation is a pass over memory, so nothing is copied before it is added or divided.
    row, *rest = [values_of(row, first, stop) for row in received]
    out = row if in_place and row.dtype is torch.float32 else None
    if not rest:
        return torch.div(row.to(torch.float32), ranks, out=out)
    total = torch.add(row.to(torch.float32), rest[0], out=out)
    for values in rest[1:]:
        total += values
    total /= ranks
    return total


def zero_between(memory: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
    """Zeroes the elements of `memory` outside of all `ranges`, which are (start, stop)."""
    stop = 0
    for start, end in sorted(ranges):
        memory[stop:start].zero_()
        stop = end
    memory[stop:].zero_()


# -- replica sums --------------------------------------------------------------------------------------
#
# Sums of a shard's gradients over the replicas of the model.
#
#     ranks of a replica: exchange ─► each adds up its shard in fp32 ─► ranks with the same shard: all-reduce
#
# The first part, within a replica, is complete when the second part begins. With `overlap_comm` the second part, whose
# messages leave a machine, is under way during the backward of the next unit. With codes (`payload.gradients`) there is
# no all-reduce: each rank receives the codes of all sums of its shard, and adds their values up in the order of the
# replicas. A rank that is a replica by itself has no first part, and its fp32 gradients are all-reduced in place.


class ReplicaSums:
    """Memory of sums that are under way.

    The calls that begin a sum return its rows and its work. The rows are (1, numel) fp32, the sum over all ranks once
    the work is done, or (replicas, nbytes), the codes of each sum.
    """

    def __init__(self, ranks: Ranks, memory: Sequence[torch.Tensor], codes: Sequence[torch.Tensor]) -> None:
        """Takes over the memory.

        Args:
            memory: a tensor for each sum that may be under way, (numel of the largest shard of a unit,) fp32 on the
                device; with codes or in place, one tensor for all sums.
            codes: a tensor for each sum that may be under way, for the codes of all replicas; none without codes.
        """
        self._ranks = ranks
        self._memory, self._codes = deque(memory), deque(codes)
        """In both, the memory of the oldest sum comes first."""

    def begin_in_place(self, rows: torch.Tensor | None, numel: int, alone: bool) -> tuple[torch.Tensor, CollectiveWork]:
        """Starts the sum over the replicas in the gradients' own memory. Each rank is a replica.

        `rows` is (1, numel) in fp32; None if this rank has no gradient. No earlier sum of such a rank may be under way.
        If ranks keep their gradients (`alone`), nothing is summed.
        """
        if rows is None:
            rows = self._memory[0][:numel].zero_().view(1, -1)
        return rows, CollectiveWork(self._ranks) if alone else self._ranks.all_reduce(rows[0])

    def begin(self, received: torch.Tensor, numel: int, alone: bool) -> tuple[torch.Tensor, CollectiveWork]:
        """Adds up the rows of `received` in their order, and starts the sum over the replicas unless `alone`.

        Every rank calls this, also if no rank of its replica has a gradient. `received` contains a row for each rank of
        this replica that has gradients, values or codes. Compute that is ordered after the calling thread's compute may
        overwrite them.
        """
        total = self._memory[0][:numel]
        self._memory.rotate(-1)
        if not len(received):
            total.zero_()
        # In chunks, so that the values of codes need little memory.
        for first in range(0, numel, CHUNK):
            part = total[first : first + CHUNK]
            for row in received[:1]:
                part.copy_(values_of(row, first, first + len(part)))
            for row in received[1:]:
                part += values_of(row, first, first + len(part))
        if alone:
            return total.view(1, -1), CollectiveWork(self._ranks)
        if not self._codes:
            return total.view(1, -1), self._ranks.all_reduce(total)
        mesh, width = self._ranks.mesh, CODES.stored_nbytes(numel)
        everyone = self._codes[0][: mesh.replicas * width]
        self._codes.rotate(-1)
        own = everyone.view(mesh.replicas, width)[mesh.replica_of(self._ranks.rank)]
        quantize(CODES, total, own)
        return everyone.view(mesh.replicas, width), self._ranks.gather_sums(everyone, own)


# -- reduce scatter ------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """Gradients of a unit that this rank has not reduced yet."""

    memory: torch.Tensor
    """The gradients, each at its segment's position in the unit. All other elements are zeroed before the send."""
    segments: set[int]
    """Segments that have a gradient."""


class ReduceScatterAccumulator(GradientAccumulator):
    """The mean of all ranks' gradients; see `GradientAccumulator` for the threads that may call each method.

    Takes memory of the device arena, which `Partitions.reduction_nbytes` counts: buckets, or a sum for each unit. Each
    exchange that may be under way has a buffer for the received values, this rank's own values included.
    """

    def __init__(
        self,
        *,
        device: Device,
        device_arena: DeviceArena,
        reduction: Reduction,
        rounds: Rounds,
        expert_shards: Ranks,
        **common: Any,
    ) -> None:
        """Allocates the buffers in the device arena. `common` are the arguments of `GradientAccumulator`.

        `expert_shards` are the ranks among which the gradients of experts are reduced that ranks own.
        """
        super().__init__(**common)
        layouts, parts, dtypes = self._layouts, self._parts, self.dtypes
        self._ranks, self._rounds, self._device = rounds.ranks, rounds, device
        self._sharing = [rounds.ranks if layout.ep_size == 1 else expert_shards for layout in layouts]
        """The ranks that divide the gradients of each unit."""
        self._starts = [layout.device_starts for layout in layouts]
        """Start of each segment among the gradients that this rank computes, by unit."""
        self._adds_up, self._exchanges, self._in_place = reduction.whole, reduction.exchanges, reduction.in_place
        self._adds_up_turns = reduction.turns and reduction.dtype == dtypes.sums
        """True if buckets have the dtype of sums, and the config lets micro-batches take turns."""
        largest, keep = max(reduction.numels(layouts)), device_arena.keep
        self._sent = [reduction.dtype_of(layout) for layout in layouts]
        """Dtype that the gradients of each unit are sent in."""
        self._room: list[list[torch.Tensor]]
        """For each unit the free memory for its gradients, in bytes: its own, or the buckets that all units share."""
        buckets = [keep(largest * reduction.dtype.itemsize) for _ in range(reduction.buckets)]
        self._room = [buckets] * len(layouts)
        if self._adds_up:
            self._room = [[keep(layout.gradient_numel * dtypes.sums.itemsize)] for layout in layouts]
        rounded = buckets if self._adds_up else []
        self._memory = ExchangeMemory(reduction, largest, rounded, keep)
        longest = max(map(len, parts))
        sums = [keep(longest * torch.float32.itemsize).view(torch.float32) for _ in range(reduction.sums)]
        codes = [keep(nbytes) for nbytes in reduction.sum_codes(list(map(len, parts)))]
        self._over_replicas = ReplicaSums(self._ranks, sums, codes)
        self._under_way: deque[GradientExchange] = deque()
        """Exchanges whose values are not added up, oldest first. `Rounds.lock` guards it."""
        self._adding = False
        """True while values of an exchange are added up, and from then on if that has failed."""
        self._added = DONE
        """Event after the compute that has added up the last exchange."""
        self._held: dict[int, _Held] = {}
        """Gradients that are not reduced, by unit."""
        self._reduced = False
        """True if ranks have reduced gradients that no step has taken, or may have."""
        self._unit = -1
        self._filled: list[set[int]] = [set() for _ in layouts]
        """Segments of each unit that have a gradient of this backward, not yet reduced."""
        self._wanted = [
            {p for p, s in enumerate(layout.segments) if s.trainable and s.numel and layout.computes(s, part)}
            for layout, part in zip(layouts, parts, strict=True)
        ]
        self._seen: list[set[int]] = [set() for _ in layouts]
        self._aside: list[tuple[int, int, torch.Tensor, Event]] = []
        """Gradients of fp32 weights that arrived between gradients of the other unit of the same module."""

    def adder(self, unit: int, segment: int) -> AddGradient:
        return functools.partial(self.add, unit, segment)

    # -- gradients of this rank ---------------------------------------------------------------------

    def _add(self, unit: int, segment: int, gradient: torch.Tensor, alone: bool = False) -> None:
        """Copies a gradient to a bucket, or adds it to the sum of its unit.

        Before that, reduces the unit under way if the gradient belongs to another unit, or if it does not add up with
        an earlier gradient of the same parameter. Afterwards, reduces this unit if it is complete.
        """
        place = self._layouts[unit].segments[segment]
        if not place.numel:
            return
        adds_up, last = self._sums()
        # If gradients of another unit interrupted a unit, the unit would be sent more than once.
        if self._layouts[unit].in_fp32 and self._unit not in (-1, unit):
            self._aside.append((unit, segment, gradient, self._device.record_event()))
            return
        # In a bucket, a parameter's second gradient must not overwrite its first.
        while self._unit >= 0 and (self._unit != unit or (segment in self._filled[unit] and not adds_up)):
            if self._adds_up and not self._held[self._unit].segments <= self._filled[self._unit]:
                # Sent now, sums of earlier micro-batches would round apart from this one's gradients, which come later.
                self._unit = -1
            else:
                self._reduce()
        unit_sum = self._held.get(unit) or self._hold(unit)
        first = self._starts[unit][segment]
        values = unit_sum.memory[first : first + place.numel]
        if segment in unit_sum.segments:
            values.add_(flat(gradient))
        else:
            values.copy_(flat(gradient))
        unit_sum.segments.add(segment)
        self._seen[unit].add(segment)
        if not last:
            return
        self._unit = unit
        self._filled[unit].add(segment)
        if self._filled[unit] == self._wanted[unit]:
            self._reduce()

    def _sums(self) -> tuple[bool, bool]:
        """Returns whether this backward's gradients add up with earlier ones, and whether no later ones add to them."""
        if self._adds_up:
            return True, self._callbacks.is_last_micro_batch()
        adds_up = self._adds_up_turns and self._schedule.interleaves
        return adds_up, not adds_up or self._schedule.leaves_block

    def _hold(self, unit: int) -> _Held:
        if not self._room[unit]:
            self._add_received()  # frees memory that is being sent
        if not self._room[unit]:
            # Between two blocks, where each micro-batch passes all units, there are more units than buckets. Or this is
            # the first step, in which micro-batches pass one by one. The sum that began first is reduced early.
            self._unit = next(iter(self._held))
            self._reduce()
            self._add_received()
        memory = self._room[unit].pop().view(self.dtypes.sums if self._adds_up else self._sent[unit])
        # compute stream: the exchange before has read this memory on a stream of the backend. The additions are ordered
        # after that exchange, but may be on another stream than this gradient if the model uses several.
        self._device.wait_event(self._added)
        unit_sum = self._held[unit] = _Held(memory, set())
        return unit_sum

    def _release(self, unit: int) -> None:
        unit_sum = self._held.pop(unit, None)
        if unit_sum is not None:
            self._room[unit].append(unit_sum.memory.view(torch.uint8))
            self._filled[unit] = set()

    def _reduce(self) -> None:
        """Reduces the unit under way, and starts the copies of small results that were set aside."""
        # The unit has its gradients. While it waits for the other ranks, its room is for a unit that these gather.
        self._callbacks.leave_weights()
        self._rounds.reduce(self._unit)
        super()._flush()
        aside, self._aside = self._aside, []
        for unit, segment, gradient, computed in aside:
            # compute stream: another stream may have computed the gradient.
            self._device.wait_event(computed)
            self._add(unit, segment, gradient)

    def _flush(self) -> None:
        """Reduces the unit under way, if there is one, and stores all received sums for their updates."""
        while self._unit >= 0:
            self._reduce()
        self._finish()
        super()._flush()

    @uninterrupted
    def complete(self) -> None:
        """Completes a backward, and reduces all sums of this rank that were not reduced with their last gradient."""
        self.end_backward()
        # In the order of an agreement, so that each unit is reduced once. Other ranks may reduce some of these first.
        for unit in sorted(self._held, reverse=True):
            if unit in self._held:
                self._unit = unit
                self._rounds.reduce(unit)
        self._finish()
        super()._flush()

    # -- exchanges ----------------------------------------------------------------------------------

    @property
    def pending_unit(self) -> int:
        return self._unit

    @uninterrupted
    def serve_reduce(self, unit: int, holders: Sequence[int], complete: bool) -> None:
        """Starts the sum of the gradients of `unit` from the ranks `holders`, and ends sums that began before.

        This rank keeps its partition of the mean over all ranks: ranks outside `holders` contribute zeros. Every rank
        calls this at the same time. Where each rank adds up a step, all ranks contribute their sums.
        """
        part, ranks = self._parts[unit], self._sharing[unit]
        mesh, self._reduced = ranks.mesh, True
        # A rank whose last micro-batch leaves out this unit never asks for its sum. Sent later, it would round apart.
        holders = range(self._ranks.size) if self._adds_up else holders
        sends = self._ranks.rank in holders
        # compute stream: NCCL waits for the calling thread's stream, but another stream may have added up received
        # rows.
        self._device.wait_event(self._added)
        rows = sent = None
        if sends:
            # A rank without a gradient in its sum of a step sends zeros.
            unit_sum = self._held.get(unit) or self._hold(unit)
            layout, starts, sent = self._layouts[unit], self._starts[unit], unit_sum.memory
            # Parameters without a gradient here add nothing to the mean, and padding may share a block of codes.
            present = ((starts[index], starts[index] + layout.segments[index].numel) for index in unit_sum.segments)
            zero_between(sent[: layout.gradient_numel], present)
            if unit == self._unit:
                self._unit = -1
            self._filled[unit] = set()
            del self._held[unit]
            rows = sent[: mesh.shards * len(part)].view(mesh.shards, len(part))
            rows = self._memory.send(rows, self._sent[unit])
            if self._memory.form is not None:
                self._free(unit, sent)
                sent = None
        members = [self._ranks.members[rank] for rank in holders]
        among = [ranks.members.index(member) for member in members if member in ranks.members]
        senders, alone = mesh.shards_among(among, ranks.rank), self._callbacks.keeps_gradients()
        if self._in_place:
            if rows is None:
                self._add_received()  # ends a sum of zeros that this rank may have begun from the same memory
            received, work = self._over_replicas.begin_in_place(rows, len(part), alone)
        else:
            received = self._memory.receive(len(senders), len(part), self._sent[unit])
            work = ranks.exchange(received, rows, senders)
            if mesh.replicas > 1:
                work.order_compute()
                received, work = self._over_replicas.begin(received, len(part), alone)
                self._free(unit, sent)
                sent = None
        self._under_way.append(GradientExchange(unit, complete, received, sent, work))
        # The exchange before is added up while the new one runs; without overlap the new one is added up here.
        self._add_received(self._exchanges - 1)

    def _free(self, unit: int, sent: torch.Tensor | None) -> None:
        """Frees memory of gradients, for compute that is ordered after the calling thread's compute."""
        self._device.wait_event(self._added)
        self._added = self._device.record_event()
        self._room[unit].extend([] if sent is None else [sent.view(torch.uint8)])

    def _finish(self) -> None:
        if self._under_way:
            with self._timeline.span(Row.RANKS, "receive gradients"):
                self._add_received()

    @uninterrupted
    def _add_received(self, left: int = 0) -> None:
        """Waits for the oldest exchanges, and stores their sums for the updates.

        The newest `left` exchanges stay under way.
        """
        # autograd thread: two of them may meet here. Most callers hold the lock already, since they serve a reduction.
        with self._rounds.lock:
            while len(self._under_way) > left:
                exchange = self._under_way[0]
                # A Ctrl-C that ends this wait changes nothing: the next call waits again.
                exchange.work.order_compute()
                if self._adding:
                    raise self._ranks.fail("it has failed while it added gradients up")
                self._adding = True
                self._put_mean(exchange)
                self._end(exchange)
                self._adding = False  # not in a `finally`: a sum that is added in part must not be added again

    def _end(self, exchange: GradientExchange) -> None:
        self._free(exchange.unit, exchange.sent)
        self._under_way.popleft()

    def _drop_received(self) -> None:
        with self._rounds.lock:
            while self._under_way:
                self._under_way[0].work.order_compute()
                self._end(self._under_way[0])
            self._adding = False

    def _put_mean(self, exchange: GradientExchange) -> None:
        """Adds up the contributions to this rank's partition of a unit, and passes their mean to `put`."""
        unit, part = exchange.unit, self._parts[exchange.unit]
        ranks = 1 if self._callbacks.keeps_gradients() else self._ranks.size
        for position, segment in enumerate(self._layouts[unit].segments):
            first, last = max(segment.start, part.start), min(segment.stop, part.stop)
            # In chunks, so that the mean, in fp32, needs little memory.
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                at = start - part.start
                # Nothing reads the received rows again, and on the host `put` has copied the mean when it returns.
                mean = mean_of(exchange.received, at, at + stop - start, ranks, self._device.host_addressable)
                self.put(unit, position, start - segment.start, mean, exchange.complete)

    # -- calls after all exchanges have ended --------------------------------------------------------

    def known(self, elsewhere: Container[tuple[int, int]] = ()) -> GradientStats:
        self._finish()
        return replace(super().known(elsewhere), of_one_rank=self._callbacks.keeps_gradients())

    def look(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        self._finish()
        super().look(unit, segment, first, values)

    def replace(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Replaces a gradient, and records it as present."""
        self._finish()
        super().replace(unit, segment, first, values)
        self._seen[unit].add(segment)

    def present(self, unit: int) -> set[int]:
        """Returns the segments of `unit` for which this rank produced a gradient, whichever rank keeps it."""
        return set(self._seen[unit])

    def give(self, units: Sequence[int]) -> None:
        assert not self._under_way, "all was added up when the norm was known"
        super().give(units)
        self._reduced = False
        for unit in units:
            self._seen[unit] = set()

    def drop(self, unit: int) -> None:
        assert not self._under_way, "what is added up later would be kept"
        super().drop(unit)
        self._seen[unit] = set()
        self._release(unit)

    def forget(self) -> None:
        """Drops the gradients of this rank; first waits until every rank is about to, if any gradient was reduced.

        All ranks take part in a reduction, so all wait or none, whatever each has contributed by then.
        """
        if self._reduced:
            self._rounds.forget()
        self.clear()

    def fail_in_turns(self) -> None:
        # Ranks fail at other places of their micro-batches, so that one may have reduced what another has not yet.
        self._reduced = True

    def clear(self) -> None:
        """Drops all gradients that no update has taken, also those that are not reduced."""
        self._drop_received()
        super().clear()
        self._reduced = False
        for unit in list(self._held):  # also of units that an update reads
            self._release(unit)
        self._unit, self._aside = -1, []
        self._seen = [set() for _ in self._layouts]

    def close(self) -> None:
        """Waits for exchanges under way, whose memory other ranks read and write, and closes the rest."""
        # If a rank is lost, the log has named it, and the exchanges under way have failed.
        if not self._ranks.lost:
            with contextlib.suppress(RankError):
                self._drop_received()
        self._under_way.clear()
        super().close()
