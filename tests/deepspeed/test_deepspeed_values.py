"""Under DeepSpeed's names numbers are DeepSpeed's: those of optimizers that a script leaves out, and those of LAMB."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from offload.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from offload.deepspeed.ops.lamb import FusedLamb
from offload.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload.errors import ConfigError

MOMENTS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
ADAM = {**MOMENTS, "eps": 1e-8, "decoupled": True}
LAMB = {**MOMENTS, "eps": 1e-8, "max_coeff": 10.0, "min_coeff": 0.01}
ADAGRAD = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def config(**blocks: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, **blocks}


def step(engine: Any, number: int) -> None:
    engine.backward(engine(torch.full((1, 6), 0.1 * (number + 1))).square().sum())
    engine.step()


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "Adam"}, ADAM),
        ({"type": "AdamW", "params": {}}, ADAM),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {**ADAM, "weight_decay": 0.01}),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, {**ADAM, "decoupled": False}),
        ({"type": "Lamb"}, LAMB),
        ({"type": "Lion"}, MOMENTS),
        ({"type": "Adagrad"}, ADAGRAD),
        ({"type": "SGD"}, {"lr": 1e-3, "weight_decay": 0.0}),
        ({"type": "RMSprop"}, {"lr": 1e-2, "alpha": 0.99}),
        ({"type": "Muon"}, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}),
    ],
)
def test_what_the_json_leaves_out_is_deepspeeds(
    block: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config(optimizer=block))
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected
    assert f"lr {expected['lr']:g}" in caplog.text and "DeepSpeed's default" in caplog.text
    if block["type"] == "Muon":
        rest = optimizer.param_groups[1]
        assert (rest["lr"], rest["betas"], rest["eps"]) == (3e-4, (0.9, 0.95), 1e-10)
    engine.destroy()


def test_what_a_script_leaves_out_is_deepspeeds() -> None:
    kind: Callable[..., Any]
    expected: dict[str, Any]
    for kind, expected in (
        (FusedAdam, ADAM),
        (DeepSpeedCPUAdam, ADAM),
        (FusedLamb, LAMB),
        (FusedLion, MOMENTS),
        (DeepSpeedCPULion, MOMENTS),
        (DeepSpeedCPUAdagrad, ADAGRAD),
    ):
        print(kind)
        group = kind(net().parameters()).param_groups[0]
        assert {key: group[key] for key in expected} == expected


def test_a_rate_that_a_trainer_should_have_filled_in_is_an_error() -> None:
    for initialize, params in ((deepspeed.initialize, {"lr": "auto"}), (offload.initialize, {})):
        with pytest.raises(ConfigError, match='the learning rate is "auto" or absent'):
            initialize(model=net(), config=config(optimizer={"type": "AdamW", "params": params}))


class Weight(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 5, generator=torch.Generator().manual_seed(7)))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.w * gradient).sum()


@pytest.mark.numeric
@pytest.mark.parametrize(("highest", "decay", "eps"), [(10.0, 0.1, 1e-6), (0.5, 0.0, 1e-2)])
def test_lamb_corrects_the_bias_in_the_length_of_its_step(highest: float, decay: float, eps: float) -> None:
    """By DeepSpeed's formula in float64; a lower bound of the ratio is reached in the second case."""
    model = Weight()
    w, m, v = model.w.detach().double(), torch.zeros(12, 5).double(), torch.zeros(12, 5).double()
    optimizer = FusedLamb(
        model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=eps, weight_decay=decay, max_coeff=highest
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config())
    for number in range(1, 5):
        gradient = torch.randn(12, 5, generator=torch.Generator().manual_seed(number)) * 0.1
        engine.backward(engine(gradient))
        engine.step()
        g = gradient.double()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g.square()
        u = m / (v.sqrt() + eps) + decay * w
        ratio = min(max(float(w.norm() / u.norm()), 0.01), highest)
        w = w - 0.02 * math.sqrt(1 - 0.95**number) / (1 - 0.8**number) * ratio * u
        torch.testing.assert_close(engine.module.w.double(), w, rtol=1e-5, atol=1e-6)
    engine.destroy()


MADE_WITH: dict[str, Callable[[Any, Any], Any]] = {
    "FusedAdam": lambda params, lr: FusedAdam(params, lr=lr),
    "AdamW of torch, by our kernel": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=False),
    "NAdam of torch, by its own code": lambda params, lr: torch.optim.NAdam(params, lr=lr, foreach=False),
}


@pytest.mark.parametrize("name", MADE_WITH)
def test_a_rate_in_a_tensor_stays_the_scripts(name: str) -> None:
    """What the script, a schedule or `set_lr` fills in counts from the next step on."""
    weights = []
    for rate in (torch.tensor(0.02), None):
        model, given = net(), 0.02 if rate is None else rate
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=MADE_WITH[name](model.parameters(), given), config=config()
        )
        (group,) = optimizer.param_groups
        if rate is None:  # what fp32 makes of the number
            group["lr"] = float(torch.tensor(0.02))
        for number in range(4):
            step(engine, number)
            if number == 0 and rate is not None:
                rate.fill_(0.5)
            elif number == 0:
                group["lr"] = 0.5
            if number == 1:
                engine.set_lr(torch.tensor(0.25))
        assert engine.get_lr() == [0.25] and (rate is None or group["lr"] is rate)
        weights.append([parameter.detach().clone() for parameter in engine.module.parameters()])
        engine.destroy()
    assert all(map(torch.equal, *weights))


def test_schedules_and_a_resume_fill_the_tensor(tmp_path: Path) -> None:
    blocks = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": torch.tensor(0.5)}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "offload": {"resume": "auto", "run": "held"},
    }
    seen = []
    for _ in range(2):
        rate, model = torch.tensor(0.25), net()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=FusedAdam(model.parameters(), lr=rate), config=config(**blocks)
        )
        seen.append(float(rate))
        step(engine, 0)
        step(engine, 1)
        seen.append(float(rate))
        assert engine.optimizer.param_groups[0]["lr"] is rate
        engine.destroy()
    assert seen == [0.0, 0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"zero_optimization": {"sub_group_size": 3000}}, r'"sub_group_size" 3000 cuts the updates of \d+ elements'),
        ({"zero_optimization": {"sub_group_size": 500_000}}, None),
        ({"aio": {"block_size": 8192}}, r'"aio" asks for blocks of 8.0 KiB and .* in flight'),
        ({"aio": {"block_size": 65536, "queue_depth": 1, "thread_count": 1}}, "64.0 KiB in flight"),
        ({"aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1}}, None),
    ],
)
def test_a_number_with_which_a_run_takes_several_times_as_long_is_told(
    keys: dict[str, Any], line: str | None, tmp_path: Path
) -> None:
    tiers = {name: {"device": "nvme", "nvme_path": str(tmp_path)} for name in ("offload_param", "offload_optimizer")}
    zero = {"stage": 3, **tiers, **keys.get("zero_optimization", {})}
    blocks = {**keys, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(400, 400), config=config(**blocks))
    told = [notice for notice in engine.notices if "several times as long" in notice]
    assert len(told) == (line is not None) and (line is None or re.search(line, told[0]))
    engine.destroy()
