"""Everything that `safe_get_*` reads of every parameter, the same of torch, an edit of it, and models to read it of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offload
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, room_for, train_step

AREA = "Looking at weights and editing them, between steps"

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")

PLACEMENTS = (DISK, MEMORY, ("cpu", "cpu"), ("none", "nvme"))

STATES = ("exp_avg", "exp_avg_sq")

Found = dict[str, torch.Tensor | None]


def gpt2() -> nn.Module:
    """Returns a GPT-2 of two narrow blocks, since each parameter is read many times here."""
    return models.gpt2(layers=2, width=32, heads=2)


class Mixture(models.Mixture):
    """A model of three blocks: a frozen one, one with a frozen weight, and one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[1:]


GPT2 = models.GPT2._replace(model=gpt2)

MIXTURE = models.MIXTURE._replace(model=Mixture)

JOBS = {"GPT2": GPT2, "MIXTURE": MIXTURE}


def everything(module: nn.Module) -> Found:
    """Returns all that can be read of each parameter, by its name and the state's, on the CPU."""
    states: Found = {}
    for name, parameter in module.named_parameters():
        states[f"{name} master"] = on_cpu(offload.safe_get_full_fp32_param(parameter))
        states[f"{name} gradient"] = on_cpu(offload.safe_get_full_grad(parameter))
        for state in STATES:
            states[f"{name} {state}"] = on_cpu(offload.safe_get_full_optimizer_state(parameter, state))
    return states


def on_cpu(value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a value that an engine gave from its device, on the CPU."""
    return None if value is None else value.cpu()


LOCAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "master": (offload.safe_get_local_fp32_param, offload.safe_set_local_fp32_param),
    "gradient": (offload.safe_get_local_grad, offload.safe_set_local_grad),
    **{
        state: (
            lambda p, state=state: offload.safe_get_local_optimizer_state(p, state),
            lambda p, value, state=state: offload.safe_set_local_optimizer_state(p, value, state),
        )
        for state in STATES
    },
}


def everything_local(module: nn.Module) -> Found:
    """Returns what `everything` reads, of this rank's shard."""
    return {
        f"{name} {what}": on_cpu(get(parameter))
        for name, parameter in module.named_parameters()
        for what, (get, _) in LOCAL.items()
    }


def everything_of_torch(engine: PlainEngine) -> Found:
    states: Found = {}
    for (name, parameter), master in zip(engine.module.named_parameters(), engine._masters, strict=True):
        states[f"{name} master"] = master.detach().clone()
        states[f"{name} gradient"] = None if master.grad is None else master.grad.clone()
        for state in STATES:
            mine = engine.optimizer.state[master].get(state) if master.requires_grad else None
            nothing = torch.zeros_like(master) if parameter.requires_grad else None
            states[f"{name} {state}"] = nothing if mine is None else mine.clone()
    return states


def differences(left: Found, right: Found, same: Callable[..., bool] = torch.equal) -> list[str]:
    assert left.keys() == right.keys()
    return [
        name
        for name, mine in left.items()
        if not (
            mine is right[name] is None or (mine is not None and right[name] is not None and same(mine, right[name]))
        )
    ]


def same_but_for_roundings(states: Found, expected: Found, job: Job, reordered: bool = False) -> None:
    """Asserts that masters agree within `rounding_bounds`, gradients and moments as sums and squares of sums do."""
    assert states.keys() == expected.keys()
    share = rounding_bounds.norm_error(job) + 2 * rounding_bounds.step_error(job)
    built = job.model()
    job = job._replace(model=lambda: built)  # which is asked for its shapes for each tensor
    for name, value in states.items():
        parameter, what = name.rsplit(" ", 1)
        if value is None or expected[name] is None:
            assert value is expected[name], name
            continue
        mine, theirs = (models.without_key_bias(parameter, each[name]) for each in (states, expected))
        master = what == "master"
        error = (
            rounding_bounds.weight_error(job, theirs, reordered=reordered)
            if master
            else share * rounding_bounds.norm(theirs)
        )
        assert rounding_bounds.norm(mine - theirs) <= error, name


def little_room(job: Job, placement: tuple[str, str]) -> dict[str, Any]:
    """Returns options that leave room for two units on the device, unless the device is their tier."""
    return {} if "none" in placement else {"device_memory": room_for(job, 2)}


def backward(engine: Any, job: Job, step: int) -> None:
    """Runs all backwards of a step, but not its end."""
    for micro in range(job.accumulation):
        engine.backward(job.loss(engine, step, micro))
        if micro < job.accumulation - 1:
            engine.step()


def a_round(engine: Any, job: Job, look: Callable[[], Found]) -> list[Found]:
    """Yields what `look` finds before any step, between backward and step of the second, and after the second."""
    looks = [look()]
    train_step(engine, job, 0)
    backward(engine, job, 1)
    looks.append(look())
    engine.step()
    looks.append(look())
    return looks


def halved(engine: Any) -> None:
    """Of every second parameter other moments, of every third another master, through the functions."""
    for number, parameter in enumerate(p for p in engine.module.parameters() if p.requires_grad):
        if number % 2 == 0:
            for state, factor in zip(STATES, (0.5, 0.25), strict=True):
                value = offload.safe_get_full_optimizer_state(parameter, state)
                offload.safe_set_full_optimizer_state(parameter, value * factor, state)
        if number % 3 == 0:
            offload.safe_set_full_fp32_param(parameter, offload.safe_get_full_fp32_param(parameter) * 0.75)
