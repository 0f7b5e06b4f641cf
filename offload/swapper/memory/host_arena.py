"""Host memory of fixed size, cut into leases; what the engines of one process share of it.

    HostMemory   all that the engines of a process have mapped, and their one budget
    HostArena    one engine's part of it, cut into classes that do not lend to each other
    Lease        a stretch of one class, for a transfer or for as long as the engine lives

A mapping is made when an engine starts and never grows. Where the budget has no room for an engine that starts beside
others, their caches of weights give it. `HostMemory` has a lock of its own; of an arena, the pager's lock guards every
call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch

from offload.aio import aligned_empty, release_pages
from offload.errors import BudgetError
from offload.sizes import PAGE, align_up, format_size
from offload.swapper.memory.allocator import Space
from offload.swapper.memory.device import Device

TILE_BUFFERS = 8
"""Tiles of an update that are read, computed or written at a time: so many keep a drive busy both ways."""


class Classes(NamedTuple):
    """Bytes of each class of host leases; their sum is an engine's part of the host budget."""

    tiles: int
    """The update pipeline: `TILE_BUFFERS` tiles of all states."""
    weights: int
    """Two leases of the largest unit's weights, or of pieces of them where it is too large."""
    gradients: int
    """Windows of gradients that spill."""
    homes: int
    """Partitions whose home is HOST, gradients among them."""
    staging: int = 0
    """Gradients on their way from a device whose memory the host cannot address."""
    cache: int = 0
    """More leases of weights. Another engine of the process that starts later may have this memory."""


class Mapping:
    """Host memory that was mapped at once, on 2 MiB pages where the system grants them, and known to a device."""

    def __init__(self, nbytes: int, device: Device) -> None:
        self.memory = aligned_empty(max(nbytes, 1))
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.device = device
        self.space = Space(nbytes)
        self.pinned_bytes = device.register(self.bytes)

    def give(self, start: int, nbytes: int) -> None:
        """Return a stretch. Where it is not pinned the system has its pages again, so that what is taken counts."""
        self.space.give(start, nbytes)
        if not self.pinned_bytes:
            release_pages(self.memory[start : start + nbytes])


class Lease:
    """Host memory borrowed from an arena; whoever holds it returns it exactly once.

    `buffer` is its bytes for I/O; `tensor(dtype)` the same bytes as a one-dimensional tensor. Contents are
    undefined when taken.
    """

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.offset = offset
        """Within its class."""
        self._region: Region | None = region
        start = region.start + offset
        self.buffer: memoryview = region.mapping.memory[start : start + nbytes]
        self._bytes: torch.Tensor = region.mapping.bytes[start : start + nbytes]

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
    """One class of leases: a fixed stretch of a mapping that lends to no other class."""

    def __init__(self, mapping: Mapping, start: int, nbytes: int) -> None:
        self.mapping = mapping
        self.start = start
        self.space = Space(nbytes)

    def take(self, nbytes: int) -> Lease | None:
        """A lease of `nbytes`, or None where no hole of this class is large enough."""
        offset = self.space.take(nbytes)
        return None if offset is None else Lease(self, offset, nbytes)


class HostArena:
    """The host memory of one engine. Weights and their cache are one class, the last in its stretch."""

    def __init__(
        self,
        classes: Classes,
        device: Device,
        memory: HostMemory | None = None,
        budget: int | None = None,
        give_cache: Callable[[], None] | None = None,
    ) -> None:
        """Maps the memory, or takes room in a mapping of another engine.

        Args:
            classes: bytes of each class.
            device: registers the memory, so that copies to it are fast.
            memory: that of all engines of the process; by default one of its own.
            budget: bytes that all engines of `memory` may have together; None for no limit.
            give_cache: empties the class of weights and calls `drop_cache`. The thread of another engine calls it.

        Raises:
            BudgetError: if all engines of `memory` would have more than `budget`.
        """
        self.classes, self.give_cache = classes, give_cache
        self._memory = HostMemory() if memory is None else memory
        self._mapping, self._start = self._memory._take(self._taken_bytes, device, budget)
        sizes = (classes.tiles, classes.gradients, classes.homes, classes.staging, classes.weights + classes.cache)
        starts = [self._start + sum(sizes[:index]) for index in range(len(sizes))]
        self.tiles, self.gradients, self.homes, self.staging, self.weights = (
            Region(self._mapping, start, nbytes) for start, nbytes in zip(starts, sizes, strict=True)
        )
        self._memory._join(self)  # last: what Ctrl-C leaves unfinished is none that others count on

    @property
    def nbytes(self) -> int:
        """What this engine has of the host budget."""
        return sum(self.classes)

    @property
    def _taken_bytes(self) -> int:
        return align_up(max(self.nbytes, 1))

    @property
    def address(self) -> int:
        """Where its memory begins; it is all in one piece."""
        return self._mapping.bytes.data_ptr() + self._start

    @property
    def regions(self) -> dict[str, Region]:
        """Its classes by name; weights and their cache are one."""
        return {name: getattr(self, name) for name in ("tiles", "weights", "gradients", "homes", "staging")}

    @property
    def pinned_bytes(self) -> int:
        """Of the whole mapping that the arena lies in; see `Device.register`."""
        return self._mapping.pinned_bytes

    def drop_cache(self) -> None:
        """Give the cache of weights back to the process. No lease of weights may be out."""
        assert self.weights.space.used_bytes == 0, "a lease of weights is out"
        before = self._taken_bytes
        self.classes = self.classes._replace(cache=0)
        self.weights = Region(self._mapping, self.weights.start, self.classes.weights)
        if self._taken_bytes < before:
            self._mapping.give(self._start + self._taken_bytes, before - self._taken_bytes)

    def close(self) -> None:
        """Give all of it back, copies in flight awaited; leases that are out stay mapped until nobody has them."""
        self._memory._give(self, self._mapping, self._start, self._taken_bytes)


class HostMemory:
    """The host memory of all engines of a process. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mappings: list[Mapping] = []
        self._arenas: list[HostArena] = []

    @property
    def needed_bytes(self) -> int:
        """What the engines that are there cannot do without: their parts of the budget less their caches."""
        with self._lock:
            return sum(arena.nbytes - arena.classes.cache for arena in self._arenas)

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """Those of the engines that are there."""
        with self._lock:
            return tuple(self._arenas)

    def _take(self, nbytes: int, device: Device, budget: int | None) -> tuple[Mapping, int]:
        """Room for an arena: in what is mapped and free, else newly mapped. Caches of others give what is needed."""
        with self._lock:
            for other in sorted(self._arenas, key=lambda arena: -arena.classes.cache):
                if budget is not None and self._taken_bytes + nbytes > align_up(budget):
                    if other.classes.cache and other.give_cache is not None:
                        other.give_cache()
            if budget is not None and self._taken_bytes + nbytes > align_up(budget) + PAGE * len(self._arenas):
                raise BudgetError(
                    f'"host_memory" is {format_size(budget)}, of which engines of this process hold '
                    f"{format_size(self._taken_bytes)}, and {format_size(nbytes)} are needed; call destroy() on "
                    f"engines that have failed or are not used any more"
                )
            found = self._find(nbytes, device)
            if found is None:
                mapping = Mapping(nbytes, device)
                mapping.space.take(nbytes)
                self._mappings.append(mapping)
                found = mapping, 0
            return found

    def _join(self, arena: HostArena) -> None:
        with self._lock:
            self._arenas.append(arena)

    @property
    def _taken_bytes(self) -> int:
        return sum(arena._taken_bytes for arena in self._arenas)

    def _find(self, nbytes: int, device: Device) -> tuple[Mapping, int] | None:
        for mapping in self._mappings:
            if mapping.device is device and (offset := mapping.space.take(nbytes)) is not None:
                return mapping, offset
        return None

    def _give(self, arena: HostArena, mapping: Mapping, start: int, nbytes: int) -> None:
        with self._lock:
            if arena in self._arenas:
                self._arenas.remove(arena)
            mapping.give(start, nbytes)
            if mapping.space.used_bytes == 0:
                self._mappings.remove(mapping)
                mapping.device.unregister(mapping.bytes)
            else:
                mapping.device.synchronize()  # copies of this engine's that nobody waits for


_memory = HostMemory()


def process_memory() -> HostMemory:
    """The host memory of all engines of this process."""
    return _memory


def _forget() -> None:
    """A forked child has none of it: the mappings are not there."""
    global _memory
    _memory = HostMemory()


os.register_at_fork(after_in_child=_forget)
