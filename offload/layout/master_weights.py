"""An fp32 master and the states that hold it: a weight alone, with its other half, or with the whole beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from offload import kernels
from offload.states import State

KEPT = (State.WEIGHT, State.RESIDUAL, State.MASTER)
"""The states that hold it; a mode has some of them."""


def split(values: torch.Tensor, states: Mapping[State, torch.Tensor]) -> None:
    """Write `values`, (n,) of any floating dtype, as the states that a mode has, (n,) each."""
    weight = states[State.WEIGHT]
    if State.RESIDUAL in states:
        kernels.split_master(values.float(), weight, states[State.RESIDUAL])
        return
    if State.MASTER in states:
        states[State.MASTER].copy_(values)
    weight.copy_(values)


def sources(weights: Collection[State]) -> tuple[State, ...]:
    """Of the states that hold a master, those from which `join` takes it."""
    return (State.MASTER,) if State.MASTER in weights else tuple(weights)


def join(states: Mapping[State, torch.Tensor], room: torch.Tensor | None = None) -> torch.Tensor:
    """The master, (n,) fp32, of what `split` wrote; it is one of the states where one of them is it.

    Where two of them are it, it is written to `room`, (n,) fp32, or to new memory.
    """
    if State.MASTER in states:
        return states[State.MASTER]
    weight = states[State.WEIGHT]
    if State.RESIDUAL not in states:
        return weight.float()
    master = torch.empty(len(weight), dtype=torch.float32, device="cpu") if room is None else room
    kernels.join_master(weight, states[State.RESIDUAL], master)
    return master


def put_weight(values: torch.Tensor, states: Mapping[State, torch.Tensor]) -> None:
    """Write `values`, (n,) in the weight's dtype; elements whose bits are there already keep what their master has."""
    weight = states[State.WEIGHT]
    if State.RESIDUAL in states:
        states[State.RESIDUAL].mul_(weight.view(torch.int16) == values.view(torch.int16))
    elif State.MASTER in states:
        master = states[State.MASTER]
        torch.where(weight.view(torch.int16) == values.view(torch.int16), master, values.float(), out=master)
    weight.copy_(values)
