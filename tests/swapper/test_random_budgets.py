"""Random models within random budgets, in any tiers, have the bits of memory and lose no buffer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from offload import testing
from offload.swapper.memory.host_arena import process_memory
from tests.support.modules.module_trees import TREES, Tree, job_of, room
from tests.support.oracle import PLACEMENTS, Result, assert_same, least_host_memory, run, small_pieces, start, trained
from tests.support.sampling import examples

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch, with a frozen embedding
_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


def assert_no_lease_is_lost(engine: offload.Engine) -> None:
    """What the arenas say is taken is what units and states hold."""
    testing.settle(engine, commit=False)
    inspected = testing.inspect(engine)
    assert inspected.unaccounted_memory()["host"] == 0 and inspected.busy_units == []


def _train(tree: Tree, where: tuple[str, str], folder: Path, host_memory: int, device_memory: int) -> Result:
    job = job_of(tree)
    engine = start(job, where, folder, host_memory=host_memory, device_memory=device_memory)
    try:
        assert engine.host_memory <= host_memory
        result = trained(engine, job)
        assert_no_lease_is_lost(engine)
    finally:
        engine.destroy(remove=True)
    assert process_memory().needed_bytes == 0
    return result


def check(tree: Tree, where: tuple[str, str], more: int, root: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        job = job_of(tree)
        in_memory = run(job, ("none", "none"), folder)
        ample = start(job, where, folder)
        on_device = max(ample.device_memory, room(tree))
        ample.destroy(remove=True)
        least = least_host_memory(job, folder, where, device_memory=on_device)
        budget = least + more
        assert_same(in_memory, _train(tree, where, folder, budget, on_device), f"{where} within {budget} bytes")
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(1200)  # shrinking what fails takes longer than finding it
@settings(max_examples=examples(40), deadline=None, derandomize=True, database=None, suppress_health_check=_HEALTH)
@given(tree=TREES, where=st.sampled_from(PLACEMENTS), more=st.sampled_from([0, 4096, 20_000, 100_000, 10_000_000]))
def test_a_random_budget_keeps_every_bit(
    tree: Tree, where: tuple[str, str], more: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(tree, where, more, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=1000, deadline=None, database=None, print_blob=True, suppress_health_check=_HEALTH)
@given(tree=TREES, where=st.sampled_from(PLACEMENTS), more=st.integers(0, 400_000))
def test_many_random_budgets_keep_every_bit(
    tree: Tree, where: tuple[str, str], more: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(tree, where, more, tmp_path_factory.getbasetemp())
