"""Until the step nobody sees an update that was made under the backward, and it happens only where it may."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from tests.support.early_updates import (
    backward,
    counts,
    finish_step_before,
    train_step,
)
from tests.support.oracle import assert_same_tensors, config, start, weights_of
from tests.updates.updated_early import DISK, JOB, MEMORY, in_all_ways, trained

# -- nobody sees the result early ---------------------------------------------------------------------


def test_weights_states_and_evaluation_are_the_old_ones_until_the_step(tmp_path: Path) -> None:
    looks: list[dict[str, torch.Tensor]] = []

    def between(engine: Any, step: int) -> None:
        found = weights_of(engine)
        engine.eval()
        with torch.no_grad():
            found["loss"] = JOB.loss(engine, step, 3)
        engine.train()
        parameter = dict(engine.module.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
        for state in ("exp_avg", "exp_avg_sq"):
            found[state] = offload.safe_get_full_optimizer_state(parameter, state)
        found["gradient"] = offload.safe_get_full_grad(parameter)
        looks.append(found)

    seen = in_all_ways(JOB, tmp_path, between)
    third = len(looks) // 3
    for memory, late, early in zip(looks[:third], looks[third : 2 * third], looks[2 * third :], strict=True):
        assert_same_tensors(memory, late)
        assert_same_tensors(memory, early)
    # A look changes nothing, so the updates are confirmed.
    assert sum(hits for hits, _ in seen) > 0 and not any(misses for _, misses in seen)


def test_a_checkpoint_between_backward_and_step_holds_the_old_states(tmp_path: Path) -> None:
    def between(engine: Any, step: int) -> None:
        if step == 2:
            engine.save_checkpoint(str(tmp_path / "saved" / str(testing.inspect(engine).sizes[0].tier)), tag="2")

    seen = in_all_ways(JOB, tmp_path, between)
    assert seen[2][0] == 0 and seen[2][1] > 0
    found = []
    for folder in sorted((tmp_path / "saved").iterdir()):
        engine = start(JOB, MEMORY, tmp_path / "loaded")
        engine.load_checkpoint(str(folder), tag="2")
        found.append((train_step(engine, JOB, 2), weights_of(engine)))
        engine.destroy(remove=True)
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[0][1], found[1][1])


def test_an_edit_between_backward_and_step_is_not_lost(tmp_path: Path) -> None:
    def between(engine: Any, step: int) -> None:
        parameter = dict(engine.module.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
        if step == 2:
            offload.safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 0.25))
        if step == 3:
            offload.safe_set_full_optimizer_state(parameter, torch.full(parameter.shape, 0.5), "exp_avg_sq")
        if step == 4:
            offload.safe_set_full_grad(parameter, torch.full(parameter.shape, 0.125))

    seen = in_all_ways(JOB, tmp_path, between)
    # How many updates have begun by then depends on the moments at which threads run.
    assert any(misses > 0 for _, misses in seen[2:5]), "an edit ends the updates under the backward"


def test_a_load_between_backward_and_step_replaces_everything(tmp_path: Path) -> None:
    results = []
    for placement, speculate in ((MEMORY, False), (DISK, True)):
        name = "-".join(placement)
        engine = start(JOB, placement, tmp_path / name, speculate=speculate)
        for step in range(2):
            train_step(engine, JOB, step)
        engine.save_checkpoint(str(tmp_path / f"saved-{name}"))
        train_step(engine, JOB, 2)
        backward(engine, JOB.loss(engine, 3, 0))
        engine.load_checkpoint(str(tmp_path / f"saved-{name}"))
        losses = [train_step(engine, JOB, step) for step in range(2, 5)]
        results.append((losses, weights_of(engine)))
        engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


def test_destroy_between_backward_and_step_keeps_the_last_step(tmp_path: Path) -> None:
    whole = trained(JOB, MEMORY, tmp_path / "whole")
    engine = start(JOB, DISK, tmp_path / "run", speculate=True)
    losses = [train_step(engine, JOB, step) for step in range(3)]
    backward(engine, JOB.loss(engine, 3, 0))
    engine.destroy(remove=False)
    engine = start(JOB, DISK, tmp_path / "run", resume="must", speculate=True)
    assert engine.global_steps == 3
    losses += [train_step(engine, JOB, step) for step in range(3, JOB.steps)]
    assert losses == whole.losses
    assert_same_tensors(weights_of(engine), whole.weights)
    engine.destroy(remove=True)


# -- where it happens ---------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("placement", "options", "optimizer"),
    [
        (MEMORY, {}, "AdamW"),
        (("cpu", "nvme"), {}, "AdamW"),
        (DISK, {"durability": "none"}, "AdamW"),
        (DISK, {"speculate": False}, "AdamW"),
        (DISK, {"debug": {"overlap": False}}, "AdamW"),
        (DISK, {}, "Lamb"),
        (DISK, {}, "NAdam"),
    ],
)
def test_nothing_is_updated_early_where_the_old_states_would_be_lost_or_norms_are_needed(
    tmp_path: Path, placement: tuple[str, str], options: dict[str, Any], optimizer: str
) -> None:
    seen: list[tuple[int, int]] = []
    job = JOB._replace(steps=3, optimizer=optimizer)
    if optimizer == "NAdam":
        torch.manual_seed(0)
        model = job.model()
        own = torch.optim.NAdam(model.parameters(), lr=1e-3)
        engine = offload.initialize(
            model=model, optimizer=own, config={**config(job, placement, tmp_path, **options), "optimizer": None}
        )[0]
        for step in range(3):
            train_step(engine, job, step)
        seen.append((counts(engine).hits, counts(engine).misses))
        assert not testing.inspect(engine).makes_early_updates
        engine.destroy(remove=True)
    else:
        trained(job, placement, tmp_path, seen=seen, **{"speculate": True, **options})
    assert set(seen) == {(0, 0)}


def test_between_two_commits_both_slots_are_needed(tmp_path: Path) -> None:
    seen = in_all_ways(JOB._replace(steps=9), tmp_path, durability={"every": 3})
    assert [hits > 0 for hits, _ in seen] == [step and step % 3 == 0 for step in range(9)]


def test_auto_stops_at_a_miss_and_begins_again_after_eight_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "update.early", lambda asked, on_cpu: True)  # on a CPU, too

    def between(engine: Any, step: int) -> None:
        if step == 2:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5

    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, logger="offload"):
        trained(JOB._replace(steps=13), DISK, tmp_path, between, seen=seen)
    assert seen[1][0] > 0 and seen[2][0] == 0 and seen[2][1] > 0
    assert seen[3:11] == [(0, 0)] * 8 and seen[11][0] > 0 and seen[12][0] > 0
    (line,) = [record.message for record in caplog.records if "of no use" in record.message]
    assert re.fullmatch(
        r"step 3: \d+ updates under the backward of no use, 0 confirmed: something changed; none is made early until 8 "
        r"steps in a row would have held",
        line,
    )


class Stack(nn.Module):
    """A stack of equal layers, behind one that is so many times as large."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64 * first), *(nn.Linear(64, 64) for _ in range(8))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = first(x).unflatten(-1, (64, -1)).mean(-1)
        for layer in others:
            x = x + layer(x).relu()
        return x


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "fresh_in_memory"), [(1, range(3)), (12, range(6, 10))])
def test_no_byte_is_moved_twice(tmp_path: Path, first: int, fresh_in_memory: range) -> None:
    """Host memory is for two of the largest unit: with a large one, fresh weights of all others stay there."""
    moved, losses = [], []
    for speculate in (False, True):
        job = JOB._replace(model=lambda: Stack(first))
        engine = start(job, DISK, tmp_path / str(speculate), speculate=speculate)
        before = engine.io_bytes()
        for step in range(8):
            torch.manual_seed(step)
            loss = engine(torch.randn(4, 64)).square().mean()
            backward(engine, loss)
            if speculate and step > 1:
                assert testing.inspect(engine).fresh_units in fresh_in_memory
            engine.step()
            losses.append(float(loss.detach()))
        finish_step_before(engine)
        after = engine.io_bytes()
        moved.append((after.read - before.read, after.written - before.written))
        assert (counts(engine).hits > 0) is speculate and not counts(engine).misses
        engine.destroy(remove=True)
    assert losses[:8] == losses[8:]
    assert moved[1][1] == moved[0][1]
    # An update that finds no weights in memory any more is left to the step, so no weights are read for it. Which
    # weights a step finds in host memory depends on the moments at which threads run: some, either way. An update that
    # read them would read all.
    weights = 8 * sum(parameter.numel() * parameter.element_size() for parameter in Stack(first).parameters())
    assert moved[1][0] <= moved[0][0] + weights / 2


def test_weights_that_an_early_update_copies_keep_their_place_on_the_device(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, speculate=True)
    JOB.loss(engine, 0, 0)
    pager = testing.inspect(engine).pager
    with pager.lock:
        cache = pager._device_cache
        units = [block.unit for block in cache._droppable()]
        assert units
        pager._entries[units[0]].copying += 1
        assert [block.unit for block in cache._droppable()] == units[1:] and not cache.idle(pager._entries[units[0]])
        pager._entries[units[0]].copying -= 1
    engine.destroy(remove=True)
