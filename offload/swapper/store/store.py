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
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch

from offload.aio import Bandwidth, File, Priority, StripedFile, bandwidths, crc32c
from offload.aio.stripes import whole_weights
from offload.errors import IoError, StoreError
from offload.sizes import MIB, PAGE, format_size
from offload.swapper.states import State
from offload.swapper.store import sums
from offload.swapper.store.check import first_damage
from offload.swapper.store.clone import clone_range
from offload.swapper.store.drives import Shortage, find_shortage, shares
from offload.swapper.store.folder import (
    Lock,
    close_in_children,
    make_folders,
    reserve,
    sync_folder,
    write_durably,
    write_in_place,
)
from offload.swapper.store.look import MANIFEST, SUMS
from offload.swapper.store.manifest import Manifest, StoreSpec, compare, read_manifest
from offload.swapper.store.record import MAX_UNITS, Record, read_records, was_committed
from offload.swapper.store.sums import Key, Passages, Slot, Stretch

logger = logging.getLogger("offload")

_STRIPE_BYTES = 2 * MIB
_LEAST_STRETCH = MIB // 4
"""Bytes of a state that a tile has, but for the last of a unit, whatever the memory."""


class Future(Protocol):
    """What the store needs of a request in flight."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def crc32c(self) -> int: ...
    def add_done_callback(self, function: Callable[[Any], object]) -> None: ...


class Queue(Protocol):
    """What the store needs of an I/O queue; `aio.IoQueue` is one, tests put faults in front of it."""

    def read(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = ..., checksum: bool = ...
    ) -> Future: ...
    def write(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = ..., checksum: bool = ...
    ) -> Future: ...


class Store:
    """One rank's swap files, open and locked.

    `newest[unit]` is the slot of the newest copy. The update worker alone changes it, by `wrote`, and commits; reads
    may be submitted from any thread. Every future is the caller's to wait for.

    With two slots every write gives its checksum. What another process has written is compared with it when it is first
    read: damage is an `IoError` (EBADMSG) of the read that reaches the end of a damaged stretch.
    """

    def __init__(self, paths: Sequence[str | Path], run: str, rank: int, spec: StoreSpec, queue: Queue) -> None:
        if len(spec.partitions) > MAX_UNITS:
            raise StoreError(f"the model has {len(spec.partitions)} units, a store holds at most {MAX_UNITS}")
        self.spec = spec
        self.run = run
        self.folders = [Path(path) / run / f"rank{rank}" for path in paths]
        self.newest = [0] * len(spec.partitions)
        self.durable: Record | None = None
        self.notices: list[str] = []
        """What was found at `open` that a user should know."""
        self._rank, self._queue = rank, queue
        self._extents = spec.extents()
        self._checked = spec.slots == 2
        self._sums: dict[Key, Slot] = {}
        self._passages = Passages()
        self._unproven: dict[tuple[Key, int], set[int]] = {}
        """For each slot the starts of the stretches in it that this process has neither written nor compared."""
        self._manifest: Manifest | None = None
        self._file: StripedFile | None = None
        self._commit_path = self.folders[0] / "commit"
        make_folders(self.folders)
        self._lock = Lock(self.folders[0])
        close_in_children.add(self)

    # -- opening ------------------------------------------------------------------------------------

    def create(self) -> None:
        """Start over: reserve all room and write the manifest. Nothing is durable before `commit`."""
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
            if self._checked:
                for unit, row in enumerate(self._extents):
                    self._sums |= {(unit, state): sums.of_zeros(slots[0].nbytes) for state, slots in row.items()}
        except BaseException:
            # Nothing is in this store yet: a start that fails leaves no files behind.
            self.close()
            self._unlink()
            raise

    def _forget(self) -> None:
        """Delete what an earlier start has left: a record before what it names, and the note of an end after both."""
        first = self.folders[0]
        for name in ("commit", "blob.1"):
            (first / name).unlink(missing_ok=True)
            sync_folder(first)
        sync_folder(first.parent)
        (first.parent / "finished.json").unlink(missing_ok=True)
        for path in (first / "blob.0", first / "manifest.json", *(folder / "states" for folder in self.folders)):
            path.unlink(missing_ok=True)

    def newest_serial(self) -> int | None:
        """The number of the last commit of what is there that can be opened; None where none was ever made.

        Raises `StoreError` where something was committed and cannot be opened.
        """
        if not was_committed(self.folders[0]):
            return None
        found = read_records(self._commit_path)
        return self._newest(found.valid, found.torn).serial

    def open(self, at: int | None = None) -> dict[str, torch.Tensor]:
        """Open what is there and return what its last commit holds, or the one before if that is number `at`.

        The one before may be asked for where another rank has not made the last one: then nothing of it was
        overwritten, and the last one is taken back for good.
        """
        try:
            found = read_records(self._commit_path)
            record = self._newest(found.valid, found.torn) if at is None else self._record_at(at, found.valid)
            contents = self._read_blob(record)
            if contents is None:
                raise self._damaged_blob(record)
            self._open_files(record, contents)
            for later in found.valid:
                if later.serial > record.serial:
                    # What it names is about to be overwritten: it must never be found again.
                    write_in_place(self._commit_path, bytes(PAGE), later.blob * PAGE)
            self.durable = record
            self.newest = list(record.slots)
            self._sums = sums.unpack(contents.pop(SUMS))
            # Of a slot that is not the newest only what is frozen in it is ever read before it is written.
            self._unproven = {
                (key, slot): {stretch.start for stretch in stretches}
                for key, stretches in self._sums.items()
                for slot in (0, 1)
            }
            del contents[MANIFEST]
            return contents
        except BaseException:
            self.close()
            raise

    def _newest(self, records: Sequence[Record], torn: Sequence[int]) -> Record:
        """The newest record that can be opened.

        Where a page is torn or a blob is damaged, that may be the trace of a commit that a power cut interrupted, and
        the commit before is whole; or it is damage of later, and the slots of the commit before have been written over.
        All that it names is read to know.
        """
        if not records:
            raise StoreError(f"{self.folders[0]} has no commit record whose checksum is right: it cannot be resumed")
        for record in records:
            if len(record.slots) != len(self.newest):
                raise StoreError(
                    f"{self.folders[0]} is of another model: it has {len(record.slots)} units, this one "
                    f"{len(self.newest)}; choose another run name, or remove it with `offload rm "
                    f"{self.folders[0].parent}`"
                )
            contents = self._read_blob(record)
            if contents is None:
                continue
            if record is records[0] and not torn:
                return record
            self._open_files(record, contents)
            assert self._file is not None
            damage = first_damage(
                self._file, self._queue, self._extents, record.slots, sums.unpack(contents[SUMS]), self.spec.title
            )
            self._file.close()
            self._file = None
            if damage is None:
                self.notices.append(
                    f"a commit after epoch {record.epoch} is not whole; epoch {record.epoch} was checked and is taken"
                )
                return record
            raise StoreError(
                f"{self.folders[0]}: a commit after epoch {record.epoch} is not whole, and epoch {record.epoch} is not "
                f"either: {damage}; it cannot be resumed, go back to a checkpoint"
            )
        raise self._damaged_blob(records[0])

    def _damaged_blob(self, record: Record) -> StoreError:
        return StoreError(
            f"{self.folders[0]}/blob.{record.blob} is damaged: epoch {record.epoch} cannot be resumed, and no other is "
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

    def _open_files(self, record: Record, contents: Mapping[str, torch.Tensor]) -> None:
        """Find the manifest, compare it, open the states on all drives."""
        copy = Manifest.unpack(bytes(contents[MANIFEST].numpy()), f"{self.folders[0]}/blob.{record.blob}")
        compare(self.spec, copy.spec, self.folders[0])
        if len(copy.weights) != len(self.folders):
            raise StoreError(
                f"{self.folders[0]} lies on {len(copy.weights)} drives ({', '.join(copy.drives)}), nvme_path has "
                f"{len(self.folders)}; give the same ones in the same order"
            )
        self._manifest = copy
        missing = False
        for drive, folder in enumerate(self.folders):
            path = folder / "manifest.json"
            try:
                found = read_manifest(path)
            except StoreError as error:
                self.notices.append(f"{error}; it is written anew from the copy that epoch {record.epoch} holds")
                missing = True
                continue
            number = json.loads(path.read_bytes()).get("drive")
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
        return state in self._extents[unit]

    def target(self, unit: int) -> int:
        """The slot that an update may write: the one that the last durable record does not name."""
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
        extent = self._extents[unit][state][slot]
        assert start + len(buffer) <= extent.nbytes and self._file is not None
        unproven = ((unit, state), slot) in self._unproven
        checked = slot == self.newest[unit] and ((compare and self._checked) or unproven)
        future = self._queue.read(self._file, extent.offset + start, buffer, priority=priority, checksum=checked)
        if not checked:
            return future
        # The sums of this moment: an update may have given the unit others by the time that somebody looks.
        return _Checked(future, partial(self._compare, (unit, state), slot, self._sums[unit, state], start))

    def sum_of(self, unit: int, state: State, nbytes: int) -> int | None:
        """The CRC-32C of the first `nbytes` of the newest slot; None where it is not known."""
        return sums.sum_of(self._sums[unit, state], 0, nbytes) if self._checked else None

    def clone(self, unit: int, state: State, nbytes: int, descriptor: int, offset: int) -> bool:
        """Let another file share the first `nbytes` of the newest slot; False where they cannot be shared."""
        assert self._file is not None
        parts = self._file.parts()
        start = self._extents[unit][state][self.newest[unit]].offset
        return len(parts) == 1 and clone_range(parts[0].descriptors.buffered, start, nbytes, descriptor, offset)

    def write(self, unit: int, state: State, slot: int, start: int, buffer: memoryview) -> Future:
        """Write `buffer` at byte `start` of a slot; it must stay unchanged until the future is done."""
        extent = self._extents[unit][state][slot]
        assert start + len(buffer) <= extent.nbytes and self._file is not None
        return self._queue.write(
            self._file, extent.offset + start, buffer, priority=Priority.BACKGROUND, checksum=self._checked
        )

    def wrote(self, unit: int, slot: int, written: Mapping[State, Sequence[tuple[int, Future]]]) -> None:
        """From now on `slot` is the newest: of each state kept, `written` has each write's start and ended future.

        The writes of a state lie one behind the other, from its start on; frozen weights behind them stay.
        """
        if self._checked:
            for state, writes in written.items():
                new = [Stretch(start, future.wait(), future.crc32c()) for start, future in writes]
                self._sums[unit, state] = sums.renewed(self._sums[unit, state], new)
                self._prove((unit, state), slot, range(new[-1].start + new[-1].nbytes))
        self.newest[unit] = slot

    def _compare(self, key: Key, slot: int, written: Slot, start: int, nbytes: int, crc: int) -> None:
        """Raise `IoError` where what was read of a slot is not what was written."""
        unit, state = key
        extent = self._extents[unit][state][slot]
        right, compared = self._passages.compare(key, written, start, nbytes, crc)
        if right:
            self._prove(key, slot, compared)
        if not right:
            assert self._file is not None
            raise IoError(
                self._file.path,
                extent.offset + start,
                nbytes,
                errno.EBADMSG,
                f"use {state.value} of {self.spec.title(unit)}, slot {'AB'[slot]},",
            )

    def _prove(self, key: Key, slot: int, stretch: range) -> None:
        """These bytes of a slot need not be compared any more."""
        left = {start for start in self._unproven.get((key, slot), ()) if start not in stretch}
        if left:
            self._unproven[key, slot] = left
        else:
            self._unproven.pop((key, slot), None)

    def commit(self, epoch: int, contents: Mapping[str, torch.Tensor]) -> None:
        """Make `newest` and `contents` the durable state. All writes must have ended."""
        assert self._file is not None and self._manifest is not None
        self._file.sync()
        which = 0 if self.durable is None else 1 - self.durable.blob
        manifest = torch.frombuffer(bytearray(self._manifest.pack()), dtype=torch.uint8)
        blob = safetensors.torch.save({**contents, SUMS: sums.pack(self._sums), MANIFEST: manifest})
        self._reserve_blobs(len(blob) + self._more_sums())
        write_in_place(self.folders[0] / f"blob.{which}", blob)
        serial = 1 if self.durable is None else self.durable.serial + 1
        record = Record(serial, epoch, tuple(self.newest), which, len(blob), crc32c(blob), time.time_ns())
        write_in_place(self._commit_path, record.pack(), which * PAGE)
        self.durable = record

    def _more_sums(self) -> int:
        """Bytes by which the checksums may grow: at first there is one for each state, then one for each tile."""
        places = [slots[0].nbytes for row in self._extents for slots in row.values()]
        most = sum(2 + nbytes // _LEAST_STRETCH for nbytes in places)
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
        self._lock.release()

    def close_in_child(self) -> None:
        """A forked child keeps neither the lock, which would outlive the run, nor the room of deleted files."""
        if self._file is not None:
            for part in self._file.parts():
                part.descriptors.close()
        self._lock.release()

    def remove(self, finished: Mapping[str, Any] | None = None) -> None:
        """Delete the files, close, and leave `finished.json` beside where they were."""
        if finished is not None:  # first: what a kill then leaves of the rest means nothing
            note = dict(finished, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))
            write_durably(self.folders[0].parent / "finished.json", json.dumps(note).encode())
        self._unlink()  # before the lock is given back: another process may start this run again at once
        self.close()

    def _unlink(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other ranks may still be there
                folder.parent.rmdir()

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
            uuid.uuid4().hex,
            self.run,
            self._rank,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            tuple(str(drive.resolve()) for drive in self._drives),
            whole_weights(weights),
            _STRIPE_BYTES,
            self.spec,
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
                ', or set "durability": "none" in the "offload" block (one slot instead of two: half the room, no '
                "resume after a kill)"
            )
            raise StoreError(
                f"the swap files need {format_size(short.need)}, {short.path} has {format_size(short.free)} "
                f"free; free some room, or add a drive to nvme_path{half if self.spec.slots == 2 else ''}"
            )

    def _read_blob(self, record: Record) -> dict[str, torch.Tensor] | None:
        try:
            blob = (self.folders[0] / f"blob.{record.blob}").read_bytes()[: record.blob_nbytes]
        except OSError:
            return None
        if len(blob) != record.blob_nbytes or crc32c(blob) != record.blob_crc:
            return None
        return safetensors.torch.load(blob)


class _Checked:
    """A read whose bytes are compared when it is waited for."""

    def __init__(self, future: Future, compare: Callable[[int, int], None]) -> None:
        self._future, self._compare = future, compare
        self._compared = False

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        nbytes = self._future.wait(timeout)
        if not self._compared:
            self._compare(nbytes, self._future.crc32c())
            self._compared = True
        return nbytes

    def crc32c(self) -> int:
        return self._future.crc32c()

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: function(self))


def _measured(folders: Sequence[Path]) -> list[Bandwidth]:
    """How fast the drives are, by the queue that will use them."""
    found = bandwidths(folders, nbytes=128 * MIB, rounds=3)
    for folder, each in zip(folders, found, strict=True):
        logger.info("%s reads %s/s, writes %s/s", folder, format_size(each.read), format_size(each.write))
    return found
