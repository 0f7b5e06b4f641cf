"""The workers of one run of pytest: how they start, and the order in which all run the tests."""

from __future__ import annotations

import shlex
import uuid
from collections import Counter

import pytest

from tests.support.processes import warm_workers


def fork_from_one(config: pytest.Config) -> None:
    """Lets the workers of a run of all tests be forked from a process that has imported the tests.

    Who names a few files has workers that import those alone.
    """
    given = config.getoption("tx", None)
    if hasattr(config, "workerinput") or not given or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    config.option.testrunuid = uuid.uuid4().hex
    python = warm_workers.begin(config.option.testrunuid, list(config.invocation_params.args))
    config.option.tx = [f"popen//python={shlex.join(python)}"] * len(given)


def order(items: list[pytest.Item]) -> None:
    """Sorts the tests, in whichever order their files were collected: files of few tests first.

    Those take longest, and one that starts last is waited for by a single worker.
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (tests[item.path], item.path))
