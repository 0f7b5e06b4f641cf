"""What a store holds and where: the layout of its extents, and the manifest that says so.

    states file, over all drives:  [ unit 0: weight A, weight B, frozen, exp_avg A, … ][ unit 1: … ] …

A slot of a weight is what trains of it, A or B, and behind that what is frozen, which both slots share.

Pure. The manifest is JSON; it lies on every drive, and a copy in each blob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import StoreError
from offload.states import State
from offload.swapper.store.format.commit_record import FORMAT_VERSION
from offload.swapper.store.rank_folder import read_whole


class Extent(NamedTuple):
    """Bytes of the states file: both are multiples of 4096."""

    offset: int
    nbytes: int


class Place(NamedTuple):
    """Where a slot of a partition lies: its extents, one behind the other, two at most."""

    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def stretches(self, start: int, nbytes: int) -> list[Extent]:
        """Where `nbytes` bytes of the slot lie in the file, from its byte `start` on; of any size."""
        found: list[Extent] = []
        for offset, length in self.extents:
            first, last = max(start, 0), min(start + nbytes, length)
            if first < last:
                found.append(Extent(offset + first, last - first))
            start -= length
        return found

    def offset(self, start: int) -> int:
        """Where byte `start` of the slot lies in the file."""
        return self.stretches(start, 1)[0].offset


class StoreSpec(NamedTuple):
    """What a store must hold; two specs are of the same run when all but `about` are equal.

    `partitions[unit]` gives the bytes of each state of that unit that is kept on disk, each a multiple of 4096;
    `fingerprint` is JSON that names model, layout, mode and world size; `about` is JSON that is only told.
    `frozen[unit]` are the bytes at the end of its WEIGHT that no update writes, a multiple of 4096; empty is none.
    """

    partitions: tuple[Mapping[State, int], ...]
    slots: int
    fingerprint: Mapping[str, Any]
    about: Mapping[str, Any] = {}
    frozen: tuple[int, ...] = ()

    @property
    def shared(self) -> tuple[int, ...]:
        """Bytes at the end of each unit's WEIGHT that lie once and both slots name; none where there is one slot."""
        return self.frozen if self.frozen and self.slots == 2 else (0,) * len(self.partitions)

    @property
    def nbytes(self) -> int:
        """Bytes of the states file."""
        return sum(map(self.nbytes_of, State))

    def nbytes_of(self, state: State) -> int:
        """Bytes that the slots of one state take, of all units."""
        rows = [row.get(state, 0) * self.slots for row in self.partitions]
        return sum(rows) - (sum(self.shared) if state is State.WEIGHT else 0)

    def places(self) -> list[dict[State, tuple[Place, ...]]]:
        """For each unit and state its slots, one behind the other; what they share lies behind the last."""
        end = 0
        table: list[dict[State, tuple[Place, ...]]] = []
        for states, frozen in zip(self.partitions, self.shared, strict=True):
            row: dict[State, tuple[Place, ...]] = {}
            for state, nbytes in states.items():
                shared = frozen if state is State.WEIGHT else 0
                own = nbytes - shared
                behind = Extent(end + self.slots * own, shared)
                slots = [(Extent(end + slot * own, own), behind) for slot in range(self.slots)]
                row[state] = tuple(Place(tuple(each for each in slot if each.nbytes)) for slot in slots)
                end = behind.offset + behind.nbytes
            table.append(row)
        return table

    def title(self, unit: int) -> str:
        """The unit in words."""
        units = self.fingerprint.get("units", ())
        return str(units[unit]["name"] or "the root") if unit < len(units) else f"unit {unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
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
            "extents": _plain_places(self.spec),
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
                {State(name): sum(int(nbytes) for _, nbytes in slots[0]) for name, slots in row.items()}
                for row in content["extents"]
            )
            frozen = tuple(_in_all(row.get(State.WEIGHT.value, ())) for row in content["extents"])
            spec = StoreSpec(partitions, content["slots"], content["layout"], content["about"], frozen)
            stripes = content["stripes"]
            found = cls(
                id=content["id"],
                run=content["run"],
                rank=content["rank"],
                created=content["created"],
                drives=tuple(content["drives"]),
                weights=tuple(stripes["weights"]),
                stripe_bytes=stripes["bytes"],
                spec=spec,
            )
            if _plain_places(spec) != content["extents"]:
                raise ValueError("its extents do not lie as its format says")
            return found
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StoreError(f"cannot read {where}: {type(error).__name__}: {error}") from error


def _plain_places(spec: StoreSpec) -> list[dict[str, list[list[list[int]]]]]:
    """As the manifest has them: state to slots, each a list of extents."""
    return [
        {state.value: [[list(extent) for extent in place.extents] for place in slots] for state, slots in row.items()}
        for row in spec.places()
    ]


def _in_all(slots: Sequence[Sequence[Sequence[int]]]) -> int:
    """Bytes of the extents that both slots of a manifest name."""
    return sum(int(extent[1]) for extent in slots[0] if extent in slots[1]) if len(slots) == 2 else 0


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; raises `StoreError` where there is none that can be read."""
    try:
        data = read_whole(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return Manifest.unpack(data, str(path))


def compare(mine: StoreSpec, found: StoreSpec, folder: Path) -> None:
    """Raise `StoreError` that names the first difference between what is expected and what lies in `folder`."""
    for name in ("fingerprint", "slots", "partitions", "shared"):
        expected, there = (json.loads(json.dumps(_plain(getattr(spec, name)))) for spec in (mine, found))
        difference = _difference(expected, there, "layout" if name == "fingerprint" else name)
        if difference is None:
            continue
        advice = f"choose another run name, or remove it with `offload rm {folder.parent}`"
        if name == "slots":
            advice = "go on with the durability that it had, or leave it out"
            there, here = ("none" if spec.slots == 1 else "step, or every N" for spec in (found, mine))
            difference = f'"durability" was {there} there and is {here} here'
        if difference.startswith("layout/mode is "):
            advice = f"{_advice_of_modes(str(there['mode']), str(expected['mode']))}, or {advice}"
        if "world_size" in difference:
            advice = (
                "go on with as many ranks as it had; with another number of ranks, save_checkpoint there and "
                "load_checkpoint here"
            )
        raise StoreError(f"{folder} is of another model, layout or setting: {difference}; {advice}")


def _advice_of_modes(there: str, here: str) -> str:
    """What to go on with: modes are named by a dtype, and by an optimizer behind it where that is not Adam."""
    (dtype, _, optimizer), (other_dtype, _, other_optimizer) = there.partition(" "), here.partition(" ")
    if dtype == other_dtype:
        return "go on with the optimizer that it had (change the config, or optimizer=)"
    both = " and with the optimizer" if optimizer != other_optimizer else ""
    return f"go on in the dtype{both} that it had (leave --dtype out, or change the config)"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key.value if isinstance(key, State) else key: each for key, each in value.items()}
    return value


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
