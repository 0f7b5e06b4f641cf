"""Packing of the states that an optimizer keeps of one parameter, of any kind, into consecutive bytes.

    [ one presence byte for each state | first state | second state | … ]     each at a multiple of 64 bytes

An unpacked tensor is a view, so changes that the optimizer makes in place are packed already. Before the first step all
presence bytes are zero, so `unpack` returns no states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.sizes import align_up

ALIGNMENT = 64
"""Alignment of each state in bytes: suits torch's vectorized code, and is the same for every placement."""
_NUMBERS: dict[str, type[bool] | type[int] | type[float]] = {"bool": bool, "int": int, "float": float}
_DTYPES: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def is_kind(kind: str) -> bool:
    """Returns True if `kind` is one of a `StateField`."""
    return kind in _DTYPES or isinstance(getattr(torch, kind, None), torch.dtype)


class StateField(NamedTuple):
    """Description of one state of a parameter: a tensor or a Python number."""

    name: str
    kind: str
    """"bool", "int", "float", or a dtype such as "float32"."""
    shape: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the packed form."""
        found = _DTYPES.get(self.kind) or getattr(torch, self.kind)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form, without the padding that aligns the next state."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe_state(state: Mapping[str, Any]) -> tuple[StateField, ...]:
    """Returns a description of each entry of an optimizer's `state` of one parameter, ordered by name.

    Raises:
        TypeError: an entry has no fixed layout, such as a sparse tensor or a list.
    """
    found: list[StateField] = []
    for name in sorted(state):
        value = state[name]
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"{name} is a tensor that is not dense")
            found.append(StateField(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        elif type(value) in _NUMBERS.values():
            found.append(StateField(name, type(value).__name__))
        # None is the absence of a state, which the presence byte represents.
        elif value is not None:
            raise TypeError(f"{name} is a {type(value).__name__}, neither a tensor nor a number")
    return tuple(found)


def packed_nbytes(kept: Sequence[StateField]) -> int:
    """Returns the bytes of a packed state; 0 if there are no fields."""
    return align_up(len(kept), ALIGNMENT) + sum(align_up(each.nbytes, ALIGNMENT) for each in kept) if kept else 0


def unpack(kept: Sequence[StateField], memory: torch.Tensor) -> dict[str, Any]:
    """Returns the state that is stored in `memory`, (nbytes,) uint8; its tensors are views of `memory`."""
    return {
        each.name: (value.item() if each.kind in _NUMBERS else value)
        for there, each, value in _fields(kept, memory)
        if there.item()
    }


def pack(kept: Sequence[StateField], state: Mapping[str, Any], memory: torch.Tensor) -> None:
    """Writes a state into `memory`; its tensors may be the views that `unpack` returned, which need no copy.

    Args:
        kept: the fields, as found in a dry run.
        state: the optimizer's state of one parameter.
        memory: (nbytes,) uint8, owned by the caller.

    Raises:
        TypeError: the state contains an entry that the dry run did not find, or one of another kind or shape.
    """
    # All fields are checked before the first byte is written.
    expected = {each.name: each for each in kept}
    other = next((each for each in describe_state(state) if expected.get(each.name) != each), None)
    if other is not None:
        raise TypeError(
            f"{other.name} is {_describe(other)} now and was {_describe(expected.get(other.name))} in the dry run"
        )
    for there, each, place in _fields(kept, memory):
        value = state.get(each.name)
        there.fill_(value is not None)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            place.fill_(value)
        # Same address and strides: the optimizer changed the view in place, and its bytes are already packed.
        elif value.data_ptr() != place.data_ptr() or value.stride() != place.stride():
            place.copy_(value)


def _fields(
    kept: Sequence[StateField], memory: torch.Tensor
) -> Iterator[tuple[torch.Tensor, StateField, torch.Tensor]]:
    """Yields the presence byte, the description and the memory of each state."""
    start = align_up(len(kept), ALIGNMENT)
    for number, each in enumerate(kept):
        # Each field starts at a multiple of 64 bytes, so its view is aligned for any dtype.
        place = memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
        yield memory[number], each, place
        start += align_up(each.nbytes, ALIGNMENT)


def _describe(kept: StateField | None) -> str:
    """Returns a field in words, for an error message."""
    return "absent" if kept is None else f"{kept.kind} {list(kept.shape)}"
