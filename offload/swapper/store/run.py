"""A run's folder from outside: whether there is one and how it ended; removed, or opened to be read."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.errors import StoreError
from offload.swapper.store.folder import Lock
from offload.swapper.store.manifest import read_manifest
from offload.swapper.store.record import was_committed
from offload.swapper.store.store import Queue, Store


class RunStatus(NamedTuple):
    """What lies under a run's name: whether anything can be resumed, and how it ended if it did."""

    exists: bool
    finished: dict[str, Any] | None


def run_status(paths: Sequence[str | Path], run: str) -> RunStatus:
    """Look at `run` under the drives `paths` (the first holds manifest and records) without locking it."""
    folder = Path(paths[0]) / run
    finished = folder / "finished.json"
    if not finished.is_file():
        # Where a commit was made of which no record is left, it must not be started over in silence: `open` says what.
        return RunStatus(any(was_committed(rank) for rank in rank_folders(folder)), None)
    # The note is the first thing that a removal does, and a start takes it away: what lies beside it is a remainder.
    try:
        note = json.loads(finished.read_text())
        return RunStatus(False, note if isinstance(note, dict) else {})
    except (OSError, ValueError):
        return RunStatus(False, {})  # it ended; when and how cannot be read any more


def rank_folders(run: Path) -> list[Path]:
    """The folders of a run's ranks on its first drive, in order."""
    found = [folder for folder in run.glob("rank*") if folder.name[4:].isdigit()]
    return sorted(found, key=lambda folder: int(folder.name[4:]))


def remove_run(path: Path) -> None:
    """Delete the run folder `path` on this and every other drive that its manifest names.

    Raises `StoreError` where it is no run folder, or while a process holds it.
    """
    ranks = rank_folders(path)
    if not path.is_dir() or not (ranks or (path / "finished.json").is_file()):
        raise StoreError(f"{path} is not a run folder: it has neither rank<r> folders nor finished.json")
    with contextlib.ExitStack() as locks:
        folders = [path]
        for rank in ranks:
            locks.enter_context(Lock(rank))
            # Without a manifest that can be read, what lies on other drives is not known.
            with contextlib.suppress(StoreError):
                folders += [Path(drive) / path.name for drive in read_manifest(rank / "manifest.json").drives]
        for folder in dict.fromkeys(folders):
            shutil.rmtree(folder, ignore_errors=folder != path)


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
