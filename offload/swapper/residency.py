"""States of a unit's weights, and the transitions between them.

The pager keeps one residency for each unit: that of this rank's WEIGHT partition, the only state that moves as one.
The other states stay in their tier; an update streams them through tiles and writes them back.

    state       invariant
    ---------   ---------------------------------------------------------------------------------
    DISK        The newest copy is in the store's newest slot, or in the model's own files, and nowhere else.
    READING     A host buffer is being filled from that slot; the entry's transfer owns buffer and read.
    HOST        A host buffer holds the newest copy, and no write of that copy is in flight: the store contains
                it as well, or the unit's tier is HOST. If the tier is DISK, the buffer may be evicted.
                With several ranks, a partition whose tier is DEVICE is HOST as well: at hand, not gathered.
    WRITING     A host buffer holds the newest copy, whose write to the store is in flight. The buffer stays.
    UPLOADING   The thread that acquires the unit is starting the copy from a host buffer to a device buffer, and
                the gather of the other ranks' partitions. A unit that is too large for a host buffer is being
                read and copied chunk by chunk. On a CPU with one rank such a unit is read into its device
                buffer instead (`reading_in_place`): the entry's transfer owns the read, the entry the buffer.
    DEVICE      A device buffer holds the newest copy, or will once the event `uploaded` is done; the host buffer
                is read until then. A host buffer may hold the copy as well (`host_buffer is not None`): the write of an
                update may still be in flight (`unwritten`), or there was room to keep the buffer.
    FAILED      A read, write or kernel failed on this unit. Memory and store may disagree; nothing is
                read from the unit again, and the store opens at its last committed step.

              start_read            finish_read             upload              upload
        DISK ────────────► READING ─────────────► HOST ───────────► UPLOADING ───────────► DEVICE
         ▲ │                                      ▲ ▲ │                  ▲                   │
         │ │                              flushed │ │ │ weights_ready    │ upload            │
         │ │           weights_ready              │ │ ▼                  │                   │
         │ └────────────────────────────────────► WRITING ───────────────┤                   │
         ├──────────────────── stream, or a read in place ───────────────┘                   │
         ├──────────────── evict ────────────── HOST                                    │
         └───────────────────── drop: to WRITING or HOST if the host buffer is kept ◄────────┘

A device copy is always clean: only an update or a load writes weights, and only in their tier, a host buffer or the
store. (A partition of tier DEVICE is no copy: it is written in place.) So a unit leaves the device by a drop, never by
a copy. `UnitTable.move` is the only code that assigns a residency, and refuses every arrow that `ARROWS`
does not list.
"""

from __future__ import annotations

import enum
from typing import Final


class Residency(enum.Enum):
    """Location of the newest copy of a unit's weights; the module's docstring defines each value."""

    DISK = "disk"
    READING = "reading"
    HOST = "host"
    WRITING = "writing"
    UPLOADING = "uploading"
    DEVICE = "device"
    FAILED = "failed"

    # Enum's own hash is a function of Python, and `UnitTable.move` hashes two members. Each equals itself alone.
    __hash__ = object.__hash__


_R = Residency

ARROWS: Final[dict[tuple[Residency, Residency], str]] = {
    (_R.DISK, _R.READING): "start_read",
    (_R.READING, _R.HOST): "finish_read",
    (_R.HOST, _R.UPLOADING): "upload",
    (_R.WRITING, _R.UPLOADING): "upload",
    (_R.DISK, _R.UPLOADING): "stream",  # or `DeviceCache.start_read`
    (_R.UPLOADING, _R.DEVICE): "upload",
    (_R.HOST, _R.DISK): "evict",
    (_R.WRITING, _R.HOST): "flushed",
    (_R.DEVICE, _R.DISK): "drop",
    (_R.DEVICE, _R.HOST): "drop",
    (_R.DEVICE, _R.WRITING): "drop",
    # An update's result: the newest copy is in a new host buffer, or in the other slot if no buffer was free.
    (_R.DISK, _R.WRITING): "weights_ready",
    (_R.HOST, _R.WRITING): "weights_ready",
    (_R.DISK, _R.HOST): "weights_ready",
    # No transition leaves FAILED: the engine stops, and the next process opens the store at its last commit.
    **{(state, _R.FAILED): "fail" for state in _R if state is not _R.FAILED},
}
"""Every allowed transition, with the function of the pager (or of its host or device side) that performs it."""
