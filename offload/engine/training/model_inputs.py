"""Inputs of a forward: moved to the engine's device, and cast to the dtype of the weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from offload.errors import UsageError
from offload.layout.modes import dtype_name
from offload.notices import announce
from offload.torch_internals import tree_map


class InputCast:
    """Callable that moves and casts the inputs of one engine's model, as the config's `auto_cast` says."""

    def __init__(self, device: torch.device, dtype: torch.dtype, casts: bool | None) -> None:
        """Sets device and dtype of the inputs.

        Args:
            device: device of the model.
            dtype: dtype of the weights.
            casts: `auto_cast`; None if the config does not say, which casts and reports the first cast.
        """
        self._device, self._dtype, self._casts = device, dtype, casts
        self._reported = False

    def __call__(self, inputs: Any) -> Any:
        """Returns the same structure on the device, cast if configured."""
        if self._casts is None and not self._reported and (other := other_dtype(inputs, self._dtype)) is not None:
            self._reported = True
            name = dtype_name(self._dtype)
            announce(
                f'inputs of {dtype_name(other)} are cast to {name}, the dtype of the weights; "auto_cast": true in '
                f'the block "{name}" silences this message, false turns the cast off'
            )
        return to_device(inputs, self._device, None if self._casts is False else self._dtype)

    def explain(self, error: RuntimeError, inputs: Any) -> UsageError | None:
        """Returns an error to raise in place of torch's if the dtype of an input is the cause, else None."""
        other = other_dtype(inputs, self._dtype) if self._dtype is not torch.float32 else None
        # torch has no class of its own for errors about dtypes, so the message must tell.
        if other is None or "dtype" not in str(error):
            return None
        name = dtype_name(self._dtype)
        return UsageError(
            f"the model cannot compute with inputs of {dtype_name(other)} ({error}): its weights are {name}; set "
            f'"auto_cast": true in the block "{name}", or leave that key out, or cast the inputs'
        )


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Returns the same structure with its tensors on `device`; other objects stay as they are.

    Lists, tuples, mappings of any kind (a tokenizer's `BatchEncoding`), dataclasses, named tuples and packed sequences
    are searched for tensors.

    Args:
        batch: the structure; it is not changed, and its memory is not read after the return.
        device: device of the copies.
        dtype: dtype of floating-point tensors; None keeps theirs.
    """

    def move(value: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if device.type in ("cpu", "meta") or value.device.type != "cpu":
            return value.to(device, wanted, non_blocking=True)
        if value.layout is not torch.strided:
            return value.to(device, wanted)
        # A copy from pageable memory is synchronous: the thread would wait for all compute before it. A copy from
        # pinned memory of the caller would still read it when the caller has put the next batch there. So the values
        # go through pinned memory of ours, which torch does not use again before the copy out of it has ended.
        staged = torch.empty_like(value, dtype=wanted, pin_memory=True).copy_(value)
        return staged.to(device, non_blocking=True)

    return map_tensors(move, batch)


def other_dtype(batch: Any, dtype: torch.dtype) -> torch.dtype | None:
    """Returns the dtype of the first floating-point tensor whose dtype is not `dtype`, or None."""
    found: list[torch.dtype] = []

    def look(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.dtype != dtype:
            found.append(value.dtype)
        return value

    map_tensors(look, batch)
    return found[0] if found else None


def map_tensors(do: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Returns the structure of `batch` with each tensor replaced by the result of `do`."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return do(value)
        if isinstance(value, PackedSequence):
            data = do(value.data)  # batch sizes stay on the CPU, as cuDNN requires
            places = (each if each is None else each.to(data.device) for each in value[2:])
            return PackedSequence(data, value.batch_sizes, *places)
        if isinstance(value, MutableMapping):
            moved = _copied(value)
            for key, inner in value.items():
                moved[key] = map_tensors(do, inner)
            return moved
        if isinstance(value, Mapping):
            items = {key: map_tensors(do, inner) for key, inner in value.items()}
            # Made anew only where it must be: not every class of mappings can be made from a dict.
            return value if all(items[key] is value[key] for key in items) else type(value)(items)  # type: ignore[call-arg]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            rows: Any = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(rows, field.name, map_tensors(do, getattr(value, field.name)))  # frozen ones too
            return rows
        return value

    # `tree_map` knows lists, tuples and dicts; the leaf function searches all other classes.
    return tree_map(leaf, batch, is_leaf=lambda value: isinstance(value, PackedSequence))


def _copied(batch: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Returns a copy whose items can be set without a change of `batch`; it keeps the class (a `BatchEncoding`)."""
    copied = copy.copy(batch)
    given = [vars(kind).get("__slots__", ()) for kind in type(batch).__mro__]
    slots = [name for names in given for name in ([names] if isinstance(names, str) else names)]
    for name in (*getattr(copied, "__dict__", ()), *slots):
        held = getattr(copied, name, None)
        # A class without a `__copy__` of its own shares with its copies the container in which its items are.
        if isinstance(held, list | MutableMapping) and held is getattr(batch, name, None):
            object.__setattr__(copied, name, copy.copy(held))
    return copied
