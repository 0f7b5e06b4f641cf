"""Families of causal models by name: a tiny one of each trains and resumes with equal bits, as in plain PyTorch."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from offload.errors import BudgetError
from tests.pages import models_page
from tests.support import models, rounding_bounds
from tests.support.families import RELEASES
from tests.support.oracle import Job, Result, assert_same, plain_loop, room_for, start, train_step, weights_of

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")

UNITS = {
    "groups": r"experts are \d+ units of their own, in groups",
    "layer": "experts stay in one unit with their layer",
}
"""What a notice says of the experts."""


def trained(job: Job, placement: tuple[str, str], folder: Path, experts: str, pause: bool, **options: int) -> Result:
    """Trains the job; with `pause` the engine ends after the first step, and another resumes."""
    losses, norms = [], []
    engine = start(job, placement, folder, **options)
    said = {units for units, words in UNITS.items() if any(re.search(words, line) for line in engine.notices)}
    for step in range(job.steps):
        if pause and step == 1:
            engine.destroy()
            engine = start(job, placement, folder, resume="must", **options)
        losses.append(train_step(engine, job, step))
        norms.append(engine.get_global_grad_norm())
    result = Result(losses, norms, weights_of(engine))
    engine.destroy(remove=True)
    assert said == ({experts} if experts else set())
    return result


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.numeric
def test_a_family_trains_in_memory_and_on_disk_as_in_plain_pytorch_and_resumes(name: str, tmp_path: Path) -> None:
    """On disk there is room for two units, and the run is resumed between its two steps."""
    release = RELEASES[name]
    job = Job(release.build, models.language_loss, steps=2)
    in_memory = trained(job, MEMORY, tmp_path / "memory", release.experts, pause=False)
    room = room_for(job, 2)
    assert_same(in_memory, trained(job, DISK, tmp_path / "disk", release.experts, pause=True, device_memory=room))
    plain = plain_loop(job)
    if release.noisy:
        rounding_bounds.same_losses(in_memory.losses, plain.losses, job)
        rounding_bounds.same_norms(in_memory.norms, plain.norms, job)
    else:
        rounding_bounds.same_training(in_memory, plain, job)


def test_the_page_of_models_is_of_these_tests() -> None:
    assert models_page.page() == models_page.PAGE.read_text(), "run: python -m tests.pages.models_page"


@pytest.mark.parametrize("experts", ["each", "auto"])
def test_llama_4_needs_room_for_a_layer_with_all_its_experts(experts: str, tmp_path: Path) -> None:
    job = Job(RELEASES["Llama-4"].build, models.language_loss)
    start_with = partial(start, job, DISK, tmp_path, experts=experts)
    with pytest.raises(BudgetError, match=r"the least that works is .* it must hold .* the largest unit"):
        start_with(device_memory=room_for(job, 1) // 2)
    engine = start_with()
    (line,) = [line for line in engine.notices if "experts stay in one unit" in line]
    engine.destroy(remove=True)
    assert line.endswith("transformers does not mark Llama4TextExperts as stacked experts")
