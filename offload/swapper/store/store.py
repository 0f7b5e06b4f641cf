"""One rank's swap files, open and locked: slots are read and written, commits are made."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.aio import Bandwidth, Priority, StripedFile, bandwidths, crc32c
from offload.aio.protocols import Future, Queue
from offload.aio.stripes import whole_weights
from offload.errors import IoError, StoreError
from offload.fileio import sync_folder
from offload.sizes import MIB, PAGE, count_of, format_size
from offload.states import State
from offload.swapper.store.drive_spans import NO_SPANS, DriveSpans
from offload.swapper.store.drives import Shortage, find_shortage, shares
from offload.swapper.store.format import blob
from offload.swapper.store.format import checksums as sums
from offload.swapper.store.format.checksums import Key, Passages, Slot, Stretch
from offload.swapper.store.format.commit_record import MAX_UNITS, Record, Records, read_records, was_committed
from offload.swapper.store.format.manifest import Manifest, StoreSpec, compare, read_manifest
from offload.swapper.store.inspection import place_of, read_blob
from offload.swapper.store.rank_folder import (
    Lock,
    clone_range,
    close_in_children,
    make_folders,
    remove_files,
    reserve,
    write_durably,
    write_in_place,
)
from offload.swapper.store.requests import Compared, bytes_of
from offload.swapper.store.verify import first_damage
from offload.swapper.store.write_counts import Written
from offload.timeline import Row, now

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("offload")

_STRIPE_BYTES = 2 * MIB
_END = "finished.json"
_CLOSED = "closed.json"
_LEAST_STRETCH = MIB // 4
"""Bytes of a state that have a checksum of their own, where there are many: smaller tiles share one."""


class Store:
    """One rank's swap files, open and locked.

    `newest[unit]` is the slot of the newest copy. The update worker alone changes it, by `wrote`, and commits; reads
    may be submitted from any thread. Every future is the caller's to wait for.

    With two slots every write gives its checksum. What another process has written is compared with it when it is first
    read: damage is an `IoError` (EBADMSG) of the read that reaches the end of a damaged stretch.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        run: str,
        rank: int,
        spec: StoreSpec,
        queue: Queue,
        written: Written | None = None,
        spans: DriveSpans = NO_SPANS,
    ) -> None:
        """`spans` shows requests and commits."""
        if len(spec.partitions) > MAX_UNITS:
            raise StoreError(f"the model has {len(spec.partitions)} units, a store holds at most {MAX_UNITS}")
        self.spec = spec
        self.run = run
        # The process may change its folder later.
        self.folders = [Path(os.path.abspath(path)) / run / f"rank{rank}" for path in paths]
        self.newest = [0] * len(spec.partitions)
        self.durable: Record | None = None
        self.written = Written(paths) if written is None else written
        """What goes to each drive, of this store and of whoever else shares the count."""
        self.notices: list[str] = []
        """What was found at `open` that a user should know."""
        self._rank, self._queue, self._spans = rank, queue, spans
        self._places = spec.places()
        self._checked = spec.slots == 2
        self._sums: dict[Key, Slot] = {}
        self._passages = Passages()
        self._unproven: dict[Key, set[int]] = {}
        """Of the newest slots the starts of the stretches that this process has neither written nor compared."""
        self._manifest: Manifest | None = None
        self._file: StripedFile | None = None
        self._commit_path = self.folders[0] / "commit"
        self._locks = _lock_all(self.folders)
        close_in_children.add(self)

    # -- opening ------------------------------------------------------------------------------------

    def create(self, over: bool = False) -> None:
        """Start over: reserve all room and write the manifest. Nothing is durable before `commit`.

        `over` says that commits of this run may be deleted. Raises `StoreError` where there are others' files, or
        there is no room.
        """
        try:
            self._check_mine(over)
        except BaseException:
            self.close()  # what lies there stays
            raise
        try:
            self._forget()
            self._check_room(find_shortage(self._drives, self.spec.nbytes))
            self._manifest = self._new_manifest()
            self._file = self._states(create=True)
            self._check_shares()
            self._file.reserve(self.spec.nbytes)
            write_in_place(self._commit_path, bytes(2 * PAGE))
            self._write_manifests()
            for folder in self.folders:  # also where another rank has made the folders
                sync_folder(folder)
                sync_folder(folder.parent)
                sync_folder(folder.parent.parent)
            if not self._checked:
                self._forget_end()
                for folder in self.folders:  # nobody can go on with them: however this process ends, their room is free
                    (folder / "states").unlink()
            else:
                for unit, row in enumerate(self._places):
                    self._sums |= {(unit, state): sums.of_zeros(slots[0]) for state, slots in row.items()}
        except BaseException:
            # Nothing is in this store yet: a start that fails leaves no files behind.
            self._unlink()  # while nobody else may have it
            self.close()
            raise

    def _check_mine(self, over: bool) -> None:
        """Raise `StoreError` where a folder holds what is not a remainder of this run: it may be another's, in use."""
        first, ended = self.folders[0], self._end.exists()
        mine = place_of(first)[0]
        for drive, folder in enumerate(self.folders):
            its, number, at = place_of(folder)
            if its is not None and number and (number != drive or its != mine):
                # Where the run ended, its removal may have been cut short; else its first drive may be missing.
                if not (ended and number == drive):
                    raise StoreError(
                        f"{folder} holds drive {number} of a run whose first drive is {at}: mount that one and give "
                        f"the drives in the order that they had, or choose another run name, or delete what lies there "
                        f"with `offload rm {folder.parent}`"
                    )
            elif was_committed(folder) and not (over and not drive) and not (folder.parent / _END).exists():
                raise StoreError(
                    f"{folder} holds a run that did not end; go on with it by --resume auto, with the drives that it "
                    f"had in their order, or choose another run name, or delete it with `offload rm {folder.parent}`"
                )

    def _forget(self) -> None:
        """Delete what an earlier start has left, a record before what it names; the note of an end goes at last."""
        first = self.folders[0]
        for name in ("commit", "blob.1"):
            (first / name).unlink(missing_ok=True)
            sync_folder(first)
        sync_folder(first.parent)
        for folder in reversed(self.folders):  # the first drive says whose the others are
            for name in ("blob.0", "states", "suspect", "manifest.json"):
                (folder / name).unlink(missing_ok=True)
            sync_folder(folder)

    def _forget_end(self) -> None:
        """Take the notes of an earlier run's end away, durably: from now on what lies here is a run."""
        notes = [note for note in (self._end, self._end.with_name(_CLOSED)) if note.exists()]
        for note in notes:
            note.unlink(missing_ok=True)
        if notes:
            sync_folder(self._end.parent)

    def newest_serial(self) -> int | None:
        """The number of the last commit of what is there that can be opened; None where none was ever made.

        Raises `StoreError` where something was committed and cannot be opened.
        """
        if not was_committed(self.folders[0]):
            return None
        return self._newest(read_records(self._commit_path)).serial

    def open(self, at: int | None = None) -> dict[str, torch.Tensor]:
        """Open what is there and return what its last commit holds, or the one before if that is number `at`.

        The one before may be asked for where another rank has not made the last one: then nothing of it was
        overwritten, and the last one is taken back for good.
        """
        try:
            found = read_records(self._commit_path)
            record = self._newest(found) if at is None else self._record_at(at, found.valid)
            held = read_blob(self.folders[0], record)
            if held is None:
                raise self._damaged_blob(record)
            self._open_files(record, held)
            for later in found.valid:
                if later.serial > record.serial:
                    # What it names is about to be overwritten: it must never be found again.
                    write_in_place(self._commit_path, bytes(PAGE), later.blob * PAGE)
            if self._commit_path.stat().st_size > 2 * PAGE:
                os.truncate(self._commit_path, 2 * PAGE)
            self._suspect.unlink(missing_ok=True)
            self._forget_end()  # from now on a kill leaves a run to go on with
            self.durable = record
            self.newest = list(record.slots)
            self._sums = sums.unpack(held.sums)
            self.written.go_on(held.written)
            self._unproven = {key: {each.start for each in stretches} for key, stretches in self._sums.items()}
            return held.contents()
        except BaseException:
            self.close()
            raise

    def _newest(self, found: Records) -> Record:
        """The newest record that can be opened.

        Where a page is torn or a blob is damaged, that may be the trace of a commit that a power cut interrupted, and
        the commit before is whole; or it is damage of later, and the slots of the commit before have been written over.
        All that it names is read to know, and also where damage was seen before.
        """
        records = found.valid
        if not records:
            if found.other_format is not None:
                read_manifest(self.folders[0] / "manifest.json")  # says that it is, and which version made it
            raise StoreError(f"{self.folders[0]} has no commit record whose checksum is right: it cannot be resumed")
        doubtful = bool(found.torn) or self._suspect.exists()
        wrong: list[str] = []
        for record in records:
            if len(record.slots) != len(self.newest):
                raise StoreError(
                    f"{self.folders[0]} is of another model: it has {count_of(len(record.slots), 'unit')}, this one "
                    f"{len(self.newest)}; choose another run name, or remove it with `offload rm "
                    f"{self.folders[0].parent}`"
                )
            held = read_blob(self.folders[0], record)
            if held is None:
                wrong.append(f"blob.{record.blob} of step {record.epoch} is damaged")
                continue
            if record is records[0] and not doubtful:
                return record
            self._open_files(record, held)
            assert self._file is not None
            damage = first_damage(
                self._file, self._queue, self._places, record.slots, sums.unpack(held.sums), self.spec.title
            )
            self._file.close()
            self._file = None
            if damage is None:
                why = f" ({'; '.join(wrong)})" if wrong else ""
                self.notices.append(f"a commit is not whole{why}; step {record.epoch} was checked and is taken")
                return record
            wrong.append(f"step {record.epoch}: {damage}")
        raise StoreError(
            f"{self.folders[0]}: no commit is whole: {'; '.join(wrong)}; it cannot be resumed, go back to a checkpoint"
        )

    def _damaged_blob(self, record: Record) -> StoreError:
        return StoreError(
            f"{self.folders[0]}/blob.{record.blob} is damaged: step {record.epoch} cannot be resumed, and no other is "
            f"there; go back to a checkpoint"
        )

    def _record_at(self, serial: int, records: Sequence[Record]) -> Record:
        for record in records:
            if record.serial == serial:
                return record
        have = ", ".join(str(record.serial) for record in records)
        raise StoreError(
            f"{self.folders[0]} holds commits {have}, but the last that all ranks hold is {serial}; "
            f"these folders are not of one run"
        )

    def _open_files(self, record: Record, held: blob.Blob) -> None:
        """Find the manifest, compare it, open the states on all drives."""
        copy = Manifest.unpack(held.manifest, f"{self.folders[0]}/blob.{record.blob}")
        compare(self.spec, copy.spec, self.folders[0])
        if len(copy.weights) != len(self.folders):
            raise StoreError(
                f"{self.folders[0]} lies on {count_of(len(copy.weights), 'drive')} "
                f"({', '.join(copy.drives)}), nvme_path has {len(self.folders)}; give the same ones in the same order"
            )
        self._manifest = copy
        missing = False
        for drive, folder in enumerate(self.folders):
            path = folder / "manifest.json"
            try:
                found = read_manifest(path)
            except StoreError as error:
                self.notices.append(f"{error}; it is written anew from the copy that step {record.epoch} holds")
                missing = True
                continue
            number = place_of(folder)[1]
            if (found.id, number) != (copy.id, drive):
                raise StoreError(
                    f"{folder} holds drive {number} of store {found.id}, expected drive {drive} of store {copy.id}: "
                    f"mount the drives of this run, in the order {', '.join(copy.drives)}"
                )
        self._file = self._states()
        for part, nbytes in zip(self._file.parts(), self._drive_nbytes(), strict=True):
            if part.size() < nbytes:
                raise StoreError(
                    f"{part.path} is cut short: {part.size()} bytes of {nbytes}; the store cannot be used, go back to "
                    f"a checkpoint"
                )
        if missing:
            self._write_manifests()

    def _states(self, create: bool = False) -> StripedFile:
        assert self._manifest is not None
        return StripedFile(
            [folder / "states" for folder in self.folders],
            self._manifest.weights,
            stripe_bytes=self._manifest.stripe_bytes,
            create=create,
        )

    # -- data ---------------------------------------------------------------------------------------

    def keeps(self, unit: int, state: State) -> bool:
        """Whether this state of this unit has slots here."""
        return state in self._places[unit]

    def target(self, unit: int) -> int:
        """The slot that an update may write: the one that the last durable record does not name.

        What is frozen lies in both: who writes that writes over what the record names.
        """
        if self.spec.slots == 1:
            return 0
        return 0 if self.durable is None else 1 - self.durable.slots[unit]

    def read(
        self,
        unit: int,
        state: State,
        slot: int,
        start: int,
        buffer: memoryview,
        priority: Priority = Priority.NORMAL,
        compare: bool = False,
    ) -> Future:
        """Fill `buffer` from byte `start` of a slot; pieces in order, so that all can be compared.

        With `compare` also what this process has written, or found right before.
        """
        began = now()
        place = self._places[unit][state][slot]
        assert start + len(buffer) <= place.nbytes and self._file is not None
        unproven = (unit, state) in self._unproven
        checked = slot == self.newest[unit] and ((compare and self._checked) or unproven)
        file, offset = bytes_of(self._file, place, start, len(buffer))
        future: Future = self._queue.read(file, offset, buffer, priority=priority, checksum=checked)
        if checked:
            # The sums of this moment: an update may have given the unit others by the time that somebody looks.
            future = Compared(future, partial(self._compare, (unit, state), slot, self._sums[unit, state], start))
        return self._spans.show(Row.READS, unit, state, began, len(buffer), future)

    def sum_of(self, unit: int, state: State, nbytes: int) -> int | None:
        """The CRC-32C of the first `nbytes` of the newest slot; None where it is not known."""
        return sums.sum_of(self._sums[unit, state], 0, nbytes) if self._checked else None

    def clone(self, unit: int, state: State, nbytes: int, descriptor: int, offset: int) -> bool:
        """Let another file share the first `nbytes` of the newest slot; False where they cannot be shared."""
        assert self._file is not None
        parts = self._file.parts()
        if len(parts) > 1:
            return False
        for start, length in self._places[unit][state][self.newest[unit]].stretches(0, nbytes):
            if not clone_range(parts[0].descriptors.buffered, start, length, descriptor, offset):
                return False
            offset += length
        return True

    def write(self, unit: int, state: State, slot: int, start: int, buffer: memoryview) -> Future:
        """Write `buffer` at byte `start` of a slot; it must stay unchanged until the future is done."""
        began = now()
        place = self._places[unit][state][slot]
        assert start + len(buffer) <= place.nbytes and self._file is not None
        for offset, nbytes in place.stretches(start, len(buffer)):
            for drive, _, count in self._file.layout.places(offset, nbytes):
                self.written.add(drive, count)
        file, offset = bytes_of(self._file, place, start, len(buffer))
        future = self._queue.write(file, offset, buffer, priority=Priority.BACKGROUND, checksum=self._checked)
        return self._spans.show(Row.WRITES, unit, state, began, len(buffer), future)

    def wrote(self, unit: int, slot: int, written: Mapping[State, Sequence[tuple[int, Future]]]) -> None:
        """From now on `slot` is the newest: of each state kept, `written` has each write's start and ended future.

        The writes of a state lie one behind the other, from its start on; frozen weights behind them stay.
        """
        if self._checked:
            for state, writes in written.items():
                new = [Stretch(start, future.wait(), future.crc32c()) for start, future in writes]
                if len(new) > _most_stretches(new[-1].start + new[-1].nbytes):  # tiny tiles: sub_group_size
                    new = sums.joined(new, _LEAST_STRETCH)
                self._sums[unit, state] = sums.renewed(self._sums[unit, state], new)
                self._prove((unit, state), range(new[-1].start + new[-1].nbytes))
        self.newest[unit] = slot

    def _compare(self, key: Key, slot: int, written: Slot, start: int, nbytes: int, crc: int) -> None:
        """Raise `IoError` where what was read of a slot is not what was written."""
        unit, state = key
        right, compared = self._passages.compare(key, written, start, nbytes, crc)
        if right:
            self._prove(key, compared)
        if not right:
            assert self._file is not None
            with contextlib.suppress(OSError):  # the damage is what is told
                reserve(self._suspect, 1)
            raise IoError(
                self._file.path,
                self._places[unit][state][slot].offset(start),
                nbytes,
                errno.EBADMSG,
                f"use {state.value} of {self.spec.title(unit)}, slot {'AB'[slot]},",
            )

    def _prove(self, key: Key, stretch: range) -> None:
        """These bytes of the newest slot need not be compared any more."""
        left = {start for start in self._unproven.get(key, ()) if start not in stretch}
        if left:
            self._unproven[key] = left
        else:
            self._unproven.pop(key, None)

    def commit(self, epoch: int, contents: Mapping[str, torch.Tensor]) -> None:
        """Make `newest` and `contents` the durable state. All writes must have ended."""
        with self._spans.commit(epoch):
            self._commit(epoch, contents)

    def _commit(self, epoch: int, contents: Mapping[str, torch.Tensor]) -> None:
        assert self._file is not None and self._manifest is not None
        self._file.sync()
        which = 0 if self.durable is None else 1 - self.durable.blob
        data = blob.pack(contents, sums.pack(self._sums), self._manifest.pack(), self.written.pack())
        self._reserve_blobs(len(data) + self._more_sums())
        write_in_place(self.folders[0] / f"blob.{which}", data)
        serial = 1 if self.durable is None else self.durable.serial + 1
        record = Record(serial, epoch, tuple(self.newest), which, len(data), crc32c(data), time.time_ns())
        write_in_place(self._commit_path, record.pack(), which * PAGE)
        self.durable = record
        self.written.add(0, len(data) + PAGE)  # the next commit holds these
        if serial == 1:
            self._forget_end()

    def _more_sums(self) -> int:
        """Bytes by which the checksums may grow: at first there is one for each state, then one for each tile."""
        sizes = [slots[0].nbytes for row in self._places for slots in row.values()]
        most = sum(map(_most_stretches, sizes))
        return sums.ROW_NBYTES * max(0, most - sum(map(len, self._sums.values())))

    def _reserve_blobs(self, nbytes: int) -> None:
        """Room for both blobs, so that a disk that others fill does not end the run."""
        paths = [self.folders[0] / "blob.0", self.folders[0] / "blob.1"]
        have = [path.stat().st_size if path.exists() else None for path in paths]
        for path, size in zip(paths, have, strict=True):
            if size is None or size < nbytes:
                reserve(path, nbytes + nbytes // 4)
        if None in have:
            sync_folder(self.folders[0])

    # -- closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close files and give the lock back; idempotent. All futures must be done."""
        if self._file is not None:
            self._file.close()
        self._file = None
        for lock in self._locks:
            lock.release()

    def close_in_child(self) -> None:
        """A forked child keeps neither the lock, which would outlive the run, nor the room of deleted files."""
        if self._file is not None:
            for part in self._file.parts():
                part.descriptors.close()
        for lock in self._locks:
            lock.release()

    def note_end(self, facts: Mapping[str, Any]) -> None:
        """Leave `finished.json` with `facts`: from now on what lies beside it is a remainder, which means nothing."""
        note = dict(facts, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        write_durably(self._end, json.dumps(note).encode())

    def note_closed(self, facts: Mapping[str, Any]) -> None:
        """Leave `closed.json` with `facts`: the run can be gone on with, and a start that does not may replace it."""
        write_durably(self._end.with_name(_CLOSED), json.dumps(facts).encode())

    def remove(self, notes: bool = False) -> None:
        """Delete the files, and close; with `notes` the last rank also deletes what says how the run ended.

        Does nothing once it is closed.
        """
        if self._locks[0].held:
            self._unlink(notes)  # before the locks are given back: another process may start this run again at once
        self.close()

    def _unlink(self, notes: bool = False) -> None:
        for folder in reversed(self.folders):  # the first drive says what the others are
            with contextlib.suppress(OSError):
                remove_files(folder)
                if notes and folder == self.folders[0] and not any(folder.parent.glob("rank*")):
                    for note in (self._end, self._end.with_name(_CLOSED)):
                        note.unlink(missing_ok=True)
                folder.parent.rmdir()  # other ranks may still be there

    @property
    def _end(self) -> Path:
        return self.folders[0].parent / _END

    @property
    def _suspect(self) -> Path:
        """A note that something of the last commit was found damaged: the next open compares all of it."""
        return self.folders[0] / "suspect"

    # -- what lies where ----------------------------------------------------------------------------

    @property
    def _drives(self) -> list[Path]:
        return [folder.parent.parent for folder in self.folders]

    def _new_manifest(self) -> Manifest:
        weights: Sequence[float] = [1.0]
        if len(self.folders) > 1:
            speeds = [each.swap for each in _measured(self.folders)]
            weights = [max(share, 1.0) for share in shares(self._drives, speeds, self.spec.nbytes)]
        return Manifest(
            id=uuid.uuid4().hex,
            run=self.run,
            rank=self._rank,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            drives=tuple(str(drive.resolve()) for drive in self._drives),
            weights=whole_weights(weights),
            stripe_bytes=_STRIPE_BYTES,
            spec=self.spec,
        )

    def _write_manifests(self) -> None:
        assert self._manifest is not None
        for drive, folder in enumerate(self.folders):
            write_durably(folder / "manifest.json", self._manifest.pack(drive))

    def _drive_nbytes(self) -> list[int]:
        assert self._file is not None
        return self._file.layout.file_nbytes(self.spec.nbytes)

    def _check_shares(self) -> None:
        """The room of each file system for its own share, once that is known."""
        need: dict[int, int] = {}
        for drive, nbytes in zip(self._drives, self._drive_nbytes(), strict=True):
            device = os.stat(drive).st_dev
            need[device] = need.get(device, 0) + nbytes
            free = shutil.disk_usage(drive).free
            if free < need[device]:
                self._check_room(Shortage(str(drive), need[device], free))

    def _check_room(self, short: Shortage | None) -> None:
        """Compare what is asked of each file system with what is free, before anything is written."""
        if short is not None:
            half = (
                ', or set "durability": "none" in the "offload" block (one slot instead of two of all that trains, no '
                "resume after a kill)"
            )
            raise StoreError(
                f"the swap files need {format_size(short.need)}, {short.path} has {format_size(short.free)} "
                f"free; free some room, or add a drive to nvme_path{half if self.spec.slots == 2 else ''}"
            )


def _most_stretches(nbytes: int) -> int:
    """How many checksums a slot may have, for which the blobs have room: frozen weights have one of their own."""
    return 2 + nbytes // _LEAST_STRETCH


def _lock_all(folders: Sequence[Path]) -> list[Lock]:
    """Make the folders of a rank and take them all; raises `StoreError`."""
    if len({folder.parent.parent.resolve() for folder in folders}) < len(folders):
        raise StoreError(f"nvme_path names a folder twice: {', '.join(str(f.parent.parent) for f in folders)}")
    while True:
        make_folders(folders)
        locks: list[Lock] = []
        try:
            for folder in folders:
                locks.append(Lock(folder))
            return locks
        except BaseException as error:
            for lock in locks:
                lock.release()
            if not isinstance(error, FileNotFoundError):  # else who had it has just removed it
                raise


def _measured(folders: Sequence[Path]) -> list[Bandwidth]:
    """How fast the drives are, by the queue that will use them."""
    found = bandwidths(folders, nbytes=128 * MIB, rounds=3)
    for folder, each in zip(folders, found, strict=True):
        logger.info("%s reads %s/s, writes %s/s", folder, format_size(each.read), format_size(each.write))
    return found
