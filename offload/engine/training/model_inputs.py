"""Inputs of a forward: moved to the device of the engine, and cast to the dtype of its weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from offload.errors import UsageError
from offload.notices import tell
from offload.swapper.modes import dtype_name
from offload.torch_internals import tree_map


class InputCast:
    """Moves and casts the inputs of one engine's model, as `auto_cast` of the config says."""

    def __init__(self, device: torch.device, dtype: torch.dtype, casts: bool | None) -> None:
        """Sets what the inputs become.

        Args:
            device: of the model.
            dtype: of its weights.
            casts: `auto_cast`; None if the config does not say, which casts and reports the first cast.
        """
        self._device, self._dtype, self._casts = device, dtype, casts
        self._reported = False

    def __call__(self, inputs: Any) -> Any:
        """Returns the same structure on the device."""
        if self._casts is None and not self._reported and (other := other_dtype(inputs, self._dtype)) is not None:
            self._reported = True
            name = dtype_name(self._dtype)
            tell(
                f"inputs of {dtype_name(other)} are cast to {name}, the dtype of the weights; "
                f'"auto_cast": true in the block "{name}" says so without this line, false leaves them'
            )
        return to_device(inputs, self._device, None if self._casts is False else self._dtype)

    def explain(self, error: RuntimeError, inputs: Any) -> UsageError | None:
        """Returns the error to raise in place of torch's if the dtype of an input is its cause, or None."""
        other = other_dtype(inputs, self._dtype) if self._dtype is not torch.float32 else None
        if other is None or "dtype" not in str(error):
            return None
        name = dtype_name(self._dtype)
        return UsageError(
            f"the model cannot compute with inputs of {dtype_name(other)} ({error}): its weights are {name}; set "
            f'"auto_cast": true in the block "{name}", or leave it out, or cast them'
        )


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same structure with its tensors on `device`, those of floating point in `dtype` where one is given.

    It goes into lists, tuples, mappings of any kind (a tokenizer's `BatchEncoding`), dataclasses, named tuples and
    packed sequences. What it does not know stays as it is.
    """

    def move(value: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda" and value.device.type == "cpu" and value.layout is torch.strided:
            value = value.pin_memory()  # else the thread waits for all compute before, and the copy with it
        return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)

    return _each_tensor(move, batch)


def other_dtype(batch: Any, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the first tensor of floating point that is not in `dtype`; None where there is none."""
    found: list[torch.dtype] = []

    def look(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.dtype != dtype:
            found.append(value.dtype)
        return value

    _each_tensor(look, batch)
    return found[0] if found else None


def _each_tensor(do: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The structure of `batch` with what `do` returns in the place of each tensor."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return do(value)
        if isinstance(value, PackedSequence):
            data = do(value.data)  # the sizes of the batches stay on the CPU, where cuDNN wants them
            places = (each if each is None else each.to(data.device) for each in value[2:])
            return PackedSequence(data, value.batch_sizes, *places)
        if isinstance(value, MutableMapping):
            moved = copy.copy(value)
            for key, inner in value.items():
                moved[key] = _each_tensor(do, inner)
            return moved
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            rows: Any = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(rows, field.name, _each_tensor(do, getattr(value, field.name)))  # frozen ones too
            return rows
        return value

    return tree_map(leaf, batch, is_leaf=lambda value: isinstance(value, PackedSequence))
