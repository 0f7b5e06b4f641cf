"""What a model's `state_dict()` contains beside weights and buffers is in commits and checkpoints, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import ConfigError, StoreError, UsageError


class Ranged(nn.Module):
    """Divides by the largest input so far, as modules of 8 bits do; its state is of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.largest, self.seen = torch.zeros((), dtype=torch.bfloat16), 0
        self.history: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().max().bfloat16())
            self.seen += len(x)
            self.history.append((float("inf"), bytes([self.seen]), None, torch.tensor([], dtype=torch.int8)))
        return self.layer(x) / (1 + self.largest.float() + len(self.history))

    def get_extra_state(self) -> Any:
        return {"largest": self.largest, 7: self.seen, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.largest, self.seen, self.history = state["largest"], state[7], state["history"]


class Metric(nn.Module):
    """Saves and loads tensors that are no buffers, as the metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.total = nn.Linear(8, 8), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.detach().mean()
        return self.layer(x) + self.total.sum()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}total"] = self.total

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}total" in state:
            self.total = state.pop(f"{prefix}total")
        super()._load_from_state_dict(state, prefix, *args)


def renamed() -> nn.Module:
    """A model whose hooks rename its weights, and add a constant that nobody loads."""
    model = nn.Sequential(nn.Linear(8, 8), Ranged())

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}matrix"] = state.pop(f"{prefix}weight")
        state[f"{prefix}format"] = torch.tensor(2)

    model[0].register_state_dict_post_hook(save)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "extra state": lambda: nn.Sequential(Ranged(), nn.Tanh(), Ranged()),
    "own methods": lambda: nn.Sequential(Metric(), nn.Tanh(), Metric()),
    "hooks": renamed,
}


def start(model: nn.Module, folder: Path, name: str, **more: Any) -> offload.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "run": name, **more},
    }
    return offload.initialize(model=model, config=config)[0]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def losses(engine: offload.Engine, steps: range) -> list[float]:
    found = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) * (6 - step)
        loss = (engine(x) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_that_goes_on_equals_an_unbroken_one(kind: str, tmp_path: Path) -> None:
    engine = start(made(kind), tmp_path, "unbroken")
    expected = losses(engine, range(5))
    engine.destroy(remove=True)
    first = start(made(kind), tmp_path, "run")
    assert losses(first, range(3)) == expected[:3]
    first.save_checkpoint(tmp_path / "saved")
    first.destroy()
    again = start(made(kind), tmp_path, "run", resume="must")
    assert losses(again, range(3, 5)) == expected[3:]
    again.load_checkpoint(tmp_path / "saved")
    assert losses(again, range(3, 5)) == expected[3:]
    again.load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert losses(again, range(3, 4)) == expected[3:4]
    again.destroy(remove=True)


class Unplain(Ranged):
    def get_extra_state(self) -> Any:
        return {"names": {"a set"}}


class Giver(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


class Stubborn(Metric):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.total = state[f"{prefix}total"] * state[f"{prefix}layer.weight"].numel()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unplain, r"Unplain\.get_extra_state\(\) \(0\._extra_state\)\['names'\] is a builtins\.set"),
        (lambda: Giver(8, 8), "Giver has get_extra_state without set_extra_state"),
        (Stubborn, r"contains 0\.total, which is neither a parameter nor a buffer, and load_state_dict\(\) does not"),
    ],
)
def test_what_no_commit_can_hold_is_refused(model: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    built = nn.Sequential(model())
    with pytest.raises(ConfigError, match=message):
        start(built, tmp_path, "run")
    assert not list(tmp_path.iterdir()) and bool(built(torch.ones(2, 8)).isfinite().all()), "nothing was touched"


def test_without_commits_a_checkpoint_is_refused_and_the_start_says_so(tmp_path: Path) -> None:
    engine = start(nn.Sequential(Unplain()), tmp_path, "run", durability="none")
    assert any("no checkpoint of this run can be saved: Unplain.get_extra_state()" in each for each in engine.notices)
    losses(engine, range(1))
    with pytest.raises(UsageError, match="Unplain"):
        engine.save_checkpoint(tmp_path / "saved")
    losses(engine, range(1, 2))
    engine.destroy(remove=True)


def test_a_model_without_the_entries_of_the_run_is_refused(tmp_path: Path) -> None:
    engine = start(nn.Sequential(Metric()), tmp_path, "run")
    losses(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(StoreError, match=r"the run contains the entry 0\.total of the model's state_dict"):
        start(nn.Sequential(Plain()), tmp_path, "run", resume="must")
    other = start(nn.Sequential(Plain()), tmp_path, "other")
    with pytest.raises(StoreError, match=r"contains the entry 0\.total of the model's state_dict"):
        other.load_checkpoint(tmp_path / "saved")
    other.destroy(remove=True)
