"""In fp16 the loss is scaled; an overflow skips its step and moves the scale as documented. No bit depends on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import Fp16
from offload.engine.state import LossScaler
from offload.errors import NumericsError, UsageError
from tests.support import models
from tests.support.oracle import Job, run, start

DISK = ("nvme", "nvme")


def scales(config: Fp16, overflows: str) -> list[float]:
    """The scale after each step, of which those with an "x" have an overflow."""
    scaler = LossScaler(config)
    values = []
    for step in overflows:
        scaler.stepped(step == "x")
        values.append(scaler.scale)
    return values


TABLES: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    # The first overflow uses up the hysteresis of 2, each further one halves; two good steps double.
    "as configured": (
        {"initial_scale_power": 4, "loss_scale_window": 2},
        "xx..xx.x..",
        [16, 8, 8, 16, 16, 8, 8, 4, 4, 8],
    ),
    "hysteresis 1": (
        {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1},
        "x...x.x...",
        [8, 8, 8, 16, 8, 8, 4, 4, 4, 8],
    ),
    # A window that is over gives the hysteresis back.
    "given back by a window": (
        {"initial_scale_power": 4, "loss_scale_window": 2},
        "x..x..x",
        [16, 16, 32, 32, 32, 64, 64],
    ),
    # One good step does.
    "consecutive": (
        {"initial_scale_power": 4, "loss_scale_window": 9, "consecutive_hysteresis": True},
        "x.x.xx.x",
        [16, 16, 16, 16, 16, 8, 8, 8],
    ),
    "not consecutive": ({"initial_scale_power": 4, "loss_scale_window": 9}, "x.x.xx.x", [16, 16, 8, 8, 4, 2, 2, 1]),
    "the least": (
        {"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 3, "loss_scale_window": 2},
        "xxx..",
        [4, 3, 3, 3, 6],
    ),
    "fixed": ({"loss_scale": 128}, "xx...x", [128] * 6),
}


def test_a_sequence_of_overflows_gives_these_scales() -> None:
    for name, (options, overflows, expected) in TABLES.items():
        assert scales(Fp16(enabled=True, **options), overflows) == expected, name


def test_a_scale_that_is_now_dynamic_begins_as_the_config_says() -> None:
    """Whose gradients vanished at a fixed scale wants another one, not that one times two in a thousand steps."""
    fixed, dynamic = LossScaler(Fp16(enabled=True, loss_scale=8)), LossScaler(Fp16(enabled=True))
    before = dynamic.scale
    dynamic.restore(fixed.state())
    assert dynamic.scale == before == 2**16
    fixed.restore(dynamic.state())
    assert fixed.scale == 8
    older = {name: value for name, value in fixed.state().items() if name != "dynamic"}
    dynamic.restore(older)
    assert dynamic.scale == 8, "states of before do not tell"


def test_a_scale_is_never_below_a_bound_that_was_raised() -> None:
    before, after = (LossScaler(Fp16(enabled=True, min_loss_scale=least)) for least in (1, 1024))
    before.scale = 16
    after.restore(before.state())
    assert after.scale == 1024


# -- an engine ----------------------------------------------------------------------------------------


class Loud(nn.Module):
    """Its gradient is what the step's input says: 60000 overflows with any scale above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.weight * rows).sum()


def engine_of(folder: Path, fp16: dict[str, Any], **options: Any) -> offload.Engine:
    settings = {
        "fp16": {"enabled": True, **fp16},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "device": "cpu", **options},
    }
    torch.manual_seed(0)
    return offload.initialize(model=Loud(), config=settings)[0]


def step(engine: offload.Engine, size: float) -> None:
    engine.backward(engine(torch.full((8,), size, dtype=torch.float16)))
    engine.step()


def weights(engine: offload.Engine) -> torch.Tensor:
    return engine.module.state_dict()["weight"].float()


def test_an_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2})
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    engine.lr_scheduler = schedule
    assert not engine.was_step_applied()
    step(engine, 1.0)
    assert engine.was_step_applied() and not engine.optimizer.overflow and engine.loss_scale == 16
    before = weights(engine)
    assert torch.equal(before, torch.full((8,), 0.4).half().float()) and engine.get_lr() == [0.05]
    step(engine, 60000.0)
    assert engine.optimizer.overflow and not engine.was_step_applied() and engine.loss_scale == 8
    assert torch.equal(weights(engine), before) and engine.skipped_steps == 1 and engine.global_steps == 2
    assert engine.get_lr() == [0.05], "a step that was not taken moves no schedule"
    assert math.isinf(engine.get_global_grad_norm() or 0)
    step(engine, 1.0)
    step(engine, 1.0)
    assert engine.loss_scale == 16 == engine.optimizer.loss_scale and engine.skipped_steps == 1
    assert engine.get_global_grad_norm() == pytest.approx(8**0.5)
    with pytest.raises(AttributeError):  # it would have no effect
        engine.optimizer.loss_scale = 4.0  # type: ignore[misc]
    engine.destroy(remove=True)


def test_the_scale_is_resumed(tmp_path: Path) -> None:
    fp16 = {"initial_scale_power": 4, "loss_scale_window": 2}  # each step changes a part of what is resumed
    sizes = [60000.0, 60000.0, 1.0, 1.0]
    unbroken = engine_of(tmp_path / "whole", fp16)
    expected = []
    for size in sizes:
        step(unbroken, size)
        expected.append((unbroken.loss_scale, unbroken.skipped_steps, weights(unbroken).tolist()))
    unbroken.destroy(remove=True)
    scales = []
    for size in sizes:
        engine = engine_of(tmp_path / "parts", fp16, resume="auto")
        step(engine, size)
        scales.append((engine.loss_scale, engine.skipped_steps, weights(engine).tolist()))
        engine.destroy()
    assert scales == expected


def test_another_kind_of_scale_is_told(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"loss_scale": 8})
    step(engine, 1.0)
    engine.destroy()
    engine = engine_of(tmp_path, {"initial_scale_power": 5}, resume="must")
    assert engine.loss_scale == 32 and any("loss scale 8.0 is now dynamic; " in line for line in engine.notices)
    engine.destroy(remove=True)


def test_at_the_least_scale_an_overflow_is_an_error(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 2})
    before = weights(engine)
    with pytest.raises(NumericsError, match="The loss scale is 2 already, its minimum"):
        step(engine, 60000.0)
    assert torch.equal(weights(engine), before) and engine.global_steps == 0
    step(engine, 1.0)
    assert engine.was_step_applied()
    engine.destroy(remove=True)


def test_each_backward_of_a_step_must_be_scaled(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"loss_scale": 64})
    rows = torch.ones(8, dtype=torch.float16)
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        engine(rows).backward()
    engine.scale(engine(rows)).backward()
    engine.step()
    assert torch.allclose(weights(engine), torch.full((8,), 0.4), atol=1e-3)
    with pytest.raises(UsageError, match="multiplied by the loss scale, 64"):
        engine(rows).backward()
    engine.backward(engine(rows))
    with pytest.raises(UsageError, match="for each backward"):
        engine(rows).backward()
    left, right = engine.scale(engine(rows)), engine.scale(engine(rows))
    left.backward()
    right.backward()
    engine.step()
    assert torch.allclose(weights(engine), torch.full((8,), 0.1), atol=1e-3)
    engine.destroy(remove=True)


def test_elsewhere_a_scale_is_one(tmp_path: Path) -> None:
    job = models.SHALLOW
    engine = start(job, DISK, tmp_path)
    loss = job.loss(engine, 0, 0)
    assert engine.scale(loss) is loss and engine.loss_scale == 1.0
    loss.backward()
    engine.step()
    engine.destroy(remove=True)


def test_no_bit_depends_on_a_scale_that_overflows_nowhere(tmp_path: Path) -> None:
    """Powers of two move the exponent alone, as long as nothing is so small that it loses bits."""
    job = Job(Loud, _loud, steps=3, accumulation=3, dtype="fp16", lr=1e-2)
    left, right = (run(job._replace(loss_scale=scale), DISK, tmp_path / str(scale)) for scale in (1.0, 1024.0))
    assert torch.equal(left.weights["weight"], right.weights["weight"]) and left.norms == right.norms


def _loud(model: Any, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(8, generator=torch.Generator().manual_seed(10 * step + micro))
    return model(rows.half())
