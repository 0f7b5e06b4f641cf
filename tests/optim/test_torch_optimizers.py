"""Optimizers of torch run by their own code, by object or by name, or are refused with the reason."""

from __future__ import annotations

import collections
import copy
import logging
import random
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.config import load_config
from offload.engine.build_optimizer import from_config
from offload.errors import ConfigError, StoreError, UsageError
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import BY_BLOCKS, from_training
from offload.states import State
from tests.support.models import gpt2
from tests.support.oracle import DTYPES, PlainOptimizer, assert_same_tensors, rounded, weights_of

DISK = ("nvme", "nvme")
PLACEMENTS = (DISK, ("cpu", "cpu"), ("none", "nvme"), ("none", "none"))


class MuonForMatrices(PlainOptimizer):
    """As many have it: one optimizer, Muon for groups of matrices, momentum for the others; keeps a Python int."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float = 0.02) -> None:
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "muon": False, "iterations": 2})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state |= {"steps": 0, "buffer": torch.zeros_like(p)}
        state["steps"] += 1
        state["buffer"] = group["momentum"] * state["buffer"] + p.grad  # another tensor each time
        direction = state["buffer"]
        for _ in range(group["iterations"] if group["muon"] else 0):
            direction = direction / (direction.norm() + 1e-7)
            direction = 1.5 * direction - 0.5 * direction @ direction.T @ direction
        p.add_(direction, alpha=-group["lr"] / (1 + 0.1 * state["steps"]))


class HalfStates(PlainOptimizer):
    """Keeps a state in bf16, a flag, a float, and one that comes with the second step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "mean" in state:
            state["before"] = state["mean"].float().sum()
        state["seen"] = True
        state["scale"] = 0.5 * state.get("scale", 1.0)
        state["mean"] = (state.get("mean", torch.zeros_like(p).bfloat16()) + p.grad.bfloat16()).bfloat16()
        p.sub_(group["lr"] * (1 + state["scale"]) * state["mean"])
        p.add_(1e-3 * state.get("before", 0.0))


class ByAttribute(PlainOptimizer):
    """Looks at what is set on a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(group["lr"] * getattr(p, "lr_mult", 1.0) * p.grad)


class DecayOrNone(PlainOptimizer):
    """Decays by a number, or by None not at all; `times` is counted with."""

    def __init__(self, params: Any, decay: float | None) -> None:
        super().__init__(params, {"lr": 0.1, "decay": decay, "times": 2})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        for _ in range(group["times"]):
            p.sub_(group["lr"] * (p.grad + (group["decay"] or 0.0) * p))


def _parts(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [{"params": matrices, "muon": True, "lr": 0.05}, {"params": [p for p in model.parameters() if p.ndim != 2]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.1),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9, centered=True),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True),
    "maximize": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, maximize=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-3),
    "Muon": lambda model: MuonForMatrices(_parts(model)),
    "states of many kinds": lambda model: HalfStates(model.parameters()),
    "attributes": lambda model: ByAttribute(model.parameters()),
}

NUMBERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "decay 0": lambda model: torch.optim.NAdam(model.parameters(), lr=1),  # torch's weight_decay is the integer 0
    "decay 0.1": lambda model: torch.optim.NAdam(model.parameters(), lr=1, weight_decay=0.1),
    "decay None": lambda model: DecayOrNone(model.parameters(), None),
    "decay or not": lambda model: DecayOrNone(model.parameters(), 0.1),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(24, 5, bias=False))
    weight: Any = model.get_parameter("1.0.weight")
    weight.lr_mult = 0.1
    return model


def _loss(model: Any, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.randn(6, 24, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: torch.Tensor = model(rows).float().square().mean()
    return loss


def _start(
    name: str, folder: Path, placement: tuple[str, str] = DISK, dtype: str = "fp32", clip: float = 0.0, **options: Any
) -> offload.Engine:
    model = make_model()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": placement[0], "nvme_path": str(folder)},
            "offload_optimizer": {"device": placement[1], "nvme_path": str(folder)},
        },
        "offload": {"device": "cpu", "debug": {"poison": True}, **options},
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    if dtype == "fp16":
        settings[dtype]["loss_scale"] = 256
    return offload.initialize(model=model, optimizer=(OPTIMIZERS | NUMBERS)[name](model), config=settings)[0]


def train(engine: offload.Engine, steps: Iterable[int]) -> list[float]:
    losses: list[float] = []
    dtype = next(iter(engine.module.parameters())).dtype
    for step in steps:
        loss = _loss(engine, step, dtype)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    _loss(model, step).backward()
    optimizer.step()


def _weights(engine: offload.Engine) -> dict[str, torch.Tensor]:
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return weights


def _plain(name: str, dtype: str, steps: int, clip: float = 0.0) -> dict[str, torch.Tensor]:
    """A loop with fp32 masters, whose weights are rounded for each forward."""
    masters = make_model()
    optimizer = OPTIMIZERS[name](masters)
    model = copy.deepcopy(masters).to(DTYPES[dtype])
    scale = 256 if dtype == "fp16" else 1
    for step in range(steps):
        (_loss(model, step, DTYPES[dtype]) * scale).backward()
        for mine, theirs in zip(masters.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad, theirs.grad = theirs.grad.float() / scale, None
        if clip:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(masters.parameters(), model.parameters(), strict=True):
                theirs.copy_(rounded(mine, DTYPES[dtype]))
    return model.state_dict()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_does_what_it_does_in_a_plain_loop_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    engine = _start(name, tmp_path, dtype=dtype)
    train(engine, range(4))
    assert_same_tensors(_weights(engine), _plain(name, dtype, 4))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["Adafactor", "Muon", "states of many kinds"])
def test_placements_have_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    first: tuple[list[float], dict[str, torch.Tensor]] | None = None
    for placement in PLACEMENTS:
        engine = _start(name, tmp_path / "-".join(placement), placement, dtype)
        result = train(engine, range(4)), _weights(engine)
        first = first or result
        assert result[0] == first[0]
        assert_same_tensors(result[1], first[1], str(placement))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_is_resumed_and_saved_with_its_states(name: str, tmp_path: Path) -> None:
    """A checkpoint goes into another division of units."""
    engine = _start(name, tmp_path / "whole", dtype="bf16")
    losses, unbroken = train(engine, range(6)), _weights(engine)
    engine = _start(name, tmp_path / "run", dtype="bf16")
    first = train(engine, range(3))
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    engine = _start(name, tmp_path / "run", dtype="bf16", resume="must")
    assert first + train(engine, range(3, 6)) == losses
    resumed = _weights(engine)
    engine = _start(name, tmp_path / "other", ("none", "cpu"), dtype="bf16", units=["0", "1.0"])
    train(engine, range(7, 9))  # states to be replaced
    engine.load_checkpoint(tmp_path / "saved")
    assert first + train(engine, range(3, 6)) == losses
    loaded = _weights(engine)
    assert_same_tensors(resumed, unbroken)
    assert_same_tensors(loaded, unbroken)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("decay 0", "decay 0", {"lr": 0.01, "weight_decay": 0.2}),
        ("decay 0", "decay 0.1", {"lr": 0.01, "weight_decay": 0.1}),
        ("decay 0.1", "decay 0", {"lr": 0.01, "weight_decay": 0}),
        ("decay None", "decay or not", {"lr": 0.01, "decay": 0.1, "times": 2}),
        ("decay or not", "decay None", {"lr": 0.01, "decay": None, "times": 2}),
    ],
)
def test_a_number_may_be_an_integer_or_none_at_the_start(
    before: str, after: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    """A number that the run has moved is restored, and one that the new run configures otherwise is the new one."""
    engine = _start(before, tmp_path / "run")
    group = engine.optimizer.param_groups[0]
    group["lr"] = 0.01
    if "weight_decay" in group:
        group["weight_decay"] = 0.2
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    engine = _start(after, tmp_path / "run", resume="must")
    resumed = dict(engine.optimizer.param_groups[0])
    train(engine, range(2, 3))
    engine.destroy(remove=True)
    engine = _start(after, tmp_path / "other")
    engine.load_checkpoint(tmp_path / "saved")
    loaded = dict(engine.optimizer.param_groups[0])
    train(engine, range(2, 3))
    engine.destroy(remove=True)
    for group in (resumed, loaded):
        assert {key: group[key] for key in expected} == expected
        assert type(group.get("times", 2)) is int


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    engine = _start("Adafactor", tmp_path / "run")
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    with pytest.raises(StoreError, match="units"):
        _start("NAdam", tmp_path / "run", resume="must")
    engine = _start("NAdam", tmp_path / "other")
    with pytest.raises(
        StoreError, match=r"contains the states col_var, row_var, step of 0\.0\.weight, this optimizer keeps"
    ):
        engine.load_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    train(engine, range(2))
    engine.destroy(remove=True)


def test_a_parameter_without_a_gradient_keeps_what_is_kept_of_it(tmp_path: Path) -> None:
    masters, engine = make_model(), _start("NAdam", tmp_path)
    optimizer = OPTIMIZERS["NAdam"](masters)
    for step in range(4):
        frozen = step in (1, 2)
        for model in (masters, engine.module):
            model.get_parameter("1.0.weight").requires_grad_(not frozen)
            model.get_parameter("3.weight").requires_grad_(not frozen)
        _plain_step(masters, optimizer, step)
        train(engine, [step])
    assert_same_tensors(_weights(engine), masters.state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Adafactor", "states of many kinds"])
def test_the_budget_is_kept_and_the_least_of_it_works(name: str, tmp_path: Path) -> None:
    with pytest.raises(offload.BudgetError, match="complete units") as error:
        _start(name, tmp_path, dtype="bf16", host_memory=1)
    least = int(str(error.value).split("the least that works is ")[1].split("(")[1].split(" bytes")[0])
    results = []
    for number, budget in enumerate((least, "64MiB")):
        engine = _start(name, tmp_path / str(number), dtype="bf16", host_memory=budget)
        results.append((train(engine, range(4)), _weights(engine)))
    (losses, weights), (expected, whole) = results
    assert losses == expected
    assert_same_tensors(weights, whole)


def test_the_torch_fallback_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offload"):
        engine = _start("Adafactor", tmp_path)
    assert sum("Adafactor has no kernel for these options" in line for line in caplog.messages) == 1
    assert engine.get_type() == ["Adafactor"]
    engine.destroy(remove=True)


def test_states_are_looked_at_by_name(tmp_path: Path) -> None:
    model, engine = make_model(), _start("Adafactor", tmp_path)
    optimizer = OPTIMIZERS["Adafactor"](model)
    weight, bias = (engine.module.get_parameter(name) for name in ("1.0.weight", "1.0.bias"))
    assert offload.safe_get_full_optimizer_state(weight, "row_var") is None
    for step in range(2):
        _plain_step(model, optimizer, step)
        train(engine, [step])
    for parameter, plain in ((weight, model.get_parameter("1.0.weight")), (bias, model.get_parameter("1.0.bias"))):
        for name, value in optimizer.state[plain].items():
            moment = offload.safe_get_full_optimizer_state(parameter, name)
            assert moment is not None and torch.equal(moment, value), name
            local = offload.safe_get_local_optimizer_state(parameter, name)
            assert local is not None and torch.equal(local, value.view(-1))
    with pytest.raises(
        UsageError, match=r'keeps no state \'exp_avg\' of .*, whose states are: .*"col_var", "row_var", "step"'
    ):
        offload.safe_get_full_optimizer_state(weight, "exp_avg")
    with pytest.raises(UsageError, match="can be read but not set"):
        offload.safe_set_full_optimizer_state(bias, torch.zeros(40), "variance")
    engine.destroy(remove=True)


CLASSES: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 1e-2, "weight_decay": 0.1},
    "NAdam": {"lr": 1e-2, "betas": [0.8, 0.99]},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
    "Adamax": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2, "decoupled_weight_decay": True},
    "Rprop": {"lr": 1e-3, "etas": [0.5, 1.2]},
    "AdamW": {"lr": 1e-2, "amsgrad": True},
}


def _settings(folder: Path, optimizer: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "offload": {"device": "cpu", **options},
        **({"optimizer": optimizer} if optimizer is not None else {}),
    }


def _named(name: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"torch.optim.{name}", "params": params}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLASSES)
def test_the_name_stands_for_the_object(name: str, tmp_path: Path) -> None:
    engine = offload.initialize(model=make_model(), config=_settings(tmp_path / "a", _named(name, CLASSES[name])))[0]
    losses, mine = train(engine, range(3)), weights_of(engine)
    engine.destroy(remove=True)
    model = make_model()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in CLASSES[name].items()}
    optimizer = getattr(torch.optim, name)(model.parameters(), **given)
    engine = offload.initialize(model=model, optimizer=optimizer, config=_settings(tmp_path / "b"))[0]
    assert train(engine, range(3)) == losses
    assert_same_tensors(weights_of(engine), mine)
    engine.destroy(remove=True)


def test_a_class_with_a_kernel_uses_the_kernel(tmp_path: Path) -> None:
    def begin(optimizer: dict[str, Any], folder: str) -> offload.Engine:
        return offload.initialize(model=make_model(), config=_settings(tmp_path / folder, optimizer))[0]

    engine = begin(_named("AdamW", {"lr": 1e-2, "weight_decay": 0.1}), "a")
    assert engine.optimizer.rule.name == "adam" and testing.inspect(engine).mode.name == "fp32"
    losses = train(engine, range(2))
    engine.destroy(remove=True)
    engine = begin({"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "b")
    assert train(engine, range(2)) == losses
    engine.destroy(remove=True)


NO_CLASSES: list[tuple[str, dict[str, Any], str]] = [
    ("Adafacto", {"lr": 1}, r"torch\.optim\.Adafacto is no optimizer of torch .*, which has ASGD, Adadelta.*SGD$"),
    ("lr_scheduler.StepLR", {"lr": 1}, "is no optimizer of torch"),
    ("Optimizer", {"lr": 1}, "is no optimizer of torch"),
    ("LBFGS", {"lr": 1}, "LBFGS is not supported: it computes the loss again and again by a closure.*use AdamW"),
    ("SparseAdam", {"lr": 1}, "SparseAdam is not supported: it takes sparse gradients"),
    ("NAdam", {"lr": 1, "momentum": 0.9}, r"params contains momentum, and torch\.optim\.NAdam takes lr, betas, eps"),
    ("NAdam", {"lr": 1, "params": []}, "params contains params"),
    ("NAdam", {"lr": -1}, r"params do not make a torch\.optim\.NAdam: Invalid learning rate"),
    ("NAdam", {"lr": "auto"}, "the learning rate is"),
    ("NAdam", {}, "the learning rate is"),
]


def test_what_torch_has_not_is_an_error() -> None:
    model = make_model()
    for name, params, message in NO_CLASSES:
        block = load_config({"optimizer": _named(name, params)}).optimizer
        assert block is not None
        with pytest.raises(ConfigError, match=message):
            from_config(list(model.parameters()), block, model)


def test_the_key_behind_it_is_none_of_a_file() -> None:
    with pytest.raises(ConfigError, match=r'unknown key optimizer\.torch_params; did you mean "params"\?'):
        load_config({"optimizer": {"type": "AdamW", "torch_params": {"lr": 1}}})
    with pytest.raises(ConfigError, match=r"optimizer\.params should be a block"):
        load_config({"optimizer": {"type": "torch.optim.NAdam", "params": 3}})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLASSES)
def test_a_plan_has_the_bytes_of_the_run(name: str, tmp_path: Path) -> None:
    content = _settings(tmp_path, _named(name, CLASSES[name]))
    engine = offload.initialize(model=gpt2(), config=content)[0]
    layouts = testing.inspect(engine).layouts
    engine.destroy(remove=True)
    plan = _plan(name)
    assert [layout.packed_numel() for layout in plan.request.layouts] == [layout.packed_numel() for layout in layouts]
    assert plan.nbytes_on_disk(State.PACKED) == 4 * sum(layout.packed_numel() for layout in layouts)


def _plan(name: str) -> Memory:
    shape = from_training(gpt2(), 16, torch.float32, BY_BLOCKS, {})
    content = settings(dtype="fp32") | {"optimizer": _named(name, CLASSES[name])}
    return settle(shape.layouts, content, Room(host=8 << 30, device=0, disk=None))


class Counts(torch.optim.SGD):
    """Counts in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class Together(torch.optim.SGD):
    """Moves each parameter by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class Begun(torch.optim.SGD):
    """Makes its states before the first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["begun"] = torch.ones_like(p)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["begun"] *= 0.5
        super().step()


class Wraps(torch.optim.Optimizer):
    """Steps by another optimizer, as SAM does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.NAdam(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class OneState(torch.optim.SGD):
    """Keeps a state for all."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"]["count"] = 1  # type: ignore[index]
        super().step()


class ByNumber(torch.optim.SGD):
    """Moves the first group less."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad *= 0.1
        super().step()


class Slow(torch.optim.SGD):
    """Has a state from the fifth step on, as Lookahead."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[-1]["params"]:
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            if state["count"] == 5:
                state["slow"] = p.detach().clone()
        super().step()


class Lists(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [p.grad]
        super().step()


class InAttributes(torch.optim.SGD):
    """Counts where the object stays the same one: in a tensor, a dict of one size, an object of its own, a queue."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, lr=0.1)
        self.place = place
        self.tensor, self.table, self.helper = torch.zeros(1), {"calls": 0}, SimpleNamespace(calls=[0])
        self.queue: collections.deque[int] = collections.deque(maxlen=4)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.place == "tensor":
            self.tensor += 1
        elif self.place == "table":
            self.table["calls"] += 1
        elif self.place == "helper":
            self.helper.calls[0] += 1
        elif self.place == "queue":
            self.queue.append(1)
        super().step()


class OfItsClass(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        OfItsClass.calls += 1
        super().step()


class Switches(torch.optim.SGD):
    """Is after two steps as before them."""

    even = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.even = not self.even
        super().step()


class OnParameters(torch.optim.SGD):
    """Keeps its momentum on the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.velocity = getattr(p, "velocity", 0) * 0.9 + p.grad
            p.data.sub_(p.velocity, alpha=0.1)


def of_a_closure(params: Any) -> torch.optim.Optimizer:
    calls = 0

    class Closed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nonlocal calls
            calls += 1
            super().step()

    return Closed(params, lr=0.1)


class Saves(torch.optim.RMSprop):
    """Decides what is saved of it."""

    phase = "late"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "phase": self.phase}


class TwoModes(torch.optim.SGD):
    """Moves weights between two sequences, as schedule-free optimizers do."""

    def train(self) -> None: ...
    def eval(self) -> None: ...


class KeptForAll(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.state["rounds"] = 0  # type: ignore[index]


def stepping_otherwise(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.step = types.MethodType(lambda self: None, optimizer)  # type: ignore[method-assign]
    return optimizer


def with_a_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "phase": 1})
    return optimizer


def with_an_object(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": params, "history": SimpleNamespace(losses=[])}], lr=0.1)


def test_what_cannot_be_run_so_is_refused() -> None:
    make: Any
    for make, message in (
        (lambda p: InAttributes(p, "tensor"), "a step changes tensor, which all parameters share"),
        (lambda p: InAttributes(p, "table"), "a step changes table, which all parameters share"),
        (lambda p: InAttributes(p, "helper"), "a step changes helper, which all parameters share"),
        (lambda p: InAttributes(p, "queue"), "a step changes queue, which all parameters share"),
        (lambda p: OfItsClass(p, lr=0.1), r"a step changes OfItsClass\.calls, which all parameters share"),
        (lambda p: Switches(p, lr=0.1), "a step changes even, which all parameters share"),
        (lambda p: OnParameters(p, lr=0.1), r"a step changes parameter\.velocity"),
        (of_a_closure, "a step changes calls, which all parameters share"),
        (lambda p: Saves(p, lr=0.1), r"Saves has phase in its state_dict\(\)"),
        (lambda p: TwoModes(p, lr=0.1), r"TwoModes has two modes, train\(\) and eval\(\)"),
        (KeptForAll, r"KeptForAll keeps state\['rounds'\], which is no parameter's"),
        (stepping_otherwise, "step of this SGD was replaced on the object"),
        (with_a_hook, r"AdamW has hooks on its state dict \(state_dict_post\)"),
        (with_an_object, "history of a group of the optimizer is a types.SimpleNamespace"),
        (lambda p: Counts(p, lr=0.1), "Counts has no kernel here.* a step changes k, which all parameters share"),
        (lambda p: Together(p, lr=0.1), "the new value of a parameter depends on other parameters"),
        (lambda p: Wraps(p, lr=0.1), "a parameter with a gradient does not change"),
        (lambda p: OneState(p, lr=0.1), "a step changes all, which all parameters share"),
        (lambda p: ByNumber([{"params": p[:2]}, {"params": p[2:]}], lr=0.1), "depends on the number of its group"),
        (lambda p: Slow(p, lr=0.1), "the state slow exists after some steps only"),
        (lambda p: Lists(p, lr=0.1), "history is a list, neither a tensor nor a number"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS has no kernel here"),
        (lambda p: torch.optim.SparseAdam(p), r"That fails for .*: SparseAdam does not support dense gradients"),
        (lambda p: Begun(p, lr=0.1), "contains states already"),
    ):
        print(message)
        model = make_model()
        before = torch.get_rng_state()
        with pytest.raises(ConfigError, match=message):
            offload.initialize(model=model, optimizer=make(list(model.parameters())), config={})
        assert torch.equal(torch.get_rng_state(), before) and not any(p.grad is not None for p in model.parameters())


def test_an_error_in_a_step_is_raised_with_its_cause() -> None:
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if Fails.fails:
                raise ArithmeticError("of the optimizer")
            super().step()

    model = make_model()
    optimizer = Fails(model.parameters(), lr=0.1)
    engine = offload.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 6})[0]
    train(engine, range(1))
    Fails.fails = True
    with pytest.raises(offload.EngineFailed) as error:
        train(engine, range(1, 4))
    assert "of the optimizer" in f"{error.value} {error.value.__cause__}"
    engine.destroy()


class Draws(torch.optim.SGD):
    """Draws from every generator, though no number of a step depends on it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(3), random.random(), np.random.rand()
        super().step()


def test_a_dry_run_leaves_every_generator() -> None:
    def drawn() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    def seed() -> None:
        for seed_of in (torch.manual_seed, random.seed, np.random.seed):
            seed_of(3)

    seed()
    expected = drawn()
    model = nn.Linear(3, 3)
    optimizer = Draws(model.parameters(), lr=0.1)
    seed()
    engine = offload.initialize(model=model, optimizer=optimizer, config={"offload": {"device": "cpu"}})[0]
    assert drawn() == expected
    engine.destroy()


def test_a_function_that_returns_no_optimizer_is_refused() -> None:
    """The optimizer of the config must not take its place without a word."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "offload": {"device": "cpu"},
    }
    with pytest.raises(ConfigError, match="returned None"):
        offload.initialize(model=make_model(), optimizer=lambda parameters: None, config=config)
