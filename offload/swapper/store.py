"""The swap store: the files that hold every partition, and that are the checkpoint.

    <drive>/<run>/rank<r>/states      the extents of this rank on this drive
    <first drive>/<run>/rank<r>/      manifest.json, commit, blob.0, blob.1, lock
    <first drive>/<run>/finished.json after a run that ended: steps and date

Each unit has two slots, A and B, for all its states. An update reads the slot of the newest copy and
writes the slot that the last durable record does not name. A commit makes the data durable, writes a blob
with all else that a step is made of, then one of two alternating records:

    writes ► fdatasync of every drive ► blob ► fdatasync ► record ► fdatasync

No byte that a durable record names is overwritten before the next record is durable, so a process may be
killed at any moment. A torn record fails its checksum, and the other one counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offload.aio import DirectFile, Priority, crc32c
from offload.errors import IoError, StoreError
from offload.sizes import PAGE, format_size
from offload.swapper.states import State

FORMAT_VERSION = 1
_MAGIC = b"OFFLDREC"
_RECORD = struct.Struct("<8sIIQQIII")  # magic, version, which blob, epoch, blob bytes, blob crc, units, revision
_RECORD_CRC = struct.Struct("<I")
MAX_UNITS = (PAGE - _RECORD.size - _RECORD_CRC.size) * 8


class Future(Protocol):
    """What the store needs of a request in flight."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Queue(Protocol):
    """What the store needs of an I/O queue; `aio.IoQueue` is one, tests put faults in front of it."""

    def read(self, file: DirectFile, offset: int, buffer: memoryview, *, priority: Priority = ...) -> Future: ...
    def write(self, file: DirectFile, offset: int, buffer: memoryview, *, priority: Priority = ...) -> Future: ...


class Extent(NamedTuple):
    """Bytes of one slot of one partition: all three numbers but the drive are multiples of 4096."""

    drive: int
    offset: int
    nbytes: int


class Record(NamedTuple):
    """What one commit record says: the epoch, the newest slot of each unit, and which blob.

    Weights that were edited after a step are committed as a further revision of its epoch.
    """

    epoch: int
    slots: tuple[int, ...]
    blob: int
    blob_nbytes: int
    blob_crc: int
    revision: int = 0

    def pack(self) -> bytes:
        bitmap = bytearray((len(self.slots) + 7) // 8)
        for unit, slot in enumerate(self.slots):
            bitmap[unit // 8] |= slot << (unit % 8)
        head = _RECORD.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.blob,
            self.epoch,
            self.blob_nbytes,
            self.blob_crc,
            len(self.slots),
            self.revision,
        )
        body = (head + bytes(bitmap)).ljust(PAGE - _RECORD_CRC.size, b"\0")
        return body + _RECORD_CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, page: bytes) -> Record | None:
        """The record in `page`, or None where it is torn, empty or of another format."""
        if len(page) != PAGE:
            return None
        body, crc = page[: -_RECORD_CRC.size], _RECORD_CRC.unpack(page[-_RECORD_CRC.size :])[0]
        magic, version, blob, epoch, nbytes, blob_crc, units, revision = _RECORD.unpack_from(body)
        if magic != _MAGIC or version != FORMAT_VERSION or crc != crc32c(body) or units > MAX_UNITS:
            return None
        bitmap = body[_RECORD.size :]
        slots = tuple(bitmap[unit // 8] >> (unit % 8) & 1 for unit in range(units))
        return cls(epoch, slots, blob, nbytes, blob_crc, revision)


class Commit(NamedTuple):
    """Which commit: edits after a step are a further revision of its epoch."""

    epoch: int
    revision: int


class RunStatus(NamedTuple):
    """What lies under a run's name: whether anything can be resumed, and how it ended if it did."""

    exists: bool
    finished: dict[str, Any] | None


def run_status(paths: Sequence[str | Path], run: str) -> RunStatus:
    """Look at `run` under the drives `paths` (the first holds manifest and records) without locking it."""
    folder = Path(paths[0]) / run
    finished = folder / "finished.json"
    # The first blob is written before the first record. With a blob and no valid record something was lost,
    # which must not be started over in silence: `Store.open` says what.
    ranks = sorted(folder.glob("rank*"))
    exists = any(_records(rank / "commit") or any(rank.glob("blob.*")) for rank in ranks)
    if exists or not finished.is_file():
        return RunStatus(exists, None)
    try:
        return RunStatus(False, _read_json(finished))
    except StoreError:
        return RunStatus(False, {})  # it ended; when and how cannot be read any more


class Shortage(NamedTuple):
    """A file system that has not the room for what a store would put there."""

    path: str
    need: int
    free: int


def find_shortage(paths: Sequence[str | Path], spec: StoreSpec, stores: int = 1) -> Shortage | None:
    """The first of `paths` whose file system is too small for its share of so many stores of `spec`.

    Drives may be folders of one file system.
    """
    needed: dict[int, int] = {}
    places: list[tuple[str | Path, Path, int]] = []
    extents = _distinct(spec.extents(len(paths)))
    for drive, path in enumerate(paths):
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        device = os.stat(place).st_dev
        mine = sum(extent.nbytes for extent in extents if extent.drive == drive)
        needed[device] = needed.get(device, 0) + stores * mine
        places.append((path, place, device))
    for path, place, device in places:
        free = shutil.disk_usage(place).free
        if free < needed[device]:
            return Shortage(str(path), needed[device], free)
    return None


def remove_run(path: Path) -> None:
    """Delete the run folder `path` on this and every other drive that its manifest names.

    Raises `StoreError` where it is no run folder, or while a process holds it.
    """
    ranks = sorted(path.glob("rank*"))
    if not path.is_dir() or not (ranks or (path / "finished.json").is_file()):
        raise StoreError(f"{path} is not a run folder: it has neither rank<r> folders nor finished.json")
    with contextlib.ExitStack() as locks:
        folders = [path]
        for rank in ranks:
            locks.enter_context(_Lock(rank))
            # Without a manifest that can be read, what lies on other drives is not known.
            with contextlib.suppress(StoreError, KeyError, TypeError):
                folders += [Path(drive) / path.name for drive in _read_json(rank / "manifest.json")["drives"]]
        for folder in dict.fromkeys(folders):
            shutil.rmtree(folder, ignore_errors=folder != path)


class StoreSpec(NamedTuple):
    """What a store must hold; two specs are of the same run when their `fingerprint` is equal.

    `partitions[unit]` gives the bytes of each state of that unit that is kept on disk, each a multiple of
    4096; `fingerprint` is JSON that names model, layout, mode and world size.
    """

    partitions: tuple[Mapping[State, int], ...]
    slots: int
    fingerprint: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in _distinct(self.extents(1)))

    def extents(self, drives: int) -> list[dict[State, tuple[Extent, ...]]]:
        """Lay all slots out: each on the drive that holds the least so far.

        A unit of which only WEIGHT is kept is never updated out of place, so its slots are one extent.
        """
        ends = [0] * drives
        table: list[dict[State, tuple[Extent, ...]]] = []
        for states in self.partitions:
            row: dict[State, tuple[Extent, ...]] = {}
            frozen = set(states) == {State.WEIGHT}
            for state, nbytes in states.items():
                slots: list[Extent] = []
                for _ in range(1 if frozen else self.slots):
                    drive = ends.index(min(ends))
                    slots.append(Extent(drive, ends[drive], nbytes))
                    ends[drive] += nbytes
                row[state] = tuple(slots * self.slots if frozen else slots)
            table.append(row)
        return table


class Store:
    """One rank's swap files, open and locked.

    `newest[unit]` is the slot of the newest copy. The update worker alone changes it and commits; reads
    may be submitted from any thread. Every future is the caller's to wait for.
    """

    def __init__(self, paths: Sequence[str | Path], run: str, rank: int, spec: StoreSpec, queue: Queue) -> None:
        if len(spec.partitions) > MAX_UNITS:
            raise StoreError(f"the model has {len(spec.partitions)} units, a store holds at most {MAX_UNITS}")
        self.spec = spec
        self.run = run
        self.folders = [Path(path) / run / f"rank{rank}" for path in paths]
        self.newest = [0] * len(spec.partitions)
        self.durable: Record | None = None
        self._queue = queue
        self._extents = spec.extents(len(paths))
        self._files: list[DirectFile] = []
        self._commit_path = self.folders[0] / "commit"
        _make_folders(self.folders)
        self._lock = _Lock(self.folders[0])
        close_in_children.add(self)

    # -- opening ------------------------------------------------------------------------------------

    def create(self) -> None:
        """Start over: reserve all room and write the manifest. Nothing is durable before `commit`."""
        try:
            for name in ("commit", "manifest.json", "blob.0", "blob.1"):
                (self.folders[0] / name).unlink(missing_ok=True)
            (self.folders[0].parent / "finished.json").unlink(missing_ok=True)
            for folder in self.folders:
                (folder / "states").unlink(missing_ok=True)
            self._check_room()
            for drive, folder in enumerate(self.folders):
                file = DirectFile(str(folder / "states"), create=True)
                self._files.append(file)
                file.reserve(self._drive_nbytes(drive))
            with DirectFile(str(self._commit_path), create=True) as file:
                file.reserve(2 * PAGE)
            _write_durably(self.folders[0] / "manifest.json", json.dumps(self._manifest(), indent=1).encode())
        except BaseException:
            # Nothing is in this store yet: a start that fails leaves no files behind.
            self.close()
            self._unlink()
            raise

    def newest_commit(self) -> Commit | None:
        """The last commit of what is there; None where there is none, not even a damaged one."""
        record = next(iter(_records(self._commit_path)), None)
        if record is None and (not any(self.folders[0].glob("blob.*")) or self._only_begun()):
            return None
        return Commit(0, 0) if record is None else Commit(record.epoch, record.revision)

    def open(self, at: Commit | None = None) -> bytes:
        """Open what is there and return its state blob: at its last commit, or at the one before if that is `at`.

        The one before may be asked for where another rank has not made the last one: then nothing of it was
        overwritten, and the last one is taken back for good.
        """
        try:
            manifest = _read_json(self.folders[0] / "manifest.json")
            _compare(self._manifest(), manifest, self.folders[0])
            self._files = [DirectFile(str(folder / "states")) for folder in self.folders]
            for drive, file in enumerate(self._files):
                if file.size() < self._drive_nbytes(drive):
                    raise StoreError(
                        f"{file.path} is cut short: {file.size()} bytes of {self._drive_nbytes(drive)}; "
                        f"the store cannot be used"
                    )
            records = _records(self._commit_path)
            record = next(iter(records), None)
            if record is not None and at is not None:
                record = self._record_at(at, records)
            if record is None or len(record.slots) != len(self.newest):
                raise StoreError(
                    f"{self.folders[0]} has no commit record whose checksum is right: it cannot be resumed"
                )
            blob = self._read_blob(record)
            if blob is None:
                raise StoreError(
                    f"{self.folders[0]}/blob.{record.blob} is damaged: epoch {record.epoch} cannot be resumed"
                )
            for later in records[: records.index(record)]:
                # What it names is about to be overwritten: it must never be found again.
                _write_in_place(self._commit_path, bytes(PAGE), later.blob * PAGE)
            self.durable = record
            self.newest = list(record.slots)
            return blob
        except BaseException:
            self.close()
            raise

    def _only_begun(self) -> bool:
        """Whether the first commit of all was under way: its blob is there, and its record was not begun."""
        if (self.folders[0] / "blob.1").exists():
            return False
        with contextlib.suppress(OSError):
            return self._commit_path.read_bytes() == bytes(2 * PAGE)
        return False

    def _record_at(self, at: Commit, records: Sequence[Record]) -> Record:
        for record in records:
            if Commit(record.epoch, record.revision) == at:
                return record
        have = ", ".join(str(record.epoch) for record in records)
        raise StoreError(
            f"{self.folders[0]} holds epochs {have}, but the last that all ranks hold is {at.epoch}; "
            f"these folders are not of one run"
        )

    # -- data ---------------------------------------------------------------------------------------

    def keeps(self, unit: int, state: State) -> bool:
        """Whether this state of this unit has slots here."""
        return state in self._extents[unit]

    def target(self, unit: int) -> int:
        """The slot that an update may write: the one that the last durable record does not name."""
        if self.spec.slots == 1:
            return 0
        return 0 if self.durable is None else 1 - self.durable.slots[unit]

    def read(
        self,
        unit: int,
        state: State,
        slot: int,
        start: int,
        buffer: memoryview,
        priority: Priority = Priority.NORMAL,
    ) -> Future:
        """Fill `buffer` from byte `start` of a slot."""
        extent = self._extents[unit][state][slot]
        assert start + len(buffer) <= extent.nbytes
        return self._queue.read(self._files[extent.drive], extent.offset + start, buffer, priority=priority)

    def write(self, unit: int, state: State, slot: int, start: int, buffer: memoryview) -> Future:
        """Write `buffer` at byte `start` of a slot; it must stay unchanged until the future is done."""
        extent = self._extents[unit][state][slot]
        assert start + len(buffer) <= extent.nbytes
        return self._queue.write(self._files[extent.drive], extent.offset + start, buffer)

    def commit(self, epoch: int, blob: bytes) -> None:
        """Make `newest` and `blob` the durable state. All writes must have completed."""
        for file in self._files:
            file.sync()
        which = 0 if self.durable is None else 1 - self.durable.blob
        _write_in_place(self.folders[0] / f"blob.{which}", blob)
        again = self.durable is not None and self.durable.epoch == epoch
        revision = self.durable.revision + 1 if again and self.durable is not None else 0
        record = Record(epoch, tuple(self.newest), which, len(blob), crc32c(blob), revision)
        _write_in_place(self._commit_path, record.pack(), which * PAGE)
        self.durable = record

    # -- closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close files and give the lock back; idempotent. All futures must be done."""
        for file in self._files:
            file.close()
        self._files = []
        self._lock.release()

    def close_in_child(self) -> None:
        """A forked child keeps neither the lock, which would outlive the run, nor the room of deleted files."""
        for file in self._files:
            file.descriptors.close()
        self._lock.release()

    def remove(self, finished: Mapping[str, Any] | None = None) -> None:
        """Delete the files, close, and leave `finished.json` beside where they were."""
        self._unlink()  # before the lock is given back: another process may start this run again at once
        self.close()
        if finished is not None:
            run = self.folders[0].parent
            note = dict(finished, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))
            while True:
                try:
                    run.mkdir(mode=0o700, exist_ok=True)
                    _write_durably(run / "finished.json", json.dumps(note).encode())
                    return
                except (FileNotFoundError, FileExistsError):
                    pass  # another rank, the last to leave, has just removed the empty folder

    def _unlink(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other ranks may still be there
                folder.parent.rmdir()

    # -- what lies where ----------------------------------------------------------------------------

    def _drive_nbytes(self, drive: int) -> int:
        return sum(extent.nbytes for extent in _distinct(self._extents) if extent.drive == drive)

    def _check_room(self) -> None:
        """Compare what is asked of each file system with what is free, before anything is written."""
        short = find_shortage([folder.parent.parent for folder in self.folders], self.spec)
        if short is not None:
            half = (
                ', or set "durability": "none" in the "offload" block (one slot instead of two: half the room, no '
                "resume after a kill)"
            )
            raise StoreError(
                f"the swap files need {format_size(short.need)}, {short.path} has {format_size(short.free)} "
                f"free; free some room, or add a drive to nvme_path{half if self.spec.slots == 2 else ''}"
            )

    def _manifest(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "run": self.run,
            "slots": self.spec.slots,
            "drives": [str(folder.parent.parent.resolve()) for folder in self.folders],
            "model": dict(self.spec.fingerprint),
            "extents": [
                {state.value: [list(extent) for extent in slots] for state, slots in row.items()}
                for row in self._extents
            ],
        }

    def _read_blob(self, record: Record) -> bytes | None:
        try:
            blob = (self.folders[0] / f"blob.{record.blob}").read_bytes()[: record.blob_nbytes]
        except OSError:
            return None
        return blob if len(blob) == record.blob_nbytes and crc32c(blob) == record.blob_crc else None


class Closable(Protocol):
    """What has open files that a forked child must not keep."""

    def close_in_child(self) -> None: ...


close_in_children: weakref.WeakSet[Closable] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(close_in_children):
        each.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _distinct(table: Sequence[Mapping[State, Sequence[Extent]]]) -> set[Extent]:
    return {extent for row in table for slots in row.values() for extent in slots}


class _Lock:
    """The one process that may touch a rank's folder, by `flock`, so that it dies with the process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor: int | None = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            self._descriptor = None
            raise StoreError(f"{folder} is in use by {holder}; end it, or choose another run name") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _make_folder(folder: Path) -> None:
    while True:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            return
        except (FileNotFoundError, FileExistsError):
            if folder.parent.exists() and not folder.parent.is_dir():
                raise  # else another rank has just removed the empty folder of the run before


def _make_folders(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            _make_folder(folder)
        except OSError as error:
            raise StoreError(
                f"cannot make the swap folder {folder}: {error.strerror}; set nvme_path to a folder "
                f"on a local drive that you may write"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StoreError(f"the swap folder {folder} is not writable; set nvme_path to one that is")


def _records(path: Path) -> list[Record]:
    """The valid records of a commit file, newest first."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    found: Iterator[Record | None] = (Record.unpack(data[start : start + PAGE]) for start in (0, PAGE))
    return sorted((record for record in found if record), key=lambda record: (-record.epoch, -record.revision))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("expected a JSON object")
        return content
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}; the store cannot be resumed without it") from error


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
    """Raise `StoreError` that names the first difference between two manifests."""
    difference = _difference(json.loads(json.dumps(expected)), found, "")
    if difference:
        raise StoreError(
            f"{folder} is of another model, layout or setting: {difference}; "
            f"choose another run name, or remove it with `offload rm {folder.parent}`"
        )


def _difference(expected: Any, found: Any, where: str) -> str | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            if key not in expected or key not in found:
                return f"{where}/{key} is in only one of the two"
        for key in expected:
            if difference := _difference(expected[key], found[key], f"{where}/{key}"):
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            if difference := _difference(one, other, f"{where}/{index}"):
                return difference
        return None
    return None if expected == found else f"{where} is {_short(found)} there and {_short(expected)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(value)} entries)"


def _write_in_place(path: Path, data: bytes, offset: int = 0) -> None:
    """Write `data` at `offset` of `path`, whatever lies there, and make it durable.

    A tear is found by the checksum that the reader compares.
    """
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, memoryview(data)[done:], offset + done)
        os.fsync(descriptor)
    except OSError as error:
        raise IoError(str(path), offset, len(data), error.errno or errno.EIO, "write") from error
    finally:
        os.close(descriptor)
    if new:
        _sync_folder(path.parent)


def _write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    _write_in_place(temporary, data)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
