"""One rank's swap files while a process has them open and locked.

    create ──┐                    ┌── read, write ──► replace checksums, `newest` (wrote) ──┐
             ├──► open and locked ┤                                                         ├──► close or remove
    open  ───┘                    └── commit: sync data ► blob ► record ◄───────────────────┘

`SwapFiles` makes, opens and deletes all the files together; `Store` writes slots, blobs and records. The decisions are
functions of other modules: `recovery` (from which commit a run resumes), `drives` (how much each drive takes),
`format` (the checksums that reads are compared with).

Threads: the update worker calls `wrote` and `commit`, and other threads only while it is idle: at the start, in a load
and at the end. Any thread may submit reads and wait for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.aio import DirectFile, Priority, StripedFile, aligned_empty, crc32c
from offload.aio.protocols import Future, Queue
from offload.aio.unanswered import aloud
from offload.errors import IoError, StoreError
from offload.fileio import inner_opener, sync_folder
from offload.notices import Headline, announce, shell_command
from offload.sizes import MIB, PAGE
from offload.states import State
from offload.swapper.store import format, recovery, repair
from offload.swapper.store.drives import Shortage, find_drive_shortage, find_shortage, new_manifest, no_room, places_of
from offload.swapper.store.folder import (
    STAGED,
    RunNotes,
    begin_removal,
    clone_range,
    close_in_children,
    copy_range,
    lock_folders,
    remove_all_but_lock,
    remove_files,
    reserve_blobs,
    sync_names,
    unlink,
    write_durably,
    write_in_place,
)
from offload.swapper.store.format import (
    MAX_UNITS,
    MAX_UNITS_OF_THREE_SLOTS,
    SLOTS,
    ChecksumRange,
    ChecksumTable,
    CommitRecord,
    Key,
    Records,
    StoreManifest,
    StoreSpec,
    check_rank,
    compare,
    own_nbytes,
    read_manifest,
    read_records,
    was_committed,
)
from offload.swapper.store.inspection import allocated_nbytes
from offload.swapper.store.recovery import Damage, Undo, check_drives, first_damage, shortened
from offload.swapper.store.requests import NO_SPANS, CheckedRead, DriveByteCounter, DriveSpans, bytes_of
from offload.timeline import Row, now

if TYPE_CHECKING:
    import torch


# -- swap files ----------------------------------------------------------------------------------------


class SwapFiles:
    """The files of one rank, locked from construction to `close`. `create` or `open` opens the states file.

    One thread at a time may call a method; any thread may use `states` while the files are open.
    """

    def __init__(self, paths: Sequence[str | Path], run: str, rank: int, spec: StoreSpec, staged: bool = False) -> None:
        """Makes and locks the rank's folder on each drive.

        The folder is `staged` beside those of a run with another number of ranks. Raises `StoreError` if a folder
        cannot be made, or is in use.
        """
        # Absolute, since the process may change its working folder later.
        name = f"{STAGED if staged else ''}rank{rank}"
        self.folders = [Path(os.path.abspath(path)) / run / name for path in paths]
        self.notes = RunNotes(self.folders[0])
        self._run, self._rank = run, rank
        self.spec = spec
        """The contents of the files; `open` replaces those that the caller expects."""
        self._manifest: StoreManifest | None = None
        self._states: StripedFile | None = None
        self.cut: list[str] = []
        """Lines about states files that were cut, and have their size again: all data must be compared."""
        self._loss_reported = False
        self._locks = lock_folders(self.folders)
        close_in_children.add(self)

    @property
    def manifest(self) -> StoreManifest:
        """The manifest of the files that `create` made or `open` opened."""
        assert self._manifest is not None
        return self._manifest

    @property
    def states(self) -> StripedFile:
        """The open states file over all drives."""
        assert self._states is not None
        return self._states

    @property
    def locked(self) -> bool:
        """True until `close`."""
        return self._locks[0].held

    def check_lock(self) -> None:
        """Raises `StoreError` if another process has locked the first folder meanwhile."""
        self._locks[0].check(self.folders[0])

    # -- making and opening -------------------------------------------------------------------------

    def check_room(self, nbytes: int | None = None) -> None:
        """Raises `StoreError` if there is no room even without the files of an earlier start. Changes nothing.

        `nbytes` are those of the states, if not all slots are written.
        """
        taken, nbytes = allocated_nbytes(self.folders), self.spec.nbytes if nbytes is None else nbytes
        short = find_shortage([folder.parent.parent for folder in self.folders], nbytes - taken)
        if short is not None:
            raise no_room(short._replace(need=nbytes, free=short.free + taken), self.spec)

    def create(self, run_id: str | None, stripes: Sequence[int] = (), reserve: bool = True, first: int = 1) -> None:
        """Deletes the remainders of an earlier start, reserves all room and writes empty records and the manifests.

        After an error the caller must delete the files made so far, by `unlink`. All ranks have the same `run_id`; None
        if unknown. `first` is the number of the first commit. With `stripes` the drives are divided as those of another
        store; without `reserve` the states are a hole. Raises `StoreError` if there is no room, and `OSError` if a file
        cannot be written.
        """
        self._forget()
        drives = [folder.parent.parent for folder in self.folders]
        if reserve:
            self._raise_if_short(find_shortage(drives, self.spec.nbytes))
        self._manifest = new_manifest(self._run, self._rank, self.folders, self.spec, run_id, stripes)
        self._states = self._open_states(create=True)
        if reserve:
            self._raise_if_short(find_drive_shortage(drives, self._drive_nbytes()))
            self._states.reserve(self.spec.nbytes)
        else:
            for part, nbytes in zip(self._states.parts(), self._drive_nbytes(), strict=True):
                os.ftruncate(part.descriptors.buffered, nbytes)
        # Beside a record whose number is not 1, an empty page would be a lost record.
        second = bytes(PAGE) if first == 1 else format.erasure(first + 1, 1)
        write_in_place(self.folders[0] / "commit", bytes(PAGE) + second)
        # Before any manifest: a power cut that left only a later drive's would make the first drive look missing.
        for folder in self.folders:
            sync_names(folder)
        self._write_manifests()

    def _forget(self) -> None:
        """Deletes the files of an earlier start, records before the files they name. Notes of the run's end stay.

        A kill before the records are given up leaves a run that can be resumed; a later kill leaves files that the next
        call deletes.
        """
        begin_removal(self.folders[0])
        sync_folder(self.folders[0].parent)
        for folder in reversed(self.folders):  # the first drive last: its manifest identifies the others' store
            remove_all_but_lock(folder)

    def _raise_if_short(self, short: Shortage | None) -> None:
        if short is not None:
            raise no_room(short, self.spec)

    def open(self, copy: StoreManifest, step: int) -> list[str]:
        """Opens the states file of a commit.

        Rewrites all manifests if one is missing or damaged, or names other places of the drives than these. Returns a
        line for the user for each such manifest. States that were cut get their size again, and a line in `cut`. Raises
        `StoreError` if the files are of another run or of other drives.
        """
        compare(self.spec, copy.spec, self.folders[0])
        # The files keep the third slots that they began with, whatever this start would plan.
        spec = copy.spec
        self.spec = self.spec._replace(shadowed=spec.shadowed, files=spec.files, about=spec.about)
        # Partitions of all ranks look alike, and those of another one would be taken for this one's.
        check_rank(copy, self._rank, self.folders[0])
        lost, there = check_drives(self.folders, copy, step)
        here = places_of(self.folders)
        self._manifest = dataclasses.replace(copy, drives=here)  # the blob of the next commit contains it too
        self._states = self._open_states()
        if cut := repair.lengthen(self._states, self.spec.nbytes):
            self.notes.mark_suspect()
            self.cut += cut
        # Each manifest counts: a kill between two of them leaves drives that name different places.
        if lost or any(places != here for places in there):
            self._write_manifests()
        return lost

    def name_files(self, files: Mapping[str, Any]) -> None:
        """Records the model's own files; see `StoreSpec.files`. Rewrites the manifests if they name others."""
        self.spec = self.spec._replace(files=files)
        if self._manifest is not None and self._manifest.spec.files != files:
            self._manifest = dataclasses.replace(self._manifest, spec=self._manifest.spec._replace(files=files))
            self._write_manifests()

    def _open_states(self, create: bool = False) -> StripedFile:
        return StripedFile(
            [folder / "states" for folder in self.folders],
            self.manifest.weights,
            stripe_bytes=self.manifest.stripe_bytes,
            create=create,
            opener=inner_opener(3, ours=True),
        )

    def _drive_nbytes(self) -> list[int]:
        return self.states.layout.file_nbytes(self.spec.nbytes)

    def _write_manifests(self) -> None:
        """Writes the manifest of each drive, the first drive's first. All names in these folders are then durable."""
        for drive, folder in enumerate(self.folders):
            write_durably(folder / "manifest.json", self.manifest.pack(drive))

    def sync(self) -> None:
        """Makes all writes to the states durable. Warns once if a states file has lost its name meanwhile."""
        self.states.sync()
        if self._loss_reported:
            return
        for part in self.states.parts():
            # A file without a name is written as before, but no later process finds it.
            if not _is_named(part):
                announce(
                    f"{part.path} was deleted or moved while the run uses it: the run cannot be resumed after this "
                    "process, so save a checkpoint now, with engine.save_checkpoint"
                )
                self._loss_reported = True

    # -- closing and deleting -----------------------------------------------------------------------

    def close_states(self) -> None:
        """Closes the states file and keeps the locks; idempotent. All I/O requests must have ended."""
        if self._states is not None:
            self._states.close()
        self._states = None

    def close(self) -> None:
        """Closes the states file and releases the locks; idempotent. All I/O requests must have ended."""
        self.close_states()
        for lock in self._locks:
            lock.release()

    def close_in_child(self) -> None:
        """Closes the descriptors in a forked child, where they would keep the locks and the room of deleted files."""
        if self._states is not None:
            for part in self._states.parts():
                part.descriptors.close()
        for lock in self._locks:
            lock.release()

    def unlink(self, notes: bool = False) -> None:
        """Deletes all files that can be deleted; with `notes` the last rank also deletes the notes of the run's end.

        The caller holds the locks: another process may start the run again once they are released.
        """
        with contextlib.suppress(OSError):
            begin_removal(self.folders[0])
        for folder in reversed(self.folders):  # the first drive last: its manifest identifies the others' store
            with contextlib.suppress(OSError):
                remove_files(folder)
                if notes and folder == self.folders[0] and not any(folder.parent.glob("rank*")):
                    unlink(self.notes.finished)
                    unlink(self.notes.closed)
                folder.parent.rmdir()  # fails while folders of other ranks are in it


def _is_named(file: DirectFile) -> bool:
    """Returns False if the path of an open file names no file, or another one."""
    try:
        status = os.stat(file.path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == file.identity()


# -- store ---------------------------------------------------------------------------------------------


_SCRUB_NBYTES = MIB // 4
"""Bytes that a commit scrubs at least."""
_SCRUB_S = 24 * 3600.0
"""Commits scrub all bytes that nothing else reads within these seconds, if there is a commit now and then."""


class Store:
    """One rank's swap files, open and locked.

    `newest[unit]` is the slot of the newest copy. The update worker alone changes it, by `wrote`, and commits; reads
    may be submitted from any thread. The caller must wait for every future.

    Each write yields checksums; every read of the newest slots is compared with them. Bytes that differ are read once
    more; if they differ again, the `wait` of the read raises `IoError` (EBADMSG).
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        run: str,
        rank: int,
        spec: StoreSpec,
        queue: Queue,
        written: DriveByteCounter | None = None,
        spans: DriveSpans = NO_SPANS,
        first: int | None = None,
        keep_every: int = 0,
    ) -> None:
        """Makes and locks the rank's folders. `create`, `open` or `fill` must follow.

        The queue belongs to the caller. The counter may be shared with spill files. `first` is the first commit's
        number, for folders beside those of a run with other ranks; None for all others. A commit of a step that is a
        multiple of `keep_every` is kept as a run of its own, RUN@STEP; 0 keeps none. Raises `StoreError` if the model
        has too many units, or a folder cannot be made or is in use.
        """
        most = MAX_UNITS_OF_THREE_SLOTS if spec.slots == 2 and spec.shadowed else MAX_UNITS
        if len(spec.partitions) > most:
            raise StoreError(f"the model has {len(spec.partitions)} units, a store holds at most {most}")
        self.spec = spec
        self.run = run
        self.newest = [0] * len(spec.partitions)
        self.durable: CommitRecord | None = None
        self._before: CommitRecord | None = None  # before `durable`; other processes may have made no newer one
        self.written = written or DriveByteCounter(paths)
        """Bytes written to each drive, by this store and by the other users of a shared count, such as spill files."""
        self.notices: list[str] = []
        """Lines for the user about damage that `open` found and fixed or avoided."""
        self._queue, self._spans = queue, spans
        self._places = spec.places()
        self._sums = ChecksumTable()
        self._files, self._first = SwapFiles(paths, run, rank, spec, first is not None), first or 1
        self.folders = self._files.folders
        self._notes = self._files.notes
        self._commit_path = self.folders[0] / "commit"
        self._doing = ""
        """The part of a commit that is under way, in words."""
        self._to_scrub: list[tuple[Key, int]] = []
        """The slots that are left to scrub in the pass, each with the first byte; the next one is the last."""
        self._last_scrub = time.monotonic()
        self._covered: dict[Key, int] = {}
        """Bytes at the start of each slot that reads have covered since the pass began; any thread adds."""
        self._undo = Undo(self.folders[0])
        self._keep_every = keep_every
        self._lost = False
        """True once a line has named bytes that are lost: every later read of them fails too."""
        self._mended: set[tuple[Key, int, int]] = set()
        """Ranges that were mended since the store was opened: their unit and state, slot and first byte."""
        self.first_values: repair.FirstValues | None = None
        """Makes frozen weights from the model's files, to mend them."""

    # -- opening ------------------------------------------------------------------------------------

    def create(self, over: bool = False, run_id: str | None = None) -> None:
        """Makes new files: reserves all room and writes the manifests. No commit exists before `commit`.

        With `over`, commits of this run may be deleted. Raises `StoreError` if there are files of another run, or there
        is no room.
        """
        with self._making(over, room=True):
            self._files.create(run_id, first=self._first)
            self._sums.fill_zeros(self._places)
            if self.spec.slots == 1:
                self._notes.forget_end()
                # A run with one slot cannot be resumed: its room is freed however this process ends.
                for folder in self.folders:
                    unlink(folder / "states")

    @contextlib.contextmanager
    def _making(self, over: bool, room: bool) -> Iterator[None]:
        """Refuses to make files over those of another run, and deletes the files after an error of the body."""
        try:
            recovery.check_startable(self.folders, over)
            if room and was_committed(self.folders[0]):  # before the run is lost
                self._files.check_room()
        except BaseException:
            self.close()  # the files of the other run stay
            raise
        try:
            yield
        except BaseException:
            # The store contains nothing yet, so a start that fails deletes its files.
            self._files.unlink()  # before `close` releases the locks, while no other process can open the files
            self.close()
            raise

    def newest_serial(self) -> int | None:
        """Returns the number of the last commit that can be opened; None if no commit was ever made.

        Raises `StoreError` if there was a commit and none can be opened.
        """
        if not was_committed(self.folders[0]):
            return None
        return self._newest(read_records(self._commit_path)).serial

    def open(self, at: int | None = None) -> dict[str, torch.Tensor]:
        """Opens the files at their last commit, or at an earlier one that all ranks have.

        If another rank has not made the last commit, nothing of the commit before was overwritten. Then the commit
        before is opened, and the last one is deleted for good. `at` is the number of the commit; None for the newest.
        Returns the contents of the commit, by name. Raises `StoreError` if the files are damaged, incomplete, or of
        another run. The store is then closed.
        """
        try:
            records = read_records(self._commit_path)
            record = self._newest(records) if at is None else recovery.record_at(self.folders[0], at, records.valid)
            blob = recovery.load_blob(self.folders[0], record)
            self._open_files(record, blob)
            if self._files.cut and (lost := self._damage_in_open_files(record, blob)) is not None:
                raise StoreError(
                    f"{'; '.join(self._files.cut)}: the store cannot be used, go back to a checkpoint or to a kept "
                    f"step ({lost})",
                    damaged=True,
                )
            self.notices += [f"{line}; all data of step {record.step} was compared" for line in self._files.cut]
            damage = None if record is records.valid[0] else partial(self._damage_in_open_files, record, blob)
            # Copies are durable in their slots before a later record goes. After a kill in between all is done again.
            self._undo.put_back(record, self._places, blob.sums, self.write, self._files.states.sync, damage)
            # The run will overwrite the slots that a later record names: it must never be found again.
            records.forget_later(self._commit_path, record)
            self._undo.remove()
            self._notes.clear_suspect()
            self._notes.forget_end()  # from now on a kill leaves a run that can be resumed
            self.durable = record
            self.newest = list(record.slots)
            self._sums.load(blob.sums, self._places)
            self.written.go_on(blob.written)
            contents = blob.contents()
            if self._is_to_keep(record.step) and not was_committed(self._kept_folders(record.step)[0]):
                self._keep(contents)  # a kill came between the commit and its copy
            return contents
        except BaseException:
            self.close()
            raise

    def fill(
        self,
        source: StripedFile,
        manifest: StoreManifest,
        record: CommitRecord,
        sums: bytes,
        run_id: str | None,
        reserve: bool = True,
        over: bool = False,
    ) -> bool:
        """Makes new files with the states that a commit of another store names, on the same drives.

        The files share the bytes of `source` where the file system can; else the bytes are copied. They are not
        compared: the new store takes over the checksums, so that damage is noticed when the bytes are used. No commit
        exists before `commit`. Without `reserve` the files take no room for the other slot, and a run must not train in
        them. With `over`, commits of this run may be deleted. `source` belongs to the caller, and nothing may write
        these slots meanwhile. Returns True if all bytes are shared. Raises `StoreError` if there are files of another
        run, or there is no room, and `IoError` if a copy fails. The store is then closed, and its files are deleted.
        """
        with self._making(over, room=reserve):
            self._files.create(run_id, manifest.weights, reserve, self._first)
            extents = [
                extent
                for unit, row in enumerate(self._places)
                for slots in row.values()
                for extent in slots[record.slots[unit]].extents
            ]
            shared = True
            for offset, nbytes in extents:
                for drive, start, count in source.layout.places(offset, nbytes):
                    file, copy = source.parts()[drive], self._files.states.parts()[drive]
                    ends = file.descriptors.buffered, start, count, copy.descriptors.buffered, start
                    if shared and not clone_range(*ends):
                        shared = False
                        if not reserve:
                            self._files.check_room(sum(extent.nbytes for extent in extents))
                    if not shared:
                        copy_range(*ends, Path(copy.path))
                        self.written.add(drive, count)
            self._sums.load(sums, self._places)
            self.newest[:] = record.slots
            return shared

    def _newest(self, records: Records) -> CommitRecord:
        """Returns the newest record that can be opened. After any sign of damage, compares all data of its commit."""
        units, suspect = len(self.newest), self._notes.suspect
        record, notice = recovery.find_newest(self.folders[0], records, units, suspect, self._damage_in_closed_files)
        self.notices += [] if notice is None else [notice]
        return record

    def _damage_in_closed_files(self, record: CommitRecord, blob: format.Blob) -> Damage | None:
        """Opens the files, compares all data of a commit and closes them again; returns the first damage."""
        self._open_files(record, blob)
        try:
            return self._damage_in_open_files(record, blob)
        finally:
            self._files.close_states()

    def _damage_in_open_files(self, record: CommitRecord, blob: format.Blob) -> Damage | None:
        """Compares all data of a commit, whose files are open, and mends it; returns the first damage that is left."""
        return first_damage(
            self._files.states,
            self._queue,
            self.spec,
            record,
            blob.sums,
            self._undo,
            self._files.manifest.rank,
            self._mend_range,
            self.notices,
        )

    def _mend_range(self, key: Key, slot: int, part: ChecksumRange) -> str | None:
        """Replaces a damaged range by a true copy, and counts it. Returns where the copy is; None if there is none."""
        where = self._copies().mend(key, slot, part)
        if where is not None:
            self._mended.add((key, slot, part.start))
        return where

    def _copies(self) -> repair.Copies:
        """Returns the places that may have copies of damaged bytes now. The files are open."""
        return repair.Copies(self.folders[0], self.spec, self._files.states, self._queue, self.first_values)

    def _open_files(self, record: CommitRecord, blob: format.Blob) -> None:
        copy = StoreManifest.unpack(blob.manifest, f"{self.folders[0]}/blob.{record.blob}")
        self.notices += self._files.open(copy, record.step)
        self.spec = self._files.spec
        self._places = self.spec.places()
        if not self.spec.has(record.slots):
            raise StoreError(
                f"{self._commit_path} names slots that its files do not have, at step {record.step}: the folder has "
                "files of two runs; go back to a checkpoint"
            )

    def name_files(self, files: Mapping[str, Any]) -> None:
        """Records the model's own files, from which weights are read, before `create` or after `open`."""
        self._files.name_files(files)
        self.spec = self.spec._replace(files=files)

    # -- data ---------------------------------------------------------------------------------------

    @property
    def committed(self) -> bool:
        """True if a later process can resume from a commit."""
        return self.spec.slots == 2 and self.durable is not None

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Future:
        """Submits a read of the newest weights of a unit; see `WeightSource`."""
        return self.read(unit, State.WEIGHT, self.newest[unit], start, buffer, priority)

    def keeps(self, unit: int, state: State) -> bool:
        """Returns True if the store has slots for this state of this unit."""
        return state in self._places[unit]

    @property
    def mended(self) -> int:
        """Number of damaged ranges that were mended since the store was opened, and of files that were cut."""
        return len(self._mended) + len(self._files.cut)

    def own_nbytes(self, unit: int) -> dict[State, int]:
        """Returns for each state of a unit the bytes of a slot that no other slot shares: all but frozen ones."""
        return {state: own_nbytes(slots) for state, slots in self._places[unit].items()}

    def target(self, unit: int) -> int:
        """Returns the slot that an update may write: never one that the last durable record names.

        The slot is not the newest one either, if the unit has such a slot. Then the states from before the update stay
        readable until `wrote`. Frozen weights are stored once, for all slots. A write of them overwrites bytes that
        the record names.
        """
        newest = self.newest[unit]
        named = newest if self.durable is None else self.durable.slots[unit]
        free = (slot for slot in range(self.spec.slots_of(unit)) if slot not in (named, newest))
        return next(free, newest)

    def read(
        self,
        unit: int,
        state: State,
        slot: int,
        start: int,
        buffer: memoryview,
        priority: Priority = Priority.NORMAL,
        compare: bool = True,
    ) -> Future:
        """Submits a read that fills `buffer`. Any thread may call it.

        A unit must not be read while `wrote` changes its newest slot. Bytes of the newest slot are compared with their
        checksums, unless `compare` is False because the caller compares them with `sum_of`. `buffer` belongs to the
        caller and must live until the future is done. The `wait` of the request raises `IoError` (EBADMSG) if the bytes
        are damaged, and this call `StoreError` if another process uses the run too.
        """
        self._files.check_lock()
        began = now()
        # any thread: a commit may replace the mapping meanwhile, and another thread may extend the same slot. The bytes
        # that the mapping then misses are scrubbed once more.
        covered = self._covered
        before = covered.get((unit, state), 0)
        if start <= before < start + len(buffer):
            covered[unit, state] = start + len(buffer)
        future = self._read(unit, state, slot, start, buffer, priority, compare)
        return self._spans.show(Row.READS, unit, state, began, len(buffer), future)

    def _read(
        self, unit: int, state: State, slot: int, start: int, buffer: memoryview, priority: Priority, compare: bool
    ) -> Future:
        place = self._places[unit][state][slot]
        assert start + len(buffer) <= place.nbytes
        # any thread: takes the checksums at submission. The update worker may replace them before the caller waits.
        pages, ranges = self._sums.pages((unit, state)), self._sums.ranges((unit, state))
        compared = compare and slot == self.newest[unit]

        def submit(at: int, memory: memoryview) -> Future:
            file, offset = bytes_of(self._files.states, place, at, len(memory))
            return self._queue.read(file, offset, memory, priority=priority, checksum=compared)

        if compared:
            mend = partial(self._mend, (unit, state), slot, ranges)
            return CheckedRead(pages, start, buffer, submit, partial(self._damaged, unit, state, slot), mend)
        return submit(start, buffer)

    def _mend(self, key: Key, slot: int, ranges: format.Slot, damage: range) -> bool:
        """Replaces the damaged ones of a slot's `ranges` that `damage` overlaps by true copies; see `repair`.

        Says once what was mended, or what is lost. Returns False if a range stays damaged, or if none is.
        """
        # calling thread: nothing writes the slot before the caller has the bytes of its read.
        copies, mended = self._copies(), False
        (unit, state), step = key, "the step since the last commit"
        if self.durable is not None and self.durable.slots[unit] == slot:
            step = f"step {self.durable.step}"
        for part in ranges:
            if part.start >= damage.stop or part.start + part.nbytes <= damage.start:
                continue
            if copies.is_right(key, slot, part):
                # any thread: another read of the same range may have failed too, and has mended it meanwhile.
                mended |= (key, slot, part.start) in self._mended
                continue
            names = self.spec.parameters_at(self._files.manifest.rank, unit, state, part.start, part.nbytes)
            what = f"{part.nbytes} bytes of {state.value} of {self.spec.title(unit)}, slot {SLOTS[slot]}, of {step}"
            where = self._mend_range(key, slot, part)
            if where is None:
                if not self._lost:
                    announce(
                        f"{what} are lost, and there is no true copy; they have values of "
                        f"{shortened(names) or 'this unit'}. The next start takes the commit before, if all of it is "
                        f"intact; `{shell_command('log', self.folders[0].parent)}` lists the steps that were kept"
                    )
                self._lost = True
                self._notes.mark_suspect()  # a sector that cannot be read has no note yet
                return False
            announce(f"{what} were damaged, and are mended from {where}; the drive, its cable or the memory is failing")
            mended = True
        return mended

    def _damaged(self, unit: int, state: State, slot: int, damage: range) -> IoError:
        """Returns the error for bytes of a slot that are not those written, with their place on the drive."""
        # calling thread: the note makes the next `open` compare all data, however this process ends.
        self._notes.mark_suspect()
        place = self._places[unit][state][slot]
        file, offset = bytes_of(self._files.states, place, damage.start, len(damage))
        first = file.pieces(offset, len(damage))[0]
        operation = f"use {state.value} of {self.spec.title(unit)}, slot {SLOTS[slot]},"
        return IoError(first.owner.path, first.offset, first.nbytes, errno.EBADMSG, operation)

    def _scrub(self) -> None:
        """Reads on in slots that nothing has read, so that their damage is noticed within a day.

        These are weights of a cache and states that tiers above DISK contain. A commit reads a few of their bytes.
        Raises `IoError` if bytes are damaged (EBADMSG), or cannot be read.
        """
        before, self._last_scrub = self._last_scrub, time.monotonic()
        left = max(_SCRUB_NBYTES, int(self.spec.nbytes * (self._last_scrub - before) / _SCRUB_S))
        if not self._to_scrub:
            keys = [(unit, state) for unit, row in enumerate(self._places) for state in row]
            self._to_scrub = [(key, 0) for key in reversed(keys) if not self._is_read(key)]
            self._covered = {}
        # calling thread: waits for each read before the next, since all share this buffer, and before the commit.
        buffer = aligned_empty(_SCRUB_NBYTES) if self._to_scrub else memoryview(b"")
        while self._to_scrub and left > 0:
            (unit, state), start = self._to_scrub.pop()
            slot = self.newest[unit]
            stop = min(self._places[unit][state][slot].nbytes, start + min(left, len(buffer)))
            if self._is_read((unit, state)):
                continue
            if stop < self._places[unit][state][slot].nbytes:
                self._to_scrub.append(((unit, state), stop))
            began, part = now(), buffer[: stop - start]
            # Not by `read`, which would count the slot as read by others, and the next pass would leave it out.
            future = self._read(unit, state, slot, start, part, Priority.BACKGROUND, compare=True)
            self._spans.show(Row.READS, unit, state, began, len(part), future).wait()
            left -= stop - start

    def _is_read(self, key: Key) -> bool:
        """Returns True if reads have covered a slot from its start to its end since the pass began."""
        unit, state = key
        return self._covered.get(key, 0) == self._places[unit][state][self.newest[unit]].nbytes

    def sum_of(self, unit: int, state: State, nbytes: int) -> int | None:
        """Returns the CRC-32C of the first `nbytes` of the newest slot; None if no checksum ends there."""
        return self._sums.sum_of((unit, state), nbytes)

    def clone(self, unit: int, state: State, nbytes: int, descriptor: int, offset: int) -> bool:
        """Lets another file share the first `nbytes` of the newest slot, without a copy.

        Bytes and offset are multiples of 4096. The other file is open for writing, and belongs to the caller. Returns
        False if the file systems cannot share, or the store is on several drives. Then the caller copies.
        """
        parts = self._files.states.parts()
        if len(parts) > 1:
            return False
        for start, length in self._places[unit][state][self.newest[unit]].extents_of(0, nbytes):
            if not clone_range(parts[0].descriptors.buffered, start, length, descriptor, offset):
                return False
            offset += length
        return True

    def write(self, unit: int, state: State, slot: int, start: int, buffer: memoryview) -> Future:
        """Submits a write of `buffer`. The bytes count as the newest copy only after `wrote`.

        `buffer` belongs to the caller and must stay unchanged until the future is done. Raises `StoreError` if another
        process uses the run too.
        """
        self._files.check_lock()
        began = now()
        place = self._places[unit][state][slot]
        assert start + len(buffer) <= place.nbytes
        # Counted at submission: how much of a write that fails has reached the drive is unknown.
        for offset, nbytes in place.extents_of(start, len(buffer)):
            for drive, _, count in self._files.states.layout.places(offset, nbytes):
                self.written.add(drive, count)
        file, offset = bytes_of(self._files.states, place, start, len(buffer))
        future = self._queue.write(file, offset, buffer, priority=Priority.BACKGROUND, checksum=True)
        return self._spans.show(Row.WRITES, unit, state, began, len(buffer), future)

    def set_aside(self, unit: int) -> None:
        """Copies the slot that an edit of `unit` will write, if the record before `durable` names the slot.

        The caller edits without the other processes. One of them may have to resume from that record, and then all do.
        Raises `IoError` if the slot cannot be read, or the drive has no room for the copy.
        """
        slot = self.target(unit)
        # If a step has written the slot since, all processes have met in that step.
        if self._before is None or self._before.slots[unit] != slot or self.newest[unit] == slot:
            return
        # calling thread: waits until the copy is durable. Only then may the edit write the slot.
        self.written.add(0, self._undo.save(self._before, unit, self._places[unit], self.read))

    def wrote(self, unit: int, slot: int, written: Mapping[State, Sequence[tuple[int, Future]]]) -> None:
        """Makes `slot` the newest of a unit. The update worker calls this, and between steps a load does.

        `written` has, for each state in the store, the start and the ended future of each write. The writes of a state
        begin at byte 0 and leave no gaps. Frozen weights after the last write keep their checksums.
        """
        # update thread: nobody reads these slots between the lines. If the weights may be used already, they are in a
        # host buffer that is `unwritten`, and so is not evicted.
        for state, writes in written.items():
            self._sums.replace((unit, state), writes, own_nbytes(self._places[unit][state]))
        self.newest[unit] = slot

    # -- commits ------------------------------------------------------------------------------------

    def commit(self, step: int, contents: Mapping[str, torch.Tensor]) -> None:
        """Makes `newest` and `contents` the durable state. All writes must have ended.

        A step may be committed again, after an edit of weights. `contents` is everything else that belongs to the step,
        by name; the blob stores a copy.
        """
        if self.durable is not None:  # the first commit is of bytes that were written a moment before
            self._scrub()
        # thread of `aloud`: it reads these words if the drive does not answer.
        self._doing = f"fdatasync of {self._files.states.path}"
        with self._spans.commit(step), aloud(lambda: f"commit of step {step} to {self.folders[0]}, {self._doing}"):
            self._commit(step, contents)
            if self._is_to_keep(step):
                self._doing = "copy of its states to a run of their own"
                self._keep(contents)

    def _commit(self, step: int, contents: Mapping[str, torch.Tensor]) -> None:
        # The order is the protocol: data, blob and record are each durable before the next is written, so no record
        # names bytes that a power cut has lost. Record and blob alternate between two places.
        #
        # calling thread: blocks until the drives answer. All writes have ended, so the sync covers all of `newest`.
        self._files.check_lock()
        self._files.sync()
        self._doing = "write of its blob and its record"
        which = 0 if self.durable is None else 1 - self.durable.blob
        data = format.pack_blob(contents, self._sums.pack(), self._files.manifest.packed, self.written.pack())
        reserve_blobs(self.folders[0], len(data) + self._sums.growth_nbytes(self._places))
        write_in_place(self.folders[0] / f"blob.{which}", data)
        serial = self._first if self.durable is None else self.durable.serial + 1
        record = CommitRecord(
            serial,
            step,
            tuple(self.newest),
            which,
            len(data),
            crc32c(data),
            time.time_ns(),
            format.format_of(self.spec.fingerprint),
        )
        write_in_place(self._commit_path, record.pack(), which * PAGE)
        # calling thread: from here on `target` returns the other slots. The record that names these is durable by now.
        self._before, self.durable = self.durable, record
        self._undo.remove()  # all processes have met in a step since its slots were written
        self.written.add(0, len(data) + PAGE)  # counted in the blob of the next commit
        if self._before is None:
            self._notes.forget_end()

    # -- kept steps ---------------------------------------------------------------------------------

    def _is_to_keep(self, step: int) -> bool:
        return self._keep_every > 0 and step > 0 and step % self._keep_every == 0

    def _kept_folders(self, step: int) -> list[Path]:
        """Returns the folders of this rank in the run RUN@STEP. No run trains there: its name is refused."""
        return [folder.parent.with_name(f"{self.run}@{step}") / folder.name for folder in self.folders]

    def _keep(self, contents: Mapping[str, torch.Tensor]) -> None:
        """Makes the last commit a run of its own, in place of an earlier copy of this step.

        A run does not end because a drive has no room for a copy: a notice says that the step is not kept.
        """
        # calling thread: the next update must not write a slot that the last record named before. It waits for this
        # call, as for the commit.
        record, manifest = self.durable, self._files.manifest
        assert record is not None
        folders = self._kept_folders(record.step)
        try:
            check_kept(folders[0], manifest)
            spec = self.spec._replace(about=about_fork(manifest, record))
            # Ranks agree on the id without an exchange, and an earlier copy of the step has another one.
            name = f"{manifest.run_id} {record.serial}"
            run_id = None if manifest.run_id is None else uuid.uuid5(uuid.NAMESPACE_OID, name).hex
            paths, kept = [folder.parent.parent for folder in folders], folders[0].parent.name
            fork = Store(paths, kept, manifest.rank, spec, self._queue, self.written)
            sums = self._sums.pack().numpy().tobytes()
            fork.fill(self._files.states, manifest, record, sums, run_id, reserve=False, over=True)
            try:
                fork.commit(record.step, contents)
            except BaseException:
                fork.remove()
                raise
            fork.close()
        except (StoreError, OSError) as error:
            announce(Headline(f"step {record.step} is not kept: {error}"))

    # -- closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files and releases the locks; idempotent. All futures must be done."""
        self._files.close()

    def note_end(self, facts: Mapping[str, Any]) -> None:
        """Writes `finished.json`, durably. From then on the files next to it are remainders."""
        note = dict(facts, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        write_durably(self._notes.finished, json.dumps(note).encode())

    def note_closed(self, facts: Mapping[str, Any]) -> None:
        """Writes `closed.json` with `facts`, durably. The run can be resumed, and a new start may replace it."""
        write_durably(self._notes.closed, json.dumps(facts).encode())

    def remove(self, notes: bool = False) -> None:
        """Deletes the files and closes the store; does nothing if the store is closed.

        With `notes` the last rank also deletes the notes of the run's end.
        """
        if self._files.locked:
            self._files.unlink(notes)  # before the locks are released: another process may start this run again at once
        self.close()


def about_fork(manifest: StoreManifest, record: CommitRecord) -> dict[str, Any]:
    """Returns what the manifest of a fork says of itself: what its origin says, and which commit of it this is."""
    origin = {"run": manifest.run, "run_id": manifest.run_id, "step": record.step}
    return {**manifest.spec.about, "forked_from": origin}


def check_kept(folder: Path, manifest: StoreManifest) -> None:
    """Raises `StoreError` if a rank's folder contains a commit that is no kept step of this run."""
    if not was_committed(folder):
        return
    origin = read_manifest(folder / "manifest.json").spec.about.get("forked_from", {})
    if origin.get("run_id") != manifest.run_id:
        raise StoreError(
            f"{folder.parent} is a step of another run of this name: delete it with "
            f"`{shell_command('rm', folder.parent)}`, or choose another run name"
        )


class NoStore(Store):
    """The store of a run without swap files. It keeps no state, so nothing is read or written, and has no commit."""

    def __init__(self, units: int) -> None:
        self.spec, self.folders = StoreSpec(({},) * units, 0, {}), []
        self.newest, self._places = [0] * units, self.spec.places()
        self.durable = self._before = None
        self.notices = []

    @property
    def mended(self) -> int:
        return 0

    def note_end(self, facts: Mapping[str, Any]) -> None:
        """Writes no note."""

    def remove(self, notes: bool = False) -> None:
        """Deletes nothing."""

    def close(self) -> None:
        """Closes nothing."""
