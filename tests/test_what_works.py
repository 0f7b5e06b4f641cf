"""The page about what works says what the tests show."""

from __future__ import annotations

from pathlib import Path

from tests import warm


def test_the_page_is_of_these_tests() -> None:
    done = warm.run(["-m", "tests.what_works", "--check"], cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
