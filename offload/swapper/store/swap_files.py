"""The swap files of one rank on all of its drives: folders, locks, manifests and the states file.

`SwapFiles` makes, opens, closes and deletes all the files together. `Store` reads and writes records, blobs and slots.
One thread at a time may call the methods of `SwapFiles`; any thread may use `states` while the files are open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from offload.aio import DirectFile, StripedFile
from offload.fileio import inner_opener, sync_folder
from offload.notices import announce
from offload.sizes import PAGE
from offload.swapper.store.drives import Shortage, find_drive_shortage, find_shortage, new_manifest, no_room, places_of
from offload.swapper.store.format.manifest import Manifest, StoreSpec, check_rank, compare
from offload.swapper.store.format.run_notes import RunNotes
from offload.swapper.store.inspection import allocated_nbytes
from offload.swapper.store.rank_folder import (
    STAGED,
    close_in_children,
    lock_folders,
    remove_files,
    sync_names,
    unlink,
    write_durably,
    write_in_place,
)
from offload.swapper.store.recovery import check_drives, check_sizes


class SwapFiles:
    """The files of one rank, locked from construction to `close`. `create` or `open` opens the states file."""

    def __init__(self, paths: Sequence[str | Path], run: str, rank: int, spec: StoreSpec, staged: bool = False) -> None:
        """Makes and locks the rank's folder on each drive.

        Args:
            paths: The folder for swap files of each drive. The first contains records and blobs.
            run: The name of the run.
            rank: The rank whose files they are.
            spec: The contents that the files must have.
            staged: True for a folder beside those of a run that has another number of ranks.

        Raises:
            StoreError: If a folder cannot be made, or is in use.
        """
        # Absolute, since the process may change its working folder later.
        name = f"{STAGED if staged else ''}rank{rank}"
        self.folders = [Path(os.path.abspath(path)) / run / name for path in paths]
        self.notes = RunNotes(self.folders[0])
        self._run, self._rank, self._spec = run, rank, spec
        self._manifest: Manifest | None = None
        self._states: StripedFile | None = None
        self._loss_reported = False
        self._locks = lock_folders(self.folders)
        close_in_children.add(self)

    @property
    def manifest(self) -> Manifest:
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

    # -- making and opening -------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises `StoreError` if there is no room even without the files of an earlier start. Changes nothing."""
        taken = allocated_nbytes(self.folders)
        short = find_shortage([folder.parent.parent for folder in self.folders], self._spec.nbytes - taken)
        if short is not None:
            raise no_room(short._replace(need=self._spec.nbytes, free=short.free + taken), self._spec.slots)

    def create(self, run_id: str | None) -> None:
        """Deletes the remainders of an earlier start, reserves all room and writes empty records and the manifests.

        After an error the caller must delete the files made so far, by `unlink`.

        Args:
            run_id: The id of the run, the same on all ranks; None if unknown.

        Raises:
            StoreError: If there is no room.
            OSError: If a file cannot be written.
        """
        self._forget()
        drives = [folder.parent.parent for folder in self.folders]
        self._check_room(find_shortage(drives, self._spec.nbytes))
        self._manifest = new_manifest(self._run, self._rank, self.folders, self._spec, run_id)
        self._states = self._open_states(create=True)
        self._check_room(find_drive_shortage(drives, self._drive_nbytes()))
        self._states.reserve(self._spec.nbytes)
        write_in_place(self.folders[0] / "commit", bytes(2 * PAGE))
        # Before any manifest: a power cut that left only a later drive's would make the first drive look missing.
        for folder in self.folders:
            sync_names(folder)
        self._write_manifests()

    def _forget(self) -> None:
        """Deletes the files of an earlier start, records before the files they name. Notes of the run's end stay.

        A kill before the records are deleted leaves a run that can be resumed; a later kill leaves files that the next
        call deletes.
        """
        first = self.folders[0]
        for name in ("commit", "blob.1"):
            unlink(first / name)
            sync_folder(first)
        sync_folder(first.parent)
        for folder in reversed(self.folders):  # the first drive last: its manifest identifies the others' store
            for name in ("blob.0", "states", "suspect", "undo", "manifest.json"):
                unlink(folder / name)
            sync_folder(folder)

    def _check_room(self, short: Shortage | None) -> None:
        if short is not None:
            raise no_room(short, self._spec.slots)

    def open(self, copy: Manifest, step: int) -> list[str]:
        """Opens the states file of a commit.

        Rewrites all manifests if one is missing or damaged, or names other places of the drives than these.

        Args:
            copy: The manifest in the commit's blob.
            step: The commit's step.

        Returns:
            A line for the user for each manifest that was missing or damaged.

        Raises:
            StoreError: If the files are of another run, of other drives, or cut short.
        """
        compare(self._spec, copy.spec, self.folders[0])
        # Partitions of all ranks look alike, and those of another one would be taken for this one's.
        check_rank(copy, self._rank, self.folders[0])
        lost, there = check_drives(self.folders, copy, step)
        here = places_of(self.folders)
        self._manifest = dataclasses.replace(copy, drives=here)  # the next commit has it too
        self._states = self._open_states()
        check_sizes(self._states.parts(), self._drive_nbytes())
        # Each manifest counts: a kill between two of them leaves drives that name different places.
        if lost or any(places != here for places in there):
            self._write_manifests()
        return lost

    def _open_states(self, create: bool = False) -> StripedFile:
        return StripedFile(
            [folder / "states" for folder in self.folders],
            self.manifest.weights,
            stripe_bytes=self.manifest.stripe_bytes,
            create=create,
            opener=inner_opener(3, ours=True),
        )

    def _drive_nbytes(self) -> list[int]:
        return self.states.layout.file_nbytes(self._spec.nbytes)

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

    def unlink_states(self) -> None:
        """Deletes the names of the open states files, so that their room is freed however this process ends."""
        for folder in self.folders:
            unlink(folder / "states")

    def unlink(self, notes: bool = False) -> None:
        """Deletes all files that can be deleted.

        The locks must still be held: another process may start the run again once they are released.

        Args:
            notes: True if the last rank also deletes the notes of the run's end.
        """
        for folder in reversed(self.folders):  # the first drive last: its manifest identifies the others' store
            with contextlib.suppress(OSError):
                remove_files(folder)
                if notes and folder == self.folders[0] and not any(folder.parent.glob("rank*")):
                    self.notes.unlink_end()
                folder.parent.rmdir()  # fails while folders of other ranks are in it


def _is_named(file: DirectFile) -> bool:
    """Returns False if the path of an open file names no file, or another one."""
    try:
        found = os.stat(file.path)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == file.identity()
