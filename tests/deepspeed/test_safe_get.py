"""DeepSpeed's safe_get_* and the engine's state dicts read every state of a parameter exactly, in any tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload import testing
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import PlainEngine, least_host_memory, small_pieces, start, train_step
from tests.support.param_states import (
    AREA,
    DISK,
    GPT2,
    JOBS,
    LOCAL,
    MIXTURE,
    PLACEMENTS,
    Found,
    a_round,
    backward,
    differences,
    everything,
    everything_local,
    everything_of_torch,
    little_room,
    same_but_for_roundings,
)


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
    testing.replace(monkeypatch, "size.parameter_access", 1024)
    job = models.MIXTURE._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path)
    found = []
    for name, options in (("least", {"host_memory": least}), ("room", {})):
        engine = start(job, DISK, tmp_path / name, **options)
        assert testing.inspect(engine).gradients_spill(0) == (name == "least")
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
    testing.settle(engine)
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
