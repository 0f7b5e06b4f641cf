"""The sum of several micro-batches in a 16-bit run: made in fp32, rounded once, and the same wherever it waits."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.config import load_config
from offload.errors import ConfigError, UsageError
from offload.layout.memory_plan import gradient_dtypes, mode_of
from offload.layout.modes import ADAM
from offload.planner import recommend
from offload.planner.activations import Load
from offload.planner.hardware import described
from offload.planner.memory import Room, settings, settle
from offload.planner.model_shape import from_count
from offload.sizes import GIB
from offload.states import State
from tests.support import models
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    trained,
)

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
ROUNDED: dict[str, Any] = {"gradients": "16bit"}
LAYERED: dict[str, Any] = {"schedule": "layer_major", **ROUNDED}
LOOP: dict[str, Any] = {"schedule": "micro_batch_major", **ROUNDED}
JOB = models.GPT2._replace(dtype="bf16", accumulation=3, steps=2, clip=0.3)


class Chain(nn.Sequential):
    """Two blocks, whose gradients a test computes by itself."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(24, 24) for _ in range(2)))


def chain_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + micro))
    return model(hidden.to(next(iter(model.parameters())).dtype)).float().pow(2).sum()


CHAIN = Job(Chain, chain_loss, accumulation=3, dtype="bf16", clip=0.0)


def torch_sums() -> dict[str, torch.Tensor]:
    """Returns each parameter's gradients of all micro-batches, added in fp32 and rounded once."""
    torch.manual_seed(CHAIN.seed)
    model = Chain().bfloat16()
    sums = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for micro in range(CHAIN.accumulation):
        model.zero_grad()
        (chain_loss(model, 0, micro) / CHAIN.accumulation).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad
    return {name: value.bfloat16() for name, value in sums.items()}


@pytest.mark.sample(3)
@pytest.mark.cpu_only("another device's products have other bits than torch's on the CPU")
@pytest.mark.parametrize("by", ["turns", "loop"])
@pytest.mark.parametrize(("placement", "options"), [(MEMORY, LAYERED), (DISK, LAYERED), (MEMORY, LOOP), (DISK, LOOP)])
def test_all_see_the_fp32_sum_rounded_once(
    placement: tuple[str, str], options: dict[str, Any], by: str, tmp_path: Path
) -> None:
    expected = torch_sums()
    engine = start(CHAIN, placement, tmp_path, **options)
    if by == "turns":
        engine.accumulate(range(3), lambda micro: chain_loss(engine, 0, micro))
    else:
        for micro in range(3):
            engine.step() if micro else None
            engine.backward(chain_loss(engine, 0, micro))
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(offload.safe_get_full_grad(parameter), expected[name].float())
    engine.step()
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-12)
    engine.destroy(remove=True)


@functools.cache
def in_a_loop() -> Result:
    """What a loop in memory gives."""
    with tempfile.TemporaryDirectory() as folder:
        return run(JOB, MEMORY, Path(folder), **LOOP)


def test_order_placement_and_budget_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)  # before all runs: the norm adds up its squares chunk by chunk
    expected = run(JOB, MEMORY, tmp_path / "expected", **LOOP)
    exact = run(JOB, MEMORY, tmp_path / "exact", gradients="fp32", schedule="micro_batch_major")
    assert exact.norms != expected.norms, "nothing was rounded"
    assert_same(expected, run(JOB, DISK, tmp_path / "turns", accumulated_step, **LAYERED), "in turns")
    assert_same(expected, run(JOB, DISK, tmp_path / "wide", **LAYERED), "a loop in a run that was planned for turns")
    for name, by, options in (("loop", train_step, LOOP), ("turns", accumulated_step, LAYERED)):
        least = least_host_memory(JOB, tmp_path, **options)
        engine = start(JOB, DISK, tmp_path / f"spill-{name}", host_memory=least, **options)
        assert "gradient of " in "\n".join(engine.notices)
        assert_same(expected, trained(engine, JOB, by), f"gradients on DISK, {name}")
        engine.destroy(remove=True)


def test_a_step_in_parts_and_looks_between_them_change_no_bit(tmp_path: Path) -> None:
    def in_parts(engine: offload.Engine, job: Job, step: int) -> float:
        parts = engine.accumulate(range(2), lambda micro: job.loss(engine, step, micro))
        for parameter in engine.module.parameters():
            offload.safe_get_full_grad(parameter)
        parts += engine.accumulate(range(2, 3), lambda micro: job.loss(engine, step, micro))
        engine.step()
        loss = torch.zeros(())
        for part in parts:
            loss = loss + part.float().cpu() / job.accumulation
        return float(loss)

    assert_same(in_a_loop(), run(JOB, DISK, tmp_path / "parts", in_parts, **LAYERED))


def test_micro_batches_in_no_sync_are_rounded_at_the_step(tmp_path: Path) -> None:
    """The user ends the step: no micro-batch is known to be the last."""

    def by_the_user(engine: offload.Engine, job: Job, step: int) -> float:
        with engine.no_sync():
            for micro in range(job.accumulation):
                engine.backward(job.loss(engine, step, micro))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        return 0.0

    results = [run(JOB, where, tmp_path / where[0], by_the_user, **ROUNDED) for where in (MEMORY, DISK)]
    assert_same(*results)
    assert results[0].norms == in_a_loop().norms


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def forward(self, factor: float) -> torch.Tensor:
        return sum(weight.sum() for weight in self.parameters()) * factor


@pytest.mark.parametrize("options", [LAYERED, LOOP], ids=["turns", "loop"])
def test_a_sum_that_fp16_cannot_hold_is_an_overflow(options: dict[str, Any], tmp_path: Path) -> None:
    """Each micro-batch's gradient is 40,000, their sum 80,000."""
    job = Job(Scaled, lambda model, step, micro: model(312.5).float(), accumulation=2, dtype="fp16", loss_scale=256.0)
    engine = start(job, DISK, tmp_path, **options)
    accumulated_step(engine, job, 0)
    assert engine.skipped_steps == 1
    engine.destroy(remove=True)


def layouts_of_gpt2() -> Any:
    from offload.layout.flat_layout import layouts_of
    from offload.layout.units import find_units

    model = models.GPT2.model()
    return layouts_of(model, find_units(model))


@pytest.mark.parametrize(("in_turns", "nbytes"), [(True, 2), (False, 4)])
def test_a_plan_counts_two_bytes_where_micro_batches_take_turns(in_turns: bool, nbytes: int) -> None:
    content = settings("cpu", "cpu", accumulation=4) | {}
    content["offload"]["gradients"] = "16bit"
    memory = settle(layouts_of_gpt2(), content, Room(64 * GIB, 24 * GIB, None), 4, in_turns=in_turns)
    for row, numel in zip(memory.parts.nbytes, memory.parts.trainable_numel, strict=True):
        assert row.get(State.GRAD, 0) == nbytes * numel
    assert all(total >= 4 * memory.parts.trainable_numel[unit] for unit, total in memory.placement.device_need.totals)


@pytest.mark.parametrize(
    ("weights", "more", "narrow"),
    [
        ("cpu", {"whole_steps": True, "recompute": True}, True),
        ("cpu", {"recompute": True}, False),
        ("cpu", {"whole_steps": True, "schedule": "micro_batch_major"}, False),
        ("none", {"whole_steps": True, "recompute": True}, False),
    ],
    ids=["certain", "any loop", "other order", "the first step decides"],
)
def test_a_plan_counts_two_bytes_where_the_order_is_certain(weights: str, more: dict[str, Any], narrow: bool) -> None:
    machine = described("RTX 4090", 64 * GIB, [])
    load = Load(1, 4)._replace(speculate=False, **more)
    planned = recommend.plan(from_count(10**9, 8, 2048), machine, load, settings(weights, "cpu", accumulation=4))
    assert planned.memory.parts.gradients.complete_first is narrow


def test_a_run_has_the_planned_bytes(tmp_path: Path) -> None:
    """With "auto" a loop may add micro-batches on the host, within the budget."""
    orders = {"layer_major": torch.bfloat16, "micro_batch_major": torch.float32, "auto": torch.float32}
    for schedule, dtype in orders.items():
        engine = start(JOB, ("cpu", "cpu"), tmp_path / schedule, schedule=schedule, **ROUNDED)
        assert testing.inspect(engine).gradient_dtype is dtype
        engine.destroy(remove=True)


def test_sums_beside_the_plan_need_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, **LAYERED)
    testing.replace(monkeypatch, "memory.free", lambda: 1 << 10)
    with pytest.raises(UsageError, match=r"train_batch and accumulate.*micro_batch_major"):
        engine.backward(JOB.loss(engine, 0, 0))
    engine.zero_grad()
    accumulated_step(engine, JOB, 0)
    engine.destroy(remove=True)


CASES: dict[str, tuple[str, int, dict[str, Any], tuple[str, str]]] = {
    "bf16": ("bf16", 4, {}, ("float32", "bfloat16")),
    "bf16, one micro-batch": ("bf16", 1, {}, ("bfloat16", "bfloat16")),
    "fp16": ("fp16", 4, {}, ("float32", "float32")),
    "fp16, asked": ("fp16", 4, {"gradients": "16bit"}, ("float32", "float16")),
    "fp32": ("fp32", 4, {}, ("float32", "float32")),
    "bf16, refused": ("bf16", 4, {"gradients": "fp32"}, ("float32", "float32")),
}


@pytest.mark.parametrize("case", CASES)
def test_who_rounds_by_default(case: str) -> None:
    dtype, accumulation, block, expected = CASES[case]
    content = settings("cpu", "cpu", dtype=dtype, accumulation=accumulation)
    content["offload"] |= block
    config = load_config(content)
    dtypes = gradient_dtypes(config, mode_of(config, ADAM), accumulation)
    assert tuple(str(dtype).removeprefix("torch.") for dtype in (dtypes.sums, dtypes.values)) == expected
    assert dtypes.stored is dtypes.sums


@pytest.mark.parametrize("named", ["fp32", "bf16"])
def test_a_named_dtype_of_sums_is_that_of_the_gradients(named: str) -> None:
    config = load_config(settings("cpu", "cpu", accumulation=4) | {"data_types": {"grad_accum_dtype": named}})
    dtypes = gradient_dtypes(config, mode_of(config, ADAM), 4, in_turns=True)
    assert len(set(dtypes)) == 1


def test_fp32_gradients_are_not_rounded_to_16_bits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'"gradients" is "16bit".*the weights are fp32'):
        start(JOB._replace(dtype="fp32"), MEMORY, tmp_path, **ROUNDED)


def test_a_resumed_run_says_that_gradients_are_rounded_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(JOB, DISK, tmp_path, gradients="fp32")
    train_step(engine, JOB, 0)
    engine.destroy()
    engine = start(JOB, DISK, tmp_path, resume="must", **ROUNDED)
    assert "dtype of complete gradients float32 is now bfloat16" in caplog.text
    engine.destroy(remove=True)
