"""A folder `checkpoint-<step>` of a Trainer: whether it contains an engine's checkpoint, and whether it is complete."""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from offload.checkpoint.files import LATEST
from offload.engine.engine import Engine
from offload.engine.snapshot import GeneratorStates
from offload.errors import StoreError
from offload.fileio.inner_files import open_regular, read_bounded
from offload.notices import announce
from offload.records import parse
from offload.sizes import MIB

logger = logging.getLogger("offload")

SCHEDULER = "scheduler.pt"
"""File of the schedule's state."""
_MOST_OF_STATE = 256 * MIB
"""Most bytes of the Trainer's JSON file, which contains a line for each log of a run."""
_TRAINERS_STATE, _STOCK_OPTIMIZER = "trainer_state.json", "optimizer.pt"


def check_resumable(folder: Path, args: Any) -> None:
    """Raises `StoreError` if a checkpoint of a Trainer is missing, incomplete, or the stock Trainer's."""
    if not folder.is_dir():
        raise StoreError(f"resume_from_checkpoint is {folder}, which is not a folder")
    if (folder / _STOCK_OPTIMIZER).exists() and not has_engine(folder):
        raise StoreError(
            f"{folder} is a checkpoint of the stock Trainer, whose optimizer.pt an engine does not read: start "
            f"with its weights, from_pretrained({str(folder)!r}), and without resume_from_checkpoint"
        )
    _check_complete(folder, args)


def load_into(engine: Engine, folder: str, device: torch.device) -> dict[str, Any]:
    """Loads the engine's checkpoint from a checkpoint of the Trainer, and returns the client state.

    The random generators stay as they are: the Trainer restores them when it fetches the first batch. Until then a
    sampler draws the order of the rows again, as at the start of the epoch.
    """
    generators = GeneratorStates.of(device)
    _, state = engine.load_checkpoint(folder)
    engine.restore_generators()  # else the next call of the engine would
    generators.restore(device)
    return state


def last_complete(resume: Any, args: Any) -> Any:
    """Returns `resume`, or in place of True the last complete checkpoint.

    The Trainer writes its state file last. So a kill during a save leaves a folder without a state file, and the
    previous checkpoint is complete. If no checkpoint is complete, the result is `resume` itself.
    """
    newest = get_last_checkpoint(args.output_dir) if resume is True and Path(args.output_dir).is_dir() else None
    if newest is None or _is_whole(Path(newest)):
        return resume
    last = _whole_before(Path(newest))
    if last is None:
        return resume
    announce(f"the save of {newest} was cut short: the training resumes from the checkpoint before, {last}")
    return str(last)


def _whole_before(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint of an earlier step in the same parent folder; None if there is none."""
    number = _number(folder)
    siblings = folder.parent.glob("checkpoint-*")
    whole = [sibling for sibling in siblings if _number(sibling) < number and _is_whole(sibling)]
    return max(whole, key=_number, default=None)


def _number(folder: Path) -> float:
    """Returns the step of a checkpoint; infinity for a folder that is not a checkpoint."""
    step = folder.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else math.inf


def _is_whole(folder: Path) -> bool:
    return (folder / _TRAINERS_STATE).is_file() and _is_complete(folder / _TRAINERS_STATE)


def has_engine(folder: Path) -> bool:
    """Returns True if a checkpoint of the Trainer contains an engine's; without the file that names it an error."""
    if (folder / LATEST).is_file():
        return True
    if leftover := sorted(folder.glob("global_step*")):
        raise StoreError(
            f"{folder} contains the engine's states in {leftover[-1].name}, but not the file {LATEST} that names them; "
            f"write this file: echo {leftover[-1].name} > {folder / LATEST}"
        )
    return False


def _check_complete(folder: Path, args: Any) -> None:
    """Raises `StoreError` if a file that the Trainer reads is missing or truncated; random states may be missing."""
    rng = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
    resumes = has_engine(folder)  # otherwise only its weights are loaded
    needed = (_TRAINERS_STATE, SCHEDULER) if resumes else (_TRAINERS_STATE,)
    for name in (_TRAINERS_STATE, SCHEDULER, rng):
        there = (folder / name).exists()
        if (there and not _is_complete(folder / name)) or (not there and name in needed):
            before = _whole_before(folder)
            advice = (
                "no checkpoint before it is complete" if before is None else f"resume from {before}, the one before"
            )
            raise StoreError(
                f"{folder} contains no complete {name}: the save was cut short, or the file is lost; {advice}, or "
                f"start with its weights, from_pretrained({str(folder)!r}), and without resume_from_checkpoint"
            )
    if resumes and not (folder / rng).exists():
        logger.warning(
            "%s contains no %s: dropout continues with other random numbers than the uninterrupted run", folder, rng
        )


def _is_complete(path: Path) -> bool:
    try:
        if path.suffix != ".json":
            # torch.save writes a zip file, whose table of contents comes last: a truncated file has no table.
            with open_regular(path) as file:
                return zipfile.is_zipfile(file)
        parse(read_bounded(path, _MOST_OF_STATE))
    except (OSError, ValueError):
        return False
    return True


# -- last checkpoint -----------------------------------------------------------------------------------
#
# The last checkpoint of a Trainer's training, and the log line that names it if the training ends early.


class LastCheckpoint(TrainerCallback):
    """The checkpoint from which a training that ends now would resume."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """The last checkpoint that is complete: the one that was resumed from, or a later one; None without any."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets the checkpoints of an earlier training, unless this training resumes from one."""
        # A resumed training has loaded its checkpoint by now, so its step is above 0.
        if not state.global_step:
            self.folder = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records a saved checkpoint. The Trainer calls this after it has written the last file."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        # A search of hyperparameters saves to other folders, and resumes nothing.
        self.folder = folder if folder.is_dir() else None


@contextmanager
def announced_end(trainer: Any, last: LastCheckpoint) -> Iterator[None]:
    """A context for a training. If an error or a Ctrl-C ends the training, logs the checkpoint that is kept."""
    try:
        yield
    except BaseException as error:
        # Without an engine nothing was trained, and the error needs no addition.
        if trainer.engine is not None and trainer.is_world_process_zero():
            announce(line_of_the_end(error, trainer.state.global_step, last, trainer.args))
        raise


def line_of_the_end(error: BaseException, steps: int, last: LastCheckpoint, args: Any) -> str:
    """Returns a log line: what is kept of a training that `error` ends after `steps` steps, and how to resume it."""
    ended = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    line = f"the training ended after step {steps} by {ended}"
    if last.folder is None:
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        when = f"save_steps is {args.save_steps:g}" if strategy == "steps" else f'save_strategy is "{strategy}"'
        return f"{line}, before a checkpoint was saved, so nothing is kept: {when}"
    weights = " with its weights and empty optimizer states (save_only_model)" if args.save_only_model else ""
    return f'{line}; {last.folder} is kept: train(resume_from_checkpoint="{last.folder}") goes on from there{weights}'
