"""Device memory divided into device buffers. Not thread-safe: the pager's lock guards every call except `view`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.errors import BudgetError
from offload.sizes import format_size
from offload.swapper.memory.allocator import Allocator, Region, gaps
from offload.swapper.memory.device import Device, Event
from offload.torch_internals import StorageReference, StorageUsers, in_second_storage, without_modes

# -- viewed memory -------------------------------------------------------------------------------------
#
# Storages over device memory, which show whether a view is alive, and views that later uses share.


class ViewPlaces(NamedTuple):
    """Places of the tensors that divide memory."""

    dtype: torch.dtype
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Shape, stride and offset (in elements) of each tensor."""


class ViewedMemory:
    """Device memory as tensors, in a storage of this object alone.

    The arena's own storage never dies, so it cannot show whether a unit's weights are still in use. This storage shows
    how many tensors are in it: this object's own tensors, and tensors that others have made of them.
    """

    def __init__(self, memory: torch.Tensor, places: ViewPlaces) -> None:
        """Lays a storage over `memory`, (nbytes,) uint8, which each view keeps alive."""
        self.memory, self.places = memory, places
        with torch.inference_mode(False):  # a later forward could not train with tensors of inference mode
            flat = in_second_storage(memory).view(places.dtype)
            self.flat: torch.Tensor | None = flat
            """All of the memory, in the dtype of `places`."""
            self.views = tuple([flat.as_strided(size, stride, start) for size, stride, start in places.tensors])
            """The tensors of `places`."""
        storage = flat.untyped_storage()
        self.address = storage.data_ptr()
        self._end = StorageReference(storage)
        self._users = StorageUsers(storage) if StorageUsers.counted() else None
        del storage  # a reference to the storage would count as a use
        self._own = 0 if self._users is None else self._users.count()

    @property
    def counted(self) -> bool:
        """True if torch counts the uses of the storage, so that a later use of the memory can share this object."""
        return self._users is not None

    @property
    def viewed(self) -> bool:
        """True while anybody but this object has a tensor in the storage, or the storage itself."""
        if self._users is None:
            return not self._end.expired()
        return self._users.count() != self._own

    def viewed_beside(self, own: int) -> bool:
        """Returns True if more than `own` tensors besides this object's are in the storage; False without a count."""
        return self._users is not None and self._users.count() - self._own > own

    def let_go(self) -> None:
        """Ends a use. Without a count, drops this object's tensors: the storage then ends with its last other user."""
        if self._users is None:
            self.flat, self.views = None, ()


class Binding:
    """One pin of a unit, and the storage over the unit's device buffer."""

    __slots__ = ("flat", "memory", "unit", "updates", "waits")

    def __init__(self, unit: int, memory: ViewedMemory, updates: int | None, waits: bool) -> None:
        """Begins a use of the memory.

        `updates` counts the changes of the weights so far; it is None for a resident unit, whose weights change in
        place. With `waits`, streams must wait for the upload of the unit.
        """
        self.unit, self.memory, self.updates, self.waits = unit, memory, updates, waits
        self.flat = memory.flat
        """All weights of the unit as one flat tensor; None after `let_go`."""

    def let_go(self) -> None:
        """Drops this object's own reference to the weights: from now on only views keep the binding alive."""
        self.flat = None
        self.memory.let_go()

    @property
    def alive(self) -> bool:
        """True while a view of the storage exists."""
        return self.flat is not None or self.memory.viewed


# -- device arena --------------------------------------------------------------------------------------


_VIEWS = 4096
"""Most views that an arena keeps. If there are more, it drops all of them."""


class DeviceBuffer(NamedTuple):
    """A byte range of the device arena: one unit's weights, or memory for another use, which is never freed."""

    offset: int
    """Below 0 for host memory that the arena shares; see `DeviceArena.share`."""
    nbytes: int
    after: tuple[Event, ...]
    """Events that must be done before the block is written."""


class DeviceArena:
    """Device memory for units while they are used: one allocation, and a second after `grow`.

    A buffer may be freed while compute that reads the buffer is in flight: the next owner of the memory writes after
    the events in `DeviceBuffer.after`. With `poison`, freed buffers are filled with NaN and buffers are placed at
    random offsets, which reveals the use of a stale view.
    """

    def __init__(self, nbytes: int, device: Device, poison: bool = False) -> None:
        self.nbytes = nbytes
        self.poison = poison
        self._device = device
        self.space = Allocator(nbytes, random.Random(0) if poison else None)
        self._first = self._allocate(nbytes)
        """The first allocation. If the device is the CPU, it keeps the size of the start, and `blocks` names a part."""
        self.blocks = [(0, self._first)]
        """Start offset and memory, (nbytes,) uint8, of each allocation, in ascending order of offset."""
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Views of the memory, by offset and size."""
        self._viewed: dict[tuple[int, int], ViewedMemory] = {}
        """Storages over these views, by the ids of view and places. The storages keep both objects alive."""
        self._shared: list[torch.Tensor] = []
        """Host memory of units that the device uses where it is."""
        self.given_back = False
        """True between `give_back` and `take_back`."""
        self._readers = [(0, nbytes, self._earlier_compute())]
        """Ranges (start, stop, event): until the event, uploads may write the range, or compute may read it."""

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return self._device.allocate(nbytes)
        except (torch.OutOfMemoryError, OSError, BudgetError) as error:
            advice = 'lower "device_memory" in the "offload" block, or place weights and states on cpu or nvme'
            raise self._too_small(nbytes, error, advice) from error

    def _too_small(self, nbytes: int, error: Exception, advice: str) -> BudgetError:
        return BudgetError(
            f"{self._device.torch} does not have {format_size(nbytes)} of contiguous free memory for the device "
            f"budget: {error}; {advice}"
        )

    def _earlier_compute(self) -> Event:
        """Returns an event for newly allocated memory: other streams may write the memory only after this event."""
        # upload stream: torch may reuse memory that compute in flight still reads. That is safe on the compute stream,
        # but an upload must first wait for that compute.
        return self._device.record_event()

    def grow(self, nbytes: int) -> tuple[int, int]:
        """Adds `nbytes` of contiguous memory and returns their start and end.

        Raises `BudgetError` if the device lacks memory.
        """
        memory = self._allocate(nbytes)
        start = self.space.add(nbytes)
        self.blocks.append((start, memory))
        self._readers.append((start, start + nbytes, self._earlier_compute()))
        self.nbytes += nbytes
        return start, start + nbytes

    def shrink(self) -> int:
        """Frees the memory that `grow` added last, and returns its size; 0 if there is none, or if a buffer is in it.

        Blocks the calling thread until copies in flight are done: torch's allocator may reuse the memory at once for
        compute, which does not wait for the streams of uploads and gathers.
        """
        start, memory = self.blocks[-1]
        nbytes = memory.numel()
        if len(self.blocks) == 1 or not self.space.remove(start, nbytes):
            return 0
        inside = [event for first, _, event in self._readers if first >= start]
        self._readers = [reader for reader in self._readers if reader[0] < start]
        # New objects, because the update worker may be reading the old ones in `view`, without the pager's lock.
        self.blocks, self._views, self._viewed = self.blocks[:-1], {}, {}
        self.nbytes -= nbytes
        for event in inside:
            event.wait()
        return nbytes

    @property
    def most(self) -> int | None:
        """The bytes of the largest arena; None if the free memory of the device alone limits it."""
        return self._first.numel() if self._device.host_addressable else None

    def resize(self, nbytes: int) -> None:
        """Moves the end of the first memory, beyond which no buffer is. All buffers left keep their contents.

        Blocks the calling thread until copies and compute in flight are done. Raises `BudgetError`, without effect, if
        the device has too little memory.
        """
        assert len(self.blocks) == 1, "grown memory is given back before"
        self._views, self._viewed = {}, {}  # storages over the old memory do not follow it to its next address
        try:
            memory = self._device.resize(self._first, nbytes, self.space.end)
        except (torch.OutOfMemoryError, OSError, BudgetError) as error:
            raise self._too_small(nbytes, error, "ask for fewer bytes, or end what else uses the device") from error
        self.space.resize(nbytes)
        if not self._device.host_addressable:
            self._first = memory
        self.blocks, self.nbytes, self._readers = [(0, memory)], nbytes, []  # all work of every stream has ended

    def give_back(self, regions: Sequence[Region] = ()) -> None:
        """Gives the memory back to the device, for others. `take_back` must come before any use of the arena.

        Blocks the calling thread until copies and compute in flight are done. On a device that works in host memory,
        `regions` keep their contents.
        """
        assert len(self.blocks) == 1, "grown memory is given back before"
        self._views, self._viewed = {}, {}  # storages over the old memory do not follow it to its next address
        self._device.give_back(self.blocks[0][1], gaps(0, self.nbytes, regions))
        self.given_back = True

    def take_back(self) -> None:
        """Allocates the memory that was given back. Raises `BudgetError`, without effect, if too little is free."""
        try:
            self._device.take_back(self.blocks[0][1])
        except (torch.OutOfMemoryError, OSError, BudgetError) as error:
            advice = "free the memory that others took while the engine was asleep, and call again"
            raise self._too_small(self.nbytes, error, advice) from error
        # All work of every stream has ended by now, so no buffer waits for an earlier owner's events.
        self._readers = []
        self.given_back = False

    @property
    def shares_viewed_memory(self) -> bool:
        """True while anybody else holds a view of host memory that the arena shares; False if torch does not count."""
        ids = set(map(id, self._shared))
        return any(memory.viewed for (of, _), memory in self._viewed.items() if of in ids)

    def close(self) -> None:
        """Drops the memory, which is freed once nobody else holds a view of it. No copy may be in flight.

        An engine is a part of reference cycles, and Python may find the cycles long after the engine's end.
        """
        self.blocks, self._shared, self._views, self._viewed = [], [], {}, {}
        del self._first

    def addresses(self) -> list[tuple[int, int]]:
        """Returns the first address of each allocation, and the first address after its end."""
        allocations = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for _, memory in self.blocks]
        if not self._shared:
            return allocations
        # One range: a look at each unit's own would cost every tensor that autograd saves.
        starts = [memory.data_ptr() for memory in self._shared]
        ends = [start + memory.numel() for start, memory in zip(starts, self._shared, strict=True)]
        return [*allocations, (min(starts), max(ends))]

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of all allocated buffers."""
        return self.space.used_bytes

    def take(self, nbytes: int) -> DeviceBuffer | None:
        """Allocates a buffer; returns None if no free range is large enough."""
        offset = self.space.take(nbytes)
        return None if offset is None else self._buffer(offset, nbytes)

    def keep(self, nbytes: int) -> torch.Tensor:
        """Allocates (nbytes,) uint8 that are never freed, and blocks until every stream may write them."""
        device_buffer = self.take(nbytes)
        assert device_buffer is not None, "the device arena has no room for memory that is never freed"
        for event in device_buffer.after:
            event.wait()
        return self.view(device_buffer)

    def share(self, memory: torch.Tensor) -> DeviceBuffer:
        """Returns a buffer that is host memory, (nbytes,) uint8 that the device can address. It is never freed."""
        assert self._device.host_addressable
        self._shared.append(memory)
        return DeviceBuffer(-len(self._shared), memory.numel(), ())

    def take_at(self, offset: int, nbytes: int) -> DeviceBuffer:
        """Allocates the `nbytes` bytes from `offset` on, which must be free."""
        self.space.take_at(offset, nbytes)
        return self._buffer(offset, nbytes)

    def _buffer(self, offset: int, nbytes: int) -> DeviceBuffer:
        """Returns a buffer of these bytes, with the pending events of the bytes' earlier owners."""
        # Events that are done need no wait, and dropping them keeps the list short.
        self._readers = [reader for reader in self._readers if not reader[2].done()]
        stop = offset + nbytes
        return DeviceBuffer(
            offset, nbytes, tuple(done for first, last, done in self._readers if first < stop and offset < last)
        )

    def give(self, device_buffer: DeviceBuffer, written: Event, read: Event) -> None:
        """Frees a buffer.

        `written` is the event of the last upload into the buffer, `read` that of the last compute that reads it.
        """
        if self.poison:
            # compute stream: the fill runs here, so it must come after the upload and after compute of other threads.
            self._device.wait_event(written)
            self._device.wait_event(read)
            self.view(device_buffer).view(torch.int16).fill_(0x7FFF)  # NaN in bf16 and fp16, and two are NaN in fp32
            read = self._device.record_event()
        self._readers += [
            (device_buffer.offset, device_buffer.offset + device_buffer.nbytes, event)
            for event in (written, read)
            if not event.done()
        ]
        self.space.give(device_buffer.offset, device_buffer.nbytes)

    def view(self, device_buffer: DeviceBuffer) -> torch.Tensor:
        """Returns the buffer's own memory, (nbytes,) uint8: the same tensor at each call."""
        if device_buffer.offset < 0:
            return self._shared[-1 - device_buffer.offset]
        offset, nbytes, views = device_buffer.offset, device_buffer.nbytes, self._views  # read once: see `shrink`
        # Units return to the same places, and torch takes 8 µs to make a view.
        view_of_unit = views.get((offset, nbytes))
        if view_of_unit is None:
            blocks = self.blocks
            start, memory = blocks[-1] if blocks[-1][0] <= offset else blocks[0]  # two at most
            with without_modes():  # the caller's modes must not reach later callers
                view_of_unit = memory.narrow(0, offset - start, nbytes)
            if len(views) >= _VIEWS:
                views.clear()
            views[offset, nbytes] = view_of_unit
        return view_of_unit

    def viewed(self, memory: torch.Tensor, places: ViewPlaces) -> ViewedMemory:
        """Returns a buffer's memory, a result of `view`, in a storage of its own. One thread at a time may call it.

        If torch counts the tensors in a storage, this is the storage of the last use of that memory.
        """
        # A unit returns to few places, and torch takes 30 µs to make a storage and views for nine parameters.
        key, cache = (id(memory), id(places)), self._viewed
        viewed_memory = cache.get(key)
        if viewed_memory is None:
            viewed_memory = ViewedMemory(memory, places)
            if viewed_memory.counted:
                if len(cache) >= _VIEWS:
                    cache.clear()
                cache[key] = viewed_memory
        return viewed_memory


def check_budget(what: str, have: int, need: int, advice: str) -> None:
    """Raises `BudgetError` with both numbers if `have` bytes cannot hold `need`."""
    if have < need:
        raise BudgetError(
            f"{what} is {format_size(have)} ({have} bytes), the least that works is "
            f"{format_size(need)} ({need} bytes); {advice}"
        )
