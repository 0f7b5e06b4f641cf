"""Implementation of `offload inspect`: describes a folder of swap files or checkpoints, even one that is in use.

Inspection holds no lock for longer than a moment, and changes nothing.
"""

from __future__ import annotations

import math
import stat
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from offload.checkpoint.directory import leftovers as leftovers_of_saves
from offload.checkpoint.directory import saver
from offload.checkpoint.files import (
    LATEST,
    MANIFEST,
    is_checkpoint,
    may_be_checkpoint,
    read_manifest,
    read_text,
    refuse_rank,
    wrong_files,
)
from offload.errors import StoreError
from offload.fileio import real_path
from offload.runs.own_checkpoint import of_trainer
from offload.swapper.store import rank_folders, run_status
from offload.swapper.store.folder import holder
from offload.swapper.store.inspection import (
    Commit,
    RankFiles,
    Wrong,
    allocated_nbytes,
    is_rank,
    is_run,
    leftovers,
    look,
)


def inspect(path: Path) -> dict[str, Any]:
    """Returns JSON that describes `path`; sizes are in bytes.

    `path` is an nvme path, the folder of a run, a rank or a checkpoint, or a folder of checkpoints, such as a Trainer's
    output folder.
    """
    if not path.is_dir():
        raise StoreError(f"there is no folder {path}")
    path = real_path(path)
    # The order matters: a checkpoint may have a tag such as "rank0", and a rank folder contains a `manifest.json` too.
    if may_be_checkpoint(path):
        return {"kind": "checkpoint", **_checkpoint(path)}
    if is_rank(path):
        return {"kind": "rank", **_run(path.parent, [path])}
    if _contains_run(path):
        return {"kind": "run", **_run(path, rank_folders(path))}
    refuse_rank(path)
    saved = [folder for folder in path.iterdir() if may_be_checkpoint(folder) and not folder.name.startswith(".")]
    if saved or (path / LATEST).is_file() or any(leftovers_of_saves(path)):
        return {"kind": "checkpoints", **_checkpoints(path, saved)}
    runs = [_run(folder, rank_folders(folder)) for folder in sorted(path.iterdir()) if _contains_run(folder)]
    if not runs and (saved := of_trainer(path)):
        return {"kind": "checkpoints", **_checkpoints(path, saved), "latest": str(saved[-1].relative_to(path))}
    return {"kind": "nvme_path", "path": str(path), "runs": runs}


def _contains_run(path: Path) -> bool:
    ranks = rank_folders(path)
    return is_run(path) and (not ranks or not all(map(is_checkpoint, ranks)))


def _run(path: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Describes the run at `path`, including only the ranks whose folders are in `folders`."""
    files = [look(folder) for folder in folders if is_rank(folder)]
    ranks = [_rank(rank_files) for rank_files in files]
    known = next((rank_files.manifest for rank_files in files if rank_files.manifest is not None), None)
    content: dict[str, Any] = {
        "path": str(path),
        "run": path.name,
        # Every key is always present, so that scripts need no special case for a run without a readable manifest.
        "model": None,
        "mode": None,
        "world_size": None,
        "slots": None,
        "made_by": None,
        "forked_from": None,
        "drives": [],
        "model_files": [],
        "allocated_bytes": sum(rank["allocated_bytes"] for rank in ranks),
        "finished": run_status([path], ".").finished,
        "leftovers": leftovers(path, files),
        "ranks": ranks,
        "missing_ranks": [],
    }
    if known is not None:
        layout, about = known.spec.fingerprint, known.spec.about
        size = known.spec.ranks
        # The description is the same on all ranks, so the first readable manifest is used.
        content |= {
            "model": _model(layout, about),
            "mode": layout.get("mode"),
            "world_size": size,
            "slots": known.spec.slots,
            "made_by": about.get("offload"),
            "forked_from": about.get("forked_from"),
            "drives": list(known.drives),
            "model_files": sorted(
                {
                    file["path"]
                    for rank_files in files
                    if rank_files.manifest is not None
                    for file in rank_files.manifest.spec.files.get("files", ())
                }
            ),
        }
        # If a single rank was requested, the ranks left out are not missing.
        if len(folders) == len(rank_folders(path)):
            content["missing_ranks"] = sorted(set(range(size)) - {rank["rank"] for rank in ranks})
    return content


def _checkpoints(path: Path, saved: Sequence[Path]) -> dict[str, Any]:
    latest = path / LATEST
    described = [{**_checkpoint(checkpoint), "tag": str(checkpoint.relative_to(path))} for checkpoint in saved]
    goes, returns = leftovers_of_saves(path)
    return {
        "path": str(path),
        "latest": _tag_in(latest),
        # A checkpoint whose manifest cannot be read has neither step nor date, and is listed first.
        "checkpoints": sorted(
            described, key=lambda checkpoint: (checkpoint["epoch"] or 0, checkpoint["created"] or "")
        ),
        "saved_to_by": saver(path),
        "leftovers": [str(checkpoint) for checkpoint in goes],
        "set_aside": [str(checkpoint) for checkpoint in returns],
    }


def _tag_in(latest: Path) -> str | None:
    try:
        return read_text(latest).strip()
    except (OSError, ValueError):
        return None


_OF_MANIFEST = ("step", "epoch", "created", "age_seconds", "model", "mode", "world_size", "frozen_weights", "made_by")
"""Keys of a checkpoint that are None if its manifest cannot be read."""


def _checkpoint(path: Path) -> dict[str, Any]:
    """Describes one checkpoint. Only the sizes of its files are compared; `offload verify` compares the checksums."""
    known: dict[str, Any] = {}
    try:
        manifest = read_manifest(path)
    except StoreError as error:
        wrong = [Wrong(str(path / MANIFEST), str(error))]
    else:
        wrong = [Wrong(str(path / name), reason) for name, reason in wrong_files(path, manifest).items()]
        age = datetime.now(timezone.utc) - datetime.fromisoformat(manifest.created)
        known = {
            "step": manifest.step,
            "epoch": manifest.step,
            "created": manifest.created,
            "age_seconds": round(max(0.0, age.total_seconds()), 1),
            "model": _model(manifest.layout, manifest.about),
            "mode": manifest.layout["mode"],
            "world_size": manifest.ranks,
            "frozen_weights": manifest.frozen,
            "made_by": manifest.about.get("offload"),
        }
    return {
        "path": str(path),
        "tag": path.name,
        **{name: known.get(name) for name in _OF_MANIFEST},
        "bytes": sum(map(_size_of, path.rglob("*"))),
        "damaged": [damage._asdict() for damage in wrong],
    }


def _model(layout: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    count = trainable = 0
    for unit in layout.get("units", ()):
        for parameter in unit["parameters"]:
            numel = math.prod(parameter["shape"])
            count += numel
            trainable += numel * parameter["trainable"]
    return {
        "class": about.get("class"),
        "parameters": count,
        "trainable": trainable,
        "units": len(layout.get("units", ())),
    }


def _rank(files: RankFiles) -> dict[str, Any]:
    manifest = files.manifest
    # The counters are in the blob of a commit, so a rank without an intact commit has none.
    written, rated = files.whole[0].written if files.whole else ([], None)
    states: dict[str, None] = {}
    for row in () if manifest is None else manifest.spec.partitions:
        # A dict in place of a set keeps the states in the order of the manifest.
        states |= dict.fromkeys(state.value for state in row)
    return {
        "rank": files.rank,
        "folder": str(files.folder),
        "drive": files.drive,
        "holder": holder(files.folder),
        "id": None if manifest is None else manifest.id,
        "run_id": files.run_id,
        "created": None if manifest is None else manifest.created,
        "states": list(states),
        "commits": [_commit(commit, newest=index == 0) for index, commit in enumerate(files.commits)],
        "drives": [
            {
                "path": str(folder),
                "states_bytes": states.lstat().st_size if states.is_file() and not states.is_symlink() else None,
                "allocated_bytes": allocated_nbytes([folder]),
            }
            for folder in (() if files.drive else files.folders)
            for states in [folder / "states"]
        ],
        "allocated_bytes": allocated_nbytes([files.folder] if files.drive else files.folders),
        "written_bytes": written,
        "rated_bytes": rated,
        "other_format": files.other_format,
        "damaged": [wrong._asdict() for wrong in files.wrong],
    }


def _commit(commit: Commit, newest: bool) -> dict[str, Any]:
    record = commit.record
    moment = record.time_ns / 1e9
    # A commit in progress overwrites the blob of the older commit, so only the newest one can be called damaged.
    blob = "right" if commit.blob is not None else "damaged" if newest else "written over"
    return {
        "serial": record.serial,
        "step": record.step,
        "epoch": record.step,
        "time": datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds"),
        "age_seconds": round(max(0.0, time.time() - moment), 1),
        "blob": blob,
        "blob_bytes": record.blob_nbytes,
    }


def _size_of(path: Path) -> int:
    """Returns the bytes of a file; 0 for anything else, and for a file that was deleted meanwhile."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
