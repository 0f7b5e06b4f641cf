"""One rank's swap files while a process has them open and locked.

    create ──┐                    ┌── read, write ──► replace checksums, `newest` (wrote) ──┐
             ├──► open and locked ┤                                                         ├──► close or remove
    open  ───┘                    └── commit: sync data ► blob ► record ◄───────────────────┘

`SwapFiles` makes, opens and deletes all the files together; `Store` writes slots, blobs and records. The decisions are
functions of other modules: `recovery` (from which commit a run resumes), `drives` (how much each drive takes),
`format.checksum_table` (the checksums with which reads are compared).

Threads: the update worker alone calls `wrote` and `commit`; any thread may submit reads and wait for them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.aio import Priority, aligned_empty, crc32c
from offload.aio.protocols import Future, Queue
from offload.aio.unanswered import aloud
from offload.errors import IoError, StoreError
from offload.sizes import MIB, PAGE
from offload.states import State
from offload.swapper.store import recovery
from offload.swapper.store.drive_spans import NO_SPANS, DriveSpans
from offload.swapper.store.format import blob
from offload.swapper.store.format.checksum_table import ChecksumTable
from offload.swapper.store.format.checksums import Key
from offload.swapper.store.format.commit_record import MAX_UNITS, Record, Records, read_records, was_committed
from offload.swapper.store.format.manifest import Manifest, StoreSpec, own_nbytes
from offload.swapper.store.format.undo import Undo
from offload.swapper.store.rank_folder import reserve_blobs, write_in_place
from offload.swapper.store.requests import CheckedRead, bytes_of, clone_extents
from offload.swapper.store.swap_files import SwapFiles
from offload.swapper.store.verify import Damage, first_damage
from offload.swapper.store.write_counts import Written
from offload.timeline import Row, now

if TYPE_CHECKING:
    import torch

_SCRUB_NBYTES = MIB // 4
"""Bytes that a commit scrubs at least."""
_SCRUB_S = 24 * 3600.0
"""Seconds in which commits scrub all bytes that nothing else reads, if there is a commit now and then."""


class Store:
    """One rank's swap files, open and locked.

    `newest[unit]` is the slot of the newest copy. The update worker alone changes it, by `wrote`, and commits; reads
    may be submitted from any thread. The caller must wait for every future.

    Each write yields checksums, with which every read of the newest slots is compared. Bytes that differ are read once
    more; if they differ again, the `wait` of the read raises `IoError` (EBADMSG).
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
        first: int | None = None,
    ) -> None:
        """Makes and locks the rank's folders. `create` or `open` must follow.

        Args:
            paths: The folder for swap files of each drive. The first holds records and blobs.
            run: The name of the run.
            rank: The rank whose files they are.
            spec: The contents that the store must have.
            queue: Reads and writes the files; it belongs to the caller.
            written: Counts the bytes written to each drive; may be shared with spill files. None for a new count.
            spans: Records requests and commits on the timeline.
            first: The first commit's number, for folders beside those of a run with other ranks; None for a run's own.

        Raises:
            StoreError: If the model has too many units, or a folder cannot be made or is in use.
        """
        if len(spec.partitions) > MAX_UNITS:
            raise StoreError(f"the model has {len(spec.partitions)} units, a store holds at most {MAX_UNITS}")
        self.spec = spec
        self.run = run
        self.newest = [0] * len(spec.partitions)
        self.durable: Record | None = None
        self._before: Record | None = None  # the one before `durable`; other processes may have no newer one
        self.written = Written(paths) if written is None else written
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
        self._scrubbed: list[tuple[Key, int]] = []
        """The slots that are left to scrub in the pass, each with the first byte; the next one is the last."""
        self._last_scrub = time.monotonic()
        self._read_whole: set[Key] = set()
        """Slots that were read up to their ends since the pass began; any thread adds."""
        self._undo = Undo(self.folders[0])

    # -- opening ------------------------------------------------------------------------------------

    def create(self, over: bool = False, run_id: str | None = None) -> None:
        """Makes new files: reserves all room and writes the manifests. No commit exists before `commit`.

        Args:
            over: True if commits of this run may be deleted.
            run_id: The id of the run, the same on all ranks; None if unknown.

        Raises:
            StoreError: If there are files of another run, or there is no room.
        """
        try:
            recovery.check_startable(self.folders, over)
            if was_committed(self.folders[0]):  # before the run is lost
                self._files.check_room()
        except BaseException:
            self.close()  # the files found stay
            raise
        try:
            self._files.create(run_id)
            self._sums.fill_zeros(self._places)
            if self.spec.slots == 1:
                self._notes.forget_end()
                self._files.unlink_states()  # a run with one slot cannot be resumed
        except BaseException:
            # The store holds nothing yet: a start that fails leaves no files behind.
            self._files.unlink()  # before `close` releases the locks, while no other process can have the files
            self.close()
            raise

    def newest_serial(self) -> int | None:
        """Returns the number of the last commit that can be opened; None if no commit was ever made.

        Raises:
            StoreError: If there was a commit and none can be opened.
        """
        if not was_committed(self.folders[0]):
            return None
        return self._newest(read_records(self._commit_path)).serial

    def open(self, at: int | None = None) -> dict[str, torch.Tensor]:
        """Opens the files at their last commit, or at an earlier one that all ranks have.

        If another rank has not made the last commit, nothing of the commit before was overwritten. Then the commit
        before is opened, and the last one is deleted for good.

        Args:
            at: The number of the commit; None for the newest.

        Returns:
            The contents of the commit, by name.

        Raises:
            StoreError: If the files are damaged, incomplete, or of another run. The store is then closed.
        """
        try:
            found = read_records(self._commit_path)
            record = self._newest(found) if at is None else recovery.record_at(self.folders[0], at, found.valid)
            held = recovery.load_blob(self.folders[0], record)
            self._open_files(record, held)
            damage = None if record is found.valid[0] else partial(self._first_damage, record, held)
            self._undo.put_back(record, self._places, held.sums, self.write, self._files.states.sync, damage)
            # The run will overwrite the slots that a later record names: it must never be found again.
            found.forget_later(self._commit_path, record)
            self._undo.remove()
            self._notes.clear_suspect()
            self._notes.forget_end()  # from now on a kill leaves a run that can be resumed
            self.durable = record
            self.newest = list(record.slots)
            self._sums.load(held.sums, self._places)
            self.written.go_on(held.written)
            return held.contents()
        except BaseException:
            self.close()
            raise

    def _newest(self, found: Records) -> Record:
        """Returns the newest record that can be opened. After any sign of damage, compares all data of its commit."""
        doubtful = bool(found.invalid_pages) or self._notes.suspect
        recovered = recovery.find_newest(self.folders[0], found, len(self.newest), doubtful, self._find_damage)
        if recovered.notice is not None:
            self.notices.append(recovered.notice)
        return recovered.record

    def _find_damage(self, record: Record, held: blob.Blob) -> Damage | None:
        """Opens the files, compares all data of a commit and closes them again; returns the first damage."""
        self._open_files(record, held)
        try:
            return self._first_damage(record, held)
        finally:
            self._files.close_states()

    def _first_damage(self, record: Record, held: blob.Blob) -> Damage | None:
        """Compares all data of a commit, whose files are open; returns the first damage."""
        return first_damage(self._files.states, self._queue, self.spec, record, held.sums, self._undo)

    def _open_files(self, record: Record, held: blob.Blob) -> None:
        """Opens the files of a commit."""
        copy = Manifest.unpack(held.manifest, f"{self.folders[0]}/blob.{record.blob}")
        self.notices += self._files.open(copy, record.step)

    # -- data ---------------------------------------------------------------------------------------

    def keeps(self, unit: int, state: State) -> bool:
        """Returns True if the store has slots for this state of this unit."""
        return state in self._places[unit]

    def target(self, unit: int) -> int:
        """Returns the slot that an update may write: the one that the last durable record does not name.

        Frozen weights are stored once, for both slots. Whoever writes them overwrites what the record names.
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
        compare: bool = True,
    ) -> Future:
        """Submits a read that fills `buffer`. Any thread may call it.

        A unit must not be read while `wrote` changes its newest slot.

        Args:
            unit: The unit.
            state: The state of the unit.
            slot: The slot, 0 or 1. Bytes of the newest one are compared with their checksums.
            start: The first byte, from the start of the slot.
            buffer: Receives the bytes; it belongs to the caller and must live until the future is done.
            priority: The priority in the queue.
            compare: False if the caller compares the bytes with `sum_of`.

        Returns:
            The request. Its `wait` raises `IoError` (EBADMSG) if the bytes are damaged.
        """
        began = now()
        if start + len(buffer) == self._places[unit][state][slot].nbytes:
            self._read_whole.add((unit, state))
        future = self._read(unit, state, slot, start, buffer, priority, compare)
        return self._spans.show(Row.READS, unit, state, began, len(buffer), future)

    def _read(
        self, unit: int, state: State, slot: int, start: int, buffer: memoryview, priority: Priority, compare: bool
    ) -> Future:
        place = self._places[unit][state][slot]
        assert start + len(buffer) <= place.nbytes
        # The checksums at submission: an update may replace them before the read is waited for.
        pages = self._sums.pages((unit, state))
        compared = compare and slot == self.newest[unit]

        def submit(at: int, memory: memoryview) -> Future:
            file, offset = bytes_of(self._files.states, place, at, len(memory))
            return self._queue.read(file, offset, memory, priority=priority, checksum=compared)

        if compared:
            return CheckedRead(pages, start, buffer, submit, partial(self._damaged, unit, state, slot))
        return submit(start, buffer)

    def _damaged(self, unit: int, state: State, slot: int, damage: range) -> IoError:
        """Returns the error for bytes of a slot that are not those written, with their place on the drive."""
        self._notes.mark_suspect()
        place = self._places[unit][state][slot]
        file, offset = bytes_of(self._files.states, place, damage.start, len(damage))
        first = file.pieces(offset, len(damage))[0]
        operation = f"use {state.value} of {self.spec.title(unit)}, slot {'AB'[slot]},"
        return IoError(first.owner.path, first.offset, first.nbytes, errno.EBADMSG, operation)

    def _scrub(self) -> None:
        """Reads on in slots that nothing has read, so that damage of what memory has too is noticed within a day.

        These are weights of a cache and states that tiers above DISK contain. Few bytes are read at each commit.

        Raises:
            IoError: If bytes are damaged (EBADMSG), or cannot be read.
        """
        before, self._last_scrub = self._last_scrub, time.monotonic()
        left = max(_SCRUB_NBYTES, int(self.spec.nbytes * (self._last_scrub - before) / _SCRUB_S))
        if not self._scrubbed:
            keys = [(unit, state) for unit, row in enumerate(self._places) for state in row]
            self._scrubbed = [(key, 0) for key in reversed(keys) if key not in self._read_whole]
            self._read_whole = set()
        buffer = aligned_empty(_SCRUB_NBYTES) if self._scrubbed else memoryview(b"")
        while self._scrubbed and left > 0:
            (unit, state), start = self._scrubbed.pop()
            slot = self.newest[unit]
            stop = min(self._places[unit][state][slot].nbytes, start + min(left, len(buffer)))
            if (unit, state) in self._read_whole:
                continue
            if stop < self._places[unit][state][slot].nbytes:
                self._scrubbed.append(((unit, state), stop))
            began, part = now(), buffer[: stop - start]
            # Not by `read`, which would count the slot as read by others, and the next pass would leave it out.
            future = self._read(unit, state, slot, start, part, Priority.BACKGROUND, compare=True)
            self._spans.show(Row.READS, unit, state, began, len(part), future).wait()
            left -= stop - start

    def sum_of(self, unit: int, state: State, nbytes: int) -> int | None:
        """Returns the CRC-32C of the first `nbytes` of the newest slot; None if no checksum ends there.

        A store with one slot has none: its bytes change in place, so no other file shares them.
        """
        return self._sums.sum_of((unit, state), nbytes) if self.spec.slots == 2 else None

    def clone(self, unit: int, state: State, nbytes: int, descriptor: int, offset: int) -> bool:
        """Lets another file share the first `nbytes` of the newest slot, without a copy.

        Args:
            unit: The unit.
            state: The state of the unit.
            nbytes: The bytes, a multiple of 4096.
            descriptor: The other file, open for writing; it belongs to the caller.
            offset: The first byte in the other file, a multiple of 4096.

        Returns:
            False if the file systems cannot share, or the store is on several drives. Then the caller copies.
        """
        extents = self._places[unit][state][self.newest[unit]].extents_of(0, nbytes)
        return clone_extents(self._files.states, extents, descriptor, offset)

    def write(self, unit: int, state: State, slot: int, start: int, buffer: memoryview) -> Future:
        """Submits a write of `buffer`. The bytes count as the newest copy only after `wrote`.

        Args:
            unit: The unit.
            state: The state of the unit.
            slot: The slot, 0 or 1.
            start: The first byte, from the start of the slot.
            buffer: The bytes; it belongs to the caller and must stay unchanged until the future is done.

        Returns:
            The request.
        """
        began = now()
        place = self._places[unit][state][slot]
        assert start + len(buffer) <= place.nbytes
        for offset, nbytes in place.extents_of(start, len(buffer)):
            for drive, _, count in self._files.states.layout.places(offset, nbytes):
                self.written.add(drive, count)
        file, offset = bytes_of(self._files.states, place, start, len(buffer))
        future = self._queue.write(file, offset, buffer, priority=Priority.BACKGROUND, checksum=True)
        return self._spans.show(Row.WRITES, unit, state, began, len(buffer), future)

    def set_aside(self, unit: int) -> None:
        """Copies the slot that an edit of `unit` will write, if the record before `durable` names the slot.

        The caller edits without the other processes, one of which may have to resume from that record, and all with it.

        Raises:
            IoError: If the slot cannot be read, or the drive has no room for the copy.
        """
        slot = self.target(unit)
        # If a step has written the slot since, all processes have met for that.
        if self._before is None or self._before.slots[unit] != slot or self.newest[unit] == slot:
            return
        self.written.add(0, self._undo.save(self._before, unit, self._places[unit], self.read))

    def wrote(self, unit: int, slot: int, written: Mapping[State, Sequence[tuple[int, Future]]]) -> None:
        """Makes `slot` the newest of a unit. The update worker calls this, and between steps a load does.

        Args:
            unit: The unit.
            slot: The slot that was written.
            written: For each state that is kept, the start and the ended future of each write. The writes of a state
                have no gaps and begin at byte 0. Frozen weights behind the last write keep their checksums.
        """
        for state, writes in written.items():
            self._sums.replace((unit, state), writes, own_nbytes(self._places[unit][state]))
        self.newest[unit] = slot

    # -- commits ------------------------------------------------------------------------------------

    def commit(self, step: int, contents: Mapping[str, torch.Tensor]) -> None:
        """Makes `newest` and `contents` the durable state. All writes must have ended.

        Args:
            step: The optimizer step that is committed. A step may be committed again, after an edit of weights.
            contents: Everything else that belongs to the step, by name. The blob stores a copy.
        """
        if self.durable is not None:  # the first commit is of bytes that were written a moment before
            self._scrub()
        self._doing = f"fdatasync of {self._files.states.path}"
        with self._spans.commit(step), aloud(lambda: f"commit of step {step} to {self.folders[0]}, {self._doing}"):
            self._commit(step, contents)

    def _commit(self, step: int, contents: Mapping[str, torch.Tensor]) -> None:
        # The order is the protocol: data, blob and record are each durable before the next is written, so a record
        # that is found never names bytes that a power cut has lost. Record and blob alternate between two places.
        self._files.sync()
        self._doing = "write of its blob and its record"
        which = 0 if self.durable is None else 1 - self.durable.blob
        data = blob.pack(contents, self._sums.pack(), self._files.manifest.packed, self.written.pack())
        reserve_blobs(self.folders[0], len(data) + self._sums.growth_nbytes(self._places))
        write_in_place(self.folders[0] / f"blob.{which}", data)
        serial = self._first if self.durable is None else self.durable.serial + 1
        record = Record(serial, step, tuple(self.newest), which, len(data), crc32c(data), time.time_ns())
        write_in_place(self._commit_path, record.pack(), which * PAGE)
        self._before, self.durable = self.durable, record
        self._undo.remove()  # all processes have met in a step since its slots were written
        self.written.add(0, len(data) + PAGE)  # counted in the blob of the next commit
        if self._before is None:
            self._notes.forget_end()

    # -- closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files and releases the locks; idempotent. All futures must be done."""
        self._files.close()

    def note_end(self, facts: Mapping[str, Any]) -> None:
        """Writes `finished.json` with `facts`. From then on the files beside `finished.json` are remainders."""
        self._notes.write_finished(facts)

    def note_closed(self, facts: Mapping[str, Any]) -> None:
        """Writes `closed.json` with `facts`. The run can be resumed, and a new start may replace it."""
        self._notes.write_closed(facts)

    def remove(self, notes: bool = False) -> None:
        """Deletes the files and closes the store; does nothing if the store is closed.

        Args:
            notes: True if the last rank also deletes the notes of the end.
        """
        if self._files.locked:
            self._files.unlink(notes)  # before the locks are released: another process may start this run again at once
        self.close()
