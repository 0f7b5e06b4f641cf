"""Plain values and JSON: what a user's objects hold goes into a commit, and comes back as it was.

Plain are None, booleans, numbers, strings, and lists, tuples, dicts and Counters of such. JSON knows neither tuples nor
keys that are no strings nor numbers that are not finite, so those are written under names of their own (MultiStepLR
keeps its milestones by number).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

from offload.errors import UsageError

_MARK = "\0"  # of what JSON does not know
_DEPTH = 100
_SURE_BITS = 2000  # Python writes 640 digits at least, whatever its limit is


def to_plain(value: Any, name: str, advice: str) -> Any:
    """A copy of `value` that JSON can hold. Raises `UsageError` that names what is not plain, and says `advice`."""
    return _encode(value, name, advice, _DEPTH)


def _encode(value: Any, name: str, advice: str, depth: int) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return mark_floats(value)
    if value is None or isinstance(value, bool | int | float | str):
        _check_digits(value, name)
        return value
    if not depth:
        raise UsageError(f"{name} is nested more than {_DEPTH} deep, perhaps in itself; {advice}")

    def inner(item: Any, key: Any) -> Any:
        return _encode(item, f"{name}[{key!r}]", advice, depth - 1)

    if isinstance(value, list | tuple):
        items = [inner(item, index) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {f"{_MARK}tuple": items}
    if not isinstance(value, dict):
        raise UsageError(f"{name} is a {type(value).__module__}.{type(value).__qualname__}; {advice}")
    for key in value:
        if key is not None and not isinstance(key, bool | int | float | str):
            raise UsageError(f"{name} has the key {key!r}, a {type(key).__module__}.{type(key).__qualname__}; {advice}")
        _check_digits(key, f"a key of {name}")
    pairs = [[_encode(key, name, advice, depth), inner(item, key)] for key, item in value.items()]
    if isinstance(value, Counter):
        return {f"{_MARK}counter": pairs}
    if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return dict(pairs)
    return {f"{_MARK}dict": pairs}


def _check_digits(value: Any, name: str) -> None:
    """Raise `UsageError` where a whole number is longer than Python reads or writes it."""
    if isinstance(value, int) and value.bit_length() > _SURE_BITS:
        try:
            int.__repr__(value)
        except ValueError:
            raise UsageError(
                f"{name} is a whole number of {value.bit_length()} bits, which is more than the "
                f"{sys.get_int_max_str_digits()} digits that Python writes as text; keep hex(x), a string, in its place"
            ) from None


def from_plain(value: Any) -> Any:
    """What `to_plain` was given, as a copy."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if f"{_MARK}float" in value:
        return float(value[f"{_MARK}float"])
    for name, make in ((f"{_MARK}tuple", tuple), (f"{_MARK}dict", _as_dict), (f"{_MARK}counter", _as_counter)):
        if name in value:
            return make(from_plain(value[name]))
    return {key: from_plain(item) for key, item in value.items()}


def mark_floats(value: Any) -> Any:
    """JSON, but for numbers that are not finite, as JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {f"{_MARK}float": str(float(value))}
    if isinstance(value, list | tuple):
        return [mark_floats(item) for item in value]
    return {key: mark_floats(item) for key, item in value.items()} if isinstance(value, dict) else value


def unmark_floats(value: Any) -> Any:
    """What `mark_floats` was given."""
    if isinstance(value, list):
        return [unmark_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if f"{_MARK}float" in value:
        return float(value[f"{_MARK}float"])
    return {key: unmark_floats(item) for key, item in value.items()}


def _as_dict(pairs: list[list[Any]]) -> dict[Any, Any]:
    return {key: item for key, item in pairs}


def _as_counter(pairs: list[list[Any]]) -> Counter[Any]:
    return Counter(_as_dict(pairs))
