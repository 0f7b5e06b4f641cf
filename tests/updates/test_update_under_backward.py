"""Updates that are made under the backward give the bits of those made after it, whatever the step then decides."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import NumericsError
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.early_updates import (
    backward,
    counts,
    finish_step_before,
    train_step,
)
from tests.support.oracle import assert_same, assert_same_tensors, config, run, start, weights_of
from tests.updates.updated_early import DISK, JOB, MEMORY, in_all_ways, trained

# -- the step confirms --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_that_clips_nothing_confirms_every_update(tmp_path: Path, dtype: str, accumulation: int) -> None:
    seen = in_all_ways(JOB._replace(dtype=dtype, accumulation=accumulation), tmp_path)
    # With several micro-batches the first ones of the first step tell already when a unit is complete.
    first = 0 if accumulation > 1 else 1
    assert all(hits > 0 for hits, _ in seen[first:]) and not any(misses for _, misses in seen)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "Lion", "Adagrad", "SGD", "Muon", "SinkGD"])
def test_every_rule_of_one_pass_is_confirmed(tmp_path: Path, optimizer: str) -> None:
    params = (("momentum", 0.9),) if optimizer == "SGD" else ()
    seen = in_all_ways(JOB._replace(optimizer=optimizer, params=params, steps=3), tmp_path)
    assert sum(hits for hits, _ in seen) > 0 and not any(misses for _, misses in seen)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["LLAMA", "MIXTURE", "LORA", "T5"])
def test_other_models_are_confirmed_or_made_again(tmp_path: Path, name: str) -> None:
    job = getattr(models, name, None)
    if job is None:
        job = JOB._replace(model=getattr(models, name.lower()), loss=models.language_loss)
        if name == "T5":
            job = job._replace(loss=models.translation_loss)
    seen = in_all_ways(job._replace(steps=3, clip=0.0), tmp_path)
    assert sum(hits for hits, _ in seen) > 0


def test_a_schedule_of_the_learning_rate_misses_nothing(tmp_path: Path) -> None:
    """It moves the rate after the step, so a backward knows the rate of its own step."""
    job, results, seen = JOB, [], []
    for placement, speculate in ((MEMORY, False), (DISK, True)):
        torch.manual_seed(0)
        folder = tmp_path / "-".join(placement)
        given = config(job, placement, folder, speculate=speculate)
        given["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
        engine = offload.initialize(model=job.model(), config=given)[0]
        losses = [train_step(engine, job, step) for step in range(job.steps)]
        results.append((losses, weights_of(engine)))
        seen.append(counts(engine))
        engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])
    assert seen[1].hits > 0 and not seen[1].misses


def test_an_update_that_is_still_under_way_is_confirmed_too(tmp_path: Path) -> None:
    """No wait of any kind: how far the worker has come when `step()` decides differs from step to step."""
    job = JOB._replace(steps=12, model=lambda: models.gpt2(layers=6))
    late = run(job, DISK, tmp_path / "late", speculate=False)
    early = run(job, DISK, tmp_path / "early", speculate=True)
    assert_same(late, early)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("clip", "dtype"), [(0.0, "fp32"), (0.01, "fp32"), (1.3, "bf16")])
def test_requests_that_end_late_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float, dtype: str
) -> None:
    """Updates are dropped or confirmed at any point: unread, computed, half written; and made again at once."""
    job = JOB._replace(steps=25, clip=clip, dtype=dtype)
    late = run(job, DISK, tmp_path / "late", speculate=False)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.003))
    early = run(job, DISK, tmp_path / "early", speculate=True)
    assert_same(late, early)


# -- the step decides otherwise -----------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_each_update_of_a_step_that_clips_is_made_again(tmp_path: Path, optimizer: str) -> None:
    without = JOB._replace(optimizer=optimizer)
    free = trained(without, MEMORY, tmp_path / "free")
    clip = sorted(free.norms)[2]  # some steps clip, others do not
    job = without._replace(clip=clip, steps=8)
    norms = trained(job, MEMORY, tmp_path / "norms").norms
    seen = in_all_ways(job, tmp_path)
    clipped = [norm + 1e-6 > clip for norm in norms]
    assert True in clipped[1:] and False in clipped[1:]
    for was_clipped, (hits, misses) in list(zip(clipped, seen, strict=True))[1:]:
        assert (hits == 0 and misses > 0) if was_clipped else (hits > 0 and misses == 0)


def test_a_step_that_overflows_drops_every_update(tmp_path: Path) -> None:
    """In fp16 the loss scale begins so high that the first steps are skipped, and doubles later."""
    seen = []
    results = []
    for name, speculate in (("late", False), ("early", True)):
        torch.manual_seed(0)
        job = JOB._replace(dtype="fp16", steps=12)
        given = config(job, DISK, tmp_path / name, speculate=speculate)
        given["fp16"] = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
        engine = offload.initialize(model=job.model(), config=given)[0]
        losses = []
        for step in range(job.steps):
            before, skipped = counts(engine), engine.skipped_steps
            losses.append(train_step(engine, job, step))
            after = counts(engine)
            if speculate:
                seen.append((engine.skipped_steps > skipped, after.hits - before.hits, after.misses - before.misses))
        results.append((losses, engine.skipped_steps, weights_of(engine)))
        engine.destroy(remove=True)
    assert results[0][:2] == results[1][:2] and results[0][1] > 0
    assert_same_tensors(results[0][2], results[1][2])
    assert any(skipped and misses for skipped, _, misses in seen[1:])
    assert all((hits == 0) if skipped else (misses == 0) for skipped, hits, misses in seen[1:])
    assert any(hits for _, hits, _ in seen)


def test_a_norm_that_raises_drops_every_update(tmp_path: Path) -> None:
    class Poisoned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    job = JOB._replace(model=Poisoned)
    results = []
    for placement, speculate in ((MEMORY, False), (DISK, True)):
        engine = start(job, placement, tmp_path / "-".join(placement), speculate=speculate)
        for step in range(6):
            torch.manual_seed(step)
            loss = engine(torch.randn(2, 32)).square().mean()
            backward(engine, loss * (float("inf") if step == 3 else 1.0))
            if step == 3:
                with pytest.raises(NumericsError, match="the step was not applied"):
                    engine.step()
            else:
                engine.step()
        results.append(weights_of(engine))
        if speculate:
            assert counts(engine).hits > 0 and counts(engine).misses > 0
        engine.destroy(remove=True)
    assert_same_tensors(*results)


def test_a_rate_that_changes_between_backward_and_step_is_the_one_that_counts(tmp_path: Path) -> None:
    def between(engine: Any, step: int) -> None:
        if step % 2:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5

    seen = in_all_ways(JOB, tmp_path, between)
    for step, (hits, misses) in list(enumerate(seen))[1:]:
        assert (hits == 0 and misses > 0) if step % 2 else (hits > 0 and misses == 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_second_backward_counts_after_the_update_of_the_first(tmp_path: Path, accumulation: int) -> None:
    """The graph is kept, and a unit's weights are used once more after they were updated early."""
    if accumulation == 1:
        seen = in_all_ways(JOB, tmp_path, more=1)
        assert sum(misses for _, misses in seen) > 0 and not any(hits for hits, _ in seen[1:])
    else:  # by the user's own word, since the count would take a second backward for a micro-batch

        def declare(engine: Any, step: int) -> None:
            loss = JOB.loss(engine, step, 7)
            backward(engine, loss)

        in_all_ways(JOB, tmp_path, declare)


def test_two_losses_of_one_forward_add_up(tmp_path: Path) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for layer in self.layers:
                x = layer(x).relu()
            first, second = self.heads
            return first(x), second(x)

    results = []
    for placement, speculate in ((MEMORY, False), (DISK, False), (DISK, True)):
        engine = start(
            JOB._replace(model=TwoHeads), placement, tmp_path / f"{placement}{speculate}", speculate=speculate
        )
        for step in range(5):
            torch.manual_seed(step)
            first, second = engine(torch.randn(3, 64))
            backward(engine, first.square().mean(), retain_graph=True)
            backward(engine, second.abs().mean())
            engine.step()
        results.append(weights_of(engine))
        engine.destroy(remove=True)
    assert_same_tensors(results[0], results[1])
    assert_same_tensors(results[0], results[2])


def test_zero_grad_in_place_of_step_leaves_the_old_states(tmp_path: Path) -> None:
    results = []
    for placement, speculate in ((MEMORY, False), (DISK, True)):
        engine = start(JOB, placement, tmp_path / "-".join(placement), speculate=speculate)
        for step in range(6):
            backward(engine, JOB.loss(engine, step, 0))
            if step in (2, 4):
                engine.zero_grad()
                backward(engine, JOB.loss(engine, step, 1))
            engine.step()
        if speculate:
            assert counts(engine).misses > 0
        results.append(weights_of(engine))
        engine.destroy(remove=True)
    assert_same_tensors(*results)


def test_a_backward_that_raises_leaves_nothing_of_its_updates(tmp_path: Path) -> None:
    """It breaks in the first block, after others are complete and updated; then the step is tried again."""

    def burst(engine: offload.Engine, *_: Any) -> None:
        testing.settle_early_updates(engine)
        raise ValueError("broken")

    results = []
    for placement, speculate in ((MEMORY, False), (DISK, True)):
        engine = start(JOB, placement, tmp_path / "-".join(placement), speculate=speculate)
        broken = 0
        for step in range(6):
            loss = JOB.loss(engine, step, 0)
            if step in (2, 4):
                block = engine.module.transformer.h[0].ln_1

                handle = block.register_full_backward_hook(functools.partial(burst, engine))
                loss = JOB.loss(engine, step, 0)
                finish_step_before(engine)
                with pytest.raises(ValueError, match="broken"):
                    engine.backward(loss)
                handle.remove()
                broken += 1
                engine.zero_grad()
                loss = JOB.loss(engine, step, 0)
            backward(engine, loss)
            engine.step()
        assert broken == 2
        if speculate:
            assert counts(engine).hits > 0 and counts(engine).misses > 0
        results.append(weights_of(engine))
        engine.destroy(remove=True)
    assert_same_tensors(*results)
