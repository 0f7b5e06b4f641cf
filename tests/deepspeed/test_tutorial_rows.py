"""Promises of DeepSpeed's tutorials that once did not fully work: each has a status, and tests of every day show it."""

from __future__ import annotations

import ast
from functools import cache

from tests import ROOT
from tests.pages import tutorial_rows
from tests.pages.tutorial_rows import NO_EFFECT, PARTLY, REFUSED, ROWS, WORKS


@cache
def daily_tests_of(file: str) -> frozenset[str]:
    """Returns the tests of a file that are not slow as a whole."""
    tree = ast.parse((ROOT / file).read_text())
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    if any("mark.slow" in ast.unparse(mark) for mark in marks):
        return frozenset()
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
    )


def test_each_of_34_rows_has_a_status_and_tests_of_every_day() -> None:
    assert len({row.number for row in ROWS}) == len(ROWS) == 34
    for row in ROWS:
        assert row.status in (WORKS, PARTLY, NO_EFFECT, REFUSED) and row.here and row.tests, row.number
        for test in row.tests:
            file, _, name = test.partition("::")
            assert name in daily_tests_of(file), f"{test} is no test of every day"


def test_the_status_page_has_this_table() -> None:
    text = tutorial_rows.PAGE.read_text(encoding="utf-8")
    assert text == tutorial_rows.document(text), "run: python -m tests.pages.tutorial_rows"
