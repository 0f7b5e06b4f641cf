"""Names and contents of a checkpoint's files, and the search for checkpoints in a folder.

    <dir>/latest                             tag of the newest checkpoint
    <dir>/<tag>/manifest.json                layout, mode, files, and a CRC-32C of each tensor
    <dir>/<tag>/states.rank<r>.safetensors   partitions of rank r, one flat tensor for each unit and state
    <dir>/<tag>/progress.rank<r>.safetensors everything else of rank r: counters, generators, schedule, buffers

The content of its manifest makes a folder a checkpoint, never names alone: other programs write a file named
`manifest.json` too, and so does the store of a run. `offload.checkpoint.directory` creates and deletes these folders.
Looking at a checkpoint does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio import crc32c
from offload.errors import StoreError, UsageError
from offload.fileio.inner_files import check_holes, open_inner, owner_name, read_inner, real_path
from offload.records import anything, fields, flag, parse, read, rows, table, text, whole
from offload.records import expected as wrong_kind
from offload.sizes import KIB, MIB
from offload.states import State
from offload.swapper.store.format import ABOUT, check_layout
from offload.swapper.store.inspection import is_rank

if TYPE_CHECKING:
    from offload.fileio.safetensors_stream import Tensor
    from offload.layout.flat_layout import UnitLayout
    from offload.layout.modes import Mode


FORMAT = 1
FORMAT_OF_PARTS = 2
"""Format of a manifest whose checkpoint has parts; earlier versions do not know them."""
MANIFEST, LATEST = "manifest.json", "latest"
LATEST_UNIVERSAL = "latest_universal"
"""DeepSpeed's name of `latest` for universal checkpoints."""
PART = re.compile(r"pp[0-9]{1,6}of[0-9]{1,6}(-tp[0-9]{1,6}of[0-9]{1,6})?|tp[0-9]{1,6}of[0-9]{1,6}")
"""Name of the folder of a part; see `offload.checkpoint.directory`."""
_FILE = re.compile(rf"(states|progress)\.rank[0-9]{{1,9}}\.safetensors|({PART.pattern})/manifest\.json")
_KIND = "offload checkpoint"
_KIND_IN = re.compile(rb'"kind":\s*"offload checkpoint"')
"""Finds the kind in a manifest of offload that is no longer valid JSON."""
_MOST_OF_MANIFEST, _MOST_OF_LATEST = 512 * MIB, 4 * KIB
"""Most bytes of these files. A manifest has a checksum of each tensor of each rank."""
_ASIDE = ("partial", "old", "removed")
_LONGEST = 255 - max(len(f"..{what}") for what in _ASIDE)
"""Longest tag in bytes. A file system limits names to 255 bytes, and `aside` adds two dots and a word to the tag."""


class Saved(NamedTuple):
    """One file: its size in bytes and the CRC-32C of each tensor, or of the whole file under the name ""."""

    nbytes: int
    sums: Mapping[str, int]


_KEYS = {"step": "epoch"}
"""Fields of `Manifest` whose key in the file differs from their name, with that key."""


class Manifest(NamedTuple):
    """Content of `manifest.json`."""

    step: int
    """Step after which the checkpoint was saved."""
    created: str
    """Time of the save, UTC in ISO 8601."""
    frozen: bool
    """True if frozen weights are included."""
    layout: Mapping[str, Any]
    """Made by `offload.layout.fingerprint.describe`."""
    about: Mapping[str, Any]
    """Made by `offload.layout.fingerprint.about`."""
    files: Mapping[str, Saved]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts, each a folder with a manifest of its own; none for a checkpoint that is whole."""
        return tuple(self.layout.get("parts", ()))

    @property
    def world_size(self) -> int:
        """Number of ranks that saved states: in each part, the ranks of one replica."""
        return int(self.layout["world_size"])

    @property
    def ranks(self) -> int:
        return self.world_size * int(self.layout.get("replicas", 1)) * max(1, len(self.parts))

    def pack(self) -> bytes:
        files = {name: {"nbytes": saved.nbytes, "crc32c": dict(saved.sums)} for name, saved in self.files.items()}
        written = {_KEYS.get(name, name): value for name, value in self._asdict().items()}
        # The kind comes first in the file: `_KIND_IN` still finds it if the end of the file is lost.
        form = FORMAT_OF_PARTS if self.parts else FORMAT
        content = {"kind": _KIND, "format": form, **written, "files": files}
        return json.dumps({**content, "crc32c": _sum_of(content)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Manifest:
        """Parses the content of a manifest file.

        Raises:
            StoreError: If the content is damaged, of another format or of another kind. `where` names the file in the
                message.
        """
        try:
            content = read(data, anything)
            if not isinstance(content, dict) or content.get("kind") != _KIND:
                raise ValueError(f"the file is not the manifest of an {_KIND}")
            layout, about = (
                value if isinstance(value := content.get(name), dict) else {} for name in ("layout", "about")
            )
            expected = FORMAT_OF_PARTS if layout.get("parts") else FORMAT
            if content.get("format") != expected:
                raise ValueError(
                    f"the format is {content.get('format')}; this version of offload reads format {expected}; load the "
                    f"checkpoint with the version that saved it ({about.get('offload', 'unknown')})"
                )
            # Only after the format has been checked: another format may have another checksum.
            if content.pop("crc32c", None) != _sum_of(content):
                raise ValueError("the file does not match its checksum, so it is damaged")
            # Checked last: a checksum finds damage, but a made-up manifest can have a valid one.
            _MANIFEST(content, "")
            files = {name: Saved(saved["nbytes"], saved["crc32c"]) for name, saved in content["files"].items()}
            return cls(**{name: content[_KEYS.get(name, name)] for name in cls._fields if name != "files"}, files=files)
        except ValueError as error:
            raise StoreError(f"cannot read {where}: {error}") from error


def _check_files(value: Any, name: str) -> None:
    """Raises `ValueError` unless `value` gives size and checksums for each name of a checkpoint's file."""
    table(fields({"nbytes": whole(0, 1 << 56), "crc32c": table(whole(0, (1 << 32) - 1))}))(value, name)
    for file in value:
        if not _FILE.fullmatch(file):
            raise wrong_kind("a name of a checkpoint's file", name, file)


def _check_layout(value: Any, name: str) -> None:
    """Raises `ValueError` if `value` describes no model, or if a part's name leads out of the checkpoint."""
    check_layout(value, name)
    parts = rows(text(PART.pattern, "the name of a part, such as pp0of2-tp1of2"))
    fields({"world_size": anything, "mode": anything, "units": anything}, {"parts": parts})(value, name)
    # A part that is named twice would be read and counted twice.
    if len(set(value.get("parts", ()))) < len(value.get("parts", ())):
        raise wrong_kind("parts of different names", name, value["parts"])


def _check_time(value: Any, name: str) -> None:
    with contextlib.suppress(ValueError):
        if isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None:
            return
    raise wrong_kind("a time in ISO 8601, with its zone", name, value)


_MANIFEST = fields(
    {
        "epoch": whole(),
        "created": _check_time,
        "frozen": flag,
        "layout": _check_layout,
        "about": ABOUT,
        "files": _check_files,
    }
)


def _sum_of(content: Mapping[str, Any]) -> int:
    """Returns the CRC-32C of JSON, independent of its formatting."""
    # `json.loads(json.dumps(...))` turns tuples into lists and keys into strings, as in a manifest that was read.
    return crc32c(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def states_file(rank: int) -> str:
    """Returns the name of the file with the states of `rank`."""
    return f"states.rank{rank}.safetensors"


def progress_file(rank: int) -> str:
    """Returns the name of the file with the progress of `rank`."""
    return f"progress.rank{rank}.safetensors"


def tensor_name(unit: int, state: State) -> str:
    """Returns the name of a partition in a file of states."""
    return f"{unit}.{state.value}"


def tensors_of(
    layouts: Sequence[UnitLayout], mode: Mode, rank: int, world_size: int, frozen: bool
) -> dict[str, Tensor]:
    """Returns the tensors of a rank's file of states, in their order in the file."""
    # Imported late: the module imports torch, which looking at a checkpoint does not need.
    from offload.fileio.safetensors_stream import Tensor

    tensors: dict[str, Tensor] = {}
    for unit, layout in enumerate(layouts):
        trainable = layout.trainable_stop // world_size
        for state, dtype in layout.mode_in(mode).states.items():
            numel = layout.numel // world_size if state is State.WEIGHT and frozen else trainable
            if state is State.SCALES:
                numel = len(mode.padded_part(state, 0, trainable))
            # Some parameters lack this state, so its size differs between ranks.
            elif state is State.PACKED:
                numel = layout.packed_numel(rank)
            elif state in mode.partial:
                numel = len(layout.rest(rank, world_size))
            if numel:
                tensors[tensor_name(unit, state)] = Tensor(dtype, (numel,))
    return tensors


# -- finding ------------------------------------------------------------------------------------------


def check_tag(tag: Any) -> str:
    """Returns `tag` as the name of a checkpoint's folder; raises `UsageError` if it cannot be one."""
    name = str(tag)
    if not name or name.startswith(".") or "/" in name or name == LATEST:
        raise UsageError(
            f"the tag {name!r} cannot name a folder: give a name without a slash that does not begin with a dot and "
            f"is not {LATEST!r}, such as global_step100"
        )
    # Such names are valid for the system, but unreadable in messages and in `latest`.
    if name != name.strip() or any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name):
        raise UsageError(
            f"the tag {name!r} cannot name a folder: it begins or ends with white space, or contains control "
            "characters or half of a character; give a name such as global_step100"
        )
    if (nbytes := len(name.encode())) > _LONGEST:
        raise UsageError(
            f"the tag {name!r} cannot name a folder: it is {nbytes} bytes long, and a save needs names of at most "
            f"{_LONGEST}; give a shorter name"
        )
    return name


def check_folder(folder: Any, name: str) -> Path:
    """Returns `folder`, a user's folder of checkpoints, as a path."""
    path = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(path, str):
        raise UsageError(f"{name} must be a path, a str or a pathlib.Path, got {type(folder).__name__}: {folder!r}")
    if not path:
        raise UsageError(f'{name} is an empty string; give a folder, such as "." for the working directory')
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path)
    except UnicodeError:
        pass
    raise UsageError(f"{name} is {path!r}, which is not a valid path: it contains a zero byte or half of a character")


def aside(checkpoint: Path, what: str) -> Path:
    """Returns the path of a checkpoint's folder while it is "partial", "old" or "removed"."""
    assert what in _ASIDE
    return checkpoint.with_name(f".{checkpoint.name}.{what}")


def is_checkpoint(folder: Path) -> bool:
    """Returns whether the manifest in `folder` is one of ours: intact or damaged, of this format or another."""
    try:
        data = read_inner(folder / MANIFEST, 1, _MOST_OF_MANIFEST)
    except OSError:
        return False
    try:
        content = parse(data)
    except ValueError:
        # Truncated or damaged JSON. The folder must still count as ours, so that the damage is reported.
        return _KIND_IN.search(data) is not None
    return isinstance(content, dict) and content.get("kind") == _KIND


def may_be_checkpoint(folder: Path) -> bool:
    """Returns whether `folder` is or was a checkpoint, even if its manifest is lost.

    A command then reports the damage and not that nothing was found.
    """
    return is_checkpoint(folder) or (folder / states_file(0)).is_file()


def refuse_rank(folder: Path) -> None:
    """Raises `StoreError` if `folder` holds the swap files of one rank, whatever its name."""
    with contextlib.suppress(OSError, ValueError):
        content = {} if is_rank(folder) else parse(read_inner(folder / MANIFEST, 1, _MOST_OF_MANIFEST))
        if is_rank(folder) or (isinstance(content, dict) and {"extents", "stripes"} <= content.keys()):
            raise StoreError(
                f"{folder} holds the swap files of one rank of a run, not a checkpoint: give the run's folder, "
                f'{real_path(folder).parent}, to offload inspect, verify and export; to resume, set "resume": "auto"'
            )


def depth_in(folder: Path) -> int:
    """Returns how many names at the end of the path of a checkpoint's file must not be symbolic links.

    A user may give a link to the checkpoint's folder. Parts and files below it must not be links.
    """
    return 2 if PART.fullmatch(folder.name) else 1


def checkpoints(folder: Path) -> dict[str, Manifest]:
    """Returns the readable checkpoints in `folder` by tag, the oldest first."""
    manifests: dict[str, Manifest] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        # Names with a leading dot are unfinished or half-deleted checkpoints.
        if not path.name.startswith("."):
            with contextlib.suppress(StoreError):
                manifests[path.name] = _read_manifest(path)
    return dict(sorted(manifests.items(), key=lambda item: (item[1].created, item[1].step)))


def _now() -> datetime:
    return datetime.now(timezone.utc)


def time_of_save(folder: Path) -> str:
    """Returns the time now, UTC in ISO 8601; just after the checkpoint that `latest` names if the clock was set back.

    Checkpoints are sorted by this time, and `keep_last` deletes the first ones.
    """
    now = _now()
    with contextlib.suppress(StoreError, OSError, ValueError, OverflowError):
        latest = _read_manifest(folder / read_text(folder / LATEST).strip())
        now = max(now, datetime.fromisoformat(latest.created) + timedelta(microseconds=1))
    return now.isoformat()


def instead_of(checkpoint: Path) -> str:
    """Returns advice for an incomplete or damaged checkpoint: the newest complete checkpoint before it."""
    if is_checkpoint(checkpoint.parent):
        checkpoint = checkpoint.parent  # `checkpoint` is a part, which no other part replaces
    manifests = checkpoints(checkpoint.parent)
    tags, known = list(manifests), checkpoint.name in manifests
    # Without its manifest the checkpoint's place in the order is not known.
    before = tags[: tags.index(checkpoint.name)] if known else tags
    complete = [tag for tag in before if not wrong_files(checkpoint.parent / tag, manifests[tag])]
    if not complete:
        return "load another checkpoint"
    return f"load {checkpoint.parent / complete[-1]}, the newest complete one {'before' if known else 'beside'} it"


def find(load_dir: str | os.PathLike[str], tag: Any, is_other: Callable[[Path], bool] = lambda _: False) -> str | None:
    """Returns the folder of the checkpoint to load, or None if no tag is given and there is no checkpoint.

    Args:
        load_dir: Folder of checkpoints, or a checkpoint if `tag` is None.
        tag: Tag of the checkpoint; None for the one that `latest` names (or DeepSpeed's `latest_universal`), or for
            `load_dir` itself.
        is_other: Returns True for a folder that is a checkpoint of another program that the caller reads too.

    Raises:
        StoreError: If the named checkpoint does not exist, `latest` cannot be read, or `load_dir` holds the swap files
            of a rank.
        UsageError: If `tag` cannot name a folder.
    """
    folder, named = Path(load_dir), "the caller asked for"
    if tag is None:
        latest = next(
            (folder / name for name in (LATEST, LATEST_UNIVERSAL) if (folder / name).exists()), folder / LATEST
        )
        try:
            tag, named = _read_latest(latest, is_other), f"{latest} names"
        except FileNotFoundError:
            # No `latest`: the user may have named the checkpoint itself.
            if may_be_checkpoint(folder) or is_other(folder):
                return str(folder)
            refuse_rank(folder)
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {latest}: {error}") from error
    path = folder / check_tag(tag)
    # A link that this user gives or has made may be followed. A link of another user that `latest` names may lead
    # anywhere.
    if named.endswith(" names") and path.is_symlink() and (owner := path.lstat().st_uid) not in (os.geteuid(), 0):
        raise StoreError(
            f"{path}, which {named}, is a symbolic link of {owner_name(owner)}, which is not followed: give its "
            f"target, {os.path.realpath(path)}, if that is meant"
        )
    # A save was killed between two renames: the checkpoint still exists under its other name.
    if not path.exists() and is_checkpoint(aside(path, "old")):
        return str(aside(path, "old"))
    if not path.is_dir():
        raise StoreError(
            f"there is no checkpoint {tag} in {folder}, which {named}; the folder contains: {_tags(folder, is_other)}"
        )
    return str(path)


def _tags(folder: Path, is_other: Callable[[Path], bool]) -> str:
    others = sorted(path.name for path in folder.iterdir() if is_other(path)) if folder.is_dir() else []
    return ", ".join([*checkpoints(folder), *others]) or "none"


def _read_latest(latest: Path, is_other: Callable[[Path], bool]) -> str:
    """Returns the tag in the file `latest`; raises `StoreError` if it holds no valid tag. See `find`."""
    named = read_text(latest).strip()
    try:
        return check_tag(named)
    except UsageError:
        raise StoreError(
            f"{latest} must contain the tag of a checkpoint, but contains {named[:100]!r}; give the tag of a "
            f"checkpoint in the folder: {_tags(latest.parent, is_other)}"
        ) from None


def read_text(path: Path) -> str:
    """Returns the text of a small file in a folder of checkpoints, such as `latest`.

    Raises:
        OSError: If there is no such file, or something else in its place.
        ValueError: If it is no text.
    """
    # A cache of downloads may consist of links, which are this user's own.
    if path.is_symlink() and path.lstat().st_uid in (os.geteuid(), 0):
        path = Path(os.path.realpath(path))  # for a loop of links this is the path itself
    return read_inner(path, 1, _MOST_OF_LATEST).decode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Returns the manifest of a checkpoint; raises `StoreError`, which names the newest complete one beside it."""
    try:
        return _read_manifest(checkpoint)
    except StoreError as error:
        raise StoreError(f"{error}; {instead_of(checkpoint)}") from error


def _read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST
    try:
        data = read_inner(path, depth_in(checkpoint), _MOST_OF_MANIFEST)
    except OSError as error:
        raise StoreError(f"{checkpoint} is not a checkpoint of offload: cannot read {path.name}: {error}") from error
    return Manifest.unpack(data, str(path))


def wrong_files(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Returns the reason for each file that is missing or of another size, by file name. Does not compare checksums."""
    reasons: dict[str, str] = {}
    for name, saved in manifest.files.items():
        try:
            descriptor = open_inner(checkpoint / name, depth_in(checkpoint) + name.count("/"))
            try:
                size = os.fstat(descriptor).st_size
                check_holes(descriptor, checkpoint / name)
            finally:
                os.close(descriptor)
        except OSError as error:
            reasons[name] = f"cannot be read: {error.strerror}"
        else:
            if size != saved.nbytes:
                reasons[name] = f"contains {size} bytes, expected {saved.nbytes}"
    for part in manifest.parts:
        reasons |= _wrong_in_part(checkpoint, manifest, part)
    return reasons


def _wrong_in_part(checkpoint: Path, manifest: Manifest, part: str) -> dict[str, str]:
    """Returns the reason for each wrong file of one part, by its name in the checkpoint."""
    name = f"{part}/{MANIFEST}"
    try:
        data = read_inner(checkpoint / name, 2, _MOST_OF_MANIFEST)
        # A part of another save would fit, and hold other values.
        if name not in manifest.files or crc32c(data) != manifest.files[name].sums.get(""):
            return {name: "is not the manifest that was saved with this checkpoint"}
        inner = Manifest.unpack(data, name)
        if inner.parts:
            return {name: "has parts of its own, which a part has not"}
        wrong = wrong_files(checkpoint / part, inner)
    except (OSError, StoreError) as error:
        return {name: str(error)}
    return {f"{part}/{file}": reason for file, reason in wrong.items()}
