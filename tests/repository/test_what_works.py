"""The page of what works agrees with the tests."""

from __future__ import annotations

import pytest

from tests import ROOT
from tests.pages import what_works_page
from tests.support.processes import warm_process


def test_the_page_is_of_these_tests(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[what_works_page.COLLECTED]
    if {item.path for item in items} >= set(what_works_page.files()):
        page = what_works_page.page(what_works_page.rows(items))
        assert page == what_works_page.PAGE.read_text(), "run: python -m tests.pages.what_works_page"
        return
    done = warm_process.run(["-m", "tests.pages.what_works_page", "--check"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
