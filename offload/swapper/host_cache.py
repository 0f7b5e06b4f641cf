"""The pager's host side: which unit's weights have a lease, whose may be taken, and what is read into them."""

from __future__ import annotations

from collections.abc import Callable

from offload.aio import Priority
from offload.aio.protocols import Future
from offload.sizes import PAGE, align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import HostArena, Lease
from offload.swapper.policy import Block, Limits, next_to_bring, victims
from offload.swapper.residency import Residency
from offload.swapper.store import Store
from offload.swapper.unit_table import Entry, Table, Transfer
from offload.timeline import Row


class Leases:
    """Leases of weights: homes in HOST, and those that go round. The table's lock is held in every call."""

    def __init__(self, table: Table, host: HostArena, store: Store | None) -> None:
        self._table = table
        self._host = host
        self._store = store
        self.starved = 0
        """How many wait for a lease."""
        for entry in table.entries:
            if entry.size.home is Tier.HOST:
                entry.lease = host.homes.take(entry.size.part_nbytes)
                assert entry.lease is not None, "the class of homes was sized for every home"

    # -- who has one --------------------------------------------------------------------------------

    def lease(self, nbytes: int, beyond: int = -1) -> Lease | None:
        """A weight lease: a free one, else of units that are next used after `beyond` uses."""
        going = victims(self._host.weights.space, nbytes, self._takeable(), self._distance, beyond)
        if going is None:
            return None
        for unit in going:
            self._take_lease(self._table.entries[unit])
        return self._host.weights.take(nbytes)

    def wait_for_lease(self, entry: Entry) -> None:
        """Let some weight lease become free for `entry`, or free to be taken."""
        reading = [entry for entry in self._table.entries if entry.residency is Residency.READING]
        if reading:  # ahead, they have taken the room; once one is delivered its lease is clean
            self.finish_read(max(reading, key=lambda entry: (self._table.trace.distance(entry.index), -entry.index)))
            return
        self.starved += 1
        self._table.notify()
        try:
            self._table.wait(f"waits for a lease for {entry.size.title}")
        finally:
            self.starved -= 1

    def _distance(self, unit: int) -> int:
        """Uses between now and the next use; 0 of a unit that somebody is about to bring, whose use has been told."""
        entry = self._table.entries[unit]
        return 0 if entry.pins and entry.residency is not Residency.DEVICE else self._table.trace.distance(unit)

    def _takeable(self) -> list[Block]:
        return [
            Block(e.index, e.lease.offset, e.lease.nbytes)
            for e in self._table.entries
            if e.lease is not None and self._may_take_lease_of(e)
        ]

    def _may_take_lease_of(self, entry: Entry) -> bool:
        """Whether its bytes are in the store and nobody reads them from the lease now."""
        return (
            entry.lease is not None
            and entry.size.home is Tier.DISK
            and entry.residency in (Residency.HOST, Residency.DEVICE)
            and not entry.unwritten
            and not entry.in_update
        )

    def _take_lease(self, entry: Entry) -> None:
        assert entry.lease is not None
        entry.copied.wait()  # blocks only where a copy to the device is slower than all that came after it
        entry.lease.release()
        entry.lease = None
        if entry.residency is Residency.HOST:
            self._table.move(entry, Residency.DISK)

    def forget(self, entry: Entry) -> None:
        """Take the lease of a unit whose home is DISK, where it has one; nothing of it is in use or unwritten."""
        if entry.lease is not None and entry.size.home is Tier.DISK:
            self._take_lease(entry)

    # -- what is read -------------------------------------------------------------------------------

    def start_read(self, entry: Entry, lease: Lease, priority: Priority) -> None:
        assert self._store is not None
        slot = self._store.newest[entry.index]
        future = self._store.read(entry.index, State.WEIGHT, slot, 0, lease.buffer, priority)
        entry.transfer = Transfer(lease, future)
        self._table.move(entry, Residency.READING)

    def finish_read(self, entry: Entry) -> None:
        """Wait for the read without the lock; whoever comes first delivers it."""
        transfer = entry.transfer
        assert transfer is not None
        failure: Exception | None = None
        try:
            with self._table.whole(), self._table.timeline.span(Row.WAITS, f"waits for read of {entry.size.title}"):
                self._table.changed.without_lock(transfer.future.wait)
        except Exception as error:  # after a Ctrl-C the read goes on, and somebody else will deliver it
            failure = error
        if failure is not None:
            self._table.fail(failure, entry)
            raise failure
        if entry.transfer is transfer:
            entry.transfer, entry.lease = None, transfer.lease
            self._table.move(entry, Residency.HOST)

    def read_ahead(self, limits: Limits) -> None:
        """Begin to read what the trace says comes next, as far as leases go round that hold nothing used sooner."""
        entries, trace = self._table.entries, self._table.trace

        def wanting(unit: int) -> bool:
            entry = entries[unit]
            on_disk = entry.residency is Residency.DISK and entry.lease is None
            return on_disk and not entry.updating and not self.streams(entry)

        def nbytes(unit: int) -> int:
            return entries[unit].size.part_nbytes

        while (unit := next_to_bring(trace, nbytes, wanting, limits)) is not None:
            lease = self.lease(nbytes(unit), trace.distance(unit))
            if lease is None:
                return
            self.start_read(entries[unit], lease, Priority.NORMAL)

    # -- units too large for a lease ----------------------------------------------------------------

    def streams(self, entry: Entry) -> bool:
        """Whether two leases of this unit have no room, so that it comes from DISK to the device piece by piece."""
        size = entry.size
        return size.home is Tier.DISK and 2 * align_up(size.part_nbytes) > self._host.weights.space.nbytes

    def lease_nbytes(self, entry: Entry) -> int:
        """Bytes of a lease for this unit, or for a piece of it where it streams."""
        if self.streams(entry):
            return self._host.weights.space.nbytes // 2 // PAGE * PAGE
        return entry.size.part_nbytes

    def reader(self, entry: Entry) -> Callable[[int, memoryview], Future]:
        """What begins to read the newest partition, from a byte on, into a buffer. Needs no lock."""
        store = self._store
        assert store is not None
        slot = store.newest[entry.index]

        def read(start: int, buffer: memoryview) -> Future:
            return store.read(entry.index, State.WEIGHT, slot, start, buffer, Priority.URGENT)

        return read

    # -- the end ------------------------------------------------------------------------------------

    def give_cache(self, drop_spare: Callable[[], None]) -> None:
        """See `Pager.give_cache`."""
        self._table.torn = True
        drop_spare()
        while not self._table.failure and self._host.weights.space.used_bytes:
            for entry in self._table.entries:
                if entry.residency is Residency.READING:
                    self.finish_read(entry)
                if self._may_take_lease_of(entry):
                    self._take_lease(entry)
            if self._host.weights.space.used_bytes:
                self._table.wait("waits for a unit that is streamed")
        if not self._table.failure:
            self._host.drop_cache()
        self._table.torn = False

    def close(self) -> None:
        """Wait for reads in flight; nobody needs them any more, and their errors have no meaning now."""
        for entry in self._table.entries:
            if entry.transfer is not None:
                transfer, entry.transfer = entry.transfer, None
                try:
                    transfer.future.wait()
                except OSError:
                    pass
                transfer.lease.release()
