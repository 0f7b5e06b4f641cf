"""Changes to a folder of checkpoints: one save at a time, and each checkpoint in the folder is complete or absent.

    .offload.lock     locked by `flock` during a save; names the saving process and the tag
    .<tag>.partial    checkpoint being written; renamed when all its files are durable
    .<tag>.old        checkpoint that had the name before, between two renames
    .<tag>.removed    checkpoint being deleted
    .latest.<tag>     next content of `latest`

An existing checkpoint is exchanged with the new one in one step (`RENAME_EXCHANGE`), or by two renames if the system
cannot. Either way a folder whose name has no leading dot is complete, whenever the process is killed. Leftovers of a
killed save are recognized by name and content. The next save into the folder removes them, whatever its tag.

Foreign files are never touched. A folder is deleted only if all its files have the names of a checkpoint's files, and
its manifest is a checkpoint's. If the folder has one of the names above, its manifest may also be missing or cut off.
Its files are deleted one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.checkpoint.files import (
    LATEST,
    MANIFEST,
    PART,
    Manifest,
    aside,
    checkpoints,
    instead_of,
    is_checkpoint,
    read_manifest,
    read_text,
    wrong_files,
)
from offload.errors import StoreError
from offload.fileio import (
    DirLock,
    LockHeldError,
    holder_of,
    inner_folder,
    naming_errors,
    read_inner,
    replace_durably,
    sync_folder,
    write_new,
)
from offload.records import parse
from offload.sizes import MIB
from offload.swapper.store.folder import sync_names
from offload.swapper.store.inspection import is_rank

if TYPE_CHECKING:
    from offload.distributed.world import World
    from offload.layout.flat_layout import UnitLayout


# -- parts ---------------------------------------------------------------------------------------------
#
# The parts of a checkpoint that a grid of processes has saved: stages of a pipeline, shards of tensor parallelism.
#
#     <tag>/manifest.json                     describes the whole, with the checksum of each part's manifest
#     <tag>/pp0of2-tp1of2/manifest.json       a part: a checkpoint of the processes that have the same layers and the
#     <tag>/pp0of2-tp1of2/states.rank0...     same shards
#
# All parts are written into one folder, which gets its final name at the end, so a checkpoint contains all its parts.


_FILES = re.compile(r"manifest\.json|(states|progress)\.rank[0-9]+\.safetensors")


def described_part(
    world: World, layout: Mapping[str, Any], about: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns `layout` and `about` of a manifest, for the part of this process."""
    if not world.divides_model:
        return dict(layout), dict(about)
    divided = {name: world.dims.get(name) for name in sorted(world.sharded)}
    return {**layout, **world.description}, {**about, "divided": divided, "elsewhere": sorted(world.tied)}


def own_part(world: World, checkpoint: Path) -> Path:
    """Returns the folder of a process's part of a checkpoint; without a grid the checkpoint itself."""
    manifest = read_manifest(checkpoint)
    # A checkpoint path that leads to a single part is no whole model either.
    is_part = "tensor_parallel" in manifest.layout or "pipeline" in manifest.layout
    saved = manifest.parts or (("a part of a grid",) if is_part else ())
    if saved == world.parts:
        check_parts(checkpoint, manifest)
        return checkpoint / world.part
    names = [
        f"processes with the parts {', '.join(parts)}" if parts else "processes without pipeline or tensor parallelism"
        for parts in (saved, world.parts)
    ]
    raise StoreError(
        f"the checkpoint {checkpoint} was saved by {names[0]}, this engine has {names[1]}: start as "
        "many processes in the same grid; or take the weights alone, by offload export, and give them to the "
        "model before offload.initialize"
    )


def counted_units(described: Mapping[str, Any], layouts: Sequence[UnitLayout], world: World) -> list[Any]:
    """Returns the units of a part to show to users, without parameters that another part has counted."""
    if not world.divides_model:
        return list(described["units"])
    elsewhere = world.counted_elsewhere(layouts)
    units = []
    for unit, content in enumerate(described["units"]):
        # Each part counts its own shard of a divided parameter.
        parameters = [
            parameter for position, parameter in enumerate(content["parameters"]) if (unit, position) not in elsewhere
        ]
        units.append({"name": content["name"], "parameters": parameters})
    return [entry for entry in units if entry["parameters"]]


# -- folders ------------------------------------------------------------------------------------------


def strangers(folder: Path) -> list[str]:
    """Returns the names in a folder that are not files of a checkpoint, or of its parts."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                names += [f"{entry.name}/{name}" for name in strangers(Path(entry.path))]
            elif not _FILES.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names)


def delete(folder: Path, depth: int = 1) -> None:
    """Deletes a folder of ours, file by file. The manifest is deleted last: it identifies the folder as ours.

    A file that another process has deleted meanwhile is no error. A file that was added meanwhile is kept, and so is
    the folder; this raises `OSError`.

    Args:
        depth: Number of names at the end of the path that must not be links.
    """
    with contextlib.suppress(FileNotFoundError):
        # Files are deleted relative to the open folder: on its path somebody could put a link to files of others.
        with inner_folder(folder, depth) as here:
            for name in sorted(os.listdir(here), key=lambda name: name == MANIFEST):
                if PART.fullmatch(name) and stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                    delete(folder / name, depth + 1)
                elif _FILES.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=here)
        with inner_folder(folder.parent, depth - 1) as above:
            os.rmdir(folder.name, dir_fd=above)


def check_parts(checkpoint: Path, manifest: Manifest) -> None:
    """Raises `StoreError` if a part of a checkpoint is incomplete, or belongs to another save."""
    # A whole checkpoint is checked as it is read.
    if manifest.parts and (wrong := wrong_files(checkpoint, manifest)):
        reasons = "; ".join(f"{name} {reason}" for name, reason in wrong.items())
        raise StoreError(
            f"the checkpoint {checkpoint} is incomplete or damaged: {reasons}; {instead_of(checkpoint)}", damaged=True
        )


# -- directory -----------------------------------------------------------------------------------------


logger = logging.getLogger("offload")

LOCK = ".offload.lock"
_NAMES = re.compile(r"\.(?P<tag>[^.].*)\.(?P<what>partial|old|removed)", re.DOTALL)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_TRIES = 20
"""Attempts to get the lock: enough to outlast a call of `saver`, which locks for a moment, but not another save."""


# -- one at a time ------------------------------------------------------------------------------------


def holds_run(folder: Path) -> bool:
    """Returns True if ranks of a run have their swap files in `folder`, not checkpoints with tags such as "rank0"."""
    return any(is_rank(path) and not is_checkpoint(path) for path in folder.glob("rank*"))


@contextlib.contextmanager
def only_save(folder: Path, tag: str, lock: Path | None = None) -> Iterator[None]:
    """Holds the lock on saving into `folder` while the context is open.

    Args:
        lock: Lock file, by default one in the folder. All writers of the folder must use the same file.

    Raises:
        StoreError: If another process saves into the folder; the message names the process.
        IoError: If the lock file cannot be made.
    """
    path = folder / LOCK if lock is None else lock
    with naming_errors(path, "lock"):
        try:
            folder_lock = DirLock(path, f" ({tag})", mode=0o666, tries=_TRIES)
        except LockHeldError as error:
            raise StoreError(
                f"{error.holder} is saving into {folder}: save again when that save has ended, or give each run a "
                "folder of its own"
            ) from None
    # Some network file systems have no locks. A warning is better than no save at all.
    if folder_lock.refused is not None:
        logger.warning(
            "%s cannot be locked (%s): make sure that no other process saves into %s now",
            path,
            folder_lock.refused.strerror,
            folder,
        )
    try:
        yield
    finally:
        folder_lock.remove()


def saver(folder: Path) -> str | None:
    """Returns the name of the process that saves into `folder` now, or None. Does not keep the lock."""
    return holder_of(folder / LOCK)


# -- our files ----------------------------------------------------------------------------------------


def _is_left(path: Path) -> bool:
    """Returns whether a folder with one of our dotted names contains nothing but the output of a save."""
    if path.is_symlink() or not path.is_dir() or strangers(path):
        return False
    if not (path / MANIFEST).exists() or is_checkpoint(path):
        return True
    try:
        parse(read_inner(path / MANIFEST, 1, 64 * MIB))
    except ValueError:
        return True  # a power cut came before the manifest was completely written
    return False  # the manifest of something else


def _is_left_latest(path: Path) -> bool:
    """Returns whether the file at `path` is the next `latest` of a save, complete or not."""
    if path.is_symlink() or not path.is_file():
        return False
    tag = path.name.removeprefix(f".{LATEST}.").encode()
    # A kill may have come before the whole tag was written, so a file with a prefix of the tag is ours too.
    return path.stat().st_size <= len(tag) and tag.startswith(read_inner(path, 1, len(tag)))


def _is_whole(checkpoint: Path) -> bool:
    try:
        return not wrong_files(checkpoint, read_manifest(checkpoint))
    except StoreError:
        return False


def leftovers(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the leftovers of killed saves in a folder: the paths to remove, and the checkpoints to rename back.

    Nothing that contains a foreign file is removed.
    """
    goes: list[Path] = []
    returns: list[Path] = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # belongs to another user, or was deleted meanwhile
            named = _NAMES.fullmatch(path.name)
            if named is None or not path.is_dir():
                if path.name.startswith(f".{LATEST}.") and _is_left_latest(path):
                    goes.append(path)
            elif not _is_left(path):
                continue
            # An old checkpoint is needed until the one that has its name now is complete.
            elif named["what"] == "old" and not os.path.lexists(folder / named["tag"]):
                if is_checkpoint(path):
                    returns.append(path)
            elif named["what"] != "old" or _is_whole(folder / named["tag"]):
                goes.append(path)
    return goes, returns


def check_free(checkpoint: Path, latest: bool) -> None:
    """Raises `StoreError` if a foreign file has a name that a save of `checkpoint` needs. Changes nothing."""
    folder = checkpoint.parent
    if checkpoint.is_symlink():
        raise StoreError(f"{checkpoint} is a symbolic link, which a save does not replace: choose another tag")
    if checkpoint.exists():
        if not is_checkpoint(checkpoint):
            raise StoreError(
                f"{checkpoint} exists and is not a checkpoint of offload: choose another tag, or remove that path"
            )
        if foreign := strangers(checkpoint):
            raise StoreError(
                f"{checkpoint} would be replaced, but {', '.join(foreign)} in it does not belong to a checkpoint: move "
                "that out, or choose another tag"
            )
    new = _new_latest(checkpoint)
    for path in (aside(checkpoint, "partial"), aside(checkpoint, "old"), aside(checkpoint, "removed"), new):
        if os.path.lexists(path) and not (_is_left_latest(path) if path == new else _is_left(path)):
            raise StoreError(
                f"{path} has a name that a save of {checkpoint.name} needs, but was not left by a save: move that "
                "path, or choose another tag"
            )
    if latest and (folder / LATEST).is_dir():
        raise StoreError(
            f"{folder / LATEST} is a folder, but must be the file that names the newest checkpoint: move the folder, "
            "or save to another folder"
        )


# -- coming and going ---------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents durably: a power cut after the return does not lose them."""
    with naming_errors(folder, "make"):
        folder.mkdir(parents=True, exist_ok=True)
        # Folders that the caller has just made are synced too: a finished save must not vanish with one of them.
        sync_names(folder)


def begin_folder(checkpoint: Path, latest: bool = True) -> Path:
    """Creates and returns the folder where `checkpoint` is written.

    Before that, leftovers of killed saves in the parent folder are removed, or renamed back; see `leftovers`.
    """
    partial = aside(checkpoint, "partial")
    with naming_errors(checkpoint.parent, "make"):
        check_free(checkpoint, latest)
        goes, returns = leftovers(checkpoint.parent)
        for path in (*goes, *returns):
            try:
                if path in returns:
                    named = _NAMES.fullmatch(path.name)
                    assert named is not None
                    # A save was killed between two renames: the old checkpoint is the only one.
                    os.rename(path, path.with_name(named["tag"]))
                elif path.is_dir():
                    delete(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("leftovers of a killed save cannot be removed or renamed: %s", error)
    with naming_errors(partial, "make"):
        partial.mkdir()
    return partial


def end_folder(checkpoint: Path, latest: bool) -> None:
    """Renames the finished checkpoint to its final name, durably, and then writes `latest`."""
    folder, partial, old = checkpoint.parent, aside(checkpoint, "partial"), aside(checkpoint, "old")
    new, going = _new_latest(checkpoint), None
    if latest:
        with naming_errors(new, "write"):
            new.unlink(missing_ok=True)
        # Written before the renames, so that a full disk is noticed before anything changes.
        write_new(new, checkpoint.name.encode())
    # The names in `partial` must be durable before it gets its final name, and the final name before `latest` names it.
    with naming_errors(checkpoint, "rename"):
        sync_folder(partial)
        if not checkpoint.exists():
            os.rename(partial, checkpoint)
        else:
            # If `begin_folder` has left an `old`, the checkpoint of this name is incomplete: `old` is the fallback.
            going = aside(checkpoint, "removed") if old.exists() else old
            if exchange(partial, checkpoint):
                # Renamed at once: the caller deletes `partial` if an error follows.
                os.rename(partial, going)
            else:
                os.rename(checkpoint, going)
                os.rename(partial, checkpoint)
        # `latest` must never name a checkpoint that a power cut could still lose.
        sync_folder(folder)
        if latest:
            replace_durably(new, folder / LATEST)
    for leftover in (going, old):  # the save is complete by now; the next save removes what cannot be deleted here
        with contextlib.suppress(OSError):
            if leftover is not None and leftover.exists():
                delete(leftover)


def drop_partial(checkpoint: Path) -> None:
    """Removes the files of a failed save."""
    with contextlib.suppress(OSError):
        delete(aside(checkpoint, "partial"))
    with contextlib.suppress(OSError):
        _new_latest(checkpoint).unlink(missing_ok=True)


def prune(folder: Path, keep: int, newest: str) -> list[str]:
    """Removes the oldest of our checkpoints in `folder` until `keep` remain, and returns the removed tags.

    Neither `newest` nor the checkpoint that `latest` names is removed. If another one cannot be removed, a warning
    gives the reason.
    """
    tags = list(checkpoints(folder))
    # `latest` names another checkpoint than the newest if the save did not write `latest`.
    protected = {newest}
    with contextlib.suppress(OSError, ValueError):
        protected.add(read_text(folder / LATEST).strip())
    gone: list[str] = []
    for tag in [tag for tag in tags if tag not in protected][: max(len(tags) - keep, 0)]:
        try:
            remove(folder / tag)
            gone.append(tag)
        except (OSError, StoreError) as error:
            logger.warning("keep_last=%d: the checkpoint %s is kept: %s", keep, tag, error)
    return gone


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint, which is renamed first so that no half-deleted folder has its name.

    A checkpoint that another process has deleted meanwhile is no error.
    """
    going = aside(checkpoint, "removed")
    with naming_errors(checkpoint, "remove"), contextlib.suppress(FileNotFoundError):
        if checkpoint.is_symlink():
            raise StoreError(f"{checkpoint} is a symbolic link")
        if foreign := strangers(checkpoint):
            raise StoreError(f"{', '.join(foreign)} in {checkpoint} does not belong to a checkpoint")
        if os.path.lexists(going):
            if not _is_left(going):
                raise StoreError(f"{going} is in the way, and was not left by a save")
            delete(going)
        os.rename(checkpoint, going)
        sync_folder(checkpoint.parent)
        delete(going)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two folders atomically; returns False if the system or the file system cannot.

    Raises:
        OSError: If the exchange fails for another reason.
    """
    # Python does not wrap renameat2, and an older C library does not contain the function.
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(second))


def _new_latest(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{LATEST}.{checkpoint.name}")
