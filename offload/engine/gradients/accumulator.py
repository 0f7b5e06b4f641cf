"""Gradients of one step, added into host leases as autograd finishes them, and their norm.

    compute stream ─► squares summed there ─► `downloads` ─┬► the unit's lease, where it is the first of the step
                                                           └► a staging buffer ─► added into the lease

A unit's lease is its own, or a window of what waits on DISK (see `spill`). The gradients of a unit that lives on the
device altogether stay there and are added there. Those of other units are added up there over the micro-batches, as far
as there is room, and leave with the last (see `totals`). The squares of what is stored as it comes are summed on the
device before it leaves, those of a sum that the host makes on the host: so none is read again for the norm, whose
bits are the same everywhere. On a GPU without CuPy the host sums all squares, and all goes through staging buffers.

Where the host can address the device's memory all of this is one pass, in the thread of the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload import kernels
from offload.aio.protocols import Future
from offload.engine.callbacks import EngineCallbacks, Known
from offload.engine.gradients.device_to_host import Downloads
from offload.engine.gradients.device_totals import Totals
from offload.engine.gradients.disk_spill import Spill
from offload.engine.gradients.values import flat, squares_of
from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK
from offload.swapper.memory.host_arena import HostArena, Lease
from offload.timeline import OFF, Phase, Row, Timeline


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The places where gradients of a step wait for their updates, other than leases of HOST."""

    spill: Spill | None
    """Gradients of units that wait on DISK."""
    on_device: Mapping[int, torch.Tensor]
    """(numel,) of the gradients' dtype for each unit whose gradients stay on the device."""
    totals: Mapping[int, torch.Tensor]
    """The same for units whose gradients are added up on the device over micro-batches, and then leave."""
    downloads: Downloads | None
    """Copies from a device whose memory the host cannot address; None where it can."""


class Gradients:
    """The gradient of each unit that trains; that of a parameter lies where its segment does.

    `add` and `put` may be called by any thread, one at a time; everything else by the thread that calls `step()`, but
    `free`, which the update worker calls when an update has read a gradient.
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
        timeline: Timeline = OFF,
        compute: ComputeSpans = NO_SPANS,
    ) -> None:
        """Takes a lease of the class of homes for each unit whose gradients stay in HOST.

        Args:
            layouts: the segments of each unit.
            parts: the elements of each unit that this rank updates.
            arena: the host memory.
            dtype: of the gradients that are kept.
            waiting: where gradients wait that have no lease.
            callbacks: the engine.
            timeline: shows each gradient, as it comes.
            compute: shows of which unit a gradient is.
        """
        self._timeline, self._compute = timeline, compute
        self._titles = [f"gradient of {layout.name or 'the root'}" for layout in layouts]
        self.dtype = dtype
        self.spill, self.downloads = waiting.spill, waiting.downloads
        self._on_device = waiting.on_device
        self.totals = Totals(waiting.totals)
        self._callbacks = callbacks
        self._leaving = False
        """Whether a total may be on its way that is still there: where an interrupt came between."""
        self._layouts, self._parts = layouts, parts
        self._lock = threading.Lock()
        self._squares: list[dict[tuple[int, int], float | torch.Tensor]] = [{} for _ in layouts]
        """For each unit, (segment, first element) of a stretch to its sum of squares; a tensor is on the device."""
        self._reading: set[int] = set()
        self._memory: list[torch.Tensor | None] = []
        for unit, part in enumerate(parts):
            kept = part and not self._spills(unit) and unit not in self._on_device
            lease = arena.homes.take(len(part) * dtype.itemsize) if kept else None
            assert lease is not None or not kept, "the class of homes was sized for every gradient that has one"
            self._memory.append(None if lease is None else lease.tensor(dtype))

    def add_up_in(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Have memory of the device, (nbytes,) uint8, for the totals of more units. Between steps."""
        self.totals.have({unit: each.view(self.dtype) for unit, each in memory.items()})

    def add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Store the first gradient of a parameter, add any further one."""
        self._compute.leave_for(unit)
        self._compute.turn_to(unit)
        timeline = self._timeline if self.downloads is None else OFF  # downloads show a gradient when it has come
        nbytes = gradient.numel() * gradient.element_size()  # as it is stored; a sparse one has no `nbytes`
        with timeline.span(Row.DOWNLOADS, self._titles[unit], nbytes):
            self._add(unit, segment, gradient)

    def _add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        if self._layouts[unit].segments[segment].numel:
            self.put(unit, segment, 0, flat(gradient))

    def end_backward(self) -> None:
        """Ends an outermost backward, or one that was aborted before."""
        self._compute.end_stretch()
        self._flush()
        self._timeline.end_phase(Phase.BACKWARD)

    def _flush(self) -> None:
        """Takes what `add` has put aside. Nothing is, where this process is alone."""

    @property
    def pending_unit(self) -> int:
        """The unit whose gradients wait to be reduced with those of other ranks, or -1."""
        return -1

    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        """Adds up the gradients of `unit` that the ranks `holders` have. Every rank calls it at once."""
        raise AssertionError("a process that trains alone reduces nothing")

    def put(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Store or add `values`, (n,) on the device: elements [first, first + n) of a segment, all of them this rank's.

        The same pass sums the squares of the new values, so that the norm reads no gradient again. A stretch must
        begin and end where it did in the step's other calls, and begin whole `CHUNK`s from where this rank's does.
        """
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            values = values.to(self.dtype)
        if unit in self._reading:
            self._callbacks.await_updates()  # a graph made before step() that needed no weights, such as an embedding's
        if unit in self._on_device:
            self._keep(unit, segment, first, values)
        elif self.downloads is None:
            self._accumulate(unit, segment, first, values, self._is_new(unit, segment, first))
        elif self._is_added_up(unit, segment, first):
            self._add_up(self.downloads, unit, segment, first, values)
        else:
            self._send(self.downloads, unit, segment, first, values, self._is_new(unit, segment, first))

    def _is_new(self, unit: int, segment: int, first: int) -> bool:
        """Whether no gradient was stored there since the last step."""
        return (segment, first) not in self._squares[unit]

    def _is_added_up(self, unit: int, segment: int, first: int) -> bool:
        """Whether a gradient is for the total on the device: not where that has left, nor where it would at once."""
        if self.totals.has(unit, (segment, first)):
            return True
        return (
            self.totals.takes(unit) and self._is_new(unit, segment, first) and not self._callbacks.is_last_micro_batch()
        )

    def _add_up(self, downloads: Downloads, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Add `values` to the total on the device, which leaves where nothing more will come."""
        if self._leaving:
            downloads.drain()
            self._leaving = False
        self.totals.add(unit, (segment, first), self._start(unit, segment, first), values)
        if self._callbacks.is_last_micro_batch():
            self._leave(downloads, unit, segment, first)

    def _leave(self, downloads: Downloads, unit: int, segment: int, first: int) -> None:
        """Let the total of a stretch come to where it waits for its update. It is stored, so twice does no harm."""
        self._leaving = True
        self._send(downloads, unit, segment, first, self.totals.values(unit, (segment, first)), True)
        self.totals.left(unit, (segment, first))
        self._leaving = False

    def _send(self, downloads: Downloads, unit: int, segment: int, first: int, values: torch.Tensor, new: bool) -> None:
        """Let `values`, on the device, come to where they are stored, if `new`, or added."""
        if new and values.element_size() > self.dtype.itemsize:
            values = values.to(self.dtype)  # as it would be stored; less to copy
        summed = downloads.sums and new and values.dtype == self.dtype
        chunks = range(0, len(values), CHUNK)
        squares: Sequence[float | torch.Tensor] = squares_of(values).unbind() if summed else [0.0] * len(chunks)
        target, receive = None, None
        if summed and not self._spills(unit):
            start = self._start(unit, segment, first)
            target = self._part(unit, start, start + len(values))
        else:

            def receive(position: int, some: torch.Tensor) -> None:
                self._accumulate(unit, segment, first + position, some, new, summed)

        downloads.send(self._titles[unit], values, target, receive)
        # Only now: what an interrupt has kept from leaving is not there. The other thread may have come first.
        for chunk, value in zip(chunks, squares, strict=True):
            if summed:
                self._squares[unit][segment, first + chunk] = value
            else:
                self._squares[unit].setdefault((segment, first + chunk), value)

    def _keep(self, unit: int, segment: int, first: int, values: torch.Tensor, add: bool = True) -> None:
        """Store or add `values` on the device. What is added is rounded once, as the host's kernel has it."""
        start = self._start(unit, segment, first)
        memory = self._on_device[unit][start : start + len(values)]
        if add and not self._is_new(unit, segment, first):
            memory.add_(values)
        else:
            memory.copy_(values)
        for number, value in enumerate(squares_of(memory).unbind()):
            self._squares[unit][segment, first + number * CHUNK] = value

    def _start(self, unit: int, segment: int, first: int) -> int:
        """Where in this rank's part of a unit element `first` of a segment lies."""
        return self._layouts[unit].segments[segment].start - self._parts[unit].start + first

    def _accumulate(
        self, unit: int, segment: int, first: int, values: torch.Tensor, new: bool, summed: bool = False
    ) -> None:
        """Store or add `values`, on the host; whose squares are `summed` elsewhere, if not here."""
        start = self._start(unit, segment, first)
        with self._lock:
            assert unit not in self._reading
            for chunk in range(0, len(values), CHUNK):
                more = values[chunk : chunk + CHUNK]
                memory = self._part(unit, start + chunk, start + chunk + len(more))
                squares = kernels.accumulate(memory, more, add=not new)
                if not summed:
                    self._squares[unit][segment, first + chunk] = squares

    def _part(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a unit's gradient, in HOST until the next call."""
        if self.spill is not None and self._spills(unit):
            return self.spill.part(unit, start, stop)
        memory = self._memory[unit]
        assert memory is not None
        return memory[start:stop]

    def _spills(self, unit: int) -> bool:
        return self.spill is not None and unit in self.spill

    def known(self) -> Known:
        """What a step is decided on. Waits for what is on its way from the device."""
        self._bring_totals()
        self._fetch_squares()
        total = 0.0
        for squares in self._squares:
            for key in sorted(squares):
                value = squares[key]
                assert isinstance(value, float)
                total += value
        return Known(sum_squares=total, present=self._present())

    def _bring_totals(self, unit: int | None = None, segment: int | None = None) -> None:
        """Let the totals of a unit's segment leave the device, or all that still are there."""
        for each, (position, first) in self.totals.stretches():
            if unit in (None, each) and segment in (None, position):
                assert self.downloads is not None
                self._leave(self.downloads, each, position, first)

    def _fetch_squares(self) -> None:
        """Make numbers of what the device summed. Blocks until all gradients are here: a step must know its norm."""
        if self.downloads is None:
            return
        self.downloads.drain()
        found = [
            (squares, key, value)
            for squares in self._squares
            for key, value in squares.items()
            if isinstance(value, torch.Tensor)
        ]
        if found:
            values = self.downloads.fetch(torch.stack([value for _, _, value in found]))
            for (squares, key, _), value in zip(found, values.tolist(), strict=True):
                squares[key] = value

    def _receive_all(self) -> None:
        if self.downloads is not None:
            self.downloads.drain()

    def _present(self) -> list[set[int]]:
        return [
            {segment for segment, _ in squares} | self.totals.segments(unit)
            for unit, squares in enumerate(self._squares)
        ]

    def has(self, unit: int, segment: int) -> bool:
        """Whether this rank was given a gradient of this parameter since the last step."""
        return segment in self._present()[unit]

    def look(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Fill `values`, (n,) on the CPU, with elements [first, first + n) of a segment: all that are this rank's."""
        self._bring_totals(unit, segment)
        self._receive_all()
        start = self._start(unit, segment, first)
        if unit in self._on_device:
            values.copy_(self._on_device[unit][start : start + len(values)])
            return
        with self._lock:
            for chunk in range(0, len(values), CHUNK):
                some = values[chunk : chunk + CHUNK]
                some.copy_(self._part(unit, start + chunk, start + chunk + len(some)))

    def replace(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Make `values`, (n,) fp32 on the CPU, the elements that `look` gives; there may be none on this rank."""
        self._receive_all()
        with self._lock:
            squares = self._squares[unit]
            self._squares[unit] = {key: squares[key] for key in squares if key[0] != segment}
            self.totals.forget(unit, segment)
        if unit in self._on_device:
            self._keep(unit, segment, first, values, add=False)
        else:
            self._accumulate(unit, segment, first, values, new=True)

    def give(self, units: Sequence[int]) -> None:
        """The gradients of `units` belong to their updates from now until `free`; none may be added meanwhile."""
        if self.spill is not None:
            self.spill.flush()
        with self._lock:
            for unit in units:
                assert not self.totals.segments(unit), "all totals have left when the norm was known"
                self._reading.add(unit)
                self._squares[unit] = {}

    def stretch(
        self, unit: int, start: int, stop: int, room: Lease, offset: int
    ) -> tuple[torch.Tensor, Sequence[Future]]:
        """Elements [start, stop) for the update of `unit`, there once the futures are done; see also `stays`.

        Those of a unit that spills are read into `room`, from byte `offset` on.
        """
        assert unit in self._reading
        if unit in self._on_device:
            return self._on_device[unit][start:stop], ()
        if self.spill is not None and self._spills(unit):
            end = offset + (stop - start) * self.dtype.itemsize
            read = self.spill.read(unit, start, stop, room.buffer[offset:end])
            return room.tensor(torch.uint8)[offset:end].view(self.dtype), (read,)
        memory = self._memory[unit]
        assert memory is not None
        return memory[start:stop], ()

    def stays(self, unit: int) -> bool:
        """Whether the gradient of `unit` waits on the device, where its update finds it."""
        return unit in self._on_device

    def free(self, unit: int) -> None:
        """The update has read the gradient: the memory may take the next one."""
        if self.spill is not None and self._spills(unit):
            self.spill.forget(unit)
        with self._lock:
            self._reading.discard(unit)

    def drop(self, unit: int) -> None:
        """Forget the gradients of one unit."""
        if self.spill is not None and self._spills(unit):
            self.spill.forget(unit)
        with self._lock:
            self._squares[unit] = {}
            self.totals.forget(unit)

    def forget(self) -> None:
        """What `zero_grad` does."""
        self.clear()

    def clear(self) -> None:
        """Forget every gradient that no update has taken."""
        self._receive_all()
        for unit in range(len(self._layouts)):
            if unit not in self._reading:
                self.drop(unit)

    def close(self) -> None:
        """Join the receiving thread, give room on the drives back. The update worker must have ended."""
        if self.downloads is not None:
            self.downloads.close()
        if self.spill is not None:
            self.spill.close()


def borders(layout: UnitLayout, part: range) -> list[int]:
    """Where in this rank's `part` of a unit a chunk of a gradient begins; first and last are those of the part."""
    found = {0, len(part)}
    for segment in layout.segments:
        first, last = max(segment.start, part.start), min(segment.stop, part.stop)
        found.update(start - part.start for start in range(first, last, CHUNK))
    return sorted(found)
