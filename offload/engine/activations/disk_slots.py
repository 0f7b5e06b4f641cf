"""Room on the drives for the inputs of checkpointed units: slots in unlinked files, added as a forward needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio.protocols import Future, Queue
from offload.sizes import align_up
from offload.swapper.store import Written
from offload.swapper.store.spill_file import SpillFile

_FIRST_SLOTS = 8
"""Slots of the first file; each further file has as many as there are already."""


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
        self._files: list[SpillFile] = []
        self._slots: dict[int, int] = {}
        """Number of slots of each size."""

    def take(self, nbytes: int) -> Slot:
        """Returns a slot of at least `nbytes`.

        Raises:
            StoreError: if a drive has no room for more.
        """
        size = align_up(nbytes)
        free = self._free.setdefault(size, [])
        if not free:
            count = self._slots.get(size, 0) or _FIRST_SLOTS
            sizes = dict.fromkeys(range(count), size)
            file = SpillFile(self._paths, sizes, self._queue, self._written, what="inputs of checkpointed units")
            self._files.append(file)
            self._slots[size] = self._slots.get(size, 0) + count
            free += [Slot(file, key, size) for key in reversed(range(count))]
        return free.pop()

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
            self._files.pop().close()
