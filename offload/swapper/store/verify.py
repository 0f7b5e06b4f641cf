"""Reads all that a commit names and compares it with the checksums that the commit holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from offload.aio import StripedFile, aligned_empty, crc32c_joined
from offload.aio.protocols import Future, Queue
from offload.errors import IoError
from offload.sizes import MIB
from offload.states import State
from offload.swapper.store.format.checksums import Key, Slot, Stretch
from offload.swapper.store.format.manifest import Place
from offload.swapper.store.requests import bytes_of

_CHUNK_NBYTES = 8 * MIB
_CHUNKS = 4
"""Buffers: one is waited for while the others are read."""


class Damage(NamedTuple):
    """Bytes of a slot that are not what was written, or cannot be read."""

    state: str
    unit: str
    slot: str
    """A or B."""
    path: str
    offset: int
    """In the states file over all drives."""
    nbytes: int
    reason: str

    def __str__(self) -> str:
        what = f"{self.state} of {self.unit}, slot {self.slot}"
        return f"{what}: {self.nbytes} bytes at offset {self.offset} of {self.path}: {self.reason}"


class _Chunk(NamedTuple):
    key: Key
    stretch: Stretch
    start: int
    nbytes: int


class _Comparison:
    """The comparison of a commit's stretches with their checksums, chunk after chunk in the order of the table."""

    def __init__(
        self,
        file: StripedFile,
        places: Sequence[Mapping[State, Sequence[Place]]],
        slots: Sequence[int],
        title: Callable[[int], str],
    ) -> None:
        self._file = file
        self._places = places
        self._slots = slots
        self._title = title
        self._known: tuple[Stretch, int] | None = None
        """The stretch under way and its sum so far."""
        self._bad: Stretch | None = None
        """The last stretch that was reported."""

    def place(self, key: Key) -> Place:
        return self._places[key[0]][key[1]][self._slots[key[0]]]

    def uncovered(self, table: Mapping[Key, Slot]) -> Iterator[Damage]:
        """Yields the slots of which `table` does not hold the sums of all bytes."""
        for unit, row in enumerate(self._places):
            for state in row:
                key = (unit, state)
                covered, nbytes = sum(stretch.nbytes for stretch in table.get(key, ())), self.place(key).nbytes
                if covered != nbytes:
                    yield self._damage(key, 0, nbytes, f"sums are known of {covered} bytes only")

    def finish(self, chunk: _Chunk, future: Future) -> Damage | None:
        """Waits for a chunk and returns what is wrong with it, or with its stretch that it ends; once a stretch."""
        stretch = chunk.stretch
        try:
            future.wait()
            crc = future.crc32c()
        except IoError as error:
            told, self._bad, self._known = self._bad is stretch, stretch, None
            return None if told else self._damage(chunk.key, chunk.start, chunk.nbytes, str(error))
        before = self._known[1] if self._known is not None and self._known[0] is stretch else 0
        crc = crc32c_joined(before, crc, chunk.nbytes)
        self._known = (stretch, crc)
        last = chunk.start + chunk.nbytes == stretch.start + stretch.nbytes
        if last and crc != stretch.crc and self._bad is not stretch:
            return self._damage(chunk.key, stretch.start, stretch.nbytes, "the checksum is not the one written")
        return None

    def _damage(self, key: Key, start: int, nbytes: int, reason: str) -> Damage:
        unit, state = key
        slot = "AB"[self._slots[unit]]
        offset = self.place(key).offset(start)
        return Damage(state.value, self._title(unit), slot, self._file.path, offset, nbytes, reason)


def damages(
    file: StripedFile,
    queue: Queue,
    places: Sequence[Mapping[State, Sequence[Place]]],
    slots: Sequence[int],
    table: Mapping[Key, Slot],
    title: Callable[[int], str],
    progress: Callable[[int], None] = lambda _: None,
) -> Generator[Damage]:
    """Yields each damaged stretch of the slots that a commit names; takes 32 MiB of memory.

    Args:
        file: the states file over all drives.
        queue: reads the file.
        places: of each unit and state, all slots.
        slots: of each unit, the slot that the commit names.
        table: of each unit and state, the checksums of its stretches.
        title: from a unit to its name for people.
        progress: receives bytes as they are compared.
    """
    comparison = _Comparison(file, places, slots, title)
    yield from comparison.uncovered(table)
    buffers = [aligned_empty(_CHUNK_NBYTES) for _ in range(_CHUNKS)]
    reading: deque[tuple[_Chunk, Future]] = deque()

    def finish() -> Iterator[Damage]:
        chunk, future = reading[0]  # it stays there until it was waited for, whatever is raised
        if damage := comparison.finish(chunk, future):
            yield damage
        reading.popleft()
        progress(chunk.nbytes)

    try:
        for count, chunk in enumerate(_chunks(table)):
            if len(reading) == _CHUNKS:
                yield from finish()
            buffer = buffers[count % _CHUNKS][: chunk.nbytes]
            of, at = bytes_of(file, comparison.place(chunk.key), chunk.start, chunk.nbytes)
            reading.append((chunk, queue.read(of, at, buffer, checksum=True)))
        while reading:
            yield from finish()
    finally:
        for _, future in reading:
            try:
                future.wait()
            except OSError:
                pass  # whoever stops looking has found enough


def first_damage(
    file: StripedFile,
    queue: Queue,
    places: Sequence[Mapping[State, Sequence[Place]]],
    slots: Sequence[int],
    table: Mapping[Key, Slot],
    title: Callable[[int], str],
) -> Damage | None:
    """The first of `damages`."""
    found = damages(file, queue, places, slots, table, title)
    try:
        return next(found, None)
    finally:
        found.close()  # what it reads ahead ends before the file is closed


def _chunks(table: Mapping[Key, Slot]) -> Iterator[_Chunk]:
    for key, slot in table.items():
        for stretch in slot:
            end = stretch.start + stretch.nbytes
            for start in range(stretch.start, end, _CHUNK_NBYTES):
                yield _Chunk(key, stretch, start, min(_CHUNK_NBYTES, end - start))
