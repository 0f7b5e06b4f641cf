"""Implementation of `offload fork` and `offload log`: another run of a commit, and the commits that a run has left.

A fork has all states of its origin's commit, and files of its own. On a file system that can, such as XFS and btrfs,
the files share their bytes until a run writes them. So a fork takes milliseconds, and no room at first.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio.protocols import Queue
from offload.errors import StoreError
from offload.fileio import real_path
from offload.model_io.source import commits_of_all, lock_and_look, ranks_of
from offload.notices import shell_command
from offload.runs.inspection import inspect
from offload.swapper.store import DriveByteCounter, Store
from offload.swapper.store.store import about_fork


class Forked(NamedTuple):
    """Result of a fork."""

    run: Path
    """The new run, on its first drive."""
    step: int
    nbytes: int
    """Bytes of the states that the commit names, of all ranks."""
    shared: bool
    """True if the new run shares these bytes with its origin, False if they were copied."""


def find_commit(path: Path) -> Path:
    """Returns the folder of a run, or of its kept step, that a user names as PATH or PATH@STEP.

    Raises:
        StoreError: The step is neither kept nor the last commit; the message lists the steps that can be forked.
    """
    base, at, step = path.name.rpartition("@")
    if path.is_dir() or not at:
        return path
    rows = history(path.with_name(base))
    if any(row["run"] == base and str(row["step"]) == step for row in rows):
        return path.with_name(base)
    known = sorted({row["step"] for row in rows if row["run"].rpartition("@")[0] == base or row["run"] == base})
    steps = ", ".join(map(str, known))
    raise StoreError(f"{path.with_name(base)} has no step {step or '(none is given)'}: expected one of {steps}")


def fork(path: Path, name: str, queue: Queue) -> Forked:
    """Makes the run `name`, beside the run at `path`, of the last commit that all of its ranks contain.

    The run at `path` is locked meanwhile, and only read. After an error nothing is left of the new run.

    Args:
        queue: The caller's.

    Raises:
        StoreError: The run is in use, damaged or incomplete; there is a run of that name, or no room.
        IoError: The bytes cannot be copied.
    """
    path = real_path(path)
    if name == path.name:
        raise StoreError(f"the new run needs a name of its own, got {name!r}")
    stores: list[Store] = []
    shared, run_id = True, uuid.uuid4().hex
    with contextlib.ExitStack() as opened:
        ranks = ranks_of(path, lock_and_look(path, opened), replicas=True)
        commits = commits_of_all(ranks)
        for rank in ranks:
            if any((rank.folder / mark).exists() for mark in ("suspect", "undo")) or rank.wrong:
                raise StoreError(
                    f"{rank.folder} may be damaged, or has an edit that was interrupted, and is not forked; "
                    f"`{shell_command('verify', path)}` says more, and a resumed run mends what can be mended",
                    damaged=True,
                )
        try:
            for rank, commit in zip(ranks, commits, strict=True):
                manifest, blob = rank.manifest, commit.blob
                assert manifest is not None and blob is not None, "a commit of all ranks is whole"
                paths = [folder.parent.parent for folder in rank.folders]
                written = DriveByteCounter(paths)
                written.go_on(blob.written)
                spec = manifest.spec._replace(about=about_fork(manifest, commit.record))
                store = Store(paths, name, rank.rank, spec, queue, written)
                opened.callback(store.close)
                source = opened.enter_context(rank.open_states())
                shared &= store.fill(source, manifest, commit.record, blob.sums, run_id)
                stores.append(store)
            # Last: until all ranks have a commit there is no run of the new name that could be resumed.
            for store, commit in zip(stores, commits, strict=True):
                store.commit(commit.record.step, commit.contents)
        except BaseException:
            for store in stores:
                store.remove()
            raise
        nbytes = sum(sum(map(sum, (row.values() for row in store.spec.partitions))) for store in stores)
        return Forked(stores[0].folders[0].parent, commits[0].record.step, nbytes, shared)


def history(path: Path) -> list[dict[str, Any]]:
    """Returns the last commit of a run, of its kept steps and of its forks, and of the runs that it was forked from.

    Each row has "run", "step", "time", "bytes" (on the drive, where bytes that runs share count for each), "kept" (True
    for a step that a run has kept), and "forked_from" (the origin's "run", "run_id" and "step", or None). Rows are
    sorted by step.

    Raises:
        StoreError: There is no such run.
    """
    path = real_path(path)
    report = inspect(path.parent) if path.parent.is_dir() else {}
    runs = [run for run in report.get("runs", ()) if any(rank["commits"] for rank in run["ranks"])]
    by_id = {run["ranks"][0]["run_id"]: run for run in runs}
    # Kept steps outlive their run, whose name still leads to them.
    start = next((run for run in runs if run["run"] == path.name), None)
    start = start or next((run for run in runs if run["run"].rpartition("@")[0] == path.name), None)
    if start is None:
        raise StoreError(
            f"{path} is not the folder of a run with a commit: give NVME_PATH/RUN, on the run's first drive"
        )

    def root(run: Mapping[str, Any]) -> str:
        """Returns the id of the first known run of a line of forks. A manifest made up in a circle ends it too."""
        seen: list[str] = []
        while (key := run["ranks"][0]["run_id"]) not in seen:
            seen.append(key)
            origin = (run["forked_from"] or {}).get("run_id")
            if origin not in by_id:
                return str(origin or key)
            run = by_id[origin]
        return min(seen)

    rows = []
    for run in runs:
        if root(run) == root(start):
            last = min((rank["commits"][0] for rank in run["ranks"] if rank["commits"]), key=lambda c: int(c["serial"]))
            rows.append(
                {
                    "run": run["run"],
                    "step": last["step"],
                    "time": last["time"],
                    "bytes": run["allocated_bytes"],
                    "kept": "@" in run["run"],
                    "forked_from": run["forked_from"],
                }
            )
    return sorted(rows, key=lambda row: (row["step"], row["time"]))
