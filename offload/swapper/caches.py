"""The two caches of weights: host buffers with the reads into them, and device buffers with copies and gathers.

Both belong to the pager, and know nothing of each other. The caller of a method holds the table's lock; a method that
waits, copies or gathers releases it meanwhile. So another thread may change a unit during such a call, within the
limits that the unit's residency and pins set.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Protocol

import torch

from offload.aio import Priority
from offload.aio.protocols import Future, wait_for_all
from offload.errors import BudgetError, RankError
from offload.sizes import PAGE, align_up, format_size
from offload.states import Tier
from offload.swapper.memory.allocator import free_regions
from offload.swapper.memory.device import DONE, Device, Event
from offload.swapper.memory.device_arena import DeviceArena, DeviceBuffer
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.policy import (
    Eviction,
    Floor,
    IdleBlocks,
    Limits,
    UnitBlock,
    company_of,
    find_room,
    largest_beside,
    next_to_fetch,
    victims,
)
from offload.swapper.table import Residency, Transfer, UnitEntry, UnitSize, UnitTable, UploadPiece, WeightSource
from offload.timeline import Row

# -- chunked upload ------------------------------------------------------------------------------------


def stream(
    read: Callable[[int, memoryview], Future],
    total: int,
    host_buffers: Sequence[HostBuffer],
    unsharded: torch.Tensor,
    pieces: Sequence[UploadPiece],
    device: Device,
    after: Sequence[Event],
    waiting: Callable[[], AbstractContextManager[None]],
) -> Event:
    """Copies the `pieces` of a partition to their places in `unsharded`, chunk by chunk, and waits for the last copy.

    With two host buffers or more, one is filled while another is copied. When this function returns or raises, no read
    is in flight. After an error, a copy may be in flight. The `host_buffers` are of one size, belong to the caller and
    are free again on return. `unsharded`, (nbytes,) uint8, is written after the events `after`. `waiting` returns a
    context for each wait for a read. The event of the last copy, which is returned, is done. Raises the first error of
    a read.
    """
    reading: deque[tuple[HostBuffer, int, Future]] = deque()
    copied: dict[int, Event] = {}
    last = DONE
    start = 0
    try:
        while start < total or reading:
            while start < total and len(reading) < len(host_buffers):
                # Chunks use the buffers in turn, so this chunk gets the buffer whose read finished longest ago.
                host_buffer = host_buffers[(start // host_buffers[0].nbytes) % len(host_buffers)]
                if host_buffer.offset in copied:
                    copied[host_buffer.offset].wait()  # blocks: the copy to the device reads the buffer until then
                nbytes = min(host_buffer.nbytes, total - start)
                reading.append((host_buffer, start, read(start, host_buffer.buffer[:nbytes])))
                start += nbytes
            host_buffer, first, future = reading[0]
            with waiting():
                moved = future.wait()
            reading.popleft()
            for segment, offset in overlaps(pieces, first, first + moved):
                source = host_buffer.tensor(torch.uint8)[offset : offset + len(segment)]
                last = device.upload(unsharded[segment.start : segment.stop], source, after)
                copied[host_buffer.offset] = last
    finally:
        wait_for_all(future for _, _, future in reading)
    last.wait()  # the caller reuses the host buffers
    return last


def overlaps(pieces: Sequence[UploadPiece], first: int, last: int) -> list[tuple[range, int]]:
    """Returns the unit's byte ranges with bytes [first, last) of a partition, each with its offset from `first`."""
    parts: list[tuple[range, int]] = []
    for begin, target in pieces:
        start, stop = max(begin, first), min(begin + len(target), last)
        if start < stop:
            parts.append((range(target.start + start - begin, target.start + stop - begin), start - first))
    return parts


# -- rows ----------------------------------------------------------------------------------------------


def rows_in(memory: torch.Tensor, rows: torch.Tensor, row_nbytes: int) -> torch.Tensor:
    """Returns a copy of `rows`, (n,) int64, of a table at the start of `memory`: (n, row_nbytes) uint8."""
    words = len(memory) // row_nbytes
    return memory[: words * row_nbytes].view(words, row_nbytes).index_select(0, rows)


def read_rows(
    read: Callable[[int, memoryview], Future],
    host_buffer: HostBuffer,
    reads: Sequence[range],
    starts: torch.Tensor,
    row_nbytes: int,
) -> torch.Tensor:
    """Returns rows from the drives, (n, row_nbytes) uint8. When it returns or raises, no read is in flight.

    `starts`, (n,) int64, are the first bytes of the rows in the partition. Each row is in one of `reads`, for all of
    which `host_buffer` has room, one after the other.
    """
    begins = [0, *accumulate(map(len, reads))]
    futures: list[Future] = []
    try:
        for begin, wanted in zip(begins, reads, strict=False):
            futures.append(read(wanted.start, host_buffer.buffer[begin : begin + len(wanted)]))
        for future in futures:
            future.wait()
    finally:
        wait_for_all(futures)
    firsts = torch.tensor([wanted.start for wanted in reads], device="cpu")
    which = torch.bucketize(starts, firsts, right=True) - 1
    places = starts - firsts[which] + torch.tensor(begins, device="cpu")[which]
    memory = host_buffer.tensor(torch.uint8)
    # A row begins at any byte of the buffer.
    return memory.as_strided((len(memory) - row_nbytes + 1, row_nbytes), (1, 1)).index_select(0, places)


# -- device cache --------------------------------------------------------------------------------------


class Gathers(Protocol):
    """The gathers of units from all ranks. Called by the thread that runs the model or its backward."""

    def gather(self, unit: int, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Starts the gather of the other ranks' shards into `unsharded`, and returns the event of its end.

        `unsharded` is the unit on the device, (nbytes,) uint8.
        """


Expand = Callable[[int, torch.Tensor], None]
"""A function that computes the expanded bytes of a unit, given its index and its device memory, (nbytes,) uint8."""


class DeviceCache:
    """Device buffers of weights: permanent buffers for tier DEVICE, and buffers for units that come and go."""

    def __init__(
        self, table: UnitTable, arena: DeviceArena, device: Device, peers: Gathers | None, expand: Expand
    ) -> None:
        """Allocates the permanent device buffers. Those of tier HOST have a host buffer already.

        `peers` is None for one rank. `expand` computes the bytes of a unit that are in no partition.
        """
        self._table = table
        self._expand_unit = expand
        self._arena = arena
        self._device = device
        self._peers = peers
        self._floor: tuple[int, int] | None = None
        self._grown: tuple[int, int] = (0, 0)
        """Region of grown memory for units that come and go."""
        self._reserved: dict[int, DeviceBuffer] = {}
        """Room of units that are gathered soon."""
        self._kept: list[DeviceBuffer] = []
        """Buffers of grown memory that belong to the caller of `grow`."""
        self._offsets: dict[int, int] = {}
        """Offset of each unit with a buffer, also while an upload into it begins, and no entry names it yet."""
        self._floors: dict[int, Floor] = {}
        """The result of `_floor_for` for each unit, until the memory grows or shrinks."""
        self._ascending = sorted(
            (align_up(e.size.nbytes), e.index) for e in table.entries if not e.size.device_resident
        )
        """Bytes and index of each unit that comes and goes."""
        self._idle = IdleBlocks(table.access_order)
        """Units that `drop` may drop."""
        self.missing = table.access_order.units()
        """Units that are not on the device, and that no read in place is bringing."""
        for entry in table.entries:
            self.missing.put(entry.index, entry.residency is not Residency.DEVICE)
            if entry.size.tier is Tier.DEVICE:
                entry.tier_buffer = arena.take(entry.size.shard_nbytes)
                assert entry.tier_buffer is not None, "the device arena was sized for every unit of the device tier"
            if entry.size.device_resident:
                if entry.host_buffer is not None:
                    entry.device_buffer = arena.share(entry.host_buffer.tensor(torch.uint8))
                else:
                    entry.device_buffer = entry.tier_buffer

    # -- allocation and eviction --------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of the device arena."""
        return self._arena.nbytes

    def no_room(self, entry: UnitEntry) -> BudgetError:
        """Returns the error for a unit for which the units in use leave no room."""
        users = [
            e.size.title
            for e in self._table.entries
            if e.device_buffer and e.device_buffer.offset >= 0 and e is not entry
        ]
        free = self._arena.nbytes - self._arena.used_bytes
        return BudgetError(
            f"unit {entry.size.title} needs {format_size(entry.size.nbytes)} of contiguous device memory. The "
            f"device budget of {format_size(self._arena.nbytes)} is used by {', '.join(users) or 'nothing'} "
            f'({format_size(free)} free); raise "device_memory" in the "offload" block, or checkpoint smaller '
            "regions"
        )

    def allocate(self, entry: UnitEntry, beyond: int = -1, safe: bool = False) -> DeviceBuffer | None:
        """Returns a device buffer for `entry`; None if there is no room. Drops released units to make room.

        Only units whose next use is more than `beyond` uses away may be dropped; -1 for a use on demand. With `safe`
        the buffer is at no place from which the unit would leave its companions no room.
        """
        device_buffer = self._reserved.pop(entry.index, None)
        if device_buffer is None:
            place = self.find_room(entry, beyond)
            if place is None or (safe and not place.safe):
                return None
            # upload and compute streams may still use the dropped units' memory: the new buffer's `after` contains
            # their events.
            for unit in place.victims:
                self.drop(self._table.entries[unit])
            device_buffer = self._arena.take_at(place.offset, entry.size.nbytes)
        self._offsets[entry.index] = device_buffer.offset
        return device_buffer

    def find_room(self, entry: UnitEntry, beyond: int) -> Eviction | None:
        """Returns the placement that `allocate` would choose, without any change; see `policy.find_room`."""
        floor = self._floors.get(entry.index) or self._floor_for(entry.index)
        company = company_of(entry.size.companions, self._offsets.get)
        return find_room(self._arena.space, entry.size.nbytes, self._idle, floor, beyond, company)

    def reserve(self, units: Sequence[int]) -> bool:
        """Reserves room for exactly `units` and returns True; returns False, without effect, if the room is not free.

        Drops no unit for it. `allocate` returns the reserved buffer of a unit, and `free_reserved` frees those left.
        """
        self._first_floor()
        for unit in units:
            device_buffer = self._arena.take(self._table.entries[unit].size.nbytes)
            if device_buffer is None:
                self.free_reserved()
                return False
            self._reserved[unit] = device_buffer
        return True

    def free_reserved(self) -> None:
        """Frees all room that is reserved. Nothing was written there."""
        while self._reserved:
            self._arena.give(self._reserved.popitem()[1], DONE, DONE)

    def _floor_for(self, unit: int) -> Floor:
        # Units come and go in the longest region only, so grown memory takes over if it is longer.
        start, stop = max(self._first_floor(), self._grown, key=lambda region: region[1] - region[0])
        nbytes = self._table.entries[unit].size.nbytes
        floor = Floor(start, stop, largest_beside(unit, nbytes, self._ascending, stop - start))
        self._floors[unit] = floor
        return floor

    def _first_floor(self) -> tuple[int, int]:
        """Returns the region of the arena's first memory in which units come and go."""
        # At the first call all permanent buffers are allocated, so the longest free region is the one that units share.
        if self._floor is None:
            free = self._arena.space.holes
            self._floor = max(free, key=lambda region: region[1] - region[0], default=(0, 0))
        return self._floor

    def grow(self, nbytes: int, block_sizes: Sequence[int]) -> list[torch.Tensor]:
        """Adds `nbytes` of device memory to the arena, and returns the blocks at its end that belong to the caller.

        No unit may use these blocks, (bytes,) uint8 tensors of `block_sizes`. Raises `BudgetError` if fewer than
        `nbytes` are free on the device.
        """
        assert len(self._arena.blocks) == 1, "grown memory is given back before the arena grows again"
        self._first_floor()  # determined while all free memory belongs to the first allocation
        start, stop = self._arena.grow(nbytes)
        for block_nbytes in block_sizes:
            stop -= block_nbytes
            self._kept.append(self._arena.take_at(stop, block_nbytes))
        self._grown = start, stop
        self._floors.clear()
        return [self._arena.view(device_buffer) for device_buffer in self._kept]

    def shrink(self) -> int:
        """Drops all units that come and go, frees grown memory, and returns its bytes.

        Returns 0, and changes nothing, if there is no grown memory, or if a unit in it is in use.
        """
        start = self._arena.blocks[-1][0]
        inside = [e for e in self._table.entries if e.device_buffer is not None and e.device_buffer.offset >= start]
        # If another thread uploads a unit, the unit has a device buffer already, but its entry does not name it yet.
        uploading = any(entry.residency is Residency.UPLOADING for entry in self._table.entries)
        if not start or uploading or not all(self.idle(entry) for entry in inside):
            return 0
        # Units in the first memory too: while longer memory had grown, no place there was left to their companions.
        for entry in filter(self.idle, self._table.entries):
            self.drop(entry)
        for device_buffer in self._kept:
            self._arena.give(device_buffer, DONE, DONE)
        self._kept, self._grown = [], (0, 0)
        self._floors.clear()
        nbytes = self._arena.shrink()
        assert nbytes, "every buffer of grown memory is a unit's, or was kept"
        return nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the first memory up to the last buffer that stays when all units that come and go are dropped."""
        moving = [
            (entry.device_buffer.offset, entry.device_buffer.nbytes)
            for entry in self._table.entries
            if entry.device_buffer is not None and not entry.size.device_resident
        ]
        end = self._arena.blocks[0][1].numel()
        regions = [region for region in free_regions(self._arena.space.holes, moving) if region[1] <= end]
        start, stop = max(regions, default=(0, 0))
        return start if stop == end else end

    def resize(self, nbytes: int) -> None:
        """Drops all units that come and go, and moves the end of the arena; see `Pager.resize_device`."""
        self.free_reserved()
        for entry in self._table.entries:
            while entry.reading_in_place:  # a prefetch
                self._table.check()
                self.finish_read(entry)
            if entry.residency is Residency.DEVICE and not entry.size.device_resident:
                self.drop(entry)
        # Units come and go in another region from now on: it is found at the next use, when none of them is there.
        self._floor = None
        self._floors.clear()
        self._arena.resize(nbytes)

    def idle(self, entry: UnitEntry) -> bool:
        """Returns True if the unit is on the device, unpinned, and not permanent."""
        in_use = entry.pins or entry.copying or entry.size.device_resident
        return entry.residency is Residency.DEVICE and not in_use

    def hold(self, entry: UnitEntry, pins: int = 0, copying: int = 0) -> None:
        """Adds to the pins of a unit, and to the copies of its weights in progress. A unit with any is not dropped."""
        self._table.hold(entry, pins, copying)
        self._note(entry)

    def _move(self, entry: UnitEntry, to: Residency) -> None:
        self._table.move(entry, to)
        self._note(entry)

    def _note(self, entry: UnitEntry) -> None:
        """Adds a unit that has changed to those that may be dropped or are missing, or removes it."""
        self.missing.put(entry.index, entry.residency is not Residency.DEVICE and not entry.reading_in_place)
        self._idle.remove(entry.index)
        if self.idle(entry) and (buffer := entry.device_buffer) is not None:
            self._idle.add(UnitBlock(entry.index, buffer.offset, buffer.nbytes))

    def drop(self, entry: UnitEntry) -> None:
        """Drops the device copy of a unit. The copy is clean, so no bytes move."""
        assert entry.device_buffer is not None and not entry.pins
        # upload and compute streams: both may still use the memory, so its next owner waits for both events.
        self._arena.give(entry.device_buffer, entry.uploaded, entry.read)
        entry.device_buffer = None
        del self._offsets[entry.index]
        # A host buffer that is kept, or the permanent device buffer of the partition, holds the newest copy. WRITING
        # means that the write of that copy to the store is still in flight.
        if entry.host_buffer is None and entry.tier_buffer is None:
            self._move(entry, Residency.DISK)
        else:
            self._move(entry, Residency.WRITING if entry.unwritten else Residency.HOST)

    def look_up(self, entry: UnitEntry, rows: torch.Tensor, row_nbytes: int) -> torch.Tensor:
        """Returns rows of a unit that is on the device and stays there meanwhile; see `rows_in`."""
        assert entry.device_buffer is not None
        # compute stream: the upload may be in flight, and the next owner of the memory waits for this copy.
        self._device.wait_event(entry.uploaded)
        weights = self._arena.view(entry.device_buffer)
        copied = rows_in(weights, rows.to(weights.device), row_nbytes)
        self._device.wait_event(entry.read)
        entry.read = self._device.record_event()
        return copied

    def close(self) -> None:
        """Waits for copies in flight, since no use may have waited for them, and releases the device memory."""
        for entry in self._table.entries:
            entry.copied.wait()
            # After the loss of a rank a gather never ends. The step has raised `RankError`, and torch's work keeps the
            # memory that the gather fills.
            with contextlib.suppress(RankError):
                entry.uploaded.wait()
        self._arena.close()

    # -- reads in place -----------------------------------------------------------------------------

    def reads_in_place(self, size: UnitSize) -> bool:
        """Returns True if a read may fill a unit's device buffer: the host addresses it, and the files hold all bytes.

        Such a read needs no host buffer, and no copy.
        """
        return self._device.host_addressable and self._peers is None and size.is_whole

    def start_read(
        self, entry: UnitEntry, device_buffer: DeviceBuffer, read: Callable[[int, memoryview], Future]
    ) -> None:
        """Starts the read in place of `entry` into `device_buffer`, which the unit owns from now on."""
        # calling thread: the drive writes this memory without a stream, so compute that reads it must be over, not only
        # ordered.
        for event in device_buffer.after:
            event.wait()
        try:
            future = read(0, self._arena.view(device_buffer).numpy().data)
        except BaseException:
            self._arena.give(device_buffer, DONE, DONE)  # nobody writes there: see `WeightSource.start_read`
            del self._offsets[entry.index]
            raise
        self._table.begin_transfer(entry, Transfer(None, future))
        entry.device_buffer = device_buffer
        self._move(entry, Residency.UPLOADING)

    def finish_read(self, entry: UnitEntry) -> None:
        """Waits for the read in place of `entry` without the lock, then delivers it, like `HostCache.finish_read`."""
        if self._table.end_transfer(entry) is not None:
            self._move(entry, Residency.DEVICE)

    @property
    def copying(self) -> bool:
        """True while another thread copies weights of a unit on the device, which stays there meanwhile."""
        return any(entry.copying and entry.residency is Residency.DEVICE for entry in self._table.held.values())

    def latest_read(self) -> UnitEntry | None:
        """Returns the unit with the furthest next use among those being read in place; None if there is none."""
        return self._table.used_last(entry for entry in self._table.reading.values() if entry.reading_in_place)

    # -- copies -------------------------------------------------------------------------------------

    def upload(self, entry: UnitEntry, device_buffer: DeviceBuffer) -> None:
        """Starts the copy of this rank's partition into `device_buffer`, and the gather of the other partitions."""
        self._table.move(entry, Residency.UPLOADING)
        try:
            with self._table.timeline.span(Row.UPLOADS, entry.size.title, entry.size.shard_nbytes):
                # calling thread: the copy blocks on a CPU, and on a GPU if the host memory is not pinned, so the lock
                # is released. UPLOADING keeps other threads from this unit meanwhile.
                self._table.changed.without_lock(lambda: self._copy_shard(entry, device_buffer))
            self.gather(entry, device_buffer, entry.copied)
            self._expand(entry, device_buffer)
        except BaseException as error:  # copies in flight may still write to the buffer, so it is never reused
            self._table.fail(error, entry)
            raise
        # Only now: `CommonUses` gathers into the buffer that an entry names, as if the unit were on the device already.
        entry.device_buffer = device_buffer
        self._move(entry, Residency.DEVICE)

    def _copy_shard(self, entry: UnitEntry, device_buffer: DeviceBuffer) -> None:
        """Starts the copies of this rank's shard into `device_buffer`, and stores the last event.

        Needs no lock: UPLOADING keeps other threads from the unit's buffers and events.
        """
        unsharded = self._arena.view(device_buffer)
        if entry.tier_buffer is not None:
            shard = self._arena.view(entry.tier_buffer)
        else:
            assert entry.host_buffer is not None
            shard = entry.host_buffer.tensor(torch.uint8)
        # upload stream: the copies wait for `after`, the last compute and upload of the memory's former owner.
        if entry.size.is_whole:
            entry.uploaded = entry.copied = self._device.upload(unsharded, shard, device_buffer.after)
            return
        for start, target in entry.size.pieces:
            source = shard[start : start + len(target)]
            # upload stream: all copies run in order, so the event of the last one covers the others.
            entry.copied = self._device.upload(unsharded[target.start : target.stop], source, device_buffer.after)
        entry.uploaded = entry.copied

    def gather(self, entry: UnitEntry, device_buffer: DeviceBuffer, copied: Event) -> None:
        """Starts the gather of the other ranks' shards, ordered after `copied`, the copy of this rank's shard."""
        if self._peers is not None:
            # calling thread: a gather may block until the other ranks join. The lock is released, since the update
            # worker must not wait for them.
            peers, unsharded = self._peers, self._arena.view(device_buffer)[: entry.size.stored_nbytes]
            entry.uploaded = self._table.changed.without_lock(
                lambda: peers.gather(entry.index, unsharded, entry.size.shard_ranges, copied)
            )

    def _expand(self, entry: UnitEntry, device_buffer: DeviceBuffer) -> None:
        """Starts the computation of the unit's expanded bytes, ordered after the upload."""
        if not entry.size.expanded_nbytes:
            return
        unsharded = self._arena.view(device_buffer)

        def work() -> Event:
            # upload stream: its copies have waited for the last compute that read this memory. A gather may run on
            # another stream, so this stream waits for its event.
            with self._device.uploading():
                self._device.wait_event(entry.uploaded)
                self._expand_unit(entry.index, unsharded)
                return self._device.uploaded()

        # calling thread: it does the work on a CPU, and a gather may wait for other ranks. So the lock is released.
        with self._table.timeline.span(
            Row.UPLOADS, f"{entry.size.title}: values of blocks", entry.size.expanded_nbytes
        ):
            entry.uploaded = self._table.changed.without_lock(work)

    def stream(
        self,
        entry: UnitEntry,
        device_buffer: DeviceBuffer,
        host_buffers: Sequence[HostBuffer],
        read: Callable[[int, memoryview], Future],
    ) -> None:
        """Fills `device_buffer` from DISK in chunks, each through one of `host_buffers`.

        The unit owns `device_buffer` from now on.
        """
        self._table.move(entry, Residency.UPLOADING)
        unsharded, size, timeline = self._arena.view(device_buffer), entry.size, self._table.timeline
        waiting = functools.partial(timeline.span, Row.WAITS, f"waits for read of {size.title} in chunks")
        after = device_buffer.after
        try:
            with timeline.span(Row.UPLOADS, f"{size.title} in chunks", size.shard_nbytes):
                entry.uploaded = self._table.changed.without_lock(
                    lambda: stream(
                        read, size.shard_nbytes, host_buffers, unsharded, size.pieces, self._device, after, waiting
                    )
                )
            self.gather(entry, device_buffer, entry.uploaded)
            self._expand(entry, device_buffer)
        except BaseException as error:  # reads and copies in flight may still write to both, so neither is reused
            self._table.fail(error, entry)
            raise
        for buffer in host_buffers:
            buffer.release()
        entry.device_buffer = device_buffer
        self._move(entry, Residency.DEVICE)


# -- host cache ----------------------------------------------------------------------------------------


class HostCache:
    """Host buffers of weights: permanent ones of units whose tier is HOST, and ones that units of tier DISK share."""

    def __init__(self, table: UnitTable, host: HostArena, source: WeightSource) -> None:
        """Allocates the permanent host buffers."""
        self._table = table
        self._host = host
        self._source = source
        self.waiting_for_buffer = 0
        """Number of threads that wait for a host buffer."""
        self._buffered = table.access_order.units()
        """Units of tier DISK that have a host buffer, of their newest weights or of fresh ones."""
        for entry in table.entries:
            if entry.size.tier is Tier.HOST:
                entry.host_buffer = host.take_copied(entry.size.shard_nbytes)
                assert entry.host_buffer is not None, (
                    "the arena class of the host tier was sized for every unit in that tier"
                )

    # -- allocation and eviction --------------------------------------------------------------------

    def host_buffer(self, nbytes: int, beyond: int = -1, wait: bool = True) -> HostBuffer | None:
        """Returns a host buffer for weights; None if too little memory is free or can be evicted.

        Only units whose next use is more than `beyond` uses away may be evicted; -1 for any unit. Without `wait`,
        nothing is evicted whose copy to the device is under way.
        """
        going = victims(self._host.weights.space, nbytes, self._evictable(beyond))
        # A thread that works ahead (`wait=False`) must not hold the lock in `_evict` until a copy ends.
        if going is None or not (wait or all(self._table.entries[unit].copied.done() for unit in going)):
            return None
        # calling thread: it holds the lock from the choice to the allocation, so no other thread takes the freed
        # memory.
        for unit in going:
            self._evict(self._table.entries[unit])
        return self._host.weights.take(nbytes)

    def wait_for_buffer(self, entry: UnitEntry) -> None:
        """Waits until a host buffer for `entry` may have become free or evictable. The caller tries again."""
        reading = self._table.used_last(e for e in self._table.reading.values() if e.residency is Residency.READING)
        # Prefetches in flight occupy the memory. A buffer can be evicted once its read has been delivered, so this
        # thread delivers the read whose use is furthest away.
        if reading is not None:
            self.finish_read(reading)
            return
        # The update worker takes no buffer while this count is above 0, or freed memory might never reach this
        # thread.
        self.waiting_for_buffer += 1
        self._table.notify()
        try:
            # calling thread: the wait ends. Writes and updates hold the buffers, and need nothing of this thread.
            self._table.wait(f"waits for a host buffer for {entry.size.title}")
        finally:
            self.waiting_for_buffer -= 1

    @property
    def nbytes(self) -> int:
        """Bytes of all host buffers that units of tier DISK share."""
        return self._host.weights.space.nbytes

    def _evictable(self, beyond: int) -> Iterator[UnitBlock]:
        """Yields the blocks of the host buffers that may be evicted, the furthest next use first."""
        last: list[UnitBlock] = []
        for unit in self._buffered.latest():
            entry = self._table.entries[unit]
            buffer = entry.host_buffer or entry.fresh
            assert buffer is not None
            if not (self._is_evictable(entry) if buffer is entry.host_buffer else not entry.fresh_stays):
                continue
            block, distance = UnitBlock(unit, buffer.offset, buffer.nbytes), self._table.access_order.distance(unit)
            # The thread that fetches a unit has recorded this use already, so the order reports the use after this one.
            if (entry.pins and entry.residency is not Residency.DEVICE) or not distance:
                last.append(block)
            elif distance > beyond:
                yield block
            else:
                return
        if beyond < 0:
            yield from sorted(last)

    def note(self, entry: UnitEntry) -> None:
        """Follows a change of a unit's host buffers."""
        has_buffer = entry.host_buffer is not None or entry.fresh is not None
        self._buffered.put(entry.index, has_buffer and entry.size.tier is Tier.DISK)

    def _is_evictable(self, entry: UnitEntry) -> bool:
        """Returns True if the store contains the bytes of the unit's host buffer and no thread uses the buffer."""
        return (
            entry.host_buffer is not None
            and entry.size.tier is Tier.DISK
            and entry.residency in (Residency.HOST, Residency.DEVICE)
            and not entry.unwritten
            and not entry.in_update
            and not entry.copying
        )

    def _evict(self, entry: UnitEntry) -> None:
        """Evicts the host buffer of `entry` after the last copy out of it; without one, its fresh weights."""
        if entry.host_buffer is None:
            assert entry.fresh is not None and not entry.fresh_stays
            entry.fresh.release()
            entry.fresh = None
            self.note(entry)
            return
        # calling thread: the buffer is reused at once, so the copy to the device must be over. The wait blocks only if
        # the copy took longer than all work since.
        entry.copied.wait()
        entry.host_buffer.release()
        entry.host_buffer = None
        self.note(entry)
        if entry.residency is Residency.HOST:
            self._table.move(entry, Residency.DISK)

    def forget(self, entry: UnitEntry) -> None:
        """Evicts the host buffer of a unit whose tier is DISK, if any.

        The buffer must be neither in use nor unwritten.
        """
        if entry.host_buffer is not None and entry.size.tier is Tier.DISK:
            self._evict(entry)

    # -- reads --------------------------------------------------------------------------------------

    def start_read(self, entry: UnitEntry, host_buffer: HostBuffer, priority: Priority) -> None:
        """Starts the read of the newest weights of `entry` into `host_buffer`, which the transfer owns from now on."""
        try:
            # threads of the I/O queue: they fill the buffer from here on. The transfer owns it, so nobody evicts it.
            future = self.reader(entry, priority)(0, host_buffer.buffer)
        except BaseException:
            host_buffer.release()  # nobody writes there: see `WeightSource.start_read`
            raise
        self._table.begin_transfer(entry, Transfer(host_buffer, future))
        self._table.move(entry, Residency.READING)

    def finish_read(self, entry: UnitEntry) -> None:
        """Waits for the read of `entry` without the lock, then delivers it.

        The first of several waiting threads delivers.
        """
        # None: another thread has delivered the read while this one waited without the lock.
        if (transfer := self._table.end_transfer(entry)) is not None:
            entry.host_buffer = transfer.host_buffer
            self.note(entry)
            self._table.move(entry, Residency.HOST)

    def read_ahead(self, limits: Limits, started: Callable[[UnitEntry], None], wait: bool) -> None:
        """Starts reads of upcoming units, into host memory that is free or holds only units used later.

        Without `wait`, takes no host buffer whose copy to the device is under way.
        """
        entries, trace = self._table.entries, self._table.access_order

        def wanted() -> Iterator[int]:
            for unit in self._table.on_disk.upcoming():
                if entries[unit].host_buffer is None and not self.streams(entries[unit]):
                    yield unit

        def nbytes(unit: int) -> int:
            return entries[unit].size.shard_nbytes

        while (unit := next_to_fetch(trace, nbytes, wanted(), limits)) is not None:
            host_buffer = self.host_buffer(nbytes(unit), trace.distance(unit), wait)
            if host_buffer is None:
                return
            self.start_read(entries[unit], host_buffer, Priority.NORMAL)
            started(entries[unit])

    def look_up(self, entry: UnitEntry, rows: torch.Tensor, row_nbytes: int) -> torch.Tensor:
        """Returns rows of a unit whose host buffer contains its weights and stays meanwhile; see `rows_in`."""
        assert entry.host_buffer is not None
        return rows_in(entry.host_buffer.tensor(torch.uint8)[entry.size.pieces[0].start :], rows, row_nbytes)

    # -- units too large for a host buffer ----------------------------------------------------------

    def streams(self, entry: UnitEntry) -> bool:
        """Returns True if two host buffers of this size do not fit, so that the unit is streamed in chunks."""
        size = entry.size
        return size.tier is Tier.DISK and 2 * align_up(size.shard_nbytes) > self._host.weights.space.nbytes

    def buffer_nbytes(self, entry: UnitEntry) -> int:
        """Returns the bytes of a host buffer for this unit, or for a chunk of the unit if it is streamed."""
        if self.streams(entry):
            return self._host.weights.space.nbytes // 2 // PAGE * PAGE
        return entry.size.shard_nbytes

    def reader(self, entry: UnitEntry, priority: Priority) -> Callable[[int, memoryview], Future]:
        """Returns a function that starts to read the newest partition from a byte offset into a buffer.

        The returned function needs no lock if the unit is pinned or UPLOADING: its newest slot cannot change then.
        """
        source, unit = self._source, entry.index
        return lambda start, buffer: source.start_read(unit, start, buffer, priority)

    # -- size and shutdown ----------------------------------------------------------------------------

    def shrink(self, cache: int, drop_spare: Callable[[int], bool], wait: bool = True) -> bool:
        """Evicts what is beyond the first `cache` bytes of the cache, and gives them back; see `Pager.shrink_host`."""
        # calling thread: it holds the lock of `HostMemory`, then this pager's, never in another order.
        space = self._host.weights.space
        stop = self._host.classes.weights + cache
        if not drop_spare(stop):
            return False
        while not self._table.failure and space.end > stop:
            for entry in self._table.entries:
                if wait and entry.residency is Residency.READING:
                    self.finish_read(entry)
                if self._is_evictable(entry) and (buffer := entry.host_buffer) and buffer.offset + buffer.nbytes > stop:
                    self._evict(entry)
            if not wait:
                break
            if space.end > stop:
                # The wait ends: only a write, an update or a stream can hold a buffer now. Each notifies at its end.
                self._table.wait("waits for a streamed unit")
        if not self._table.failure:
            cache = min(self._host.classes.cache, max(align_up(space.end - self._host.classes.weights), cache))
            self._host.resize(cache)
        return True

    def close(self) -> None:
        """Waits for reads in flight and releases their buffers.

        Errors of these reads are ignored: no one needs the bytes.
        """
        while self._table.reading:
            _, entry = self._table.reading.popitem()
            if entry.transfer is not None:
                transfer, entry.transfer = entry.transfer, None
                # calling thread: other threads need the lock while this one waits for the drive.
                self._table.changed.without_lock(functools.partial(wait_for_all, [transfer.future]))
                if transfer.host_buffer is not None:
                    transfer.host_buffer.release()
