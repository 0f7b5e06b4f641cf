"""What a torch optimizer keeps of one parameter, whatever that is, laid one behind the other in a stretch of bytes.

    [ which are there, a byte each | first state | second state | … ]     each at a multiple of 64 bytes

A tensor that is unpacked is a view, so what the optimizer changes in place is packed already. Nothing is there before
the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.sizes import align_up

ALIGNMENT = 64
"""Bytes: what torch's vectorized code likes, and the same for every placement."""
_NUMBERS: dict[str, type[bool] | type[int] | type[float]] = {"bool": bool, "int": int, "float": float}
_DTYPES: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


class Kept(NamedTuple):
    """One state of a parameter: a tensor, or a number of Python."""

    name: str
    kind: str
    """"bool", "int", "float", or a dtype such as "float32"."""
    shape: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """In which it is packed."""
        found = _DTYPES.get(self.kind) or getattr(torch, self.kind)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Without what aligns the next."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe_state(state: Mapping[str, Any]) -> tuple[Kept, ...]:
    """What a state holds, in the order of the names. Raises `TypeError` for what has no fixed place."""
    found: list[Kept] = []
    for name in sorted(state):
        value = state[name]
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"{name} is a tensor that is not dense")
            found.append(Kept(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        elif type(value) in _NUMBERS.values():
            found.append(Kept(name, type(value).__name__))
        elif value is not None:
            raise TypeError(f"{name} is a {type(value).__name__}, neither a tensor nor a number")
    return tuple(found)


def packed_nbytes(kept: Sequence[Kept]) -> int:
    """Bytes of a packed state."""
    return align_up(len(kept), ALIGNMENT) + sum(align_up(each.nbytes, ALIGNMENT) for each in kept) if kept else 0


def unpack(kept: Sequence[Kept], memory: torch.Tensor) -> dict[str, Any]:
    """The state that lies in `memory`, (nbytes,) uint8: tensors are views of it."""
    return {
        each.name: (value.item() if each.kind in _NUMBERS else value)
        for there, each, value in _places(kept, memory)
        if there.item()
    }


def pack(kept: Sequence[Kept], state: Mapping[str, Any], memory: torch.Tensor) -> None:
    """Write a state, whose tensors may be the views that `unpack` gave. Raises `TypeError` where it holds others."""
    expected = {each.name: each for each in kept}
    other = next((each for each in describe_state(state) if expected.get(each.name) != each), None)
    if other is not None:
        raise TypeError(f"{other.name} is {_words(other)} now, it was {_words(expected.get(other.name))} in a dry run")
    for there, each, place in _places(kept, memory):
        value = state.get(each.name)
        there.fill_(value is not None)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            place.fill_(value)
        elif value.data_ptr() != place.data_ptr() or value.stride() != place.stride():
            place.copy_(value)


def _places(kept: Sequence[Kept], memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, Kept, torch.Tensor]]:
    """The flag and the memory of each state."""
    start = align_up(len(kept), ALIGNMENT)
    for number, each in enumerate(kept):
        place = memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
        yield memory[number], each, place
        start += align_up(each.nbytes, ALIGNMENT)


def _words(kept: Kept | None) -> str:
    return "absent" if kept is None else f"{kept.kind} {list(kept.shape)}"
