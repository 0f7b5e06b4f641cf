"""The format of a store: commit records, layout of extents, manifest, blobs and checksums.

    states file, over all drives:  [ unit 0: weight A, weight B, frozen, exp_avg A, … ][ unit 1: … ] …

A slot of a weight consists of its own trainable bytes and of the frozen bytes, which slots A and B share.

Pure arithmetic computes the layout from sizes. The manifest is a JSON file on each drive, and each blob holds a copy.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import json
import math
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio import crc32c, crc32c_joined, crc32c_of_zeros
from offload.aio.protocols import Future
from offload.errors import IoError, StoreError
from offload.notices import shell_command
from offload.records import anything, fields, flag, maybe, read, rows, table, text, whole
from offload.sizes import MIB, PAGE, count_of
from offload.states import State
from offload.swapper.store.folder import cut_short, read_whole, removal_begun, write_in_place

if TYPE_CHECKING:
    import torch


# -- commit record -------------------------------------------------------------------------------------
#
# The commit record: 4096 bytes that name the slots of the last committed step. Two records alternate.
#
# A record is valid if its checksum is correct. If both records are valid, the record with the higher serial is the
# newest. An incomplete record counts as never written.
#
# A resume of the older record erases the newer one by a mark, so that a lost record does not look like an erased one:
#
#     newest record    the other page         meaning
#     serial s         record s - 1           the commit before
#     serial s         mark of s + 1          a resume of s erased it
#     serial 1         zeros                  there was one commit
#     serial s         anything else          a commit was interrupted, or a record is lost


FORMATS = (3, 4, 5)
"""Version numbers that this version reads, of record, manifest and blob; see docs/reference/store-format.md."""


def format_of(layout: Mapping[str, Any]) -> int:
    """Returns the version number of a store with this layout, the lowest that describes it.

    Versions that read only 3 would take a piece of a table for the row of an expert, and those that read only 4 would
    miss the weights that are in the model's own files.
    """
    if any(unit.get("in_files") for unit in layout.get("units", ())):
        return 5
    parameters = (parameter for unit in layout.get("units", ()) for parameter in unit["parameters"])
    return 4 if any("rows" in parameter for parameter in parameters) else 3


_MAGIC = b"OFFLDREC"
_ERASED_MAGIC = b"OFFLDERA"
_HEAD = struct.Struct("<8sIIQQQQII")  # magic, version, which blob, serial, step, ns since 1970, blob bytes, crc, units
_CRC = struct.Struct("<I")
MAX_UNITS = (PAGE - _HEAD.size - _CRC.size) * 8
"""Largest number of units. The record's bitmap has one bit for each unit."""
MAX_UNITS_OF_THREE_SLOTS = MAX_UNITS // 2
"""Largest number of units of a store with three slots of some: such a record has a second bitmap."""
SLOTS = "ABC"
"""Names of the slots in messages."""


class CommitRecord(NamedTuple):
    """Contents of one commit record."""

    serial: int
    """Number of the commit, from 1. An edit of weights commits the same step again, with a higher serial."""
    step: int
    slots: tuple[int, ...]
    """The newest slot of each unit: 0, 1 or 2."""
    blob: int
    """Index of the blob, and of the page of the commit file that holds the record: 0 or 1."""
    blob_nbytes: int
    blob_crc: int
    time_ns: int = 0
    """Time of the commit, in nanoseconds since 1970."""
    version: int = FORMATS[0]
    """Version number of the store."""

    def pack(self) -> bytes:
        """Returns the record's page of the commit file, 4096 bytes."""
        # A bitmap has one bit for each unit. The first unit has the lowest bit of the first byte. A second bitmap with
        # the upper bits follows the first, which has the lower ones. It is all zeros if no unit is in its third slot.
        lower, upper = (bytearray((len(self.slots) + 7) // 8) for _ in range(2))
        for unit, slot in enumerate(self.slots):
            lower[unit // 8] |= (slot & 1) << (unit % 8)
            upper[unit // 8] |= (slot >> 1) << (unit % 8)
        bitmaps = bytes(lower + upper) if any(upper) else bytes(lower)
        head = _HEAD.pack(
            _MAGIC,
            self.version,
            self.blob,
            self.serial,
            self.step,
            self.time_ns,
            self.blob_nbytes,
            self.blob_crc,
            len(self.slots),
        )
        return _with_crc(head + bitmaps)

    @classmethod
    def unpack(cls, page: bytes, which: int) -> CommitRecord | None:
        """Returns the record in page number `which`; None if the page is incomplete, empty or of another format."""
        if len(page) != PAGE:
            return None
        body, crc = page[: -_CRC.size], _CRC.unpack(page[-_CRC.size :])[0]
        magic, version, blob, serial, step, time_ns, nbytes, blob_crc, units = _HEAD.unpack_from(body)
        # Any mismatch means no record: the caller falls back to the other page.
        if magic != _MAGIC or version not in FORMATS or crc != crc32c(body) or units > MAX_UNITS:
            return None
        # A mismatch here means that the record was copied from the other page, or that no commit wrote it.
        if blob != which or not 0 < serial < 2**63 or step >= 2**63:
            return None
        nbytes_of_units = (units + 7) // 8
        lower = body[_HEAD.size :]
        # A record of more units than fit twice has one bitmap, and zeros behind it.
        upper = lower[nbytes_of_units:].ljust(nbytes_of_units, b"\0")
        slots = tuple(
            (lower[unit // 8] >> (unit % 8) & 1) | (upper[unit // 8] >> (unit % 8) & 1) << 1 for unit in range(units)
        )
        return cls(serial, step, slots, blob, nbytes, blob_crc, time_ns, version)


def _with_crc(content: bytes) -> bytes:
    # The checksum covers the whole page, so a reader detects a write that was cut short anywhere.
    body = content.ljust(PAGE - _CRC.size, b"\0")
    assert len(body) == PAGE - _CRC.size, "the store has checked the number of its units"
    return body + _CRC.pack(crc32c(body))


def erasure(serial: int, which: int) -> bytes:
    """Returns page number `which` of a commit file after record `serial` was erased, or if it never existed there."""
    return _with_crc(_HEAD.pack(_ERASED_MAGIC, FORMATS[0], which, serial, 0, 0, 0, 0, 0))


class Records(NamedTuple):
    """Contents of a commit file."""

    valid: tuple[CommitRecord, ...]
    """The valid records, newest first."""
    invalid_pages: tuple[int, ...]
    """Indices of pages that are not empty, and neither records nor marks: interrupted commits, or damage."""
    other_format: int | None = None
    """The format version in an invalid page, if it is none of `FORMATS`; else None."""
    erased: bool = False
    """True if the page beside the newest record has the mark of the record after it."""
    doubt: str | None = None
    """Why the newest record may not be that of the last commit, or may be damaged; None if all is as it should be."""

    def forget_later(self, path: Path, record: CommitRecord) -> None:
        """Erases durably all records of the commit file at `path` that are newer than `record`."""
        for later in self.valid:
            if later.serial > record.serial:
                write_in_place(path, erasure(later.serial, later.blob), later.blob * PAGE)
        cut_short(path, 2 * PAGE)


def last_of_all(newest: Iterable[int | None]) -> int | None:
    """Returns the serial of the last commit that every rank with a commit holds; None if no rank has one.

    Each rank commits on its own. Until all ranks meet in the next step, a rank overwrites nothing of its previous
    commit. So a killed rank is at most one commit behind, and all other ranks still hold the killed rank's last commit.
    """
    return min((serial for serial in newest if serial is not None), default=None)


def read_records(path: Path) -> Records:
    """Returns the records in a commit file; none if the file does not exist.

    Raises `IoError` if the file exists and cannot be read.
    """
    return unpack_records(read_if_any(path))


def unpack_records(data: bytes) -> Records:
    """Returns the records in the bytes of a commit file; ignores an incomplete page of a short file."""
    pages = [data[start : start + PAGE] for start in (0, PAGE)]
    unpacked = [CommitRecord.unpack(page, which) for which, page in enumerate(pages)]
    valid = sorted((record for record in unpacked if record is not None), key=lambda record: -record.serial)
    marks = [
        page[:8] == _ERASED_MAGIC and page == erasure(_HEAD.unpack_from(page)[3], n) for n, page in enumerate(pages)
    ]
    # An empty page was never written. Any other page without a record or mark is an interrupted commit or damage.
    invalid_pages = tuple(n for n in (0, 1) if unpacked[n] is None and not marks[n] and any(pages[n]))
    # A page of another format is invalid here. The caller must not take it for an interrupted commit.
    heads = (page for page in map(pages.__getitem__, invalid_pages) if len(page) >= _HEAD.size)
    versions = (int(_HEAD.unpack_from(head)[1]) for head in heads if head.startswith(_MAGIC))
    other_version = next((version for version in versions if version not in FORMATS), None)
    if not valid:
        return Records((), invalid_pages, other_version)
    other = 1 - valid[0].blob
    erased = marks[other] and pages[other] == erasure(valid[0].serial + 1, other)
    doubt = None
    if invalid_pages:
        doubt = "a record does not match its checksum: a commit was interrupted, or the file is damaged"
    elif [record.serial for record in valid[1:]] == [valid[0].serial - 1] or erased:
        pass
    elif len(valid) > 1 or marks[other] or valid[0].serial > 1:
        doubt = (
            f"the record of commit {valid[0].serial} is valid, and beside it is neither that of commit "
            f"{valid[0].serial - 1} nor the mark of an erased one: a record that was written is lost"
        )
    return Records(tuple(valid), invalid_pages, other_version, erased, doubt)


def was_committed(folder: Path) -> bool:
    """Returns True if a rank's folder holds or must have held a commit; False if at most a start was interrupted.

    The first commit is complete before the second commit writes blob 1 and then page 1. So the first commit was
    interrupted if page 0 is invalid while blob 1 and page 1 are empty. A page of another format counts as a commit. So
    does a commit file that was cut or is missing beside a manifest: a start writes both pages before the manifest, and
    a deletion leaves its mark until the manifest is gone. Raises `IoError` if a file exists and cannot be read, because
    the file may hold a commit.
    """
    data = read_if_any(folder / "commit")
    if removal_begun(folder):
        return False
    if len(data) < 2 * PAGE and _is_of_first_drive(read_if_any(folder / "manifest.json")):
        return True
    records = unpack_records(data)
    if records.valid or 1 in records.invalid_pages or records.other_format is not None:
        return True
    return any(read_if_any(folder / "blob.1")[:8])


def _is_of_first_drive(manifest: bytes) -> bool:
    """Returns True for the bytes of a first drive's manifest, and of a damaged one; False for another drive's."""
    try:
        return bool(manifest) and not read(manifest, fields({}, {"drive": whole()})).get("drive")
    except ValueError:
        return True


def read_if_any(path: Path) -> bytes:
    """Returns the bytes of a file; no bytes if there is no file. Raises `IoError` if the file cannot be read."""
    try:
        return read_whole(path)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        # The file exists, so it must not count as missing: a start would find no run and delete the commits, and a
        # resume would report a damaged commit.
        wrong = IoError(str(path), 0, 0, error.errno or errno.EIO, "read")
        wrong.strerror = error.strerror  # may be more specific than the system's text for the number
        raise wrong from error


# -- manifest ------------------------------------------------------------------------------------------


class Extent(NamedTuple):
    """A byte range of the states file; offset and length are multiples of 4096."""

    offset: int
    nbytes: int


class Extents(NamedTuple):
    """Location of a slot in the states file: at most two extents, in the order of the slot's bytes."""

    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the slot."""
        return sum(extent.nbytes for extent in self.extents)

    def extents_of(self, start: int, nbytes: int) -> list[Extent]:
        """Returns the byte ranges of the file that hold `nbytes` bytes of the slot, from byte `start` on."""
        ranges: list[Extent] = []
        for offset, length in self.extents:
            first, last = max(start, 0), min(start + nbytes, length)
            if first < last:
                ranges.append(Extent(offset + first, last - first))
            # From here on `start` is relative to the next extent.
            start -= length
        return ranges

    def offset(self, start: int) -> int:
        """Returns the offset in the file of byte `start` of the slot."""
        return self.extents_of(start, 1)[0].offset


def own_nbytes(slots: Sequence[Extents]) -> int:
    """Returns the number of bytes at the start of a slot that the other slot of the state does not share."""
    return sum(extent.nbytes for extent in slots[0].extents if len(slots) == 1 or extent not in slots[1].extents)


class StoreSpec(NamedTuple):
    """Planned contents of a store. Two specs fit one run if their first three fields, and `frozen`, are equal.

    Attributes:
        partitions: for each unit, the number of bytes of each state on disk. All are multiples of 4096.
        slots: 2, or 1 without durability.
        fingerprint: JSON that names model, layout, mode and world size.
        about: JSON that is only displayed.
        frozen: for each unit, the number of bytes at the end of its WEIGHT that no update writes. All are multiples of
            4096. The tuple is empty if no unit has frozen bytes.
        shadowed: units with one slot more, so that an update under the backward keeps the newest states until `step()`.
        files: JSON that names the model's own files and the units in them; see `ModelFiles.described`. Empty if all
            weights are in the store.
    """

    partitions: tuple[Mapping[State, int], ...]
    slots: int
    fingerprint: Mapping[str, Any]
    about: Mapping[str, Any] = {}
    frozen: tuple[int, ...] = ()
    shadowed: frozenset[int] = frozenset()
    files: Mapping[str, Any] = {}

    def slots_of(self, unit: int) -> int:
        """Returns the number of slots of a unit."""
        return self.slots + (unit in self.shadowed)

    def has(self, slots: Sequence[int]) -> bool:
        """Returns True if a commit record may name these slots, one of each unit."""
        return len(slots) == len(self.partitions) and all(slot < self.slots_of(unit) for unit, slot in enumerate(slots))

    @property
    def shared(self) -> tuple[int, ...]:
        """Returns for each unit the number of bytes at the end of WEIGHT that all slots of the unit share.

        These bytes are stored once. The number is 0 for a unit with one slot.
        """
        frozen = self.frozen or (0,) * len(self.partitions)
        return tuple(nbytes if self.slots_of(unit) > 1 else 0 for unit, nbytes in enumerate(frozen))

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the run: the shards of each of its replicas."""
        return int(self.fingerprint.get("world_size", 1)) * int(self.fingerprint.get("replicas", 1))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the states file."""
        return sum(map(self.nbytes_of, State))

    def nbytes_of(self, state: State) -> int:
        """Returns the number of bytes that all slots of one state take, over all units."""
        shared = self.shared if state is State.WEIGHT else (0,) * len(self.partitions)
        # All slots of a unit share the same bytes, which count once.
        return sum(
            (row[state] - shared[unit]) * self.slots_of(unit) + shared[unit]
            for unit, row in enumerate(self.partitions)
            if state in row
        )

    def places(self) -> list[dict[State, tuple[Extents, ...]]]:
        """Returns for each unit and state the extents of its slots.

        The slots of a state follow each other. The shared bytes come after the last slot.
        """
        end = 0
        table: list[dict[State, tuple[Extents, ...]]] = []
        for unit, (states, frozen) in enumerate(zip(self.partitions, self.shared, strict=True)):
            row: dict[State, tuple[Extents, ...]] = {}
            count = self.slots_of(unit)
            for state, nbytes in states.items():
                shared = frozen if state is State.WEIGHT else 0
                own = nbytes - shared
                # The frozen bytes follow the last slot. They are the second extent of every slot.
                behind = Extent(end + count * own, shared)
                slots = [(Extent(end + slot * own, own), behind) for slot in range(count)]
                # Empty extents are left out. Most states have no frozen bytes, and frozen units have no other bytes.
                row[state] = tuple(Extents(tuple(extent for extent in slot if extent.nbytes)) for slot in slots)
                end = behind.offset + behind.nbytes
            table.append(row)
        return table

    def title(self, unit: int) -> str:
        """Returns the name of a unit for messages."""
        units = self.fingerprint.get("units", ())
        return str(units[unit]["name"] or "the root") if unit < len(units) else f"unit {unit}"

    def parameters_at(self, rank: int, unit: int, state: State, start: int, nbytes: int) -> tuple[str, ...]:
        """Returns the names of the parameters that some bytes of a rank's partition belong to.

        The result is empty if only the unit is known: for states with another number of bytes for each parameter.
        """
        described = self.fingerprint.get("units", ())[unit : unit + 1]
        if not described or "matrices" in described[0] or described[0].get("ep_size", 1) > 1:
            return ()
        size, trainable = int(self.fingerprint.get("world_size", 1)), described[0]["trainable"]
        # A partition is the rank's shard of the trainable region, and for weights that of the frozen region.
        regions = [range(trainable), range(trainable, described[0]["numel"] if state is State.WEIGHT else trainable)]
        itemsize, rest = divmod(self.partitions[unit][state], sum(map(len, regions)) // size or 1)
        if rest or not itemsize or state is State.PACKED:
            return ()
        first, stop = start // itemsize, -(-(start + nbytes) // itemsize)
        elements: list[range] = []
        for region in regions:
            begin, length = region.start + rank % size * (len(region) // size), len(region) // size
            elements.append(range(begin + min(max(first, 0), length), begin + min(max(stop, 0), length)))
            first, stop = first - length, stop - length
        return tuple(
            parameter["name"]
            for parameter in described[0]["parameters"]
            for part in elements
            if parameter["start"] < part.stop
            and part.start < parameter["start"] + parameter.get("numel", math.prod(parameter["shape"]))
            and part
        )


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """Contents of `manifest.json`; see docs/reference/store-format.md."""

    id: str
    """Random id of this store, the same on each of its drives."""
    run: str
    rank: int
    created: str
    drives: tuple[str, ...]
    """Folders of the drives when the store was created."""
    weights: tuple[int, ...]
    """For each drive, the number of stripes that the drive stores of each row of stripes."""
    stripe_bytes: int
    spec: StoreSpec
    # Comparisons ignore the id: an older version of offload writes commits without it next to files that have it.
    run_id: str | None = field(default=None, compare=False)
    """Random id of the run, equal in the stores of all ranks. It is None in runs of older versions."""

    def pack(self, drive: int = 0) -> bytes:
        """Returns the bytes of the manifest on one drive."""
        content = {
            "format": format_of(self.spec.fingerprint),
            "id": self.id,
            **({} if self.run_id is None else {"run_id": self.run_id}),
            "run": self.run,
            "rank": self.rank,
            "created": self.created,
            "drives": self.drives,
            "drive": drive,
            "stripes": {"bytes": self.stripe_bytes, "weights": self.weights},
            "slots": self.spec.slots,
            "layout": self.spec.fingerprint,
            "about": self.spec.about,
            "extents": _plain_places(self.spec),
            **({"model_files": self.spec.files} if self.spec.files else {}),
        }
        # Each key gets a line. `json.dumps` with `indent` would run in Python code, slowly for thousands of parameters.
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        return ("{\n" + ",\n".join(lines) + "\n}").encode()

    @cached_property
    def packed(self) -> bytes:
        """The bytes of the manifest on the first drive. Each blob contains a copy."""
        return self.pack()

    @classmethod
    def unpack(cls, data: bytes, where: str) -> StoreManifest:
        """Returns the manifest in `data`.

        Raises `StoreError` if `data` is no manifest. The error names the reason and `where`, the location of `data`.
        """
        try:
            content = read(data, fields({}))
        except ValueError as error:
            raise StoreError(f"cannot read {where}: {error}") from error
        if content.get("format") not in FORMATS:
            raise StoreError(
                f"{where} has store format {content.get('format')}; this version of offload reads format "
                f"{FORMATS[0]} to {FORMATS[-1]}: resume with the version that made the run "
                f"({made_by(content)}), or choose another run name"
            )
        try:
            _MANIFEST(content, "")
            if len(content["stripes"]["weights"]) != len(content["drives"]):
                raise ValueError(f"expected a weight for each of {len(content['drives'])} drives")
            # The manifest stores extents, not sizes. The size of a partition is the sum of its first slot's extents.
            partitions = tuple(
                {State(name): sum(nbytes for _, nbytes in slots[0]) for name, slots in row.items()}
                for row in content["extents"]
            )
            # An extent in both slots holds the frozen bytes. A unit with one slot does not mark its frozen bytes.
            weights = [row.get(State.WEIGHT.value, ()) for row in content["extents"]]
            frozen = tuple(
                sum(extent[1] for extent in slots[0] if extent in slots[1]) if len(slots) > 1 else 0
                for slots in weights
            )
            shadowed = frozenset(
                unit
                for unit, row in enumerate(content["extents"])
                if any(len(slots) > content["slots"] for slots in row.values())
            )
            files = content.get("model_files", {})
            _check_files(files, content["layout"])
            spec = StoreSpec(partitions, content["slots"], content["layout"], content["about"], frozen, shadowed, files)
            stripes = content["stripes"]
            manifest = cls(
                id=content["id"],
                run=content["run"],
                rank=content["rank"],
                created=content["created"],
                drives=tuple(content["drives"]),
                weights=tuple(stripes["weights"]),
                stripe_bytes=stripes["bytes"],
                spec=spec,
                run_id=content.get("run_id"),
            )
            # The layout is recomputed from the sizes. If the extents differ, the manifest is damaged or has another
            # format.
            if _plain_places(spec) != content["extents"]:
                raise ValueError("its extents are not where its format requires them")
            return manifest
        except ValueError as error:
            raise StoreError(f"cannot read {where}: {error}") from error


def made_by(content: Mapping[str, Any]) -> str:
    """Returns the version of offload that a manifest names."""
    about = content.get("about")
    return str(about.get("offload", "unknown")) if isinstance(about, dict) else "unknown"


# A manifest may come from anybody. These tables check the kinds and ranges of values on which all other code relies.
MOST_RANKS = 1 << 16
_DIMENSION = whole(0, 1 << 48)
_FIELDS = rows(rows(anything, 3, 3))
"""Fields of a state as [name, kind, shape]; `described_layouts` checks each field."""
_PARAMETER = fields(
    {"name": text(), "shape": rows(_DIMENSION, 0, 64), "start": whole(), "trainable": flag},
    {
        "packed": _FIELDS,
        "blocks": text(),
        "numel": whole(),
        "inner": _FIELDS,
        "kind": text(),
        "stack": text(),
        "row": whole(),
        "rows": rows(_DIMENSION, 2, 2),
    },
)
_UNIT = fields(
    {"name": text(), "numel": whole(), "trainable": whole(), "parameters": rows(_PARAMETER)},
    {"matrices": maybe(whole()), "in_fp32": flag, "ep_size": whole(1, MOST_RANKS), "in_files": flag},
)
_UNIT_IN_WORDS = fields({"name": text(), "parameters": rows(_PARAMETER)})
"""A unit in the manifest of a checkpoint with parts. Only people read this description."""


def check_layout(value: Any, name: str) -> None:
    """Raises `ValueError` unless `value` has the form that `offload.layout.fingerprint.describe` returns."""
    parts = isinstance(value, dict) and bool(value.get("parts"))
    ranks = whole(1, MOST_RANKS)
    place = fields({"size": ranks})
    fields(
        {},
        {
            "mode": text(),
            "world_size": ranks,
            "replicas": ranks,
            "frozen": text(),
            "in_fp32": whole(),
            "units": rows(_UNIT_IN_WORDS if parts else _UNIT),
            "parts": rows(text(), 0, MOST_RANKS),
            "tensor_parallel": place,
            "pipeline": place,
        },
    )(value, name)
    if value.get("world_size", 1) * value.get("replicas", 1) > MOST_RANKS:
        raise ValueError(f"expected at most {MOST_RANKS} ranks, got {value['world_size']} times {value['replicas']}")


ABOUT = fields(
    {},
    {
        "offload": text(),
        "class": text(),
        "config": maybe(fields({})),
        "generation_config": maybe(fields({})),
        "tied": table(text()),
        "loader_ties": rows(text()),
        "tied_buffers": table(text()),
        "forked_from": fields({"run": text(), "run_id": maybe(text()), "step": whole()}),
    },
)
"""Checks the description of a model for people and exports, which `offload.layout.fingerprint.about` returns."""
_MANIFEST = fields(
    {
        "id": text("[0-9a-f]{1,64}", "the id of a store"),
        "run": text(),
        "rank": whole(0, MOST_RANKS),
        "created": text(),
        "drives": rows(text("[^\0]+", "the folder of a drive"), 1, 1024),
        "stripes": fields({"bytes": whole(PAGE, 1 << 40), "weights": rows(whole(1, 1 << 20), 1, 1024)}),
        "slots": whole(1, 2),
        "layout": check_layout,
        "about": ABOUT,
        # These limits keep the size of each state, and of all states together, below the largest file size.
        "extents": rows(table(rows(rows(rows(whole(0, 1 << 56), 2, 2), 0, 2), 1, 3)), 0, 1 << 16),
    },
    {
        "run_id": text("[^\0]*", "the id of a run"),
        "drive": whole(0, 1023),
        "model_files": fields(
            {
                "files": rows(
                    fields(
                        {"path": text("/[^\0]*", "the path of a file"), "nbytes": whole(0, 1 << 56)},
                        {"sample": whole(0, (1 << 32) - 1)},
                    )
                ),
                "units": rows(
                    fields({"unit": whole(), "crc": whole(0, (1 << 32) - 1), "tensors": rows(rows(whole(), 4, 4), 1)})
                ),
            }
        ),
    },
)


def _check_files(files: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless the units in files are those of the layout, and their tensors are within the files."""
    sizes = [file["nbytes"] for file in files.get("files", ())]
    flagged = [number for number, unit in enumerate(layout.get("units", ())) if unit.get("in_files")]
    if [unit["unit"] for unit in files.get("units", ())] != flagged:
        raise ValueError("expected the places of all units that are in the model's own files")
    for unit in files.get("units", ()):
        for file, start, nbytes, _ in unit["tensors"]:
            if file >= len(sizes) or not 0 < nbytes <= sizes[file] - start:
                raise ValueError(f"expected the tensors of unit {unit['unit']} within the model's own files")


def _plain_places(spec: StoreSpec) -> list[dict[str, list[list[list[int]]]]]:
    return [
        {state.value: [[list(extent) for extent in place.extents] for place in slots] for state, slots in row.items()}
        for row in spec.places()
    ]


def read_manifest(path: Path) -> StoreManifest:
    """Returns the manifest in a file. Raises `StoreError` if the file cannot be read or holds no manifest."""
    try:
        data = read_whole(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return StoreManifest.unpack(data, str(path))


def check_rank(manifest: StoreManifest, rank: int, folder: Path) -> None:
    """Raises `StoreError` if the files in the folder of `rank` belong to another rank."""
    if manifest.rank != rank:
        raise StoreError(
            f"{folder} has the swap files of rank {manifest.rank}, expected those of rank {rank}: folders of ranks "
            "have been renamed or copied over each other; put the files of each rank back into the folder of its number"
        )


def compare(own: StoreSpec, stored: StoreSpec, folder: Path) -> None:
    """Raises `StoreError` with the first difference between two specs, and advice."""
    for name in ("fingerprint", "slots", "partitions", "shared"):
        # `stored` was read from JSON, so both specs are converted to JSON and back before the comparison.
        expected, there = (json.loads(json.dumps(_plain(getattr(spec, name)))) for spec in (own, stored))
        difference = _difference(expected, there, "layout" if name == "fingerprint" else name)
        if difference is None:
            continue
        advice = f"choose another run name, or remove the run with `{shell_command('rm', folder.parent)}`"
        # If a setting of the user explains the difference, the advice names this setting.
        if name == "slots":
            advice = 'resume with the durability that the run had, or leave "durability" out'
            there, here = ("none" if spec.slots == 1 else "step, or every N" for spec in (stored, own))
            difference = f'"durability" was {there} in the run and is {here} here'
        if difference.startswith("layout/frozen "):
            advice = f'resume with the "frozen" that the run had (or the option --load-in-4bit or -8bit), or {advice}'
            difference = " and ".join(
                f'"frozen" {verb} {spec.get("frozen", "not set")} {place}'
                for spec, verb, place in ((there, "was", "in the run"), (expected, "is", "here"))
            )
        if difference.startswith("layout/units/"):
            advice = (
                f'resume with the "units", "experts", "vocabulary" and expert_parallel that the run had, or {advice}'
            )
        if difference.startswith("layout/in_fp32 "):
            advice = f'resume with the "keep_in_fp32" that the run had, or {advice}'
            counts = [count_of(spec.get("in_fp32", 0), "weight") for spec in (there, expected)]
            difference = f'"keep_in_fp32" kept {counts[0]} in fp32 in the run and keeps {counts[1]} here'
        if difference.startswith("layout/mode is "):
            advice = f"{_advice_of_modes(str(there['mode']), str(expected['mode']), folder)}, or {advice}"
        if "world_size" in difference or "replicas" in difference:
            advice = "resume with as many ranks as the run had, and with its mics_shard_size"
            if not {"tensor_parallel", "pipeline"} & there.keys():  # no checkpoint has shards or stages
                advice += "; to change them, call save_checkpoint in the run and load_checkpoint here"
        raise StoreError(f"{folder} belongs to a run of another model, layout or setting: {difference}; {advice}")


def layout_difference(own: StoreSpec, stored: StoreSpec) -> str | None:
    """Returns the first difference between two specs in model, layout or mode; None if they are equal."""
    expected, there = (json.loads(json.dumps(_plain(spec.fingerprint))) for spec in (own, stored))
    return _difference(expected, there, "layout")


def _advice_of_modes(there: str, here: str, folder: Path) -> str:
    (dtype, optimizer, forms), (other_dtype, other_optimizer, other_forms) = _words(there), _words(here)
    if (dtype, optimizer) == (other_dtype, other_optimizer) and forms != other_forms:
        changed = [what for what in forms if forms[what] != other_forms[what]]
        options = [word for what in changed for word in (f"--{what}", other_forms[what])]
        keys = " and ".join(f'"{what}": "{forms[what]}"' for what in changed)
        had = " ".join(f"--{what} {forms[what]}" for what in changed)
        return (
            f'resume with {keys} in the block "offload" (offload train: {had}), as the run had; or convert '
            f"the run: `{shell_command('convert', folder.parent, *options)}`; or call "
            "save_checkpoint in the run and load_checkpoint in a new one"
        )
    if dtype == other_dtype:
        return "resume with the optimizer that the run had (change the config, or optimizer=)"
    both = " and with the optimizer" if optimizer != other_optimizer else ""
    converts = "" if both else "; or call save_checkpoint in the run and load_checkpoint in a new one, which converts"
    return f"resume in the dtype{both} that the run had (leave --dtype out, or change the config){converts}"


def _words(mode: str) -> tuple[str, str, dict[str, str]]:
    """Returns dtype, optimizer and forms in a mode's name, which leaves out Adam and forms in fp32."""
    dtype, *extras = mode.split(" ")
    forms = {"moments": "fp32", "master": "fp32"}
    optimizer = ""
    for word in extras:
        form, _, what = word.rpartition("-")
        if what in forms:
            forms[what] = form
        else:
            optimizer = word
    return dtype, optimizer, forms


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key.value if isinstance(key, State) else key: item for key, item in value.items()}
    return value


def _difference(expected: Any, actual: Any, where: str) -> str | None:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() ^ actual.keys()):
            return f"{where}/{key} exists in only one of the run and this configuration"
        for key in expected:
            if difference := _difference(expected[key], actual[key], f"{where}/{key}"):
                return difference
        return None
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, (one, actual_item) in enumerate(zip(expected, actual, strict=True)):
            named = one.get("name") if isinstance(one, dict) else None
            if difference := _difference(one, actual_item, f"{where}/{named or index}"):
                return difference
        return None
    return None if expected == actual else f"{where} is {_short(actual)} in the run and {_short(expected)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(value)} entries)"


# -- blob ----------------------------------------------------------------------------------------------
#
# A commit has one blob: a safetensors file with the engine's tensors and three tensors of the store.
#
# `Blob` reads the store's tensors as bytes, so inspection of a run does not import torch. Only `pack_blob`,
# `ChecksumTable.pack` and `Blob.contents` import torch.


SUMS, MANIFEST, WRITTEN = "store.sums", "store.manifest", "store.written"
"""Names of the tensors that the store adds to the engine's: checksums, manifest and write counts."""
_LENGTH_NBYTES = 8
"""Number of bytes at the start of a safetensors file that hold the length of its header."""


_PLACE = fields({"dtype": text(), "data_offsets": rows(whole(), 2, 2)})


class Blob:
    """The bytes of a blob, whose checksum the caller has verified.

    The constructor raises `ValueError` if the bytes are no blob, although their checksum is correct.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
        if self._start > len(data):
            raise ValueError(f"the header ends at byte {self._start} of {len(data)}")
        self._header = read(
            data[_LENGTH_NBYTES : self._start], fields({SUMS: _PLACE, MANIFEST: _PLACE}, {WRITTEN: _PLACE})
        )
        for name in (SUMS, MANIFEST, *((WRITTEN,) if WRITTEN in self._header else ())):
            start, end = self._header[name]["data_offsets"]
            if not start <= end <= len(data) - self._start:
                raise ValueError(f"{name} is at bytes {start} to {end} of {len(data) - self._start}")
        if len(self.sums) % ROW_NBYTES:
            raise ValueError(f"the table of checksums has {len(self.sums)} bytes, expected rows of {ROW_NBYTES}")

    @property
    def sums(self) -> bytes:
        """Returns the packed checksums; see `unpack`."""
        return self._bytes(SUMS)

    @property
    def manifest(self) -> bytes:
        """Returns the packed manifest; see `StoreManifest.unpack`."""
        return self._bytes(MANIFEST)

    @property
    def written(self) -> bytes | None:
        """Returns the packed write counts, see `requests.read_written`; None if the commit has none."""
        return self._bytes(WRITTEN) if WRITTEN in self._header else None

    def contents(self) -> dict[str, torch.Tensor]:
        """Returns the engine's tensors, without the store's own tensors."""
        try:
            tensors = tensors_in(self._data)
        except ValueError as error:
            raise StoreError(f"the blob of a commit is damaged: {error}; go back to a checkpoint") from error
        return {name: value for name, value in tensors.items() if name not in (SUMS, MANIFEST, WRITTEN)}

    def _bytes(self, name: str) -> bytes:
        start, end = self._header[name]["data_offsets"]
        return self._data[self._start + start : self._start + end]


def tensors_in(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the tensors in the bytes of a safetensors file; raises `ValueError` for other bytes."""
    import safetensors
    import safetensors.torch

    try:
        return dict(safetensors.torch.load(data))
    # safetensors checks sizes and offsets. The other errors mean a dtype that torch does not know, or a wrong shape.
    except (safetensors.SafetensorError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the bytes are no safetensors file: {type(error).__name__}: {error}") from error


def pack_blob(contents: Mapping[str, torch.Tensor], table: torch.Tensor, manifest: bytes, written: bytes) -> bytes:
    """Returns the bytes of a commit's blob."""
    import safetensors.torch
    import torch

    def as_bytes(data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    packed: bytes = safetensors.torch.save(
        {**contents, SUMS: table, MANIFEST: as_bytes(manifest), WRITTEN: as_bytes(written)}
    )
    return packed


# -- checksums -----------------------------------------------------------------------------------------
#
# A slot has a CRC-32C for each of its checksum ranges. One write request, or a few small ones, wrote each range.
#
# An update writes a partition tile by tile, so most ranges are tiles. A blob contains these checksums. A live run
# compares its reads with finer checksums (`PageSums`). An export reads all bytes in order, in chunks of another size.
# Two checksums of neighbouring bytes can be joined to one, so an export compares bytes whenever it reaches the border
# of a range.


STATES = tuple(state for state in State if state is not State.GRAD)
"""States with checksums. A row of a packed table stores the index of a state in this tuple."""


_ROW = struct.Struct("<5q")
ROW_NBYTES = _ROW.size
"""Bytes of one row of a packed table."""


class ChecksumRange(NamedTuple):
    """A range of bytes in a slot and its CRC-32C. `start` is relative to the start of the slot."""

    start: int
    nbytes: int
    crc: int


Slot = tuple[ChecksumRange, ...]
"""The checksum ranges of one state of one unit, in order and without gaps."""
Key = tuple[int, State]
"""A unit and a state."""


def joined(checksum_ranges: Iterable[ChecksumRange], least: int) -> list[ChecksumRange]:
    """Returns the ranges, joined to ranges of at least `least` bytes; the last one may be shorter.

    `checksum_ranges` are in order and have no gaps.
    """
    joined_ranges: list[ChecksumRange] = []
    for checksum_range in checksum_ranges:
        if joined_ranges and joined_ranges[-1].nbytes < least:
            one = joined_ranges.pop()
            checksum_range = ChecksumRange(
                one.start,
                one.nbytes + checksum_range.nbytes,
                crc32c_joined(one.crc, checksum_range.crc, checksum_range.nbytes),
            )
        joined_ranges.append(checksum_range)
    return joined_ranges


def sum_of(slot: Sequence[ChecksumRange], start: int, nbytes: int) -> int | None:
    """Returns the CRC-32C of some bytes of a slot; None unless both ends of the bytes are borders of ranges."""
    first, last = _border(slot, start), _border(slot, start + nbytes)
    if first is None or last is None:
        return None
    crc, at = 0, start
    for checksum_range in slot[first:last]:
        if checksum_range.start != at:
            return None
        crc, at = crc32c_joined(crc, checksum_range.crc, checksum_range.nbytes), at + checksum_range.nbytes
    return crc


def _border(slot: Sequence[ChecksumRange], at: int) -> int | None:
    """Returns the number of ranges before byte `at`; None if `at` is inside a range or after the last."""
    before = bisect.bisect_left(slot, at, key=lambda checksum_range: checksum_range.start)
    # The end of the last range is a border as well.
    ends = before == len(slot) and before and slot[-1].start + slot[-1].nbytes == at
    return before if ends or (before < len(slot) and slot[before].start == at) else None


def unpack(rows: bytes) -> dict[Key, Slot]:
    """Returns the table that `ChecksumTable.pack` packed.

    Raises `StoreError` if a row is invalid, or the ranges of a slot have gaps.
    """
    table: dict[Key, list[ChecksumRange]] = {}
    for unit, state, start, nbytes, crc in _ROW.iter_unpack(rows):
        key = (unit, STATES[state] if 0 <= state < len(STATES) else State.GRAD)
        slot = table.setdefault(key, [])
        end = slot[-1].start + slot[-1].nbytes if slot else 0
        if unit < 0 or key[1] is State.GRAD or start != end or nbytes <= 0 or not 0 <= crc < 1 << 32:
            raise StoreError(
                f"the checksums of a commit are damaged: {nbytes} bytes from byte {start} on of state {state} of unit "
                f"{unit}, expected the next ones of a slot from byte {end} on; go back to a checkpoint"
            )
        slot.append(ChecksumRange(start, nbytes, crc))
    return {key: tuple(slot) for key, slot in table.items()}


def check_whole(table: Mapping[Key, Slot], places: Sequence[Mapping[State, Sequence[Extents]]]) -> None:
    """Raises `StoreError` unless the checksums of each slot in `places` cover all its bytes.

    Checksums in `table` of slots that `places` lacks are ignored.
    """
    for unit, row in enumerate(places):
        for state, slots in row.items():
            slot, nbytes = table.get((unit, state), ()), slots[0].nbytes
            if sum(checksum_range.nbytes for checksum_range in slot) != nbytes:
                raise StoreError(
                    f"the checksums of a commit are damaged: those of {state.value} of unit {unit} do not cover its "
                    f"{nbytes} bytes; go back to a checkpoint"
                )


_MOST_PASSAGES = 64
"""Largest number of open passages of a slot. Each reading thread has one, and stopped readers leave theirs."""


class _Passage(NamedTuple):
    """Consecutive reads of a slot whose checksums have not been compared yet."""

    since: int
    """First byte of the passage. It is a border of a range."""
    end: int
    crc: int
    """Checksum of all bytes of the passage."""


class Passages:
    """Compares sequential reads with the checksums of ranges. Any thread may add a read.

    A read that ends inside a range stays open. It is compared together with the next read, which begins at its end. If
    too many reads are open, the oldest read is dropped, and its bytes are compared when somebody reads them again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, tuple[Slot, deque[_Passage]]] = {}
        """Open reads of each slot, oldest first.

        The reads of a slot are dropped when the slot gets another `Slot` value, because its bytes have been replaced.
        """

    def compare(self, key: Key, slot: Slot, start: int, nbytes: int, crc: int) -> tuple[bool, range]:
        """Compares one read. Returns True and the range of bytes that it has verified, or False and the damaged range.

        The bytes are compared together with the open reads before them. If a comparison is not possible yet, returns
        True and an empty range. The calls must come in the order of the bytes: a read that begins inside a range is
        never compared if no earlier call ended there. `slot` contains the checksum ranges at the time of the request.
        """
        with self._lock:
            # A read that begins and ends at borders is compared at once.
            expected = sum_of(slot, start, nbytes)
            if expected is not None:
                return crc == expected, range(start, start + nbytes)
            of, open_ = self._open.get(key, ((), deque[_Passage]()))
            # The comparison is by identity. An update replaces the tuple, and open reads of the old bytes must not be
            # joined with reads of the new bytes.
            if of is not slot:
                open_ = deque(maxlen=_MOST_PASSAGES)
                self._open[key] = slot, open_
            # A read that continues a passage replaces it. Two readers of the same bytes have two passages.
            passage = next((candidate for candidate in reversed(open_) if candidate.end == start), None)
            if passage is not None:
                open_.remove(passage)
            # A read that begins at a border, and ends inside a range, begins a passage.
            elif _border(slot, start) is not None:
                passage = _Passage(start, start, 0)
            else:
                return True, range(0)  # the read begins inside a range: no checksum begins there
            end, crc = start + nbytes, crc32c_joined(passage.crc, crc, nbytes)
            expected = sum_of(slot, passage.since, end - passage.since)
            if expected is not None:
                return crc == expected, range(passage.since, end)
            open_.append(_Passage(passage.since, end, crc))
            return True, range(0)


# -- page sums -----------------------------------------------------------------------------------------
#
# In memory, a slot has a checksum for each of its pages, so that every read of any bytes can be verified.
#
# The blob of a commit contains one checksum for each range that an update has written. These checksums cannot verify a
# read that begins or ends inside a range. In memory a slot therefore has a CRC-32C for each page of 4096 bytes. The
# native queue computes the checksums of a request's pages together with the checksum of the whole request, at no extra
# cost.
#
#     pages     A page that one write covers has one checksum. One comparison of memory verifies a read of such pages.
#     parts     A page that several writes share has one checksum for each write's part. A read that cuts a part splits
#               the part first.
#     ranges    Bytes that an earlier process wrote have only the checksums of ranges, until all bytes of a range are
#               read for the first time.


_SUM_NBYTES = 4
_BYTE_ORDER = sys.byteorder


class _PagePart(NamedTuple):
    """The CRC-32C of bytes [start, stop) of a slot. All these bytes are in one page."""

    start: int
    stop: int
    crc: int


class PageSums:
    """The checksums of all bytes of one slot. An update that replaces the slot creates a new object (`renewed`).

    Any thread may call any method.
    """

    def __init__(self, nbytes: int, ranges: Iterable[ChecksumRange] = ()) -> None:
        """Creates the checksums of a slot of zeros, except for the bytes in `ranges`.

        For each of `ranges`, only the checksum of the whole range is known, and no checksums of its pages.
        """
        self.nbytes = nbytes
        self._sums = bytearray(_packed(crc32c_of_zeros(PAGE)) * (nbytes // PAGE))
        if nbytes % PAGE:
            self._sums += _packed(crc32c_of_zeros(nbytes % PAGE))
        self._parts: dict[int, list[_PagePart]] = {}
        """The parts, in order, of each page that no single write has covered. The key is the number of the page."""
        self._ranges = list(ranges)
        self._lock = threading.Lock()

    def renewed(self, writes: Sequence[tuple[int, int, bytes]]) -> PageSums:
        """Returns the checksums after writes from byte 0 on. Bytes after the last write keep their checksums.

        `writes` contains start, number of bytes and page checksums of each write, in order and without gaps.
        """
        new = PageSums(0)
        new.nbytes, end = self.nbytes, sum(writes[-1][:2])
        with self._lock:
            new._sums = bytearray(self._sums)
            new._parts = {page: parts for page, parts in self._parts.items() if page * PAGE >= end}
            new._ranges = [checksum_range for checksum_range in self._ranges if checksum_range.start >= end]
        for start, nbytes, _ in writes:
            # Several writes may share a page. They replace all its bytes, so none of its old parts remain.
            for border in (start, start + nbytes):
                if border % PAGE:
                    new._parts[border // PAGE] = []
        for write in writes:
            new.record(*write)
        return new

    def record(self, start: int, nbytes: int, sums: bytes) -> None:
        """Records the checksums of bytes that were written, or verified.

        `sums` contains the checksum of the bytes in each page, as `Future.page_crcs` returns them.
        """
        stop, first = start + nbytes, start // PAGE
        whole = self._whole_pages(start, stop)
        with self._lock:
            self._sums[_at(whole.start) : _at(whole.stop)] = sums[_at(whole.start - first) : _at(whole.stop - first)]
            if self._parts:
                for page in [page for page in self._parts if page in whole]:
                    del self._parts[page]
            for begin, end in self._cut_pages(start, stop):
                page = begin // PAGE
                self._put(page, _PagePart(begin, end, _unpacked(sums, page - first)))

    def mark_proven(self, ranges: Iterable[ChecksumRange]) -> None:
        """Removes `ranges` from the result of `unproven`. The caller has recorded all their bytes."""
        proven = set(ranges)
        with self._lock:
            self._ranges = [checksum_range for checksum_range in self._ranges if checksum_range not in proven]

    def unproven(self, start: int, nbytes: int) -> list[ChecksumRange]:
        """Returns the ranges without known page checksums that overlap [start, start + nbytes)."""
        if not self._ranges:
            return []
        with self._lock:
            return [
                checksum_range
                for checksum_range in self._ranges
                if checksum_range.start < start + nbytes and start < checksum_range.start + checksum_range.nbytes
            ]

    def pages_to_read(self, start: int, nbytes: int) -> list[range]:
        """Returns byte ranges: the whole pages that the caller must read to verify [start, start + nbytes)."""
        with self._lock:
            cut = [ends for ends in self._cut_pages(start, start + nbytes) if self._joined(*ends) is None]
        return [self._page(page) for page in sorted({begin // PAGE for begin, _ in cut})]

    def first_damage(self, start: int, nbytes: int, sums: bytes, pages: Mapping[int, memoryview]) -> range | None:
        """Compares a read with the checksums. Returns the byte range of the first damaged page, or None.

        The read must not overlap unproven ranges. `pages` maps the numbers of the pages of `pages_to_read` to their
        bytes.
        """
        stop, first = start + nbytes, start // PAGE
        whole = self._whole_pages(start, stop)
        with self._lock:
            cut = self._cut_pages(start, stop)
            for begin, end in cut:
                if begin == start and not self._fits(begin, end, _unpacked(sums, begin // PAGE - first), pages):
                    # The damage may be in bytes of the page that were not requested, so the whole page is reported.
                    return self._page(begin // PAGE)
            right = self._sums[_at(whole.start) : _at(whole.stop)]
            received = sums[_at(whole.start - first) : _at(whole.stop - first)]
            if right != received:
                page = next(n for n in range(len(whole)) if right[_at(n) : _at(n + 1)] != received[_at(n) : _at(n + 1)])
                return self._page(whole[page])
            for begin, end in cut:
                if begin != start and not self._fits(begin, end, _unpacked(sums, begin // PAGE - first), pages):
                    return self._page(begin // PAGE)
        return None

    # -- pages and parts; the caller holds the lock if a method reads or changes parts --------------------------------

    def _page(self, page: int) -> range:
        return range(page * PAGE, min((page + 1) * PAGE, self.nbytes))

    def _whole_pages(self, start: int, stop: int) -> range:
        """Returns the numbers of the pages that [start, stop) covers entirely."""
        last = -(-stop // PAGE) if stop == self.nbytes else stop // PAGE
        return range(-(-start // PAGE), max(last, -(-start // PAGE)))

    def _cut_pages(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ends of [start, stop) that cover their pages only partly: none, one or two byte ranges."""
        whole = self._whole_pages(start, stop)
        if not whole and start < stop and start // PAGE == (stop - 1) // PAGE:
            return [(start, stop)]
        cut = [(start, whole.start * PAGE), (max(whole.stop * PAGE, start), stop)]
        return [(begin, end) for begin, end in cut if begin < end]

    def _parts_of(self, page: int) -> list[_PagePart]:
        parts = self._parts.get(page)
        if parts is not None:
            return parts
        of = self._page(page)
        return [_PagePart(of.start, of.stop, _unpacked(self._sums, page))]

    def _put(self, page: int, new: _PagePart) -> None:
        """Records the part `new`. If it cuts an old part, the rest has a checksum only if the old part is all zeros."""
        parts = [new]
        for old in self._parts_of(page):
            for begin, end in ((old.start, min(old.stop, new.start)), (max(old.start, new.stop), old.stop)):
                if begin < end and (begin, end) == (old.start, old.stop):
                    parts.append(old)
                elif begin < end and old.crc == crc32c_of_zeros(old.stop - old.start):
                    parts.append(_PagePart(begin, end, crc32c_of_zeros(end - begin)))
        self._parts[page] = sorted(parts)
        of = self._page(page)
        # `crc` is None if some bytes of the page have no checksum. A read of these bytes then fails.
        crc = self._joined(of.start, of.stop)
        self._sums[_at(page) : _at(page + 1)] = _packed(0 if crc is None else crc)

    def _joined(self, start: int, stop: int) -> int | None:
        """Returns the CRC-32C of [start, stop) in one page; None unless `start` and `stop` are borders of parts."""
        crc, at = 0, start
        for part in self._parts_of(start // PAGE):
            if part.start == at and part.stop <= stop:
                crc, at = crc32c_joined(crc, part.crc, part.stop - part.start), part.stop
        return crc if at == stop else None

    def _fits(self, start: int, stop: int, crc: int, pages: Mapping[int, memoryview]) -> bool:
        """Returns True if `crc` matches [start, stop) in one page. May split the page's parts at `start` and `stop`."""
        expected = self._joined(start, stop)
        page = start // PAGE
        if expected is None and page in pages:
            memory, split = pages[page], list[_PagePart]()
            for part in self._parts_of(page):
                cuts = {border for border in (start, stop) if part.start < border < part.stop}
                borders = sorted({part.start, part.stop, *cuts})
                if cuts:
                    if crc32c(memory[part.start % PAGE : part.start % PAGE + part.stop - part.start]) != part.crc:
                        return False
                    for begin, end in itertools.pairwise(borders):
                        some = memory[begin % PAGE : begin % PAGE + end - begin]
                        split.append(_PagePart(begin, end, crc32c(some)))
                else:
                    split.append(part)
            # The split does not change the checksum of the page.
            self._parts[page] = split
            expected = self._joined(start, stop)
        return expected == crc


def _at(page: int) -> int:
    return page * _SUM_NBYTES


def _packed(crc: int) -> bytes:
    return crc.to_bytes(_SUM_NBYTES, _BYTE_ORDER)


def _unpacked(sums: bytes | bytearray, page: int) -> int:
    return int.from_bytes(sums[_at(page) : _at(page + 1)], _BYTE_ORDER)


# -- checksum table ------------------------------------------------------------------------------------
#
# For each newest slot, a store has checksums of ranges, which it commits, and of pages, which verify every read.
#
# Threads: only the update thread replaces a slot's checksums, by one assignment. Any other thread takes the checksums
# when it submits a read. It compares the bytes with these checksums, even if the slot has been replaced since.


_MIN_CHECKSUM_NBYTES = MIB // 4
"""If a slot would have too many checksums, neighbours are joined until each covers at least this many bytes."""


class ChecksumTable:
    """The checksums of the newest slot of each unit and state."""

    def __init__(self) -> None:
        self._slots: dict[Key, Slot] = {}
        self._pages: dict[Key, PageSums] = {}

    def fill_zeros(self, places: Sequence[Mapping[State, Sequence[Extents]]]) -> None:
        """Sets the checksums of all slots in `places` to those of zeros."""
        for unit, row in enumerate(places):
            for state, slots in row.items():
                # Each extent gets a range, so frozen bytes have checksums of their own.
                sizes = [extent.nbytes for extent in slots[0].extents]
                starts = itertools.accumulate(sizes, initial=0)
                self._slots[unit, state] = tuple(
                    ChecksumRange(start, nbytes, crc32c_of_zeros(nbytes))
                    for start, nbytes in zip(starts, sizes, strict=False)
                )
                self._pages[unit, state] = PageSums(slots[0].nbytes)

    def load(self, rows: bytes, places: Sequence[Mapping[State, Sequence[Extents]]]) -> None:
        """Replaces the table by the packed table `rows` of a commit.

        Raises `StoreError` if `rows` is damaged or does not cover all bytes of each slot in `places`.
        """
        slots = unpack(rows)
        check_whole(slots, places)
        self._slots = slots
        self._pages = {key: PageSums(sum(slot[-1][:2]), slot) for key, slot in self._slots.items()}

    def pack(self) -> torch.Tensor:
        """Returns the table as a blob stores it, (ranges, 5) int64: unit, index in `STATES`, start, nbytes, crc."""
        import torch

        rows = [
            (unit, STATES.index(state), *checksum_range)
            for (unit, state), slot in self._slots.items()
            for checksum_range in slot
        ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5)

    def growth_nbytes(self, places: Sequence[Mapping[State, Sequence[Extents]]]) -> int:
        """Returns the number of bytes by which the packed table may still grow.

        In a new store each extent has one checksum. Later each tile of an update has one.
        """
        sizes = [slots[0].nbytes for row in places for slots in row.values()]
        most = sum(map(_max_checksums, sizes))
        return ROW_NBYTES * max(0, most - sum(map(len, self._slots.values())))

    def pages(self, key: Key) -> PageSums:
        """Returns the checksums of the newest slot's pages. An update replaces the object."""
        return self._pages[key]

    def ranges(self, key: Key) -> Slot:
        """Returns the checksums of the newest slot's ranges. An update replaces the object."""
        return self._slots[key]

    def sum_of(self, key: Key, nbytes: int) -> int | None:
        """Returns the CRC-32C of the first `nbytes` of the newest slot; None if no range ends at byte `nbytes`."""
        return sum_of(self._slots[key], 0, nbytes)

    def replace(self, key: Key, writes: Sequence[tuple[int, Future]], own_nbytes: int) -> None:
        """Records the checksums of the writes to a slot. Frozen weights after the last write keep their checksums.

        `writes` contains the start and the ended future of each write, in order, without gaps and from byte 0 on.
        Updates write only the bytes before `own_nbytes`. No checksum covers bytes on both sides of this border, since
        an update would replace only some of them.
        """
        self._pages[key] = self._pages[key].renewed([(at, future.wait(), future.page_crcs()) for at, future in writes])
        new = [ChecksumRange(start, future.wait(), future.crc32c()) for start, future in writes]
        if len(new) > _max_checksums(new[-1].start + new[-1].nbytes):  # tiny tiles: sub_group_size
            own = sum(checksum_range.start < own_nbytes for checksum_range in new)
            new = [
                checksum_range
                for part in (new[:own], new[own:])
                for checksum_range in joined(part, _MIN_CHECKSUM_NBYTES)
            ]
        end = new[-1].start + new[-1].nbytes
        frozen = [checksum_range for checksum_range in self._slots[key] if checksum_range.start >= end]
        self._slots[key] = (*new, *frozen)


def _max_checksums(nbytes: int) -> int:
    """Returns the largest number of checksums of a slot of `nbytes` bytes. Blobs reserve room for this number."""
    return 2 + nbytes // _MIN_CHECKSUM_NBYTES  # one more for the remainder, and one for frozen weights
