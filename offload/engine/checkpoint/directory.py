"""How a folder of checkpoints changes: by one save at a time, and each checkpoint in it is whole or not there.

    .offload.lock     of the save that is under way, which is named in it; locked by `flock`
    .<tag>.partial    what is being written; it gets its name when all in it is durable
    .<tag>.old        the one that had the name, between two renames
    .<tag>.removed    one that goes
    .latest.<tag>     what `latest` will be

A checkpoint that is there already changes places with the new one, at once where the system can (`RENAME_EXCHANGE`). So
a folder without a dot is whole, whenever a process was killed; what a kill has left is known by its name and by what is
in it, and the next save into the folder, whatever its tag, puts it away.

What is not ours is never touched. A folder goes only if it says that it is a checkpoint and holds nothing else, or has
one of the names above and holds nothing but files that are named as ours; then these files are deleted, one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from offload import fileio
from offload.engine.checkpoint.files import (
    LATEST,
    MANIFEST,
    aside,
    checkpoints,
    is_checkpoint,
    read_manifest,
    wrong_files,
)
from offload.errors import IoError, StoreError
from offload.fileio import DirLock, LockHeldError, holder_of, replace_durably, sync_folder

logger = logging.getLogger("offload")

LOCK = ".offload.lock"
_FILES = re.compile(r"manifest\.json|(states|progress)\.rank\d+\.safetensors")
_NAMES = re.compile(r"\.(?P<tag>[^.].*)\.(?P<what>partial|old|removed)", re.DOTALL)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_TRIES = 20
"""Who asks by `saver` has the lock for a moment, which is waited for. A save is not."""


# -- one at a time ------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_save(folder: Path, tag: str, lock: Path | None = None) -> Iterator[None]:
    """Be the only one that saves into `folder`. Raises `StoreError` that names the one who does.

    The file `lock`, by default one in the folder, is there meanwhile; all who save there must say the same.
    """
    path = folder / LOCK if lock is None else lock
    with told(path, "lock"):
        try:
            held = DirLock(path, f" ({tag})", mode=0o666, tries=_TRIES)
        except LockHeldError as error:
            raise StoreError(
                f"{folder} is being saved to by {error.holder}: save again when that is done, or give each run a "
                f"folder of its own"
            ) from None
    if held.refused is not None:
        logger.warning(
            "%s cannot be locked (%s): nothing else may save into %s now", path, held.refused.strerror, folder
        )
    try:
        yield
    finally:
        held.remove()


def saver(folder: Path) -> str | None:
    """Returns who saves into `folder` now, as it has written itself down; None where nobody does. Keeps nothing."""
    return holder_of(folder / LOCK)


# -- what is ours -------------------------------------------------------------------------------------


def strangers(folder: Path) -> list[str]:
    """Names in a folder that are not of a checkpoint's files."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not _FILES.fullmatch(e.name) or not e.is_file(follow_symlinks=False))


def _is_left(path: Path) -> bool:
    """Whether a folder that has one of our names with a dot holds nothing but what a save has written."""
    if path.is_symlink() or not path.is_dir() or strangers(path):
        return False
    if not (path / MANIFEST).exists() or is_checkpoint(path):
        return True
    try:
        json.loads((path / MANIFEST).read_bytes())
    except ValueError:
        return True  # a power cut came before all of it was written
    return False  # the manifest of something else


def _is_left_latest(path: Path) -> bool:
    """Whether this is what a save has begun to write as `latest`."""
    if path.is_symlink() or not path.is_file():
        return False
    tag = path.name.removeprefix(f".{LATEST}.").encode()
    return path.stat().st_size <= len(tag) and tag.startswith(path.read_bytes())


def _is_whole(checkpoint: Path) -> bool:
    try:
        return not wrong_files(checkpoint, read_manifest(checkpoint))
    except StoreError:
        return False


def leftovers(folder: Path) -> tuple[list[Path], list[Path]]:
    """What saves that died have left in a folder: what the next save removes, and what gets its name again."""
    goes: list[Path] = []
    returns: list[Path] = []
    for path in sorted(folder.iterdir()):
        named = _NAMES.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if named is None or not path.is_dir():
                if path.name.startswith(f".{LATEST}.") and _is_left_latest(path):
                    goes.append(path)
            elif named["what"] != "old":
                if _is_left(path):
                    goes.append(path)
            elif not os.path.lexists(checkpoint := folder / named["tag"]):
                if is_checkpoint(path) and _is_left(path):
                    returns.append(path)
            elif _is_left(path) and _is_whole(checkpoint):
                goes.append(path)
    return goes, returns


def check_free(checkpoint: Path, latest: bool) -> None:
    """Raise `StoreError` where something that is not ours has a name that a save needs. Nothing is changed."""
    folder = checkpoint.parent
    if checkpoint.is_symlink():
        raise StoreError(f"{checkpoint} is a symbolic link, which a save does not replace: choose another tag")
    if checkpoint.exists():
        if not is_checkpoint(checkpoint):
            raise StoreError(f"{checkpoint} is there and is no checkpoint of offload: choose another tag, or remove it")
        if others := strangers(checkpoint):
            raise StoreError(
                f"{checkpoint} would be replaced, and {', '.join(others)} in it is not of a checkpoint: move it out, "
                f"or choose another tag"
            )
    for path in (aside(checkpoint, "partial"), aside(checkpoint, "old"), aside(checkpoint, "removed")):
        if os.path.lexists(path) and not _is_left(path):
            raise StoreError(
                f"{path} has a name that a save of {checkpoint.name} needs, and is not what a save has left: move it, "
                f"or choose another tag"
            )
    new = _new_latest(checkpoint)
    if os.path.lexists(new) and not _is_left_latest(new):
        raise StoreError(
            f"{new} has a name that a save of {checkpoint.name} needs, and is not what a save has left: move it, or "
            f"choose another tag"
        )
    if latest and (folder / LATEST).is_dir():
        raise StoreError(
            f"{folder / LATEST} is a folder, and the file that names the newest checkpoint must be there: move it, or "
            f"save to another folder"
        )


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
    """Writes a file that is not there, durably. Raises `IoError`."""
    with told(path, "write"):
        fileio.write_new(path, data)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing; a power cut does not lose them."""
    with told(folder, "make"):
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in new:
            sync_folder(each.parent)


def begin_folder(checkpoint: Path, latest: bool = True) -> Path:
    """Make the folder in which `checkpoint` is written; what saves that died have left beside it goes.

    The caller is the only one that saves there. Raises `StoreError` where something else has a name that it needs.
    """
    partial = aside(checkpoint, "partial")
    with told(checkpoint.parent, "make"):
        check_free(checkpoint, latest)
        goes, returns = leftovers(checkpoint.parent)
        for path in (*goes, *returns):
            try:
                if path in returns:
                    named = _NAMES.fullmatch(path.name)
                    assert named is not None
                    os.rename(path, path.with_name(named["tag"]))  # a save died between two renames
                elif path.is_dir():
                    _delete(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("what a save has left cannot be put away: %s", error)
        partial.mkdir()
    return partial


def end_folder(checkpoint: Path, latest: bool) -> None:
    """Give what was written its name, all of it durable; where `latest`, that of the newest."""
    folder, partial, old = checkpoint.parent, aside(checkpoint, "partial"), aside(checkpoint, "old")
    new, going = _new_latest(checkpoint), None
    if latest:
        with told(new, "write"):
            new.unlink(missing_ok=True)
        write_new(new, checkpoint.name.encode())  # a disk that is full is known before anything changes
    with told(checkpoint, "rename"):
        sync_folder(partial)
        if not checkpoint.exists():
            os.rename(partial, checkpoint)
        elif exchange(partial, checkpoint):
            going = partial
        else:
            # Where one is `old` already, what has the name is damaged, and not what one would go back to.
            going = aside(checkpoint, "removed") if old.exists() else old
            os.rename(checkpoint, going)
            os.rename(partial, checkpoint)
        sync_folder(folder)
        if latest:
            replace_durably(new, folder / LATEST)
    for left in (going, old):  # all is there by now, and what stays is removed by the next save
        with contextlib.suppress(OSError):
            if left is not None and left.exists():
                _delete(left)


def drop_partial(checkpoint: Path) -> None:
    """Remove what was written of a checkpoint that failed."""
    with contextlib.suppress(OSError):
        _delete(aside(checkpoint, "partial"))
    with contextlib.suppress(OSError):
        _new_latest(checkpoint).unlink(missing_ok=True)


def prune(folder: Path, keep: int, newest: str) -> list[str]:
    """Remove the checkpoints of ours in `folder` that were saved first, so that `keep` are left; their tags.

    Never `newest` nor the latest. One that cannot be removed stays, and a warning says why.
    """
    found = list(checkpoints(folder))
    kept = {newest}
    with contextlib.suppress(OSError, ValueError):
        kept.add((folder / LATEST).read_text(encoding="utf-8").strip())
    gone: list[str] = []
    for tag in [tag for tag in found if tag not in kept][: max(len(found) - keep, 0)]:
        try:
            remove(folder / tag)
            gone.append(tag)
        except (OSError, StoreError) as error:
            logger.warning("keep_last=%d: the checkpoint %s stays: %s", keep, tag, error)
    return gone


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, which has not its name any more while it goes; one that has gone by itself is no error.

    Raises `StoreError` where it, or what has the name that it needs, is not ours alone.
    """
    going = aside(checkpoint, "removed")
    with told(checkpoint, "remove"), contextlib.suppress(FileNotFoundError):
        if checkpoint.is_symlink():
            raise StoreError(f"{checkpoint} is a symbolic link")
        if others := strangers(checkpoint):
            raise StoreError(f"{', '.join(others)} in {checkpoint} is not of a checkpoint")
        if os.path.lexists(going):
            if not _is_left(going):
                raise StoreError(f"{going} is in its way, and is not what a save has left")
            _delete(going)
        os.rename(checkpoint, going)
        sync_folder(checkpoint.parent)
        _delete(going)


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


def _new_latest(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{LATEST}.{checkpoint.name}")


def _delete(folder: Path) -> None:
    """Delete a folder of ours, file by file. The manifest goes last: until then it says whose the folder is.

    What another process has deleted meanwhile is no error; what has come into it meanwhile stays, and is one.
    """
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(folder), key=lambda name: name == MANIFEST)
        for name in names:
            if _FILES.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(folder / name)
        os.rmdir(folder)
