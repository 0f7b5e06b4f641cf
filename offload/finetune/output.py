"""The owner of a run and an output folder: a job's identity, checks of the folder, and a mark until the job has ended.

The identity of a job of `offload train` is its model, data, output folder and settings. A run's commits contain the
identity, and so does the note of a finished run. Under `--resume auto` a job therefore neither resumes from the states
of another job, nor counts as finished because another job has ended.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from offload.config import Config
from offload.errors import ConfigError, StoreError
from offload.fileio import foreign_owner, read_inner, real_path
from offload.fileio.inner_files import sampled_crc32
from offload.finetune.options import Options
from offload.kernels._native import supported_isas
from offload.kernels.settings import isa_from
from offload.presets import PRESETS
from offload.records import parse
from offload.sizes import MIB
from offload.swapper.store import run_status
from offload.swapper.store.folder import FINISHED

_HEADS = ("config.json", "adapter_config.json")
"""Config files of a model and of adapters."""
_TRIED = ".offload-tried-"
"""Prefix of the folder that each rank creates to test for write access; other ranks must ignore the folder."""


def output_of(options: Options, run: str) -> tuple[Path | None, str]:
    """Returns the folder for the trained model, and a line about it: by default ./RUN-output.

    There is no default folder with --keep, since the swap files are the model, or for a preset that learns Python's
    library, which is a demonstration. A default folder that belongs to another user is a `ConfigError`.
    """
    trained = f"the trained {'model' if options.lora is None else 'adapter'}"
    none = f"{trained} is not saved"
    if options.output is not None:
        return options.output, f"{trained} will be in {options.output}"
    if options.no_output:
        return None, f"{none}, as --no-output asks"
    if options.save_every is None and options.push_to_hub is None:
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
    return folder, f"{trained} will be in ./{run}-output (--output names another folder)"


def check_output(folder: Path | None, may_be_there: bool) -> None:
    """Raises `ConfigError` if a model cannot be saved to `folder`; None passes.

    With `may_be_there`, files in `folder` may be this job's own, from an earlier save.
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


def is_marked(folder: Path | None, identity: Identity) -> bool:
    """Returns True if the folder contains the mark of this job; False for None."""
    try:
        before = {} if folder is None else parse(read_inner(folder / MARK, 1, MIB))
    except (OSError, ValueError):
        return False
    return is_identity(before) and bool(before) and not [*differences(identity, before)]


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
    """Steps that the run has made; None if the run's note does not contain the number."""
    total_steps: int
    """Steps that were requested now: at most those that the run has made."""
    output: Path | None


def find_finished(config: Config, identity: Identity) -> Finished | None:
    """Returns the message for a job that has ended already under `--resume auto`, else None.

    Under `--resume must` a finished run is an error, which `initialize` raises.
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
        others = [*differences(identity, job)]
        if others:
            raise StoreError(
                f"{ended}, and was another job: {'; '.join(others)}. Give another --run, or --resume restart to "
                f"replace that run"
            )
        if identity.output is not None and not has_model(Path(identity.output)):
            raise StoreError(
                f"{ended}, and its model in {identity.output} does not exist any more; --resume restart trains it again"
            )
    output = None if identity.output is None else Path(identity.output)
    again = "--resume restart starts it again" + (", with another --output" if output is not None else "")
    return Finished(
        message=f"{ended}; nothing to do. {again}",
        run=run,
        steps=status.finished.get("steps"),
        total_steps=identity.steps,
        output=output,
    )


_LOSSES = {True: "in chunks", False: "from all logits"}


class Identity(NamedTuple):
    """The identity of a job, as stored in JSON."""

    model: str
    """Name of a preset, or absolute path of a folder."""
    weights: str
    """Checksum of the folder's config and of samples of its weights; empty for a preset."""
    lora: str | None
    text: Mapping[str, Any]
    """Length and checksum of the data after tokenizing and packing."""
    output: str | None
    steps: int
    settings: Mapping[str, Any]
    """Settings of learning in the config, by key."""
    schedule: Mapping[str, Any] | None = None
    """The block of the schedule in the config; None for a constant rate."""
    chunked_loss: bool | None = None
    """True for a loss in chunks, False for a loss from all logits; None to keep the loss with which the run began."""
    kernels: str | None = None
    """The kind of kernels of the blocks; None to keep the kernels with which the run began."""


def arithmetic() -> dict[str, Any]:
    """Returns what decides the bits of torch's products on a CPU, and what the kernels of this library run in."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "kernel_instructions": isa_from(os.environ, supported_isas()),
    }


def weights_of(folder: Path | None) -> str:
    """Returns a checksum of the config and, for each weight file, of its name, its size and samples.

    The folder's path is not part of the checksum, so a moved folder stays the same model. Samples suffice to tell
    models apart and take little time even for hundreds of gigabytes.
    """
    if folder is None:
        return ""
    crc = zlib.crc32((folder / "config.json").read_bytes())
    for path in _weight_files(folder):
        nbytes = path.stat().st_size
        crc = zlib.crc32(f"{path.name} {nbytes}".encode(), crc)
        crc = sampled_crc32(path, crc)
    return f"{crc:08x}"


def _weight_files(folder: Path) -> list[Path]:
    return sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))


def is_identity(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Returns True if `value` has the form of a stored identity of any version; a file may contain anything."""
    if not isinstance(value, Mapping):
        return False
    kinds = {"model": str, "weights": str, "text": Mapping, "settings": Mapping, "steps": int}
    return all(name not in value or isinstance(value[name], kind) for name, kind in kinds.items())


def other_model(identity: Identity, before: Mapping[str, Any]) -> str | None:
    """Returns a sentence on the model if the earlier job had another one, else None."""
    if before.get("weights", identity.weights) == identity.weights and (
        identity.weights or before.get("model") == identity.model
    ):
        return None
    now = "whose files have changed" if _weight_files(Path(identity.model)) else "which has no weight files any more"
    same = before.get("model") == identity.model
    return f"--model was {before.get('model')}, {now if same else f'is {identity.model}'}"


def differences(identity: Identity, before: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each difference from an earlier job's identity. Fewer steps are not a difference."""
    model = other_model(identity, before)
    if model is not None:
        yield model
    if before.get("lora") != identity.lora:
        yield f"--lora was {before.get('lora')}, is {identity.lora}"
    text = before.get("text", {})
    changed = [
        f"{name} was {text.get(name)}, is {value}" for name, value in identity.text.items() if text.get(name) != value
    ]
    if changed:
        yield f"the data differ ({', '.join(changed)})"
    settings = before.get("settings", identity.settings)
    for name in dict.fromkeys((*settings, *identity.settings)):
        if settings.get(name) != identity.settings.get(name):
            yield f"{name} was {settings.get(name)}, is {identity.settings.get(name)}"
    # The block contains the number of steps, so the schedules of two lengths differ in any case. An identity that an
    # earlier version has stored contains no schedule.
    if before.get("steps") == identity.steps and before.get("schedule", identity.schedule) != identity.schedule:
        yield f"the schedule was {json.dumps(before['schedule'])}, is {json.dumps(identity.schedule)}"
    if identity.chunked_loss is not None and before.get("chunked_loss") not in (None, identity.chunked_loss):
        now, then = _LOSSES[identity.chunked_loss], _LOSSES[not identity.chunked_loss]
        yield f"the loss was computed {then}, is computed {now}"
    if identity.kernels is not None and before.get("kernels") not in (None, identity.kernels):
        yield f"--kernels was {before['kernels']}, is {identity.kernels}"
    if before.get("output") != identity.output:
        yield f"--output was {before.get('output')}, is {identity.output}"
    if before.get("steps", identity.steps) < identity.steps:
        yield f"the steps were {before['steps']}, are {identity.steps}"
