"""A rank's store as it lies there, whoever has it: nothing is taken, nothing is changed, and what is wrong is said.

`Store.open` refuses what it cannot go on with; this tells of whatever there is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio import StripedFile, crc32c
from offload.aio.stripes import Layout
from offload.errors import StoreError
from offload.sizes import PAGE
from offload.swapper.store.format import checksums as sums
from offload.swapper.store.format.blob import Blob
from offload.swapper.store.format.checksums import Key, Slot
from offload.swapper.store.format.commit_record import FORMAT_VERSION, Record, read_records
from offload.swapper.store.format.manifest import Manifest, read_manifest
from offload.swapper.store.rank_folder import FILES, read_whole
from offload.swapper.store.write_counts import read_written

if TYPE_CHECKING:
    import torch

_TRIES = 3
"""A commit that is made while a live store is looked at makes its parts differ: then it is looked at again."""


class Wrong(NamedTuple):
    """A file that is not what was written."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Commit(NamedTuple):
    """A commit record whose checksum is right, and its blob."""

    record: Record
    blob: Blob | None
    """None where it is not the one that the record means."""

    @property
    def contents(self) -> dict[str, torch.Tensor]:
        """What was committed, without what the store adds."""
        return {} if self.blob is None else self.blob.contents()

    @property
    def table(self) -> dict[Key, Slot]:
        """The checksums of the slots that it names."""
        return {} if self.blob is None else sums.unpack(self.blob.sums)

    @property
    def written(self) -> tuple[list[int], float | None]:
        """Bytes written to each drive up to it, and what a drive is rated for; none where they were not counted."""
        return read_written(None if self.blob is None else self.blob.written)


class Found(NamedTuple):
    """What there is in a rank's folder."""

    folder: Path
    rank: int
    commits: tuple[Commit, ...]
    """Newest first."""
    manifest: Manifest | None
    """The copy that the newest commit holds, else the file."""
    drive: int
    """Which of its drives the folder lies on. Records and blobs lie on the first, 0."""
    other_format: str | None
    """What to say of a store that this version does not read."""
    wrong: tuple[Wrong, ...]
    """What is damaged or missing, as far as it shows without reading the states."""

    @property
    def whole(self) -> tuple[Commit, ...]:
        """The commits whose blob is right, newest first: of others nothing can be read."""
        return tuple(commit for commit in self.commits if commit.blob is not None)

    def commit(self, serial: int) -> Commit | None:
        """The whole commit of that number, if it is there."""
        return next((commit for commit in self.whole if commit.record.serial == serial), None)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The rank's folder on each drive."""
        return _folders(self.folder, self.manifest)

    def open_states(self) -> StripedFile:
        """The states over all drives, to be read. Raises `IoError`."""
        assert self.manifest is not None
        return StripedFile(
            [folder / "states" for folder in self.folders],
            self.manifest.weights,
            stripe_bytes=self.manifest.stripe_bytes,
            writable=False,
        )


def is_rank(folder: Path) -> bool:
    """Whether this is the folder of a rank of a run, as far as it may be looked into."""
    try:
        named = folder.name[:4] == "rank" and folder.name[4:].isdigit()
        return named and any((folder / name).exists() for name in FILES if name != "lock")
    except OSError:
        return False


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, on any of its drives, or of one that ended."""
    return any(is_rank(each) for each in folder.glob("rank*")) or _is_note(folder / "finished.json")


def _is_note(path: Path) -> bool:
    """Whether this is what a run leaves at its end; one that cannot be read may be."""
    try:
        if not path.is_file():
            return False
    except OSError:
        return False
    notes = _notes(path)
    return not notes or "date" in notes or "steps" in notes


def leftovers(run: Path, found: Sequence[Found]) -> list[str]:
    """Files and folders of a run that nothing reads: replacements that a kill cut short, ranks beyond its number."""
    places = {run, *(folder for each in found for folder in each.folders)}
    left = [str(path) for place in places for path in place.glob("*.tmp")]
    sizes = [each.manifest.spec.fingerprint.get("world_size", 1) for each in found if each.manifest is not None]
    if sizes:
        left += [str(each.folder) for each in found if each.rank >= max(sizes)]
    return sorted(left)


def look(folder: Path) -> Found:
    """All of a rank's folder but the states themselves, which may be those of a live run."""
    for _ in range(_TRIES):
        before = _bytes(folder / "commit")
        found = _look(folder)
        if _bytes(folder / "commit") == before:
            break
    return found


def _look(folder: Path) -> Found:
    rank = int(folder.name[4:])
    notes = _notes(folder / "manifest.json")
    other = _other_format(folder, notes)
    if other is not None:
        about = notes.get("about")
        made = about.get("offload", "unknown") if isinstance(about, dict) else "unknown"
        words = f"format {other}, made by offload {made}; this version reads format {FORMAT_VERSION}"
        return Found(folder, rank, (), None, 0, words, ())
    drive = 0 if (folder / "commit").exists() else notes.get("drive", 0)
    commits, wrong = ((), []) if drive else _commits(folder)
    manifest: Manifest | None = None
    for commit in commits:
        if commit.blob is not None and manifest is None:
            manifest = Manifest.unpack(commit.blob.manifest, f"{folder}/blob.{commit.record.blob}")
    if manifest is None:
        with contextlib.suppress(StoreError):  # said below, with those of the other drives
            manifest = read_manifest(folder / "manifest.json")
    if not drive:
        wrong += _wrong_drives(folder, manifest)
    return Found(folder, rank, commits, manifest, drive, None, tuple(wrong))


def _other_format(folder: Path, notes: Mapping[str, Any]) -> int | None:
    """The format of a store that is not of this one; None where there is a record of this one, whatever else."""
    found = read_records(folder / "commit")
    if found.valid:
        return None
    said = (notes.get("format"), found.other_format)
    return next((version for version in said if version not in (None, FORMAT_VERSION)), None)


def _commits(folder: Path) -> tuple[tuple[Commit, ...], list[Wrong]]:
    path = folder / "commit"
    found = read_records(path)
    commits = tuple(Commit(record, read_blob(folder, record)) for record in found.valid)
    wrong: list[Wrong] = []
    data = _bytes(path)
    if data is None:
        wrong.append(Wrong(str(path), "it is missing"))
    elif len(data) != 2 * PAGE:
        wrong.append(Wrong(str(path), f"it has {len(data)} bytes, not {2 * PAGE}"))
    elif found.torn:
        wrong.append(Wrong(str(path), "a record is torn: its checksum is not right; a commit was cut short, or damage"))
    elif not commits and any((_bytes(folder / "blob.1") or b"")[:8]):
        wrong.append(Wrong(str(path), "it holds no record, and there were two commits"))
    # The blob of the commit before is what the next commit writes over.
    if commits and commits[0].blob is None:
        record = commits[0].record
        blob = folder / f"blob.{record.blob}"
        have = _bytes(blob)
        if have is None:
            reason = "it is missing"
        elif len(have) < record.blob_nbytes:
            reason = f"it is cut short: {len(have)} bytes of {record.blob_nbytes}"
        else:
            reason = "its checksum is not the one that its record has"
        wrong.append(Wrong(str(blob), f"{reason}; it belongs to the last commit, step {record.epoch}"))
    return commits, wrong


def read_blob(folder: Path, record: Record) -> Blob | None:
    """What a record's blob holds; None where it is not the one that the record means."""
    data = (_bytes(folder / f"blob.{record.blob}") or b"")[: record.blob_nbytes]
    if len(data) != record.blob_nbytes or crc32c(data) != record.blob_crc:
        return None
    return Blob(data)


def _wrong_drives(folder: Path, manifest: Manifest | None) -> list[Wrong]:
    """Manifests and states of all drives that are missing, of another store, or cut short."""
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
            wrong.append(Wrong(str(place), f"there is no such folder, drive {drive} of {len(shares)}"))
            continue
        path = place / "manifest.json"
        try:
            mine, number = read_manifest(path), _notes(path).get("drive")
            if (mine.id, number) != (manifest.id, drive):
                expected = f"expected drive {drive} of store {manifest.id}"
                wrong.append(Wrong(str(path), f"it is of drive {number} of store {mine.id}, {expected}"))
            elif mine != manifest:
                wrong.append(Wrong(str(path), "it is not what was written; the last commit holds a copy"))
        except StoreError as error:
            wrong.append(Wrong(str(path), _reason(path, error)))
        states = place / "states"
        if manifest.spec.slots == 1:
            continue  # they have no name, and are there for as long as their process
        if not states.is_file():
            wrong.append(Wrong(str(states), "it is missing"))
        elif (have := states.stat().st_size) < nbytes:
            wrong.append(Wrong(str(states), f"it is cut short: {have} bytes of {nbytes}"))
    return wrong


def _folders(folder: Path, manifest: Manifest | None) -> tuple[Path, ...]:
    others = () if manifest is None else manifest.drives[1:]
    return (folder, *(Path(drive) / folder.parent.name / folder.name for drive in others))


def _reason(path: Path, error: StoreError) -> str:
    return "it is missing" if not path.exists() else str(error).removeprefix(f"cannot read {path}: ")


def place_of(folder: Path) -> tuple[str | None, int, Path | None]:
    """What a rank's folder on any drive says of itself: the id of its store, which of its drives it lies on, and the
    rank's folder on the first. Without a manifest that can be read there is none of it."""
    notes = _notes(folder / "manifest.json")
    drives = notes.get("drives") or [None]
    first = None if not isinstance(drives[0], str) else Path(drives[0]) / folder.parent.name / folder.name
    return notes.get("id"), int(notes.get("drive") or 0), first


def _notes(path: Path) -> dict[str, Any]:
    """What a manifest says, as far as it is JSON."""
    try:
        notes = json.loads(read_whole(path))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def store_id(folder: Path) -> str | None:
    """Of the store that a rank's folder on any drive is part of; None where that cannot be read."""
    return _notes(folder / "manifest.json").get("id")


def _bytes(path: Path) -> bytes | None:
    try:
        return read_whole(path)
    except OSError:
        return None


def allocated_nbytes(folders: Sequence[Path]) -> int:
    """Bytes that the files in `folders` take on their drives."""
    total = 0
    for folder in folders:
        with contextlib.suppress(OSError):  # a live run has just replaced or removed something
            total += sum(path.lstat().st_blocks * 512 for path in folder.iterdir())
    return total
