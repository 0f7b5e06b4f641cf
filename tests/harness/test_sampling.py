"""A sample of a large grid has each value of each parameter, is the same every time, and is all of it with --whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from tests import ROOT
from tests.support.sampling import sample

pytest_plugins = ["pytester"]

GRID: list[Mapping[str, int]] = [
    {"dtype": dtype, "tier": tier, "size": size}
    for dtype, tier, size in itertools.product(range(3), range(4), range(6))
]


def test_each_value_occurs() -> None:
    chosen = [GRID[index] for index in sample(GRID, 6, "seed")]
    assert len(chosen) == 6
    assert {name: {case[name] for case in chosen} for name in GRID[0]} == {
        "dtype": set(range(3)),
        "tier": set(range(4)),
        "size": set(range(6)),
    }


def test_a_seed_has_one_sample() -> None:
    assert sample(GRID, 6, "a") == sample(GRID, 6, "a") != sample(GRID, 6, "b")


def test_a_small_grid_is_complete() -> None:
    assert sample(GRID[:3], 6, "seed") == [0, 1, 2]


_MODULE = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("value", range(5))
def test_grid(value):
    pass

def test_single():
    pass
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "passed", "deselected"), [((), 3, 3), (("--whole",), 6, 0), (("test_it.py::test_grid",), 5, 0)]
)
def test_pytest_runs_the_sample(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    passed: int,
    deselected: int,
) -> None:
    """In a process of its own, since the options are this process's too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\nmarkers = sample(count): a sample")
    pytester.makeconftest(
        "from tests.support import sampling\n"
        "def pytest_addoption(parser): sampling.add_options(parser)\n"
        "def pytest_configure(config): sampling.configure(config)\n"
        "def pytest_collection_modifyitems(config, items): sampling.select(config, items)\n"
    )
    pytester.makepyfile(test_it=_MODULE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, deselected=deselected)
