"""The folder of `--output`: checked before training, and marked as its job's until that has ended."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from offload.config import Config
from offload.errors import ConfigError
from offload.finetune.identity import Identity, differences

_HEADS = ("config.json", "adapter_config.json")
"""Of a model, and of adapters."""
_TRIED = ".offload-tried-"
"""A folder that another rank makes at this moment, to see whether it can."""


def check_output(folder: Path | None, may_be_there: bool) -> None:
    """Raise `ConfigError` where a model cannot be saved to `folder`; `may_be_there` where the run may have done it."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is not a folder; give a folder, or a name that is not there")
    if folder.exists() and not may_be_there and any(not path.name.startswith(_TRIED) for path in folder.iterdir()):
        raise ConfigError(f"--output {folder} is not empty, and nothing in it will be replaced; give another folder")
    above = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_TRIED, dir=above))  # what access() says is not so for root, or on NFS
    except OSError as error:
        raise ConfigError(
            f"--output {folder} cannot be written: nothing can be made in {above} ({error.strerror}); give another "
            f"folder"
        ) from error


MARK = ".offload-job.json"
"""In a folder of checkpoints whose job has not ended: whose they are, so that it may begin again after a kill."""


def is_marked(folder: Path | None, mine: Identity) -> bool:
    """Whether this job, and no other, has written to the folder."""
    try:
        before = {} if folder is None else json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(before, dict) and bool(before) and not [*differences(mine, before)]


def check_apart(folder: Path | None, config: Config) -> None:
    """Raise `ConfigError` where a model would lie among the swap files, with which it would be deleted."""
    if folder is None:
        return
    for drive in config.drives:
        run = Path(drive).resolve() / config.offload.run
        if run in (folder.resolve(), *folder.resolve().parents):
            raise ConfigError(f"--output {folder} lies in the run's own folder {run}, which goes; give another folder")


def has_model(folder: Path) -> bool:
    """Whether a model, or adapters, have been saved there."""
    return any((folder / name).is_file() for name in _HEADS)
