"""Reads all that a commit names and compares it with the checksums that the commit holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from offload.aio import StripedFile, aligned_empty, crc32c_joined
from offload.errors import IoError
from offload.sizes import MIB
from offload.swapper.states import State
from offload.swapper.store.manifest import Place
from offload.swapper.store.requests import Future, Queue, bytes_of
from offload.swapper.store.sums import Key, Slot, Stretch

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


def damages(
    file: StripedFile,
    queue: Queue,
    places: Sequence[Mapping[State, Sequence[Place]]],
    slots: Sequence[int],
    table: Mapping[Key, Slot],
    title: Callable[[int], str],
    progress: Callable[[int], None] = lambda _: None,
) -> Generator[Damage]:
    """Each stretch of the slots `slots` that is damaged. `progress` is told of bytes as they are compared.

    Takes 32 MiB of memory.
    """
    buffers = [aligned_empty(_CHUNK_NBYTES) for _ in range(_CHUNKS)]

    def place(key: Key) -> Place:
        return places[key[0]][key[1]][slots[key[0]]]

    def damage(key: Key, start: int, nbytes: int, reason: str) -> Damage:
        unit, state = key
        slot = "AB"[slots[unit]]
        return Damage(state.value, title(unit), slot, file.path, place(key).offset(start), nbytes, reason)

    for unit, row in enumerate(places):
        for state in row:
            covered = sum(stretch.nbytes for stretch in table.get((unit, state), ()))
            if covered != place((unit, state)).nbytes:
                yield damage((unit, state), 0, place((unit, state)).nbytes, f"sums are known of {covered} bytes only")
    reading: deque[tuple[_Chunk, Future]] = deque()
    chunks = _chunks(table)
    known: tuple[Stretch, int] | None = None  # the stretch under way and its sum so far
    bad: Stretch | None = None  # one that was told already
    count = 0
    more = True
    try:
        while more or reading:
            while more and len(reading) < _CHUNKS:
                chunk = next(chunks, None)
                if chunk is None:
                    more = False
                    break
                buffer = buffers[count % _CHUNKS][: chunk.nbytes]
                of, at = bytes_of(file, place(chunk.key), chunk.start, chunk.nbytes)
                reading.append((chunk, queue.read(of, at, buffer, checksum=True)))
                count += 1
            if not reading:
                break
            chunk, future = reading[0]
            stretch = chunk.stretch
            try:
                future.wait()
                crc = future.crc32c()
            except IoError as error:
                if bad is not stretch:
                    yield damage(chunk.key, chunk.start, chunk.nbytes, str(error))
                bad, known = stretch, None
            else:
                before = known[1] if known is not None and known[0] is stretch else 0
                crc = crc32c_joined(before, crc, chunk.nbytes)
                known = (stretch, crc)
                last = chunk.start + chunk.nbytes == stretch.start + stretch.nbytes
                if last and crc != stretch.crc and bad is not stretch:
                    yield damage(chunk.key, stretch.start, stretch.nbytes, "the checksum is not the one written")
            reading.popleft()
            progress(chunk.nbytes)
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
