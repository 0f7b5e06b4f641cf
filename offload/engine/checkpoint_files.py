"""The files of a checkpoint, and how a folder of them comes and goes whole.

    <dir>/latest                             the tag of the newest
    <dir>/<tag>/manifest.json                what it holds: layout, mode, files, a CRC-32C of each tensor
    <dir>/<tag>/states.rank<r>.safetensors   the partitions that rank r held, one flat tensor of each unit and state
    <dir>/<tag>/progress.rank<r>.safetensors all else of the moment: counters, generators, schedule, buffers

A folder is made as `.<tag>.partial` and gets its name when all in it is durable. One that is there already changes
places with it, at once where the system can (`RENAME_EXCHANGE`), else it is `.<tag>.old` for a moment. One that goes is
`.<tag>.removed` first. So a folder without a dot is whole, whenever a process was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio import crc32c
from offload.engine.layout import UnitLayout
from offload.engine.tensor_file import Tensor
from offload.errors import IoError, StoreError, UsageError
from offload.swapper.states import Mode, State
from offload.swapper.store.folder import sync_folder

FORMAT = 1
MANIFEST, LATEST = "manifest.json", "latest"
_KIND = "offload checkpoint"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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
    found: dict[str, Tensor] = {}
    for unit, layout in enumerate(layouts):
        trainable = layout.trainable_stop // world_size
        for state, dtype in mode.states.items():
            numel = layout.numel // world_size if state is State.WEIGHT and frozen else trainable
            if numel:
                found[tensor_name(unit, state)] = Tensor(dtype, (numel,))
    return found


# -- finding ------------------------------------------------------------------------------------------


def check_tag(tag: Any) -> str:
    """The name of a checkpoint's folder; raises `UsageError` where it cannot be one."""
    name = str(tag)
    if not name or name.startswith(".") or "/" in name or "\0" in name or name == LATEST:
        raise UsageError(
            f"the tag {name!r} cannot name a folder of its own: give a name without a slash that does not begin with a "
            f"dot and is not {LATEST!r}, such as global_step100"
        )
    return name


def checkpoints(folder: Path) -> dict[str, Manifest]:
    """Every whole checkpoint of ours in `folder`, by its tag, oldest first."""
    found: dict[str, Manifest] = {}
    for each in folder.iterdir() if folder.is_dir() else ():
        if not each.name.startswith("."):
            with contextlib.suppress(StoreError):
                found[each.name] = read_manifest(each)
    return dict(sorted(found.items(), key=lambda item: (item[1].epoch, item[1].created)))


def find(load_dir: str | os.PathLike[str], tag: Any) -> str | None:
    """The folder of the checkpoint `tag`, or of the latest, or `load_dir` itself where it is one; None without any.

    Raises `StoreError` where it is named and not there.
    """
    folder, named = Path(load_dir), "asked for"
    if tag is None:
        try:
            tag, named = (folder / LATEST).read_text().strip(), f"named by {folder / LATEST}"
        except FileNotFoundError:
            return str(folder) if (folder / MANIFEST).is_file() else None
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {folder / LATEST}: {error}") from error
    path = folder / check_tag(tag)
    if not path.exists() and (_aside(path, "old") / MANIFEST).is_file():
        return str(_aside(path, "old"))
    if not path.is_dir():
        there = ", ".join(checkpoints(folder)) or "none"
        raise StoreError(f"there is no checkpoint {tag} in {folder}, as {named}; those that are there: {there}")
    return str(path)


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


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals that died have left in a folder of checkpoints; the next save removes it."""
    return sorted(path for what in ("partial", "old", "removed") for path in folder.glob(f".*.{what}") if path.is_dir())


# -- coming and going ---------------------------------------------------------------------------------


@contextlib.contextmanager
def told(path: Path, operation: str) -> Iterator[None]:
    """The system's errors as ours."""
    try:
        yield
    except IoError:
        raise
    except OSError as error:
        raise IoError(str(path), 0, 0, error.errno or errno.EIO, operation) from error


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with told(path, "write"):
        descriptor = os.open(path, flags, 0o666)
        try:
            done = 0
            while done < len(data):
                done += os.write(descriptor, memoryview(data)[done:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def begin_folder(checkpoint: Path) -> Path:
    """Make the folder in which `checkpoint` is written; what a save that died has left of it goes.

    Raises `StoreError` where something else has its name.
    """
    partial, old = _aside(checkpoint, "partial"), _aside(checkpoint, "old")
    with told(checkpoint.parent, "make"):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if old.exists() and not checkpoint.exists():
            os.rename(old, checkpoint)  # a save of this tag died between two renames
        if checkpoint.exists() and not (checkpoint / MANIFEST).is_file():
            raise StoreError(f"{checkpoint} is there and is no checkpoint of offload: choose another tag, or remove it")
        for left in (partial, old):
            if left.exists():
                shutil.rmtree(left)
        for left in checkpoint.parent.glob(".*.removed"):
            if (left / MANIFEST).is_file() or not any(left.iterdir()):
                _delete(left)
        partial.mkdir()
    return partial


def end_folder(checkpoint: Path, latest: bool) -> None:
    """Give what was written its name, all of it durable; where `latest`, that of the newest."""
    folder, partial, old = checkpoint.parent, _aside(checkpoint, "partial"), _aside(checkpoint, "old")
    new = folder / f".{LATEST}.{checkpoint.name}"
    if latest:
        with told(new, "write"):
            new.unlink(missing_ok=True)
        write_new(new, checkpoint.name.encode())  # a disk that is full is known before anything changes
    with told(checkpoint, "rename"):
        sync_folder(partial)
        if not checkpoint.exists():
            os.rename(partial, checkpoint)
        elif exchange(partial, checkpoint):
            os.rename(partial, old)
        else:
            os.rename(checkpoint, old)
            os.rename(partial, checkpoint)
        sync_folder(folder)
        if latest:
            os.replace(new, folder / LATEST)
            sync_folder(folder)
    with contextlib.suppress(OSError):  # all is there by now, and the next save of this tag removes it
        if old.exists():
            remove(old)


def drop_partial(checkpoint: Path) -> None:
    """Remove what was written of a checkpoint that failed."""
    shutil.rmtree(_aside(checkpoint, "partial"), ignore_errors=True)
    (checkpoint.parent / f".{LATEST}.{checkpoint.name}").unlink(missing_ok=True)


def prune(folder: Path, keep: int, newest: str) -> list[str]:
    """Remove the oldest checkpoints of ours in `folder` but `keep`, never `newest` nor the latest; their tags."""
    found = list(checkpoints(folder))
    kept = {newest}
    with contextlib.suppress(OSError):
        kept.add((folder / LATEST).read_text().strip())
    going = [tag for tag in found if tag not in kept][: max(len(found) - keep, 0)]
    for tag in going:
        remove(folder / tag)
    return going


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, which has not its name any more while it goes."""
    aside = _aside(checkpoint, "removed")
    with told(checkpoint, "remove"):
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(checkpoint, aside)
        sync_folder(checkpoint.parent)
        _delete(aside)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names at once; False where the system or the file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(other))


def _aside(checkpoint: Path, what: str) -> Path:
    name = checkpoint.name
    return checkpoint.with_name(f"{'' if name.startswith('.') else '.'}{name}.{what}")


def _delete(aside: Path) -> None:
    """The manifest last: until then it says whose the folder is."""
    for path in sorted(aside.iterdir(), key=lambda path: path.name == MANIFEST):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    aside.rmdir()
