"""Changes to the text of a config file: some keys of a block, and no other character of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.config.load import without_comments, without_last_commas

_SPACE = re.compile(r"[\s\ufeff]*")
_MARGIN = re.compile(r"[ \t]*")
_INDENT = "  "
"""Indentation of an item of a file that has none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A key of an object with its value, by their places in the text."""

    begin: int
    """Place of the key's first quote."""
    key_end: int
    value: int
    end: int
    """Place after the value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Object:
    """An object, by its place in the text."""

    begin: int
    """Place of the opening brace."""
    close: int
    """Place of the closing one."""
    members: Mapping[str, _Member]


def set_in_block(text: str, name: str, values: Mapping[str, Any], older: Mapping[str, str] = {}) -> str:
    """Returns a config's text with `values` in the block `name`; all else is as it was.

    Order, indentation, line ends, comments and commas stay. Keys that are new follow the others of their block, and a
    block that is new follows the other keys of the file. A value `name` that is no object is replaced by one. `older`
    maps older names of keys of the block to the newer names that replace them.
    """
    root = _object_at(text, _skip(text, 0))
    member = root.members.get(name)
    if member is None:
        return _added(text, root, name, values)
    if text[member.value] != "{":
        return text[: member.value] + _written(text, root, values) + text[member.end :]
    block = _object_at(text, member.value)
    for key, value in values.items():
        old = next((old_name for old_name, new in older.items() if new == key and old_name in block.members), None)
        present = block.members.get(key if old is None else old)
        if present is None:
            text = _added(text, block, key, value)
        else:
            between = text[present.key_end : present.value]
            text = f"{text[: present.begin]}{json.dumps(key)}{between}{json.dumps(value)}{text[present.end :]}"
        block = _object_at(text, member.value)
    return text


def _object_at(text: str, begin: int) -> _Object:
    # Comments and trailing commas become spaces, so that each place is the same in both texts.
    plain = without_last_commas(without_comments(text))
    decoder = json.JSONDecoder()
    members: dict[str, _Member] = {}
    at = _skip(plain, begin + 1)
    while plain[at] != "}":
        key, key_end = decoder.raw_decode(plain, at)
        value = _skip(plain, _skip(plain, key_end) + 1)
        _, end = decoder.raw_decode(plain, value)
        members[key] = _Member(begin=at, key_end=key_end, value=value, end=end)
        at = _skip(plain, end)
        if plain[at] == ",":
            at = _skip(plain, at + 1)
    return _Object(begin=begin, close=at, members=members)


def _added(text: str, into: _Object, key: str, value: Any) -> str:
    """Returns `text` with a key added at the end of an object, in the style of the object."""
    written = f"{json.dumps(key)}: {_written(text, into, value)}"
    indent, line, close = _indent(text, into), _line_end(text), into.close
    if into.members:
        last = max(member.end for member in into.members.values())
        comma = without_comments(text).find(",", last, close)
        if comma < 0:
            text, comma, close = f"{text[:last]},{text[last:]}", last, close + 1
        if not _has_lines(text, into):
            return f"{text[: comma + 1]} {written}{text[comma + 1 :]}"
    # Behind the comments that follow the last member.
    at = len(text[:close].rstrip())
    if "\n" in text[at:close]:
        return f"{text[:at]}{line}{indent}{written}{text[at:]}"
    return f"{text[:at]}{line}{indent}{written}{line}{_margin(text, into.begin)}{text[close:]}"


def _written(text: str, into: _Object, value: Any) -> str:
    if not isinstance(value, Mapping) or (into.members and not _has_lines(text, into)):
        return json.dumps(value)
    indent = _indent(text, into)
    step = indent.removeprefix(_margin(text, into.begin)) or _INDENT
    return json.dumps(value, indent=step).replace("\n", f"{_line_end(text)}{indent}")


def _has_lines(text: str, block: _Object) -> bool:
    first = min(member.begin for member in block.members.values())
    return "\n" in text[block.begin : first]


def _indent(text: str, block: _Object) -> str:
    if block.members and _has_lines(text, block):
        return _margin(text, max(member.begin for member in block.members.values()))
    return _margin(text, block.begin) + _INDENT


def _margin(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    return text[start : _MARGIN.match(text, start, at).end()]  # type: ignore[union-attr]  # it matches nothing too


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
