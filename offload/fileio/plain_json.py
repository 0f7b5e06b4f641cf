"""Conversion between plain Python values and JSON, so that objects of the user survive a commit unchanged.

Plain values are None, booleans, numbers, strings, and lists, tuples, dicts and Counters of plain values; where a caller
allows it, small tensors on the CPU too, such as the state of a generator. JSON has no tuples, no keys other than
strings, and no numbers that are not finite. Such values, for example the milestones of MultiStepLR, a Counter with
integer keys, are written as objects with one reserved key. A caller with room for them can take tensors and bytes of
any size out of the JSON, which then holds numbers in their places.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from offload.errors import StoreError, UsageError

_MARK = "\0"  # begins the reserved keys of values that JSON cannot express
_DEPTH = 100
_TENSOR_NBYTES = 65_536
"""Most bytes of a tensor: a commit is no place for weights."""
_SURE_BITS = 2000  # Python writes at least 640 digits, whatever its limit is


def to_plain(value: Any, name: str, advice: str, tensors: bool | list[torch.Tensor] = False) -> Any:
    """Returns a copy of `value` that JSON can hold.

    Args:
        advice: Last part of an error message: the action that the user should take.
        tensors: True to allow tensors on the CPU of at most 64 KiB; a list to allow all dense tensors, and bytes, which
            are appended to it as copies on the CPU, (nbytes,) uint8 each.
    """
    return _encode(value, name, advice, _DEPTH, tensors)


def _encode(value: Any, name: str, advice: str, depth: int, tensors: bool | list[torch.Tensor]) -> Any:
    """Converts `value`, of at most `depth` nested levels; see `to_plain` for the arguments."""
    # `json` would write NaN and Infinity, which are not JSON.
    if isinstance(value, float) and not math.isfinite(value):
        return mark_floats(value)
    if value is None or isinstance(value, bool | int | float | str):
        _check_digits(value, name)
        return value
    # A list that contains itself would recurse for ever.
    if not depth:
        raise UsageError(f"{name} is nested more than {_DEPTH} levels deep, or contains itself; {advice}")

    def inner(item: Any, key: Any) -> Any:
        return _encode(item, f"{name}[{key!r}]", advice, depth - 1, tensors)

    if isinstance(value, list | tuple):
        items = [inner(item, index) for index, item in enumerate(value)]
        # JSON would turn a tuple into a list, and the user's object would not receive what it has saved.
        return items if isinstance(value, list) else {f"{_MARK}tuple": items}
    if isinstance(tensors, list) and (outside := _put_outside(value, tensors)) is not None:
        return outside
    if (
        tensors is True
        and isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.nbytes <= _TENSOR_NBYTES
    ):
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        encoded = base64.b64encode(content).decode("ascii")
        return {f"{_MARK}tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), encoded]}
    if not isinstance(value, dict):
        raise UsageError(f"{name} is a {type(value).__module__}.{type(value).__qualname__}; {advice}")
    for key in value:
        if key is not None and not isinstance(key, bool | int | float | str):
            raise UsageError(
                f"{name} contains the key {key!r}, a {type(key).__module__}.{type(key).__qualname__}; {advice}"
            )
        _check_digits(key, f"a key of {name}")
    pairs = [[_encode(key, name, advice, depth, tensors), inner(item, key)] for key, item in value.items()]
    if isinstance(value, Counter):
        return {f"{_MARK}counter": pairs}
    # The usual case stays readable JSON. A key that begins like a reserved one is escaped by the pairs below.
    if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return dict(pairs)
    return {f"{_MARK}dict": pairs}


def _check_digits(value: Any, name: str) -> None:
    if isinstance(value, int) and value.bit_length() > _SURE_BITS:
        try:
            int.__repr__(value)
        except ValueError:
            raise UsageError(
                f"{name} is a whole number of {value.bit_length()} bits, which is more than the "
                f"{sys.get_int_max_str_digits()} digits that Python writes as text; store the string hex(x) instead"
            ) from None


def from_plain(
    value: Any, tensors: Mapping[str, torch.Tensor] = MappingProxyType({}), device: torch.device | None = None
) -> Any:
    """Returns a copy of the value that `to_plain` received.

    `tensors` are the tensors outside of the JSON, by their numbers. `device` receives tensors that were on an
    accelerator.

    Raises:
        StoreError: If `to_plain` makes no such value. A made-up file may contain one.
    """
    try:
        # Each tensor is taken once: a short text could ask for any number of copies of a large tensor.
        return _decode(value, dict(tensors), device)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"a saved state is damaged, or made up: {type(error).__name__}: {error}; go back to another checkpoint"
        ) from error


def _decode(value: Any, tensors: dict[str, torch.Tensor], device: torch.device | None) -> Any:
    """Returns what `from_plain` does; raises almost any error for other values."""

    def inner(item: Any) -> Any:
        return _decode(item, tensors, device)

    if isinstance(value, dict) and f"{_MARK}tuple" in value:
        return tuple(inner(value[f"{_MARK}tuple"]))
    if isinstance(value, dict) and f"{_MARK}dict" in value:
        return dict(inner(value[f"{_MARK}dict"]))
    if isinstance(value, dict) and f"{_MARK}counter" in value:
        return Counter(dict(inner(value[f"{_MARK}counter"])))
    if isinstance(value, dict) and f"{_MARK}tensor" in value:
        return _as_tensor(*value[f"{_MARK}tensor"])
    if isinstance(value, dict) and f"{_MARK}bytes" in value:
        return bytes(tensors.pop(str(value[f"{_MARK}bytes"])).numpy())
    if isinstance(value, dict) and f"{_MARK}outside" in value:
        number, dtype, shape, kind = value[f"{_MARK}outside"]
        whole = tensors.pop(str(number)).clone().view(getattr(torch, dtype)).view(shape)
        return whole if device is None or kind == "cpu" else whole.to(device)
    return _unmarked(value, inner)


def _put_outside(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Appends the bytes of a tensor, or bytes, to `tensors`; returns their substitute, None for another value."""
    if isinstance(value, bytes):
        tensors.append(torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)[: len(value)])
        return {f"{_MARK}bytes": len(tensors) - 1}
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return None
    flat = value.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous().view(-1)
    tensors.append(flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8))
    what = [len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]
    return {f"{_MARK}outside": what}


def mark_floats(value: Any) -> Any:
    """Returns a copy of `value`, JSON except for numbers that are not finite, with these numbers marked."""
    if isinstance(value, float) and not math.isfinite(value):
        return {f"{_MARK}float": str(float(value))}
    if isinstance(value, list | tuple):
        return [mark_floats(item) for item in value]
    return {key: mark_floats(item) for key, item in value.items()} if isinstance(value, dict) else value


def unmark_floats(value: Any) -> Any:
    """Returns the value that `mark_floats` received, with lists for tuples."""
    return _unmarked(value, unmark_floats)


def _unmarked(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Returns `value` with `inner` applied to the items of a list or a dict, or the float that it stands for."""
    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    if f"{_MARK}float" in value:
        return float(value[f"{_MARK}float"])
    return {key: inner(item) for key, item in value.items()}


def _as_tensor(dtype: str, shape: list[int], encoded: str) -> torch.Tensor:
    if len(encoded) > 2 * _TENSOR_NBYTES or not isinstance(getattr(torch, dtype), torch.dtype):
        raise ValueError(f"a tensor of {dtype} has {len(encoded)} characters, expected at most {2 * _TENSOR_NBYTES}")
    content = torch.tensor(list(base64.b64decode(encoded, validate=True)), dtype=torch.uint8, device="cpu")
    return content.view(getattr(torch, dtype)).view(shape)
