"""Recovery: decides which files of an earlier process to trust, and raises the errors for the others.

The newest record with a valid checksum wins. From the files two cases are hard to tell apart: a commit that a power cut
interrupted, and a commit that was damaged later. In the first, the previous commit is complete; in the second, its
slots have been overwritten. So if anything looks wrong, all data of a commit is checked against its checksums before
the commit is taken.

Nothing in this module writes. `Store` calls these functions and changes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.aio import DirectFile
from offload.errors import StoreError
from offload.notices import shell_command
from offload.sizes import count_of
from offload.swapper.store.folder import RESHARDED, read_finished
from offload.swapper.store.format import (
    Blob,
    CommitRecord,
    Records,
    StoreManifest,
    read_if_any,
    read_manifest,
    was_committed,
)
from offload.swapper.store.inspection import blob_of, place_in
from offload.swapper.store.verify import Damage


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The commit that a run resumes from."""

    record: CommitRecord
    notice: str | None
    """A line for the user if anything looked wrong and the commit was therefore compared; else None."""


def check_startable(folders: Sequence[Path], over: bool) -> None:
    """Raises `StoreError` if a folder holds a run that did not end, or a drive of another store: both may be needed.

    Args:
        over: True if commits of this run may be deleted.

    Raises:
        IoError: If a file exists and cannot be read: it may belong to another run.
    """
    first, ended = folders[0], read_finished(folders[0].parent) is not None
    if (first.parent / RESHARDED).exists():
        raise StoreError(
            f"another start is changing the number of ranks of the run in {first.parent}; wait until it has ended"
        )
    place = _place_of(first)[0]
    for drive, folder in enumerate(folders):
        its, number, at = _place_of(folder)
        if its is not None and number and (number != drive or its != place):
            # A run that ended may have left this drive, if its removal was interrupted. Otherwise its first drive may
            # be missing.
            if not (ended and number == drive):
                raise StoreError(
                    f"{folder} holds drive {number} of a run whose first drive is {at}: mount that drive and give the "
                    "drives in their former order, or choose another run name, or delete these files with "
                    f"`{shell_command('rm', folder.parent)}`"
                )
        elif was_committed(folder) and not (over and not drive) and read_finished(folder.parent) is None:
            raise StoreError(
                f'{folder} holds a run that did not end; resume the run with "resume": "auto" in the "offload" block '
                "(offload train: --resume auto) and its drives in their former order, or choose another run name, or "
                f"delete the run with `{shell_command('rm', folder.parent)}`"
            )


def check_one_run(folders: Sequence[tuple[str | Path, str | None]]) -> None:
    """Raises `StoreError` if the folders of ranks belong to two runs.

    Folders of two runs of one model look alike: every checksum is right, and the weights would be those of neither.

    Args:
        folders: For each rank its folder, and the id of its run. None is unknown, and goes with any.
    """
    known = [(folder, run_id) for folder, run_id in folders if run_id is not None]
    for folder, run_id in known:
        if run_id != known[0][1]:
            raise StoreError(
                f"{folder} has the swap files of another run than {known[0][0]}: run id {run_id}, expected "
                f"{known[0][1]}. Folders of two runs have been mixed: put the folders of all ranks of one run beside "
                f"each other (`{shell_command('inspect', Path(folder).parent)}` shows the run id of each), or go back "
                "to a checkpoint"
            )


def _place_of(folder: Path) -> tuple[str | None, int, Path | None]:
    """Returns the identity that a rank's folder claims. Raises `IoError` if its manifest exists and cannot be read."""
    return place_in(read_if_any(folder / "manifest.json"), folder)


def _read_blob(folder: Path, record: CommitRecord) -> Blob | None:
    """Returns the blob of a record, None if damaged. Raises `IoError` if the file exists and cannot be read."""
    return blob_of(record, read_if_any(folder / f"blob.{record.blob}"))


def find_newest(
    folder: Path,
    file_records: Records,
    units: int,
    doubtful: bool,
    find_damage: Callable[[CommitRecord, Blob], Damage | None],
) -> Recovered:
    """Returns the newest commit that can be opened.

    Args:
        doubtful: True if a page is damaged, or damage was seen before. Then no commit is taken without `find_damage`.
        find_damage: Checks all data of a commit against its checksums and returns the first damage, or None.

    Raises:
        StoreError: If there is no record, if a record is of another model, or if every commit is damaged.
        IoError: If a blob cannot be read, which is no damage: the next start may be able to.
    """
    records = file_records.valid
    if not records:
        if file_records.other_format is not None:
            read_manifest(folder / "manifest.json")  # raises the error that names the format and its version
        raise StoreError(
            f"{folder} contains no commit record with a valid checksum: the run cannot be resumed, go back to a "
            "checkpoint"
        )
    wrong: list[str] = []
    for record in records:
        _check_units(folder, record, units)
        blob = _read_blob(folder, record)
        if blob is None:
            wrong.append(f"blob.{record.blob} of step {record.step} is damaged")
            continue
        if record is records[0] and not doubtful:
            return Recovered(record=record, notice=None)
        damage = find_damage(record, blob)
        if damage is None:
            why = f" ({'; '.join(wrong)})" if wrong else ""
            notice = (
                f"a commit or its record looked damaged{why}; all data of step {record.step} was compared and is "
                "intact, and the run resumes from it"
            )
            return Recovered(record=record, notice=notice)
        wrong.append(f"step {record.step}: {damage}")
    raise StoreError(
        f"{folder}: no commit is intact: {'; '.join(wrong)}; the run cannot be resumed, go back to a checkpoint"
    )


def _check_units(folder: Path, record: CommitRecord, units: int) -> None:
    if len(record.slots) != units:
        raise StoreError(
            f"{folder} belongs to another model: the run contains {count_of(len(record.slots), 'unit')}, this model "
            f'{units}; resume with the "units" and "experts" that the run had, choose another run name, or remove the '
            f"run with `{shell_command('rm', folder.parent)}`"
        )


def record_at(folder: Path, serial: int, records: Sequence[CommitRecord]) -> CommitRecord:
    """Returns the record number `serial`, on which all ranks agreed; raises `StoreError` if it is not in `records`."""
    for record in records:
        if record.serial == serial:
            return record
    have = ", ".join(str(record.serial) for record in records)
    raise StoreError(
        f"{folder} holds commits {have}, but the ranks agreed on commit {serial}, the last that all of them hold: "
        "these folders do not belong to one run"
    )


def load_blob(folder: Path, record: CommitRecord) -> Blob:
    """Returns the blob of the record that was chosen; raises `StoreError` if the blob is damaged."""
    blob = _read_blob(folder, record)
    if blob is None:
        raise StoreError(
            f"{folder}/blob.{record.blob} is damaged: step {record.step} cannot be resumed, and there is no other "
            "commit; go back to a checkpoint"
        )
    return blob


def check_drives(folders: Sequence[Path], copy: StoreManifest, step: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """Compares the manifest on each drive with the copy that a commit holds.

    Returns:
        A line for each drive whose manifest is missing or damaged; the copy must then be written to all drives. And the
        places of the drives that each of the other manifests names.

    Raises:
        StoreError: If the number of drives differs, or if a drive belongs to another store or has another index.
        IoError: If a manifest exists and cannot be read: the drive may belong to another store.
    """
    if len(copy.weights) != len(folders):
        raise StoreError(
            f"{folders[0]} is stored on {count_of(len(copy.weights), 'drive')} ({', '.join(copy.drives)}), nvme_path "
            f"names {len(folders)}; give the same drives in the same order"
        )
    notices: list[str] = []
    places: list[tuple[str, ...]] = []
    for drive, folder in enumerate(folders):
        number = _place_of(folder)[1]
        try:
            manifest = read_manifest(folder / "manifest.json")
        except StoreError as error:
            notices.append(f"{error}; the file is written anew from the copy in step {step} holds")
            continue
        if (manifest.id, number) != (copy.id, drive):
            raise StoreError(
                f"{folder} holds drive {number} of store {manifest.id}, expected drive {drive} of store {copy.id}: "
                f"mount the drives of this run, in the order {', '.join(copy.drives)}"
            )
        places.append(manifest.drives)
    return notices, places


def check_sizes(files: Sequence[DirectFile], expected: Sequence[int]) -> None:
    """Raises `StoreError` if the states file of a drive is shorter than expected."""
    for file, nbytes in zip(files, expected, strict=True):
        if file.size() < nbytes:
            raise StoreError(
                f"{file.path} is cut short: {file.size()} bytes of {nbytes}; the store cannot be used, go back to "
                f"a checkpoint"
            )
