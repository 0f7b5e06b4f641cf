"""Inspection of the drives at the start: the run to resume or replace, room for two slots, leftovers of other runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from offload.config import Config
from offload.distributed.process_group import Ranks
from offload.engine.optim.optimizer import Optimizer
from offload.engine.training.module_entries import ModuleEntries
from offload.engine.training.snapshot import Snapshot, persistent_buffers
from offload.engine.training.step_settings import Differences
from offload.errors import StoreError
from offload.hardware.mounts import folder_notices
from offload.layout.memory_plan import PlacedStates
from offload.notices import Remark, shell_command
from offload.sizes import count_of, format_size
from offload.swapper.store import (
    Shortage,
    StoreSpec,
    check_unused,
    find_removal,
    find_shortage,
    other_runs,
    rank_folders,
    read_closed,
    run_status,
)
from offload.swapper.store.folder import CLOSED
from offload.swapper.store.format import layout_difference
from offload.swapper.store.inspection import look

_COLUMN = re.compile(r"(?:-pp\d+of(\d+))?(?:-tp\d+of(\d+))?")
"""End of the name of a run that is a column of a pipeline and of tensor parallelism."""
_SHOWN = 5
"""Number of names in a notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """The run of the configured name on the drives, as all ranks agree on it."""

    on_disk: bool
    """True if any rank has states whose tier is DISK."""
    resume: bool
    replaced: tuple[str, ...]
    """Notice about the run that this start replaces; empty if there is none."""


def find_run(config: Config, on_disk: bool, ranks: Ranks | None) -> FoundRun:
    """Returns the run that a start finds. Collective.

    Args:
        config: The whole config.
        on_disk: True if this rank has states whose tier is DISK.
        ranks: All ranks; None if there is only one.

    Raises:
        StoreError: If the run on the drives and the configured "resume" contradict each other.
    """
    if ranks is not None:
        # Tiers may differ between ranks with different free memory, but either all ranks have a store or none.
        on_disk = any(ranks.share(on_disk))
    resume, replaced = _resume(config, on_disk)
    if ranks is not None:
        # One rank's drive may be empty, if a kill interrupted the first start: `initialize` decides then by the
        # commits.
        resume = any(ranks.share(resume))
    return FoundRun(on_disk=on_disk, resume=resume, replaced=replaced)


def check_division(drives: Sequence[str], run: str, own: str, resume: str) -> None:
    """Raises `StoreError` if a start would resume a run that is divided otherwise by tensor parallelism or a pipeline.

    Args:
        drives: Folders of the drives; empty without any.
        run: Name of the run, without the end by which the columns of tensor parallelism differ.
        own: That end, such as "-tp0of2" or "-pp0of2"; empty without.
        resume: The configured "resume".
    """
    if not drives or resume not in ("auto", "must"):
        return
    for folder in sorted(Path(drives[0]).glob(f"{run}*")):
        end = folder.name.removeprefix(run)
        # Columns of one grid have one size, and differ in their coordinate alone.
        is_ours = _COLUMN.fullmatch(end) is not None
        if not is_ours or _size(end) == _size(own) or not run_status(drives, folder.name).exists:
            continue
        raise StoreError(
            f"{folder} is a run with {_size(end)}, and this start has {_size(own)}: resume with "
            "the division that the run had, or choose another run name"
        )


def _size(end: str) -> str:
    """Returns the sizes of the pipeline and of tensor parallelism that the end of a run's name tells, in words."""
    found = _COLUMN.fullmatch(end)
    assert found is not None, "the names of other runs were left out"
    pipeline, tensor = found.groups()
    tensors = f"tensor parallelism of {tensor}" if tensor else "no tensor parallelism"
    return f"a pipeline of {pipeline} and {tensors}" if pipeline else tensors


def no_room(config: Config, placed: PlacedStates, ranks: Ranks | None) -> str | None:
    """Returns a notice if the drives of any rank have no room for two slots, else None. Collective.

    Args:
        config: The whole config.
        placed: The states in their tiers.
        ranks: All ranks; None if there is only one.
    """
    short = find_shortage(config.drives, placed.two_slots_nbytes * (1 if ranks is None else ranks.here))
    if ranks is not None:
        short = next((Shortage(*found) for found in ranks.share(short) if found is not None), None)
    if short is None:
        return None
    return (
        f"durability none: two slots need {format_size(short.need)}, {short.path} has {format_size(short.free)} free; "
        "one slot is used and overwritten in place, so a killed run cannot be resumed"
    )


def _resume(config: Config, on_disk: bool) -> tuple[bool, tuple[str, ...]]:
    """Returns True to resume, and a notice about the run that this start replaces."""
    offload = config.offload
    if not config.drives or not (on_disk or offload.wants_store):
        return _resume_without_store(config), ()
    status = run_status(config.drives, offload.run)
    folder = os.path.join(config.drives[0], offload.run)
    if status.exists and offload.resume in ("never", "restart"):
        _check_ended(folder, closed=status.closed, restart=offload.resume == "restart")
        size = format_size(find_removal(Path(folder)).nbytes)
        how = "which was closed at its end" if status.closed else "which did not end"
        keeps = '"resume": "auto" would resume such a run, another run name keeps it'
        return False, (f"the run in {folder} ({size}), {how}, is replaced; {keeps}",)
    if status.finished is not None and not status.exists and offload.resume not in ("never", "restart"):
        raise StoreError(
            f"{folder} was finished at step {status.finished.get('steps')}, so no step is left to resume; choose "
            'another run name, or start over with "resume": "never" in the "offload" block (offload train: '
            "--resume never)"
        )
    if not status.exists and offload.resume == "must":
        raise StoreError(f'"resume" is must, but {folder} holds no committed step')
    return status.exists, ()


def _resume_without_store(config: Config) -> bool:
    """Returns True if a start that needs no store keeps that of the run it finds, and resumes it."""
    offload = config.offload
    # Nothing of such a run is committed, so no later start can resume it either.
    if offload.resume == "must":
        raise StoreError('"resume" is must, but this configuration keeps no store to resume from')
    if offload.resume != "auto" or not config.drives or not run_status(config.drives, offload.run).exists:
        return False
    if offload.durability == "auto":
        return True  # the machine has more memory now, or tiers changed: keep the store
    raise StoreError(
        f"{os.path.join(config.drives[0], offload.run)} contains a run, but this configuration keeps no "
        'store: give the config the tiers of the run, or set "durability": "step", or choose another run name'
    )


def _check_ended(folder: str, *, closed: bool, restart: bool) -> None:
    """Raises `StoreError` if a start may not replace the run in `folder`.

    Args:
        folder: The run's folder on the first drive.
        closed: True if the run was closed at its end.
        restart: True if the user asks to replace a run that did not end, too.
    """
    # A run in use must not be deleted under the process that trains it.
    check_unused(Path(folder))
    # A run that was closed may go; `check_replaced` asks later whether its last step was saved.
    if not (closed or restart):
        raise StoreError(
            f"{folder} holds a run that did not end, or that was kept (--keep, destroy(remove=False)); resume the run "
            'with "resume": "auto" in the "offload" block, or start over with "resume": "restart" there (offload '
            "train: --resume auto, --resume restart), or "
            f"delete the run with `{shell_command('rm', folder)}`, or choose another run name"
        )


def check_replaced(folder: Path, spec: StoreSpec, job: Mapping[str, Any]) -> None:
    """Checks that nothing is lost if this start replaces the run in `folder`, which was closed at its end.

    Nothing is if the user has saved the last step, or if this start does the same job: it makes the run again.

    Args:
        folder: the folder of the run on its first drive.
        spec: what this start stores.
        job: made by `job_of`.

    Raises:
        StoreError: if the run was another job, or if that cannot be told. Nothing was changed.
    """
    note = read_closed(folder)
    if note is None or note.get("saved"):
        return
    found = next((each.manifest for each in map(look, rank_folders(folder)) if each.manifest is not None), None)
    layout = "its manifest cannot be read" if found is None else layout_difference(spec, found.spec)
    differences = [str(Differences(note.get("job", {}), job)), layout or ""]
    if "job" not in note:
        differences = [f"its note {CLOSED} does not say what it was"]
    if not any(differences):
        return
    raise StoreError(
        f"{folder} holds a run that ended at step {note.get('steps', '?')} and that nothing has saved since, such as "
        f"save_checkpoint or save_pretrained, and this start is another job: {', '.join(filter(None, differences))}. "
        'Give this start another run name ("run" in the "offload" block, offload train: --run) or another nvme_path, '
        'or replace the run with "resume": "restart" there (--resume restart). '
        f"`{shell_command('export', folder, 'FOLDER')}` writes its weights, and any start may then replace it"
    )


def about_folders(config: Config) -> tuple[str, ...]:
    """Returns warnings of folders that may be on the wrong drive, and a notice of other runs in them."""
    misplaced = (line for line in folder_notices(config.drives) if not isinstance(line, Remark))
    return (*(misplaced if config.wants_store else ()), *_leftovers(config))


def _leftovers(config: Config) -> tuple[str, ...]:
    """Returns a notice if other runs that no process uses take room on the drives. They are never deleted here."""
    found = other_runs(config.drives, config.offload.run)
    if not found:
        return ()
    shown = ", ".join(f"{each.path} ({format_size(each.nbytes)})" for each in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    are = "other run that no process uses takes" if len(found) == 1 else "other runs that no process uses take"
    return (
        Remark(
            f"{len(found)} {are} {format_size(sum(each.nbytes for each in found))}: {shown}{more}; "
            f"`{shell_command('inspect', found[0].path.parent)}` describes them, `offload rm` deletes one"
        ),
    )


def check_fits(progress: Snapshot, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `StoreError` if buffers, further entries of the state dict or parameter groups differ from the run's."""
    mine = {name: list(buffer.shape) for name, buffer in persistent_buffers(model).items()}
    theirs = {name: list(buffer.shape) for name, buffer in progress.buffers.items()}
    if mine != theirs:
        name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
        raise StoreError(f"buffer {name} has shape {theirs.get(name)} in the run and {mine.get(name)} in this model")
    ModuleEntries(model, commits=False).check_fits(progress.entries, "the run")
    if len(progress.facts["groups"]) != len(optimizer.param_groups):
        raise StoreError(
            f"the run contains {count_of(len(progress.facts['groups']), 'group')} of parameters, this optimizer "
            f"contains {len(optimizer.param_groups)}"
        )
