"""Gradients of one step, added into host buffers as autograd finishes them, and their norm.

    compute stream ─► squares summed there ─► `downloads` ─┬► the unit's host buffer, for the first gradient of a step
                                                           └► a staging buffer ─► added into the host buffer

A unit's host buffer is its own, or a window of a gradient on DISK (`disk_spill`). Gradients of a unit that is stored on
the device are added there and stay. Those of other units are summed on the device over the micro-batches, as far as
memory allows, and copied to the host with the last (`device_totals`). The squares of values that are stored as they
arrive are summed on the device before the copy; those of sums on the host, on the host. So the norm reads no gradient
again, and its bits are the same everywhere. On a GPU without our kernels the host sums all squares, and all gradients
pass through staging buffers. If the host can address device memory, all of this is one pass, in the backward's thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Container, Mapping, Sequence

import torch

from offload.aio.protocols import Future
from offload.engine.callbacks import EngineCallbacks, GradientStats
from offload.engine.gradients.completion import UnitCompletion
from offload.engine.gradients.device_to_host import DeviceToHost
from offload.engine.gradients.device_totals import DeviceTotals
from offload.engine.gradients.host_gradients import HostGradients, buffers_for
from offload.engine.gradients.places import GradientPlaces
from offload.engine.gradients.values import SUMMED, flat, squares_of, total_of
from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.interrupts import uninterrupted
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import CHUNK
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.timeline import OFF, Phase, Row, Timeline


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
        dtype: torch.dtype,
        waiting: GradientPlaces,
        callbacks: EngineCallbacks,
        *,
        timeline: Timeline = OFF,
        compute: ComputeSpans = NO_SPANS,
        completion: UnitCompletion | None = None,
    ) -> None:
        """Takes a host buffer for each unit whose gradients stay in HOST.

        Args:
            layouts: the segments of each unit.
            parts: the elements of each unit that this rank updates.
            arena: the host memory.
            dtype: dtype of the stored gradients.
            waiting: memory for gradients without a host buffer.
            callbacks: the engine.
            timeline: records each gradient as it arrives.
            compute: records the unit to which a gradient belongs.
            completion: notices units whose gradients are complete before `step()`; None if nobody asks.
        """
        self._timeline, self._compute = timeline, compute
        self._recorded = timeline is not OFF or compute is not NO_SPANS
        self._titles = [f"gradient of {layout.name or 'the root'}" for layout in layouts]
        self.dtype, self._on_device = dtype, waiting.on_device
        self.spill, self.downloads = waiting.spill, waiting.downloads
        self.totals = DeviceTotals(waiting.totals, dtype)
        self._callbacks, self._layouts, self._parts = callbacks, layouts, parts
        self._lock = threading.Lock()
        self.completion = completion
        self._squares: list[dict[tuple[int, int], float | torch.Tensor]] = [{} for _ in layouts]
        """For each unit: sum of squares of each chunk, by (segment, first element); a tensor is still on the device."""
        self._reading: set[int] = set()
        memory = buffers_for(parts, arena, dtype, {unit for unit in range(len(parts)) if not self.is_on_host(unit)})
        self._host = HostGradients(memory, self.spill, layouts, parts, self.downloads is None)

    def add_up_in(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Takes device memory, (nbytes,) uint8 by unit, for the totals of more units. Called between steps."""
        self.totals.have({unit: each.view(self.dtype) for unit, each in memory.items()})

    @uninterrupted
    def stop_adding_up_in(self, units: Collection[int]) -> dict[int, torch.Tensor]:
        """Copies totals of `units` to the host, not in a backward; returns their memory in the form of `add_up_in`."""
        for unit in units:
            self._send_totals(unit)
        self._receive_all()
        return {unit: memory.view(torch.uint8) for unit, memory in self.totals.leave(units).items()}

    def adder(self, unit: int, segment: int) -> Callable[[torch.Tensor], None]:
        """Returns `add` for one parameter; for a small one in host memory a shorter way with the same result."""
        if self._recorded:
            return functools.partial(self.add, unit, segment)
        prepare = functools.partial(self._add, unit, segment)
        add = self._host.adder(unit, segment, prepare, self._lock, self._reading, self._squares)
        return add if self.completion is None else self.completion.told(add, unit, segment)

    @uninterrupted
    def add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Stores the first gradient of a parameter in a step, or adds a further one. Runs on an autograd thread."""
        if not self._recorded:
            self._add(unit, segment, gradient)
        else:
            self._compute.leave_for(unit)
            self._compute.turn_to(unit)
            timeline = self._timeline if self.downloads is None else OFF  # else recorded on arrival
            nbytes = gradient.numel() * gradient.element_size()  # a sparse one lacks `nbytes`
            with timeline.span(Row.DOWNLOADS, self._titles[unit], nbytes):
                self._add(unit, segment, gradient)
        if self.completion is not None:
            self.completion.arrived(unit, segment)

    @uninterrupted
    def _add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Stores or adds a gradient of this process; on several ranks overridden to collect a unit first."""
        if self._layouts[unit].segments[segment].numel:
            self.put(unit, segment, 0, flat(gradient))

    def end_backward(self) -> None:
        """Completes an outermost backward, or an aborted one, of which the gradients that have arrived are kept."""
        self._compute.end_span()
        self._flush()
        if self.completion is not None:
            self.completion.end_backward()
        self._timeline.end_phase(Phase.BACKWARD)

    def complete(self) -> None:
        """Completes a backward before gradients are read or a step is decided."""
        self.end_backward()

    def _flush(self) -> None:
        """Processes gradients that were set aside: small ones, which are copied together."""
        if self.downloads is not None:
            self.downloads.flush()

    @property
    def pending_unit(self) -> int:
        """The unit whose gradients wait to be reduced with those of other ranks, or -1."""
        return -1

    @uninterrupted
    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        """Sums the gradients of `unit` that the ranks `holders` contribute. Every rank calls this at the same time."""
        raise AssertionError("a process that trains alone reduces nothing")

    def put(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Stores or adds `values`, (n,) on the device, as elements [first, first + n) of this rank's part of a segment.

        Calls of one step whose ranges overlap must have the same range. A range begins a multiple of `CHUNK` elements
        after this rank's first element of the segment.
        """
        if values.dtype not in SUMMED:
            values = values.to(self.dtype)
        if unit in self._reading:
            self._callbacks.await_updates()  # a graph older than step() that needs no weights, such as an embedding's
        if unit in self._on_device:
            self._keep(unit, segment, first, values)
        elif self.downloads is None:
            self._accumulate(unit, segment, first, values, self._is_new(unit, segment, first))
        # A gradient begins a total on the device, or is added to one, or is copied.
        elif self.totals.has(unit, (segment, first)) or (self._is_new(unit, segment, first) and not self._leaves(unit)):
            self._add_up(self.downloads, unit, segment, first, values)
        else:
            self._send(self.downloads, unit, segment, first, values, self._is_new(unit, segment, first))

    def _is_new(self, unit: int, segment: int, first: int) -> bool:
        """Returns True if no gradient was stored at this position since the last step."""
        return (segment, first) not in self._squares[unit]

    def _leaves(self, unit: int) -> bool:
        """Returns True if no further gradient of `unit` is added up on the device in this step, or in its turns."""
        if self._callbacks.is_last_micro_batch():
            return True
        return not self.totals.takes(unit) and ((turn := self._callbacks.turn()) is None or turn.last)

    def _add_up(self, downloads: DeviceToHost, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Adds `values` to the total on the device, and starts the copy to the host if the total leaves."""
        start = self._start(unit, segment, first)
        downloads.with_memory(lambda: self.totals.add(unit, (segment, first), start, values))
        if self._leaves(unit):
            self._send_total(downloads, unit, segment, first)

    def _send_total(self, downloads: DeviceToHost, unit: int, segment: int, first: int) -> None:
        """Starts the copy of a total to the host."""
        self._send(downloads, unit, segment, first, self.totals.values(unit, (segment, first)), True)
        self.totals.left(unit, (segment, first))

    def _send(
        self, downloads: DeviceToHost, unit: int, segment: int, first: int, values: torch.Tensor, new: bool
    ) -> None:
        """Starts the copy of `values` to the host, where they are stored if `new`, otherwise added."""
        if new and values.element_size() > self.dtype.itemsize:
            values = downloads.with_memory(functools.partial(values.to, self.dtype))  # here, for fewer bytes to copy
        summed = downloads.sums and new and values.dtype == self.dtype
        chunks = range(0, values.numel(), CHUNK)
        squares: Sequence[float | torch.Tensor] = squares_of(values).unbind() if summed else [0.0] * len(chunks)
        target, receive = None, None
        if summed and not self._host.spills(unit):
            start = self._start(unit, segment, first)
            target = self._host.values(unit, start, start + len(values))
        else:

            def receive(position: int, some: torch.Tensor) -> None:
                self._accumulate(unit, segment, first + position, some, new, summed)

        # Never joined if the unit spills: small gradients that arrive late would read back windows already written.
        place = None if self._host.spills(unit) else (unit, segment, first)
        downloads.collect(self._titles[unit], place, values, target, receive)
        # Recorded after the send, whose wait may raise. Sums that the receiving thread has recorded by then stay.
        for chunk, value in zip(chunks, squares, strict=True):
            if summed:
                self._squares[unit][segment, first + chunk] = value
            else:
                self._squares[unit].setdefault((segment, first + chunk), value)

    def _keep(self, unit: int, segment: int, first: int, values: torch.Tensor, add: bool = True) -> None:
        """Stores or adds `values` on the device. A sum is rounded once, as by the host's kernel."""
        start = self._start(unit, segment, first)
        memory = self._on_device[unit][start : start + values.numel()]
        if add and not self._is_new(unit, segment, first):
            memory.add_(values)
        else:
            memory.copy_(values)
        for number, value in enumerate(squares_of(memory).unbind()):
            self._squares[unit][segment, first + number * CHUNK] = value

    def _start(self, unit: int, segment: int, first: int) -> int:
        """Returns the position in this rank's partition of element `first` of a segment."""
        return self._layouts[unit].segments[segment].start - self._parts[unit].start + first

    def _accumulate(
        self, unit: int, segment: int, first: int, values: torch.Tensor, new: bool, summed: bool = False
    ) -> None:
        """Stores or adds `values` on the host, and sums their squares unless they are `summed` already."""
        start = self._start(unit, segment, first)
        numel = values.numel()  # `len` of a tensor is slow Python
        with self._lock:
            # The update worker frees units under the same lock, on its own thread.
            assert unit not in self._reading
            for chunk in range(0, numel, CHUNK):
                more = values if numel <= CHUNK else values[chunk : chunk + CHUNK]
                squares = self._host.sum(unit, start + chunk, more.numel()).accumulate(more, add=not new)
                if not summed:
                    self._squares[unit][segment, first + chunk] = squares

    def known(self, elsewhere: Container[tuple[int, int]] = ()) -> GradientStats:
        """Returns the statistics on which a step is decided. Waits until all gradients are copied from the device.

        Parameters of `elsewhere`, as (unit, segment), are left out of the sum of squares: see `total_of`.
        """
        self.receive_totals()
        present = [self.present(unit) for unit, _ in enumerate(self._squares)]
        return GradientStats(sum_squares=total_of(self._squares, elsewhere), present=present)

    def _send_totals(self, unit: int | None = None, segment: int | None = None) -> None:
        """Starts the copies of all totals that are still on the device, or of those of a unit's segment."""
        for each, (position, first) in self.totals.ranges():
            if unit in (None, each) and segment in (None, position):
                assert self.downloads is not None
                self._send_total(self.downloads, each, position, first)

    def receive_totals(self) -> None:
        """Waits until all gradients are copied from the device; sums of squares there become numbers."""
        self._send_totals()
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

    def present(self, unit: int) -> set[int]:
        """Returns the segments of `unit` that have a gradient."""
        return {segment for segment, _ in self._squares[unit]} | self.totals.segments(unit)

    def is_on_host(self, unit: int) -> bool:
        """Returns True if the gradient of `unit` waits in host memory of its own."""
        return unit not in self._on_device and (self.spill is None or unit not in self.spill)

    def when_received(self, unit: int, act: Callable[[], None]) -> None:
        """Calls `act` once all gradients of `unit` so far are on the host: now, or on the receiving thread."""
        self._send_totals(unit)
        act() if self.downloads is None else self.downloads.when_received(act)

    def has(self, unit: int, segment: int) -> bool:
        """Returns True if this rank received a gradient of this parameter since the last step."""
        return segment in self.present(unit)

    @uninterrupted
    def look(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Fills `values`, (n,) on the CPU, with elements [first, first + n) of a segment: all those of this rank."""
        self._send_totals(unit, segment)
        self._receive_all()
        start = self._start(unit, segment, first)
        if unit in self._on_device:
            values.copy_(self._on_device[unit][start : start + len(values)])
            return
        with self._lock:
            for chunk in range(0, len(values), CHUNK):
                some = values[chunk : chunk + CHUNK]
                some.copy_(self._host.values(unit, start + chunk, start + chunk + len(some)))

    @uninterrupted
    def replace(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Replaces the elements that `look` reads by `values`, (n,) fp32 on the CPU; n may be 0 on this rank."""
        self._receive_all()
        if self.completion is not None:
            self.completion.changed(unit)
        with self._lock:
            self._squares[unit] = {key: each for key, each in self._squares[unit].items() if key[0] != segment}
            self.totals.forget(unit, segment)
        if unit in self._on_device:
            self._keep(unit, segment, first, values, add=False)
        else:
            self._accumulate(unit, segment, first, values, new=True)

    def give(self, units: Sequence[int]) -> None:
        """Hands the gradients of `units` to their updates until `free`; none may be added meanwhile."""
        if self.spill is not None:
            self.spill.flush()
        with self._lock:
            for unit in units:
                assert not self.totals.segments(unit), "all totals have left when the norm was known"
                self._reading.add(unit)
                self._squares[unit] = {}

    def segment_range(
        self, unit: int, start: int, stop: int, room: HostBuffer | None, offset: int
    ) -> tuple[torch.Tensor, Sequence[Future]]:
        """Returns elements [start, stop) for the update of `unit`, valid once the futures are done; see also `stays`.

        A gradient on DISK is read into `room` from byte `offset` on. One that changes meanwhile drops its update.
        """
        assert unit in self._reading or self.completion is not None
        if unit in self._on_device:
            return self._on_device[unit][start:stop], ()
        if room is not None and self.spill is not None and unit in self.spill:
            end = offset + (stop - start) * self.dtype.itemsize
            read = self.spill.read(unit, start, stop, room.buffer[offset:end])
            return room.tensor(torch.uint8)[offset:end].view(self.dtype), (read,)
        return self._host.values(unit, start, stop), ()

    def stays(self, unit: int) -> bool:
        """Returns True if the gradient of `unit` waits on the device, for an update on the device."""
        return unit in self._on_device

    def free(self, unit: int) -> None:
        """Releases a gradient that the update has read: its memory may receive the next one."""
        if self.spill is not None and unit in self.spill:
            self.spill.forget(unit)
        with self._lock:
            self._reading.discard(unit)

    def drop(self, unit: int) -> None:
        """Drops the gradients of one unit, none of which may be on its way from the device."""
        if self.spill is not None and unit in self.spill:
            self.spill.forget(unit)
        with self._lock:
            self._squares[unit] = {}
            self.totals.forget(unit)

    def forget(self) -> None:
        """Drops every gradient that no update has taken; of several ranks, together."""
        self.clear()

    def clear(self) -> None:
        """Drops every gradient that no update has taken, on this rank."""
        self._receive_all()
        for unit in range(len(self._layouts)):
            if unit not in self._reading:
                self.drop(unit)

    def close(self) -> None:
        """Joins the receiving thread and frees drives and device memory. The update worker must have ended."""
        self._on_device = {}
        for part in (self.downloads, self.spill, self.totals):
            if part is not None:
                part.close()
