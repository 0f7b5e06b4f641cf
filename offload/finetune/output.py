"""The folder of `--output`: checks before training, and a mark of the owning job until the job has ended."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from offload.config import Config
from offload.errors import ConfigError, StoreError
from offload.fileio import foreign_owner, read_inner, real_path
from offload.finetune.identity import Identity, differences, is_identity
from offload.finetune.options import Options
from offload.presets import PRESETS
from offload.records import parse
from offload.sizes import MIB
from offload.swapper.store import run_status
from offload.swapper.store.folder import FINISHED

# -- output --------------------------------------------------------------------------------------------


_HEADS = ("config.json", "adapter_config.json")
"""Config files of a model and of adapters."""
_TRIED = ".offload-tried-"
"""Prefix of the folder that each rank creates to test for write access; other ranks must ignore the folder."""


def output_of(options: Options, run: str) -> tuple[Path | None, str]:
    """Returns the folder in which the model is saved, and a line about it: by default ./RUN-output.

    With --keep the swap files are the model. A preset that learns Python's own library is a demonstration, whose model
    nobody uses. Both have no default.

    Args:
        options: the options of the command.
        run: name of the run.

    Raises:
        ConfigError: that folder is another user's.
    """
    none = "the trained model is not saved"
    if options.output is not None:
        return options.output, f"the trained model will be in {options.output}"
    if options.no_output:
        return None, f"{none}, as --no-output asks"
    if options.save_every is None:
        if options.keep:
            return None, f"{none}; --keep keeps it in the swap files, of which `offload export` makes a folder"
        if options.model in PRESETS and not (options.data or options.text):
            return None, f"{none}: this is a demonstration; --output FOLDER saves it"
    folder = Path(f"{run}-output")
    if owner := foreign_owner(folder):
        raise ConfigError(
            f"the trained model would be in ./{folder}, which is of {owner}, who could change it at any time; name a "
            "folder with --output"
        )
    return folder, f"the trained model will be in ./{run}-output (--output names another folder)"


def check_output(folder: Path | None, may_be_there: bool) -> None:
    """Raises `ConfigError` if a model cannot be saved to `folder`.

    Args:
        folder: the folder; None passes.
        may_be_there: True if this job may have saved to `folder` before, so that files in it are its own.
    """
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is not a folder; give a folder, or a name that does not exist")
    if folder.exists() and not may_be_there and any(not path.name.startswith(_TRIED) for path in folder.iterdir()):
        raise ConfigError(
            f"--output {folder} is not empty, and nothing in it will be replaced; move it away, or give another folder "
            "or --no-output"
        )
    above = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    # Only an attempt shows whether the folder can be written: access() is wrong for root and on NFS.
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_TRIED, dir=above))
    except OSError as error:
        raise ConfigError(
            f"--output {folder} cannot be written: no folder can be made in {above} ({error.strerror}); give another "
            f"folder"
        ) from error


MARK = ".offload-job.json"
"""File with the job's identity, in an output folder whose job has not ended. A killed job that starts again recognizes
its own folder by this file."""


def has_mark(folder: Path | None) -> bool:
    """Returns True if a job that has not ended saves into the folder; False for None."""
    return folder is not None and (folder / MARK).exists()


def is_marked(folder: Path | None, mine: Identity) -> bool:
    """Returns True if the folder contains the mark of this job; False for None."""
    try:
        before = {} if folder is None else parse(read_inner(folder / MARK, 1, MIB))
    except (OSError, ValueError):
        return False
    return is_identity(before) and bool(before) and not [*differences(mine, before)]


def check_apart(folder: Path | None, config: Config) -> None:
    """Raises `ConfigError` if `folder` is inside the run folder, whose deletion would delete the model too."""
    if folder is None:
        return
    for drive in config.drives:
        run = real_path(Path(drive)) / config.offload.run
        if run in (real_path(folder), *real_path(folder).parents):
            raise ConfigError(
                f"--output {folder} is in the run's own folder {run}, which the run deletes; give another folder"
            )


def has_model(folder: Path) -> bool:
    """Returns True if `folder` contains a saved model or saved adapters."""
    return any((folder / name).is_file() for name in _HEADS)


# -- finished ------------------------------------------------------------------------------------------
#
# A job of `offload train` that has ended already: the same command again has nothing to do.


class Finished(NamedTuple):
    """A run that has ended already, with a message for the user."""

    message: str
    run: str
    steps: int | None
    """Steps that the run has made; None if its note does not say."""
    total_steps: int
    """Steps that were requested now: at most those that the run has made."""
    output: Path | None


def find_finished(config: Config, mine: Identity) -> Finished | None:
    """Returns the message for a job that has ended already under `--resume auto`, else None.

    Under `--resume must` a finished run is an error, which `initialize` raises.

    Raises:
        StoreError: the finished job differs from this one, or its saved model is missing.
    """
    drives, run = config.drives, config.offload.run
    if not (drives and config.wants_store) or config.offload.resume != "auto":
        return None
    status = run_status(drives, run)
    if status.exists or status.finished is None:
        return None
    note = Path(drives[0]) / run / FINISHED
    job = status.finished.get("job")
    # A note without a job was written by another program than `offload train`.
    if "steps" not in status.finished or not (job is None or is_identity(job)):
        raise StoreError(
            f"{note} does not say how run {run} ended (expected JSON with steps, date and job); move that file away to "
            "train this job, or give another --run"
        )
    ended = f"run {run} under {drives[0]} ended at step {status.finished.get('steps')} on {status.finished.get('date')}"
    if job is not None:
        others = [*differences(mine, job)]
        if others:
            raise StoreError(
                f"{ended}, and was another job: {'; '.join(others)}. Give another --run, or --resume restart to "
                f"replace that run"
            )
        if mine.output is not None and not has_model(Path(mine.output)):
            raise StoreError(
                f"{ended}, and its model in {mine.output} does not exist any more; --resume restart trains it again"
            )
    output = None if mine.output is None else Path(mine.output)
    again = "--resume restart starts it again" + (", with another --output" if output is not None else "")
    return Finished(
        message=f"{ended}; nothing to do. {again}",
        run=run,
        steps=status.finished.get("steps"),
        total_steps=mine.steps,
        output=output,
    )
