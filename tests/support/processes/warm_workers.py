"""A server from which the workers of a run of all tests are forked, with all test modules imported, and their order.

To import torch, transformers and the test modules takes a worker more CPU than most files of tests take to run. Here
one process does so for all workers, and for the server of `warm_process`, which is forked from it before
the test modules are there.

pytest's own import of a test module, and of `conftest.py`, finds the module in `sys.modules`, its assertions rewritten.
The items are each worker's own.

The server runs this file as a script.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

from tests.support.processes import warm_process, warm_server


class _FewItems:
    """A plugin with which modules are imported, and little in them becomes a test.

    Those of hypothesis do: where there is one, its plugin looks for constants in all sources that are imported.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        return None if is_hypothesis_test(obj) else []


def fork_from_one(config: pytest.Config) -> None:
    """Lets the workers of a run of all tests be forked from a process that has imported the tests.

    Who names a few files has workers that import those alone.
    """
    given = config.getoption("tx", None)
    if hasattr(config, "workerinput") or not given or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    config.option.testrunuid = uuid.uuid4().hex
    path = warm_process.socket_of_run(config.option.testrunuid)
    os.makedirs(os.path.dirname(path))
    # As if it had ended: Popen warns of a process that is not waited for, and it ends with this one.
    warm_process.start(__file__, path, os.getpid(), *config.invocation_params.args).returncode = 0
    warm_process.commands(Path(path).parent / "bin", path)
    python = [sys.executable, "-IS", warm_process.__file__, "run", f"{path}-workers"]
    config.option.tx = [f"popen//python={shlex.join(python)}"] * len(given)


def order(items: list[pytest.Item]) -> None:
    """Sorts the tests, in whichever order their files were collected: files of few tests first.

    Those take longest, and one that starts last is waited for by a single worker.
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (tests[item.path], item.path))


def _import_tests(arguments: list[str]) -> None:
    """Imports all test modules as pytest does; what cannot be imported, each worker tries again and reports."""
    # No worker of its own; its words would be a second report.
    only = [*arguments, "--collect-only", "-n0", "-s", "-p", "no:cacheprovider"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        pytest.main(only, plugins=[_FewItems()])


def _serve(path: str, ready: int, owner: int, arguments: list[str]) -> None:
    """Forks processes of tests at `path`, and workers beside it, for ever."""
    warm_server.preload()
    processes = warm_server.listen(path)
    if os.fork() == 0:
        os.close(ready)
        warm_server.serve(processes, None, owner)
        return
    processes.close()
    sys.warnoptions.clear()  # each start of Python by a worker would inherit them
    _import_tests(arguments)
    warm_server.serve(warm_server.listen(f"{path}-workers"), ready, owner)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
