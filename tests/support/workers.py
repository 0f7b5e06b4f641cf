"""The workers of one run of pytest: with which files each begins to collect, and the order in which all run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

_T = TypeVar("_T")


def begin_with_a_part(config: pytest.Config) -> None:
    """Lets each worker of a run of all tests collect another part of the files first.

    A module whose assertions pytest has not rewritten and compiled before takes three times as long to collect. Workers
    that all begin with the same file each compile every file. So each begins with a part of its own, and finds what the
    others have compiled when it comes to theirs.
    """
    if not hasattr(config, "workerinput") or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    files = sorted(str(file) for folder in config.args for file in Path(folder).rglob("test_*.py"))
    config.args[:] = rotated(files, number, count)


def rotated(files: Sequence[_T], number: int, count: int) -> list[_T]:
    """Returns all files, beginning with the part of worker `number` of `count`."""
    # xdist numbers on where it replaces a worker that has crashed.
    first = len(files) * (number % count) // count
    return [*files[first:], *files[:first]]


def order(items: list[pytest.Item]) -> None:
    """Sorts the tests, in whichever order their files were collected: files of few tests first.

    Those take longest, and one that starts last is waited for by a single worker.
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (tests[item.path], item.path))
