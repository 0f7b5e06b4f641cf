"""Where bytes are, and every way in which they may move.

The pager keeps one residency for each unit: that of its WEIGHT partition, the only state that travels
whole. The other states stay at home; an update streams them through tiles and puts them back.

    state       what is true in it
    ---------   ---------------------------------------------------------------------------------
    DISK        The newest copy is in the store's newest slot and nowhere else.
    READING     A lease is being filled from that slot; the entry's transfer owns lease and read.
    HOST        A lease holds the newest copy, and no write of it is in flight: it is in the store too,
                or HOST is its home. Unless it is home, the lease may be taken away for another unit.
                With several ranks, a partition at home on the DEVICE is here too: at hand, not gathered.
    WRITING     A lease holds the newest copy; its write to the store is in flight. The lease stays.
    UPLOADING   The copy of a lease into a slice of the device arena, and the gather of what other ranks hold
                of the unit, are being started by the thread that acquires. Of a unit that is too large for a
                lease, piece after piece is being read and copied.
    DEVICE      A slice holds the newest copy, or will when the event `uploaded` is done, until when the lease
                is read. A lease may hold it as well (`lease is not None`): the write of an update may still
                be in flight (`unwritten`), or there was room to keep it.
    FAILED      A read, write or kernel failed on this unit. Memory and store may disagree; nothing is
                read from it again, and the store opens at its last committed step.

              start_read            finish_read             upload              upload
        DISK ────────────► READING ─────────────► HOST ───────────► UPLOADING ───────────► DEVICE
         ▲ │                                      ▲ ▲ │                  ▲                   │
         │ │                              written │ │ │ publish          │ upload            │
         │ │              publish                 │ │ ▼                  │                   │
         │ └────────────────────────────────────► WRITING ───────────────┤                   │
         ├──────────────────────────── stream ───────────────────────────┘                   │
         ├──────────────── take_lease ────────────── HOST                                    │
         └──────────────────────────────── drop: to WRITING or HOST where the lease is kept ◄┘

A device copy is always clean: only an update writes weights, and only in HOST. So leaving the device
is a drop and never a copy. `Table.move` is the one place that assigns a residency; it refuses every
arrow that `ARROWS` does not list.
"""

from __future__ import annotations

import enum
from typing import Final


class Residency(enum.Enum):
    """Where the newest copy of a unit's weights is now; the module's docstring says what each means."""

    DISK = "disk"
    READING = "reading"
    HOST = "host"
    WRITING = "writing"
    UPLOADING = "uploading"
    DEVICE = "device"
    FAILED = "failed"


_R = Residency

ARROWS: Final[dict[tuple[Residency, Residency], str]] = {
    (_R.DISK, _R.READING): "start_read",
    (_R.READING, _R.HOST): "finish_read",
    (_R.HOST, _R.UPLOADING): "upload",
    (_R.WRITING, _R.UPLOADING): "upload",
    (_R.DISK, _R.UPLOADING): "stream",
    (_R.UPLOADING, _R.DEVICE): "upload",
    (_R.HOST, _R.DISK): "take_lease",
    (_R.WRITING, _R.HOST): "flushed",
    (_R.DEVICE, _R.DISK): "drop",
    (_R.DEVICE, _R.HOST): "drop",
    (_R.DEVICE, _R.WRITING): "drop",
    # An update's result: the newest copy is a fresh lease, or the other slot where none was free.
    (_R.DISK, _R.WRITING): "weights_ready",
    (_R.HOST, _R.WRITING): "weights_ready",
    (_R.DISK, _R.HOST): "weights_ready",
    **{(state, _R.FAILED): "fail" for state in _R if state is not _R.FAILED},
}
"""Every arrow that is allowed, with the function of the pager, or of a part of it, that performs it."""
