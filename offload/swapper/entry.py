"""What the pager knows of one unit: its size, and where its weights are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offload.swapper.memory.device import DONE, Event
from offload.swapper.memory.device_arena import Slice
from offload.swapper.memory.host_arena import Lease
from offload.swapper.residency import Residency, Tier
from offload.swapper.store import Future


class UnitSize(NamedTuple):
    """What the pager must know of a unit."""

    name: str
    nbytes: int
    """Bytes of all its weights, as they lie on the device."""
    home: Tier
    share: tuple[range, ...]
    """Which of these bytes are this rank's WEIGHT partition, in the order in which they lie there."""

    @property
    def title(self) -> str:
        """The name, for words."""
        return self.name or "the root"

    @property
    def part_nbytes(self) -> int:
        """Bytes of this rank's WEIGHT partition."""
        return sum(len(stretch) for stretch in self.share)

    @property
    def stays(self) -> bool:
        """Whether the slice on the device is the home: one rank has the whole unit, and that is where it lives."""
        return self.home is Tier.DEVICE and self.part_nbytes == self.nbytes

    @property
    def start(self) -> Residency:
        """Where the weights are before the first use."""
        if self.home is Tier.DISK:
            return Residency.DISK
        return Residency.DEVICE if self.stays else Residency.HOST


class Transfer(NamedTuple):
    """A read in flight, with the lease that it fills."""

    lease: Lease
    future: Future


@dataclass(eq=False)
class Entry:
    """One unit's weights. Only the pager touches it, under the lock; only `Table.move` assigns the residency."""

    index: int
    size: UnitSize
    residency: Residency
    lease: Lease | None = None
    slice: Slice | None = None
    home_slice: Slice | None = None
    """The partition's home on the device, where a unit that is in use lies elsewhere, gathered from all ranks."""
    transfer: Transfer | None = None
    copied: Event = DONE
    """The end of the last copy out of the lease, or out of the home on the device."""
    uploaded: Event = DONE
    """When the slice is filled: after that copy, and with several ranks the gather."""
    read: Event = DONE
    """The last compute that was started on the slice."""
    pins: int = 0
    """Uses on the device that have begun and not ended; a pinned unit is never dropped."""
    updating: bool = False
    """An update is scheduled and not delivered: nobody may read these weights."""
    in_update: bool = False
    """The update worker has begun with it: the lease must stay."""
    unwritten: bool = False
    """The lease's write to the store is in flight: the lease must stay."""
    updates: int = 0
    """How often the weights have changed; a view saved before a change must not be read after it."""
