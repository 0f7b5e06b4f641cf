"""A folder `checkpoint-<step>` of a Trainer: whether it contains an engine's checkpoint, and whether it is complete."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

from offload.engine.checkpoint.files import LATEST
from offload.errors import StoreError

logger = logging.getLogger("offload")

SCHEDULER = "scheduler.pt"
"""File of the schedule's state."""
_TRAINERS_STATE, _STOCK_OPTIMIZER = "trainer_state.json", "optimizer.pt"


def check_resumable(folder: Path, args: Any) -> None:
    """Checks a checkpoint before a training resumes from it.

    Args:
        folder: a checkpoint of the Trainer.
        args: transformers' `TrainingArguments`.

    Raises:
        StoreError: if the folder does not exist, is incomplete, or was written by the stock Trainer.
    """
    if not folder.is_dir():
        raise StoreError(f"resume_from_checkpoint is {folder}, which is not a folder")
    if (folder / _STOCK_OPTIMIZER).exists() and not has_engine(folder):
        raise StoreError(
            f"{folder} is a checkpoint of the stock Trainer, whose optimizer.pt an engine does not read: start "
            f"with its weights, from_pretrained({str(folder)!r}), and without resume_from_checkpoint"
        )
    _check_complete(folder, args)


def has_engine(folder: Path) -> bool:
    """Returns True if a checkpoint of the Trainer contains one of an engine.

    Raises:
        StoreError: if the engine's states are present, but not the file that names them.
    """
    if (folder / LATEST).is_file():
        return True
    if leftover := sorted(folder.glob("global_step*")):
        raise StoreError(
            f"{folder} contains the engine's states in {leftover[-1].name}, but not the file {LATEST} that names them; "
            f"write this file: echo {leftover[-1].name} > {folder / LATEST}"
        )
    return False


def has_adapters(model: Any) -> bool:
    """Returns True if a model has adapters of peft: only these are saved, since frozen weights are the base model's.

    Args:
        model: the Trainer's model.
    """
    return hasattr(model, "peft_config")


def _check_complete(folder: Path, args: Any) -> None:
    """Checks the files that the Trainer itself reads. Missing random states cause only a warning.

    Args:
        folder: a checkpoint of the Trainer.
        args: transformers' `TrainingArguments`.

    Raises:
        StoreError: if a file is missing or truncated.
    """
    rng = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
    resumes = has_engine(folder)  # otherwise only its weights are loaded
    needed = (_TRAINERS_STATE, SCHEDULER) if resumes else (_TRAINERS_STATE,)
    for name in (_TRAINERS_STATE, SCHEDULER, rng):
        there = (folder / name).exists()
        if (there and not _is_complete(folder / name)) or (not there and name in needed):
            raise StoreError(
                f"{folder} contains no complete {name}: the save was cut short, or the file is lost; remove the "
                f"folder and resume from the checkpoint before, or start with its weights, "
                f"from_pretrained({str(folder)!r}), and without resume_from_checkpoint"
            )
    if resumes and not (folder / rng).exists():
        logger.warning(
            "%s contains no %s: dropout continues with other random numbers than the uninterrupted run", folder, rng
        )


def _is_complete(path: Path) -> bool:
    """Returns True if a file of the Trainer can be read to its end."""
    if path.suffix != ".json":
        # torch.save writes a zip file, whose table of contents comes last: a truncated file has no table.
        return zipfile.is_zipfile(path)
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True
