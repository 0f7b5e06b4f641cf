"""Gradients of one step, added into host leases as autograd finishes them, and their norm.

    compute stream ─► download to a staging buffer ─► event ─► added into the unit's lease, squares summed

A unit's lease is its own, or a window of what waits on DISK (see `spill`).

Where the host can address the device's memory the first two steps fall away. A staging buffer is emptied when the next
gradient needs it or when `norm` is asked for: the thread of the backward waits for the oldest copy alone.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload import kernels
from offload.engine.layout import UnitLayout
from offload.engine.placement import CHUNK, STAGING_BUFFERS
from offload.engine.spill import Spill
from offload.swapper.device import Device, Event
from offload.swapper.host import HostArena, Lease
from offload.swapper.store import Future


class Known(NamedTuple):
    """What the gradients of a step have in common."""

    sum_squares: float
    """Of all of them, in float64, added in layout order; inf or NaN if any value is."""
    present: list[set[int]]
    """For each unit the segments that have one."""

    @property
    def norm(self) -> float:
        """The global 2-norm."""
        return math.sqrt(self.sum_squares) if self.sum_squares >= 0 else math.nan


class _Arriving(NamedTuple):
    """A stretch of a gradient on its way to a staging buffer."""

    unit: int
    segment: int
    first: int
    source: torch.Tensor
    """On the device, kept until the copy is done."""
    staging: Lease
    done: Event


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
        device: Device,
        spill: Spill | None,
    ) -> None:
        """`spill` has the units whose gradients wait on DISK; the others get a lease each."""
        self.dtype = dtype
        self.spill = spill
        self._layouts = layouts
        self._parts = parts
        self._device = device
        self._lock = threading.Lock()
        self.settle: Callable[[], None] = lambda: None
        """Waits until every update has read its gradient."""
        self._squares: list[dict[tuple[int, int], float]] = [{} for _ in layouts]
        """For each unit, (segment, first element) of a stretch to its sum of squares."""
        self._reading: set[int] = set()
        self._memory: list[torch.Tensor | None] = []
        for unit, part in enumerate(parts):
            kept = part and not self._spills(unit)
            lease = arena.homes.take(len(part) * dtype.itemsize) if kept else None
            assert lease is not None or not kept, "the class of homes was sized for every gradient that has one"
            self._memory.append(None if lease is None else lease.tensor(dtype))
        staging = [arena.staging.take(arena.classes.staging // STAGING_BUFFERS) for _ in range(STAGING_BUFFERS)]
        self._staging = [lease for lease in staging if lease is not None]
        self._staging_numel = min(arena.classes.staging // STAGING_BUFFERS // torch.float32.itemsize, CHUNK)
        self._arriving: deque[_Arriving] = deque()

    def add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Store the first gradient of a parameter, add any further one."""
        if self._layouts[unit].segments[segment].numel:
            self.put(unit, segment, 0, flat(gradient))

    def end_backward(self) -> None:
        """An outermost backward is over."""

    def put(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Store or add `values`, (n,) on the device: elements [first, first + n) of a segment, all of them this rank's.

        The same pass sums the squares of the new values, so that the norm reads no gradient again. A stretch must
        begin and end where it did in the step's other calls, and begin whole `CHUNK`s from where this rank's does.
        """
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            values = values.to(self.dtype)
        if unit in self._reading:
            self.settle()  # a graph made before step() that needed no weights, such as an embedding's
        if self._device.host_addressable:
            self._accumulate(unit, segment, first, values)
            return
        computed = self._device.computed()
        numel = self._staging_numel
        for start in range(0, len(values), numel):
            source = values[start : start + numel]
            staging = self._free_staging()
            target = staging.tensor(torch.uint8)[: source.nbytes]
            done = self._device.download(target, source.view(torch.uint8), (computed,))
            self._arriving.append(_Arriving(unit, segment, first + start, source, staging, done))

    def _free_staging(self) -> Lease:
        while True:
            for lease in self._staging:
                if all(arriving.staging is not lease for arriving in self._arriving):
                    return lease
            self._receive()

    def _receive_all(self) -> None:
        while self._arriving:
            self._receive()

    def _receive(self) -> None:
        """Add the oldest stretch that is on its way."""
        arriving = self._arriving[0]
        arriving.done.wait()  # blocks this thread: every staging buffer is taken, or the step must know its norm
        values = arriving.staging.tensor(arriving.source.dtype)[: len(arriving.source)]
        self._accumulate(arriving.unit, arriving.segment, arriving.first, values)
        self._arriving.popleft()

    def _accumulate(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        start = self._layouts[unit].segments[segment].start - self._parts[unit].start + first
        with self._lock:
            assert unit not in self._reading
            squares = self._squares[unit]
            for chunk in range(0, len(values), CHUNK):
                more, key = values[chunk : chunk + CHUNK], (segment, first + chunk)
                memory = self._part(unit, start + chunk, start + chunk + len(more))
                squares[key] = kernels.accumulate(memory, more, add=key in squares)

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
        self._receive_all()
        total = 0.0
        for squares in self._squares:
            for key in sorted(squares):
                total += squares[key]
        return Known(total, self._present())

    def _present(self) -> list[set[int]]:
        return [{segment for segment, _ in squares} for squares in self._squares]

    def has(self, unit: int, segment: int) -> bool:
        """Whether this rank was given a gradient of this parameter since the last step."""
        return segment in self._present()[unit]

    def look(self, unit: int, segment: int, first: int, values: torch.Tensor) -> None:
        """Fill `values`, (n,) on the CPU, with elements [first, first + n) of a segment: all that are this rank's."""
        self._receive_all()
        start = self._layouts[unit].segments[segment].start - self._parts[unit].start + first
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
        self._accumulate(unit, segment, first, values)

    def give(self, units: Sequence[int]) -> None:
        """The gradients of `units` belong to their updates from now until `free`; none may be added meanwhile."""
        if self.spill is not None:
            self.spill.flush()
        with self._lock:
            for unit in units:
                self._reading.add(unit)
                self._squares[unit] = {}

    def stretch(
        self, unit: int, start: int, stop: int, room: Lease, offset: int
    ) -> tuple[torch.Tensor, Sequence[Future]]:
        """Elements [start, stop) for the update of `unit`, there once the futures are done.

        Those of a unit that spills are read into `room`, from byte `offset` on.
        """
        assert unit in self._reading
        if self.spill is not None and self._spills(unit):
            end = offset + (stop - start) * self.dtype.itemsize
            read = self.spill.read(unit, start, stop, room.buffer[offset:end])
            return room.tensor(torch.uint8)[offset:end].view(self.dtype), (read,)
        memory = self._memory[unit]
        assert memory is not None
        return memory[start:stop], ()

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

    def forget(self) -> None:
        """What `zero_grad` does."""
        self.clear()

    def clear(self) -> None:
        """Forget every gradient that no update has taken."""
        while self._arriving:
            self._arriving[0].done.wait()
            self._arriving.popleft()
        for unit in range(len(self._layouts)):
            if unit not in self._reading:
                self.drop(unit)

    def close(self) -> None:
        """Give room on the drives back. The update worker must have ended."""
        if self.spill is not None:
            self.spill.close()


def borders(layout: UnitLayout, part: range) -> list[int]:
    """Where in this rank's `part` of a unit a chunk of a gradient begins; first and last are those of the part."""
    found = {0, len(part)}
    for segment in layout.segments:
        first, last = max(segment.start, part.start), min(segment.stop, part.stop)
        found.update(start - part.start for start in range(first, last, CHUNK))
    return sorted(found)


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """(numel,) of a gradient, dense and contiguous."""
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:  # of an embedding with sparse=True
        gradient = gradient.to_dense()
    return gradient.contiguous().view(-1)
