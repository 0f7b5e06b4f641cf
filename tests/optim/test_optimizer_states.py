"""An engine's optimizer supports what users do with torch's: states, groups, numbers, steps, hooks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import BudgetError, ConfigError, NumericsError, UsageError
from tests.support import rounding_bounds
from tests.support.oracle import Job, assert_same_tensors

DISK = "nvme"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1))


def _start(folder: Path, optimizer: Any = None, model: nn.Module | None = None, **config: Any) -> offload.Engine:
    model = model or _model()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": DISK, "nvme_path": str(folder)},
            "offload_optimizer": {"device": DISK, "nvme_path": str(folder)},
        },
        "offload": {"device": "cpu", **config},
    }
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return offload.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _loss(model: Any, step: int) -> torch.Tensor:
    rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(rows).square().mean()
    return loss


JOB = Job(_model, lambda model, step, _: _loss(model, step), steps=4, lr=1e-2)
"""What `_train` does at most, for its bounds."""


def _train(engine: offload.Engine, *steps: int) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.backward(_loss(engine, step))
        engine.step()
    return engine.state_dict()


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()


def _close(mine: dict[str, torch.Tensor], model: nn.Module) -> None:
    rounding_bounds.same_weights(mine, model.state_dict(), JOB)


# -- states -------------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_a_state_dict_is_that_of_torch(tmp_path: Path) -> None:
    engine, model = _start(tmp_path), _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert engine.optimizer.state_dict()["state"] == {}
    _train(engine, 0, 1)
    _plain(model, optimizer, 0, 1)
    mine, theirs = engine.optimizer.state_dict(), optimizer.state_dict()
    assert mine["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for name, value in state.items():
            rounding_bounds.same_tensor(
                mine["state"][number][name], value, 4 * rounding_bounds.step_error(JOB)
            )  # moments: of squares
    engine.destroy(remove=True)


def test_a_state_dict_that_is_loaded_goes_on_bit_for_bit(tmp_path: Path) -> None:
    engine = _start(tmp_path / "one")
    weights, state = _train(engine, 0, 1), engine.optimizer.state_dict()
    expected = _train(engine, 2, 3)
    engine.destroy(remove=True)
    other = _start(tmp_path / "other")
    other.module.load_state_dict(weights)
    other.optimizer.load_state_dict(copy.deepcopy(state))
    assert_same_tensors(_train(other, 2, 3), expected)
    other.destroy(remove=True)


@pytest.mark.numeric
def test_the_state_of_an_optimizer_of_torch_is_taken_over(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _plain(model, optimizer, 0, 1)
    engine = _start(tmp_path)
    engine.module.load_state_dict(model.state_dict())
    engine.optimizer.load_state_dict(optimizer.state_dict())
    _plain(model, optimizer, 2, 3)
    _close(_train(engine, 2, 3), model)
    engine.destroy(remove=True)


@pytest.mark.numeric
def test_a_parameter_without_a_state_starts_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in torch, where a state that is loaded takes the place of all that was there."""
    model, engine = _model(), _start(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _plain(model, optimizer, 0, 1)
    _train(engine, 0, 1)
    state = optimizer.state_dict()
    for number in (0, 3):
        del state["state"][number]
    optimizer.load_state_dict(copy.deepcopy(state))
    engine.optimizer.load_state_dict(copy.deepcopy(state))
    assert caplog.text.count("lacks the state of 2 parameters, of 4 that train; their moments begin at zero") == 1
    assert engine.optimizer.state_dict()["state"].keys() == {1, 2}
    _plain(model, optimizer, 2)
    _close(_train(engine, 2), model)
    assert [each["step"] for each in engine.optimizer.state_dict()["state"].values()] == [1, 3, 3, 1]
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, 'a dict with "state" and "param_groups", got'),
        (5, "got int"),
        (
            {"state": {}, "param_groups": [{"params": [0]}]},
            r"groups of \[1\] parameters, this optimizer contains groups",
        ),
        (
            {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
            r"state 0, of parameter 0.weight, must contain exp_avg, exp_avg_sq, each a tensor of shape \[20, 12\]",
        ),
        (
            {"state": {"0": {}, 7: {}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
            "got 2 states of other numbers, the first is '0'; pass the result",
        ),
        ({"state": {}, "param_groups": [{"params": [0, 1, 2, 3], "lr": math.nan}]}, "lr of group 0 is nan"),
    ],
)
def test_what_is_no_state_changes_nothing(state: Any, message: str, tmp_path: Path) -> None:
    engine = _start(tmp_path)
    before = _train(engine, 0)
    with pytest.raises(UsageError, match=message):
        engine.optimizer.load_state_dict(state)
    assert_same_tensors(engine.state_dict(), before)
    _train(engine, 1)
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    "wrong", ["many", None, math.nan, math.inf, -1, 1.5, torch.ones(2), torch.tensor(-3.0)], ids=str
)
def test_a_count_that_is_none_changes_nothing(wrong: Any, tmp_path: Path) -> None:
    """Not even the state of a parameter before it."""
    engine = _start(tmp_path)
    _train(engine, 0)
    before = engine.optimizer.state_dict()
    state = copy.deepcopy(before)
    state["state"][0]["exp_avg"] += 1
    state["state"][2]["step"] = wrong
    with pytest.raises(UsageError, match=r"state 2, of parameter 2.weight, .*step.* whole number of updates, got"):
        engine.optimizer.load_state_dict(state)
    after = engine.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, theirs in before["state"].items():
        assert_same_tensors(after["state"][number], theirs)
    engine.destroy(remove=True)


def test_a_state_of_a_frozen_parameter_changes_nothing(tmp_path: Path) -> None:
    plain, model = _model(), _model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    _plain(plain, optimizer, 0)
    model[2].weight.requires_grad_(False)
    engine = _start(tmp_path, model=model)
    with pytest.raises(UsageError, match=r"state 2, of parameter 2.weight, cannot be set: the parameter is frozen"):
        engine.optimizer.load_state_dict(optimizer.state_dict())
    assert engine.optimizer.state_dict()["state"] == {} and engine.optimizer.param_groups[0]["lr"] == 1e-2
    engine.destroy(remove=True)


def test_states_of_an_optimizer_without_a_kernel_are_read_and_not_set(tmp_path: Path) -> None:
    model = _model()
    engine = _start(tmp_path, torch.optim.NAdam(model.parameters()), model)
    plain = _model()
    optimizer = torch.optim.NAdam(plain.parameters())
    _train(engine, 0, 1)
    _plain(plain, optimizer, 0, 1)
    state = engine.optimizer.state_dict()
    for number, theirs in optimizer.state_dict()["state"].items():
        assert_same_tensors(state["state"][number], theirs)
    with pytest.raises(UsageError, match=r"engine\.load_checkpoint"):
        engine.optimizer.load_state_dict(state)
    engine.destroy(remove=True)


# -- groups and numbers ---------------------------------------------------------------------------------


def test_groups_stay_the_same_objects_when_a_state_is_loaded(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = _start(tmp_path, optimizer, model)
    _train(engine, 0)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    assert engine.get_lr() == [0.5]
    engine.destroy(remove=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1e-3", None])
def test_a_learning_rate_that_is_none_never_reaches_the_weights(value: Any, tmp_path: Path) -> None:
    engine = _start(tmp_path)
    before = _train(engine, 0)
    engine.optimizer.param_groups[0]["lr"] = value
    engine.backward(_loss(engine, 1))
    with pytest.raises(UsageError, match=r"lr of group 0 is .* expected a finite number"):
        engine.step()
    assert_same_tensors(engine.state_dict(), before)
    engine.optimizer.param_groups[0]["lr"] = 1e-2
    engine.step()
    assert engine.global_steps == 2
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.Adam(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2),
    ],
)
@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_an_option_that_comes_later_is_refused(make: Any, option: str, tmp_path: Path) -> None:
    model = _model()
    engine = _start(tmp_path, make(model.parameters()), model)
    with pytest.raises(UsageError, match=f"group 0 has {option}=True now"):
        engine.optimizer.add_param_group({"params": list(model[0].parameters()), option: True})
    engine.optimizer.param_groups[0][option] = True
    with pytest.raises(UsageError, match=f"group 0 has {option}=True now"):
        _train(engine, 0)
    engine.destroy()


def test_a_momentum_that_comes_later_is_refused(tmp_path: Path) -> None:
    """No momentum is kept of such an optimizer; what was wrong can be mended, and training goes on."""
    model = _model()
    engine = _start(tmp_path, torch.optim.SGD(model.parameters(), lr=1e-2), model)
    before = _train(engine, 0)
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    engine.backward(_loss(engine, 1))
    with pytest.raises(UsageError, match=r"group 0 has momentum=0\.9 now"):
        engine.step()
    assert_same_tensors(engine.state_dict(), before)
    engine.optimizer.param_groups[0]["momentum"] = 0
    engine.step()
    assert engine.global_steps == 2
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("group", "message"),
    [(None, "got NoneType"), ([], "got list"), ({"lr": 1.0}, '"params"'), ({"betas": (0.5,)}, "betas")],
)
def test_a_group_that_is_none(group: Any, message: str, tmp_path: Path) -> None:
    engine = _start(tmp_path)
    if isinstance(group, dict) and "betas" in group:
        group["params"] = list(engine.module[0].parameters())
    with pytest.raises(UsageError, match=message):
        engine.optimizer.add_param_group(group)
    assert len(engine.optimizer.param_groups) == 1
    _train(engine, 0)
    engine.destroy(remove=True)


def test_what_is_no_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"expects a torch\.optim\.Optimizer, got int"):
        offload.initialize(model=_model(), optimizer=5, config={})


def test_an_optimizer_that_was_given_is_as_it_was_where_no_engine_starts(tmp_path: Path) -> None:
    model, plain = _model(), _model()
    optimizer, expected = (torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (model, plain))
    with pytest.raises(BudgetError):
        _start(tmp_path, optimizer, model, host_memory=1)
    _plain(model, optimizer, 0)
    _plain(plain, expected, 0)
    assert_same_tensors(model.state_dict(), plain.state_dict())


# -- steps and hooks ------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_a_loop_may_step_the_optimizer_that_it_gave(tmp_path: Path) -> None:
    """With a schedule over it, as in a loop of torch."""
    plain, model = _model(), _model()
    theirs, mine = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (theirs, mine)]
    engine = _start(tmp_path, mine, model)
    schedules.append(torch.optim.lr_scheduler.StepLR(mine, 2, 0.9))  # made over it afterwards
    for step in range(3):
        _plain(plain, theirs, step)
        mine.zero_grad()
        engine.backward(_loss(engine, step))
        mine.step()
        for schedule in schedules[:2]:
            schedule.step()
    assert engine.global_steps == 3
    _close(engine.state_dict(), plain)
    engine.destroy(remove=True)


def test_step_hooks_run_once_a_step(tmp_path: Path) -> None:
    calls = list[str]()
    for number, make in enumerate((torch.optim.AdamW, torch.optim.NAdam)):
        model = _model()
        calls.clear()
        optimizer = make(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        engine = _start(tmp_path / str(number), optimizer, model)
        _train(engine, 0, 1)
        assert calls == ["before", "after"] * 2
        engine.destroy(remove=True)


def test_a_step_that_was_refused_was_not_applied(tmp_path: Path) -> None:
    engine = _start(tmp_path)
    _train(engine, 0)
    engine.backward(_loss(engine, 1) * math.inf)
    with pytest.raises(NumericsError):
        engine.step()
    assert not engine.was_step_applied() and engine.optimizer.overflow
    norm = engine.get_global_grad_norm()
    assert norm is not None and not math.isfinite(norm)
    _train(engine, 2)
    assert engine.was_step_applied() and not engine.optimizer.overflow
    engine.destroy(remove=True)


@pytest.mark.numeric
def test_another_optimizer_over_an_engines_parameters_is_refused(tmp_path: Path) -> None:
    """It would find no gradients, and train nothing, without a word."""
    engine = _start(tmp_path)
    other = torch.optim.AdamW(engine.module.parameters(), lr=1e-2)
    engine.backward(_loss(engine, 0))
    with pytest.raises(UsageError, match=r"its step would do nothing: .*call engine\.step\(\).* offload\.hf"):
        other.step()
    engine.step()
    plain = _model()
    _plain(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 0)
    _close(engine.state_dict(), plain)
    engine.destroy(remove=True)
