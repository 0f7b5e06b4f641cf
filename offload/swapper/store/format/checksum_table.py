"""The checksums of a store's newest slots: those that a commit contains, and those of pages for every read.

Threads: the update worker alone replaces checksums, each by one assignment. Any thread takes those of a slot when it
submits a read, and compares the bytes with them, whatever is written meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offload.aio.protocols import Future
from offload.sizes import MIB
from offload.states import State
from offload.swapper.store.format import checksums as sums
from offload.swapper.store.format.checksums import ChecksumRange, Key, Slot
from offload.swapper.store.format.manifest import Extents
from offload.swapper.store.format.page_sums import PageSums

if TYPE_CHECKING:
    import torch

_MIN_CHECKSUM_NBYTES = MIB // 4
"""If a slot would have too many checksums, those of neighbours are joined until each covers this many bytes."""


class ChecksumTable:
    """The checksums of the newest slot of each unit and state."""

    def __init__(self) -> None:
        self._slots: dict[Key, Slot] = {}
        self._pages: dict[Key, PageSums] = {}

    def fill_zeros(self, places: Sequence[Mapping[State, Sequence[Extents]]]) -> None:
        """Enters the checksums of slots that were never written.

        Args:
            places: For each unit and state, the places of all slots.
        """
        for unit, row in enumerate(places):
            self._slots |= {(unit, state): sums.of_zeros(slots[0]) for state, slots in row.items()}
            self._pages |= {(unit, state): PageSums(slots[0].nbytes) for state, slots in row.items()}

    def load(self, rows: bytes, places: Sequence[Mapping[State, Sequence[Extents]]]) -> None:
        """Replaces the table by the packed table of a commit.

        Args:
            rows: The packed table.
            places: For each unit and state, the places of all slots.

        Raises:
            StoreError: If the table has not the checksums of these slots.
        """
        found = sums.unpack(rows)
        sums.check_whole(found, places)
        self._slots = found
        self._pages = {key: PageSums(sum(slot[-1][:2]), slot) for key, slot in self._slots.items()}

    def pack(self) -> torch.Tensor:
        """Returns the table as a blob stores it, int64 of shape (checksums, 5)."""
        return sums.pack(self._slots)

    def growth_nbytes(self, places: Sequence[Mapping[State, Sequence[Extents]]]) -> int:
        """Returns the bytes by which the packed table may grow.

        A new store has one checksum for each state; later each tile of an update has one.

        Args:
            places: For each unit and state, the places of all slots.
        """
        sizes = [slots[0].nbytes for row in places for slots in row.values()]
        most = sum(map(_max_checksums, sizes))
        return sums.ROW_NBYTES * max(0, most - sum(map(len, self._slots.values())))

    def pages(self, key: Key) -> PageSums:
        """Returns the checksums of the newest slot's pages. An update replaces the object."""
        return self._pages[key]

    def sum_of(self, key: Key, nbytes: int) -> int | None:
        """Returns the CRC-32C of the first `nbytes` of the newest slot; None if no checksum ends there."""
        return sums.sum_of(self._slots[key], 0, nbytes)

    def replace(self, key: Key, writes: Sequence[tuple[int, Future]], own_nbytes: int) -> None:
        """Enters the checksums of the writes to a slot. Frozen weights behind the last write keep theirs.

        Args:
            key: The unit and the state.
            writes: The start and the ended future of each write, in order, without gaps and from byte 0 on.
            own_nbytes: The bytes at the start of the slot that updates write. No checksum covers some of these
                and some behind them, since an update would replace it.
        """
        self._pages[key] = self._pages[key].renewed([(at, each.wait(), each.page_crcs()) for at, each in writes])
        new = [ChecksumRange(start, future.wait(), future.crc32c()) for start, future in writes]
        if len(new) > _max_checksums(new[-1].start + new[-1].nbytes):  # tiny tiles: sub_group_size
            own = sum(each.start < own_nbytes for each in new)
            new = [each for part in (new[:own], new[own:]) for each in sums.joined(part, _MIN_CHECKSUM_NBYTES)]
        self._slots[key] = sums.renewed(self._slots[key], new)


def _max_checksums(nbytes: int) -> int:
    """Returns the most checksums that a slot of `nbytes` may have; the blobs reserve room for them."""
    return 2 + nbytes // _MIN_CHECKSUM_NBYTES  # plus one for the remainder, one for frozen weights
