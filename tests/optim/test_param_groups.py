"""Parameter groups after `initialize` are added as in torch, or are an error with the fix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import UsageError
from tests.params.test_requires_grad_changes import AREA, DISK, JOB
from tests.support import rounding_bounds
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import PlainEngine, assert_same_tensors, config, run, train_step, weights_of

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
    torch.manual_seed(JOB.seed)
    model = Layers()
    groups = [{"params": list(part.parameters())} for part in (model.embedding, model.layers, model.head)]
    given = torch.optim.AdamW(groups, lr=JOB.lr, weight_decay=JOB.weight_decay)
    content = config(JOB, DISK, tmp_path / "changed")
    del content["optimizer"]
    engine, mine, *_ = offload.initialize(model=model, optimizer=given, config=content)
    losses = [train_step(engine, JOB, 0)]
    optimizer = given if own else mine
    kept = list(optimizer.param_groups)
    loss = JOB.loss(engine, 1, 0)
    engine.backward(loss)
    with pytest.raises(UsageError, match=r"cannot be added .* requires_grad_\(False\)"):
        change(optimizer)
        engine.step()
    undo(optimizer, kept)
    engine.step()
    losses.append(float(loss.detach()))
    losses += [train_step(engine, JOB, step) for step in range(2, JOB.steps)]
    engine.destroy(remove=True)
    assert losses == run(JOB, DISK, tmp_path / "plain").losses


def grouped(engine: Any, optimizer: Any) -> list[float]:
    """Layers train on one after the other, each in a group of its own from then on, as Lightning's BaseFinetuning."""
    model, losses = engine.module, []
    for step in range(JOB.steps):
        if step == 0:
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        elif step % 2 == 0 and step <= 6:
            layer = model.layers[3 - step // 2].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": JOB.lr / 2**step})
        losses += [train_step(engine, JOB, step), engine.get_global_grad_norm()]
    return losses


class TorchGroups:
    """The same with torch's optimizer, which has a parameter in one group only and must be told to forget it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def add_param_group(self, group: dict[str, Any]) -> None:
        group["params"] = list(group["params"])
        for other in self._optimizer.param_groups:
            other["params"] = [p for p in other["params"] if all(p is not mine for mine in group["params"])]
        self._optimizer.add_param_group(group)


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a group of its own for what was frozen meanwhile: `add_param_group`", "right")
@pytest.mark.parametrize("schedule", [None, "WarmupLR"])
@pytest.mark.numeric
def test_a_group_for_what_trains_on(schedule: str | None, tmp_path: Path) -> None:
    found = []
    for placement in (DISK, ("none", "none")):
        torch.manual_seed(JOB.seed)
        content = config(JOB, placement, tmp_path / "-".join(placement))
        if schedule:
            content["scheduler"] = {"type": schedule, "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}
        engine, optimizer, *_ = offload.initialize(model=Layers(), config=content)
        losses = grouped(engine, optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2, 2, 2]
        found.append((losses, engine.get_lr(), weights_of(engine)))
        engine.destroy(remove=True)
    assert found[0][:2] == found[1][:2]
    assert_same_tensors(found[0][2], found[1][2])
    rates = [JOB.lr, JOB.lr / 4, JOB.lr / 16, JOB.lr / 64]
    assert found[0][1] == pytest.approx(rates)
    if schedule is None:
        plain = PlainEngine(JOB)
        rounding_bounds.same_losses(found[0][0], grouped(plain, TorchGroups(plain.optimizer)), JOB)
        rounding_bounds.same_weights(found[0][2], plain.module.state_dict(), JOB)


def test_a_run_with_added_groups_is_resumed_with_as_many(tmp_path: Path) -> None:
    def part(steps: range) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(JOB.seed)
        model = Layers()
        head, rest = list(model.head.parameters()), [*model.embedding.parameters(), *model.layers.parameters()]
        groups = [{"params": rest}, {"params": head, "lr": JOB.lr / 10}][: 1 if steps.start == 0 else 2]
        if steps.start == 0:
            groups[0]["params"] = rest + head
        content = config(JOB, DISK, tmp_path / "run", resume="auto" if steps.start else "never")
        engine, optimizer, *_ = offload.initialize(model=model, model_parameters=groups, config=content)
        losses = []
        for step in steps:
            if step == 2:
                optimizer.add_param_group({"params": model.head.parameters(), "lr": JOB.lr / 10})
            losses.append(train_step(engine, JOB, step))
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        assert engine.get_lr() == [JOB.lr, JOB.lr / 10]
        engine.destroy(remove=steps.stop == JOB.steps)
        return losses, weights

    unbroken = part(range(JOB.steps))
    first, second = part(range(5)), part(range(5, JOB.steps))
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
    content = config(JOB, DISK, tmp_path / "refused") | ({"scheduler": schedule} if schedule else {})
    torch.manual_seed(JOB.seed)
    engine, optimizer, *_ = offload.initialize(model=Layers(), config=content)
    before = [list(map(id, group["params"])) for group in optimizer.param_groups]
    with pytest.raises(UsageError, match=message):
        optimizer.add_param_group(made(engine))
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == before
    for step in range(2):
        train_step(engine, JOB, step)
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
    content = config(JOB, DISK, tmp_path)
    del content["optimizer"]
    torch.manual_seed(JOB.seed)
    model = Layers()
    engine = offload.initialize(model=model, optimizer=make(model.parameters()), config=content)[0]
    train_step(engine, JOB, 0)
    group, before = engine.optimizer.param_groups[0], weights_of(engine)
    good = {key: group.pop(key) for key in changes}
    group.update({key: value for key, value in changes.items() if value is not MISSING})
    engine.backward(JOB.loss(engine, 1, 0))
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


class Number(int):
    """The number of a parameter, which counts how often it is hashed."""

    hashed = 0

    def __hash__(self) -> int:
        Number.hashed += 1
        return super().__hash__()


def test_a_state_of_many_parameters_is_looked_through_once(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    content = config(JOB, ("none", "none"), tmp_path)
    engine = offload.initialize(model=model, config=content)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    state = engine.optimizer.state_dict()
    numbers = [Number(number) for number in range(40)]
    state["param_groups"][0]["params"] = numbers
    state["state"] = {number: state["state"][int(number)] for number in numbers}
    Number.hashed = 0
    engine.optimizer.load_state_dict(state)
    assert 40 <= Number.hashed <= 4 * 40
    engine.destroy(remove=True)


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
        torch.manual_seed(JOB.seed)
        model = Layers()
        layers = [{"params": list(part.parameters()), "phase": "on"} for part in (model.embedding, model.layers)]
        head = {"params": list(model.head.parameters()), "phase": "on", "name": "head", "scale": int, **more}
        content = config(JOB, DISK, tmp_path, run=run, resume="auto")
        del content["optimizer"]
        optimizer = Phased([*layers, head], lr=JOB.lr)
        return offload.initialize(model=model, optimizer=optimizer, config=content)[0], optimizer

    def change(groups: list[dict[str, Any]]) -> None:
        groups[1]["phase"] = "back"
        groups[2] |= {"name": "top", "seen": {"rows": (3, 4)}, "mean": torch.tensor([0.5, float("inf")])}

    unbroken, optimizer = begin("unbroken")
    train_step(unbroken, JOB, 0)
    change(optimizer.param_groups)
    train_step(unbroken, JOB, 1)
    if saved == "a checkpoint":
        unbroken.save_checkpoint(tmp_path / "saved")
    expected = train_step(unbroken, JOB, 2)
    engine, optimizer = begin("broken")
    if saved == "a commit":
        train_step(engine, JOB, 0)
        change(optimizer.param_groups)
        train_step(engine, JOB, 1)
    engine.destroy()
    engine, optimizer = begin("broken", name="tail")  # the script says another name now
    if saved == "a checkpoint":
        engine.load_checkpoint(tmp_path / "saved")
    entries = optimizer.param_groups
    assert [each["phase"] for each in entries] == ["on", "back", "on"]
    assert entries[2]["name"] == "tail" and entries[2]["seen"] == {"rows": (3, 4)} and entries[2]["scale"] is int
    assert torch.equal(entries[2]["mean"], torch.tensor([0.5, float("inf")]))
    assert train_step(engine, JOB, 2) == expected
    assert_same_tensors(weights_of(engine), weights_of(unbroken))
    for each in (engine, unbroken):
        each.destroy(remove=True)


def test_an_entry_that_no_commit_can_contain_is_an_error_at_the_next_call(tmp_path: Path) -> None:
    torch.manual_seed(JOB.seed)
    engine = offload.initialize(model=Layers(), config=config(JOB, DISK, tmp_path))[0]
    train_step(engine, JOB, 0)
    engine.optimizer.param_groups[0]["logger"] = object()
    with pytest.raises(UsageError, match=r"logger of a group of the optimizer is a builtins\.object"):
        train_step(engine, JOB, 1)
    del engine.optimizer.param_groups[0]["logger"]
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)
