"""Experts that no token visits cost no read and no update; one fused parameter is updated as torch would."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload import testing
from offload.states import State
from offload.swapper.store import Store
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    plain_loop,
    room_for,
    run,
    start,
    train_step,
    weights_of,
)

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
WIDTH, EXPERTS, NEVER = 32, 6, 5


def visited(step: int, micro: int = 0) -> set[int]:
    """The experts that the tokens of a micro-batch go to: two of the first five, others from step to step."""
    return {(step + micro) % NEVER, (step + micro + 2) % NEVER}


def token_ids(step: int, micro: int = 0) -> torch.Tensor:
    """(4, 16); the token `t` goes to expert `t % EXPERTS`."""
    generator = torch.Generator().manual_seed(1_000 * step + micro)
    experts = torch.tensor(sorted(visited(step, micro)))
    chosen = experts[torch.randint(len(experts), (4, 16), generator=generator)]
    return chosen + EXPERTS * torch.randint(8, (4, 16), generator=generator)


class Block(nn.Module):
    """A router, and experts that are modules; those without a token are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(self.expert() for _ in range(EXPERTS))

    def expert(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, hidden: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        rows = self.norm(hidden)
        scores = functional.softmax(self.router(rows), -1).gather(-1, route[..., None])
        out = torch.zeros_like(hidden)
        for number in route.unique().tolist():
            mine = route == number
            out[mine] = self.through(rows[mine], number) * scores[mine]
        return hidden + out

    def through(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        return self.experts[number](rows)


class Fused(Block):
    """The same with all experts in two parameters, as transformers 5 has them."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 48) / 6)
        self.down = nn.Parameter(torch.randn(EXPERTS, 48, WIDTH) / 6)

    def through(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        return functional.gelu(rows @ self.up[number]) @ self.down[number]


class Model(nn.Module):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8 * EXPERTS, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8 * EXPERTS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, ids % EXPERTS)
        return self.head(hidden)


class FusedModel(Model):
    block = Fused


def expert_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = token_ids(step, micro)
    return models.token_loss(model(ids), ids)


JOB = Job(Model, expert_loss, steps=7)


def expert_units(engine: offload.Engine, experts: set[int]) -> set[int]:
    """The units of these experts, in all layers."""
    names = {f"layers.{layer}.experts.{expert}" for layer in range(2) for expert in experts}
    units = {unit for unit, layout in enumerate(testing.inspect(engine).layouts) if layout.name in names}
    assert len(units) == len(names), "each expert is a unit"
    return units


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, State]]]:
    """(unit, state) of each read and write of the store."""
    calls: dict[str, list[tuple[int, State]]] = {"read": [], "write": []}

    def counted(name: str, real: Any, store: Store, unit: int, state: State, *args: Any, **kwargs: Any) -> Any:
        calls[name].append((unit, state))
        return real(store, unit, state, *args, **kwargs)

    for name in calls:
        testing.intercept(monkeypatch, f"store.{name}", partial(counted, name))
    return calls


@pytest.mark.sample(1)
@pytest.mark.works("Modules", "experts that are modules: those without a token cost no read and no update", "right")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_no_token_visits_is_neither_read_nor_updated(
    accumulation: int, moved: dict[str, list[tuple[int, State]]], tmp_path: Path
) -> None:
    job = JOB._replace(accumulation=accumulation, dtype="bf16")
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 3))
    every, never = expert_units(engine, set(range(EXPERTS))), expert_units(engine, {NEVER})
    store = testing.inspect(engine).store
    assert store is not None
    testing.settle(engine, commit=False)
    before: set[int] = set()
    for calls in moved.values():
        calls.clear()
    for step in range(job.steps):
        slots, counts = list(store.newest), [list(each) for each in testing.inspect(engine).parameter_steps]
        train_step(engine, job, step)
        testing.settle(engine, commit=False)
        now = expert_units(engine, set.union(*(visited(step, micro) for micro in range(accumulation))))
        # The order of the step before is what is read ahead of.
        read = {unit for unit, _ in moved["read"]} & every
        assert now <= read <= now | before, f"step {step}"
        assert {unit for unit, state in moved["read"] if state is not State.WEIGHT} & every == now
        assert {unit for unit, _ in moved["write"]} & every == now
        for unit in every:
            stepped = unit in now
            assert (store.newest[unit] != slots[unit]) == stepped
            assert testing.inspect(engine).parameter_steps[unit] == [count + stepped for count in counts[unit]]
        before = now
        for calls in moved.values():
            calls.clear()
    for unit in never:
        for segment in testing.inspect(engine).layouts[unit].segments:
            parameter = engine.module.get_parameter(segment.name)
            for name in ("exp_avg", "exp_avg_sq"):
                moment = offload.safe_get_full_optimizer_state(parameter, name)
                assert moment is not None and not moment.any()
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.works("Modules", "experts in one fused parameter, some without a token", "right")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", [Model, FusedModel])
@pytest.mark.numeric
def test_as_pytorch_whatever_the_routing(model: type[Model], accumulation: int, dtype: str, tmp_path: Path) -> None:
    job = JOB._replace(model=model, dtype=dtype, accumulation=accumulation)
    in_memory = run(job, MEMORY, tmp_path / "memory")
    assert_same(in_memory, run(job, DISK, tmp_path / "disk", device_memory=room_for(job, 3)))
    plain = plain_loop(job)
    rounding_bounds.same_training(in_memory, plain, job)


@pytest.mark.numeric
def test_decay_of_what_no_token_visits(tmp_path: Path) -> None:
    """A module has no gradient: it stays. A part of a parameter has a gradient of zeros: it decays, as in torch."""
    for model, stays in ((Model, True), (FusedModel, False)):
        job = JOB._replace(model=model, lr=1e-2)
        torch.manual_seed(job.seed)
        first = job.model().state_dict()
        last = run(job, DISK, tmp_path / model.__name__, device_memory=room_for(job, 3)).weights
        name, of_it = (f"layers.0.experts.{NEVER}.0.weight", ...) if stays else ("layers.0.up", NEVER)
        shrunk = (1 - job.lr * job.weight_decay) ** (0 if stays else job.steps)
        error = rounding_bounds.sum_error(job.steps)  # a rounding in each step
        torch.testing.assert_close(last[name][of_it], first[name][of_it] * shrunk, rtol=error, atol=0)
        assert stays == torch.equal(last[name][of_it], first[name][of_it])


def test_a_run_with_unvisited_experts_resumes(tmp_path: Path) -> None:
    """How often each expert was updated comes back too: the correction of its moments depends on it."""
    job = JOB._replace(dtype="bf16")
    unbroken = run(job, DISK, tmp_path / "whole")
    losses = []
    for steps in (range(3), range(3, job.steps)):
        engine = start(job, DISK, tmp_path / "parts", resume="auto")
        losses += [train_step(engine, job, step) for step in steps]
        weights = weights_of(engine)
        engine.destroy(remove=steps.stop == job.steps)
    assert losses == unbroken.losses
    assert_same_tensors(weights, unbroken.weights)


def mixtral(implementation: str) -> nn.Module:
    """One expert for a token: 0 or 1, whose scores are each other's negative, or 2; that of 3 is zero."""
    model = models.mixtral()
    model.set_experts_implementation(implementation)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1
        weight = layer.mlp.gate.weight.data
        weight[:3] *= 50
        weight[1], weight[3] = -weight[0], 0
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.numeric
def test_mixtral_with_an_expert_that_no_token_visits(implementation: str, tmp_path: Path) -> None:
    """The router and the fused experts of transformers, which have a gradient of zeros for it."""
    job = Job(partial(mixtral, implementation), models.language_loss)
    in_memory = run(job, MEMORY, tmp_path / "memory")
    engine = start(job, DISK, tmp_path / "disk", device_memory=room_for(job, 2))
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    moment = offload.safe_get_full_optimizer_state(engine.module.model.layers[0].mlp.experts.down_proj, "exp_avg")
    assert moment is not None and [bool(each.any()) for each in moment[[0, 1, 3]]] == [True, True, False]
    weights = weights_of(engine)
    engine.destroy(remove=True)
    assert losses == in_memory.losses
    assert_same_tensors(weights, in_memory.weights)
    plain = plain_loop(job)
    rounding_bounds.same_losses(losses, plain.losses, job)
    # The weight of one expert of one is 1 whatever its score, so that the gradient of a gate is rounding alone.
    gates = {name: value for name, value in plain.weights.items() if name.endswith("gate.weight")}
    assert len(gates) == 2
    rounding_bounds.same_weights(weights | gates, plain.weights, job)
