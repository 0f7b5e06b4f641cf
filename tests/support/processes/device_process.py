"""Tests on the test device, in a process of their own: it is the accelerator of its process for good.

A test marked `test_device` runs in a second pytest, forked from the warm server, with all others of its file that
are marked and were selected; each reports here what became of it there. With `pytest --device test` this process has
the device, and they run in it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
import torch

from tests import device
from tests.support.processes import warm_process

_chosen = "cpu"
"""What `--device` says."""
_ended: dict[Path, dict[str, str | None]] = {}
"""For each file: its tests that have ended in the other process, with what failed, or None."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "test", "cuda"),
        default="cpu",
        help="the device of engines in tests: test is the device of tests/device, which this process then has",
    )


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "test_device: runs in a process that has the device of tests/device")
    config.addinivalue_line("markers", "cpu_only(reason): presumes that the device is the CPU; not run on another")
    compute_on(config.getoption("--device"))
    if _chosen == "cuda":
        config.addinivalue_line("filterwarnings", "ignore:.*attention defaults to a non-deterministic algorithm")


def compute_on(chosen: str) -> None:
    """Makes `chosen` the device of this process's engines: "cpu", "test" or "cuda"."""
    global _chosen
    _chosen = chosen
    if _chosen == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # placements are compared bit for bit
    if _chosen == "test":
        from offload.swapper.memory import device as device_choice
        from tests.device.host_side import DeviceHostSide

        device.load()
        device_choice.HOST_SIDES[device.NAME] = DeviceHostSide


def engine_device() -> str:
    """Returns the device of engines in tests, as their config names it."""
    return "test" if device.loaded() else _chosen


def plain_device() -> torch.device:
    """Returns the device of plain PyTorch that an engine in tests is held against."""
    return torch.device("cuda" if _chosen == "cuda" else "cpu")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that presume a CPU where the device is another."""
    if config.getoption("--device") != "cpu":
        for item in items:
            for marker in item.iter_markers("cpu_only"):
                item.add_marker(pytest.mark.skip(reason=f"on the CPU alone: {marker.args[0]}"))


def leave_time(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sets no limit of time here for tests that run elsewhere: the first of a file waits for all; each has its own."""
    for item in items:
        if item.get_closest_marker("test_device") and config.getoption("--device") != "test":
            item.add_marker(pytest.mark.timeout(0))


def run_elsewhere(item: Any, next_item: Any) -> bool:
    """Runs a test marked `test_device`, and its fixtures, in a process that has the device.

    Returns False if the test shall run here.
    """
    if item.get_closest_marker("test_device") is None or item.config.getoption("--device") == "test":
        return False
    if item.path not in _ended:
        of_file = [each for each in item.session.items if each.path == item.path]
        marked = [each.nodeid for each in of_file if each.get_closest_marker("test_device")]
        _ended[item.path] = _run(marked, item.config.rootpath, item.config.getoption("maxfail") or 0)
    failure = _ended[item.path].get(item.name, "the process ended before this test did")
    outcome: Literal["passed", "failed"] = "passed" if failure is None else "failed"
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    report = pytest.TestReport(item.nodeid, item.location, {}, outcome, failure, "call")
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before has left set up what it shares with this one, such as the folder, and the next may share less.
    item.session._setupstate.teardown_exact(next_item)
    return True


def _run(tests: list[str], root: Path, most_failures: int) -> dict[str, str | None]:
    """Runs the tests in a process that has the device, until so many have failed; 0 is no end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["--device", "test", "-q", "-p", "no:cacheprovider", "--whole", f"--junitxml={report}"]
        arguments = ["-m", "pytest", *options, f"--maxfail={most_failures}", "-m", "slow or not slow", *tests]
        done = warm_process.run(arguments, cwd=root, env=environment, timeout=7200)
        if not report.exists():
            text = f"the process of the device ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            return {test.rpartition("::")[2]: text for test in tests}
        failures: dict[str, str | None] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            # A test that fails, and then leaves something behind, has two entries: the first one says why.
            name = case.get("name", "")
            failures[name] = failures.get(name) or _failure(case)
        return failures


def _failure(case: ElementTree.Element) -> str | None:
    for kind in ("failure", "error"):
        failure = case.find(kind)
        if failure is not None:
            return failure.text
    return None
