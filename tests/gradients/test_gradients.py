"""Gradients from autograd to the update: the attribute, hooks, and spills."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.clip_grad import __file__ as clip_grad_file

import offload
from offload import testing
from offload.engine._native import GradientHook
from offload.errors import UsageError
from offload.torch_internals import plain_tensors
from tests.support import models
from tests.support.oracle import Job, assert_same, run, start, train_step

JOB = models.MIXTURE._replace(accumulation=1)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "`.grad`" in record.getMessage()]


def test_a_read_of_grad_after_backward_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(JOB, ("none", "none"), tmp_path)
    weight = engine.module.head.weight
    for step in range(2):
        assert weight.grad is None and len(lines(caplog)) == step
        loss = JOB.loss(engine, step, 0)
        assert weight.grad is None and len(lines(caplog)) == step
        engine.backward(loss)
        assert [p.grad for p in engine.parameters()] == [None] * len(list(engine.parameters()))
        (line,) = lines(caplog)
        assert "`.grad` of scale is None" in line and "offload.safe_get_full_grad(parameter)" in line
        assert offload.safe_get_full_grad(weight) is not None
        engine.step()
    engine.destroy()


def test_clipping_by_torch_is_recognized_below_any_number_of_calls(tmp_path: Path) -> None:
    """But only below code of torch: what a user calls in a hook of torch's own code is the user's."""

    def in_file(file: str, module: str, source: str) -> Any:
        names: dict[str, Any] = {"__name__": module}
        exec(compile(source, file, "exec"), names)
        return names

    engine = start(JOB, ("none", "none"), tmp_path)
    engine.backward(JOB.loss(engine, 0, 0))
    deep = "def read(weight, calls):\n    return read(weight, calls - 1) if calls else weight.grad\n"
    clip = in_file(clip_grad_file, "torch.nn.utils.clip_grad", "def clip(read, weight):\n    return read(weight, 30)\n")
    with pytest.raises(UsageError, match=r"torch\.nn\.utils cannot clip them"):
        clip["clip"](in_file("foreach.py", "torch.utils", deep)["read"], engine.module.head.weight)
    assert clip["clip"](in_file("user.py", "user", deep)["read"], engine.module.head.weight) is None
    engine.destroy()


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", [("none", "none"), ("nvme", "nvme")], ids=["memory", "disk"])
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.works("Training", "an enabled `torch.amp.GradScaler` (the engine scales the loss itself)", "refused")
def test_a_scaler_of_torch_is_refused_before_it_steps(placement: tuple[str, str], call: str, tmp_path: Path) -> None:
    """It would find no gradient: nothing would be unscaled, and nothing checked."""
    engine = start(JOB, placement, tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(JOB.loss(engine, 0, 0)).backward()
        with pytest.raises(UsageError, match=r'leave the scaler out.* "fp16": \{"enabled": true\}'):
            getattr(scaler, call)(engine.optimizer)
        assert engine.global_steps == 0
        engine.zero_grad()
    losses = [train_step(engine, JOB, step) for step in range(2)]
    engine.destroy(remove=True)
    assert losses == run(JOB._replace(steps=2), placement, tmp_path / "plain").losses


def test_a_scaler_that_is_off_steps_the_engine(tmp_path: Path) -> None:
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(JOB.loss(engine, 0, 0)).backward()
    scaler.unscale_(engine.optimizer)
    scaler.step(engine.optimizer)
    scaler.update()
    assert engine.global_steps == 1
    engine.destroy(remove=True)


def test_libraries_that_look_for_themselves_are_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    engine.backward(JOB.loss(engine, 0, 0))
    nn.Module.zero_grad(engine.module)  # reads each `.grad`
    engine.optimizer.zero_grad()
    engine.module.zero_grad()
    engine.backward(JOB.loss(engine, 0, 0))
    engine.module.to(engine.device)
    engine.step()
    assert not lines(caplog)
    engine.destroy(remove=True)


WAITING: dict[str, tuple[Job, dict[str, Any]]] = {
    "in autograd's tensors": (JOB._replace(steps=3), {}),
    "in fp32, beside 16 bits": (
        models.GPT2._replace(dtype="bf16", accumulation=2, steps=3),
        {"schedule": "layer_major", "gradients": "16bit"},
    ),
}


@pytest.mark.parametrize("call", [offload.Engine.zero_grad, lambda engine: engine.module.zero_grad()])
@pytest.mark.parametrize("name", WAITING)
def test_zero_grad_after_a_step_leaves_the_gradients_that_its_updates_read(
    name: str, call: Callable[[offload.Engine], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops of plain PyTorch call it after each step, or before each backward."""
    testing.replace(monkeypatch, "size.kept_gradient", 1)
    job, options = WAITING[name]
    may_read, waits, loop = threading.Event(), threading.Event(), threading.current_thread()

    def read(real: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        if threading.current_thread() is not loop and not may_read.is_set():
            waits.set()
            assert may_read.wait(60)
        return real(*arguments, **more)

    def step(engine: Any, job: Job, number: int) -> float:
        for micro in range(job.accumulation):
            engine.backward(loss := job.loss(engine, number, micro))
            if micro + 1 == job.accumulation:
                may_read.clear()
                waits.clear()
            engine.step()
        assert waits.wait(60), "the update worker waits for its states"
        call(engine)
        may_read.set()
        return float(loss.detach())

    may_read.set()
    plain = run(job, ("none", "nvme"), tmp_path / "plain", micro_batches_of_a_loop, speculate=False, **options)
    testing.intercept(monkeypatch, "store.read", read)
    assert_same(plain, run(job, ("none", "nvme"), tmp_path / "zeroed", step, speculate=False, **options))


def micro_batches_of_a_loop(engine: Any, job: Job, number: int) -> float:
    for micro in range(job.accumulation):
        engine.backward(loss := job.loss(engine, number, micro))
        engine.step()
    return float(loss.detach())


class Passes:
    """Notes the beginning of a backward, and that a gradient was seen."""

    def __init__(self) -> None:
        self.in_backward = self.gradient_seen = False

    def begin_backward(self) -> None:
        self.in_backward = True


def test_an_error_on_the_way_reaches_the_caller_of_backward() -> None:
    def refuse(gradient: torch.Tensor, alone: bool) -> None:
        raise ZeroDivisionError

    parameter = nn.Parameter(torch.ones(3))
    parameter.register_post_accumulate_grad_hook(GradientHook(Passes(), plain_tensors, refuse).take)
    with pytest.raises(ZeroDivisionError):
        parameter.sum().backward()
