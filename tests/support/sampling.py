"""How much of a large grid one run of the tests takes: a sample by seed, or with `--whole` all of it.

    @pytest.mark.sample(6)              six of the cases of a parametrized test
    @settings(max_examples=examples(300))   a fortieth of hypothesis' examples, five at least
    for where in drawn(PLACEMENTS, 2):      two of them, others in each test

With `--quick` no file is read whose tests start another process.

The sample of a test depends on its name and `--sample-seed` alone, so every run with the same seed has the same tests.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

SHARE = 40
"""One of so many examples of hypothesis is tried without `--whole`."""
_LEAST_EXAMPLES = 5

_PROCESSES = re.compile(r"process(?:es)?\b|_process|RankPool|kill|test_device")

_complete = False
_seed = 0

_T = TypeVar("_T")


def add_options(parser: pytest.Parser) -> None:
    """Adds `--whole` and `--sample-seed` to pytest."""
    parser.addoption("--quick", action="store_true", help="leave out the files whose tests start ranks or processes")
    parser.addoption("--whole", action="store_true", help="run every case of the large grids, not a sample of them")
    parser.addoption("--sample-seed", type=int, default=0, metavar="N", help="draw other samples of the large grids")


def configure(config: pytest.Config) -> None:
    """Takes the options, before any test module is imported."""
    global _complete, _seed
    _complete, _seed = config.getoption("whole"), config.getoption("sample_seed")
    # A machine may be busy, so no example has a deadline. The sample is the same each time, the whole is not.
    settings.register_profile("sample", deadline=None, derandomize=True, max_examples=examples(100))
    settings.register_profile("whole", deadline=None)
    settings.load_profile("whole" if _complete else "sample")


def starts_processes(path: Path) -> bool:
    """Tells whether the tests of a file start ranks or other processes, by what the file names."""
    return path.suffix == ".py" and _PROCESSES.search(path.read_text(encoding="utf-8")) is not None


def examples(all_examples: int) -> int:
    """Returns how many examples of hypothesis to try where `whole` are tried with `--whole`."""
    return all_examples if _complete else max(all_examples // SHARE, min(all_examples, _LEAST_EXAMPLES))


def drawn(values: Sequence[_T], count: int) -> list[_T]:
    """Returns `count` of the values, in their order, as the name of the running test draws them; all with `--whole`."""
    if _complete:
        return list(values)
    name = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    chosen = random.Random(f"{name} {_seed}").sample(range(len(values)), count)
    return [values[index] for index in sorted(chosen)]


def draw(metafunc: pytest.Metafunc) -> None:
    """Leaves a test marked `sample` the cases of its sample, before pytest makes an item of each.

    Half of all cases are never run, and every worker would make their items. Cases with marks stay for `select`: pages
    are written from the marks of all, and other options may deselect them.
    """
    mark, cases = metafunc.definition.get_closest_marker("sample"), metafunc._calls
    if mark is None or _complete or _are_named(metafunc.config) or any(case.marks for case in cases):
        return
    seed = f"{metafunc.definition.nodeid} {_seed}"
    metafunc._calls = [cases[index] for index in sample([_values(case) for case in cases], mark.args[0], seed)]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the cases of tests marked `sample` that are not in their sample."""
    if _complete or _are_named(config):
        return
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for item in items} - {id(item) for grid in grids.values() for item in grid}
    for name, grid in grids.items():
        mark = grid[0].get_closest_marker("sample")
        assert mark is not None
        chosen = sample([_case(item) for item in grid], mark.args[0], f"{name} {_seed}")
        kept |= {id(grid[index]) for index in chosen}
    dropped = [item for item in items if id(item) not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if id(item) in kept]


def sample(cases: Sequence[Mapping[str, Hashable]], count: int, seed: str) -> list[int]:
    """Draws `count` cases of a grid such that as many values as possible of each parameter occur.

    Args:
        cases: The value (or the index of the value) of each parameter, case by case.
        count: How many to draw; all where there are no more.
        seed: Equal seeds draw equal cases.

    Returns:
        Indices into `cases`, in ascending order.
    """
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    seen: set[tuple[str, Hashable]] = set()
    chosen: list[int] = []
    while order and len(chosen) < count:
        best = max(order, key=lambda index: len(set(cases[index].items()) - seen))  # the first of equals
        order.remove(best)
        chosen.append(best)
        seen |= set(cases[best].items())
    return sorted(chosen)


def _case(item: pytest.Item) -> Mapping[str, Hashable]:
    """Returns the value of each parameter, an object by its identity; a test without parameters has none."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else _values(callspec)


def _values(case: Any) -> Mapping[str, Hashable]:
    values = case.params
    return {name: value if isinstance(value, str | int | float) else id(value) for name, value in values.items()}


def _are_named(config: pytest.Config) -> bool:
    """Tells whether the command line names a single test, which is then run as it is."""
    return any("::" in argument for argument in config.args)
