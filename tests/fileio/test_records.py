"""JSON that anybody may have written is bounded in depth, and has the fields, kinds and ranges that are expected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offload.errors import OffloadError, printable
from offload.records import DEEPEST, fields, flag, maybe, number, parse, read, rows, table, text, whole

CHECK = fields(
    {"step": whole(), "name": text("[a-z]+", "a name"), "sizes": rows(whole(1, 9), 1)},
    {"rate": maybe(number(0)), "on": flag, "sums": table(whole())},
)
RIGHT: dict[str, Any] = {
    "step": 3,
    "name": "ab",
    "sizes": [1, 9],
    "rate": None,
    "on": True,
    "sums": {"a": 0},
    "new": [],
}


def test_a_record_that_is_as_expected_comes_back() -> None:
    assert read(b'{"step": 0, "name": "a", "sizes": [1]}', CHECK) == {"step": 0, "name": "a", "sizes": [1]}
    CHECK(RIGHT, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "expected a whole number from 0 on as step, got -1"),
        ({"step": True}, "got true"),
        ({"step": 3.0}, r"got 3\.0"),
        ({"step": 1 << 63}, "as step, got 9223372036854775808"),
        ({"name": "A"}, 'expected a name as name, got "A"'),
        ({"sizes": []}, "as sizes, got"),
        ({"sizes": [1, 10]}, r"expected 1 to 9 as sizes\[1\], got 10"),
        ({"sizes": {"0": 1}}, "as sizes, got"),
        ({"rate": float("nan")}, "expected a number from 0 on as rate, got NaN"),
        ({"on": 1}, "expected true or false as on, got 1"),
        ({"sums": {"a": None}}, "as sums/a, got null"),
        ({"sums": [["deep"] * 99]}, "as sums, got .*…"),
    ],
)
def test_another_kind_or_range_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CHECK({**RIGHT, **change}, "")


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="the record has no 'step'"):
        CHECK({"name": "a", "sizes": [1]}, "")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b'{"a":' * 300_000,
        b"[" * 2000 + b"]" * 2000,
        b"[{}," * 2000 + b"1" + b"]" * 2000,
        b'"\\"' * 1_000_000,
        b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1),
        b"\xff",
        b"",
        b"9" * 10_000,
    ],
    ids=["lists", "objects", "closed", "mixed", "quotes", "one", "bytes", "nothing", "digits"],
)
def test_json_that_is_too_deep_or_none_is_an_error_at_once(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(data)


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse(b"[" * DEEPEST + b"]" * DEEPEST) is not None
    found = ["[" * 5000, '{"' * 5000, "\\" * 5001, {"[[": "]]"}]
    assert parse(json.dumps(found).encode()) == found


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain\ntext\t", "plain\ntext\t"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J\x7f\0", "\\x9b2J\\x7f\\x00"),
        ("a\u202eb\u2028\udc80", "a\\u202eb\\u2028\\udc80"),
        ("Grüße, 模型", "Grüße, 模型"),
    ],
)
def test_what_moves_a_terminal_is_shown_as_an_escape(given: str, shown: str) -> None:
    assert printable(given) == shown and str(OffloadError(given)) == shown
    assert printable("a\nb", lines=False) == "a\\nb"
