"""DeepSpeed's safe_set_* set every state of a parameter: training goes on from it, and it is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import die
from tests.support.oracle import Job, PlainEngine, dies, start, train_step
from tests.support.param_states import (
    AREA,
    DISK,
    GPT2,
    MEMORY,
    MIXTURE,
    PLACEMENTS,
    STATES,
    Found,
    backward,
    differences,
    everything,
    halved,
    little_room,
    on_cpu,
)


def halved_in_torch(engine: PlainEngine) -> None:
    with torch.no_grad():
        trainable = [
            (p, m) for p, m in zip(engine.module.parameters(), engine._masters, strict=True) if m.requires_grad
        ]
        for number, (parameter, master) in enumerate(trainable):
            if number % 2 == 0 and engine.optimizer.state[master]:
                for state, factor in zip(STATES, (0.5, 0.25), strict=True):
                    engine.optimizer.state[master][state].mul_(factor)
            if number % 3 == 0:
                master.mul_(0.75)
                parameter.copy_(master)


def edited_round(engine: Any, job: Job, edit: Callable[[Any], None]) -> list[float]:
    losses = [train_step(engine, job, step) for step in range(2)]
    edit(engine)
    losses += [train_step(engine, job, step) for step in range(2, 4)]
    backward(engine, job, 4)
    edit(engine)
    engine.step()
    return [*losses, train_step(engine, job, 5)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.works(AREA, "`safe_set_full_fp32_param`, `safe_set_full_optimizer_state`", "right")
@pytest.mark.numeric
def test_training_goes_on_from_what_was_set(dtype: str, tmp_path: Path) -> None:
    """The same bits in every placement, and what torch does with the same moments and weights."""
    job = MIXTURE._replace(dtype=dtype)
    expected = edited_round(PlainEngine(job), job, halved_in_torch)
    first: tuple[list[float], Found] | None = None
    for placement in PLACEMENTS:
        engine = start(job, placement, tmp_path / "-".join(placement), **little_room(job, placement))
        found = edited_round(engine, job, halved), everything(engine.module)
        engine.destroy(remove=True)
        first = first or found
        assert found[0] == first[0] and differences(found[1], first[1]) == [], placement
    assert first is not None and len(first[0]) == len(expected)
    rounding_bounds.same_losses(first[0], expected, job)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_set_is_read(dtype: str, tmp_path: Path) -> None:
    """Bit for bit, before it was written and after, of a scalar too; what was not set stays."""
    engine = start(MIXTURE._replace(dtype=dtype), DISK, tmp_path)
    train_step(engine, MIXTURE, 0)
    chance = torch.Generator().manual_seed(1)
    expected = everything(engine.module)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        for what in ("master", *STATES):
            value = torch.rand(parameter.shape, generator=chance)
            expected[f"{name} {what}"] = value.clone()
            if what == "master":
                offload.safe_set_full_fp32_param(parameter, value)
            else:
                offload.safe_set_full_optimizer_state(parameter, value, what)
            value.zero_()  # a copy was taken
    assert differences(everything(engine.module), expected) == []
    assert differences(everything(engine.module), expected) == []
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, MEMORY])
@pytest.mark.works(AREA, "`safe_set_full_grad`", "right")
@pytest.mark.numeric
def test_a_gradient_that_is_set_is_stepped_with(placement: tuple[str, str], tmp_path: Path) -> None:
    """Norm, clip and later backwards see it; also where there was none before, as in torch."""
    job = models.MIXTURE._replace(clip=0.5)
    engine, plain = start(job, placement, tmp_path, **little_room(job, placement)), PlainEngine(job)
    for step in range(2):
        for micro in range(job.accumulation):
            for each in (engine, plain):
                each.backward(job.loss(each, step, micro))
            for mine, theirs in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
                if not mine.requires_grad:
                    continue
                gradient = on_cpu(offload.safe_get_full_grad(mine))
                wanted = torch.full(mine.shape, 0.01) if gradient is None else gradient * 2
                offload.safe_set_full_grad(mine, wanted)
                assert torch.equal(offload.safe_get_full_grad(mine).cpu(), wanted)
                theirs.grad = torch.full(theirs.shape, 0.01) if theirs.grad is None else theirs.grad * 2
            for each in (engine, plain):
                each.step()
        rounding_bounds.same_norms([engine.get_global_grad_norm()], [plain.get_global_grad_norm()], job)
    masters = {name: offload.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    rounding_bounds.same_weights(masters, dict(plain.module.named_parameters()), job._replace(steps=2))
    engine.destroy(remove=True)


def test_a_tied_weight_is_one(tmp_path: Path) -> None:
    engine = start(GPT2, DISK, tmp_path)
    head, embedding = engine.module.lm_head.weight, engine.module.transformer.wte.weight
    offload.safe_set_full_optimizer_state(head, torch.ones(head.shape), "exp_avg_sq")
    offload.safe_set_full_fp32_param(head, torch.ones(head.shape))
    assert offload.safe_get_full_optimizer_state(embedding, "exp_avg_sq").eq(1).all()
    state = engine.state_dict()
    assert state["lm_head.weight"] is state["transformer.wte.weight"] and bool(embedding.eq(1).all())
    engine.destroy(remove=True)


def test_a_master_that_was_set_outlives_the_weight_that_it_rounds_to(tmp_path: Path) -> None:
    """Where the two are set one after the other, before anything else is asked of the engine."""
    engine = start(GPT2._replace(dtype="bf16"), DISK, tmp_path)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    master = torch.full(weight.shape, 1 + 2.0**-12)
    rounded = master.bfloat16()
    rounded[0] = 2.0
    offload.safe_set_full_fp32_param(weight, master)
    with torch.no_grad():
        weight.copy_(rounded)
    assert torch.equal(weight.detach().cpu(), rounded)
    master[0] = 2.0
    assert torch.equal(offload.safe_get_full_fp32_param(weight).cpu(), master)
    engine.destroy(remove=True)


def test_what_is_set_in_one_unit_is_written_together(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    block = list(engine.module.transformer.h[1].parameters())
    before = engine.io_bytes().written
    for parameter in block:
        for state in STATES:
            value = offload.safe_get_full_optimizer_state(parameter, state)
            offload.safe_set_full_optimizer_state(parameter, value + 1, state)
    engine.module.state_dict()
    written = engine.io_bytes().written - before
    assert sum(p.numel() for p in block) * 12 <= written < sum(p.numel() for p in block) * 13
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_set_is_committed_at_the_end(dtype: str, placement: tuple[str, str], tmp_path: Path) -> None:
    job = GPT2._replace(dtype=dtype)
    durable = {"durability": "step"}
    unbroken, cut = (start(job, placement, tmp_path / name, **durable) for name in ("whole", "cut"))
    for engine in (unbroken, cut):
        for step in range(3):
            train_step(engine, job, step)
        halved(engine)
    cut.destroy()
    cut = start(job, placement, tmp_path / "cut", resume="must", **durable)
    assert differences(everything(unbroken.module), everything(cut.module)) == []
    assert [train_step(unbroken, job, step) for step in (3, 4)] == [train_step(cut, job, step) for step in (3, 4)]
    unbroken.destroy(remove=True)
    cut.destroy(remove=True)


def _edit_and_die(job: Job, placement: tuple[str, str], folder: Path, steps: int) -> None:
    """Two steps, an edit that is written, and `steps` more; then the end of the process, of all without a word."""
    logging.disable(logging.CRITICAL)
    engine = start(job, placement, folder, durability="step")
    for step in range(2):
        train_step(engine, job, step)
    halved(engine)
    for step in range(2, 2 + steps):
        train_step(engine, job, step)
    everything(engine.module)  # the first call after a step, which its commit waits for, and all edits are carried out
    testing.settle(engine)
    die()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("placement", "steps"), [(DISK, 0), (DISK, 1), (("cpu", "cpu"), 1)])
@pytest.mark.works(AREA, "a state that was set, a kill and resume", "right")
def test_killed_after_an_edit(placement: tuple[str, str], steps: int, tmp_path: Path) -> None:
    """Before the next commit the run resumes without the edit, after it with it: never with half of it."""
    job = GPT2._replace(dtype="bf16")
    dies(_edit_and_die, job, placement, tmp_path / "cut", steps)
    unbroken = start(job, placement, tmp_path / "whole", durability="step")
    for step in range(2):
        train_step(unbroken, job, step)
    if steps:
        halved(unbroken)
    for step in range(2, 2 + steps):
        train_step(unbroken, job, step)
    cut = start(job, placement, tmp_path / "cut", resume="must", durability="step")
    assert cut.global_steps == 2 + steps
    assert differences(everything(unbroken.module), everything(cut.module)) == []
    assert [train_step(unbroken, job, step) for step in (3, 4)] == [train_step(cut, job, step) for step in (3, 4)]
    unbroken.destroy(remove=True)
    cut.destroy(remove=True)
