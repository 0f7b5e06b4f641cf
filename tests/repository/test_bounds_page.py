"""The page of bounds names code and tests that exist, in each of its rows."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import ROOT

PAGE = ROOT / "docs" / "reference" / "bounds.md"
_NAMED = re.compile(r"`([\w/]+\.(?:py|cpp))::(\w+)`")


class Row(NamedTuple):
    quantity: str
    bound: str
    keeper: str
    test: str


def rows(text: str) -> list[Row]:
    """The rows of all tables, without heads and rules."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [Row(*row) for row in cells if row[0] != "quantity" and row[0].strip("-")]


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def defines(path: Path, name: str) -> bool:
    """Whether a file defines a function, class or method of that name; of C++, whether it has one."""
    defined = rf"^ *(?:async )?(?:def|class) {name}\b" if path.suffix == ".py" else rf"\b{name}\(|\bTEST\({name}\)"
    return re.search(defined, _source(path), re.MULTILINE) is not None


def wrong(row: Row) -> list[str]:
    """What is not there, or not said, in a row."""
    found = []
    for cell, folder, enough in ((row.keeper, "offload", ()), (row.test, "tests", ("by construction",))):
        names = _NAMED.findall(cell)
        found += [f"{path}::{name}" for path, name in names if not defines(ROOT / folder / path, name)]
        # Words without a reference would be a promise that nobody holds.
        if not names and cell not in enough:
            found.append(f"{row.quantity}: {cell or 'nothing'}")
    return found if row.bound else [*found, f"{row.quantity}: no bound"]


ROWS = rows(PAGE.read_text(encoding="utf-8"))


def test_every_bound_is_kept_by_code_and_held_by_a_test() -> None:
    assert len(ROWS) > 40
    assert [each for row in ROWS for each in wrong(row)] == []


@pytest.mark.parametrize(
    ("row", "lacking"),
    [
        (Row("a", "1", "`timeline.py::_has_room`", "`report/test_timeline.py::test_rows_have_an_order`"), []),
        (Row("a", "1", "`timeline.py::has_no_room`", "by construction"), ["timeline.py::has_no_room"]),
        (Row("a", "1", "`timeline.py::_has_room`", "`test_none.py::test_a`"), ["test_none.py::test_a"]),
        (Row("a", "1", "by construction", "by construction"), ["a: by construction"]),
        (Row("a", "", "`timeline.py::_has_room`", "reasoning"), ["a: reasoning", "a: no bound"]),
        (
            Row("a", "1", "`aio/native/schedule.cpp::may_take`", "`native/schedule_test.cpp::schedule_starves_nobody`"),
            [],
        ),
        (
            Row("a", "1", "`aio/native/schedule.cpp::may_give`", "by construction"),
            ["aio/native/schedule.cpp::may_give"],
        ),
    ],
)
def test_what_is_not_there_is_found(row: Row, lacking: list[str]) -> None:
    assert wrong(row) == lacking
