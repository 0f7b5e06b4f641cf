"""What tells one job of `offload train` from another: what it trains, on what, and where its model goes.

A run's commits hold it, and so does the note of a run that has ended: under `--resume auto` another job neither goes on
with states that are not its own, nor is taken for one that is done.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_SAMPLE = 1 << 16
_SAMPLES = 4


class Identity(NamedTuple):
    """A job, as JSON keeps it."""

    model: str
    """A preset, or the path of a folder."""
    weights: str
    """A checksum of the folder's config and of samples of its weights; empty for a preset."""
    lora: str | None
    text: Mapping[str, Any]
    """What the data are, after tokenizer and packing: their length and checksum."""
    output: str | None
    steps: int
    settings: Mapping[str, Any]
    """What the config says of learning, each value by its key."""


def weights_of(folder: Path | None) -> str:
    """A checksum of the config and of samples of each file of weights: a folder that has moved is the same one."""
    if folder is None:
        return ""
    crc = zlib.crc32((folder / "config.json").read_bytes())
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        nbytes = path.stat().st_size
        crc = zlib.crc32(f"{path.name} {nbytes}".encode(), crc)
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(nbytes - _SAMPLE, 0) // (_SAMPLES - 1))
                crc = zlib.crc32(file.read(_SAMPLE), crc)
    return f"{crc:08x}"


def other_model(mine: Identity, before: Mapping[str, Any]) -> str | None:
    """What a resumed run would train on that is not its own; None where it is the same model."""
    if before.get("weights", mine.weights) == mine.weights and (mine.weights or before.get("model") == mine.model):
        return None
    same = before.get("model") == mine.model
    return f"--model was {before.get('model')}, {'whose files are others now' if same else f'is {mine.model}'}"


def differences(mine: Identity, before: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was in a job that has ended."""
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
        yield f"the data are others ({', '.join(changed)})"
    settings = before.get("settings", mine.settings)
    for name in dict.fromkeys((*settings, *mine.settings)):
        if settings.get(name) != mine.settings.get(name):
            yield f"{name} was {settings.get(name)}, is {mine.settings.get(name)}"
    if before.get("output") != mine.output:
        yield f"--output was {before.get('output')}, is {mine.output}"
    if before.get("steps", mine.steps) < mine.steps:
        yield f"the steps were {before['steps']}, are {mine.steps}"
