"""The files of a checkpoint, what they are named, and which folder is one.

    <dir>/latest                             the tag of the newest
    <dir>/<tag>/manifest.json                what it holds: layout, mode, files, a CRC-32C of each tensor
    <dir>/<tag>/states.rank<r>.safetensors   the partitions that rank r held, one flat tensor of each unit and state
    <dir>/<tag>/progress.rank<r>.safetensors all else of the moment: counters, generators, schedule, buffers

A folder is a checkpoint by what its manifest says of itself, never by the names in it alone: others have files named
`manifest.json` too, the swap files of a run among them. How a folder comes and goes is `checkpoint_folder`.

Needs no torch to look at one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio import crc32c
from offload.errors import StoreError, UsageError
from offload.states import State
from offload.swapper.store.inspection import is_rank

if TYPE_CHECKING:
    from offload.fileio.safetensors_stream import Tensor
    from offload.layout.flat_layout import UnitLayout
    from offload.swapper.modes import Mode

FORMAT = 1
MANIFEST, LATEST = "manifest.json", "latest"
_KIND = "offload checkpoint"
_KIND_IN = re.compile(rb'"kind":\s*"offload checkpoint"')
"""In a manifest of ours that is not JSON any more."""
_ASIDE = ("partial", "old", "removed")
_LONGEST = 255 - max(len(f"..{what}") for what in _ASIDE)
"""Bytes of a tag: with a dot before it and such a word behind it, it must be a name for every file system."""


class Saved(NamedTuple):
    """One file: its bytes, and the CRC-32C of each tensor in it, or under "" of the whole file."""

    nbytes: int
    sums: Mapping[str, int]


class Manifest(NamedTuple):
    """What `manifest.json` says."""

    epoch: int
    """The step after which it was saved."""
    created: str
    frozen: bool
    """Whether frozen weights are in it."""
    layout: Mapping[str, Any]
    """See `description.describe`."""
    about: Mapping[str, Any]
    files: Mapping[str, Saved]

    @property
    def world_size(self) -> int:
        return int(self.layout["world_size"])

    def pack(self) -> bytes:
        """The file."""
        files = {name: {"nbytes": each.nbytes, "crc32c": dict(each.sums)} for name, each in self.files.items()}
        content = {"kind": _KIND, "format": FORMAT, **self._asdict(), "files": files}
        return json.dumps({**content, "crc32c": _sum_of(content)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Manifest:
        """Raises `StoreError` that names `where` it lies and what is wrong with it."""
        try:
            content = json.loads(data)
            if not isinstance(content, dict) or content.get("kind") != _KIND:
                raise ValueError(f"it is not the manifest of an {_KIND}")
            if content["format"] != FORMAT:
                raise ValueError(
                    f"it is of format {content['format']}, this version of offload reads format {FORMAT}; load it with "
                    f"the version that saved it ({content.get('about', {}).get('offload', 'unknown')})"
                )
            if content.pop("crc32c") != _sum_of(content):
                raise ValueError("its checksum is not the one written: the file is damaged")
            files = {name: Saved(each["nbytes"], each["crc32c"]) for name, each in content["files"].items()}
            return cls(**{key: content[key] for key in cls._fields if key != "files"}, files=files)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreError(f"cannot read {where}: {error}") from error


def _sum_of(content: Mapping[str, Any]) -> int:
    """CRC-32C of JSON, however it is written down."""
    return crc32c(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def states_file(rank: int) -> str:
    return f"states.rank{rank}.safetensors"


def progress_file(rank: int) -> str:
    return f"progress.rank{rank}.safetensors"


def tensor_name(unit: int, state: State) -> str:
    return f"{unit}.{state.value}"


def tensors_of(layouts: Sequence[UnitLayout], mode: Mode, world_size: int, frozen: bool) -> dict[str, Tensor]:
    """What every rank's file of states holds, in this order; without frozen weights only where `frozen` is false."""
    from offload.fileio.safetensors_stream import Tensor

    found: dict[str, Tensor] = {}
    for unit, layout in enumerate(layouts):
        trainable = layout.trainable_stop // world_size
        for state, dtype in mode.states.items():
            numel = layout.numel // world_size if state is State.WEIGHT and frozen else trainable
            if state is State.PACKED:
                numel = layout.packed_numel
            if numel:
                found[tensor_name(unit, state)] = Tensor(dtype, (numel,))
    return found


# -- finding ------------------------------------------------------------------------------------------


def check_tag(tag: Any) -> str:
    """The name of a checkpoint's folder; raises `UsageError` where it cannot be one."""
    name = str(tag)
    if not name or name.startswith(".") or "/" in name or name == LATEST:
        raise UsageError(
            f"the tag {name!r} cannot name a folder of its own: give a name without a slash that does not begin with a "
            f"dot and is not {LATEST!r}, such as global_step100"
        )
    if name != name.strip() or any(unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") for each in name):
        raise UsageError(
            f"the tag {name!r} cannot name a folder of its own: it begins or ends with white space, or has control "
            f"characters or half of a character in it; give a name such as global_step100"
        )
    if (nbytes := len(name.encode())) > _LONGEST:
        raise UsageError(
            f"the tag {name!r} cannot name a folder of its own: it has {nbytes} bytes, of {_LONGEST} that a file "
            f"system takes beside what a save adds; give a shorter name"
        )
    return name


def check_folder(folder: Any, name: str) -> Path:
    """What was given as `name`, a folder of checkpoints; raises `UsageError` where it is no path."""
    path = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(path, str):
        raise UsageError(f"{name} must be a path, a str or a pathlib.Path, got {type(folder).__name__}: {folder!r}")
    if not path:
        raise UsageError(f'{name} is an empty string; give a folder, "." for the one that this process is in')
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path)
    except UnicodeError:
        pass
    raise UsageError(f"{name} is {path!r}, which no file system can hold: it has a zero or half of a character in it")


def aside(checkpoint: Path, what: str) -> Path:
    """Its folder by the name that it has while it is "partial", "old" or "removed"."""
    assert what in _ASIDE
    return checkpoint.with_name(f".{checkpoint.name}.{what}")


def is_checkpoint(folder: Path) -> bool:
    """Whether the manifest in `folder` says that it is one of ours: whole or damaged, of this format or another."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return False
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return _KIND_IN.search(data) is not None
    return isinstance(content, dict) and content.get("kind") == _KIND


def may_be_checkpoint(folder: Path) -> bool:
    """The same, also where the manifest is lost, or damaged beyond that: then what is wrong must be told."""
    return is_checkpoint(folder) or (folder / states_file(0)).is_file()


def refuse_rank(folder: Path) -> None:
    """Raise `StoreError` where `folder` holds the swap files of one rank, under whatever name."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = {} if is_rank(folder) else json.loads((folder / MANIFEST).read_bytes())
        if is_rank(folder) or (isinstance(content, dict) and {"extents", "stripes"} <= content.keys()):
            raise StoreError(
                f"{folder} holds the swap files of one rank of a run, not a checkpoint: give the run's folder, "
                f'{folder.resolve().parent}, to offload inspect, verify and export; to train on, say "resume": "auto"'
            )


def checkpoints(folder: Path) -> dict[str, Manifest]:
    """Every checkpoint of ours in `folder` that can be read, by its tag; the one that was saved first comes first."""
    found: dict[str, Manifest] = {}
    for each in folder.iterdir() if folder.is_dir() else ():
        if not each.name.startswith("."):
            with contextlib.suppress(StoreError):
                found[each.name] = read_manifest(each)
    return dict(sorted(found.items(), key=lambda item: (item[1].created, item[1].epoch)))


def find(load_dir: str | os.PathLike[str], tag: Any) -> str | None:
    """The folder of the checkpoint `tag`, or of the latest, or `load_dir` itself where it is one; None without any.

    Raises `StoreError` where it is named and not there, and where `load_dir` holds the swap files of a rank.
    """
    folder, named = Path(load_dir), "asked for"
    if tag is None:
        try:
            tag, named = _read_latest(folder), f"named by {folder / LATEST}"
        except FileNotFoundError:
            if may_be_checkpoint(folder):
                return str(folder)
            refuse_rank(folder)
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {folder / LATEST}: {error}") from error
    path = folder / check_tag(tag)
    if not path.exists() and is_checkpoint(aside(path, "old")):
        return str(aside(path, "old"))
    if not path.is_dir():
        there = ", ".join(checkpoints(folder)) or "none"
        raise StoreError(f"there is no checkpoint {tag} in {folder}, as {named}; those that are there: {there}")
    return str(path)


def _read_latest(folder: Path) -> str:
    text = (folder / LATEST).read_text(encoding="utf-8").strip()
    try:
        return check_tag(text)
    except UsageError:
        there = ", ".join(checkpoints(folder)) or "none"
        raise StoreError(
            f"{folder / LATEST} should hold the tag of a checkpoint, it holds {text[:100]!r}; give a tag of those that "
            f"are there: {there}"
        ) from None


def read_manifest(checkpoint: Path) -> Manifest:
    """What the folder of a checkpoint says it holds; raises `StoreError`."""
    path = checkpoint / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{checkpoint} is not a checkpoint of offload: cannot read {path.name}: {error}") from error
    return Manifest.unpack(data, str(path))


def wrong_files(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """What is missing or of another size, by name; checksums are not looked at."""
    found: dict[str, str] = {}
    for name, saved in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}"
        else:
            if size != saved.nbytes:
                found[name] = f"has {size} bytes, not {saved.nbytes}"
    return found
