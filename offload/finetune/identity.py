"""The identity of a job of `offload train`: model, data, output folder and settings.

A run's commits contain the identity, and so does the note of a finished run. Under `--resume auto` a job
therefore neither resumes from the states of another job, nor counts as finished because another job has ended.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from offload.fileio.inner_files import open_regular

_LOSSES = {True: "in chunks", False: "from all logits"}
_SAMPLE = 1 << 16
_SAMPLES = 4


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
    """True for a loss in chunks, False for one from all logits; None for a job that takes what its run has."""


def weights_of(folder: Path | None) -> str:
    """Returns a checksum of the config and, for each weight file, of its name, its size and samples.

    The folder's path is not part of the checksum, so a moved folder stays the same model. Samples suffice to tell
    models apart and take little time even for hundreds of gigabytes.

    Returns:
        Eight hexadecimal digits; empty for None, which is a preset.
    """
    if folder is None:
        return ""
    crc = zlib.crc32((folder / "config.json").read_bytes())
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        nbytes = path.stat().st_size
        crc = zlib.crc32(f"{path.name} {nbytes}".encode(), crc)
        with open_regular(path) as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(nbytes - _SAMPLE, 0) // (_SAMPLES - 1))
                crc = zlib.crc32(file.read(_SAMPLE), crc)
    return f"{crc:08x}"


def is_identity(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Returns True for what `Identity._asdict()` or an earlier version has stored; a file may contain anything."""
    if not isinstance(value, Mapping):
        return False
    kinds = {"model": str, "weights": str, "text": Mapping, "settings": Mapping, "steps": int}
    return all(name not in value or isinstance(value[name], kind) for name, kind in kinds.items())


def other_model(mine: Identity, before: Mapping[str, Any]) -> str | None:
    """Returns a sentence on the model if the earlier job's was another one, else None."""
    if before.get("weights", mine.weights) == mine.weights and (mine.weights or before.get("model") == mine.model):
        return None
    same = before.get("model") == mine.model
    return f"--model was {before.get('model')}, {'whose files have changed' if same else f'is {mine.model}'}"


def differences(mine: Identity, before: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each difference from an earlier job's identity. Fewer steps than before are none."""
    model = other_model(mine, before)
    if model is not None:
        yield model
    if before.get("lora") != mine.lora:
        yield f"--lora was {before.get('lora')}, is {mine.lora}"
    text = before.get("text", {})
    changed = [
        f"{name} was {text.get(name)}, is {value}" for name, value in mine.text.items() if text.get(name) != value
    ]
    if changed:
        yield f"the data differ ({', '.join(changed)})"
    settings = before.get("settings", mine.settings)
    for name in dict.fromkeys((*settings, *mine.settings)):
        if settings.get(name) != mine.settings.get(name):
            yield f"{name} was {settings.get(name)}, is {mine.settings.get(name)}"
    # The block contains the number of steps, so the schedules of two lengths differ in any case. An identity that an
    # earlier version has stored contains no schedule.
    if before.get("steps") == mine.steps and before.get("schedule", mine.schedule) != mine.schedule:
        yield f"the schedule was {json.dumps(before['schedule'])}, is {json.dumps(mine.schedule)}"
    if mine.chunked_loss is not None and before.get("chunked_loss") not in (None, mine.chunked_loss):
        yield f"the loss was computed {_LOSSES[not mine.chunked_loss]}, is computed {_LOSSES[mine.chunked_loss]}"
    if before.get("output") != mine.output:
        yield f"--output was {before.get('output')}, is {mine.output}"
    if before.get("steps", mine.steps) < mine.steps:
        yield f"the steps were {before['steps']}, are {mine.steps}"
