"""Host memory of fixed size, divided into host buffers, and the budget that the engines of one process share.

    HostMemory   all mappings of the process, and the budget of all engines
    HostArena    the memory of one engine, divided into classes that do not lend to each other, and pinned in parts
    HostBuffer   a block of one class, for one transfer or for the life of the engine

A mapping is made when an engine starts, and never grows. An arena may give the end of its cache back to the system and
to other engines, and take it again (`HostArena.resize`). If the budget has no room for a further engine, the earlier
engines give up their caches of weights for good. `HostMemory` has a lock of its own. The pager's lock guards every call
of a `HostArena`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from offload.aio import release_pages
from offload.errors import BudgetError
from offload.sizes import PAGE, align_up, format_size
from offload.swapper.memory.allocator import Allocator, gaps
from offload.swapper.memory.device import Device

TILE_BUFFERS = 8
"""Number of tiles of an update that are read, computed or written at a time: enough to keep a drive busy both ways."""


class HostBudget(NamedTuple):
    """Bytes of each class of host buffers. The engine takes their sum from the host budget."""

    tiles: int
    """Tiles of the update pipeline: `TILE_BUFFERS` tiles of all states."""
    weights: int
    """Two buffers for the weights of the largest unit, or for chunks of its weights if the unit is streamed."""
    gradients: int
    """Windows of gradients that are spilled to disk."""
    resident: int
    """Partitions whose tier is HOST, gradients among them."""
    staging: int = 0
    """Gradients on their way from a device whose memory the host cannot address."""
    cache: int = 0
    """Further buffers of weights. An engine of the process that starts later may take this memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedRegions:
    """Memory of an arena that an accelerator copies, in addition to staging, gradients, and buffers of weights.

    Only memory that an accelerator copies is pinned: pinning takes time at the start, and the system cannot move pinned
    pages.
    """

    resident: int
    """Bytes of `HostBudget.resident` that hold weights and gradients, which the device copies."""
    promoted: int
    """Bytes of `HostBudget.cache` that hold states of the optimizer, which only the CPU uses."""
    tiles: bool
    """True if updates or commits copy states between tiles and the device."""


class Mapping:
    """Host memory of one allocation, which a device can pin in parts; on pages of 2 MiB if the system grants them."""

    def __init__(self, nbytes: int, device: Device) -> None:
        block = device.allocate_host(max(nbytes, 1))
        # Two views of the same bytes, for I/O and for torch. Each view of either keeps the memory mapped.
        self.memory = block.buffer
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.device = device
        self.space = Allocator(nbytes)
        self._releases_pages = block.releases_pages

    def pages(self, start: int, stop: int) -> torch.Tensor:
        """Returns the whole pages within [start, stop), (nbytes,) uint8."""
        start, stop = align_up(start), stop // PAGE * PAGE
        return self.bytes[start : max(start, stop)]

    def give(self, start: int, nbytes: int) -> None:
        """Frees a region without pinned bytes, and returns its pages to the system."""
        # calling thread: it holds the lock of `HostMemory`, so no arena takes the region before its pages are returned.
        self.space.give(start, nbytes)
        self.release(start, start + nbytes)

    def release(self, start: int, stop: int) -> None:
        """Returns the whole pages of [start, stop), none of them pinned, to the system, if the memory allows that.

        The pages then read as zeros, and a write allocates them again.
        """
        if self._releases_pages:
            release_pages(self.memory[start:stop])


class HostBuffer:
    """Host memory borrowed from an arena; its owner releases it exactly once.

    `buffer` holds the bytes for I/O, `tensor(dtype)` the same bytes as a one-dimensional tensor. The contents are
    undefined at first.
    """

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.offset = offset
        """Offset within the class, in bytes."""
        self._region: Region | None = region
        start = region.start + offset
        self.buffer: memoryview = region.mapping.memory[start : start + nbytes]
        self._bytes: torch.Tensor = region.mapping.bytes[start : start + nbytes]

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the buffer's own memory, (nbytes / itemsize,) of `dtype`."""
        return self._bytes if dtype is torch.uint8 else self._bytes.view(dtype)

    def release(self) -> None:
        """Frees the memory. A second call is a bug of this library, not of the user."""
        assert self._region is not None, "a host buffer was returned twice"
        # any thread: the lock of the arena's owner guards the allocator, usually the pager's.
        self._region.space.give(self.offset, self.nbytes)
        self._region = None

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Region:
    """One class of host buffers: a fixed region of a mapping."""

    def __init__(self, mapping: Mapping, start: int, nbytes: int) -> None:
        self.mapping = mapping
        self.start = start
        self.space = Allocator(nbytes)

    def take(self, nbytes: int) -> HostBuffer | None:
        """Allocates a buffer of `nbytes`; None if no hole of this class is large enough."""
        offset = self.space.take(nbytes)
        return None if offset is None else HostBuffer(self, offset, nbytes)

    def take_last(self, nbytes: int) -> HostBuffer | None:
        """Allocates a buffer of `nbytes` as near to the end of the class as possible; None if no hole is large enough.

        For promoted states, since the end of the cache is not pinned: see `PinnedRegions`.
        """
        offset = self.space.take_last(nbytes)
        return None if offset is None else HostBuffer(self, offset, nbytes)


class HostArena:
    """Host memory of one engine. Weights and their cache are one class, the last one in the arena's region."""

    def __init__(
        self,
        classes: HostBudget,
        device: Device,
        memory: HostMemory | None = None,
        budget: int | None = None,
        give_cache: Callable[[], None] | None = None,
        copied: PinnedRegions | None = None,
    ) -> None:
        """Maps the memory, or takes a free region of an existing mapping.

        Raises `BudgetError` if all engines of `memory` would take more than `budget`.

        Args:
            memory: the memory of all engines of the process; None for a memory of its own.
            budget: bytes that all engines of `memory` may take together; None for no limit.
            give_cache: evicts the buffers of the cache and calls `drop_cache`. The thread of another engine calls it.
            copied: the memory that the device copies; None for a device that works in host memory, the CPU.
        """
        self.classes, self.give_cache = classes, give_cache
        self.most = sum(classes)
        """Bytes of the largest budget: that of the start, until `drop_cache`."""
        self._memory, self._budget = memory or HostMemory(), budget
        self._mapping, self._start = self._memory._take(self._taken_bytes, device, budget)
        copied_nbytes = 0 if copied is None else copied.resident
        sizes = (
            classes.tiles,
            classes.gradients,
            copied_nbytes,
            classes.resident - copied_nbytes,
            classes.staging,
            classes.weights + classes.cache,
        )
        # Weights and cache come last: `resize` moves their end, and no buffer of another class.
        starts = [self._start + sum(sizes[:index]) for index in range(len(sizes))]
        self.tiles, self.gradients, self._copied, self.resident, self.staging, self.weights = (
            Region(self._mapping, start, nbytes) for start, nbytes in zip(starts, sizes, strict=True)
        )
        self._copied_cache = 0 if copied is None else classes.cache - copied.promoted
        """Bytes at the start of the cache that the device copies: all but those of promoted states."""
        self._parts = {} if copied is None else self._parts_to_pin(copied)
        self.given_back = False
        """True between `give_back` and `pin`."""
        self.viewed = False
        """True if somebody holds a view of weights in the arena at its end: no other arena may use its memory then."""
        self.pinned: dict[str, int] = {}
        """Pinned bytes of each part that the device copies, by name; parts with the most copies come first."""
        try:
            self.pin()
            # Done last: an arena that a Ctrl-C left unfinished must not count for the other engines.
            self._memory._join(self)
        except BaseException:
            self.close()
            raise

    def _parts_to_pin(self, copied: PinnedRegions) -> dict[str, torch.Tensor]:
        """Returns the parts that the device copies, by name; parts with the most copies in a step come first."""
        weights = self.weights.start + self.classes.weights
        bounds = {
            "staging": (self.staging.start, self.staging.start + self.classes.staging),
            "weights": (self.weights.start, weights),
            "gradients": (self.gradients.start, self.gradients.start + self.classes.gradients),
            "cache": self._cache_to_pin(),
            "copied": (self._copied.start, self._copied.start + copied.resident),
            "tiles": (self.tiles.start, self.tiles.start + (self.classes.tiles if copied.tiles else 0)),
        }
        return {name: self._mapping.pages(*bound) for name, bound in bounds.items()}

    def _cache_to_pin(self) -> tuple[int, int]:
        # The cache is the last class, and begins with a whole page: what is before it stays when it shrinks.
        start = self._start + align_up(max(self.least, 1))
        return start, start + min(self.classes.cache, self._copied_cache)

    def take_copied(self, nbytes: int) -> HostBuffer | None:
        """Allocates a buffer for a partition of the HOST tier that the device copies: weights or gradients."""
        return (self._copied if self._copied.space.nbytes else self.resident).take(nbytes)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that this engine takes from the host budget."""
        return sum(self.classes)

    @property
    def least(self) -> int:
        """Returns the bytes of the smallest budget: all classes without the cache."""
        return self.nbytes - self.classes.cache

    @property
    def _taken_bytes(self) -> int:
        """Returns the bytes of whole pages that the arena takes from its mapping."""
        return align_up(max(self.nbytes, 1))

    @property
    def address(self) -> int:
        """Returns the address of the first byte; the arena is contiguous."""
        return self._mapping.bytes.data_ptr() + self._start

    @property
    def regions(self) -> dict[str, Region]:
        """Returns the classes by name. Weights and their cache are one class, as are all partitions of tier HOST."""
        named = {name: getattr(self, name) for name in ("tiles", "weights", "gradients", "resident", "staging")}
        return named | ({"copied": self._copied} if self._copied.space.nbytes else {})

    @property
    def pinned_bytes(self) -> int:
        """Returns the pinned bytes of the arena; see `Device.register`."""
        return sum(self.pinned.values())

    def alone(self) -> AbstractContextManager[bool]:
        """Returns a context in which no other thread starts or ends an engine of the process; for `resize`."""
        return self._memory._lock

    def resize(self, cache: int) -> None:
        """Gives the cache `cache` bytes, whole pages, beyond whose end no buffer is; other classes stay as they are.

        The caller holds `alone()`, then the lock of the pager. Unpins and pins the cache anew where it is pinned, for
        which the device must be idle.

        Raises:
            BudgetError: Before anything changes, if another engine of the process has taken the memory meanwhile.
        """
        before = self._taken_bytes
        classes = self.classes._replace(cache=cache)
        more = align_up(max(sum(classes), 1)) - before
        if more > 0:
            self._memory._extend(self, self._mapping, self._start + before, more, self._budget)
        # Unpinned first: another arena may take the memory, and pins those parts of it that its own device copies.
        if "cache" in self._parts:
            self.pinned.pop("cache")
            self._mapping.device.unregister([self._parts.pop("cache")])
        self.classes = classes
        self.weights.space.resize(classes.weights + cache)
        if cache and self._copied_cache:
            part = self._parts["cache"] = self._mapping.pages(*self._cache_to_pin())
            self.pinned["cache"] = self._mapping.device.register([part])[0]
        if more < 0:
            self._mapping.give(self._start + before + more, -more)

    def drop_cache(self) -> None:
        """Frees the cache for other engines of the process, for good. No buffer of it may be in use."""
        self.resize(0)
        self.most = self.nbytes

    def give_back(self, spared: Sequence[tuple[int, int]] = ()) -> None:
        """Waits for copies in flight, unpins the arena and gives its pages back to the system.

        Buffers stay, and must not be used before `pin`. Their contents are lost. `spared` are (start, stop) within the
        arena of bytes that keep their contents, in ordinary memory.
        """
        # calling thread: waits for all streams, so no copy uses the pages any more. The system cannot take pinned ones.
        self._mapping.device.unregister(tuple(self._parts.values()))
        # calling thread: the engine sleeps from here on, and nothing uses a buffer before `pin`.
        self.given_back = True
        self.pinned = dict.fromkeys(self.pinned, 0)
        for start, stop in gaps(0, self.nbytes, spared):
            self._mapping.release(self._start + start, self._start + stop)

    def pin(self) -> None:
        """Pins the parts of the arena that the device copies. Called at the arena's start, and after `give_back`."""
        # calling thread: the driver pins the pages here, once, so that no copy has to go through a buffer of its own.
        pinned = self._mapping.device.register(tuple(self._parts.values()))
        self.pinned, self.given_back = dict(zip(self._parts, pinned, strict=True)), False

    def close(self) -> None:
        """Waits for copies in flight and frees the arena.

        The memory of buffers in use stays mapped until their owners drop them.
        """
        parts = tuple(self._parts.values())
        self._memory._give(self, self._mapping, self._start, self._taken_bytes, parts, self.viewed)


class HostMemory:
    """Host memory of all engines of a process. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mappings: list[Mapping] = []
        self._arenas: list[HostArena] = []

    @property
    def needed_bytes(self) -> int:
        """Returns the bytes that the present engines need at least: their arenas without their caches."""
        with self._lock:
            return sum(arena.least for arena in self._arenas)

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """Returns the arenas of the present engines."""
        with self._lock:
            return tuple(self._arenas)

    def _take(self, nbytes: int, device: Device, budget: int | None) -> tuple[Mapping, int]:
        """Returns a region for an arena, as mapping and offset: in a free region of a mapping, else in a new mapping.

        The largest caches of other engines are dropped first if the budget requires it.
        """
        with self._lock:
            # The largest cache goes first, so that few engines lose their caches. `give_cache` runs on this thread and
            # acquires the lock of the other engine's pager: the order of locks is this lock, then a pager's.
            for lender in sorted(self._arenas, key=lambda arena: -arena.classes.cache):
                if budget is not None and self._taken_bytes + nbytes > align_up(budget):
                    if lender.classes.cache and lender.give_cache is not None:
                        lender.give_cache()
            self._check_budget(nbytes, budget, self._taken_bytes)
            # Memory that other engines have freed is reused before more is mapped. calling thread: the lock is held
            # since `give_cache`, so no third engine takes that memory first.
            place = self._find(nbytes, device)
            if place is None:
                mapping = Mapping(nbytes, device)
                mapping.space.take(nbytes)
                self._mappings.append(mapping)
                place = mapping, 0
            return place

    def _check_budget(self, nbytes: int, budget: int | None, others: int) -> None:
        # The budget counts bytes, an arena takes whole pages: each arena may exceed its bytes by less than a page.
        if budget is not None and self._taken_bytes + nbytes > align_up(budget) + PAGE * len(self._arenas):
            raise BudgetError(
                f'"host_memory" is {format_size(budget)}. Other engines of this process use {format_size(others)} of '
                f"it, and {format_size(nbytes)} more are needed: call destroy() on engines that have failed or are no "
                "longer used"
            )

    def _extend(self, arena: HostArena, mapping: Mapping, start: int, nbytes: int, budget: int | None) -> None:
        """Takes `nbytes` of a mapping from `start` on, which the arena before them had given back."""
        with self._lock:
            self._check_budget(nbytes, budget, self._taken_bytes - arena._taken_bytes)
            if not any(first <= start and start + nbytes <= last for first, last in mapping.space.holes):
                raise BudgetError(
                    f"another engine of this process has taken the {format_size(nbytes)} of host memory that this "
                    "engine had given back: call destroy() on engines that are no longer used"
                )
            mapping.space.take_at(start, nbytes)

    @property
    def taken_bytes(self) -> int:
        """Returns the bytes of the present engines' arenas, caches included."""
        with self._lock:
            return self._taken_bytes

    def _join(self, arena: HostArena) -> None:
        # calling thread: from here on other threads that start an engine count this arena, and may drop its cache.
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

    def _give(
        self, arena: HostArena, mapping: Mapping, start: int, nbytes: int, parts: Sequence[torch.Tensor], viewed: bool
    ) -> None:
        """Unpins and frees an arena's region, and unmaps a mapping without arenas once no buffer refers to it.

        A region that is `viewed` keeps its contents, and its mapping takes no further arena.
        """
        with self._lock:
            # An arena whose start was interrupted has not joined.
            if arena in self._arenas:
                self._arenas.remove(arena)
            try:
                # This engine may have copies in flight for which no thread waits, and the region may be reused at once:
                # unpinning waits for them.
                mapping.device.unregister(parts)
            finally:
                if not viewed:
                    mapping.give(start, nbytes)
                # The last arena is gone, or nobody may reuse its memory. The last view of the memory unmaps it.
                if (viewed or mapping.space.used_bytes == 0) and mapping in self._mappings:
                    self._mappings.remove(mapping)


_memory = HostMemory()


def process_memory() -> HostMemory:
    """Returns the host memory of all engines of this process."""
    return _memory


def _forget() -> None:
    """Resets the memory in a forked child, which does not inherit the mappings (MADV_DONTFORK)."""
    global _memory
    # child process: the thread that forked is its only one, and another thread may hold the lock of the old object.
    _memory = HostMemory()


os.register_at_fork(after_in_child=_forget)
