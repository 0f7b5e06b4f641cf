"""DeepSpeed's safe_get_* and safe_set_* read and set every state of a parameter exactly, in any tier."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.engine import param_access as looking
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.fault_injection import die
from tests.support.oracle import (
    Job,
    PlainEngine,
    dies,
    least_host_memory,
    small_pieces,
    start,
    train_step,
)
from tests.support.param_states import (
    AREA,
    DISK,
    GPT2,
    JOBS,
    LOCAL,
    MEMORY,
    MIXTURE,
    PLACEMENTS,
    STATES,
    Found,
    a_round,
    backward,
    differences,
    everything,
    everything_local,
    everything_of_torch,
    little_room,
    on_cpu,
    same_but_for_roundings,
)

# -- reading ------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), [("GPT2", "bf16"), ("MIXTURE", "fp32"), ("MIXTURE", "bf16")])
@pytest.mark.works(AREA, "`safe_get_full_fp32_param`, `_grad`, `_optimizer_state`", "right")
@pytest.mark.numeric
def test_the_same_everywhere_and_as_in_torch(name: str, dtype: str, tmp_path: Path) -> None:
    """A tied weight, frozen ones, parameters that no loss reaches and scalars are among them."""
    job = JOBS[name]._replace(dtype=dtype)
    plain = PlainEngine(job)
    theirs = a_round(plain, job, lambda: everything_of_torch(plain))
    first: list[Found] | None = None
    for placement in PLACEMENTS:
        engine = start(job, placement, tmp_path / "-".join(placement), **little_room(job, placement))
        found = a_round(engine, job, lambda engine=engine: everything(engine.module))  # type: ignore[misc]
        engine.destroy(remove=True)
        first = first or found
        for moment, (mine, other) in enumerate(zip(first, found, strict=True)):
            assert differences(mine, other) == [], f"{placement}, moment {moment}"
    assert first is not None
    for mine, other in zip(first, theirs, strict=True):
        same_but_for_roundings(mine, other, job._replace(steps=2))


@pytest.mark.works(AREA, "`safe_get_local_*`, `safe_set_local_*`", "right")
def test_the_shard_of_a_single_rank_is_complete(tmp_path: Path) -> None:
    job = MIXTURE._replace(dtype="bf16")
    engine = start(job, DISK, tmp_path, **little_room(job, DISK))

    def differ() -> Found:
        found, parts = everything(engine.module), everything_local(engine.module)
        flat = {name: None if value is None else value.flatten() for name, value in found.items()}
        assert differences(flat, parts) == []
        return found

    a_round(engine, job, differ)
    backward(engine, job, 3)
    before = differ()
    for parameter in engine.module.parameters():
        for get, put in LOCAL.values():
            value = get(parameter)
            if value is not None and parameter.requires_grad:
                put(parameter, value * 2)
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    expected = {n: v if v is None or n.split()[0] in frozen else v * 2 for n, v in before.items()}
    assert differences(differ(), expected) == []
    engine.destroy(remove=True)


def test_spilled_gradients_and_small_chunks_are_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read goes over many chunks, tiles and windows of gradients on disk."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(looking, "CHUNK", 1024)
    job = models.MIXTURE._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path)
    found = []
    for name, options in (("least", {"host_memory": least}), ("room", {})):
        engine = start(job, DISK, tmp_path / name, **options)
        assert (engine._core.components.gradients.spill is not None) == (name == "least")
        found.append(a_round(engine, job, lambda engine=engine: everything(engine.module)))  # type: ignore[misc]
        backward(engine, job, 3)
        for number, parameter in enumerate(p for p in engine.module.parameters() if p.requires_grad):
            offload.safe_set_full_grad(parameter, torch.full(parameter.shape, 0.001 * number))
        found[-1].append(everything(engine.module))
        engine.step()
        found[-1].append(everything(engine.module))
        engine.destroy(remove=True)
    for mine, other in zip(*found, strict=True):
        assert differences(mine, other) == []


def test_the_master_has_the_bits_beyond_bf16(tmp_path: Path) -> None:
    job = GPT2._replace(dtype="bf16")
    torch.manual_seed(job.seed)
    exact = dict(job.model().named_parameters())
    engine = start(job, DISK, tmp_path)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(offload.safe_get_full_fp32_param(parameter).cpu(), exact[name].detach())
    train_step(engine, job, 0)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    master = offload.safe_get_full_fp32_param(weight)
    assert master.dtype is torch.float32 and not torch.equal(master, weight.detach().float())
    computed = engine.state_dict()["transformer.h.0.mlp.c_fc.weight"]
    rounded = ((master.cpu().view(torch.int32) + 0x8000) >> 16).to(torch.int16)
    assert torch.equal(rounded, computed.view(torch.int16))
    engine.destroy(remove=True)


def test_a_read_takes_what_it_reads_and_nothing_else(tmp_path: Path) -> None:
    """From disk come the bytes of the one parameter; its tensor is the user's own."""
    engine = start(GPT2, DISK, tmp_path)
    train_step(engine, GPT2, 0)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    engine.zero_grad()
    engine._core.components.update_worker.finish()
    before = engine.io_bytes().read
    state = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert engine.io_bytes().read - before <= 4 * weight.numel() + 2 * 4096
    state.zero_()
    assert offload.safe_get_full_optimizer_state(weight, "exp_avg").any()
    engine.destroy(remove=True)


@pytest.mark.numeric
def test_a_gradient_is_that_of_the_step_so_far(tmp_path: Path) -> None:
    """As in torch: divided by the accumulation, added up, not clipped, gone after the step."""
    job = GPT2._replace(accumulation=2, clip=1e-3)
    engine, plain = start(job, DISK, tmp_path), PlainEngine(job)
    mine, theirs = (each.module.transformer.h[1].mlp.c_fc.weight for each in (engine, plain))
    assert offload.safe_get_full_grad(mine) is None
    for micro in range(2):
        for each in (engine, plain):
            each.backward(job.loss(each, 0, micro))
        rounding_bounds.same_tensor(offload.safe_get_full_grad(mine), theirs.grad, rounding_bounds.norm_error(job))
        engine.step()
    assert offload.safe_get_full_grad(mine) is None
    engine.backward(job.loss(engine, 1, 0))
    engine.zero_grad()
    assert offload.safe_get_full_grad(mine) is None
    engine.destroy(remove=True)


# -- setting ------------------------------------------------------------------------------------------


def halved(engine: Any) -> None:
    """Of every second parameter other moments, of every third another master, through the functions."""
    for number, parameter in enumerate(p for p in engine.module.parameters() if p.requires_grad):
        if number % 2 == 0:
            for state, factor in zip(STATES, (0.5, 0.25), strict=True):
                value = offload.safe_get_full_optimizer_state(parameter, state)
                offload.safe_set_full_optimizer_state(parameter, value * factor, state)
        if number % 3 == 0:
            offload.safe_set_full_fp32_param(parameter, offload.safe_get_full_fp32_param(parameter) * 0.75)


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


# -- commits ------------------------------------------------------------------------------------------


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
    engine._core.components.weights.flush()
    engine._core.components.update_worker.finish()
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


# -- state dicts --------------------------------------------------------------------------------------


def test_state_dicts_of_the_engine(tmp_path: Path) -> None:
    job = MIXTURE
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    state = engine.state_dict()
    names = list(job.model().state_dict())
    assert list(state) == names == list(engine.module_state_dict())
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
    assert state["head.weight"] is state["embedding.weight"] and state["calls"] == job.accumulation
    assert torch.equal(state["head.weight"], offload.safe_get_full_fp32_param(engine.module.head.weight).cpu())
    other = job.model()
    other.load_state_dict(state)
    before = engine.io_bytes().read
    trainable = engine.module_state_dict(exclude_frozen_parameters=True)
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    assert frozen and list(trainable) == [name for name in names if name not in frozen]
    assert list(engine.state_dict()) == names and engine.io_bytes().read >= before
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="destroyed"):
        engine.state_dict()
