"""The last checkpoint of a Trainer's training, and the line about it for a training that ends early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from offload.notices import announce


class LastCheckpoint(TrainerCallback):
    """The checkpoint from which a training that ends now would resume."""

    def __init__(self) -> None:
        """Starts without a checkpoint."""
        self.folder: Path | None = None
        """The last checkpoint that is complete: the one that was resumed from, or a later one; None without any."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets the checkpoints of an earlier training, which did not begin where this one does.

        Args:
            args: transformers' `TrainingArguments`.
            state: the Trainer's state.
            control: not used.
            **kwargs: not used.
        """
        # A training that resumes has loaded its checkpoint by now, and has made that checkpoint's steps.
        if not state.global_step:
            self.folder = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes a checkpoint that was saved. The Trainer calls this behind the last file of the checkpoint.

        Args:
            args: transformers' `TrainingArguments`.
            state: the Trainer's state.
            control: not used.
            **kwargs: not used.
        """
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        # A search of hyperparameters saves elsewhere, and resumes nothing.
        self.folder = folder if folder.is_dir() else None


@contextmanager
def announced_end(trainer: Any, last: LastCheckpoint) -> Iterator[None]:
    """A context for a training, of which an error or a Ctrl-C that ends it is told with what is kept.

    Args:
        trainer: the Trainer.
        last: its last checkpoint.
    """
    try:
        yield
    except BaseException as error:
        # Without an engine nothing was trained, and the error says enough.
        if trainer.engine is not None and trainer.is_world_process_zero():
            announce(line_of_the_end(error, trainer.state.global_step, last, trainer.args))
        raise


def line_of_the_end(error: BaseException, steps: int, last: LastCheckpoint, args: Any) -> str:
    """Returns what is kept of a training that an exception ends, and how it goes on.

    Args:
        error: the exception, a Ctrl-C too.
        steps: steps that were trained, those before a resume included.
        last: the last checkpoint.
        args: transformers' `TrainingArguments`.
    """
    ended = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    line = f"the training ended after step {steps} by {ended}"
    if last.folder is None:
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        when = f"save_steps is {args.save_steps:g}" if strategy == "steps" else f'save_strategy is "{strategy}"'
        return f"{line}, before a checkpoint was saved, so nothing is kept: {when}"
    weights = " with its weights and empty optimizer states (save_only_model)" if args.save_only_model else ""
    return f'{line}; {last.folder} is kept: train(resume_from_checkpoint="{last.folder}") goes on from there{weights}'
