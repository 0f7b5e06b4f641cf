"""Fixtures and limits that hold for every test."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Models here are tiny: a second thread of torch only waits, for ever so long where the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts a command behind `&` with Ctrl-C ignored, nohup one with SIGHUP ignored, and every process that a test
# starts would inherit that; tests here raise them on purpose, also in other processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

import pytest
import torch
import typer.testing

import offload
from offload import precision, testing
from offload.aio import BACKENDS, Bandwidth, IoQueue
from offload.aio.backend import refusals
from offload.swapper.memory.host_arena import process_memory
from tests.pages import what_works_page
from tests.support import sampling
from tests.support.processes import device_process, warm_workers

if TYPE_CHECKING:
    from tests.support.ranks.rank_pool import RankPool

# One tree of commands for a process: typer's runner makes that of all commands again for each call.
typer.testing._get_command = functools.cache(typer.main.get_command)

_refusals = functools.cache(refusals)
"""Why each way to the kernel is refused: rings to try them out take longer than most tests of queues."""

precision.warned.update(("bf16", "fp16"))  # else one test has a warning more, on some machines


def pytest_addoption(parser: pytest.Parser) -> None:
    sampling.add_options(parser)
    device_process.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    sampling.configure(config)
    device_process.configure(config)
    warm_workers.fork_from_one(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    quick = config.getoption("quick") and collection_path.name.startswith("test_")
    return True if quick and sampling.starts_processes(collection_path) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    sampling.draw(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[what_works_page.COLLECTED] = list(items)
    sampling.select(config, items)
    device_process.leave_time(config, items)
    device_process.leave_out(config, items)
    if hasattr(config, "workerinput"):
        warm_workers.order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    return device_process.run_elsewhere(item, nextitem) or None


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported stays: no collection of garbage need look through it, now or in a test."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What this machine has kept of itself neither decides a test nor is changed by one, also in other processes."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    """A seed for each test, and no words of transformers about tiny vocabularies."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for name in ("offload", "offload.notices", "offload.notices.ends"):
        logging.getLogger(name).setLevel(logging.NOTSET)  # a command in this process has made it say more, or less
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_nothing(_deterministic: None) -> Iterator[None]:
    """Memory of an engine that a test has left open would be missing in every test after it."""
    before = process_memory().needed_bytes
    yield
    if process_memory().needed_bytes > before:
        for engine in [each for each in gc.get_objects() if type(each) is offload.Engine]:
            engine.destroy()
        pytest.fail("the test has left an engine open")
    if not torch.is_autocast_cache_enabled():
        torch.set_autocast_cache_enabled(True)
        pytest.fail("the test has left torch's autocast without its cache")


@pytest.fixture
def engines_end() -> Iterator[None]:
    """For tests whose engines `tests.support.pretrained_models` makes: they end with the test."""
    from tests.support.pretrained_models import end_engines

    yield
    end_engines()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks, which the tests of this process share."""
    from tests.support.ranks.rank_pool import shared_pool

    with shared_pool(2) as two:
        yield two


@pytest.fixture(autouse=True)
def _cuda_only_where_there_is_one(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    """As an engine makes it."""
    with IoQueue() as queue:
        yield queue


@pytest.fixture
def equal_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run on several drives takes them for equally fast, and measures none."""
    testing.replace(monkeypatch, "drives.measured", lambda folders, nbytes: [Bandwidth(1e9, 1e9)] * len(folders))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each way to the kernel in turn: all of them keep the same promises."""
    name: str = request.param
    refused = _refusals()[name]
    if refused:
        pytest.skip(refused)
    return name
