"""An optimizer of torch that cannot run one parameter at a time is refused, and an error in its step is raised."""

from __future__ import annotations

import collections
import random
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.errors import ConfigError
from tests.optim.test_torch_optimizers import make_model, train


class Counts(torch.optim.SGD):
    """Counts in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class Own(torch.optim.SGD):
    """Counts in itself."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
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


class OwnStates(torch.optim.SGD):
    """Keeps the states of parameters in a dict of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.own: dict[Any, int] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.own[p] = self.own.get(p, 0) + 1
        super().step()


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
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
        (lambda p: Own(p, lr=0.1), "a step changes calls, which all parameters share"),
        (lambda p: Together(p, lr=0.1), "the new value of a parameter depends on other parameters"),
        (lambda p: Wraps(p, lr=0.1), "a parameter with a gradient does not change"),
        (lambda p: OwnStates(p, lr=0.1), "a step changes own, which all parameters share"),
        (lambda p: OneState(p, lr=0.1), "a step changes all, which all parameters share"),
        (lambda p: ByNumber([{"params": p[:2]}, {"params": p[2:]}], lr=0.1), "depends on the number of its group"),
        (lambda p: Slow(p, lr=0.1), "the state slow exists after some steps only"),
        (lambda p: Lists(p, lr=0.1), "history is a list, neither a tensor nor a number"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS has no kernel here"),
        (lambda p: torch.optim.SparseAdam(p), r"That fails for .*: SparseAdam does not support dense gradients"),
        (lambda p: Begun(p, lr=0.1), "contains states already"),
    ],
)
def test_what_cannot_be_run_so_is_refused(make: Any, message: str) -> None:
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
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(3)

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
