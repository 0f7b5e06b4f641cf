"""Random trees of users' modules train from the disk with the bits of memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support import rounding_bounds
from tests.support.modules.module_trees import TREES, Tree, job_of, room, unclipped
from tests.support.oracle import assert_same, plain_loop, run
from tests.support.sampling import examples

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch, with a frozen embedding
_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def check(tree: Tree, folder: Path) -> None:
    """Disk and memory give the same bits, and nearly what a plain loop gives."""
    job = job_of(tree)
    in_memory = run(job, MEMORY, folder / "memory")
    assert_same(in_memory, run(job, DISK, folder / "disk", device_memory=room(tree)), "in memory and on disk")
    plain = plain_loop(job._replace(clip=unclipped(job.clip)))
    if tree.dtype == "fp32":
        rounding_bounds.same_losses(in_memory.losses, plain.losses, job)
        rounding_bounds.same_norms(in_memory.norms, plain.norms, job)
    else:
        # The engine rounds ties of a master away from zero, and adds in fp32 what torch adds in bf16.
        rounding_bounds.same_losses(in_memory.losses[:1], plain.losses[:1], job)
        rounding_bounds.same_numbers(in_memory.norms[:1], plain.norms[:1], rounding_bounds.step_error(job))
        rounding_bounds.same_numbers(in_memory.losses, plain.losses, rounding_bounds.step_error(job))


def check_in_a_folder(tree: Tree, root: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        check(tree, folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.works("Modules", "random trees of all these pieces, one hundred of them", "right")
@pytest.mark.timeout(1200)  # shrinking what fails takes longer than finding it
@settings(max_examples=examples(100), deadline=None, derandomize=True, database=None, suppress_health_check=_HEALTH)
@given(tree=TREES)
@pytest.mark.numeric
def test_random_module_trees_train_with_the_same_bits(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_in_a_folder(tree, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=1000, deadline=None, database=None, print_blob=True, suppress_health_check=_HEALTH)
@given(tree=TREES)
@pytest.mark.numeric
def test_many_random_module_trees_train_with_the_same_bits(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_in_a_folder(tree, tmp_path_factory.getbasetemp())
