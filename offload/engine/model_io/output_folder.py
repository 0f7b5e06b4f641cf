"""Placement of a model's files in their folder: all of them, or none.

    <folder>.partial             files being written, if the folder does not exist or contains only files that a save
                                 writes; takes the folder's name, or is exchanged with the folder in one step
    <folder>/.offload.partial    files being written, if foreign files in the folder must stay; the new files are moved
                                 in one by one
    .<folder>.lock               locked during a save; names the saving process. It is `.offload.lock` in the folder if
                                 nothing can be made beside the folder

Files are moved in one by one in the second case, and if the system cannot exchange folders. Config and index are then
deleted first and moved in last, so that a kill between two moves leaves a folder that nobody takes for a model, never
a mixture that loads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from offload.checkpoint.directory import LOCK, exchange, make_folder, naming_errors, only_save
from offload.engine.model_io.safetensors_folder import CONFIG, GENERATION, INDEX, SINGLE
from offload.errors import IoError, StoreError
from offload.fileio import inner_folder, keep_mode_and_owner, sync_folder
from offload.sizes import format_size

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_UNIVERSAL = re.compile(r"(fp32|exp_avg|exp_avg_sq|step|optimizer_state|\w+_model_states)\.pt|latest_universal")
"""Files of a universal checkpoint of DeepSpeed."""
_HEADS = (CONFIG, INDEX, SINGLE, "adapter_config.json")
"""Files by which loaders find the weights; without them the folder is no model."""
TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model sentencepiece.bpe.model chat_template.jinja chat_template.json"
).split()
"""Files of a tokenizer, as transformers names them."""
_ADAPTER = ("adapter_model.safetensors", "adapter_config.json", "README.md")


@contextlib.contextmanager
def arriving(out: Path, notice: Callable[[str], None], whole: bool = True) -> Iterator[Path]:
    """Yields a staging folder whose files replace those in `out` if the context ends without an error.

    One writer at a time. After an error in the context `out` is unchanged. An error while the new files are put in
    place raises too, and leaves those that are in place.

    Args:
        out: The output folder.
        notice: Called with a message about leftovers of a killed save, which are removed.
        whole: True if the files are a complete model: weights of an earlier model are removed. Otherwise every file in
            `out` stays, unless a new file has its name.

    Raises:
        StoreError: If another process writes to `out`, or the staging folder contains foreign files.
        IoError: If something cannot be written.
    """
    make_folder(out.parent)
    with only_save(out, out.name, _lock_of(out)):
        # The staging folder is beside `out` if `out` can be replaced as a whole, which is atomic; else inside of `out`.
        beside = not _is_in_use(out) and (_is_free(out) or (whole and _is_ours(out)))
        partial = out.with_name(f"{out.name}.partial") if beside else out / ".offload.partial"
        with naming_errors(partial, "make"):
            # A killed save may have left the folder; `_clear` removes its files or refuses them.
            partial.mkdir(exist_ok=True)
            # Where others may write too, its name may be that of a folder of theirs, or of a link.
            with inner_folder(partial, 1, ours=True):
                pass
        _clear(partial, notice)
        try:
            yield partial
            with naming_errors(partial, "write"):
                if beside:
                    _keep_others(partial, out)
                    if out.exists():
                        keep_mode_and_owner(out.stat(), partial)
                sync_folder(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with naming_errors(out, "rename"):  # from here on the new files stay, whatever happens
            _arrive(partial, out) if beside else _move_in(partial, out, whole)


def _lock_of(out: Path) -> Path:
    """Returns the path of the lock file. The result must not depend on anything that a save changes."""
    # Two saves at a time must use the same lock, also if one of them creates or replaces `out` meanwhile.
    inside = out.is_dir() and not os.access(out.parent, os.W_OK)
    return out / LOCK if inside else out.with_name(f".{out.name}.lock")


def check_room(folder: Path, nbytes: int, out: Path) -> None:
    """Raises `StoreError` if the drive has no room for `nbytes` more.

    Args:
        folder: Any folder on the drive.
        nbytes: Bytes that will be written.
        out: Output folder, for the message.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise StoreError(
            f"{out} needs {format_size(nbytes)}, but its drive has {format_size(free)} free; free some room, or "
            "choose another folder"
        )


def check_not_a_file(out: Path) -> None:
    """Raises `StoreError` if `out` exists and is no folder."""
    if os.path.lexists(out) and not out.is_dir():
        raise StoreError(f"{out} is not a folder; give a folder, or a name that does not exist")


def _is_in_use(out: Path) -> bool:
    """Returns whether the working directory of this process is in `out`: an exchange would delete that directory."""
    return Path.cwd().is_relative_to(out.resolve())


def _is_free(out: Path) -> bool:
    """Returns whether `out` does not exist, or is empty and can be replaced."""
    return not out.exists() or (not out.is_mount() and not out.is_symlink() and not any(out.iterdir()))


def _is_ours(out: Path) -> bool:
    """Returns whether a folder contains only files that a save writes."""
    known = (CONFIG, GENERATION, *TOKENIZER)
    return (
        not out.is_mount()
        and not out.is_symlink()
        and all(
            (path.name in known or _WEIGHTS.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
            for path in out.iterdir()
        )
    )


def _clear(partial: Path, notice: Callable[[str], None]) -> None:
    """Removes leftovers of a killed save; raises `StoreError` if `partial` contains a foreign file."""
    left = [path for path in partial.rglob("*") if path.is_file()]
    known = (CONFIG, GENERATION, *TOKENIZER, *_ADAPTER)
    ours = (_WEIGHTS, _UNIVERSAL)
    foreign = [p.name for p in left if not (p.name in known or any(each.fullmatch(p.name) for each in ours))]
    if foreign:
        raise StoreError(
            f"{partial} contains {foreign[0]}, which was not left by a save; move that file away, or choose another "
            "name"
        )
    if left:
        # `st_blocks` counts units of 512 bytes, whatever the file system's block size is.
        nbytes = sum(path.stat().st_blocks * 512 for path in left)
        notice(f"removed {partial}, {format_size(nbytes)} of an interrupted save or export")
    for path in left:
        path.unlink()
    for path in sorted((path for path in partial.rglob("*") if path.is_dir()), reverse=True):
        path.rmdir()


def _keep_others(partial: Path, out: Path) -> None:
    """Copies to `partial` the files of `out` that this save does not write, such as a tokenizer's."""
    for path in out.iterdir() if out.exists() else ():
        if not _WEIGHTS.fullmatch(path.name) and not (partial / path.name).exists():
            shutil.copy2(path, partial / path.name)


def _arrive(partial: Path, out: Path) -> None:
    """Gives the staging folder its final name and deletes the folder that had the name.

    If the system cannot exchange folders, the files are moved in one by one.
    """
    if not out.exists() or not any(out.iterdir()):
        os.rename(partial, out)
        sync_folder(out.parent)
        return
    # After the exchange `partial` is the old folder.
    if exchange(partial, out):
        sync_folder(out.parent)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        _move_in(partial, out, whole=True)


def _move_in(partial: Path, out: Path, whole: bool) -> None:
    """Moves files into `out` one by one; if they are a `whole` model, weights of an earlier model are deleted."""
    new = sorted(path.relative_to(partial) for path in partial.rglob("*") if path.is_file())
    heads = [path for path in new if path.name in _HEADS]
    gone = [path for path in out.iterdir() if whole and _WEIGHTS.fullmatch(path.name)]
    gone += [out / path for path in heads if (out / path).exists() and out / path not in gone]
    # A single file that replaces a single file needs no deletion first: `os.replace` below is atomic.
    if len(new) > 1 or gone != [out / new[0]]:
        for path in sorted(gone, key=lambda path: (path.name not in _HEADS, path.name)):
            path.unlink()
        sync_folder(out)
    # The config comes last of all: loaders look for it first.
    for name in [*(path for path in new if path not in heads), *sorted(heads, key=lambda path: path.name == CONFIG)]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / name, out / name)
    sync_folder(out)
    shutil.rmtree(partial, ignore_errors=True)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copies the files of a tokenizer; `out` must not contain them. Raises `IoError`."""
    for name in tokenizer_files(folder):
        try:
            shutil.copyfile(folder / name, out / name)
        except OSError as error:
            raise IoError(str(out / name), 0, 0, error.errno or errno.EIO, "write") from error


def tokenizer_files(folder: Path) -> list[str]:
    """Returns the names of a tokenizer's files; raises `StoreError` if the folder contains none."""
    found = [name for name in TOKENIZER if (folder / name).is_file()]
    if not found:
        raise StoreError(f"{folder} contains no file of a tokenizer, such as {TOKENIZER[0]}")
    return found
