"""A run's folder from outside: whether there is one and how it ended; removed, or opened to be read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio.protocols import Queue
from offload.errors import StoreError
from offload.swapper.store.format.commit_record import was_committed
from offload.swapper.store.format.manifest import read_manifest
from offload.swapper.store.inspection import Found, allocated_nbytes, is_rank, look, store_id
from offload.swapper.store.rank_folder import FILES, Lock, holder, read_whole, remove_files
from offload.swapper.store.store import Store

if TYPE_CHECKING:
    import torch


class RunStatus(NamedTuple):
    """What lies under a run's name: whether anything can be resumed, and how it ended if it did."""

    exists: bool
    finished: dict[str, Any] | None
    closed: bool = False
    """Whether it was closed at its end, and nobody asked to keep it."""


def run_status(paths: Sequence[str | Path], run: str) -> RunStatus:
    """Look at `run` under the drives `paths` (the first holds manifest and records) without locking it."""
    folder = Path(paths[0]) / run
    finished = folder / "finished.json"
    if not finished.is_file():
        # Where a commit was made of which no record is left, it must not be started over in silence: `open` says what.
        exists = any(was_committed(rank) for rank in rank_folders(folder))
        return RunStatus(exists, None, exists and (folder / "closed.json").is_file())
    # The note is the first thing that a removal does, and a start takes it away: what lies beside it is a remainder.
    try:
        note = json.loads(read_whole(finished))
        return RunStatus(False, note if isinstance(note, dict) else {})
    except (OSError, ValueError):
        return RunStatus(False, {})  # it ended; when and how cannot be read any more


def rank_folders(run: Path) -> list[Path]:
    """The folders of a run's ranks on its first drive, in order."""
    found = [folder for folder in run.glob("rank*") if folder.name[4:].isdigit()]
    return sorted(found, key=lambda folder: int(folder.name[4:]))


class Removal(NamedTuple):
    """What makes up a run: the folders of its ranks on all drives, and what else it has left."""

    path: Path
    ranks: tuple[Path, ...]
    """Those that are locked while a process has the run."""
    folders: tuple[Path, ...]
    files: tuple[Path, ...]
    """finished.json, closed.json and what a kill cut short."""
    strangers: tuple[str, ...]
    """Names beside them that are not of the run: they stay."""
    nbytes: int
    """That its files take."""
    finished: bool


def find_removal(path: Path) -> Removal:
    """Everything of the run at `path`, on this and every other drive that its manifests name.

    Raises `StoreError` where it is no run folder.
    """
    note = path / "finished.json"
    ranks = rank_folders(path)
    found = [look(rank) for rank in ranks]
    # A start that a kill cut short has left at least a lock.
    remains = any(is_rank(rank) or set(_names(rank)) <= {"lock"} for rank in ranks)
    if not path.is_dir() or not (note.is_file() or remains):
        raise StoreError(f"{path} is not a run folder: it has neither rank<r> folders nor finished.json")
    for each in found:
        _check_drive(each)
    folders = tuple(folder for each in found for folder in each.folders[:1] + _mine(each))
    notes = [each for each in (note, path / "closed.json") if each.is_file()]
    files = (*sorted(path.glob("*.tmp")), *notes)
    ours = {path.name for path in (*ranks, *files)}
    strangers = [name for name in _names(path) if name not in ours]
    for folder in folders:
        strangers += [f"{folder.name}/{name}" for name in _names(folder) if name not in FILES and name[-4:] != ".tmp"]
    return Removal(path, tuple(ranks), folders, files, tuple(strangers), allocated_nbytes(folders), note.is_file())


def remove_run(path: Path) -> Removal:
    """Delete the run at `path`, on all of its drives; what is not of it stays.

    Raises `StoreError` where it is no run folder, or while a process holds it.
    """
    with contextlib.ExitStack() as locks:
        ranks = [rank for rank in rank_folders(path) if is_rank(rank)]
        for rank in ranks:
            locks.enter_context(Lock(rank))
        removal = find_removal(path)
        for folder in removal.folders:
            if folder not in ranks and folder.is_dir() and is_rank(folder):
                locks.enter_context(Lock(folder))
        for folder in reversed(removal.folders):
            remove_files(folder)
        for file in removal.files:
            file.unlink(missing_ok=True)
        for run in dict.fromkeys((path, *(folder.parent for folder in removal.folders))):
            with contextlib.suppress(OSError):  # not empty: other ranks, or strangers
                run.rmdir()
    return removal


def _check_drive(found: Found) -> None:
    """Raise `StoreError` where this is a later drive of a run whose first is there: that one has the lock."""
    if found.drive and found.manifest is not None:
        first = Path(found.manifest.drives[0]) / found.folder.parent.name
        if store_id(first / found.folder.name) == found.manifest.id:
            raise StoreError(f"{found.folder} is on drive {found.drive} of its run; remove the run at {first}")


def _mine(found: Found) -> tuple[Path, ...]:
    """The rank's folders on its other drives, unless another store has taken their place."""
    if found.drive or found.manifest is None:
        return ()
    first = Path(found.manifest.drives[0]) / found.folder.parent.name / found.folder.name
    if not first.exists() or not found.folder.samefile(first):
        return ()  # this is a copy, the other drives are the original's
    there = [folder for folder in found.folders[1:] if folder.is_dir()]
    return tuple(
        folder
        for folder in there
        if store_id(folder) == found.manifest.id or (store_id(folder) is None and not (folder / "commit").exists())
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class OtherRun(NamedTuple):
    """A run's folder that nobody holds."""

    path: Path
    nbytes: int
    """On the drives that were looked at."""


def other_runs(paths: Sequence[str | Path], run: str) -> list[OtherRun]:
    """Runs under the drives `paths` beside `run` that have swap files and that no process holds."""
    sizes: dict[str, OtherRun] = {}
    held = {run}
    for path in paths:
        for folder in sorted(Path(path).glob("*/rank*")):
            name = folder.parent.name
            if name in held or not is_rank(folder):
                continue
            if holder(folder) or (not (folder / "commit").exists() and _held_elsewhere(folder)):
                held.add(name)
                continue
            before = sizes.get(name, OtherRun(folder.parent, 0))
            sizes[name] = before._replace(nbytes=before.nbytes + allocated_nbytes([folder]))
    return [each for name, each in sorted(sizes.items()) if name not in held]


def _held_elsewhere(folder: Path) -> bool:
    """Whether somebody holds the store of which this is a later drive: the lock lies on the first."""
    try:
        first = read_manifest(folder / "manifest.json").drives[0]
    except (StoreError, IndexError):
        return False
    return holder(Path(first) / folder.parent.name / folder.name) is not None


def open_rank(folder: Path, queue: Queue) -> tuple[Store, dict[str, torch.Tensor]]:
    """Open one rank's store at its last commit by its own manifest, and what that commit holds. Close it after use.

    Raises `StoreError` while a process holds it, and where it is damaged.
    """
    manifest = read_manifest(folder / "manifest.json")
    drives = [folder.parent.parent, *(Path(drive) for drive in manifest.drives[1:])]
    for drive in drives:
        if not (drive / folder.parent.name / folder.name).is_dir():
            raise StoreError(f"{folder} lies on the drives {', '.join(manifest.drives)}, but {drive} has no part of it")
    store = Store(drives, folder.parent.name, int(folder.name[4:]), manifest.spec, queue)
    return store, store.open()
