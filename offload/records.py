"""Records in JSON, which anybody may have written: a reader that checks depth, fields, types and ranges.

A check receives a value, and the name that messages give the value. It raises `ValueError` if it refuses the value. The
functions of this module build checks from simpler checks:

    check = fields({"step": whole(), "created": text()}, {"files": table(whole())})
    content = read(data, check)
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 320
"""Most levels of lists and objects. A user's state may have 100 levels, each of which takes three levels of JSON.

Functions in Python that walk through such a value recurse as deep.
"""
MOST = 2**63 - 1
"""Largest whole number of a record, which offsets and sizes of files do not exceed."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

Check = Callable[[Any, str], None]


def parse(data: bytes | str) -> Any:
    """Returns the value of JSON that may contain NaN and Infinity, as configs of models do.

    Raises:
        ValueError: If `data` is not JSON in UTF-8, or is nested too deeply.
    """
    data = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    if _depth_exceeds(data, DEEPEST):
        raise ValueError(f"the JSON is nested more than {DEEPEST} levels deep, or is incomplete")
    try:
        return json.loads(data)
    except RecursionError:  # a caller deep in the stack of Python
        raise ValueError("the JSON is nested too deeply") from None


def _depth_exceeds(data: bytes, most: int) -> bool:
    """Returns True if JSON is nested more than `most` levels deep. The parser would recurse as deep, in C."""
    # Brackets in strings do not count. Once escapes are gone, the parts between quotes alternate: outside, inside.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(plain.split(b'"')[::2]).translate(None, _NO_BRACKETS)
    # Each turn removes the innermost pairs, one level. Brackets without a partner stay: the parser reports them.
    for _ in range(most):
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            return len(brackets) > most
        brackets = fewer
    return len(brackets) > 0


def read(data: bytes | str, check: Check, name: str = "") -> Any:
    """Returns the value of JSON that a check accepts.

    Raises:
        ValueError: If `data` is no JSON, or `check` refuses its value.
    """
    value = parse(data)
    check(value, name)
    return value


def expected(what: str, name: str, value: Any) -> ValueError:
    """Returns the error for a value that is not `what`, such as "a list"."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return ValueError(f"expected {what}{name and ' as '}{name}, got {text if len(text) <= 80 else f'{text[:60]}…'}")


# -- checks -------------------------------------------------------------------------------------------


def anything(value: Any, name: str) -> None:
    """Accepts every value."""


def whole(least: int = 0, most: int = MOST) -> Check:
    """Returns a check for a whole number from `least` to `most`. The check refuses a bool, and 1.0."""

    def check(value: Any, name: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise expected(f"a whole number from {least} on" if most == MOST else f"{least} to {most}", name, value)

    return check


def number(least: float = -math.inf) -> Check:
    """Returns a check for a finite number of at least `least`."""

    def check(value: Any, name: str) -> None:
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max or value < least:
            raise expected("a number" if least == -math.inf else f"a number from {least} on", name, value)

    return check


def flag(value: Any, name: str) -> None:
    """Accepts true and false."""
    if not isinstance(value, bool):
        raise expected("true or false", name, value)


def text(pattern: str = "(?s:.*)", what: str = "a text") -> Check:
    """Returns a check for a text that `pattern` matches whole; `what` describes such a text."""
    compiled = re.compile(pattern)

    def check(value: Any, name: str) -> None:
        if not isinstance(value, str) or compiled.fullmatch(value) is None:
            raise expected(what, name, value)

    return check


def maybe(of: Check) -> Check:
    """Returns a check for null, or a value that `of` accepts."""

    def check(value: Any, name: str) -> None:
        if value is not None:
            of(value, name)

    return check


def rows(of: Check, least: int = 0, most: int = MOST) -> Check:
    """Returns a check for a list of `least` to `most` values that `of` accepts."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise expected("a list" if (least, most) == (0, MOST) else f"a list of {least} or more", name, value)
        for index, item in enumerate(value):
            of(item, f"{name}[{index}]")

    return check


def table(of: Check) -> Check:
    """Returns a check for an object with values that `of` accepts, under any names."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise expected("an object", name, value)
        for key, item in value.items():
            of(item, f"{name}/{key[:80]}")

    return check


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] = {}) -> Check:
    """Returns a check for an object with fields. It accepts further fields, since a later version may add some."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise expected("an object", name, value)
        for key, of in required.items():
            if key not in value:
                raise ValueError(f"{name or 'the record'} has no {key!r}")
            of(value[key], f"{name}/{key}" if name else key)
        for key, of in optional.items():
            if key in value:
                of(value[key], f"{name}/{key}" if name else key)

    return check
