"""Gradients of one step, added into host buffers as autograd finishes them, and their norm.

    compute stream ─► squares summed there ─► `downloads` ─┬► the unit's host buffer, for the first gradient of a step
                                                           └► a staging buffer ─► added into the host buffer

A unit has a host buffer of its own, or a window of a gradient on DISK (`DiskSpill`). The device adds up and keeps the
gradients of units that are stored there. For other units it adds up micro-batches as far as memory allows, and copies
the total to the host with the last one (`DeviceTotals`).

A sum of micro-batches in fp32 may be rounded to 16 bits once its last micro-batch has been added (`GradientDtypes`).
Norm, update and user then see the rounded value, wherever it waits. If the device completes all sums of a step, the
memory where they wait has 16 bits. A sum that the host completes is rounded in its fp32 memory. A gradient that arrives
later is added to the rounded sum, and the result rounded again.

The norm reads no gradient a second time: whoever stores values also sums their squares. The device sums the squares of
values that it copies into an empty buffer; the host sums those of values that it adds up. The bits are the same
everywhere. On a GPU without our kernels the host sums all squares, those of a first gradient once its copy has arrived.
If the host can address device memory, all of this is one pass, in the backward's thread. There a gradient to which
nothing is added in its step is not even copied: autograd's own tensor is kept, and the kernel of the update reads it.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from offload import kernels
from offload.aio.protocols import Future
from offload.engine._native import DirectAdd
from offload.engine.callbacks import EngineCallbacks, GradientStats
from offload.engine.gradient_transfer import DeviceToHost, DiskSpill
from offload.engine.micro_batches import PassSchedule
from offload.engine.shards import checksum
from offload.errors import UsageError
from offload.interrupts import uninterrupted
from offload.kernels import cuda
from offload.kernels.sums import Sum
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK
from offload.layout.tiers import GradientDtypes
from offload.metrics.meter import NO_SPANS, ComputeSpans
from offload.notices import Remark, announce
from offload.sizes import format_size
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.memory.limits import free_host_memory
from offload.timeline import OFF, Phase, Row, Timeline
from offload.torch_internals import owns_its_memory

AddGradient: TypeAlias = Callable[[torch.Tensor, bool], None]
"""Function of a gradient of one parameter, and of whether no other code of Python refers to it."""

# -- completion ----------------------------------------------------------------------------------------
#
# The moment when the gradients of a unit are complete, which is a guess until `step()`.
#
# In the last micro-batch of a step, a unit counts as complete once each of its parameters has as many gradients as in
# the backward before. A model that branches, a second loss, or a tied weight of another unit can make this wrong: then
# a gradient arrives later, and its arrival is reported.
#
# Threads. As for `GradientAccumulator.add`: one thread at a time.


class UnitCompletion:
    """Counts the gradients of each backward, and reports units that are complete."""

    def __init__(self, callbacks: EngineCallbacks) -> None:
        self._callbacks = callbacks
        self._expected: dict[int, Counter[int]] = {}
        """For each unit the gradients of each segment in the last backward that gave the unit any."""
        self._arrived: dict[int, Counter[int]] = {}
        """The same in the backward that runs."""
        self._missing: dict[int, Counter[int]] = {}
        """Gradients that have not arrived in the backward that runs; only counts above 0."""
        self._complete: set[int] = set()
        """Units that were reported since the last step."""
        self.guesses = True
        """True if arrivals decide; False while a schedule that knows better calls `unit_complete` itself."""

    def arrived(self, unit: int, segment: int) -> None:
        """Records a gradient, which has been stored or added."""
        if unit in self._complete:
            self.changed(unit)
        counted = self._arrived.get(unit)
        if counted is None:
            counted = self._arrived[unit] = Counter()
            self._missing[unit] = self._expected.get(unit, Counter()).copy()
        counted[segment] += 1
        missing = self._missing[unit]
        if segment not in missing:
            return
        missing[segment] -= 1
        if not missing[segment]:
            del missing[segment]
        if not missing and self.guesses and unit not in self._complete and self._callbacks.is_last_micro_batch():
            self.unit_complete(unit)

    def reporting(self, add: AddGradient, unit: int, segment: int) -> AddGradient:
        """Returns a function that calls `add`, and then `arrived`."""

        @uninterrupted
        def add_and_tell(gradient: torch.Tensor, alone: bool) -> None:
            add(gradient, alone)
            self.arrived(unit, segment)

        return add_and_tell

    def unit_complete(self, unit: int) -> None:
        """Reports that no further gradient of `unit` is expected in this step."""
        self._complete.add(unit)
        self._callbacks.gradients_complete(unit)

    def changed(self, unit: int) -> None:
        """Reports that the gradient of a unit that was taken for complete has changed."""
        if unit in self._complete:
            self._callbacks.gradients_changed(unit)

    def end_backward(self) -> None:
        """Ends a backward. The next one is expected to bring as many gradients."""
        self._expected |= self._arrived
        self._arrived, self._missing = {}, {}

    def end_step(self) -> None:
        """Forgets which units are complete: a step has used their gradients, or they were dropped."""
        self._complete.clear()


class NoCompletion(UnitCompletion):
    """The completion of a run whose updates wait for `step()`: nobody asks, so nothing is counted."""

    def __init__(self) -> None:
        self._complete = set()

    def arrived(self, unit: int, segment: int) -> None:
        return

    def reporting(self, add: AddGradient, unit: int, segment: int) -> AddGradient:
        return add

    def end_backward(self) -> None:
        return


# -- device totals -------------------------------------------------------------------------------------
#
# Totals of a step's gradients in device memory, copied to the host once instead of after each micro-batch.
#
#     micro-batch   first ─► stored    further ─► added    last, or a read ─► copied to the host
#
# Once the copy of a total to the host has begun, the device drops the total; later gradients are added on the host.
# Each addition is rounded once, as by the host's kernel, so a sum has the same bits on the device and on the host.
#
# Some units have memory for their totals for good. Where the micro-batches of a step take turns at a block, every unit
# has totals: the first gradient itself becomes the total, until the last micro-batch has left the block. If gradients
# wait in 16 bits, this is so on a CPU too, and for gradients that stay on the device.


SegmentRange = tuple[int, int]
"""Key of a range of a unit's gradient: the segment, and the range's first element within the segment."""


class DeviceTotals:
    """The totals on the device for some units.

    Called by the thread that adds gradients or by the one that makes the step, never by both at once.
    """

    def __init__(self, memory: Mapping[int, torch.Tensor], dtype: torch.dtype) -> None:
        """Takes device memory for the totals: (numel,) on the device for each unit."""
        self._memory, self._dtype = dict(memory), dtype
        self._here: dict[int, dict[SegmentRange, torch.Tensor]] = {}
        """By unit: each range whose total is on the device, (n,), with the total."""

    def have(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Takes device memory for the totals of more units, between steps."""
        self._memory |= memory

    def leave(self, units: Collection[int]) -> dict[int, torch.Tensor]:
        """Returns the memory of `units`, in the form that `have` takes. None of them may have a total left."""
        assert not any(self._here.get(unit) for unit in units), "a total would be lost"
        return {unit: self._memory.pop(unit) for unit in units}

    def close(self) -> None:
        """Lets go of all memory and totals."""
        self._memory, self._here = {}, {}

    def takes(self, unit: int) -> bool:
        """Returns True if there is memory for the totals of `unit`."""
        return unit in self._memory

    def has(self, unit: int, segment_range: SegmentRange) -> bool:
        """Returns True if a total of this range is on the device."""
        return segment_range in self._here.get(unit, ())

    def segments(self, unit: int) -> set[int]:
        """Returns the segments of `unit` that have a total on the device."""
        return {segment for segment, _ in self._here.get(unit, ())}

    def add(self, unit: int, segment_range: SegmentRange, start: int, values: torch.Tensor) -> None:
        """Stores or adds `values`, (n,) on the device, at position `start` of the unit's gradient.

        Without memory for the unit, `values` itself becomes the total: this object owns it, and later calls change it.
        """
        here = self._here.setdefault(unit, {})
        if segment_range in here:
            here[segment_range].add_(values)
        elif unit in self._memory:
            here[segment_range] = self._memory[unit][start : start + len(values)]
            here[segment_range].copy_(values)
        else:
            here[segment_range] = values.to(self._dtype)

    def values(self, unit: int, segment_range: SegmentRange) -> torch.Tensor:
        """Returns a total, (n,) on the device, perhaps a view of memory that later totals reuse."""
        return self._here[unit][segment_range]

    def ranges(self) -> Iterator[tuple[int, SegmentRange]]:
        """Yields the range of every total on the device, with its unit; totals may be dropped meanwhile."""
        for unit, here in list(self._here.items()):
            for segment_range in list(here):
                yield unit, segment_range

    def forget(self, unit: int, segment: int | None = None) -> None:
        """Drops the totals of a unit, or of one segment of it."""
        here = self._here.get(unit, {})
        for segment_range in [key for key in here if segment in (None, key[0])]:
            del here[segment_range]

    def left(self, unit: int, segment_range: SegmentRange) -> None:
        """Drops a total whose copy to the host has begun; later gradients are added on the host."""
        self._here[unit].pop(segment_range, None)


# -- host gradients ------------------------------------------------------------------------------------
#
# Host memory of gradients: a host buffer for each unit, or a window of one that waits on DISK.
#
#     autograd's own tensor ─► kept ─► read by the update, and dropped
#                                └► another gradient is added: copied to the host buffer first
#
# A kept tensor is never written, and nothing else refers to its memory. No memory stands behind its place in the host
# buffer until something is written there: a run whose gradients are all kept takes their bytes once. So either all
# parameters of a unit may be kept or none, since a page of 2 MiB has room for many small ones.


KEPT_NUMEL = 1 << 16
"""Elements of a unit from which its gradients are kept as autograd has made them: fewer are copied in less time."""


class HostGradients:
    """Gradients of all units on the host.

    The accumulator's lock guards every addition. `values` needs no lock while nobody adds to its elements.
    """

    def __init__(
        self,
        memory: Mapping[int, torch.Tensor],
        spill: DiskSpill,
        layouts: Sequence[UnitLayout],
        parts: Sequence[range],
        dtypes: GradientDtypes,
        addressable: bool,
    ) -> None:
        """Takes `memory`, (numel,) of the partition of each unit whose gradients stay in HOST.

        `parts` are the elements of each unit that this rank updates. `addressable` is True if the host can address the
        gradients of a backward.
        """
        self._memory, self._spill, self._dtypes, self._parts = memory, spill, dtypes, parts
        self._wide: dict[int, torch.Tensor] = {}
        """Memory of sums that the host makes although the memory of their unit has 16 bits: (numel,) in fp32."""
        self._rounded: torch.Tensor | None = None
        """Scratch memory of `round`; (CHUNK,) of the dtype of rounded sums."""
        self._announced = False
        self._sums: dict[tuple[int, int, int], Sum] = {}
        """Checked memory of parts of a host buffer, by unit, first element and length."""
        self._whole: dict[tuple[int, int], Sum] = {}
        """Checked memory of parameters of small units, by unit and segment; see `adder`."""
        self.keepable: set[tuple[int, int]] = set()
        """Parameters whose gradients `keep` may take over, as unit and segment."""
        self._kept: dict[int, dict[int, torch.Tensor]] = {}
        """Gradients that autograd has made and that are kept, (numel,), by unit and segment."""
        for unit, (layout, part) in enumerate(zip(layouts, parts, strict=True)):
            for position, segment in enumerate(layout.segments):
                inside = part.start <= segment.start and segment.stop <= part.stop
                # A gradient whose sum is rounded is neither added without a look at the micro-batch nor kept.
                if dtypes.rounds or not (addressable and unit in memory and inside and segment.numel):
                    continue
                if len(part) >= KEPT_NUMEL:
                    self.keepable.add((unit, position))
                elif segment.numel <= CHUNK:
                    self._whole[unit, position] = self.sum(unit, segment.start - part.start, segment.numel)

    def spills(self, unit: int) -> bool:
        """Returns True if the gradient of `unit` waits on DISK."""
        return unit in self._spill and unit not in self._wide

    def dtype(self, unit: int) -> torch.dtype:
        """Returns the dtype of the memory of a unit's gradient."""
        return self._dtypes.sums if unit in self._wide else self._dtypes.stored

    def is_wide(self, unit: int) -> bool:
        """Returns True if the memory of `unit` has the dtype of sums, so that micro-batches may be added there."""
        return unit in self._wide or self._dtypes.stored is self._dtypes.sums

    def widen(self, unit: int, stored: Iterable[range]) -> None:
        """Takes memory for a sum that the host makes, until `narrow`. Chunks with these elements are `stored` already.

        Raises `UsageError` before any gradient is lost, if there is no memory for such sums of all units.
        """
        if not self._wide:
            self._announce()
        wide = torch.empty(len(self._parts[unit]), dtype=self._dtypes.sums, device="cpu")
        for chunk in stored:
            wide[chunk.start : chunk.stop].copy_(self.values(unit, chunk.start, chunk.stop))
        self._wide[unit] = wide

    def _announce(self) -> None:
        """Says that sums take memory beside the plan, or raises `UsageError` if there is too little."""
        nbytes, free = sum(map(len, self._parts)) * self._dtypes.sums.itemsize, free_host_memory()
        ways = (
            f"their sums in fp32 take {format_size(nbytes)} of RAM beside the plan. train_batch and accumulate make "
            'the sums on the device, and so does the Trainer; "schedule": "micro_batch_major" in "offload" plans for '
            "this order"
        )
        if nbytes > free:
            raise UsageError(f"the host has no room to add up micro-batches, {format_size(free)} is free: {ways}")
        if not self._announced:
            announce(Remark(f"the host adds up micro-batches, whose gradients wait in 16 bits otherwise: {ways}"))
        self._announced = True

    def narrow(self, unit: int) -> None:
        """Frees the memory of `widen`, whose values nobody needs any more."""
        self._wide.pop(unit, None)

    def adder(
        self,
        unit: int,
        segment: int,
        add: AddGradient,
        lock: AbstractContextManager[Any],
        reading: Collection[int],
        watched: Collection[int],
        squares: list[dict[tuple[int, int], Squares]],
    ) -> AddGradient:
        """Returns a function that stores or adds a gradient of one parameter as autograd has made it.

        `add` is the slower way, for a gradient that must be prepared or cut, that must wait because an update is
        `reading` its unit, or that leaves checksums because its unit is `watched`. A chunk with a sum in `squares` is
        stored already, so the function adds to it, and enters the new sum.
        """
        whole = self._whole.get((unit, segment))
        return add if whole is None else DirectAdd(whole.take, add, lock, reading, watched, squares, unit, segment).add

    def keep(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Takes over the first gradient of a parameter in a step: its owner from now on, which never writes to it."""
        self._kept.setdefault(unit, {})[segment] = gradient

    def kept_of(self, unit: int) -> Mapping[int, torch.Tensor]:
        """Returns the kept gradients of a unit, (numel,) each, by segment; all others are in the host buffer."""
        return self._kept.get(unit, {})

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the gradients that are kept."""
        # calling thread: the update thread may drop some meanwhile.
        units = [list(kept.values()) for kept in list(self._kept.values())]
        return sum(gradient.nbytes for gradients in units for gradient in gradients)

    def drop_kept(self, unit: int, segment: int | None = None) -> None:
        """Drops the kept gradients of a unit, or that of one parameter."""
        if segment is None:
            self._kept.pop(unit, None)
        else:
            self._kept.get(unit, {}).pop(segment, None)

    def values(self, unit: int, start: int, stop: int, changed: Sequence[range] | None = None) -> torch.Tensor:
        """Returns elements [start, stop) of a unit's host buffer or window, valid until the next call.

        `changed` as in `DiskSpill.part`.
        """
        if unit in self._wide:
            return self._wide[unit][start:stop]
        if unit in self._spill:
            return self._spill.part(unit, start, stop, changed)
        return self._memory[unit][start:stop]

    def sum(self, unit: int, start: int, numel: int, changed: Sequence[range] | None = None) -> Sum:
        """Returns the sum of gradients in elements [start, start + numel), valid until the next call; see `values`."""
        total = None if unit in self._wide else self._sums.get((unit, start, numel))
        if total is None:
            total = Sum(self.values(unit, start, start + numel, changed))
            # A window moves, and wide memory is freed; a host buffer stays.
            if unit not in self._spill and unit not in self._wide:
                self._sums[unit, start, numel] = total
        return total

    def round(self, unit: int, start: int, numel: int, changed: Sequence[range] | None = None) -> list[float]:
        """Rounds elements [start, start + numel) of a sum in its memory; returns the sum of squares of each chunk."""
        if self._rounded is None:
            self._rounded = torch.empty(CHUNK, dtype=self._dtypes.values, device="cpu")
        squares = []
        for values in self.values(unit, start, start + numel, changed).split(CHUNK):
            rounded = self._rounded[: len(values)]
            squares.append(kernels.accumulate(rounded, values, add=False))
            kernels.accumulate(values, rounded, add=False)
        return squares


# -- values --------------------------------------------------------------------------------------------
#
# Flattening of one gradient, the chunks of its segment, and the sums of its squares.


SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that the kernels add; others are converted."""

Squares = float | torch.Tensor | None
"""Sum of squares of a chunk; a tensor is still on the device. None if the chunk is a sum that is not rounded yet."""


def squares_of(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each `CHUNK` elements of `values`, (n,), as (chunks,) float64 on their device.

    On a GPU the host does not wait. The bits are the same everywhere, and equal those of `kernels.accumulate`.
    """
    if values.is_cuda:
        return cuda.sum_squares(values, CHUNK)
    return torch.tensor(kernels.squares_of_chunks(values, CHUNK), dtype=torch.float64, device="cpu")


def total_of(squares: Sequence[Mapping[tuple[int, int], Squares]], elsewhere: Container[tuple[int, int]] = ()) -> float:
    """Returns the sum of the squares of all gradients, by unit and (segment, first element); all are numbers by now.

    Added in layout order in float64, so that the norm has the same bits whatever order gradients arrived in. Another
    process counts the parameters `elsewhere`, as (unit, segment).
    """
    total = 0.0
    for unit, chunks in enumerate(squares):
        for key in sorted(chunks):
            value = chunks[key]
            assert isinstance(value, float)
            total += 0.0 if (unit, key[0]) in elsewhere else value
    return total


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as (numel,), dense and contiguous, outside of autograd."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:  # from an embedding with sparse=True
        gradient = gradient.to_dense()
    gradient = gradient.contiguous()
    return gradient if gradient.dim() == 1 else gradient.view(-1)


def borders(layout: UnitLayout, part: range) -> list[int]:
    """Returns the positions in `part` where chunks of a gradient begin, sorted, with 0 and the end of `part`."""
    positions = {0, len(part)}
    for segment in layout.segments:
        first, last = max(segment.start, part.start), min(segment.stop, part.stop)
        positions.update(start - part.start for start in range(first, last, CHUNK))
    return sorted(positions)


def parameter_starts(layout: UnitLayout, part: range) -> list[int]:
    """Returns the positions in `part` at which parameters begin, or go on from another rank's, sorted."""
    return sorted(
        max(segment.start, part.start) - part.start
        for segment in layout.segments
        if max(segment.start, part.start) < min(segment.stop, part.stop)
    )


# -- accumulator ---------------------------------------------------------------------------------------


class GradientAccumulator:
    """The gradient of each unit that trains, with each parameter's gradient at the position of the parameter's segment.

    Any thread may call `add` and `put`, one at a time. The update worker calls `stays` and `segment_range`, and `free`
    when an update has read a gradient. All other methods belong to the thread that calls `step()`.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        parts: Sequence[range],
        arena: HostArena,
        dtypes: GradientDtypes,
        schedule: PassSchedule,
        callbacks: EngineCallbacks,
        *,
        spill: DiskSpill,
        on_device: Mapping[int, torch.Tensor],
        totals: Mapping[int, torch.Tensor],
        downloads: DeviceToHost,
        timeline: Timeline,
        compute: ComputeSpans,
        completion: UnitCompletion | None = None,
    ) -> None:
        """Takes a host buffer for each unit whose gradients stay in HOST.

        Args:
            parts: the elements of each unit that this rank updates.
            on_device: (numel,) of `dtypes.stored` for each unit whose gradients stay on the device.
            totals: (numel,) of `dtypes.sums` for units whose gradients are summed on the device, and copied to the host
                afterwards.
            downloads: copies from a device whose memory the host cannot address.
            completion: notices units whose gradients are complete before `step()`; nobody asks without it.
        """
        self._timeline, self._compute = timeline, compute
        self._recorded = timeline is not OFF or compute is not NO_SPANS
        self._titles = [f"gradient of {layout.name or 'the root'}" for layout in layouts]
        self.dtypes, self._on_device = dtypes, on_device
        self.spill, self.downloads = spill, downloads
        self.totals = DeviceTotals(totals, dtypes.sums)
        self._schedule, self._callbacks, self._layouts, self._parts = schedule, callbacks, layouts, parts
        self._lock = threading.Lock()
        self.completion = completion or NoCompletion()
        self._squares: list[dict[tuple[int, int], Squares]] = [{} for _ in layouts]
        """For each unit: sum of squares of each chunk, by (segment, first element)."""
        self._reading: set[int] = set()
        self._checksums: dict[int, dict[tuple[int, int], int]] = {}
        """For each watched unit: CRC-32C of each chunk of a complete gradient as it was stored; see `watch`."""
        memory: dict[int, torch.Tensor] = {}
        for unit, part in enumerate(parts):
            if part and unit not in on_device and unit not in spill:
                host_buffer = arena.take_copied(len(part) * dtypes.stored.itemsize)
                assert host_buffer is not None, "the arena's class of gradients was sized for them"
                memory[unit] = host_buffer.tensor(dtypes.stored)
        self._host = HostGradients(memory, spill, layouts, parts, dtypes, addressable=not downloads.copies)

    def add_up_in(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Takes device memory, (nbytes,) uint8 by unit, for the totals of more units. Called between steps."""
        self.totals.have({unit: block.view(self.dtypes.sums) for unit, block in memory.items()})

    @uninterrupted
    def stop_adding_up_in(self, units: Collection[int]) -> dict[int, torch.Tensor]:
        """Copies totals of `units` to the host, not in a backward; returns their memory in the form of `add_up_in`."""
        for unit in units:
            self._send_totals(unit, complete=False)
        self.downloads.drain()
        return {unit: memory.view(torch.uint8) for unit, memory in self.totals.leave(units).items()}

    def adder(self, unit: int, segment: int) -> AddGradient:
        """Returns `add` for one parameter. For a small one in host memory it is faster, with the same result."""
        if self._recorded:
            return functools.partial(self.add, unit, segment)
        prepare = functools.partial(self._add, unit, segment)
        add = self._host.adder(unit, segment, prepare, self._lock, self._reading, self._checksums, self._squares)
        return self.completion.reporting(add, unit, segment)

    @uninterrupted
    def add(self, unit: int, segment: int, gradient: torch.Tensor, alone: bool = False) -> None:
        """Stores the first gradient of a parameter in a step, or adds a further one. Runs on an autograd thread.

        `alone` is True if no code of Python but the callers on this thread refers to the gradient.
        """
        if not self._recorded:
            self._add(unit, segment, gradient, alone)
        else:
            self._compute.leave_for(unit)
            self._compute.turn_to(unit)
            timeline = OFF if self.downloads.copies else self._timeline  # copies are recorded on arrival
            nbytes = gradient.numel() * gradient.element_size()  # a sparse one lacks `nbytes`
            with timeline.span(Row.DOWNLOADS, self._titles[unit], nbytes):
                self._add(unit, segment, gradient, alone)
        self.completion.arrived(unit, segment)

    @uninterrupted
    def _add(self, unit: int, segment: int, gradient: torch.Tensor, alone: bool) -> None:
        """Stores or adds a gradient of this process. `ReduceScatterAccumulator` first collects a unit."""
        if gradient.layout is torch.sparse_coo:
            if self._adds_rows(unit, segment, gradient):
                self._add_rows(unit, segment, gradient.detach().coalesce())
                return
            gradient = gradient.to_dense()
        if alone and self._may_keep(unit, segment, gradient):
            self._keep_whole(unit, segment, flat(gradient))
        elif self._layouts[unit].segments[segment].numel:
            self.put(unit, segment, 0, flat(gradient), self._callbacks.is_last_micro_batch())

    def _adds_rows(self, unit: int, segment: int, gradient: torch.Tensor) -> bool:
        """Returns True if a sparse gradient of rows is to be added to a gradient on DISK, which the host adds up."""
        on_disk = self._host.spills(unit) and not self._is_new(unit, segment, 0) and not self._has_totals(unit)
        return on_disk and gradient.sparse_dim() == gradient.dense_dim() == 1 and gradient.dtype in SUMMED

    def _add_rows(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Adds rows to a gradient on DISK: of each window, only pages with these rows are written again.

        Other rows keep their bits. Where gradients wait in memory, zeros are added to them, which changes -0 alone: no
        gradient of a piece contains it (`vocabulary.pieces`).
        """
        self._await_update(unit)
        complete = self._callbacks.is_last_micro_batch()
        rows, values = gradient.indices()[0], gradient.values()
        width, numel = values.shape[1], gradient.numel()
        for first in range(0, numel, CHUNK):
            last = min(first + CHUNK, numel)
            start, stop = first // width, -(-last // width)  # the rows with elements in the chunk
            inside = (start <= rows) & (rows < stop)
            if inside.any():
                some = values.new_zeros(stop - start, width)
                some[rows[inside] - start] = values[inside]
                ends = [(max(row * width, first), min(row * width + width, last)) for row in rows[inside].tolist()]
                changed = [range(begin - first, end - first) for begin, end in ends]
                chunk = some.view(-1)[first - start * width : last - start * width]
                self._accumulate(unit, segment, first, chunk, False, complete, changed=changed)

    def _may_keep(self, unit: int, segment: int, gradient: torch.Tensor) -> bool:
        """Returns True if a gradient that is `alone` can wait for its update as it is.

        Memory that something else may write to is copied, and so is a gradient to which another one will be added.
        """
        return (
            (unit, segment) in self._host.keepable
            and self._callbacks.is_last_micro_batch()
            and gradient.dtype is self.dtypes.stored
            and self._is_new(unit, segment, 0)
            and owns_its_memory(gradient)
        )

    def _keep_whole(self, unit: int, segment: int, values: torch.Tensor) -> None:
        """Keeps the first gradient of a parameter in a step, (numel,), instead of a copy, and sums its squares."""
        self._await_update(unit)
        squares = kernels.squares_of_chunks(values, CHUNK)
        with self._lock:
            assert unit not in self._reading
            self._host.keep(unit, segment, values)
            self._record(unit, segment, 0, squares)
            self._sum_bits(unit, segment, 0, values, complete=True)

    def end_backward(self) -> None:
        """Completes an outermost backward, or an aborted one, whose gradients stay as far as they have arrived."""
        self._compute.end_span()
        self._flush()
        self.completion.end_backward()
        self._timeline.end_phase(Phase.BACKWARD)

    def complete(self) -> None:
        """Completes a backward before gradients are read or a step is decided."""
        self.end_backward()

    def _flush(self) -> None:
        """Processes gradients that were set aside: small ones, which are copied together."""
        self.downloads.flush()

    @property
    def pending_unit(self) -> int:
        """The unit whose gradients wait to be reduced with those of other ranks, or -1."""
        return -1

    @uninterrupted
    def serve_reduce(self, unit: int, holders: Sequence[int], complete: bool) -> None:
        """Sums the gradients of `unit` that the ranks `holders` contribute. Every rank calls this at the same time.

        With them the sums of the step are `complete`.
        """
        raise AssertionError("a process that trains alone reduces nothing")

    def put(self, unit: int, segment: int, first: int, values: torch.Tensor, complete: bool) -> None:
        """Stores or adds `values`, (n,) on the device, as elements [first, first + n) of this rank's part of a segment.

        With the values of the last micro-batch a sum is `complete`: it may be rounded. Calls of one step whose ranges
        overlap must have the same range. A range begins a multiple of `CHUNK` elements
        after this rank's first element of the segment.
        """
        if values.dtype not in SUMMED:
            values = values.to(self.dtypes.sums)
        key, new = (segment, first), self._is_new(unit, segment, first)
        # A gradient begins a total on the device, or is added to one, or is stored.
        if self.totals.has(unit, key) or (new and self._has_totals(unit) and not self._leaves(unit, complete)):
            start = self._start(unit, segment, first)
            self.downloads.with_memory(lambda: self.totals.add(unit, key, start, values))
            if self._leaves(unit, complete):
                self._send_total(unit, segment, first, complete)
        else:
            self._store(unit, segment, first, values, new, complete)

    def is_read(self, unit: int) -> bool:
        """Returns True if an update will read, or reads, the gradient of `unit`: from `give` to `free`."""
        return unit in self._reading

    def _await_update(self, unit: int) -> None:
        """Waits until the memory of a gradient may receive the next one. Totals on the device need no such wait."""
        if unit in self._reading:
            # autograd thread: an update may write its moments after the forward has used its weights. A graph that is
            # older than step(), and needs no weights, may even precede the whole update.
            self._callbacks.await_gradient(unit)

    def _is_new(self, unit: int, segment: int, first: int) -> bool:
        """Returns True if no gradient was stored at this position since the last step."""
        return (segment, first) not in self._squares[unit]

    def _has_totals(self, unit: int) -> bool:
        """Returns True if the device may add up the gradients of `unit` before they are stored."""
        return self.dtypes.complete_first or (self.downloads.copies and unit not in self._on_device)

    def _leaves(self, unit: int, complete: bool) -> bool:
        """Returns True if the device adds no more to the total of `unit`, in this step or in the turns at its block."""
        if complete:
            return True
        # Memory of 16 bits on the device holds complete sums alone.
        if self.totals.takes(unit) or unit in self._on_device:
            return False
        return self._schedule.leaves_block

    def _send_total(self, unit: int, segment: int, first: int, complete: bool) -> None:
        self._store(unit, segment, first, self.totals.values(unit, (segment, first)), True, complete)
        self.totals.left(unit, (segment, first))

    def _store(self, unit: int, segment: int, first: int, values: torch.Tensor, new: bool, complete: bool) -> None:
        """Stores `values` if `new`, otherwise adds them; the sum is `complete` with those of the last micro-batch."""
        self._await_update(unit)
        if unit in self._on_device:
            self._keep(unit, segment, first, values, new, complete)
            return
        if not complete and not self._host.is_wide(unit):
            self.downloads.drain()  # the receiving thread may store parts of the sum
            with self._lock:
                self._host.widen(unit, [self._chunk(unit, *key) for key in self._squares[unit]])
                self._checksums.get(unit, {}).clear()  # the wide memory has other bits
        if self.downloads.copies:
            self._send(unit, segment, first, values, new, complete)
        else:
            self._accumulate(unit, segment, first, values, new, complete)

    def _send(self, unit: int, segment: int, first: int, values: torch.Tensor, new: bool, complete: bool) -> None:
        """Starts the copy of `values` to the host, where they are stored if `new`, otherwise added."""
        downloads, dtype = self.downloads, self._host.dtype(unit)
        fewest = self.dtypes.values if complete else dtype
        if new and values.element_size() > fewest.itemsize:
            values = downloads.with_memory(functools.partial(values.to, fewest))  # here, for fewer bytes to copy
        rounds = self.dtypes.rounds and dtype is self.dtypes.sums
        stored = new and values.dtype == dtype and not rounds
        summed = downloads.sums and stored
        chunks = range(0, values.numel(), CHUNK)
        squares: Sequence[Squares] = squares_of(values).unbind() if summed else [0.0] * len(chunks)
        target, receive = None, None
        spills = self._host.spills(unit)
        if stored and not spills:
            start = self._start(unit, segment, first)
            target = self._host.values(unit, start, start + len(values))
            if not summed or unit in self._checksums:

                def receive(position: int, some: torch.Tensor) -> None:
                    self._sum_stored(unit, segment, first + position, some, complete, summed)
        else:

            def receive(position: int, some: torch.Tensor) -> None:
                self._accumulate(unit, segment, first + position, some, new, complete, summed)

        # None if the unit spills: a joined gradient arrives late, and would read back a window that is written already.
        place = None if spills else (unit, segment, first)
        downloads.collect(self._titles[unit], place, values, target, receive)
        # autograd thread: records after `collect`, which may raise while it waits. By now the receiving thread may
        # have recorded sums of its own: they count, and are not overwritten.
        for chunk, value in zip(chunks, squares, strict=True):
            if summed:
                self._squares[unit][segment, first + chunk] = value
            else:
                self._squares[unit].setdefault((segment, first + chunk), value)

    def _sum_stored(
        self, unit: int, segment: int, first: int, values: torch.Tensor, complete: bool, summed: bool
    ) -> None:
        """Sums `values`, (n,) on the host, which a plain copy has stored in the unit's memory; see `_accumulate`."""
        with self._lock:
            assert unit not in self._reading
            if not summed:
                self._record(unit, segment, first, kernels.squares_of_chunks(values, CHUNK))
            self._sum_bits(unit, segment, first, values, complete)

    def _keep(self, unit: int, segment: int, first: int, values: torch.Tensor, new: bool, complete: bool) -> None:
        """Stores or adds `values` on the device. A sum is rounded once, as by the host's kernel."""
        start = self._start(unit, segment, first)
        memory = self._on_device[unit][start : start + values.numel()]
        if new:
            memory.copy_(values)
        else:
            memory.add_(values)
        rounds = self.dtypes.rounds and not self.dtypes.complete_first
        for number, some in enumerate(memory.split(CHUNK)):
            square = None if rounds and not complete else self._round_on_device(some)
            self._squares[unit][segment, first + number * CHUNK] = square
        self._sum_bits(unit, segment, first, memory, complete)

    def _round_on_device(self, memory: torch.Tensor) -> torch.Tensor:
        """Rounds a complete sum of one chunk in its memory, (n,) on the device; returns its sum of squares, ()."""
        if memory.dtype is not self.dtypes.values:
            memory.copy_(memory.to(self.dtypes.values))
        return squares_of(memory)[0]

    def _start(self, unit: int, segment: int, first: int) -> int:
        """Returns the position in this rank's partition of element `first` of a segment."""
        return self._layouts[unit].segments[segment].start - self._parts[unit].start + first

    def _chunk(self, unit: int, segment: int, first: int) -> range:
        """Returns the elements in this rank's partition of the chunk that begins with element `first` of a segment."""
        part = self._parts[unit]
        start = self._start(unit, segment, first)
        return range(start, min(start + CHUNK, self._layouts[unit].segments[segment].stop - part.start, len(part)))

    def _accumulate(
        self,
        unit: int,
        segment: int,
        first: int,
        values: torch.Tensor,
        new: bool,
        complete: bool,
        summed: bool = False,
        changed: Sequence[range] | None = None,
    ) -> None:
        """Stores or adds `values` on the host, and sums their squares unless they are `summed` already.

        If only elements in the ranges `changed` of one chunk are not zero, the others are not written again.
        """
        start = self._start(unit, segment, first)
        numel = values.numel()  # `len` of a tensor is slow Python
        with self._lock:
            # update thread: frees units under the same lock.
            assert unit not in self._reading
            if (kept := self._host.kept_of(unit).get(segment)) is not None:
                if not new:
                    self._host.values(unit, start, start + numel).copy_(kept)
                    # With several gradients in a step, the memory is touched beside a kept one.
                    self._host.keepable.discard((unit, segment))
                # update thread: an update under the backward may still read the kept tensor, and refers to it itself.
                self._host.drop_kept(unit, segment)
            # receiving thread: one call for all chunks, after which it asks for Python's lock once. A window may end
            # with any chunk.
            step = CHUNK if self._host.spills(unit) else max(numel, 1)
            rounds = self.dtypes.rounds and self._host.is_wide(unit)
            if rounds and complete and self._squares[unit].get((segment, first)) is None:
                changed = None  # every element of a sum that is not rounded yet may change
            for done in range(0, numel, step):
                some = values[done : done + step]
                total = self._host.sum(unit, start + done, some.numel(), changed)
                squares: Sequence[Squares] = total.accumulate(some, add=not new, chunk=CHUNK)
                if rounds and complete:
                    squares = self._host.round(unit, start + done, some.numel(), changed)
                elif rounds:
                    squares = [None] * len(squares)
                if not summed:
                    self._record(unit, segment, first + done, squares)
                if unit in self._checksums:
                    stored = self._host.values(unit, start + done, start + done + some.numel(), ())
                    self._sum_bits(unit, segment, first + done, stored, complete)

    def _record(self, unit: int, segment: int, first: int, squares: Sequence[Squares]) -> None:
        """Records the sum of squares of each chunk from element `first` of a segment on. The caller holds the lock."""
        for number, value in enumerate(squares):
            self._squares[unit][segment, first + number * CHUNK] = value

    # -- bits that wait for their update --------------------------------------------------------------

    def watch(self, units: Iterable[int]) -> None:
        """Makes gradients of `units` leave checksums as the last micro-batch of the step stores them, and no others."""
        self._checksums.clear()
        self._checksums.update((unit, {}) for unit in units)

    def _sum_bits(self, unit: int, segment: int, first: int, stored: torch.Tensor, complete: bool) -> None:
        """Records the checksum of each chunk from element `first` of a segment on, `stored`, if the unit is watched."""
        if unit in self._checksums and len(stored):
            for number, chunk in enumerate(stored.split(CHUNK)):
                key = segment, first + number * CHUNK
                self._checksums[unit].pop(key, None)
                if complete:
                    self._checksums[unit][key] = checksum(chunk)

    @uninterrupted
    def flipped(self) -> tuple[int, int] | None:
        """Returns unit and segment of a gradient with other bits than its checksums tell, or None if there is none."""
        self.downloads.drain()
        for unit, sums in self._checksums.items():
            for key, expected in sums.items():
                with self._lock:
                    if checksum(self._stored(unit, key[0], self._chunk(unit, *key))) != expected:
                        return unit, key[0]
        return None

    def _stored(self, unit: int, segment: int, chunk: range) -> torch.Tensor:
        """Returns elements `chunk` of a unit's gradient, of one segment, where they are. The caller holds the lock."""
        if unit in self._on_device:
            return self._on_device[unit][chunk.start : chunk.stop]
        if (kept := self._host.kept_of(unit).get(segment)) is not None:
            place = self._start(unit, segment, 0)
            return kept[chunk.start - place : chunk.stop - place]
        return self._host.values(unit, chunk.start, chunk.stop, ())

    def _complete_sums(self, unit: int) -> None:
        """Rounds sums to which the last micro-batch of the step has added nothing; all gradients are received."""
        for key, squares in list(self._squares[unit].items()):
            if squares is None:
                chunk = self._chunk(unit, *key)
                if unit in self._on_device:
                    self._squares[unit][key] = self._round_on_device(self._on_device[unit][chunk.start : chunk.stop])
                    continue
                with self._lock:
                    (self._squares[unit][key],) = self._host.round(unit, chunk.start, len(chunk))

    def known(self, elsewhere: Container[tuple[int, int]] = ()) -> GradientStats:
        """Returns the statistics that decide a step. Waits until all gradients are copied from the device.

        Parameters of `elsewhere`, as (unit, segment), are left out of the sum of squares: see `total_of`.
        """
        self.receive_totals()
        for unit in range(len(self._squares)):
            self._complete_sums(unit)
        self._fetch_squares()
        present = [self.present(unit) for unit, _ in enumerate(self._squares)]
        return GradientStats(sum_squares=total_of(self._squares, elsewhere), present=present)

    def _send_totals(self, unit: int | None = None, complete: bool = True) -> None:
        """Stores all totals that are still on the device, or those of a unit."""
        for owner, (position, first) in self.totals.ranges():
            if unit in (None, owner):
                self._send_total(owner, position, first, complete)

    def receive_totals(self) -> None:
        """Waits until all gradients are copied from the device."""
        self._send_totals()
        self.downloads.drain()

    def _fetch_squares(self) -> None:
        """Turns sums of squares on the device into numbers, once all gradients are received."""
        # calling thread: the receiving thread records no square any more, so the list is complete.
        pending = [
            (squares, key, value)
            for squares in self._squares
            for key, value in squares.items()
            if isinstance(value, torch.Tensor)
        ]
        if pending:
            values = self.downloads.fetch(torch.stack([value for _, _, value in pending]))
            for (squares, key, _), value in zip(pending, values.tolist(), strict=True):
                squares[key] = value

    def present(self, unit: int) -> set[int]:
        """Returns the segments of `unit` that have a gradient."""
        # autograd thread: the receiving thread may replace numbers meanwhile, but adds no key. `_send` has added the
        # keys of all gradients so far.
        return {segment for segment, _ in self._squares[unit]} | self.totals.segments(unit)

    def is_on_host(self, unit: int) -> bool:
        """Returns True if the gradient of `unit` waits in host memory of its own, and not in a window."""
        return unit not in self._on_device and not self._host.spills(unit)

    def when_received(self, unit: int, act: Callable[[], None]) -> None:
        """Calls `act` once all gradients of `unit` so far are on the host: now, or on the receiving thread."""
        self._send_totals(unit)

        def complete() -> None:
            # receiving thread, or the calling one: the unit's sums are in their memory.
            self._complete_sums(unit)
            act()

        self.downloads.when_received(complete if self.dtypes.rounds else act)

    @uninterrupted
    def look(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Fills `values`, (n,) on the CPU, with elements [first, first + n) of a segment: all those of this rank."""
        self.downloads.drain()
        start, dtype = self._start(unit, segment, first), self.dtypes.values
        with self._lock:
            for chunk in range(0, len(values), CHUNK):
                some = values[chunk : chunk + CHUNK]
                place = range(start + chunk, start + chunk + len(some))
                some.copy_(self._stored(unit, segment, place).to(dtype))
        # Totals are not stored for the look: more micro-batches may come, and a sum is rounded once.
        for owner, (position, at) in self.totals.ranges():
            if (owner, position) == (unit, segment):
                total = self.totals.values(unit, (segment, at))
                values[at - first : at - first + len(total)].copy_(total.to(dtype))

    @uninterrupted
    def replace(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Replaces the elements that `look` reads by `values`, (n,) fp32 on the CPU; n may be 0 on this rank."""
        self.downloads.drain()
        self._await_update(unit)
        self.completion.changed(unit)
        with self._lock:
            self._squares[unit] = {key: square for key, square in self._squares[unit].items() if key[0] != segment}
            self.totals.forget(unit, segment)
        if unit in self._on_device:
            self._keep(unit, segment, first, values, new=True, complete=True)
        else:
            self._accumulate(unit, segment, first, values, new=True, complete=True)

    def give(self, units: Sequence[int]) -> None:
        """Hands the gradients of `units` to their updates until `free`; none may be added meanwhile."""
        self.spill.flush()
        # receiving thread: adds under the same lock, and never to a unit that an update reads.
        with self._lock:
            for unit in units:
                assert not self.totals.segments(unit), "all totals have left when the norm was known"
                self._reading.add(unit)
                self._squares[unit] = {}

    def segment_range(
        self, unit: int, start: int, stop: int, room: HostBuffer | None, offset: int
    ) -> tuple[torch.Tensor, Sequence[Future]]:
        """Returns elements [start, stop) for the update of `unit`, valid once the futures are done; see also `stays`.

        A gradient on DISK is read into `room` from byte `offset` on. A change meanwhile drops the update.
        """
        assert unit in self._reading or not isinstance(self.completion, NoCompletion)
        if unit in self._on_device:
            return self._on_device[unit][start:stop], ()
        if room is not None and self._host.spills(unit):
            end = offset + (stop - start) * self.dtypes.stored.itemsize
            read = self.spill.read(unit, start, stop, room.buffer[offset:end])
            return room.tensor(torch.uint8)[offset:end].view(self.dtypes.stored), (read,)
        return self._host.values(unit, start, stop), ()

    @property
    def kept_nbytes(self) -> int:
        """Bytes of gradients in autograd's own tensors, whose places in the host budget take no memory meanwhile."""
        return self._host.kept_nbytes

    def kept(self, unit: int, start: int, stop: int) -> Mapping[int, torch.Tensor]:
        """Returns the kept gradients in elements [start, stop) of `unit`, (n,) each, by segment; only read.

        What `segment_range` returns has no values there.
        """
        parts: dict[int, torch.Tensor] = {}
        # update thread: without the lock, which others hold while they add. A change meanwhile drops the update, and a
        # list of a dict's items is made at once.
        for segment, gradient in list(self._host.kept_of(unit).items()):
            place = self._start(unit, segment, 0)
            if (part := gradient[max(start - place, 0) : max(stop - place, 0)]).numel():
                parts[segment] = part
        return parts

    def stays(self, unit: int) -> bool:
        """Returns True if the gradient of `unit` waits on the device, for an update on the device."""
        return unit in self._on_device

    def free(self, unit: int) -> None:
        """Releases a gradient that the update has read: its memory may receive the next one."""
        if unit in self.spill:
            self.spill.forget(unit)
        with self._lock:
            self._reading.discard(unit)
            self._host.narrow(unit)
            self._host.drop_kept(unit)

    def drop(self, unit: int) -> None:
        """Drops the gradients of one unit, but not one that an update reads; none may be on its way from the device."""
        if unit in self.spill and unit not in self._reading:
            self.spill.forget(unit)
        with self._lock:
            self._squares[unit] = {}
            self._checksums.get(unit, {}).clear()
            self.totals.forget(unit)
            # calling thread: `zero_grad()` follows `step()` in many loops, whose updates go on; `free` ends these.
            if unit not in self._reading:
                self._host.narrow(unit)
                self._host.drop_kept(unit)

    def forget(self) -> None:
        """Drops every gradient that no update has taken, on all ranks together."""
        self.clear()

    def fail_in_turns(self) -> None:
        """Receives that micro-batches that take turns have failed. Their gradients stay until `forget`."""

    def clear(self) -> None:
        """Drops every gradient that no update has taken, on this rank alone."""
        self.downloads.drain()
        for unit in range(len(self._layouts)):
            self.drop(unit)

    def close(self) -> None:
        """Joins the receiving thread and frees drives and device memory. The update worker must have ended."""
        self._on_device = {}
        self.downloads.close()
        self.spill.close()
        self.totals.close()


# -- zero grad -----------------------------------------------------------------------------------------
#
# `ZeroGrad`, the `zero_grad` of a model whose gradients an engine holds.


class ZeroGrad:
    """`model.zero_grad()` under an engine, which holds the gradients.

    A deep copy of the model receives the method of its class again.
    """

    def __init__(self, module: nn.Module, forget: Callable[[], None]) -> None:
        self._module, self._forget = module, forget

    def __call__(self, set_to_none: bool = True) -> None:
        """Drops the engine's gradients. `set_to_none` has no effect, since `.grad` is always None."""
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the class's own `zero_grad`, bound to the copied module."""
        return types.MethodType(type(self._module).zero_grad, memo[id(self._module)])
