"""Recovery: which commit a run resumes from, the comparison of its data, and slots that an edit has overwritten.

The newest record with a valid checksum wins. From the files two cases are hard to tell apart: a commit that a power cut
interrupted, and a commit that was damaged later. In the first, the previous commit is complete; in the second, its
slots have been overwritten. So if anything looks wrong, all data of a commit is checked against its checksums before
the commit is taken.

Nothing in this module writes, except `Undo`. `Store` calls these functions and changes the files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio import DirectFile, File, StripedFile, aligned_empty, crc32c, crc32c_joined
from offload.aio.protocols import Future, Queue, wait_for_all
from offload.errors import IoError, StoreError
from offload.fileio.inner_files import check_holes, inner_opener, open_inner
from offload.notices import shell_command
from offload.records import fields, read, text, whole
from offload.sizes import MIB, PAGE, count_of
from offload.states import State
from offload.swapper.store.folder import RESHARDED, cut_short, is_there, read_finished, unlink, writing_in_place
from offload.swapper.store.format import (
    SLOTS,
    Blob,
    ChecksumRange,
    CommitRecord,
    Extent,
    Extents,
    Key,
    Records,
    Slot,
    StoreManifest,
    StoreSpec,
    own_nbytes,
    read_if_any,
    read_manifest,
    sum_of,
    unpack,
    was_committed,
)
from offload.swapper.store.inspection import COMMIT_BEGUN, blob_of, place_in, same_but_places, was_begun
from offload.swapper.store.requests import Joined, bytes_of

_CHUNK_NBYTES = 8 * MIB
"""Bytes that are read, compared or copied at a time."""
_CHUNKS = 4
"""Number of buffers of a comparison: one chunk is compared while the others are read."""

Places = Sequence[Mapping[State, Sequence[Extents]]]
"""For each unit and state, the places of all slots."""

# -- a start -------------------------------------------------------------------------------------------


def check_startable(folders: Sequence[Path], over: bool) -> None:
    """Raises `StoreError` if a folder may be needed: it holds a run that did not end, or a drive of another store.

    With `over`, commits of this run may be deleted. Raises `IoError` if a file exists and cannot be read: it may belong
    to another run.
    """
    first, ended = folders[0], read_finished(folders[0].parent) is not None
    if (first.parent / RESHARDED).exists():
        raise StoreError(
            f"another start is changing the number of ranks of the run in {first.parent}; wait until it has ended"
        )
    place = _place_of(first)[0]
    for drive, folder in enumerate(folders):
        store_id, number, first_drive = _place_of(folder)
        if store_id is not None and number and (number != drive or store_id != place):
            # If this run ended, an interrupted removal has left these files. Otherwise their run may need them: its
            # first drive may just not be mounted.
            if not (ended and number == drive):
                raise StoreError(
                    f"{folder} holds drive {number} of a run whose first drive is {first_drive}: mount that drive and "
                    "give the drives in their former order, or choose another run name, or delete these files with "
                    f"`{shell_command('rm', folder.parent)}`"
                )
        elif was_committed(folder) and not (over and not drive) and read_finished(folder.parent) is None:
            raise StoreError(
                f'{folder} holds a run that did not end; resume the run with "resume": "auto" in the "offload" block '
                "(offload train: --resume auto) and its drives in their former order, or choose another run name, or "
                f"delete the run with `{shell_command('rm', folder.parent)}`"
            )


def check_one_run(folders: Sequence[tuple[str | Path, str | None]]) -> None:
    """Raises `StoreError` if the folders of ranks belong to two runs.

    Folders of two runs of one model look alike. Every checksum would be right, and the weights a mixture of both runs.
    `folders` contains the folder and the id of the run of each rank. An id of None is unknown, and matches every id.
    """
    known = [(folder, run_id) for folder, run_id in folders if run_id is not None]
    for folder, run_id in known:
        if run_id != known[0][1]:
            raise StoreError(
                f"{folder} has the swap files of another run than {known[0][0]}: run id {run_id}, expected "
                f"{known[0][1]}. Folders of two runs have been mixed: put the folders of all ranks of one run beside "
                f"each other (`{shell_command('inspect', Path(folder).parent)}` shows the run id of each), or go back "
                "to a checkpoint"
            )


def _place_of(folder: Path) -> tuple[str | None, int, Path | None]:
    """Returns the identity that a rank's folder claims. Raises `IoError` if its manifest exists and cannot be read."""
    return place_in(read_if_any(folder / "manifest.json"), folder)


# -- choice of a commit --------------------------------------------------------------------------------


def _read_blob(folder: Path, record: CommitRecord) -> Blob | None:
    """Returns the blob of a record, None if damaged. Raises `IoError` if the file exists and cannot be read."""
    return blob_of(record, read_if_any(folder / f"blob.{record.blob}"))


def find_newest(
    folder: Path,
    file_records: Records,
    units: int,
    suspect: bool,
    find_damage: Callable[[CommitRecord, Blob], Damage | None],
) -> tuple[CommitRecord, str | None]:
    """Returns the newest commit that can be opened, and a line for the user if a step may be lost.

    If a page is damaged, a record lost, or damage was seen before (`suspect`), no commit is taken without
    `find_damage`. That function compares all data of a commit with its checksums and returns the first damage, or
    None. Raises `StoreError` if there is no record, if a record is of another model, or if every commit is damaged.
    Raises `IoError` if a blob cannot be read. That is no damage: the next start may read it.
    """
    records = file_records.valid
    if not records:
        if file_records.other_format is not None:
            read_manifest(folder / "manifest.json")  # raises the error that names the format and its version
        if not is_there(folder / "commit"):
            raise StoreError(
                f"{folder / 'commit'} is missing, which alone says where the newest states are: the run cannot be "
                f"resumed, fork a step that it has kept (`{shell_command('log', folder.parent)}` lists them), or go "
                f"back to a checkpoint; `{shell_command('rm', folder.parent)}` deletes what is left",
                damaged=True,
            )
        raise StoreError(
            f"{folder} contains no commit record with a valid checksum: the run cannot be resumed, go back to a "
            "checkpoint",
            damaged=True,
        )
    doubtful = suspect or file_records.doubt is not None
    wrong = [] if file_records.doubt is None else [file_records.doubt]
    for record in records:
        if len(record.slots) != units:
            raise StoreError(
                f"{folder} belongs to another model: the run contains {count_of(len(record.slots), 'unit')}, this "
                f'model {units}; resume with the "units", "experts", "vocabulary" and expert_parallel that the run '
                f"had, choose another run name, or remove the run with `{shell_command('rm', folder.parent)}`"
            )
        blob = _read_blob(folder, record)
        if blob is None:
            wrong.append(f"blob.{record.blob} of step {record.step} is damaged")
            continue
        if record is records[0] and not doubtful:
            begun = was_begun(folder, file_records)
            return record, f"the run resumes after step {record.step}: {COMMIT_BEGUN}" if begun else None
        damage = find_damage(record, blob)
        if damage is None:
            why = f" ({'; '.join(wrong)})" if wrong else ""
            return record, (
                f"a commit or its record looked damaged{why}; all data of step {record.step} was compared and is "
                "intact, and the run resumes from it"
            )
        wrong.append(f"step {record.step}: {damage}")
    raise StoreError(
        f"{folder}: no commit is intact: {'; '.join(wrong)}; the run cannot be resumed: fork a step that it has kept "
        f"(`{shell_command('log', folder.parent)}` lists them), or go back to a checkpoint",
        damaged=True,
    )


def record_at(folder: Path, serial: int, records: Sequence[CommitRecord]) -> CommitRecord:
    """Returns the record number `serial`, on which all ranks agreed; raises `StoreError` if it is not in `records`."""
    for record in records:
        if record.serial == serial:
            return record
    have = ", ".join(str(record.serial) for record in records)
    raise StoreError(
        f"{folder} holds commits {have}, but the ranks agreed on commit {serial}, the last that all of them hold: "
        "these folders do not belong to one run"
    )


def load_blob(folder: Path, record: CommitRecord) -> Blob:
    """Returns the blob of the record that was chosen; raises `StoreError` if the blob is damaged."""
    blob = _read_blob(folder, record)
    if blob is None:
        raise StoreError(
            f"{folder}/blob.{record.blob} is damaged: step {record.step} cannot be resumed, and there is no other "
            "commit; go back to a checkpoint",
            damaged=True,
        )
    return blob


def check_drives(folders: Sequence[Path], copy: StoreManifest, step: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """Compares the manifest on each drive with the copy that a commit holds.

    Returns a line for each drive whose manifest is missing, damaged or another one, for which the caller writes the
    copy to all drives; and the drives' paths as each intact manifest names them. Raises `StoreError` if the number of
    drives differs, or if a drive belongs to another store or has another index, and `IoError` if a manifest exists and
    cannot be read: the drive may belong to another store.
    """
    if len(copy.weights) != len(folders):
        raise StoreError(
            f"{folders[0]} is stored on {count_of(len(copy.weights), 'drive')} ({', '.join(copy.drives)}), nvme_path "
            f"names {len(folders)}; give the same drives in the same order"
        )
    notices: list[str] = []
    places: list[tuple[str, ...]] = []
    for drive, folder in enumerate(folders):
        number = _place_of(folder)[1]
        try:
            manifest = read_manifest(folder / "manifest.json")
        except StoreError as error:
            notices.append(f"{error}; the file is written anew from the copy that step {step} holds")
            continue
        if (manifest.id, number) != (copy.id, drive):
            raise StoreError(
                f"{folder} holds drive {number} of store {manifest.id}, expected drive {drive} of store {copy.id}: "
                f"mount the drives of this run, in the order {', '.join(copy.drives)}"
            )
        if not same_but_places(manifest, copy):
            path = folder / "manifest.json"
            notices.append(f"{path} differs from the copy that step {step} holds; the file is written anew from it")
        places.append(manifest.drives)
    return notices, places


# -- comparison of a commit ----------------------------------------------------------------------------


class Damage(NamedTuple):
    """Bytes of a slot that differ from the bytes written, or cannot be read."""

    state: str
    unit: str
    slot: str
    """A, B or C."""
    path: str
    offset: int
    """Byte offset in the states file over all drives."""
    nbytes: int
    reason: str
    parameters: tuple[str, ...]
    """Names of the parameters that the bytes belong to; empty if only the unit is known."""
    frozen: bool
    """True if no update writes the bytes, so the model's files may have them."""
    mended: str
    """Where the true copy was that has replaced the bytes; empty if they are still damaged."""

    def __str__(self) -> str:
        what = f"{self.state} of {self.unit}, slot {self.slot}"
        parameters = f"; it has values of {shortened(self.parameters)}" if self.parameters else ""
        mended = f"; mended from {self.mended}" if self.mended else ""
        return f"{what}: {self.nbytes} bytes at offset {self.offset} of {self.path}: {self.reason}{parameters}{mended}"


def shortened(names: Sequence[str]) -> str:
    """Returns names for a message: the first three, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


Mend = Callable[[Key, int, ChecksumRange], "str | None"]
"""Replaces a damaged range of a slot by a true copy, and returns where that is; None if there is none."""


def damages_of_commit(
    file: StripedFile,
    queue: Queue,
    spec: StoreSpec,
    record: CommitRecord,
    table: Mapping[Key, Slot],
    undo: Undo,
    rank: int,
    progress: Callable[[int], None] = lambda _: None,
    mend: Mend | None = None,
) -> Generator[Damage]:
    """Reads every slot that a record names, and yields each checksum range that is damaged; takes 32 MiB of memory.

    If `undo` has a complete copy of a slot, the copy is read in its place. Close or exhaust the generator before the
    file is closed: reads are in flight between two results. `progress` is called with the bytes of each chunk that was
    compared, `mend` for each damaged range.
    """
    places = spec.places()

    def place_of(key: Key) -> Extents:
        unit, state = key
        return places[unit][state][record.slots[unit]]

    def damage(key: Key, start: int, nbytes: int, reason: str, of: ChecksumRange | None = None) -> Damage:
        (unit, state), slot = key, record.slots[key[0]]
        names = spec.parameters_at(rank, unit, state, start, nbytes)
        # A copy in `undo` takes the place of the slot, whose own bytes nobody reads.
        mended = mend(key, slot, of) or "" if mend is not None and of is not None and key not in copied else ""
        offset = place_of(key).offset(start)
        own = place_of(key).nbytes - (spec.frozen[unit] if spec.frozen and state is State.WEIGHT else 0)
        where = (state.value, spec.title(unit), SLOTS[slot], file.path, offset, nbytes)
        return Damage(*where, reason, names, start >= own, mended)

    # A slot is reported if its checksums cover too few bytes or too many. With too many nothing is compared.
    compared: dict[Key, Slot] = {}
    for unit, row in enumerate(places):
        for state in row:
            key = (unit, state)
            covered = sum(checksum_range.nbytes for checksum_range in table.get(key, ()))
            nbytes = place_of(key).nbytes
            if covered <= nbytes:
                compared[key] = table.get(key, ())
            if covered != nbytes:
                yield damage(key, 0, nbytes, f"checksums cover {covered} bytes only")

    # Ranges are read in order, in chunks. The store has a checksum of the whole range, so the checksums of chunks are
    # joined until the range ends. A damaged range is reported once.
    chunks = (
        (key, checksum_range, range(start, min(start + _CHUNK_NBYTES, checksum_range.start + checksum_range.nbytes)))
        for key, slot in compared.items()
        for checksum_range in slot
        for start in range(checksum_range.start, checksum_range.start + checksum_range.nbytes, _CHUNK_NBYTES)
    )
    buffers = [aligned_empty(_CHUNK_NBYTES) for _ in range(_CHUNKS)]
    reading: deque[tuple[Key, ChecksumRange, range, Future]] = deque()
    crc, unreadable = 0, False

    def compare() -> Iterator[Damage]:
        """Finishes the oldest chunk."""
        nonlocal crc, unreadable
        # Popped only after the wait: the `finally` below waits for all that is left, whatever is raised.
        key, checksum_range, chunk, future = reading[0]
        if chunk.start == checksum_range.start:
            crc, unreadable = 0, False
        try:
            future.wait()
            crc = crc32c_joined(crc, future.crc32c(), len(chunk))
        except IoError as error:
            if not unreadable:
                yield damage(key, chunk.start, len(chunk), str(error), checksum_range)
            unreadable = True
        last = chunk.stop == checksum_range.start + checksum_range.nbytes
        if last and crc != checksum_range.crc and not unreadable:
            reason = "the bytes do not match the stored checksum"
            yield damage(key, checksum_range.start, checksum_range.nbytes, reason, checksum_range)
        reading.popleft()
        progress(len(chunk))

    with undo.slots(file, record, places, table) as copied:
        try:
            for count, (key, checksum_range, chunk) in enumerate(chunks):
                if len(reading) == _CHUNKS:
                    yield from compare()
                # The buffers are used in turn. The oldest chunk was finished above, so its buffer is free.
                buffer = buffers[count % _CHUNKS][: len(chunk)]
                source, offset = bytes_of(file, place_of(key), chunk.start, len(chunk), copied.get(key))
                reading.append((key, checksum_range, chunk, queue.read(source, offset, buffer, checksum=True)))
            while reading:
                yield from compare()
        finally:
            wait_for_all(future for *_, future in reading)


def first_damage(
    file: StripedFile,
    queue: Queue,
    spec: StoreSpec,
    record: CommitRecord,
    packed: bytes,
    undo: Undo,
    rank: int,
    mend: Mend,
    notices: list[str],
) -> Damage | None:
    """Returns the first of `damages_of_commit` that is not mended, or None. `notices` gets a line for each that is.

    `packed` is the table as a blob contains it.
    """
    scan = damages_of_commit(file, queue, spec, record, unpack(packed), undo, rank, mend=mend)
    try:
        for damage in scan:
            if not damage.mended:
                return damage
            notices.append(f"{damage}; the drive, its cable or the memory is failing")
        return None
    finally:
        scan.close()  # waits for the reads in flight: the caller closes the file next


# -- slots that an edit overwrites ---------------------------------------------------------------------
#
# A process of a grid edits weights without the others. It writes the slot that its last commit does not name, but the
# commit before may name that slot. If another process is lost before it makes the last commit too, all processes resume
# from the commit before. So the slot is copied first:
#
#     file    entries, one for each state of an edited unit
#     entry   a page of JSON with its CRC-32C in the last 4 bytes ► the bytes of the slot
#
# All entries of a unit are durable before its slot is written. So if a kill or a power cut interrupts a copy, the slot
# itself is whole. Only the checksums of the commit show whether a copy is complete: a page may be durable before the
# bytes that follow it.


_CRC = struct.Struct("<I")

_FIELDS = fields(
    {"serial": whole(), "time_ns": whole(0, 2**64), "unit": whole(), "state": text(), "nbytes": whole(1, 1 << 56)}
)
"""Fields of the page of an entry."""


class _UndoEntry(NamedTuple):
    """The copy of one slot, without the bytes that both slots share."""

    commit: tuple[int, int]
    """Serial and time of the record that names the slot."""
    unit: int
    state: State
    nbytes: int

    def pack(self) -> bytes:
        fields = {"serial": self.commit[0], "time_ns": self.commit[1], "unit": self.unit, "state": self.state.value}
        body = json.dumps({**fields, "nbytes": self.nbytes}).encode().ljust(PAGE - _CRC.size)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, page: bytes) -> _UndoEntry | None:
        """Returns the entry of a page; None if the page is incomplete, or of another version."""
        body = page[: -_CRC.size]
        if len(page) != PAGE or _CRC.unpack(page[-_CRC.size :])[0] != crc32c(body):
            return None
        try:
            values = read(body, _FIELDS)
            entry = cls((values["serial"], values["time_ns"]), values["unit"], State(values["state"]), values["nbytes"])
        except ValueError:
            return None
        return entry if entry.nbytes % PAGE == 0 else None


class Undo:
    """The file `undo` of one rank, on its first drive.

    The rank's lock must be held where files are written; one thread at a time may call.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the rank's folder on the first drive."""
        self.path = folder / "undo"
        self._nbytes = 0
        """Bytes of the entries that this process has made durable."""

    def save(
        self,
        named_by: CommitRecord,
        unit: int,
        places: Mapping[State, Sequence[Extents]],
        read: Callable[[int, State, int, int, memoryview], Future],
    ) -> int:
        """Copies the slot of a unit durably.

        Returns the bytes that were written. Raises `IoError` if the slot cannot be read, or the copy cannot be written.
        The entries before stay as they are.
        """
        sizes = {state: nbytes for state, slots in places.items() if (nbytes := own_nbytes(slots))}
        buffer = aligned_empty(min(_CHUNK_NBYTES, max(sizes.values(), default=PAGE)))
        at = self._nbytes
        try:
            with writing_in_place(self.path) as write:
                for state, nbytes in sizes.items():
                    # These writes may end in any order: the block ends with a sync, and the edit waits for that.
                    write(_UndoEntry((named_by.serial, named_by.time_ns), unit, state, nbytes).pack(), at)
                    for start in range(0, nbytes, len(buffer)):
                        part = buffer[: min(len(buffer), nbytes - start)]
                        read(unit, state, named_by.slots[unit], start, part).wait()
                        write(part, at + PAGE + start)
                    at += PAGE + nbytes
        except BaseException:
            # Others may need the room now. Otherwise the rest could stay: a reader ignores an incomplete entry.
            with contextlib.suppress(OSError):
                cut_short(self.path, self._nbytes)
            raise
        began, self._nbytes = self._nbytes, at
        return at - began

    def _copies(
        self, record: CommitRecord, places: Places, table: Mapping[Key, Slot]
    ) -> tuple[Mapping[Key, Extent], bool]:
        """Returns the places in the file of complete copies of slots that `record` names. `table` has their checksums.

        The second result is False if the file contains anything else: a part of a copy, which a kill has left, copies
        for another record, or damage.
        """
        if not is_there(self.path):
            return {}, True
        extents: dict[Key, Extent] = {}
        at, undamaged = 0, True
        with self._opened() as file:
            size = os.fstat(file).st_size
            while (entry := _UndoEntry.unpack(os.pread(file, PAGE, at))) is not None:
                extent, at = Extent(at + PAGE, entry.nbytes), at + PAGE + entry.nbytes
                key = (entry.unit, entry.state)
                slots = places[entry.unit].get(entry.state) if 0 <= entry.unit < len(places) else None
                # The page is intact, but may come from another store or version: each of its values is compared.
                right = entry.commit == (record.serial, record.time_ns) and at <= size
                if right and slots and own_nbytes(slots) == entry.nbytes and _fits(file, extent, table.get(key, ())):
                    extents[key] = extent
                else:
                    undamaged = False
        return extents, undamaged and at == size

    def put_back(
        self,
        record: CommitRecord,
        places: Places,
        packed: bytes,
        write: Callable[[int, State, int, int, memoryview], Future],
        sync: Callable[[], None],
        find_damage: Callable[[], object | None] | None,
    ) -> None:
        """Writes the copies of slots that `record` names to their places, durably. May be repeated.

        `find_damage` compares all data of the commit, and returns the first damage. It is None if there is no later
        commit: an edit overwrites slots of this commit only after a later one. Raises `IoError` if something cannot be
        read or written, and `StoreError` if a copy that the commit needs is damaged.
        """
        extents, undamaged = self._copies(record, places, unpack(packed))
        if extents:
            with self._opened() as file:
                for (unit, state), extent in extents.items():
                    for offset, chunk in _chunks_of(file, extent):
                        write(unit, state, record.slots[unit], offset, chunk).wait()
            sync()
        # If a kill has interrupted a copy, its slot is whole. If a copy was damaged later, its slot may be lost.
        if not undamaged and find_damage is not None and (damage := find_damage()) is not None:
            raise StoreError(
                f"{self.path} is damaged: it has the copies of slots that an edit of weights has overwritten, and step "
                f"{record.step}, the last one that all processes have, needs them ({damage}); go back to a checkpoint",
                damaged=True,
            )

    @contextlib.contextmanager
    def slots(
        self, states: File, record: CommitRecord, places: Places, table: Mapping[Key, Slot]
    ) -> Iterator[Mapping[Key, File]]:
        """Yields a file for each slot of `record` that has a copy: with the copy's bytes in place of the slot's.

        Raises `IoError` if the file cannot be read.
        """
        extents, _ = self._copies(record, places, table)
        # The usual case opens no file: only an edit between two steps of a grid makes copies.
        if not extents:
            yield {}
            return
        with DirectFile(self.path, writable=False, opener=inner_opener(3)) as file:
            files: dict[Key, File] = {}
            for (unit, state), extent in extents.items():
                place = places[unit][state][record.slots[unit]]
                # Frozen bytes have no copy, since no edit writes them.
                shared = place.extents_of(extent.nbytes, place.nbytes - extent.nbytes)
                files[unit, state] = Joined([(file, extent), *((states, shared_extent) for shared_extent in shared)])
            yield files

    def remove(self) -> None:
        """Deletes the file, if there is one. If a power cut undoes that, no record names the slots of its copies."""
        unlink(self.path)
        self._nbytes = 0

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yields a descriptor for reads. An error of such a read becomes an `IoError` that names the file."""
        try:
            file = open_inner(self.path, 3)
            try:
                check_holes(file, self.path)
                yield file
            finally:
                os.close(file)
        except IoError:
            raise
        except OSError as error:
            wrong = IoError(str(self.path), 0, 0, error.errno or errno.EIO, "read")
            wrong.strerror = error.strerror
            raise wrong from error


def _fits(descriptor: int, extent: Extent, slot: Slot) -> bool:
    """Returns True if the bytes of the extent have the checksums of the first bytes of a slot."""
    crc = 0
    for _, chunk in _chunks_of(descriptor, extent):
        crc = crc32c(chunk, crc)
    return crc == sum_of(slot, 0, extent.nbytes)


def _chunks_of(descriptor: int, extent: Extent) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of an extent in chunks, each with its offset in the extent. The next chunk reuses the memory."""
    buffer = aligned_empty(min(_CHUNK_NBYTES, extent.nbytes))
    for offset in range(0, extent.nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), extent.nbytes - offset)]
        if os.preadv(descriptor, [chunk], extent.offset + offset) != len(chunk):
            raise OSError(errno.EIO, "the file was cut short meanwhile")
        yield offset, chunk
