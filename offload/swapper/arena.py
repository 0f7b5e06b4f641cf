"""Memory of fixed size, cut into leases (host) and slices (device).

A budget is one number: each arena is mapped once and never grows. Neither arena is thread-safe by
itself: the pager's lock guards every call.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

import torch

from offload.aio import aligned_empty
from offload.errors import BudgetError
from offload.sizes import align_up, format_size
from offload.swapper.device import Device, Event


class Space:
    """Offsets within `nbytes` bytes: best fit, neighbours coalesce, steps of 4096 bytes.

    With `scatter`, each block lies at a random end of a random hole that fits: first fit returns to the same address so
    often that a stale view goes unseen.
    """

    def __init__(self, nbytes: int, scatter: random.Random | None = None) -> None:
        self.nbytes = nbytes
        self.used_bytes = 0
        self.scatter = scatter
        self._holes: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # (start, stop), sorted

    def take(self, nbytes: int) -> int | None:
        """The offset of a free block, or None where no hole is large enough."""
        nbytes = align_up(max(nbytes, 1))
        fitting = [hole for hole in self._holes if hole[1] - hole[0] >= nbytes]
        if not fitting:
            return None
        if self.scatter is None:
            offset = min(fitting, key=lambda hole: hole[1] - hole[0])[0]
        else:
            start, stop = self.scatter.choice(fitting)
            offset = self.scatter.choice((start, stop - nbytes))
        self.take_at(offset, nbytes)
        return offset

    def take_at(self, offset: int, nbytes: int) -> None:
        """Take the block of `nbytes` at `offset`, which is free."""
        nbytes = align_up(max(nbytes, 1))
        hole = next(hole for hole in self._holes if hole[0] <= offset and offset + nbytes <= hole[1])
        self._holes.remove(hole)
        for piece in ((hole[0], offset), (offset + nbytes, hole[1])):
            if piece[0] < piece[1]:
                insort(self._holes, piece)
        self.used_bytes += nbytes

    def stretches(self, given: Iterable[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """What would be free, (start, stop), if the blocks `given`, (offset, nbytes), were returned."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted([*self._holes, *((at, at + align_up(max(size, 1))) for at, size in given)]):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return found

    def could_take(self, nbytes: int, given: Iterable[tuple[int, int]]) -> bool:
        """Whether `take` would find a block if the blocks `given`, (offset, nbytes), were returned before."""
        return any(stop - start >= align_up(max(nbytes, 1)) for start, stop in self.stretches(given))

    def give(self, offset: int, nbytes: int) -> None:
        """Return a block that `take` gave, with the same `nbytes`."""
        nbytes = align_up(max(nbytes, 1))
        start, stop = offset, offset + nbytes
        position = bisect_left(self._holes, (start, stop))
        before = self._holes[position - 1] if position else (-1, -1)
        after = self._holes[position] if position < len(self._holes) else (-1, -1)
        assert before[1] <= start and (after[0] == -1 or stop <= after[0]), "a block was returned twice"
        if after[0] == stop:
            stop = after[1]
            del self._holes[position]
        if before[1] == start:
            start = before[0]
            del self._holes[position - 1]
        insort(self._holes, (start, stop))
        self.used_bytes -= nbytes


class Lease:
    """Host memory borrowed from the arena; whoever holds it returns it exactly once.

    `buffer` is its bytes for I/O; `tensor(dtype)` the same bytes as a one-dimensional tensor. Contents are
    undefined when taken.
    """

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.offset = offset
        """Within its class."""
        self._region: Region | None = region
        start = region.start + offset
        self.buffer: memoryview = region.arena.memory[start : start + nbytes]
        self._bytes: torch.Tensor = region.arena.bytes[start : start + nbytes]

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """(nbytes / itemsize,) of `dtype`, the lease's own memory."""
        return self._bytes.view(dtype)

    def release(self) -> None:
        """Return the memory. A second call is a fault of ours, not of the user."""
        assert self._region is not None, "a lease was returned twice"
        self._region.space.give(self.offset, self.nbytes)
        self._region = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Region:
    """One class of leases: a fixed stretch of the arena that lends to no other class."""

    def __init__(self, arena: HostArena, start: int, nbytes: int) -> None:
        self.arena = arena
        self.start = start
        self.space = Space(nbytes)

    def take(self, nbytes: int) -> Lease | None:
        """A lease of `nbytes`, or None where no hole of this class is large enough."""
        offset = self.space.take(nbytes)
        return None if offset is None else Lease(self, offset, nbytes)


class Classes(NamedTuple):
    """Bytes of each class of host leases; their sum is the host budget."""

    tiles: int
    """The update pipeline: three tiles of all states."""
    weights: int
    """Two leases of the largest unit's weights, or of pieces of them where it is too large; and the cache."""
    gradients: int
    """Windows of gradients that spill."""
    homes: int
    """Partitions whose home is HOST, gradients among them."""
    staging: int = 0
    """Gradients on their way from a device whose memory the host cannot address."""


class HostArena:
    """The one host mapping of an engine, on 2 MiB pages where the system grants them, known to the device."""

    def __init__(self, classes: Classes, device: Device) -> None:
        self.nbytes = sum(classes)
        self.classes = classes
        self.memory = aligned_empty(max(self.nbytes, 1))
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._device = device
        self.pinned_bytes = device.register(self.bytes)
        starts = [sum(classes[:index]) for index in range(len(classes))]
        self.tiles, self.weights, self.gradients, self.homes, self.staging = (
            Region(self, start, nbytes) for start, nbytes in zip(starts, classes, strict=True)
        )

    def close(self) -> None:
        """Wait for copies in flight; the memory itself goes when nobody refers to it any more."""
        self._device.unregister(self.bytes)


class Slice(NamedTuple):
    """A stretch of the device arena that holds one unit's weights."""

    offset: int
    nbytes: int
    after: tuple[Event, ...]
    """What must be done before it is written."""


class DeviceArena:
    """One allocation on the compute device, within which every unit's weights come and go.

    A slice may be given back while compute that reads it is still under way: who takes its place next writes there
    after the events in `Slice.after`. With `poison`, freed slices are filled with NaN and slices lie at random places,
    so that a stale view shows itself.
    """

    def __init__(self, nbytes: int, device: Device, poison: bool = False) -> None:
        self.nbytes = nbytes
        self.poison = poison
        self._device = device
        self.space = Space(nbytes, random.Random(0) if poison else None)
        self._readers: list[tuple[int, int, Event]] = []
        """Stretches that were given back, and when the last compute that reads them is done."""
        try:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device.torch)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{device.torch} has not {format_size(nbytes)} free in one piece for the device budget: {error}; lower "
                f'"device_memory" in the "offload" block, or move homes to cpu or nvme'
            ) from error
        self.storage_address = self.bytes.untyped_storage().data_ptr()

    @property
    def used_bytes(self) -> int:
        return self.space.used_bytes

    def take(self, nbytes: int) -> Slice | None:
        """A slice, or None where no hole is large enough."""
        offset = self.space.take(nbytes)
        return None if offset is None else self._slice(offset, nbytes)

    def take_at(self, offset: int, nbytes: int) -> Slice:
        """The slice at `offset`, which is free."""
        self.space.take_at(offset, nbytes)
        return self._slice(offset, nbytes)

    def _slice(self, offset: int, nbytes: int) -> Slice:
        self._readers = [reader for reader in self._readers if not reader[2].done()]
        stop = offset + nbytes
        return Slice(
            offset, nbytes, tuple(done for first, last, done in self._readers if first < stop and offset < last)
        )

    def give(self, piece: Slice, written: Event, read: Event) -> None:
        """Return a slice; `written` and `read` end the last upload into it and the last compute that reads it."""
        if self.poison:
            self._device.hold(written)
            self._device.hold(read)
            self.view(piece).view(torch.int16).fill_(0x7FFF)  # a NaN as bf16, and pairwise as fp32
            read = self._device.computed()
        self._readers += [
            (piece.offset, piece.offset + piece.nbytes, event) for event in (written, read) if not event.done()
        ]
        self.space.give(piece.offset, piece.nbytes)

    def view(self, piece: Slice) -> torch.Tensor:
        """(nbytes,) uint8, the slice's own memory."""
        return self.bytes[piece.offset : piece.offset + piece.nbytes]


def check_budget(what: str, have: int, need: int, advice: str) -> None:
    """Raise `BudgetError` with both numbers where `have` bytes cannot hold `need`."""
    if have < need:
        raise BudgetError(
            f"{what} is {format_size(have)} ({have} bytes), the least that works is "
            f"{format_size(need)} ({need} bytes); {advice}"
        )
