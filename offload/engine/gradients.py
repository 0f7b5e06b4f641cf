"""Gradients of one step, added into host leases as autograd finishes them, and their norm."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from offload import kernels
from offload.engine.layout import UnitLayout
from offload.swapper.arena import HostArena


class Gradients:
    """One host lease for each unit that trains; the gradient of a parameter lies where its segment does.

    `add` may be called by any thread; everything else by the thread that calls `step()`, but `free`, which the
    update worker calls when an update has read a gradient.
    """

    def __init__(
        self, layouts: Sequence[UnitLayout], parts: Sequence[range], arena: HostArena, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self._layouts = layouts
        self._parts = parts
        self._lock = threading.Lock()
        self.settle: Callable[[], None] = lambda: None
        """Waits until every update has read its gradient."""
        self._squares: list[dict[int, float]] = [{} for _ in layouts]  # unit -> segment -> sum of squares
        self._reading: set[int] = set()
        self._memory: list[torch.Tensor | None] = []
        for part in parts:
            lease = arena.gradients.take(len(part) * dtype.itemsize) if part else None
            assert lease is not None or not part, "the class of gradients was sized for every unit"
            self._memory.append(None if lease is None else lease.tensor(dtype))

    def add(self, unit: int, segment: int, gradient: torch.Tensor) -> None:
        """Store the first gradient of a segment, add any further one.

        The same pass sums the squares of the new values, so that the norm reads no gradient again.
        """
        memory, place = self._memory[unit], self._layouts[unit].segments[segment]
        if not place.numel:
            return
        assert memory is not None
        offset = place.start - self._parts[unit].start
        gradient = gradient.detach()
        if gradient.layout is not torch.strided:  # of an embedding with sparse=True
            gradient = gradient.to_dense()
        source = gradient.to("cpu").contiguous().view(-1)
        if source.dtype not in (torch.float32, torch.bfloat16):
            source = source.to(self.dtype)
        if unit in self._reading:
            self.settle()  # a graph made before step() that needed no weights, such as an embedding's
        with self._lock:
            assert unit not in self._reading
            squares = self._squares[unit]
            out = memory[offset : offset + place.numel]
            squares[segment] = kernels.accumulate(out, source, add=segment in squares)

    def norm(self) -> float:
        """The global 2-norm: the float64 partial sums, added in layout order. inf or NaN if any value is."""
        total = 0.0
        for squares in self._squares:
            for segment in sorted(squares):
                total += squares[segment]
        return math.sqrt(total) if total >= 0 else math.nan

    def present(self, unit: int) -> tuple[int, ...]:
        """The segments of `unit` that have a gradient."""
        return tuple(sorted(self._squares[unit]))

    def give(self, units: Iterable[int]) -> None:
        """The gradients of `units` belong to their updates from now until `free`; none may be added meanwhile."""
        with self._lock:
            for unit in units:
                self._reading.add(unit)
                self._squares[unit] = {}

    def memory(self, unit: int) -> torch.Tensor:
        """The gradient of a unit for its update, (elements of the trainable part,)."""
        memory = self._memory[unit]
        assert memory is not None and unit in self._reading
        return memory

    def free(self, unit: int) -> None:
        """The update has read the gradient: the memory may take the next one."""
        with self._lock:
            self._reading.discard(unit)

    def clear(self) -> None:
        """Forget every gradient that no update has taken."""
        with self._lock:
            self._squares = [{} for _ in self._layouts]
