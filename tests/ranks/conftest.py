"""Ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks.rank_pool import RankPool, shared_pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with shared_pool(4) as ranks:
        yield ranks
