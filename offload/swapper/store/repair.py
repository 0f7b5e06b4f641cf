"""Repair: damaged bytes of a slot are replaced by the same bytes from elsewhere.

    a slot of this rank    [ range | range ✗ | range ]      the commit has a CRC-32C of each range
                                        ▲
    the same range in      the unit's other slot            the unit did not change since
                           a kept step, a fork              likewise, or it is frozen
                           the store of another rank        a replica, which has the same shard
                           the model's files                frozen weights

A copy counts only if the commit that names it has this checksum for the range, and if its bytes have it too; what the
model's files give must have it. So an older value never takes the place of a lost one. The bytes that were written are
read back. Other stores are read without a lock: the checksum tells if a process writes them meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from offload.aio import StripedFile, aligned_empty, crc32c, crc32c_joined
from offload.aio.protocols import Queue
from offload.errors import IoError, StoreError
from offload.notices import shell_command
from offload.sizes import MIB
from offload.states import State
from offload.swapper.store.folder import rank_number
from offload.swapper.store.format import (
    SLOTS,
    ChecksumRange,
    CommitRecord,
    Extents,
    Key,
    Slot,
    StoreSpec,
    layout_difference,
    sum_of,
)
from offload.swapper.store.inspection import RankFiles, is_rank, look
from offload.swapper.store.requests import bytes_of

_CHUNK_NBYTES = 8 * MIB


def cure(run: Path) -> str:
    """Returns what a message about damaged bytes of a run tells the user to do."""
    return (
        f"`{shell_command('verify', '--repair', run)}` mends what another place has (frozen weights of a script's run "
        "with --model FOLDER), and says what a resume takes"
    )


FirstValues = Callable[[int, int, int], memoryview | None]
"""Makes `nbytes` of a unit's weights from byte `start` on, from the model's files; None if these do not give them."""


def lengthen(file: StripedFile, nbytes: int) -> list[str]:
    """Gives the files of states of `nbytes` bytes that were cut their size again, with zeros.

    Returns a line for each. The caller must compare all data: bytes that a commit names may be lost.
    """
    lines = []
    for part, size in zip(file.parts(), file.layout.file_nbytes(nbytes), strict=True):
        if (have := part.size()) < size:
            os.posix_fallocate(part.descriptors.buffered, have, size - have)
            lines.append(f"{part.path} is cut short: {have} bytes of {size}")
    return lines


class _Copy(NamedTuple):
    """A commit that may have true copies."""

    files: RankFiles
    record: CommitRecord
    table: Mapping[Key, Slot]


class Copies:
    """The places that may have true copies of a store's bytes, as they are now. Threads must not share an object."""

    def __init__(
        self, folder: Path, spec: StoreSpec, file: StripedFile, queue: Queue, first_values: FirstValues | None = None
    ) -> None:
        """`folder` is the rank's folder on the first drive, `file` its states, open for writing."""
        self._folder, self._spec, self._file, self._queue = folder, spec, file, queue
        self._first_values = first_values
        self._places = spec.places()

    def mend(self, key: Key, slot: int, damaged: ChecksumRange) -> str | None:
        """Replaces a damaged range durably by a true copy, and reads it back.

        Returns where the copy is; None if there is none, or if the drive does not keep what is written.
        """
        place = self._places[key[0]][key[1]][slot]
        for where, chunks in self._candidates(key, place, damaged):
            with contextlib.suppress(IoError):  # no copy: the caller reports the bytes as damaged
                if _crc(chunks()) == damaged.crc and self._write(place, damaged.start, chunks()) == damaged.crc:
                    return where if self.is_right(key, slot, damaged) else None
        return None

    def is_right(self, key: Key, slot: int, wanted: ChecksumRange) -> bool:
        """Reads a range of a slot, and returns True if it can be read and has its checksum."""
        try:
            return _crc(self._read(self._file, self._places[key[0]][key[1]][slot], wanted)) == wanted.crc
        except IoError:
            return False

    def _candidates(
        self, key: Key, place: Extents, damaged: ChecksumRange
    ) -> Iterator[tuple[str, Callable[[], Iterable[memoryview]]]]:
        unit, state = key
        start, nbytes, crc = damaged
        for files, record, table in self._commits:
            if sum_of(table.get(key, ()), start, nbytes) != crc:
                continue
            assert files.manifest is not None, "a commit that is whole has one"
            copy = files.manifest.spec.places()[unit][state][record.slots[unit]]
            here = files.folder == self._folder
            if copy.nbytes != place.nbytes or (
                here and copy.extents_of(start, nbytes) == place.extents_of(start, nbytes)
            ):
                continue
            with contextlib.suppress(IoError), files.open_states() as file:
                yield f"slot {SLOTS[record.slots[unit]]} of {files.folder}", partial(self._read, file, copy, damaged)
        frozen = self._spec.frozen[unit] if self._spec.frozen else 0
        if self._first_values is not None and state is State.WEIGHT and start >= place.nbytes - frozen:
            with contextlib.suppress(StoreError, IoError):
                if (values := self._first_values(unit, start, nbytes)) is not None:
                    yield "the model's files", lambda: [values]

    @cached_property
    def _commits(self) -> list[_Copy]:
        """The commits of all stores beside this one that have its layout: its run's first."""
        run = self._folder.parent
        runs = [run, *sorted(folder for folder in run.parent.iterdir() if folder != run)]
        copies: list[_Copy] = []
        for folder in (
            rank for run in runs for rank in sorted(run.glob("rank*")) if rank_number(rank.name) is not None
        ):
            # A folder that cannot be read, or is not what its name says, has no copies.
            with contextlib.suppress(StoreError, OSError):
                files = look(folder) if is_rank(folder) else None
                if files is None or files.manifest is None or files.drive:
                    continue
                if layout_difference(self._spec, files.manifest.spec) is None:
                    copies += [_Copy(files, commit.record, commit.table) for commit in files.whole]
        return copies

    def _read(self, file: StripedFile, place: Extents, wanted: ChecksumRange) -> Iterator[memoryview]:
        """Yields the bytes of a range in chunks. The next chunk reuses the memory."""
        buffer = aligned_empty(min(_CHUNK_NBYTES, wanted.nbytes))
        for start in range(0, wanted.nbytes, len(buffer)):
            chunk = buffer[: min(len(buffer), wanted.nbytes - start)]
            self._queue.read(*bytes_of(file, place, wanted.start + start, len(chunk)), chunk).wait()
            yield chunk

    def _write(self, place: Extents, at: int, chunks: Iterable[memoryview]) -> int:
        """Writes chunks to a slot durably, and returns their checksum."""
        crc = 0
        for chunk in chunks:
            self._queue.write(*bytes_of(self._file, place, at, len(chunk)), chunk).wait()
            crc, at = crc32c_joined(crc, crc32c(chunk), len(chunk)), at + len(chunk)
        self._file.sync()
        return crc


def _crc(chunks: Iterable[memoryview]) -> int:
    crc = 0
    for chunk in chunks:
        crc = crc32c(chunk, crc)
    return crc
