"""The workers of a run of all tests are forked from one process that has imported them, and run them in one order."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.oracle import processes
from tests.support.processes import warm_process
from tests.support.processes.workers import fork_from_one, order


def test_the_order_of_the_tests_does_not_depend_on_that_of_the_files() -> None:
    tests = {f"test_{name}.py": 10 - index // 2 for index, name in enumerate("abcdefghij")}
    orders = []
    for number in range(3):
        files = random.Random(number).sample(sorted(tests), len(tests))
        items: list[Any] = [
            SimpleNamespace(path=Path(file), number=each) for file in files for each in range(tests[file])
        ]
        order(items)
        orders.append([(item.path.name, item.number) for item in items])
    assert orders[0] == orders[1] == orders[2]
    assert [tests[file] for file, number in orders[0] if number == 0] == sorted(tests.values())


def _tell_parent(told: Any) -> None:
    told.send(_command_of(os.getppid()))


def _command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def test_a_worker_and_its_server_of_ranks_are_forked_from_the_process_that_has_imported_the_tests(
    request: pytest.FixtureRequest,
) -> None:
    config = request.config
    if not hasattr(config, "workerinput") or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        pytest.skip("this is no worker of a run of all tests")
    assert "warm_workers.py" in _command_of(os.getppid())
    mine, theirs = processes().Pipe()
    rank = processes().Process(target=_tell_parent, args=(theirs,))
    rank.start()
    assert "warm_workers.py" in mine.recv()
    rank.join()


@pytest.mark.parametrize("source", [pytest.Config.ArgsSource.ARGS, pytest.Config.ArgsSource.TESTPATHS])
def test_tests_that_are_named_or_run_by_one_process_fork_nothing(source: pytest.Config.ArgsSource) -> None:
    tx = ["popen"] * 2 if source is pytest.Config.ArgsSource.ARGS else []
    config: Any = SimpleNamespace(
        getoption=lambda *_: tx, args_source=source, option=SimpleNamespace(tx=tx, testrunuid=None)
    )
    fork_from_one(config)
    assert config.option.tx == tx and config.option.testrunuid is None


_IMPORTED = """
import sys
from tests.support.processes.warm_workers import _import_tests
_import_tests(["-p", "no:hypothesispytest", "."])
print([name for name in ("test_right", "test_wrong") if name in sys.modules])
print(type(sys.modules["test_right"].__loader__).__name__)
"""


def test_test_modules_are_imported_with_pytests_assertions_but_for_those_that_fail(tmp_path: Path) -> None:
    (tmp_path / "test_right.py").write_text("def test_it():\n    assert True\n")
    (tmp_path / "test_wrong.py").write_text("1 / 0\n")
    done = warm_process.python(_IMPORTED, cwd=tmp_path)
    assert done.stdout == "['test_right']\nAssertionRewritingHook\n", done.stderr
