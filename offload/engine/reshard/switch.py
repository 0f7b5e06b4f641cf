"""The step from the folders of a run to those of its successor with another number of ranks. One note decides.

    new-rank<r> written and committed ─► resharded.json ─► rank<r> becomes old-rank<r>, new-rank<r> becomes rank<r>
                                                        └─► no resharded.json ─► old-rank<r> deleted

Without the note the folders `rank<r>` are the run, and those beside them are deleted by the next start. With the note
the run is the one that the note names, and the next start ends the renames. Either way no state is lost by a kill.
Whoever holds the locks of the run's ranks owns the folders beside them too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.errors import StoreError
from offload.fileio import inner_folder, sync_folder
from offload.records import fields, read, rows, text
from offload.swapper.store import rank_folders
from offload.swapper.store.folder import (
    REPLACED,
    RESHARDED,
    STAGED,
    Lock,
    folders_aside,
    read_whole,
    remove_files,
    unlink,
    write_durably,
)
from offload.swapper.store.inspection import store_id


class Switch(NamedTuple):
    """Content of the note: the ids of the stores of all ranks, before and after."""

    before: tuple[str, ...]
    after: tuple[str, ...]

    def pack(self) -> bytes:
        """Returns the content of the note."""
        return json.dumps(self._asdict()).encode()


def carry_out(folders: Sequence[Path], change: Switch) -> None:
    """Makes the new folders the run and deletes those before. The caller holds the locks of both.

    Args:
        folders: the run's folder on each drive, the first drive first.
        change: the stores before and after; those after are complete and durable.

    Raises:
        StoreError: if a folder of the new ranks is missing.
    """
    _check_complete(folders, change)
    write_durably(folders[0] / RESHARDED, change.pack())
    _rename(folders, change)
    _delete_aside(folders)


def finish(folders: Sequence[Path]) -> None:
    """Ends a step that a kill has interrupted after its note, and deletes what one before its note has left.

    Args:
        folders: the run's folder on each drive, the first drive first.

    Raises:
        StoreError: if a process uses the run, or a folder of the new ranks is missing.
    """
    if _read_note(folders[0]) is None and not any(folders_aside(folder) for folder in folders):
        return
    with contextlib.ExitStack() as locks:
        for folder in (*rank_folders(folders[0]), *folders_aside(folders[0])):
            locks.enter_context(Lock(folder))
        # Read again: until the locks were held, another process may have ended the step.
        change = _read_note(folders[0])
        if change is not None:
            _check_complete(folders, change)
            _rename(folders, change)
        _delete_aside(folders)


def discard(folders: Sequence[Path]) -> None:
    """Deletes the folders beside the run after an error, unless the note says that they are the run.

    Args:
        folders: the run's folder on each drive, the first drive first. The caller holds the locks of its ranks.
    """
    if _read_note(folders[0]) is None:
        _delete_aside(folders)


def _read_note(folder: Path) -> Switch | None:
    """Returns the note in the run's folder on its first drive; None without one."""
    path = folder / RESHARDED
    try:
        ids = rows(text())
        content = read(read_whole(path), fields({name: ids for name in Switch._fields}))
        return Switch(*(tuple(content[name]) for name in Switch._fields))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}, which says which ranks' folders are the run: {error}") from error


def _check_complete(folders: Sequence[Path], change: Switch) -> None:
    """Raises `StoreError` if the folder of a new rank is missing on a drive, before anything is renamed."""
    for folder in folders:
        for rank, new in enumerate(change.after):
            places = [folder / f"{prefix}rank{rank}" for prefix in ("", STAGED)]
            if new not in map(store_id, places):
                raise StoreError(
                    f"neither {places[0]} nor {places[1].name} is rank {rank} of {len(change.after)}, to which the run "
                    "is resharded: mount the drives of the run and give them in their former order"
                )


def _rename(folders: Sequence[Path], change: Switch) -> None:
    """Puts the new folders into their places on each drive, and deletes the note. May be repeated after a kill."""
    for folder in folders:
        for rank in range(max(len(change.before), len(change.after))):
            place = folder / f"rank{rank}"
            new = change.after[rank] if rank < len(change.after) else None
            # A place that no new rank takes is cleared only of this run: another run's leftovers stay.
            leaves = new is not None or store_id(place) == change.before[rank]
            if place.exists() and leaves and store_id(place) != new:
                _move(folder, place.name, f"{REPLACED}rank{rank}")
            if new is not None and store_id(place) != new:
                _move(folder, f"{STAGED}rank{rank}", place.name)
        # The names must be durable before the note goes: without the note nobody looks for other names.
        sync_folder(folder)
    unlink(folders[0] / RESHARDED)
    sync_folder(folders[0])


def _move(run: Path, name: str, new: str) -> None:
    """Renames a rank's folder in that of the run."""
    with inner_folder(run, 1, ours=True) as folder:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=folder)


def _delete_aside(folders: Sequence[Path]) -> None:
    """Deletes the folders beside the run. The first drive comes last: its lock keeps other processes out."""
    for folder in reversed(folders):
        for each in folders_aside(folder):
            remove_files(each)
