"""The optimizer that a user passed to `initialize` and still holds does what the engine's does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.errors import UsageError
from tests.support.oracle import assert_same_tensors


def start(
    folder: Path, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[offload.Engine, torch.optim.Optimizer]:
    """Returns an engine on a small model, and the optimizer that it was given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = make(list(model.parameters()))
    tier = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
        "offload": {"device": "cpu"},
    }
    return offload.initialize(model=model, optimizer=optimizer, config=config)[0], optimizer


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def rprop(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=1e-2)


def train(engine: offload.Engine, *steps: int) -> dict[str, torch.Tensor]:
    """Trains the steps and returns the weights."""
    for step in steps:
        rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(rows).square().mean())
        engine.step()
    return engine.state_dict()


def assert_same_states(mine: dict[int, dict[str, torch.Tensor]], theirs: dict[int, dict[str, torch.Tensor]]) -> None:
    assert mine.keys() == theirs.keys()
    for number, state in mine.items():
        assert_same_tensors(state, theirs[number])


@pytest.mark.parametrize("make", [adamw, rprop], ids=["by a kernel", "by its own code"])
def test_it_saves_the_states_of_the_engine(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """A dict without states would be a checkpoint that has lost them."""
    engine, optimizer = start(tmp_path, make)
    assert optimizer.state_dict()["state"] == {}
    train(engine, 0, 1)
    mine, theirs = optimizer.state_dict(), engine.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == {0, 1, 2, 3}
    assert_same_states(mine["state"], theirs["state"])
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="destroyed"):
        optimizer.state_dict()


def test_what_it_loads_the_engine_trains_on_with(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path / "one", adamw)
    weights = {name: value.clone() for name, value in train(engine, 0, 1).items()}
    state = copy.deepcopy(optimizer.state_dict())
    after = train(engine, 2, 3)
    engine.destroy(remove=True)
    engine, optimizer = start(tmp_path / "other", adamw)
    engine.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same_states(optimizer.state_dict()["state"], state["state"])
    assert_same_tensors(train(engine, 2, 3), after)
    engine.destroy(remove=True)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path, adamw)
    train(engine, 0)
    before = optimizer.state_dict()
    with pytest.raises(UsageError, match="must contain exp_avg"):
        optimizer.load_state_dict({**before, "state": {0: {"step": 1}}})
    assert_same_states(optimizer.state_dict()["state"], before["state"])
    train(engine, 1)
    engine.destroy(remove=True)


def test_a_schedule_on_it_acts_on_the_engine_also_after_a_load(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path, adamw)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(engine, 0)
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    assert engine.get_lr() == [2.5e-3] and optimizer.param_groups is engine.optimizer.param_groups
    engine.destroy(remove=True)


def test_one_whose_list_of_groups_is_replaced_is_refused(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path, adamw)
    optimizer.param_groups = [*optimizer.param_groups]
    with pytest.raises(UsageError, match="its list param_groups was replaced"):
        train(engine, 0)
    engine.destroy(remove=True)


@pytest.mark.parametrize("make", [adamw, rprop], ids=["by a kernel", "by its own code"])
def test_a_look_at_its_states_before_the_start_changes_nothing(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """`state` is a defaultdict, so a look leaves an empty dict."""

    def looked_at(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        assert not any(optimizer.state[parameter] for parameter in parameters)
        return optimizer

    expected, _ = start(tmp_path / "plain", make)
    engine, _ = start(tmp_path / "looked at", looked_at)
    assert_same_tensors(train(engine, 0, 1), train(expected, 0, 1))
    expected.destroy(remove=True)
    engine.destroy(remove=True)


def test_a_look_at_its_states_during_training_is_an_error(tmp_path: Path) -> None:
    """They are in the engine: code that went on with an empty dict would do nothing, without a word."""
    engine, optimizer = start(tmp_path, adamw)
    train(engine, 0)
    for each in (optimizer, engine.optimizer):
        with pytest.raises(UsageError, match="are in the engine"):
            each.state[each.param_groups[0]["params"][0]]
        assert not each.state
    engine.destroy(remove=True)


def test_hooks_on_the_state_dict_meet_the_states(tmp_path: Path) -> None:
    engine, _ = start(tmp_path, adamw)
    train(engine, 0)
    seen: list[str] = []
    hooks = (
        engine.optimizer.register_state_dict_post_hook(lambda _, found: {**found, "phases": len(found["state"])}),
        engine.optimizer.register_load_state_dict_pre_hook(lambda _, found: seen.append(f"{found['phases']} phases")),
        engine.optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded")),
    )
    found = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(found)
    assert found["phases"] == 4 and seen == ["4 phases", "loaded"]
    for hook in hooks:
        hook.remove()
    assert engine.optimizer.state_dict().keys() == {"state", "param_groups"}
    engine.destroy(remove=True)


def test_attributes_of_the_optimizer_are_those_of_the_step(tmp_path: Path) -> None:
    """A script may change them behind `step`, while the update still runs."""

    class Damped(torch.optim.Optimizer):
        damping = 1.0

        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in (p for group in self.param_groups for p in group["params"]):
                parameter.data.sub_(parameter.grad, alpha=self.damping / 10)

    weights = []
    for damping in (1.0, 0.0):
        engine, optimizer = start(tmp_path / str(damping), Damped)
        rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(7))
        engine.backward(engine(rows).square().mean())
        engine.step()
        optimizer.damping = damping  # type: ignore[attr-defined]
        weights.append(engine.state_dict())
        engine.destroy(remove=True)
    assert_same_tensors(*weights)
