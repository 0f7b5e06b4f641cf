"""Search for a checkpoint of offload; for another program's checkpoint the error names `offload import`."""

from __future__ import annotations

from pathlib import Path

from offload.checkpoint.directory import holds_run
from offload.checkpoint.files import LATEST, find, is_checkpoint
from offload.errors import StoreError
from offload.notices import shell_command
from offload.swapper.store import rank_folders


def find_own(path: Path, tag: str | None = None) -> Path | None:
    """Returns the checkpoint that a folder is, or its latest; None for the folder of a run, or one that holds none.

    A Trainer's output folder has the checkpoints in its folders `checkpoint-<step>`. Without a tag the result is the
    latest checkpoint, or `path` itself.
    """
    # Checkpoints may have been saved into the folder of a run, but the run's swap files have later steps.
    checkpoint = None if tag is None and holds_run(path) else find(path, tag)
    folder = None if checkpoint is None else Path(checkpoint)
    ours = bool(rank_folders(path)) if folder is None else is_checkpoint(folder)
    if not ours:
        # Imported here, since it imports torch, which commands on folders of offload do not need.
        from offload.checkpoint.foreign import is_foreign

        other = folder or path
        if is_foreign(other):
            raise StoreError(
                f"{other} is a checkpoint of another program, such as DeepSpeed: "
                f"`{shell_command('import', other, 'FOLDER')}` writes one of offload, which this reads"
            )
        if tag is None and folder is None and (saved := of_trainer(path)):
            return saved[-1]
    return folder


def of_trainer(output: Path) -> list[Path]:
    """Returns the checkpoints in the folders `checkpoint-<step>` of a Trainer, in the order of their steps."""
    steps = [folder for folder in output.glob("checkpoint-*") if folder.name.removeprefix("checkpoint-").isdecimal()]
    # A save that was cut short has not written `latest` yet.
    whole = [step for step in sorted(steps, key=lambda step: int(step.name[11:])) if (step / LATEST).is_file()]
    checkpoints = (find(folder, None) for folder in whole)
    return [Path(path) for path in checkpoints if path is not None and is_checkpoint(Path(path))]
