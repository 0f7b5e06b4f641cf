"""Contents of another program's checkpoint, by parameter, whatever its files are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.errors import StoreError
from offload.fileio.torch_file import Record, Storage, StoredTensor
from offload.states import State

MASTER = "fp32"
"""Name of the masters in universal checkpoints; the moments have the names that torch gives them."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Fragment(NamedTuple):
    """Consecutive elements of a parameter in a file."""

    storage: Storage
    offset: int
    """First byte in the file."""
    numel: int
    dtype: torch.dtype


class SavedParameter(NamedTuple):
    """A parameter's weight or master, and its moments, as fragments in the order of their elements."""

    shape: tuple[int, ...]
    trainable: bool
    states: Mapping[State, list[Fragment]]
    """A state without fragments is zero."""
    steps: int = 0
    """Number of updates."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCounters:
    """Counters of a training, without the counters of its parameters."""

    global_steps: int
    skipped_steps: int
    micro_steps: int
    global_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedContents:
    """A checkpoint of another program: everything but its tensors is in memory."""

    program: str
    """Name and version of the program."""
    parameters: Mapping[str, SavedParameter]
    tied: Mapping[str, str]
    """Name that holds the values of each tied parameter, by its other names."""
    buffers: Mapping[str, StoredTensor]
    groups: Sequence[Mapping[str, Any]]
    """Numbers of each group of the optimizer."""
    members: Sequence[Sequence[str]] = ()
    """Names of the parameters of each group; empty if the checkpoint does not list them."""
    moments: frozenset[str]
    """Names of the optimizer's states, without the count of steps."""
    optimizer: str = ""
    """Name of the optimizer in lower case; empty if the checkpoint names none."""
    counters: SavedCounters
    scheduler: Any
    """State of the schedule; None if there is none."""
    loss_scale: Mapping[str, Any] | None = None
    """State of a dynamic loss scale, as `LossScaler.state` gives it."""
    theirs: Mapping[str, Any]
    """Values that the user has added."""


def fragment(tensor: Any, start: int, numel: int, what: str) -> Fragment:
    """Returns elements of a flat or contiguous tensor."""
    if not isinstance(tensor, StoredTensor) or tensor.dtype not in FLOATS or not tensor.contiguous:
        raise StoreError(f"{what} is not stored as values in fp32, bf16 or fp16, one after the other")
    # Files of different saves show here: their flat tensors have other lengths.
    if not 0 <= start <= start + numel <= tensor.numel:
        raise StoreError(
            f"{what} has {tensor.numel} elements, expected {start + numel} at least: its files do not belong together"
        )
    return Fragment(tensor.storage, tensor.offset + start * tensor.dtype.itemsize, numel, tensor.dtype)


def whole(tensor: Any, what: str) -> list[Fragment]:
    """Returns all elements of a tensor; raises `StoreError` as `fragment` does."""
    return [fragment(tensor, 0, tensor.numel if isinstance(tensor, StoredTensor) else 0, what)]


def attributes(record: Any) -> Mapping[str, Any]:
    """Returns the attributes of an object whose class DeepSpeed defines; none if it has none."""
    return record.state if isinstance(record, Record) and isinstance(record.state, dict) else {}


def shape_of(value: Any) -> tuple[int, ...]:
    """Returns a shape, which DeepSpeed saves as torch.Size."""
    shape = tuple(value)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {shape!r:.99}")
    return shape


def count_of_steps(value: Any, default: int = 0) -> int:
    """Returns the number of updates that an optimizer has counted, which is a number or a tensor of one."""
    if isinstance(value, StoredTensor):
        return int(value.read())
    return default if value is None else int(value)


def check_whole(parameters: Mapping[str, SavedParameter], folder: Path) -> None:
    """Raises `StoreError` if the fragments of a parameter are not all of it."""
    for name, parameter in parameters.items():
        for state, parts in parameter.states.items():
            numel = sum(part.numel for part in parts)
            # No fragment at all is a state that the optimizer has not made yet.
            if parts and numel != parameter.numel:
                raise StoreError(
                    f"{folder} contains {numel} elements of {state.value} of {name}, expected {parameter.numel}: "
                    "files of ranks are missing, or are of different saves"
                )
