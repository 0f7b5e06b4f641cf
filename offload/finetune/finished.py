"""A job of `offload train` that has ended already: the same command again has nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from offload.config import Config
from offload.errors import StoreError
from offload.finetune.identity import Identity, differences, is_identity
from offload.finetune.output import has_model
from offload.swapper.store import run_status
from offload.swapper.store.folder import FINISHED


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
