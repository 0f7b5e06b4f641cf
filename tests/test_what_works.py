"""The page of what works agrees with the tests."""

from __future__ import annotations

from pathlib import Path

from tests.support import warm_process


def test_the_page_is_of_these_tests() -> None:
    done = warm_process.run(["-m", "tests.support.what_works_page", "--check"], cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
