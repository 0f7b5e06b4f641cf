"""Room on the drives for the inputs of checkpointed units: slots in unlinked files, added as a forward needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio.protocols import Future, Queue
from offload.errors import StoreError
from offload.sizes import align_up
from offload.swapper.store import Written
from offload.swapper.store.spill_file import SpillFile

_FIRST_SLOTS = 8
"""Slots of the first file of a size; each further file has as many as there are already."""


class Slot(NamedTuple):
    """Room for one input."""

    file: SpillFile
    key: int
    size: int

    def read(self, buffer: memoryview) -> Future:
        """Starts to fill `buffer` with the bytes of the slot."""
        return self.file.read(self.key, 0, buffer)

    def write(self, buffer: memoryview) -> Future:
        """Starts to write `buffer` to the slot; it must not change until the future is done."""
        return self.file.write(self.key, 0, buffer)


class DiskSlots:
    """Slots for inputs. The lock of `KeptInputs` guards every call; the caller waits for all futures."""

    def __init__(self, paths: Sequence[str | Path], queue: Queue, written: Written) -> None:
        """Creates no file yet.

        Args:
            paths: a folder on each drive.
            queue: reads and writes the files.
            written: counts the bytes written to each drive.
        """
        self._paths, self._queue, self._written = paths, queue, written
        self._free: dict[int, list[Slot]] = {}
        self._files: dict[SpillFile, tuple[int, int]] = {}
        """Size and number of the slots of each file."""
        self._slots: dict[int, int] = {}
        """Number of slots of each size."""

    def take(self, nbytes: int) -> Slot:
        """Returns a slot of at least `nbytes`, of which at most half stays empty.

        Raises:
            StoreError: if a drive has no room for one more.
        """
        size = align_up(nbytes)
        fitting = [each for each, free in self._free.items() if free and size <= each <= 2 * size]
        if not fitting:
            # Otherwise sequences of ever new lengths would each leave a file behind.
            self._close_idle()
            self._grow(size)
        return self._free[min(fitting, default=size)].pop()

    def _grow(self, size: int) -> None:
        """Adds slots of a size, as many as there are already, or fewer where a drive has no room for these.

        Raises:
            StoreError: if a drive has no room for one more.
        """
        count = self._slots.get(size, 0) or _FIRST_SLOTS
        while True:
            sizes = dict.fromkeys(range(count), size)
            try:
                what = "inputs of checkpointed units"
                file = SpillFile(
                    self._paths, sizes, self._queue, self._written, what=what, title=f"{what} in slot {{}}".format
                )
                break
            except StoreError:
                if count == 1:
                    raise
                count //= 2
        self._files[file] = size, count
        self._slots[size] = self._slots.get(size, 0) + count
        self._free.setdefault(size, []).extend(Slot(file, key, size) for key in reversed(range(count)))

    def _close_idle(self) -> None:
        """Closes the files of which no slot is in use, and so frees their room."""
        unused = Counter(slot.file for free in self._free.values() for slot in free)
        for file in [each for each, (_, count) in self._files.items() if unused[each] == count]:
            size, count = self._files.pop(file)
            self._free[size] = [slot for slot in self._free[size] if slot.file is not file]
            self._slots[size] -= count
            if not self._slots[size]:
                del self._slots[size], self._free[size]
            file.close()

    def give(self, slot: Slot) -> None:
        """Returns a slot whose reads and writes are done."""
        self._free[slot.size].append(slot)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, free or not."""
        return sum(size * count for size, count in self._slots.items())

    def close(self) -> None:
        """Closes the files, which frees their room. Idempotent."""
        while self._files:
            self._files.popitem()[0].close()
