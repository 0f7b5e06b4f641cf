"""What a store holds and where: the layout of its extents, and the manifest that says so.

    states file, over all drives:  [ unit 0: weight A, weight B, exp_avg A, … ][ unit 1: … ] …

Pure. The manifest is JSON; it lies on every drive, and a copy in each blob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import StoreError
from offload.swapper.states import State
from offload.swapper.store.folder import read_whole
from offload.swapper.store.record import FORMAT_VERSION


class Extent(NamedTuple):
    """Bytes of one slot of one partition in the states file: both are multiples of 4096."""

    offset: int
    nbytes: int


class StoreSpec(NamedTuple):
    """What a store must hold; two specs are of the same run when partitions, slots and `fingerprint` are equal.

    `partitions[unit]` gives the bytes of each state of that unit that is kept on disk, each a multiple of 4096;
    `fingerprint` is JSON that names model, layout, mode and world size; `about` is JSON that is only told.
    """

    partitions: tuple[Mapping[State, int], ...]
    slots: int
    fingerprint: Mapping[str, Any]
    about: Mapping[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the states file."""
        return max(
            (extent.offset + extent.nbytes for row in self.extents() for s in row.values() for extent in s), default=0
        )

    def extents(self) -> list[dict[State, tuple[Extent, ...]]]:
        """For each unit and state its slots, one behind the other.

        A unit of which only WEIGHT is kept is never updated out of place, so its slots are one extent.
        """
        end = 0
        table: list[dict[State, tuple[Extent, ...]]] = []
        for states in self.partitions:
            row: dict[State, tuple[Extent, ...]] = {}
            frozen = set(states) == {State.WEIGHT}
            for state, nbytes in states.items():
                slots: list[Extent] = []
                for _ in range(1 if frozen else self.slots):
                    slots.append(Extent(end, nbytes))
                    end += nbytes
                row[state] = tuple(slots * self.slots if frozen else slots)
            table.append(row)
        return table

    def title(self, unit: int) -> str:
        """The unit in words."""
        units = self.fingerprint.get("units", ())
        return str(units[unit]["name"] or "the root") if unit < len(units) else f"unit {unit}"


class Manifest(NamedTuple):
    """What `manifest.json` says; see docs/store-format.md."""

    id: str
    """Of this store, the same on each of its drives, and of no other."""
    run: str
    rank: int
    created: str
    drives: tuple[str, ...]
    """The folders that the drives were when the store was made."""
    weights: tuple[int, ...]
    """How many stripes of a row lie on each drive."""
    stripe_bytes: int
    spec: StoreSpec

    def pack(self, drive: int = 0) -> bytes:
        """The file on one drive."""
        content = {
            "format": FORMAT_VERSION,
            "id": self.id,
            "run": self.run,
            "rank": self.rank,
            "created": self.created,
            "drives": self.drives,
            "drive": drive,
            "stripes": {"bytes": self.stripe_bytes, "weights": self.weights},
            "slots": self.spec.slots,
            "layout": self.spec.fingerprint,
            "about": self.spec.about,
            "extents": [
                {state.value: [list(extent) for extent in slots] for state, slots in row.items()}
                for row in self.spec.extents()
            ],
        }
        return json.dumps(content, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest; raises `StoreError` that names `where` it lies and what is wrong with it."""
        try:
            content = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError("expected a JSON object")
        except ValueError as error:
            raise StoreError(f"cannot read {where}: {error}") from error
        if content.get("format") != FORMAT_VERSION:
            raise StoreError(
                f"{where} is of format {content.get('format')}, this version of offload reads format {FORMAT_VERSION}: "
                f"go on with the version that made it ({content.get('about', {}).get('offload', 'unknown')}), or "
                f"choose another run name"
            )
        try:
            partitions = tuple(
                {State(name): int(slots[0][1]) for name, slots in row.items()} for row in content["extents"]
            )
            spec = StoreSpec(partitions, content["slots"], content["layout"], content["about"])
            stripes = content["stripes"]
            found = cls(
                content["id"],
                content["run"],
                content["rank"],
                content["created"],
                tuple(content["drives"]),
                tuple(stripes["weights"]),
                stripes["bytes"],
                spec,
            )
            if [{s.value: [list(e) for e in x] for s, x in row.items()} for row in spec.extents()] != content[
                "extents"
            ]:
                raise ValueError("its extents do not lie as its format says")
            return found
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StoreError(f"cannot read {where}: {type(error).__name__}: {error}") from error


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; raises `StoreError` where there is none that can be read."""
    try:
        data = read_whole(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return Manifest.unpack(data, str(path))


def compare(mine: StoreSpec, found: StoreSpec, folder: Path) -> None:
    """Raise `StoreError` that names the first difference between what is expected and what lies in `folder`."""
    for name in ("fingerprint", "slots", "partitions"):
        expected, there = (json.loads(json.dumps(_plain(getattr(spec, name)))) for spec in (mine, found))
        difference = _difference(expected, there, "layout" if name == "fingerprint" else name)
        if difference is None:
            continue
        advice = f"choose another run name, or remove it with `offload rm {folder.parent}`"
        if name == "slots":
            advice = "go on with the durability that it had, or leave it out"
            there, here = ("none" if spec.slots == 1 else "step, or every N" for spec in (found, mine))
            difference = f'"durability" was {there} there and is {here} here'
        if "world_size" in difference:
            advice = (
                "go on with as many ranks as it had; with another number of ranks, save_checkpoint there and "
                "load_checkpoint here"
            )
        raise StoreError(f"{folder} is of another model, layout or setting: {difference}; {advice}")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [{state.value: nbytes for state, nbytes in row.items()} for row in value]
    return dict(value) if isinstance(value, Mapping) else value


def _difference(expected: Any, found: Any, where: str) -> str | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() ^ found.keys()):
            return f"{where}/{key} is in only one of the two"
        for key in expected:
            if difference := _difference(expected[key], found[key], f"{where}/{key}"):
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            named = one.get("name") if isinstance(one, dict) else None
            if difference := _difference(one, other, f"{where}/{named or index}"):
                return difference
        return None
    return None if expected == found else f"{where} is {_short(found)} there and {_short(expected)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(value)} entries)"
