"""An optimizer of one's own is a rule and its row in the layout: the engine asks for nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload.engine.optimizer import Optimizer, Rule
from offload.engine.update_strategy import TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.layout import modes
from offload.optimizers.fused import segments_in
from offload.states import State
from tests.support.oracle import assert_same_tensors

LR, BETA = 2.0**-7, 0.75
STEPS = 3


def moved(momentum: torch.Tensor, gradient: torch.Tensor, lr: float) -> torch.Tensor:
    """Steps a momentum in place, and returns the move of the weights: the momentum's signs."""
    momentum.copy_(momentum * BETA + gradient * (1 - BETA))
    return momentum.sign() * -lr


class SignStep(NamedTuple):
    lr: float
    grad_scale: float


class SignRule(Rule):
    """Descent along the signs of a momentum."""

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        return SignStep(float(group["lr"]), grad_scale)

    def strategy(self, setting: UpdateSetting) -> SignUpdates:
        return SignUpdates()


class SignUpdates:
    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        return SignSteps(update)


class SignSteps:
    passes, in_place = 1, False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, update: UnitUpdate) -> None:
        self._update = update

    def run(self, tile: TileContent, last: bool) -> None:
        assert tile.gradient is not None
        for _, segment in segments_in(self._update, tile):
            part, step = slice(segment.start, segment.stop), segment.step
            gradient = tile.gradient[part] * step.grad_scale
            tile.states[State.WEIGHT][part] += moved(tile.states[State.EXP_AVG][part], gradient, step.lr)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step))


def plain() -> dict[str, torch.Tensor]:
    trained = model()
    momenta = {name: torch.zeros_like(parameter) for name, parameter in trained.named_parameters()}
    for step in range(STEPS):
        trained(rows(step)).square().mean().backward()
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                assert parameter.grad is not None
                parameter += moved(momenta[name], parameter.grad, LR * (step + 1))
                parameter.grad = None
    return trained.state_dict()


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_a_rule_of_ones_own_trains_from_any_tier(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modes.RULE_LAYOUTS, "sign", modes.RuleLayout((State.EXP_AVG,)))
    trained, rule = model(), SignRule(name="sign", scheduled=("lr",))
    optimizer = Optimizer([{"params": list(trained.parameters())}], {"lr": LR}, rule)
    tier = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
        "offload": {"device": "cpu"},
    }
    engine = offload.initialize(model=trained, optimizer=optimizer, config=config)[0]
    assert engine.optimizer is optimizer
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (step + 1)  # as a schedule does
        engine.backward(engine(rows(step)).square().mean())
        engine.step()
    assert_same_tensors(engine.state_dict(), plain())
    engine.destroy(remove=True)
