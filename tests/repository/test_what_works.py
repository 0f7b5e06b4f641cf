"""The page of what works agrees with the tests."""

from __future__ import annotations

import pytest

from tests import ROOT
from tests.support import warm_process, what_works_page


def test_the_page_is_of_these_tests(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[what_works_page.COLLECTED]
    if {item.path for item in items} >= set(what_works_page.files()):
        page = what_works_page.page(what_works_page.rows(items))
        assert page == what_works_page.PAGE.read_text(), "run: python -m tests.support.what_works_page"
        return
    done = warm_process.run(["-m", "tests.support.what_works_page", "--check"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
