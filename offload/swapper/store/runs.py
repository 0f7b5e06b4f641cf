"""The status and the removal of runs, from outside: whether a run exists, how it ended, and which files it has."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import StoreError
from offload.fileio import check_name, inner_folder, real_path
from offload.records import fields, read, whole
from offload.swapper.store.folder import (
    CLOSED,
    FILES,
    FINISHED,
    RESHARDED,
    Lock,
    begin_removal,
    check_owner,
    folders_aside,
    holder,
    in_use,
    rank_number,
    read_finished,
    read_whole,
    remove_files,
    unlink,
    write_durably,
)
from offload.swapper.store.format import read_manifest, was_committed
from offload.swapper.store.inspection import RankFiles, allocated_nbytes, is_rank, look, store_id

NOTE = fields({}, {"steps": whole()})
"""Format of the note of a run's end. Other fields are shown, or compared with the fields of a new start."""


class RunStatus(NamedTuple):
    """Status of a run folder."""

    exists: bool
    """True if the run holds a commit, or must have held one, and has not finished."""
    finished: dict[str, Any] | None
    """Contents of `finished.json` if the run ended, else None; {} if the file is unreadable and there is no commit."""
    closed: bool = False
    """True if the run was closed without a request to keep its files: a new start may replace them."""


def run_status(paths: Sequence[str | Path], run: str) -> RunStatus:
    """Returns the status of `run` without locking it."""
    check_name(Path(paths[0]), '"nvme_path"')
    folder = Path(paths[0]) / run
    check_owner(folder)
    # A run that ends writes the note before it deletes its files, and a start deletes the note. Files next to the note
    # are leftovers.
    finished = read_finished(folder)
    if finished is not None:
        return RunStatus(False, finished)
    # A run whose commit records are all lost counts as existing: a start must not overwrite it silently, and
    # `Store.open` reports the damage. While the number of ranks changes, no folder may be in its place.
    exists = (folder / RESHARDED).is_file() or any(was_committed(rank) for rank in rank_folders(folder))
    if not exists and (folder / FINISHED).is_file():
        return RunStatus(False, {})
    return RunStatus(exists, None, exists and (folder / CLOSED).is_file())


def read_closed(run: Path) -> dict[str, Any] | None:
    """Returns the contents of `closed.json` in a run's folder: {} if they cannot be read, None without such a file."""
    try:
        note: dict[str, Any] = read(read_whole(run / CLOSED), NOTE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {}
    return note


def note_saved(run: Path, step: int) -> None:
    """Records in `closed.json` that the weights of the run's last step are in other files. The ranks must be locked.

    Does nothing if the run was not closed at this step.
    """
    note = read_closed(run)
    if note and note.get("steps") == step:
        write_durably(run / CLOSED, json.dumps({**note, "saved": True}).encode())


def rank_folders(run: Path) -> list[Path]:
    """Returns the folders of a run's ranks on its first drive, in order of the ranks."""
    ranks = {folder: rank for folder in run.glob("rank*") if (rank := rank_number(folder.name)) is not None}
    return sorted(ranks, key=ranks.__getitem__)


def check_unused(run: Path) -> None:
    """Raises `StoreError` with the name of the holder if a process or an engine trains in a run's folder."""
    for rank in rank_folders(run):
        if process := holder(rank):
            raise in_use(rank, process, "train")


class Removal(NamedTuple):
    """All files of a run: the folders of its ranks on all drives, and its notes."""

    path: Path
    ranks: tuple[Path, ...]
    """The ranks' folders on the drive of `path`, locked while a process uses the run."""
    folders: tuple[Path, ...]
    """The ranks' folders on all drives."""
    files: tuple[Path, ...]
    """`finished.json`, `closed.json`, `resharded.json` and temporary files of interrupted writes."""
    strangers: tuple[str, ...]
    """Names in these folders that do not belong to the run. These files are not deleted."""
    nbytes: int
    """Bytes that the run's files take on their drives."""
    finished: bool
    """True if the run has ended."""
    not_found: tuple[str, ...] = ()
    """The ranks' folders on drives that are missing from their places. Their files are not deleted."""


def find_removal(path: Path) -> Removal:
    """Returns everything that belongs to the run at `path`, on each drive that its manifests name.

    Raises `StoreError` if `path` is not a run folder, or is a later drive of a run whose first drive is present.
    """
    # Resolved: a path such as "." lacks the run's name, which is a part of its folders' paths on other drives.
    path = Path(os.path.abspath(path))
    _check_run(path)
    note = path / FINISHED
    ranks = rank_folders(path)
    looked = [look(rank) for rank in ranks]
    # A start that was killed has left at least a lock.
    remains = any(is_rank(rank) or set(_names(rank)) <= {"lock"} for rank in ranks) or folders_aside(path)
    if not path.is_dir() or not (note.is_file() or remains):
        raise StoreError(f"{path} is not a run folder: it contains neither rank<r> folders nor {FINISHED}")
    for rank_files in looked:
        # A later drive of a run whose first drive, which holds the lock, is present.
        if rank_files.drive and rank_files.manifest is not None:
            first = Path(rank_files.manifest.drives[0]) / rank_files.folder.parent.name
            if store_id(first / rank_files.folder.name) == rank_files.manifest.id:
                raise StoreError(
                    f"{rank_files.folder} is on drive {rank_files.drive} of its run; remove the run at {first}"
                )
    folders, not_found = list[Path](), list[str]()
    for rank_files in looked:
        there, missing = _on_other_drives(rank_files)
        folders += [*rank_files.folders[:1], *there]
        not_found += map(str, missing)
    folders += _aside(path, folders)
    notes = [note_path for note_path in (note, path / CLOSED, path / RESHARDED) if note_path.is_file()]
    files = (*sorted(path.glob("*.tmp")), *notes)
    ours = {path.name for path in (*ranks, *folders, *files)}
    strangers = [name for name in _names(path) if name not in ours]
    for folder in folders:
        strangers += [
            f"{folder.name}/{name}"
            for name in _names(folder)
            if (name not in FILES and name[-4:] != ".tmp") or (folder / name).is_dir()
        ]
    return Removal(
        path,
        tuple(ranks),
        tuple(folders),
        files,
        tuple(strangers),
        allocated_nbytes(folders),
        note.is_file(),
        tuple(not_found),
    )


def _aside(run: Path, ranks: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the folders that an interrupted change of the number of ranks has left, on all drives of the run."""
    here = folders_aside(run)
    drives = {folder.parent: None for folder in ranks if folder.parent != run}
    for folder in here:
        with contextlib.suppress(StoreError):  # a kill came before the manifest
            drives |= {Path(drive) / run.name: None for drive in read_manifest(folder / "manifest.json").drives[1:]}
    # At the places that a folder's manifest names; as in `_is_of`, the folders there must name the same store.
    ids = {known_id for folder in (*here, *ranks) if (known_id := store_id(folder)) is not None}
    there = (folder for drive in drives for folder in folders_aside(drive))
    return (*here, *(folder for folder in there if _is_of(folder, ids, run)))


def remove_run(path: Path) -> Removal:
    """Deletes the run at `path` on all of its drives, and returns what was deleted. Files of others stay.

    Raises `StoreError` if `path` is not a run folder, or while a process uses the run.
    """
    path = Path(os.path.abspath(path))
    _check_run(path)
    with contextlib.ExitStack() as locks:
        # A start holds the lock before it writes any other file.
        ranks = [rank for rank in rank_folders(path) if is_rank(rank) or (rank / "lock").exists()]
        for rank in ranks:
            locks.enter_context(Lock(rank, "delete"))
        removal = find_removal(path)
        # Locks all other folders of the run as well: a process may be starting a store in one of them.
        for folder in removal.folders:
            if folder not in ranks and folder.is_dir():
                locks.enter_context(Lock(folder, "delete"))
        for folder in removal.folders:  # all of them first: no drive is missing from commits that still count
            begin_removal(folder)
        for folder in reversed(removal.folders):
            remove_files(folder)
        for file in removal.files:
            unlink(file)
        for run in dict.fromkeys((path, *(folder.parent for folder in removal.folders))):
            with contextlib.suppress(OSError):  # not empty: strangers, or a rank that started meanwhile
                run.rmdir()
    return removal


def _check_run(path: Path) -> None:
    """Raises `StoreError` if a run's folder is a link, or is another user's and this user is no administrator."""
    if path.is_symlink():
        raise StoreError(f"{path} is a symbolic link, which is not followed: give its target, {os.path.realpath(path)}")
    if os.geteuid() != 0:
        check_owner(path)


def _on_other_drives(rank_files: RankFiles) -> tuple[Sequence[Path], Sequence[Path]]:
    """Returns the rank's folders on its other drives that may be deleted, and those that cannot be found.

    A folder that may belong to another copy of the run counts as not found. A copy of the first drive alone, next to
    its original, has none.
    """
    if rank_files.drive or rank_files.manifest is None:
        return (), ()
    manifest, run, others = rank_files.manifest, rank_files.folder.parent, rank_files.folders[1:]
    first = Path(manifest.drives[0]) / run.name / rank_files.folder.name
    if first.exists() and rank_files.folder.samefile(first):
        # The drive is in its place, so a missing folder was removed, for example by an interrupted removal.
        missing = [folder for folder in others if not folder.parent.parent.is_dir()]
        return [folder for folder in others if _is_of(folder, {manifest.id}, run)], missing
    # A copy, or moved since the last start: the other drives may belong to an original elsewhere.
    if store_id(first) != manifest.id:
        return (), others
    originals = [real_path(Path(drive, run.name, first.name)) for drive in manifest.drives]
    copies = [folder for folder in others if store_id(folder) == manifest.id and real_path(folder) not in originals]
    return (), copies


def _is_of(folder: Path, ids: set[str], run: Path) -> bool:
    """Returns True if a folder that a manifest names on another drive is of one of these stores, and may be deleted.

    A manifest is not signed and may come from anybody. So the folder must belong to the owner of the run's folder, and
    its own manifest must name one of `ids`. A start that was killed before it wrote a manifest has left the states and
    locks.
    """
    try:
        with inner_folder(folder, 2) as there, inner_folder(run, 1) as first:
            owner, expected, names = os.fstat(there).st_uid, os.fstat(first).st_uid, set(os.listdir(there))
    except OSError:
        return False
    stored_id = store_id(folder)
    return owner == expected and (stored_id in ids or (stored_id is None and names <= {"states", "lock"}))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class OtherRun(NamedTuple):
    """A run folder that no process uses."""

    path: Path
    nbytes: int
    """Bytes on the drives that were searched."""


def other_runs(paths: Sequence[str | Path], run: str) -> list[OtherRun]:
    """Returns the runs under the drives `paths`, other than `run`, that contain swap files and that no process uses."""

    def in_use_elsewhere(folder: Path) -> bool:
        """Returns True if a process holds the first drive of the store, of which this folder is on a later drive."""
        try:
            first = read_manifest(folder / "manifest.json").drives[0]
        except (StoreError, IndexError):
            return False
        return holder(Path(first) / folder.parent.name / folder.name) is not None

    sizes: dict[str, OtherRun] = {}
    taken = {run}
    for path in paths:
        for folder in sorted(Path(path).glob("*/rank*")):
            name = folder.parent.name
            if name in taken or not is_rank(folder):
                continue
            if holder(folder) or (not (folder / "commit").exists() and in_use_elsewhere(folder)):
                taken.add(name)
                continue
            # A run on several of these drives counts once, with the sum of its bytes.
            before = sizes.get(name, OtherRun(folder.parent, 0))
            sizes[name] = before._replace(nbytes=before.nbytes + allocated_nbytes([folder]))
    return [size for name, size in sorted(sizes.items()) if name not in taken]
