"""States of an optimizer are torch's: read, loaded, of one that was given, and in groups."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import BudgetError, ConfigError, NumericsError, UsageError
from tests.params.test_requires_grad_changes import AREA
from tests.params.test_requires_grad_changes import DISK as GROUPS_DISK
from tests.params.test_requires_grad_changes import JOB as GROUPS_JOB
from tests.support import rounding_bounds
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import Job, PlainEngine, assert_same_tensors, config, run, train_step, weights_of

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


NO_STATES: list[tuple[Any, str]] = [
    ({}, 'a dict with "state" and "param_groups", got'),
    (5, "got int"),
    ({"state": {}, "param_groups": [{"params": [0]}]}, r"groups of \[1\] parameters, this optimizer contains groups"),
    (
        {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
        r"state 0, of parameter 0.weight, must contain exp_avg, exp_avg_sq, each a tensor of shape \[20, 12\]",
    ),
    (
        {"state": {"0": {}, 7: {}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
        "got 2 states of other numbers, the first is '0'; pass the result",
    ),
    ({"state": {}, "param_groups": [{"params": [0, 1, 2, 3], "lr": math.nan}]}, "lr of group 0 is nan"),
]
NO_COUNTS = ("many", None, math.nan, math.inf, -1, 1.5, torch.ones(2), torch.tensor(-3.0))


def test_what_is_no_state_changes_nothing(tmp_path: Path) -> None:
    """Not even the state of a parameter before the one whose count is none."""
    engine = _start(tmp_path)
    weights = _train(engine, 0)
    before = engine.optimizer.state_dict()
    for state, message in NO_STATES:
        with pytest.raises(UsageError, match=message):
            engine.optimizer.load_state_dict(state)
    for wrong in NO_COUNTS:
        state = copy.deepcopy(before)
        state["state"][0]["exp_avg"] += 1
        state["state"][2]["step"] = wrong
        with pytest.raises(UsageError, match=r"state 2, of parameter 2.weight, .*step.* whole number of updates, got"):
            engine.optimizer.load_state_dict(state)
    after = engine.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_same_states(after["state"], before["state"])
    assert_same_tensors(engine.state_dict(), weights)
    _train(engine, 1)
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


def test_a_learning_rate_that_is_none_never_reaches_the_weights(tmp_path: Path) -> None:
    engine = _start(tmp_path)
    before = _train(engine, 0)
    engine.backward(_loss(engine, 1))
    for value in (math.nan, math.inf, "1e-3", None):
        engine.optimizer.param_groups[0]["lr"] = value
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
@pytest.mark.sample(1)
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


def test_a_group_that_is_none(tmp_path: Path) -> None:
    engine = _start(tmp_path)
    betas = {"params": list(engine.module[0].parameters()), "betas": (0.5,)}
    for group, message in ((None, "got NoneType"), ([], "got list"), ({"lr": 1.0}, '"params"'), (betas, "betas")):
        with pytest.raises(UsageError, match=message):
            engine.optimizer.add_param_group(group)  # type: ignore[arg-type]
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
    other_optimizer = torch.optim.AdamW(engine.module.parameters(), lr=1e-2)
    engine.backward(_loss(engine, 0))
    with pytest.raises(UsageError, match=r"its step would do nothing: .*call engine\.step\(\).* offload\.hf"):
        other_optimizer.step()
    engine.step()
    plain = _model()
    _plain(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 0)
    _close(engine.state_dict(), plain)
    engine.destroy(remove=True)


def start(
    folder: Path, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[offload.Engine, torch.optim.Optimizer]:
    """Returns an engine on a small model, and the optimizer that it was given."""
    model = _model()
    optimizer = make(list(model.parameters()))
    return _start(folder, optimizer, model), optimizer


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def rprop(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=1e-2)


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
    _train(engine, 0, 1)
    mine, theirs = optimizer.state_dict(), engine.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == {0, 1, 2, 3}
    assert_same_states(mine["state"], theirs["state"])
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="destroyed"):
        optimizer.state_dict()


def test_what_it_loads_the_engine_trains_on_with(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path / "one", adamw)
    weights = {name: value.clone() for name, value in _train(engine, 0, 1).items()}
    state = copy.deepcopy(optimizer.state_dict())
    after = _train(engine, 2, 3)
    engine.destroy(remove=True)
    engine, optimizer = start(tmp_path / "other", adamw)
    engine.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same_states(optimizer.state_dict()["state"], state["state"])
    assert_same_tensors(_train(engine, 2, 3), after)
    engine.destroy(remove=True)


def test_a_schedule_on_it_acts_on_the_engine_also_after_a_load(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path, adamw)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    _train(engine, 0)
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    assert engine.get_lr() == [2.5e-3] and optimizer.param_groups is engine.optimizer.param_groups
    engine.destroy(remove=True)


def test_one_whose_list_of_groups_is_replaced_is_refused(tmp_path: Path) -> None:
    engine, optimizer = start(tmp_path, adamw)
    optimizer.param_groups = [*optimizer.param_groups]
    with pytest.raises(UsageError, match="its list param_groups was replaced"):
        _train(engine, 0)
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
    assert_same_tensors(_train(engine, 0, 1), _train(expected, 0, 1))
    expected.destroy(remove=True)
    engine.destroy(remove=True)


def test_a_look_at_its_states_during_training_is_an_error(tmp_path: Path) -> None:
    """They are in the engine: code that went on with an empty dict would do nothing, without a word."""
    engine, optimizer = start(tmp_path, adamw)
    _train(engine, 0)
    for states_of in (optimizer, engine.optimizer):
        with pytest.raises(UsageError, match="are in the engine"):
            states_of.state[states_of.param_groups[0]["params"][0]]
        assert not states_of.state
    engine.destroy(remove=True)


def test_hooks_on_the_state_dict_meet_the_states(tmp_path: Path) -> None:
    engine, _ = start(tmp_path, adamw)
    _train(engine, 0)
    seen: list[str] = []
    hooks = (
        engine.optimizer.register_state_dict_post_hook(
            lambda _, state_dict: {**state_dict, "phases": len(state_dict["state"])}
        ),
        engine.optimizer.register_load_state_dict_pre_hook(
            lambda _, state_dict: seen.append(f"{state_dict['phases']} phases")
        ),
        engine.optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded")),
    )
    states = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(states)
    assert states["phases"] == 4 and seen == ["4 phases", "loaded"]
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


MISSING = object()


def add(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def remove(optimizer: Any) -> None:
    del optimizer.param_groups[1]


def undo(optimizer: Any, groups: list[Any]) -> None:
    optimizer.param_groups[:] = groups


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "groups added to the optimizer, or taken from it", "refused")
@pytest.mark.parametrize("change", [add, remove])
@pytest.mark.parametrize("own", [True, False], ids=["that was given", "that came back"])
def test_groups_stay_through_training(change: Callable[[Any], None], own: bool, tmp_path: Path) -> None:
    """Said when it is done or, of the torch optimizer that was given, at the next step, which can then be taken."""
    torch.manual_seed(GROUPS_JOB.seed)
    model = Layers()
    groups = [{"params": list(part.parameters())} for part in (model.embedding, model.layers, model.head)]
    given = torch.optim.AdamW(groups, lr=GROUPS_JOB.lr, weight_decay=GROUPS_JOB.weight_decay)
    content = config(GROUPS_JOB, GROUPS_DISK, tmp_path / "changed")
    del content["optimizer"]
    engine, mine, *_ = offload.initialize(model=model, optimizer=given, config=content)
    losses = [train_step(engine, GROUPS_JOB, 0)]
    optimizer = given if own else mine
    kept = list(optimizer.param_groups)
    loss = GROUPS_JOB.loss(engine, 1, 0)
    engine.backward(loss)
    with pytest.raises(UsageError, match=r"cannot be added .* requires_grad_\(False\)"):
        change(optimizer)
        engine.step()
    undo(optimizer, kept)
    engine.step()
    losses.append(float(loss.detach()))
    losses += [train_step(engine, GROUPS_JOB, step) for step in range(2, GROUPS_JOB.steps)]
    engine.destroy(remove=True)
    assert losses == run(GROUPS_JOB, GROUPS_DISK, tmp_path / "plain").losses


def grouped(engine: Any, optimizer: Any) -> list[float]:
    """Layers train on one after the other, each in a group of its own from then on, as Lightning's BaseFinetuning."""
    model, losses = engine.module, []
    for step in range(GROUPS_JOB.steps):
        if step == 0:
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        elif step % 2 == 0 and step <= 6:
            layer = model.layers[3 - step // 2].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": GROUPS_JOB.lr / 2**step})
        losses += [train_step(engine, GROUPS_JOB, step), engine.get_global_grad_norm()]
    return losses


class TorchGroups:
    """The same with torch's optimizer, which has a parameter in one group only and must be told to forget it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def add_param_group(self, group: dict[str, Any]) -> None:
        group["params"] = list(group["params"])
        for group_before in self._optimizer.param_groups:
            group_before["params"] = [
                p for p in group_before["params"] if all(p is not mine for mine in group["params"])
            ]
        self._optimizer.add_param_group(group)


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a group of its own for what was frozen meanwhile: `add_param_group`", "right")
@pytest.mark.parametrize("schedule", [None, "WarmupLR"])
@pytest.mark.numeric
def test_a_group_for_what_trains_on(schedule: str | None, tmp_path: Path) -> None:
    results = []
    for placement in (GROUPS_DISK, ("none", "none")):
        torch.manual_seed(GROUPS_JOB.seed)
        content = config(GROUPS_JOB, placement, tmp_path / "-".join(placement))
        if schedule:
            content["scheduler"] = {"type": schedule, "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}
        engine, optimizer, *_ = offload.initialize(model=Layers(), config=content)
        losses = grouped(engine, optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2, 2, 2]
        results.append((losses, engine.get_lr(), weights_of(engine)))
        engine.destroy(remove=True)
    assert results[0][:2] == results[1][:2]
    assert_same_tensors(results[0][2], results[1][2])
    rates = [GROUPS_JOB.lr, GROUPS_JOB.lr / 4, GROUPS_JOB.lr / 16, GROUPS_JOB.lr / 64]
    assert results[0][1] == pytest.approx(rates)
    if schedule is None:
        plain = PlainEngine(GROUPS_JOB)
        rounding_bounds.same_losses(results[0][0], grouped(plain, TorchGroups(plain.optimizer)), GROUPS_JOB)
        rounding_bounds.same_weights(results[0][2], plain.module.state_dict(), GROUPS_JOB)


def test_a_run_with_added_groups_is_resumed_with_as_many(tmp_path: Path) -> None:
    def part(steps: range) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(GROUPS_JOB.seed)
        model = Layers()
        head, rest = list(model.head.parameters()), [*model.embedding.parameters(), *model.layers.parameters()]
        groups = [{"params": rest}, {"params": head, "lr": GROUPS_JOB.lr / 10}][: 1 if steps.start == 0 else 2]
        if steps.start == 0:
            groups[0]["params"] = rest + head
        content = config(GROUPS_JOB, GROUPS_DISK, tmp_path / "run", resume="auto" if steps.start else "never")
        engine, optimizer, *_ = offload.initialize(model=model, model_parameters=groups, config=content)
        losses = []
        for step in steps:
            if step == 2:
                optimizer.add_param_group({"params": model.head.parameters(), "lr": GROUPS_JOB.lr / 10})
            losses.append(train_step(engine, GROUPS_JOB, step))
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        assert engine.get_lr() == [GROUPS_JOB.lr, GROUPS_JOB.lr / 10]
        engine.destroy(remove=steps.stop == GROUPS_JOB.steps)
        return losses, weights

    unbroken = part(range(GROUPS_JOB.steps))
    first, second = part(range(5)), part(range(5, GROUPS_JOB.steps))
    assert first[0] + second[0] == unbroken[0]
    assert_same_tensors(second[1], unbroken[1])


def _stranger(engine: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(3)), engine.module.head.weight]}


def _head(engine: Any) -> dict[str, Any]:
    return {"params": engine.module.head.weight}


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], Any, str]] = {
    "a parameter that is not trained": (_stranger, None, "give the optimizer all parameters that will ever train"),
    "where the schedule has a list of rates": (
        _head,
        {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3]}},
        "WarmupLR has no learning rate for a new group: warmup_max_lr has 1 value, ",
    ),
    "where a schedule of torch has taken its rates": (
        _head,
        {"type": "StepLR", "params": {"step_size": 2}},
        "the StepLR was made for 1 group of parameters, there would be 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_group_that_cannot_be(case: str, tmp_path: Path) -> None:
    """Nothing has changed then, and training goes on."""
    made, schedule, message = REFUSED[case]
    content = config(GROUPS_JOB, GROUPS_DISK, tmp_path / "refused") | ({"scheduler": schedule} if schedule else {})
    torch.manual_seed(GROUPS_JOB.seed)
    engine, optimizer, *_ = offload.initialize(model=Layers(), config=content)
    before = [list(map(id, group["params"])) for group in optimizer.param_groups]
    with pytest.raises(UsageError, match=message):
        optimizer.add_param_group(made(engine))
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == before
    for step in range(2):
        train_step(engine, GROUPS_JOB, step)
    engine.destroy(remove=True)


ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NUMBERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any], str]] = {
    "three betas": (ADAMW, {"betas": (0.9, 0.99, 0.9)}, r"betas of group 0 .*expected two finite numbers"),
    "two rates": (ADAMW, {"lr": [0.1, 0.2]}, "lr of group 0 .*expected a finite number"),
    "no dampening": (SGD, {"dampening": None}, "dampening of group 0 is None, expected a finite number"),
    "a number taken out": (ADAMW, {"eps": MISSING}, "group 0 has no eps any more"),
    "a flag taken out": (SGD, {"nesterov": MISSING}, "group 0 has no nesterov any more"),
    "taken out of torch's own": (torch.optim.NAdam, {"momentum_decay": MISSING}, "has no momentum_decay any more"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", NUMBERS)
def test_a_group_that_no_step_can_read(case: str, tmp_path: Path) -> None:
    """Nothing has changed then, and training goes on once the group is as it was."""
    make, changes, message = NUMBERS[case]
    content = config(GROUPS_JOB, GROUPS_DISK, tmp_path)
    del content["optimizer"]
    torch.manual_seed(GROUPS_JOB.seed)
    model = Layers()
    engine = offload.initialize(model=model, optimizer=make(model.parameters()), config=content)[0]
    train_step(engine, GROUPS_JOB, 0)
    group, before = engine.optimizer.param_groups[0], weights_of(engine)
    good = {key: group.pop(key) for key in changes}
    group.update({key: value for key, value in changes.items() if value is not MISSING})
    engine.backward(GROUPS_JOB.loss(engine, 1, 0))
    with pytest.raises(UsageError, match=message):
        engine.step()
    assert_same_tensors(weights_of(engine), before)
    group.update(good)
    engine.step()
    assert engine.global_steps == 2
    engine.destroy(remove=True)


def test_the_optimizer_of_a_frozen_model_takes_its_own_state() -> None:
    engine = offload.initialize(model=nn.Linear(2, 2).requires_grad_(False), config={"offload": {"device": "cpu"}})[0]
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.destroy()


class Phased(torch.optim.SGD):
    """Steps backwards in groups of another phase."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group = {**group, "lr": -group["lr"] if group["phase"] == "back" else group["lr"]}
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("saved", ["a commit", "a checkpoint"])
def test_all_entries_of_a_group_come_back(saved: str, tmp_path: Path) -> None:
    """Flags, words and counters that a script has changed, as by torch's state dict; not those that it sets anew."""

    def begin(run: str, **more: Any) -> tuple[Any, Any]:
        torch.manual_seed(GROUPS_JOB.seed)
        model = Layers()
        layers = [{"params": list(part.parameters()), "phase": "on"} for part in (model.embedding, model.layers)]
        head = {"params": list(model.head.parameters()), "phase": "on", "name": "head", "scale": int, **more}
        content = config(GROUPS_JOB, GROUPS_DISK, tmp_path, run=run, resume="auto")
        del content["optimizer"]
        optimizer = Phased([*layers, head], lr=GROUPS_JOB.lr)
        return offload.initialize(model=model, optimizer=optimizer, config=content)[0], optimizer

    def change(groups: list[dict[str, Any]]) -> None:
        groups[1]["phase"] = "back"
        groups[2] |= {"name": "top", "seen": {"rows": (3, 4)}, "mean": torch.tensor([0.5, float("inf")])}

    unbroken, optimizer = begin("unbroken")
    train_step(unbroken, GROUPS_JOB, 0)
    change(optimizer.param_groups)
    train_step(unbroken, GROUPS_JOB, 1)
    if saved == "a checkpoint":
        unbroken.save_checkpoint(tmp_path / "saved")
    expected = train_step(unbroken, GROUPS_JOB, 2)
    engine, optimizer = begin("broken")
    if saved == "a commit":
        train_step(engine, GROUPS_JOB, 0)
        change(optimizer.param_groups)
        train_step(engine, GROUPS_JOB, 1)
    engine.destroy()
    engine, optimizer = begin("broken", name="tail")  # the script says another name now
    if saved == "a checkpoint":
        engine.load_checkpoint(tmp_path / "saved")
    entries = optimizer.param_groups
    assert [each["phase"] for each in entries] == ["on", "back", "on"]
    assert entries[2]["name"] == "tail" and entries[2]["seen"] == {"rows": (3, 4)} and entries[2]["scale"] is int
    assert torch.equal(entries[2]["mean"], torch.tensor([0.5, float("inf")]))
    assert train_step(engine, GROUPS_JOB, 2) == expected
    assert_same_tensors(weights_of(engine), weights_of(unbroken))
    for ended in (engine, unbroken):
        ended.destroy(remove=True)


def test_an_entry_that_no_commit_can_contain_is_an_error_at_the_next_call(tmp_path: Path) -> None:
    torch.manual_seed(GROUPS_JOB.seed)
    engine = offload.initialize(model=Layers(), config=config(GROUPS_JOB, GROUPS_DISK, tmp_path))[0]
    train_step(engine, GROUPS_JOB, 0)
    engine.optimizer.param_groups[0]["logger"] = object()
    with pytest.raises(UsageError, match=r"logger of a group of the optimizer is a builtins\.object"):
        train_step(engine, GROUPS_JOB, 1)
    del engine.optimizer.param_groups[0]["logger"]
    train_step(engine, GROUPS_JOB, 1)
    engine.destroy(remove=True)
