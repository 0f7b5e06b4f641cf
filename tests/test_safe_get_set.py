"""DeepSpeed's safe_get_* and safe_set_*: what there is of a parameter is read and set exactly, wherever it lies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.engine import looking
from offload.errors import BudgetError, UsageError
from tests import models
from tests.faults import die
from tests.oracle import (
    Job,
    PlainEngine,
    dies,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
)

AREA = "Looking at weights and editing them, between steps"
DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
PLACEMENTS = (DISK, MEMORY, ("cpu", "cpu"), ("none", "nvme"))
STATES = ("exp_avg", "exp_avg_sq")

Found = dict[str, torch.Tensor | None]


def everything(module: nn.Module) -> Found:
    """All that can be read of each parameter, by its name and what it is."""
    found: Found = {}
    for name, parameter in module.named_parameters():
        found[f"{name} master"] = offload.safe_get_full_fp32_param(parameter)
        found[f"{name} gradient"] = offload.safe_get_full_grad(parameter)
        for state in STATES:
            found[f"{name} {state}"] = offload.safe_get_full_optimizer_state(parameter, state)
    return found


LOCAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "master": (offload.safe_get_local_fp32_param, offload.safe_set_local_fp32_param),
    "gradient": (offload.safe_get_local_grad, offload.safe_set_local_grad),
    **{
        state: (
            lambda p, state=state: offload.safe_get_local_optimizer_state(p, state),  # type: ignore[misc]
            lambda p, value, state=state: offload.safe_set_local_optimizer_state(p, value, state),  # type: ignore[misc]
        )
        for state in STATES
    },
}


def everything_local(module: nn.Module) -> Found:
    """What `everything` reads, of this rank's part."""
    return {
        f"{name} {what}": get(parameter)
        for name, parameter in module.named_parameters()
        for what, (get, _) in LOCAL.items()
    }


def everything_of_torch(engine: PlainEngine) -> Found:
    found: Found = {}
    for (name, parameter), master in zip(engine.module.named_parameters(), engine._masters, strict=True):
        found[f"{name} master"] = master.detach().clone()
        found[f"{name} gradient"] = None if master.grad is None else master.grad.clone()
        for state in STATES:
            mine = engine.optimizer.state[master].get(state) if master.requires_grad else None
            nothing = torch.zeros_like(master) if parameter.requires_grad else None
            found[f"{name} {state}"] = nothing if mine is None else mine.clone()
    return found


def differences(one: Found, other: Found, same: Callable[..., bool] = torch.equal) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name, mine in one.items()
        if not (
            mine is other[name] is None or (mine is not None and other[name] is not None and same(mine, other[name]))
        )
    ]


def little_room(job: Job, placement: tuple[str, str]) -> dict[str, Any]:
    """Two units at a time on the device, where that is not their home."""
    return {} if "none" in placement else {"device_memory": room_for(job, 2)}


def backward(engine: Any, job: Job, step: int) -> None:
    """All backwards of a step but not its end."""
    for micro in range(job.accumulation):
        engine.backward(job.loss(engine, step, micro))
        if micro < job.accumulation - 1:
            engine.step()


def a_round(engine: Any, job: Job, look: Callable[[], Found]) -> list[Found]:
    """What is found before any step, in the middle of one, between backward and step, and after it."""
    found = [look()]
    for step in range(2):
        train_step(engine, job, step)
    found.append(look())
    backward(engine, job, 2)
    found.append(look())
    engine.step()
    found.append(look())
    return found


# -- reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("GPT2", "bf16"), ("MIXTURE", "fp32"), ("MIXTURE", "bf16")])
@pytest.mark.works(AREA, "`safe_get_full_fp32_param`, `_grad`, `_optimizer_state`", "right")
def test_the_same_everywhere_and_as_in_torch(name: str, dtype: str, tmp_path: Path) -> None:
    """A tied weight, frozen ones, parameters that no loss reaches and scalars are among them."""
    job = getattr(models, name)._replace(dtype=dtype)
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
    rtol, atol = (1e-4, 1e-6) if dtype == "fp32" else (0.05, 2e-3)
    for mine, other in zip(first, theirs, strict=True):
        unlike = differences(mine, other, lambda a, b: torch.allclose(a, b, rtol=rtol, atol=atol))
        # The gradient of a key's bias is 0 but for rounding, which Adam makes lr times its sign of.
        assert [name for name in unlike if not name.endswith("c_attn.bias master")] == []


@pytest.mark.works(AREA, "`safe_get_local_*`, `safe_set_local_*`", "right")
def test_the_part_of_one_rank_is_the_whole(tmp_path: Path) -> None:
    job = models.MIXTURE._replace(dtype="bf16")
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


def test_gradients_that_spill_and_pieces_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read goes over many chunks, tiles and windows of gradients on disk."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(looking, "CHUNK", 1024)
    job = models.MIXTURE._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path)
    found = []
    for name, options in (("least", {"host_memory": least}), ("room", {})):
        engine = start(job, DISK, tmp_path / name, **options)
        assert (engine._parts.gradients.spill is not None) == (name == "least")
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
    job = models.GPT2._replace(dtype="bf16")
    torch.manual_seed(job.seed)
    exact = dict(job.model().named_parameters())
    engine = start(job, DISK, tmp_path)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(offload.safe_get_full_fp32_param(parameter), exact[name].detach())
    train_step(engine, job, 0)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    master = offload.safe_get_full_fp32_param(weight)
    assert master.dtype is torch.float32 and not torch.equal(master, weight.detach().float())
    computed = engine.state_dict()["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16), computed.view(torch.int16))
    engine.destroy(remove=True)


def test_a_read_takes_what_it_reads_and_nothing_else(tmp_path: Path) -> None:
    """From disk come the bytes of the one parameter; its tensor is the user's own."""
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    engine.zero_grad()
    engine._parts.updater.finish()
    before = engine.io_bytes().read
    state = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert engine.io_bytes().read - before <= 4 * weight.numel() + 2 * 4096
    state.zero_()
    assert offload.safe_get_full_optimizer_state(weight, "exp_avg").any()
    engine.destroy(remove=True)


def test_a_gradient_is_that_of_the_step_so_far(tmp_path: Path) -> None:
    """As in torch: divided by the accumulation, added up, not clipped, gone after the step."""
    job = models.GPT2._replace(accumulation=2, clip=1e-3)
    engine, plain = start(job, DISK, tmp_path), PlainEngine(job)
    mine, theirs = (each.module.transformer.h[1].mlp.c_fc.weight for each in (engine, plain))
    assert offload.safe_get_full_grad(mine) is None
    for micro in range(2):
        for each in (engine, plain):
            each.backward(job.loss(each, 0, micro))
        torch.testing.assert_close(offload.safe_get_full_grad(mine), theirs.grad, rtol=1e-4, atol=1e-7)
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.works(AREA, "`safe_set_full_fp32_param`, `safe_set_full_optimizer_state`", "right")
def test_training_goes_on_from_what_was_set(dtype: str, tmp_path: Path) -> None:
    """The same bits in every placement, and what torch does with the same moments and weights."""
    job = models.MIXTURE._replace(dtype=dtype)
    expected = edited_round(PlainEngine(job), job, halved_in_torch)
    first: tuple[list[float], Found] | None = None
    for placement in PLACEMENTS:
        engine = start(job, placement, tmp_path / "-".join(placement), **little_room(job, placement))
        found = edited_round(engine, job, halved), everything(engine.module)
        engine.destroy(remove=True)
        first = first or found
        assert found[0] == first[0] and differences(found[1], first[1]) == [], placement
    assert first is not None and first[0] == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 2e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_set_is_read(dtype: str, tmp_path: Path) -> None:
    """Bit for bit, before it was written and after, of a scalar too; what was not set stays."""
    engine = start(models.MIXTURE._replace(dtype=dtype), DISK, tmp_path)
    train_step(engine, models.MIXTURE, 0)
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


@pytest.mark.parametrize("placement", [DISK, MEMORY])
@pytest.mark.works(AREA, "`safe_set_full_grad`", "right")
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
                gradient = offload.safe_get_full_grad(mine)
                wanted = torch.full(mine.shape, 0.01) if gradient is None else gradient * 2
                offload.safe_set_full_grad(mine, wanted)
                assert torch.equal(offload.safe_get_full_grad(mine), wanted)
                theirs.grad = torch.full(theirs.shape, 0.01) if theirs.grad is None else theirs.grad * 2
            for each in (engine, plain):
                each.step()
        assert engine.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=1e-5)
    for mine, theirs in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(offload.safe_get_full_fp32_param(mine), theirs.detach(), rtol=1e-4, atol=1e-6)
    engine.destroy(remove=True)


def test_a_tied_weight_is_one(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    head, embedding = engine.module.lm_head.weight, engine.module.transformer.wte.weight
    offload.safe_set_full_optimizer_state(head, torch.ones(head.shape), "exp_avg_sq")
    offload.safe_set_full_fp32_param(head, torch.ones(head.shape))
    assert offload.safe_get_full_optimizer_state(embedding, "exp_avg_sq").eq(1).all()
    state = engine.state_dict()
    assert state["lm_head.weight"] is state["transformer.wte.weight"] and bool(embedding.eq(1).all())
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


@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_set_is_committed_at_the_end(dtype: str, placement: tuple[str, str], tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype=dtype)
    durable = {"durability": "step"}
    whole, cut = (start(job, placement, tmp_path / name, **durable) for name in ("whole", "cut"))
    for engine in (whole, cut):
        for step in range(3):
            train_step(engine, job, step)
        halved(engine)
    cut.destroy()
    cut = start(job, placement, tmp_path / "cut", resume="must", **durable)
    assert differences(everything(whole.module), everything(cut.module)) == []
    assert [train_step(whole, job, step) for step in (3, 4)] == [train_step(cut, job, step) for step in (3, 4)]
    whole.destroy(remove=True)
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
    engine._parts.weights.flush()
    engine._parts.updater.finish()
    die()


@pytest.mark.parametrize(("placement", "steps"), [(DISK, 0), (DISK, 1), (("cpu", "cpu"), 1)])
@pytest.mark.works(AREA, "a state that was set, a kill and resume", "right")
def test_killed_after_an_edit(placement: tuple[str, str], steps: int, tmp_path: Path) -> None:
    """Before the next commit the run resumes without the edit, after it with it: never with half of it."""
    job = models.GPT2._replace(dtype="bf16")
    dies(_edit_and_die, job, placement, tmp_path / "cut", steps)
    whole = start(job, placement, tmp_path / "whole", durability="step")
    for step in range(2):
        train_step(whole, job, step)
    if steps:
        halved(whole)
    for step in range(2, 2 + steps):
        train_step(whole, job, step)
    cut = start(job, placement, tmp_path / "cut", resume="must", durability="step")
    assert cut.global_steps == 2 + steps
    assert differences(everything(whole.module), everything(cut.module)) == []
    assert [train_step(whole, job, step) for step in (3, 4)] == [train_step(cut, job, step) for step in (3, 4)]
    whole.destroy(remove=True)
    cut.destroy(remove=True)


# -- what is refused ----------------------------------------------------------------------------------


def _of_no_engine(module: nn.Module) -> None:
    offload.safe_get_full_fp32_param(nn.Parameter(torch.ones(3)))


def _no_parameter(module: nn.Module) -> None:
    offload.safe_get_full_grad(module.embedding.weight.data)


def _other_shape(module: nn.Module) -> None:
    offload.safe_set_full_fp32_param(module.embedding.weight, torch.ones(61 * 33))


def _other_dtype(module: nn.Module) -> None:
    offload.safe_set_full_optimizer_state(module.embedding.weight, torch.ones(61, 33, dtype=torch.float64), "exp_avg")


def _no_tensor(module: nn.Module) -> None:
    offload.safe_set_full_grad(module.scale, 1.0)  # type: ignore[arg-type]


def _unknown_state(module: nn.Module) -> None:
    offload.safe_get_full_optimizer_state(module.embedding.weight, "momentum")


def _frozen_state(module: nn.Module) -> None:
    weight = module.blocks[2][0].weight
    offload.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")


def _frozen_gradient(module: nn.Module) -> None:
    offload.safe_set_full_grad(module.blocks[2][0].weight, torch.zeros(70, 33))


def _part_of_another_length(module: nn.Module) -> None:
    offload.safe_set_local_optimizer_state(module.embedding.weight, torch.ones(61, 33), "exp_avg")


def _frozen_part(module: nn.Module) -> None:
    offload.safe_set_local_grad(module.blocks[2][0].weight, torch.zeros(70 * 33))


def _frozen_weight(module: nn.Module) -> None:
    offload.safe_set_full_fp32_param(module.blocks[2][0].weight, torch.zeros(70, 33))


def _gathered(module: nn.Module) -> None:
    with offload.gathered(module.embedding.weight):
        offload.safe_get_full_fp32_param(module.embedding.weight)


def _in_forward(module: nn.Module) -> None:
    hook = module.blocks[0].register_forward_hook(
        lambda called, _, output: offload.safe_get_full_fp32_param(called[0].weight)  # bound
    )
    try:
        models.mixture_loss(module, 0, 0)
    finally:
        hook.remove()


def _in_forward_of_another(module: nn.Module) -> None:
    hook = module.blocks[0].register_forward_hook(lambda *_: offload.safe_get_full_grad(module.unused.weight))
    try:
        models.mixture_loss(module, 0, 0)
    finally:
        hook.remove()


def _in_backward(module: nn.Module) -> None:
    hook = module.scale.register_hook(lambda _: offload.safe_set_full_grad(module.scale, torch.ones(())))
    try:
        models.mixture_loss(module, 0, 0).backward()
    finally:
        hook.remove()
        module.zero_grad()


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "of a parameter that no engine has": (_of_no_engine, "take it from engine.module"),
    "of what is no parameter": (_no_parameter, "expects a parameter"),
    "of another shape": (_other_shape, r"shape \[61, 33\] in fp32, got shape \[2013\]"),
    "in float64": (_other_dtype, "convert it first"),
    "of a number": (_no_tensor, "must be a tensor of shape .* got float"),
    "of a state that the optimizer has not": (_unknown_state, '"exp_avg", "exp_avg_sq"'),
    "of a frozen parameter's states": (_frozen_state, "is frozen"),
    "of a frozen parameter's gradient": (_frozen_gradient, "is frozen"),
    "of a part that is not flat": (_part_of_another_length, r"this rank's part of .* \[2013\] in fp32, got shape"),
    "of a frozen parameter's part": (_frozen_part, "is frozen"),
    "of a frozen weight": (_frozen_weight, "is frozen"),
    "inside of `gathered`": (_gathered, "is gathered"),
    "inside of a forward": (_in_forward, "not for inside of a forward"),
    "inside of a forward, of a parameter of elsewhere": (_in_forward_of_another, "not for inside of a forward"),
    "inside of a backward": (_in_backward, "not for inside of a forward or a backward"),
}


@pytest.mark.works(AREA, "`safe_get_*` and `safe_set_*` with what cannot be, or while the model runs", "refused")
def test_refused_and_nothing_is_harmed(tmp_path: Path) -> None:
    job = models.MIXTURE
    engine = start(job, DISK, tmp_path / "refused", device_memory=room_for(job, 2))
    losses = [train_step(engine, job, 0)]
    for what, (action, words) in REFUSED.items():
        with pytest.raises(UsageError, match=words):
            action(engine.module)
            raise AssertionError(what)
    losses += [train_step(engine, job, step) for step in range(1, job.steps)]
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="its engine was destroyed"):
        offload.safe_get_full_fp32_param(engine.module.embedding.weight)
    assert losses == run(job, DISK, tmp_path / "plain").losses


def test_a_budget_error_where_the_ram_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    weight = engine.module.lm_head.weight
    monkeypatch.setattr(looking, "free_host_memory", lambda: 4 * weight.numel() - 1)
    with pytest.raises(BudgetError, match=r"transformer\.wte\.weight takes .* of RAM"):
        offload.safe_get_full_optimizer_state(weight, "exp_avg")
    with pytest.raises(BudgetError, match="of RAM"):
        offload.safe_set_full_grad(weight, torch.zeros(weight.shape))
    monkeypatch.undo()
    engine.destroy(remove=True)


# -- state dicts --------------------------------------------------------------------------------------


def test_state_dicts_of_the_engine(tmp_path: Path) -> None:
    job = models.MIXTURE
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    state = engine.state_dict()
    names = list(job.model().state_dict())
    assert list(state) == names == list(engine.module_state_dict())
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
    assert state["head.weight"] is state["embedding.weight"] and state["calls"] == job.accumulation
    assert torch.equal(state["head.weight"], offload.safe_get_full_fp32_param(engine.module.head.weight))
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


# -- parameters of other modules ----------------------------------------------------------------------


class Unseen(nn.Module):
    """Uses another module's weight in a function that torch does not show to placeholders, as extensions' are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.own = nn.Linear(size, size)
        self.others: list[nn.Parameter] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.own(values) @ self.others[0]


class WithUnseen(nn.Module):
    def __init__(self, register: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32), Unseen(32), nn.Linear(32, 61)])
        self.layers[1].others.append(self.layers[0].weight)
        if register:
            offload.register_external_parameter(self.layers[1], self.layers[0].weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(ids)
        for layer in self.layers:
            values = layer(values)
        return values


def _registered() -> nn.Module:
    return WithUnseen(True)


def _unregistered() -> nn.Module:
    return WithUnseen(False)


@pytest.mark.works("Modules", "a parameter read by code that torch does not see, registered", "right")
def test_a_registered_parameter_is_there(tmp_path: Path) -> None:
    """It was registered before the engine was made, or after."""
    job = Job(_registered, models.mixture_loss)
    expected = [train_step(engine := PlainEngine(job), job, 0), train_step(engine, job, 1)]
    for number, (model, late) in enumerate(((_registered, False), (_unregistered, True))):
        engine = start(job._replace(model=model), DISK, tmp_path / str(number))  # type: ignore[assignment]
        unseen, weight = engine.module.layers[1], engine.module.layers[0].weight
        if late:
            with pytest.raises(UsageError, match="register_external_parameter"):
                job.loss(engine, 0, 0)
            for _ in range(2):
                offload.register_external_parameter(unseen, weight)
        assert [train_step(engine, job, step) for step in range(2)] == pytest.approx(expected, rel=1e-5)
        offload.unregister_external_parameter(unseen, weight)
        with torch.no_grad():
            assert bool(job.loss(engine, 0, 0).isnan()), "else this test shows nothing"
        with pytest.raises(UsageError, match="was not registered"):
            offload.unregister_external_parameter(unseen, weight)
        engine.destroy(remove=True)  # type: ignore[attr-defined]


def test_only_modules_and_parameters_can_be_registered() -> None:
    linear = nn.Linear(2, 2)
    for arguments in ((linear, torch.ones(2)), (linear.weight, linear.weight)):
        with pytest.raises(UsageError, match="expects a module and a parameter"):
            offload.register_external_parameter(*arguments)  # type: ignore[arg-type]
