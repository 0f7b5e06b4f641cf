"""Updates under the backward change no bit, stay hidden until they are confirmed, and survive a kill."""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import NumericsError
from offload.sizes import MIB, format_size
from offload.swapper.store import Shortage
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, die, die_after_writes, use_queue
from tests.support.early_updates import backward, counts, finish_step_before, train_step
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    config,
    dies,
    least_host_memory,
    run,
    start,
    weights_of,
)

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = models.SHALLOW._replace(steps=5, clip=0.0)
Between = Callable[[Any, int], None]


def trained(
    job: Job,
    placement: tuple[str, str],
    folder: Path,
    between: Between | None = None,
    more: int = 0,
    seen: list[tuple[int, int]] | None = None,
    **options: Any,
) -> Result:
    """Trains `job`; `seen` receives hits and misses of each step."""
    engine = start(job, placement, folder, **options)
    losses, norms = [], []
    try:
        for step in range(job.steps):
            before = counts(engine)
            losses.append(train_step(engine, job, step, between, more))
            norms.append(engine.get_global_grad_norm())
            after = counts(engine)
            if seen is not None:
                seen.append((after.hits - before.hits, after.misses - before.misses))
        return Result(losses, norms, weights_of(engine))
    finally:
        engine.destroy(remove=True)


@functools.cache
def in_memory(job: Job) -> Result:
    """Trains `job` in memory, once for all tests that compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(job, MEMORY, Path(folder))


def in_both_ways(
    job: Job, folder: Path, between: Between | None = None, more: int = 0, **options: Any
) -> list[tuple[int, int]]:
    """Asserts the same bits in memory, and on disk with updates under the backward; returns their counts."""
    seen: list[tuple[int, int]] = []
    alone = between is None and not more
    memory = in_memory(job) if alone else trained(job, MEMORY, folder / "memory", between, more)
    early = trained(job, DISK, folder / "early", between, more, seen, speculate=True, **options)
    assert_same(memory, early, "memory and disk, updated under the backward")
    return seen


# -- the step confirms --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_that_clips_nothing_confirms_every_update(tmp_path: Path, dtype: str, accumulation: int) -> None:
    seen = in_both_ways(JOB._replace(dtype=dtype, accumulation=accumulation, steps=3), tmp_path)
    # With several micro-batches the first ones of the first step tell already when a unit is complete.
    first = 0 if accumulation > 1 else 1
    assert all(hits > 0 for hits, _ in seen[first:]) and not any(misses for _, misses in seen)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["LLAMA", "MIXTURE", "LORA", "T5"])
def test_other_models_are_confirmed_or_made_again(tmp_path: Path, name: str) -> None:
    job = getattr(models, name, None)
    if job is None:
        job = JOB._replace(model=getattr(models, name.lower()), loss=models.language_loss)
        if name == "T5":
            job = job._replace(loss=models.translation_loss)
    seen = in_both_ways(job._replace(steps=3, clip=0.0), tmp_path)
    assert sum(hits for hits, _ in seen) > 0


def test_units_that_a_small_host_budget_moves_to_the_drive_are_updated_early(tmp_path: Path) -> None:
    """They move as a whole, the last first. A resume places the states anew, whatever was in memory or on the drive."""
    memory = in_memory(JOB)
    least = least_host_memory(JOB, tmp_path / "least", ("cpu", "cpu"), speculate=True)
    hits, losses = [], []
    for speculate, more, steps in ((True, MIB // 2, (0, 1, 2)), (False, MIB, (3,)), (True, 64 * MIB, (4,))):
        options = {"speculate": speculate, "host_memory": least + more, "durability": "step", "resume": "auto"}
        engine = start(JOB, ("cpu", "cpu"), tmp_path / "run", **options)
        losses += [train_step(engine, JOB, step, None, 0) for step in steps]
        hits.append(counts(engine).hits if speculate else 0)
        weights = weights_of(engine)
        engine.destroy()
    units = 5
    assert 0 < hits[0] < (units - 1) * 2 and hits[1:] == [0, 0], "the first units stay in memory"
    assert losses == memory.losses
    assert_same_tensors(weights, memory.weights)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("clip", "dtype"), [(0.0, "fp32"), (0.01, "fp32"), (1.3, "bf16")])
def test_requests_that_end_late_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float, dtype: str
) -> None:
    """Updates are dropped or confirmed at any point: unread, computed, half written; and made again at once."""
    job = JOB._replace(steps=10, clip=clip, dtype=dtype)
    late = run(job, DISK, tmp_path / "late", speculate=False)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.003))
    early = run(job, DISK, tmp_path / "early", speculate=True)
    assert_same(late, early)


# -- the step decides otherwise -----------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_each_update_of_a_step_that_clips_is_made_again(tmp_path: Path, optimizer: str, durability: str) -> None:
    """Without commits a second slot has the old states: the next step reads the one which this step wrote."""
    without = JOB._replace(optimizer=optimizer)
    clip = sorted(in_memory(without).norms)[2]  # some steps clip, others do not
    job = without._replace(clip=clip, steps=7)
    seen = in_both_ways(job, tmp_path, durability=durability)
    clipped = [norm + 1e-6 > clip for norm in in_memory(job).norms]
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

    seen = in_both_ways(JOB, tmp_path, between)
    for step, (hits, misses) in list(enumerate(seen))[1:]:
        assert (hits == 0 and misses > 0) if step % 2 else (hits > 0 and misses == 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_second_backward_counts_after_the_update_of_the_first(tmp_path: Path, accumulation: int) -> None:
    """The graph is kept, and a unit's weights are used once more after they were updated early."""
    if accumulation == 1:
        seen = in_both_ways(JOB, tmp_path, more=1)
        assert sum(misses for _, misses in seen) > 0 and not any(hits for hits, _ in seen[1:])
    else:  # by the user's own word, since the count would take a second backward for a micro-batch

        def declare(engine: Any, step: int) -> None:
            loss = JOB.loss(engine, step, 7)
            backward(engine, loss)

        in_both_ways(JOB, tmp_path, declare)


def test_a_backward_that_raises_or_is_dropped_leaves_nothing_of_its_updates(tmp_path: Path) -> None:
    """One breaks in the first block, after others are complete and updated; `zero_grad` drops another."""

    def burst(engine: offload.Engine, *_: Any) -> None:
        testing.settle_early_updates(engine)
        raise ValueError("broken")

    results = []
    for placement, speculate in ((MEMORY, False), (DISK, True)):
        engine = start(JOB, placement, tmp_path / "-".join(placement), speculate=speculate)
        for step in range(6):
            if step in (2, 5):
                block = engine.module.transformer.h[0].ln_1
                handle = block.register_full_backward_hook(functools.partial(burst, engine))
                loss = JOB.loss(engine, step, 0)
                finish_step_before(engine)
                with pytest.raises(ValueError, match="broken"):
                    engine.backward(loss)
                handle.remove()
                engine.zero_grad()
            elif step == 3:
                backward(engine, JOB.loss(engine, step, 1))
                engine.zero_grad()
            backward(engine, JOB.loss(engine, step, 0))
            engine.step()
        if speculate:
            assert counts(engine).hits > 0 and counts(engine).misses > 0
        results.append(weights_of(engine))
        engine.destroy(remove=True)
    assert_same_tensors(*results)


# -- nobody sees the result early ---------------------------------------------------------------------


def test_weights_states_and_evaluation_are_the_old_ones_until_the_step(tmp_path: Path) -> None:
    looks: list[dict[str, torch.Tensor]] = []

    def between(engine: Any, step: int) -> None:
        weights = weights_of(engine)
        engine.eval()
        with torch.no_grad():
            weights["loss"] = JOB.loss(engine, step, 3)
        engine.train()
        parameter = dict(engine.module.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
        for state in ("exp_avg", "exp_avg_sq"):
            weights[state] = offload.safe_get_full_optimizer_state(parameter, state)
        weights["gradient"] = offload.safe_get_full_grad(parameter)
        looks.append(weights)

    seen = in_both_ways(JOB, tmp_path, between)
    half = len(looks) // 2
    for memory, early in zip(looks[:half], looks[half:], strict=True):
        assert_same_tensors(memory, early)
    # A look changes nothing, so the updates are confirmed.
    assert sum(hits for hits, _ in seen) > 0 and not any(misses for _, misses in seen)


def test_a_checkpoint_between_backward_and_step_holds_the_old_states(tmp_path: Path) -> None:
    def between(engine: Any, step: int) -> None:
        if step == 2:
            engine.save_checkpoint(str(tmp_path / "saved" / str(testing.inspect(engine).sizes[0].tier)), tag="2")

    seen = in_both_ways(JOB, tmp_path, between)
    assert seen[2][0] == 0 and seen[2][1] > 0
    results = []
    for folder in sorted((tmp_path / "saved").iterdir()):
        engine = start(JOB, MEMORY, tmp_path / "loaded")
        engine.load_checkpoint(str(folder), tag="2")
        results.append((train_step(engine, JOB, 2), weights_of(engine)))
        engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


def test_an_edit_between_backward_and_step_is_not_lost(tmp_path: Path) -> None:
    def between(engine: Any, step: int) -> None:
        parameter = dict(engine.module.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
        if step == 2:
            offload.safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 0.25))
        if step == 3:
            offload.safe_set_full_optimizer_state(parameter, torch.full(parameter.shape, 0.5), "exp_avg_sq")
        if step == 4:
            offload.safe_set_full_grad(parameter, torch.full(parameter.shape, 0.125))

    seen = in_both_ways(JOB, tmp_path, between)
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
        before = counts(engine).hits
        losses = [train_step(engine, JOB, 2)]
        hits = counts(engine).hits - before
        losses += [train_step(engine, JOB, step) for step in range(3, 5)]
        results.append((losses, weights_of(engine)))
        engine.destroy(remove=True)
        assert hits > 0 or not speculate, "gradients from before the load are forgotten"
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


def test_destroy_between_backward_and_step_keeps_the_last_step(tmp_path: Path) -> None:
    whole = in_memory(JOB)
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
        (("nvme", "cpu"), {"durability": "none"}, "AdamW"),
        (DISK, {"speculate": False, "durability": "none"}, "AdamW"),
        (DISK, {"speculate": False}, "AdamW"),
        (DISK, {"debug": {"overlap": False}}, "AdamW"),
        (DISK, {}, "Lamb"),
        (DISK, {}, "torch.optim.NAdam"),
    ],
)
def test_nothing_is_updated_early_where_the_old_states_would_be_lost_or_norms_are_needed(
    tmp_path: Path, placement: tuple[str, str], options: dict[str, Any], optimizer: str
) -> None:
    seen: list[tuple[int, int]] = []
    job = JOB._replace(steps=3, optimizer=optimizer)
    trained(job, placement, tmp_path, seen=seen, **{"speculate": True, **options})
    assert set(seen) == {(0, 0)}


def test_units_on_the_drive_alone_take_a_second_slot_where_the_drive_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen weights have one copy, in both slots; a run that waits for `step()` has one slot of everything."""
    sizes, lines, kept_twice = [], [], 0
    for name, options in (("one", {"speculate": False}), ("two", {"speculate": True}), ("full", {"speculate": True})):
        if name == "full":  # as much as both slots, less a byte
            usage = shutil.disk_usage(tmp_path)._replace(free=sizes[1] - 1)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="offload"):
            engine = start(models.LORA, DISK, tmp_path / name, durability="none", **options)
        parts = testing.inspect(engine)
        spec = parts.store.spec
        sizes.append(spec.nbytes)
        kept_twice += sum(sum(spec.partitions[unit].values()) - spec.frozen[unit] for unit in spec.shadowed)
        assert parts.makes_early_updates is bool(spec.shadowed) is (name == "two")
        lines.append([record.message for record in caplog.records])
        engine.destroy(remove=True)
    assert sizes == [sizes[0], sizes[0] + kept_twice, sizes[0]]
    assert any("updates begin under the backward in no step" in line for line in lines[2])
    assert not any("under the backward" in line for line in lines[0])
    assert any(f"({format_size(sizes[0])} without a slot for updates under" in line for line in lines[1])


def test_a_load_into_one_of_two_slots_keeps_what_is_not_loaded(tmp_path: Path) -> None:
    """Weights alone are loaded: the moments go with them to the other slot."""
    results = []
    for placement, options in ((MEMORY, {}), (DISK, {"durability": "none", "speculate": True})):
        name = "-".join(placement)
        engine = start(JOB, placement, tmp_path / name, **options)
        train_step(engine, JOB, 0)
        engine.save_checkpoint(str(tmp_path / f"saved-{name}"))
        train_step(engine, JOB, 1)
        engine.load_checkpoint(str(tmp_path / f"saved-{name}"), load_optimizer_states=False)
        losses = [train_step(engine, JOB, step) for step in range(2, 5)]
        results.append((losses, weights_of(engine)))
        engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


@pytest.mark.parametrize("room", [True, False])
def test_between_two_commits_a_third_slot_keeps_the_old_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """On a drive without room for it both slots are needed, but in the step after a commit."""
    if not room:
        testing.replace(
            monkeypatch, "disk.shortage_of_slots", lambda paths, need: Shortage(str(paths[0]), need, need - 1)
        )
    seen = in_both_ways(JOB, tmp_path, durability={"every": 3})
    assert [hits > 0 for hits, _ in seen] == [step > 0 and (room or step % 3 == 0) for step in range(JOB.steps)]
    assert not any(misses for _, misses in seen)


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
        first, *rest = self.layers
        x = first(x).unflatten(-1, (64, -1)).mean(-1)
        for layer in rest:
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


KILLED_DISK = ("nvme", "nvme")
KILLED_JOB = models.SHALLOW_DROPOUT._replace(dtype="bf16", steps=4, clip=0.0)
KILLED = 2
"""The step whose backward is killed."""


def killed_under_a_backward(job: Job, folder: Path, writes: int, decided: bool, every: int = 1) -> None:
    """Trains in a process that dies under a backward, before or after so many writes; with `decided` after `step()`.

    Each step of number `every` is durable.
    """
    logging.disable(logging.CRITICAL)
    engine = start(job, KILLED_DISK, folder, speculate=True, durability={"every": every})
    losses = []
    for step in range(KILLED):
        losses.append((train_step(engine, job, step), engine.get_global_grad_norm()))
    (folder / "losses.json").write_text(json.dumps(losses))
    loss = job.loss(engine, KILLED, 0)
    finish_step_before(engine)
    if not decided:
        die_after_writes(writes)
    engine.backward(loss)
    testing.settle_early_updates(engine)
    if decided:
        die_after_writes(writes)
        engine.step()
        engine(models.tokens(KILLED, 0))  # the first call after a step commits it
        finish_step_before(engine)
    die()


def resumed(job: Job, folder: Path, every: int = 1) -> Result:
    """Goes on with a run that was killed."""
    engine = start(job, KILLED_DISK, folder, resume="must", speculate=True, durability={"every": every})
    at = engine.global_steps
    assert at == KILLED // every * every
    losses = json.loads((folder / "losses.json").read_text())[:at]
    for step in range(at, job.steps):
        losses.append((train_step(engine, job, step), engine.get_global_grad_norm()))
    result = Result([loss for loss, _ in losses], [norm for _, norm in losses], weights_of(engine))
    engine.destroy(remove=True)
    return result


@functools.cache
def unbroken() -> Result:
    """The run of `KILLED_JOB` that no kill has met."""
    with tempfile.TemporaryDirectory() as folder:
        return run(KILLED_JOB, KILLED_DISK, Path(folder) / "whole", speculate=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("writes", [1, 4, 7, 1000])
def test_a_kill_under_the_backward_resumes_at_the_step_before(tmp_path: Path, writes: int) -> None:
    """Up to 1000 writes there are none, so that the last one dies when all updates are written and none confirmed."""
    dies(killed_under_a_backward, KILLED_JOB, tmp_path / "run", writes, False)
    assert_same(unbroken(), resumed(KILLED_JOB, tmp_path / "run"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("writes", [4, 1000])
def test_a_kill_between_two_commits_resumes_at_the_last_one(tmp_path: Path, writes: int, every: int) -> None:
    """The killed backward writes over the slots of the steps since, or of the commit before, and not of the last."""
    dies(killed_under_a_backward, KILLED_JOB, tmp_path / "run", writes, False, every)
    assert_same(unbroken(), resumed(KILLED_JOB, tmp_path / "run", every))
