"""Random trees of users' modules keep their bits, with blocks computed again and their inputs in a tier by lot."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.modules.checkpointed import TIERS, small_inputs_move
from tests.support.modules.module_trees import TREES, Tree, job_of, room
from tests.support.oracle import assert_same, run
from tests.support.sampling import examples

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
PLACES = (MEMORY, ("cpu", "cpu"), DISK)
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch, with a frozen embedding
_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def check(tree: Tree, tier: str, place: tuple[str, str], root: Path) -> None:
    job = job_of(tree)
    folder = Path(tempfile.mkdtemp(dir=root))
    options: dict[str, Any] = (
        {"activations": tier, "device_memory": room(tree)} if place != MEMORY else {"activations": tier}
    )
    try:
        plain = run(job, MEMORY, folder / "plain")
        assert_same(plain, run(job, place, folder / "tier", **options), f"{tier} and {place}")
    finally:
        shutil.rmtree(folder)


@pytest.mark.works(
    "Activation checkpointing", "random trees of modules, with a tier by lot, two hundred of them", "right"
)
@pytest.mark.timeout(1200)  # shrinking what fails takes longer than finding it
@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None, suppress_health_check=_HEALTH)
@given(tree=TREES, tier=st.sampled_from(TIERS), place=st.sampled_from(PLACES))
def test_random_trees_keep_their_bits(
    tree: Tree, tier: str, place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_inputs_move(patch)
        check(tree, tier, place, tmp_path_factory.getbasetemp())
