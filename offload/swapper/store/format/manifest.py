"""Layout of a store's extents, and the manifest that records the layout.

    states file, over all drives:  [ unit 0: weight A, weight B, frozen, exp_avg A, … ][ unit 1: … ] …

A slot of a weight is its trainable bytes, A or B, followed by its frozen bytes, which both slots share.

The layout is pure arithmetic. The manifest is JSON; each drive stores it, and each blob holds a copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import StoreError
from offload.notices import shell_command
from offload.records import anything, fields, flag, maybe, read, rows, table, text, whole
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store.format.commit_record import FORMAT_VERSION
from offload.swapper.store.rank_folder import read_whole


class Extent(NamedTuple):
    """A byte range of the states file; offset and length are multiples of 4096."""

    offset: int
    nbytes: int


class Extents(NamedTuple):
    """Location of a slot of a partition: at most two extents, in the order of the slot's bytes."""

    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the slot."""
        return sum(extent.nbytes for extent in self.extents)

    def extents_of(self, start: int, nbytes: int) -> list[Extent]:
        """Returns the byte ranges of the file that hold `nbytes` bytes of the slot, from byte `start` on."""
        found: list[Extent] = []
        for offset, length in self.extents:
            first, last = max(start, 0), min(start + nbytes, length)
            if first < last:
                found.append(Extent(offset + first, last - first))
            # From here on `start` is relative to the next extent.
            start -= length
        return found

    def offset(self, start: int) -> int:
        """Returns the offset in the file of byte `start` of the slot."""
        return self.extents_of(start, 1)[0].offset


def own_nbytes(slots: Sequence[Extents]) -> int:
    """Returns the bytes at the start of each slot of a state that no other slot shares."""
    return sum(extent.nbytes for extent in slots[0].extents if len(slots) == 1 or extent not in slots[1].extents)


class StoreSpec(NamedTuple):
    """Contents of a store, as planned. Two specs belong to one run if they are equal in all but `about`.

    Attributes:
        partitions: for each unit, the bytes of each state that is kept on disk, multiples of 4096.
        slots: 2, or 1 without durability.
        fingerprint: JSON that names model, layout, mode and world size.
        about: JSON that is only displayed.
        frozen: for each unit, the bytes at the end of its WEIGHT that no update writes, a multiple of 4096; empty for
            none.
    """

    partitions: tuple[Mapping[State, int], ...]
    slots: int
    fingerprint: Mapping[str, Any]
    about: Mapping[str, Any] = {}
    frozen: tuple[int, ...] = ()

    @property
    def shared(self) -> tuple[int, ...]:
        """Returns for each unit the bytes at the end of WEIGHT that are stored once and named by both slots.

        All are 0 in a store with one slot.
        """
        return self.frozen if self.frozen and self.slots == 2 else (0,) * len(self.partitions)

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the run: the shards of each of its replicas."""
        return int(self.fingerprint.get("world_size", 1)) * int(self.fingerprint.get("replicas", 1))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the states file."""
        return sum(map(self.nbytes_of, State))

    def nbytes_of(self, state: State) -> int:
        """Returns the bytes of all slots of one state, of all units."""
        rows = [row.get(state, 0) * self.slots for row in self.partitions]
        return sum(rows) - (sum(self.shared) if state is State.WEIGHT else 0)

    def places(self) -> list[dict[State, tuple[Extents, ...]]]:
        """Returns for each unit and state the extents of its slots.

        The slots of a state follow each other; the bytes that both share come after the last one.
        """
        end = 0
        table: list[dict[State, tuple[Extents, ...]]] = []
        for states, frozen in zip(self.partitions, self.shared, strict=True):
            row: dict[State, tuple[Extents, ...]] = {}
            for state, nbytes in states.items():
                shared = frozen if state is State.WEIGHT else 0
                own = nbytes - shared
                # The frozen bytes follow the last slot; every slot names them as its second extent.
                behind = Extent(end + self.slots * own, shared)
                slots = [(Extent(end + slot * own, own), behind) for slot in range(self.slots)]
                # Empty extents are left out: most states have no frozen bytes, and a frozen unit has no others.
                row[state] = tuple(Extents(tuple(each for each in slot if each.nbytes)) for slot in slots)
                end = behind.offset + behind.nbytes
            table.append(row)
        return table

    def title(self, unit: int) -> str:
        """Returns the name of a unit for messages."""
        units = self.fingerprint.get("units", ())
        return str(units[unit]["name"] or "the root") if unit < len(units) else f"unit {unit}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of `manifest.json`; see docs/reference/store-format.md."""

    id: str
    """Random id of this store, the same on each of its drives."""
    run: str
    rank: int
    created: str
    drives: tuple[str, ...]
    """Folders of the drives when the store was created."""
    weights: tuple[int, ...]
    """For each drive, the number of its stripes in each row."""
    stripe_bytes: int
    spec: StoreSpec
    # Not compared: an older version of offload leaves the id out of its commits, beside files that have it.
    run_id: str | None = field(default=None, compare=False)
    """Random id of the run, the same in the stores of all its ranks; None if unknown, as in runs of older versions."""

    def pack(self, drive: int = 0) -> bytes:
        """Returns the bytes of the manifest on one drive."""
        content = {
            "format": FORMAT_VERSION,
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
        }
        # A line for each key. With `indent` the encoder is Python code, which is slow where parameters are thousands.
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        return ("{\n" + ",\n".join(lines) + "\n}").encode()

    @cached_property
    def packed(self) -> bytes:
        """The bytes of the manifest on the first drive, of which each blob contains a copy."""
        return self.pack()

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Manifest:
        """Returns the manifest in `data`.

        Raises:
            StoreError: with `where`, the location of the data, and the reason.
        """
        try:
            content = read(data, fields({}))
        except ValueError as error:
            raise StoreError(f"cannot read {where}: {error}") from error
        if content.get("format") != FORMAT_VERSION:
            raise StoreError(
                f"{where} has store format {content.get('format')}; this version of offload reads format "
                f"{FORMAT_VERSION}: resume with the version that made the run "
                f"({_made_by(content)}), or choose another run name"
            )
        try:
            _MANIFEST(content, "")
            if len(content["stripes"]["weights"]) != len(content["drives"]):
                raise ValueError(f"expected a weight for each of {len(content['drives'])} drives")
            # The file stores extents and no sizes: the size of a partition is the sum over its first slot.
            partitions = tuple(
                {State(name): sum(nbytes for _, nbytes in slots[0]) for name, slots in row.items()}
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
                run_id=content.get("run_id"),
            )
            # The layout is recomputed from the sizes. Extents that differ were written in another format, or are
            # damaged.
            if _plain_places(spec) != content["extents"]:
                raise ValueError("its extents are not where its format requires them")
            return found
        except ValueError as error:
            raise StoreError(f"cannot read {where}: {error}") from error


def _made_by(content: Mapping[str, Any]) -> str:
    """Returns the version of offload that wrote a manifest of any format, or "unknown"."""
    about = content.get("about")
    return str(about.get("offload", "unknown")) if isinstance(about, dict) else "unknown"


# Records of whatever origin: these are the kinds and ranges that the code elsewhere takes for granted.
MOST_RANKS = 1 << 16
_DIMENSION = whole(0, 1 << 48)
_FIELDS = rows(rows(anything, 3, 3))
"""Fields of a state as [name, kind, shape]; `described_layouts` reads them further."""
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
    },
)
_UNIT = fields(
    {"name": text(), "numel": whole(), "trainable": whole(), "parameters": rows(_PARAMETER)},
    {"matrices": maybe(whole())},
)
_UNIT_IN_WORDS = fields({"name": text(), "parameters": rows(_PARAMETER)})
"""A unit of a checkpoint with parts, which its own manifest describes for people alone."""


def check_layout(value: Any, name: str) -> None:
    """Raises `ValueError` if `value` is no description of a model, made by `offload.layout.fingerprint.describe`."""
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
    },
)
"""Description of a model for people and exports, made by `offload.layout.fingerprint.about`."""
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
        # The sum of a state's bytes, and of all of them, stays a number that files can have.
        "extents": rows(table(rows(rows(rows(whole(0, 1 << 56), 2, 2), 0, 2), 1, 2)), 0, 1 << 16),
    },
    {"run_id": text("[^\0]*", "the id of a run"), "drive": whole(0, 1023)},
)


def _plain_places(spec: StoreSpec) -> list[dict[str, list[list[list[int]]]]]:
    """Returns the extents as JSON stores them: for each unit, state to slots, each a list of extents."""
    return [
        {state.value: [[list(extent) for extent in place.extents] for place in slots] for state, slots in row.items()}
        for row in spec.places()
    ]


def _in_all(slots: Sequence[Sequence[Sequence[int]]]) -> int:
    """Returns the bytes of the extents that both slots of a manifest name."""
    # With one slot nothing is shared, and the manifest does not tell which bytes are frozen.
    return sum(extent[1] for extent in slots[0] if extent in slots[1]) if len(slots) == 2 else 0


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest in a file; raises `StoreError` if there is none that can be read."""
    try:
        data = read_whole(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return Manifest.unpack(data, str(path))


def check_rank(found: Manifest, rank: int, folder: Path) -> None:
    """Raises `StoreError` if the files in the folder of `rank` are those of another rank."""
    if found.rank != rank:
        raise StoreError(
            f"{folder} has the swap files of rank {found.rank}, expected those of rank {rank}: folders of ranks have "
            "been renamed or copied over each other; put the files of each rank back into the folder of its number"
        )


def compare(mine: StoreSpec, found: StoreSpec, folder: Path) -> None:
    """Raises `StoreError` with the first difference between two specs, and advice.

    Args:
        mine: the spec of this run.
        found: the spec of the store in `folder`.
        folder: the rank's folder, for the message.
    """
    for name in ("fingerprint", "slots", "partitions", "shared"):
        # The found spec was read from JSON, so both are converted to JSON and back before they are compared.
        expected, there = (json.loads(json.dumps(_plain(getattr(spec, name)))) for spec in (mine, found))
        difference = _difference(expected, there, "layout" if name == "fingerprint" else name)
        if difference is None:
            continue
        advice = f"choose another run name, or remove the run with `{shell_command('rm', folder.parent)}`"
        # Differences that a setting of the user explains get advice of their own.
        if name == "slots":
            advice = 'resume with the durability that the run had, or leave "durability" out'
            there, here = ("none" if spec.slots == 1 else "step, or every N" for spec in (found, mine))
            difference = f'"durability" was {there} in the run and is {here} here'
        if difference.startswith("layout/frozen "):
            advice = f'resume with the "frozen" that the run had (or the option --load-in-4bit or -8bit), or {advice}'
            difference = " and ".join(
                f'"frozen" {verb} {spec.get("frozen", "not set")} {place}'
                for spec, verb, place in ((there, "was", "in the run"), (expected, "is", "here"))
            )
        if difference.startswith("layout/mode is "):
            advice = f"{_advice_of_modes(str(there['mode']), str(expected['mode']), folder)}, or {advice}"
        if "world_size" in difference or "replicas" in difference:
            advice = "resume with as many ranks as the run had, and with its mics_shard_size"
            if not {"tensor_parallel", "pipeline"} & there.keys():  # no checkpoint has shards or stages
                advice += "; to change them, call save_checkpoint in the run and load_checkpoint here"
        raise StoreError(f"{folder} belongs to a run of another model, layout or setting: {difference}; {advice}")


def layout_difference(mine: StoreSpec, found: StoreSpec) -> str | None:
    """Returns the first difference between the model, the layout and the mode of two specs; None if there is none."""
    expected, there = (json.loads(json.dumps(_plain(spec.fingerprint))) for spec in (mine, found))
    return _difference(expected, there, "layout")


def _advice_of_modes(there: str, here: str, folder: Path) -> str:
    """Returns advice for a resume in another mode; see `Mode.name`."""
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
    """Returns dtype and optimizer of a mode's name, and the forms of master and moments; Adam and fp32 have no word."""
    dtype, *others = mode.split(" ")
    forms = {"moments": "fp32", "master": "fp32"}
    optimizer = ""
    for word in others:
        form, _, what = word.rpartition("-")
        if what in forms:
            forms[what] = form
        else:
            optimizer = word
    return dtype, optimizer, forms


def _plain(value: Any) -> Any:
    """Returns a value with tuples as lists and states as strings, as JSON has them."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key.value if isinstance(key, State) else key: each for key, each in value.items()}
    return value


def _difference(expected: Any, found: Any, where: str) -> str | None:
    """Returns the first difference between two values of JSON at the path `where`; None if they are equal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() ^ found.keys()):
            return f"{where}/{key} exists in only one of the run and this configuration"
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
    return None if expected == found else f"{where} is {_short(found)} in the run and {_short(expected)} here"


def _short(value: Any) -> str:
    """Returns a value as JSON, shortened to fit a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(value)} entries)"
