"""Inspection of a rank's store without a lock: nothing is changed, and damage is reported.

`Store.open` refuses a store that cannot be resumed; inspection describes any state of the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio import StripedFile, crc32c
from offload.aio.file import Layout
from offload.errors import StoreError
from offload.fileio import inner_opener, inner_status, open_inner
from offload.records import fields, read
from offload.sizes import PAGE
from offload.swapper.store import format
from offload.swapper.store.folder import (
    FILES,
    FINISHED,
    RESHARDED,
    folders_aside,
    rank_number,
    read_whole,
    removal_begun,
)
from offload.swapper.store.format import (
    FORMATS,
    Blob,
    CommitRecord,
    Key,
    Records,
    Slot,
    StoreManifest,
    made_by,
    read_manifest,
    unpack_records,
)
from offload.swapper.store.requests import read_written

if TYPE_CHECKING:
    import torch

_TRIES = 3
"""Number of attempts to read a live store: a commit between two reads makes the results inconsistent."""


class Wrong(NamedTuple):
    """A file that is missing or differs from the bytes written."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Misplaced(Wrong):
    """A manifest of another store or drive: a resume refuses it, and writes any other damaged manifest anew."""


class Refused(Wrong):
    """A file that is there and cannot be opened, or a folder, a pipe or a link in its place: a resume refuses it."""


class Commit(NamedTuple):
    """A commit record whose checksum is correct, and its blob."""

    record: CommitRecord
    blob: Blob | None
    """The blob; None if the file does not match the record."""

    @property
    def contents(self) -> dict[str, torch.Tensor]:
        """Returns the engine's tensors, without the store's own tensors."""
        return {} if self.blob is None else self.blob.contents()

    @property
    def table(self) -> dict[Key, Slot]:
        """Returns the checksums of the slots that the commit names."""
        return {} if self.blob is None else format.unpack(self.blob.sums)

    @property
    def written(self) -> tuple[list[int], float | None]:
        """Returns the bytes written to each drive up to the commit, and a drive's rated endurance in bytes or None.

        The list is empty if the commit holds no counts.
        """
        return read_written(None if self.blob is None else self.blob.written)


class RankFiles(NamedTuple):
    """Contents of a rank's folder."""

    folder: Path
    rank: int
    commits: tuple[Commit, ...]
    """The valid commits, newest first."""
    manifest: StoreManifest | None
    """The manifest in the newest intact blob, with the drives of `manifest.json`; else `manifest.json` itself."""
    drive: int
    """Index of the drive that holds the folder. Records and blobs are stored on drive 0."""
    other_format: str | None
    """Description of a store whose format this version does not read, else None."""
    wrong: tuple[Wrong, ...]
    """Damaged or missing files, as far as known without reading the states."""
    begun: bool = False
    """True if a commit after the newest was begun; see `was_begun`."""

    @property
    def whole(self) -> tuple[Commit, ...]:
        """Returns the commits whose blob is intact, newest first. Other commits cannot be read."""
        return tuple(commit for commit in self.commits if commit.blob is not None)

    @property
    def run_id(self) -> str | None:
        """Returns the id of the folder's run; None if unknown."""
        return None if self.manifest is None else self.manifest.run_id

    def commit(self, serial: int) -> Commit | None:
        """Returns the intact commit with this serial; None if there is none."""
        return next((commit for commit in self.whole if commit.record.serial == serial), None)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Returns the rank's folder on each drive."""
        return _folders(self.folder, self.manifest)

    def open_states(self, writable: bool = False) -> StripedFile:
        """Opens the states over all drives. Raises `IoError`."""
        assert self.manifest is not None
        return StripedFile(
            [folder / "states" for folder in self.folders],
            self.manifest.weights,
            stripe_bytes=self.manifest.stripe_bytes,
            writable=writable,
            opener=inner_opener(3, ours=writable),
        )


def is_rank(folder: Path) -> bool:
    """Returns True if this is the folder of a run's rank; False as well if the folder cannot be read."""
    try:
        # A lock file alone is no rank: a start that was killed early leaves one.
        named = rank_number(folder.name) is not None
        return named and any((folder / name).exists() for name in FILES if name != "lock")
    except OSError:
        return False


def is_run(folder: Path) -> bool:
    """Returns True if this is the folder of a run, on any of its drives, or of a run that ended."""
    if any(is_rank(rank_folder) for rank_folder in folder.glob("rank*")) or (folder / RESHARDED).is_file():
        return True
    try:
        if not (folder / FINISHED).is_file():
            return False
    except OSError:
        return False
    # A file that cannot be parsed may be the note of a run's end.
    note = _notes(folder / FINISHED)
    return not note or "date" in note or "steps" in note


def leftovers(run: Path, all_rank_files: Sequence[RankFiles]) -> list[str]:
    """Returns files and folders of a run that nothing reads.

    These are temporary files of interrupted replacements, folders whose deletion was interrupted, folders of ranks
    beyond the world size, and folders of a change of the number of ranks. The latter are needed only while the note of
    the change exists.
    """
    places = {run, *(folder for rank_files in all_rank_files for folder in rank_files.folders)}
    left = [str(path) for place in places for path in place.glob("*.tmp")]
    if not (run / RESHARDED).is_file():
        left += [str(path) for path in folders_aside(run)]
    sizes = [rank_files.manifest.spec.ranks for rank_files in all_rank_files if rank_files.manifest is not None]
    if sizes:
        left += [str(rank_files.folder) for rank_files in all_rank_files if rank_files.rank >= max(sizes)]
    left += [str(rank_files.folder) for rank_files in all_rank_files if removal_begun(rank_files.folder)]
    return sorted(set(left))


def look(folder: Path) -> RankFiles:
    """Returns the contents of a rank's folder, without the states. The store may be in use by a live run."""
    for _ in range(_TRIES):
        before = _bytes(folder / "commit")
        rank_files = _look(folder)
        # If the commit file changed, a commit took place during the read, and the blobs may belong to another commit
        # than the records. Then the loop reads everything again.
        if _bytes(folder / "commit") == before:
            break
    return rank_files


def _look(folder: Path) -> RankFiles:
    """Reads the folder once, without protection against a concurrent commit."""
    rank = rank_number(folder.name)
    assert rank is not None, "the caller knows the folder for one of a rank"
    notes = _notes(folder / "manifest.json")
    version = _other_format(folder, notes)
    if version is not None:
        known = f"{FORMATS[0]} to {FORMATS[-1]}"
        words = f"format {version}, made by offload {made_by(notes)}; this version reads format {known}"
        return RankFiles(folder, rank, (), None, 0, words, ())
    if removal_begun(folder):  # nothing of it is needed, so nothing is missing; its manifest names the other drives
        with contextlib.suppress(StoreError):
            return RankFiles(folder, rank, (), read_manifest(folder / "manifest.json"), 0, None, ())
        return RankFiles(folder, rank, (), None, 0, None, ())
    # Only the first drive contains a commit file. On another drive the manifest names the drive.
    drive = 0 if (folder / "commit").exists() else place_of(folder)[1]
    commits, wrong = ((), []) if drive else _commits(folder)
    manifest: StoreManifest | None = None
    # A blob is covered by its record's checksum, so its copy of the manifest is preferred to the file.
    for commit in commits:
        if commit.blob is not None and manifest is None:
            manifest = StoreManifest.unpack(commit.blob.manifest, f"{folder}/blob.{commit.record.blob}")
            if len(manifest.spec.partitions) != len(commit.record.slots):
                units = f"{len(commit.record.slots)} and {len(manifest.spec.partitions)}"
                raise StoreError(f"cannot read {folder}: record and manifest of a commit are of {units} units")
    if manifest is not None:
        # A record with another number of units, or with slots that a unit lacks, is of other files. No run writes it.
        spec = manifest.spec
        commits = tuple(c if spec.has(c.record.slots) else c._replace(blob=None) for c in commits)
    with contextlib.suppress(StoreError):  # reported below, with the manifests of the other drives
        file = read_manifest(folder / "manifest.json")
        # A resume writes the present folders of the drives, and of the model's own files, into the file. Only the next
        # commit's blob contains them too.
        if manifest is None or same_but_places(file, manifest):
            manifest = file
    if not drive:
        wrong += _wrong_drives(folder, manifest)
        refused = _refused_files(_folders(folder, manifest))
        # A file that is wrong already keeps its reason, which says what the file is for.
        reasoned = {wrong_file.path for wrong_file in wrong}
        wrong = [Refused(*wrong_file) if wrong_file.path in refused else wrong_file for wrong_file in wrong]
        wrong += [refusal for path, refusal in refused.items() if path not in reasoned]
    begun = not drive and was_begun(folder, unpack_records(_bytes(folder / "commit") or b""))
    return RankFiles(folder, rank, commits, manifest, drive, None, tuple(wrong), begun)


def _other_format(folder: Path, notes: Mapping[str, Any]) -> int | None:
    """Returns the format of a store that this version does not read; None if the store contains a valid record."""
    records = unpack_records(_bytes(folder / "commit") or b"")
    if records.valid:
        return None
    versions = (notes.get("format"), records.other_format)
    return next((version for version in versions if version not in (None, *FORMATS)), None)


def _commits(folder: Path) -> tuple[tuple[Commit, ...], list[Wrong]]:
    """Returns the valid commits, newest first, and the damage of records and of the newest blob."""
    path = folder / "commit"
    data, missing = _read(path)
    records = unpack_records(data or b"")
    commits = tuple(
        Commit(record, blob_of(record, _bytes(folder / f"blob.{record.blob}") or b"")) for record in records.valid
    )
    wrong: list[Wrong] = []
    if data is None:
        wrong.append(Wrong(str(path), missing))
    elif (size := _nbytes_of(path)) != 2 * PAGE:
        wrong.append(Wrong(str(path), f"the file contains {size} bytes, expected {2 * PAGE}"))
    elif records.doubt is not None:
        wrong.append(Wrong(str(path), records.doubt))
    # Only a second commit writes blob 1: with a blob 1 and no record, records were lost.
    elif not commits and any((_bytes(folder / "blob.1") or b"")[:8]):
        wrong.append(Wrong(str(path), "the file contains no record, although two commits were made"))
    # Only the newest blob must be intact: the next commit overwrites the other one, and may have been interrupted. A
    # resume needs the other one if the newest is damaged.
    whole = next((number for number, commit in enumerate(commits) if commit.blob is not None), len(commits))
    for record, of in zip(
        (commit.record for commit in commits[:whole]), ("last commit", "commit before"), strict=False
    ):
        blob = folder / f"blob.{record.blob}"
        have, reason = _read(blob)
        if have is not None:
            short = len(have) < record.blob_nbytes
            cut = f"the file is cut short: {len(have)} bytes of {record.blob_nbytes}"
            reason = cut if short else "the file does not match the checksum in its record, or is no blob"
        wrong.append(Wrong(str(blob), f"{reason}; the file belongs to the {of}, step {record.step}"))
    return commits, wrong


COMMIT_BEGUN = (
    "a later commit was begun and has no record: a kill interrupted it, or the drive has lost its record or blob"
)


def was_begun(folder: Path, records: Records) -> bool:
    """Returns True if the next commit has written to its blob, and its record is not there.

    A kill between the two leaves this, and so does a drive that has lost the write of the record. Nothing in the files
    tells them apart, and in both the newest record names the commit to resume from.
    """
    if not records.valid or records.erased or records.doubt is not None:
        return False
    other = 1 - records.valid[0].blob
    data = _bytes(folder / f"blob.{other}") or b""
    return any(data[:8]) and all(blob_of(record, data) is None for record in records.valid[1:])


def blob_of(record: CommitRecord, data: bytes) -> Blob | None:
    """Returns the blob of a record in the bytes of its file; None if they do not match its length and checksum."""
    # The file may be longer than the blob, since a start reserves room in advance.
    data = data[: record.blob_nbytes]
    if len(data) != record.blob_nbytes or crc32c(data) != record.blob_crc:
        return None
    try:
        return Blob(data)
    except ValueError:
        return None


def _wrong_drives(folder: Path, manifest: StoreManifest | None) -> list[Wrong]:
    """Returns the manifests and states files, on all drives, that are missing, too short, or of another store."""
    if manifest is None:
        path = folder / "manifest.json"
        try:
            manifest = read_manifest(path)
        except StoreError as error:
            return [Wrong(str(path), _reason(path, error))]
    wrong: list[Wrong] = []
    shares = Layout(manifest.weights, manifest.stripe_bytes).file_nbytes(manifest.spec.nbytes)
    for drive, (place, nbytes) in enumerate(zip(_folders(folder, manifest), shares, strict=True)):
        if not place.is_dir():
            wrong.append(Wrong(str(place), f"the folder is missing: drive {drive} of {len(shares)}"))
            continue
        path = place / "manifest.json"
        try:
            own, number = read_manifest(path), _notes(path).get("drive")
            # Another store's drive, or drives in another order.
            if (own.id, number) != (manifest.id, drive):
                expected = f"expected drive {drive} of store {manifest.id}"
                wrong.append(Misplaced(str(path), f"the file belongs to drive {number} of store {own.id}, {expected}"))
            elif not same_but_places(own, manifest):
                wrong.append(Wrong(str(path), "the file differs from the copy in the last commit"))
        except StoreError as error:
            wrong.append(Wrong(str(path), _reason(path, error)))
        states = place / "states"
        if manifest.spec.slots == 1:
            continue  # a store with one slot unlinks its states: they exist only as long as their process
        try:
            descriptor = open_inner(states, 3)
        except OSError as error:
            wrong.append(Wrong(str(states), _reason_of(error)))
            continue
        have = os.fstat(descriptor).st_size
        os.close(descriptor)
        if have < nbytes:
            wrong.append(Wrong(str(states), f"the file is cut short: {have} bytes of {nbytes}"))
    return wrong


def _refused_files(folders: Sequence[Path]) -> dict[str, Refused]:
    """Returns what a start finds in the way in a rank's folders, by path: it opens each file that is there."""
    refused = {}
    for path in (folder / name for folder in folders for name in FILES if name != "lock"):
        try:
            os.close(open_inner(path, 3))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refused[str(path)] = Refused(str(path), _reason_of(error))
    return refused


def same_but_places(one: StoreManifest, other: StoreManifest) -> bool:
    """Returns True if two manifests are equal, apart from the folders of their drives, and of the model's own files."""
    return len(one.drives) == len(other.drives) and _without_places(one) == _without_places(other)


def _without_places(manifest: StoreManifest) -> StoreManifest:
    files = dict(manifest.spec.files)
    if files:  # an earlier version has recorded no samples, and a resume does
        files["files"] = [file["nbytes"] for file in files["files"]]
    return dataclasses.replace(manifest, drives=(), spec=manifest.spec._replace(files=files))


def _folders(folder: Path, manifest: StoreManifest | None) -> tuple[Path, ...]:
    """Returns the rank's folder on each drive; `folder` is its folder on the first drive."""
    if manifest is None:
        return (folder,)
    # A path such as "." does not contain the name of the run.
    here = Path(os.path.abspath(folder))
    run, rank, first = here.parent.name, here.name, Path(manifest.drives[0])
    # While the original is there, a copy must not be read together with drives that the original goes on writing.
    is_copy = store_id(first / run / rank) == manifest.id and not folder.samefile(first / run / rank)
    folders = [folder]
    for drive in manifest.drives[1:]:
        original = Path(drive) / run / rank
        # The folder's place if all drives were copied, or mounted elsewhere, with the same relative paths.
        beside = Path(os.path.normpath(here.parent.parent / os.path.relpath(drive, first))) / run / rank
        folders.append(beside if is_copy or store_id(beside) == manifest.id else original)
    return tuple(folders)


def _reason(path: Path, error: StoreError) -> str:
    """Returns the reason why a manifest cannot be read, without its path."""
    if isinstance(error.__cause__, OSError):
        return _reason_of(error.__cause__)
    return str(error).removeprefix(f"cannot read {path}: ")


def place_of(folder: Path) -> tuple[str | None, int, Path | None]:
    """Returns the identity that a rank's folder, on any drive, claims in its manifest.

    These are the id of the store, the index of the drive, and the rank's folder on the first drive; None, 0 and None
    without a readable manifest.
    """
    return place_in(_bytes(folder / "manifest.json") or b"", folder)


def place_in(manifest: bytes, folder: Path) -> tuple[str | None, int, Path | None]:
    """Returns the result of `place_of` for a rank's folder whose manifest has these bytes."""
    notes, folder = _object_in(manifest), Path(os.path.abspath(folder))
    drives, drive = notes.get("drives"), notes.get("drive") or 0
    if type(drive) is not int or drive < 0 or not isinstance(notes.get("id"), str | None):
        return None, 0, None
    if not isinstance(drives, list) or not drives or not isinstance(drives[0], str) or "\0" in drives[0]:
        return notes.get("id"), drive, None
    return notes.get("id"), drive, Path(drives[0]) / folder.parent.name / folder.name


def _notes(path: Path) -> dict[str, Any]:
    return _object_in(_bytes(path) or b"")


def _object_in(data: bytes) -> dict[str, Any]:
    try:
        notes: dict[str, Any] = read(data, fields({}))
    except ValueError:
        return {}
    return notes


def store_id(folder: Path) -> str | None:
    """Returns the id of the store that owns a rank's folder on any drive; None if it cannot be read."""
    noted_id = _notes(folder / "manifest.json").get("id")
    return noted_id if isinstance(noted_id, str) else None


def _bytes(path: Path) -> bytes | None:
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes | None, str]:
    """Returns the bytes of a file and an empty text; or None, and the reason why the file cannot be read."""
    try:
        return read_whole(path), ""
    except OSError as error:
        return None, _reason_of(error)


def _nbytes_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        status = inner_status(path, 3)
        return None if status is None else status.st_size
    return None


def _reason_of(error: OSError) -> str:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "the file is missing"
    return f"the file cannot be read: {error.strerror}"


def allocated_nbytes(folders: Sequence[Path]) -> int:
    """Returns the bytes that the files in `folders` take on their drives."""
    total = 0
    for folder in folders:
        with contextlib.suppress(OSError):  # a live run may replace or remove a file meanwhile
            # The system reports `st_blocks` in units of 512 bytes on every file system.
            total += sum(path.lstat().st_blocks * 512 for path in folder.iterdir())
    return total
