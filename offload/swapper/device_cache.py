"""The pager's device side: where on the device a unit lies, what is copied there, and what leaves for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from offload.aio.protocols import Future
from offload.errors import BudgetError
from offload.sizes import format_size
from offload.states import Tier
from offload.swapper.chunked_upload import stream
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.device_arena import DeviceArena, Slice
from offload.swapper.memory.host_arena import Lease
from offload.swapper.policy import Block, Floor, Place, find_place
from offload.swapper.residency import Residency
from offload.swapper.unit_table import Entry, Table
from offload.timeline import Row


class Having(NamedTuple):
    """What a rank that uses a unit has on its device."""

    unit: bool
    """That unit."""
    all: bool
    """Every unit, until weights change."""
    ahead: int
    """The unit that it could gather next; -1 where there is none to gather, or no room."""


class Agreed(NamedTuple):
    """What ranks do about a unit that one of them uses."""

    gather: bool
    """Some that use it do not have it: all gather it."""
    together: bool
    """All have come to the same use."""
    all: bool = False
    """Every rank has every unit: none needs the others until weights change."""
    ahead: int = -1
    """The unit that all gather as well, before it is used."""


class Peers(Protocol):
    """The other ranks, which hold what this one does not. Called by the thread that runs the model or its backward."""

    def agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Tell every rank that this one uses `unit`, and what all do for it; meanwhile this one serves them.

        `having` says what this rank has; it is called without the table's lock.
        """

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """After a gather to which all had come: the unit that every rank could gather next, or -1."""

    def gather(self, whole: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fill in what the other ranks have of `whole`, (nbytes,) uint8 on the device.

        `share`, this rank's part, is there once `uploaded` is done; all of it is, once what is returned is.
        """


class Slices:
    """Slices of weights: homes on the device, and what comes and goes. The table's lock is held in every call."""

    def __init__(self, table: Table, arena: DeviceArena, device: Device, peers: Peers | None) -> None:
        self._table = table
        self._arena = arena
        self._device = device
        self._peers = peers
        self._floor: tuple[int, int] | None = None
        moving = [(entry.index, entry.size.nbytes) for entry in table.entries if not entry.size.stays]
        self._two_largest = sorted(moving, key=lambda each: -each[1])[:2]
        """Units that come and go, and their bytes: the largest beside any one of them."""
        for entry in table.entries:
            if entry.size.home is Tier.DEVICE:
                entry.home_slice = arena.take(entry.size.part_nbytes)
                assert entry.home_slice is not None, "the device arena was sized for every home"
                if entry.size.stays:
                    entry.slice = entry.home_slice

    # -- room ---------------------------------------------------------------------------------------

    def room_on_device(self, entry: Entry) -> Slice:
        """A slice for `entry`; raises `BudgetError` where what is in use leaves none."""
        piece = self.take_slice(entry)
        if piece is None:
            held = [e.size.name or "the root" for e in self._table.entries if e.slice is not None and e is not entry]
            free = self._arena.nbytes - self._arena.used_bytes
            raise BudgetError(
                f"unit {entry.size.name} needs {format_size(entry.size.nbytes)} in one piece on the device, whose "
                f"budget of {format_size(self._arena.nbytes)} is held by {', '.join(held) or 'nothing'} "
                f"({format_size(free)} are free); "
                f'raise "device_memory" in the "offload" block, or checkpoint smaller regions'
            )
        return piece

    def take_slice(self, entry: Entry, beyond: int = -1) -> Slice | None:
        """Room for `entry` on the device; drops released units for it that are next used after `beyond` uses."""
        place = self.find_place(entry, beyond)
        if place is None:
            return None
        for unit in place.victims:
            self.drop(self._table.entries[unit])
        return self._arena.take_at(place.offset, entry.size.nbytes)

    def find_place(self, entry: Entry, beyond: int) -> Place | None:
        """Where `take_slice` would put it."""
        space = self._arena.space
        if self._floor is None:  # all that stays on the device is there by now
            self._floor = max(space.stretches(), key=lambda stretch: stretch[1] - stretch[0], default=(0, 0))
        largest = next((nbytes for unit, nbytes in self._two_largest if unit != entry.index), 0)
        floor = Floor(*self._floor, largest)
        return find_place(space, entry.size.nbytes, self._droppable(), self._table.trace, floor, beyond)

    def grow(self, nbytes: int, kept: Sequence[int]) -> list[torch.Tensor]:
        """Have so much more room on the device; its end, in stretches of `kept` bytes each, is no unit's."""
        start, stop = self._arena.grow(nbytes)
        pieces = []
        for each in kept:
            stop -= each
            pieces.append(self._arena.take_at(stop, each))
        if self._floor is not None and stop - start > self._floor[1] - self._floor[0]:
            self._floor = start, stop
        return [self._arena.view(piece) for piece in pieces]

    def _droppable(self) -> list[Block]:
        return [Block(e.index, e.slice.offset, e.slice.nbytes) for e in self._idle() if e.slice is not None]

    def _idle(self) -> Iterator[Entry]:
        return (entry for entry in self._table.entries if self.idle(entry))

    def idle(self, entry: Entry) -> bool:
        """Whether it is on the device, nobody uses it, and it may leave."""
        return entry.residency is Residency.DEVICE and not entry.pins and not entry.size.stays

    def drop(self, entry: Entry) -> None:
        """Leave the device; the copy there is clean, so nothing moves."""
        assert entry.slice is not None and not entry.pins
        self._arena.give(entry.slice, entry.uploaded, entry.read)
        entry.slice = None
        if entry.lease is None and entry.home_slice is None:
            self._table.move(entry, Residency.DISK)
        else:
            self._table.move(entry, Residency.WRITING if entry.unwritten else Residency.HOST)

    # -- copies -------------------------------------------------------------------------------------

    def upload(self, entry: Entry, piece: Slice) -> None:
        """Start the copy of this rank's part into the slice, and the gather of the others'."""
        self._table.move(entry, Residency.UPLOADING)
        try:
            with self._table.timeline.span(Row.UPLOADS, entry.size.title, entry.size.part_nbytes):
                self._table.changed.without_lock(lambda: self._copy_part(entry, piece))
            self.gather(entry, piece, entry.copied)
        except Exception as error:  # what is under way may still write there: the slice is not used again
            self._table.fail(error, entry)
            raise
        entry.slice = piece
        self._table.move(entry, Residency.DEVICE)

    def _copy_part(self, entry: Entry, piece: Slice) -> None:
        whole, start = self._arena.view(piece), 0
        part = self._part(entry)
        for stretch in entry.size.share:
            source = part[start : start + len(stretch)]
            entry.copied = self._device.upload(whole[stretch.start : stretch.stop], source, piece.after)
            start += len(stretch)
        entry.uploaded = entry.copied

    def _part(self, entry: Entry) -> torch.Tensor:
        """(part_nbytes,) uint8: the partition, at home or in a lease."""
        if entry.home_slice is not None:
            return self._arena.view(entry.home_slice)
        assert entry.lease is not None
        return entry.lease.tensor(torch.uint8)

    def gather(self, entry: Entry, piece: Slice, copied: Event) -> None:
        """Fill in what other ranks have, once `copied`, this rank's part, is there."""
        if self._peers is not None:
            peers, whole = self._peers, self._arena.view(piece)
            entry.uploaded = self._table.changed.without_lock(lambda: peers.gather(whole, entry.size.share, copied))

    def stream(self, entry: Entry, leases: Sequence[Lease], read: Callable[[int, memoryview], Future]) -> None:
        """DISK to DEVICE in pieces that `read` reads into the `leases`, which are released."""
        try:
            piece = self.room_on_device(entry)
        except BudgetError:
            for each in leases:
                each.release()
            raise
        self._table.move(entry, Residency.UPLOADING)
        whole, share = self._arena.view(piece), entry.size.share
        try:
            with self._table.timeline.span(Row.UPLOADS, f"{entry.size.title} in pieces", entry.size.part_nbytes):
                entry.uploaded = self._table.changed.without_lock(
                    lambda: stream(read, leases, whole, share, self._device, piece.after)
                )
            self.gather(entry, piece, entry.uploaded)
        except BaseException as error:  # what is under way may still write there: neither is used again
            self._table.fail(error, entry)
            raise
        for each in leases:
            each.release()
        entry.slice = piece
        self._table.move(entry, Residency.DEVICE)
