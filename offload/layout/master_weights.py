"""Conversion between an fp32 master and its stored states: the weight alone, with its low bits, or with a full copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from offload import kernels
from offload.states import State

KEPT = (State.WEIGHT, State.MASTER_LOW_BITS, State.MASTER)
"""States that can hold a master; each mode uses some of them."""


def split(values: torch.Tensor, states: Mapping[State, torch.Tensor], noise: kernels.Noise | None = None) -> None:
    """Writes masters into the states that hold them.

    Args:
        values: (n,) of any floating dtype.
        states: the states that a mode has, (n,) each.
        noise: rounds masters of fewer bits than fp32 stochastically; None rounds them to nearest.
    """
    weight = states[State.WEIGHT]
    if State.MASTER_LOW_BITS in states:
        kernels.split_master(values.float(), weight, states[State.MASTER_LOW_BITS], noise)
        return
    if State.MASTER in states:
        states[State.MASTER].copy_(values)
    weight.copy_(values)


def weights_of(masters: torch.Tensor, kept: Mapping[State, torch.dtype]) -> torch.Tensor:
    """Returns the weights that `split` stores of `masters`.

    Args:
        masters: (n,) fp32 on the CPU.
        kept: the states that hold a master, and their dtypes.
    """
    states = {state: torch.empty(len(masters), dtype=dtype, device="cpu") for state, dtype in kept.items()}
    split(masters, states)
    return states[State.WEIGHT]


def sources(weights: Collection[State]) -> tuple[State, ...]:
    """Returns the states, among those that hold a master, that `join` reads."""
    return (State.MASTER,) if State.MASTER in weights else tuple(weights)


def join(states: Mapping[State, torch.Tensor], room: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the master that `split` wrote, (n,) fp32; without a copy if one of the states is the master itself.

    Args:
        states: the states that a mode has, (n,) each.
        room: memory for the result, (n,) fp32, if weight and low bits must be joined; None allocates it.
    """
    if State.MASTER in states:
        return states[State.MASTER]
    weight = states[State.WEIGHT]
    if State.MASTER_LOW_BITS not in states:
        return weight.float()
    master = torch.empty(len(weight), dtype=torch.float32, device="cpu") if room is None else room
    kernels.join_master(weight, states[State.MASTER_LOW_BITS], master)
    return master


def put_weight(values: torch.Tensor, states: Mapping[State, torch.Tensor]) -> None:
    """Writes `values`, (n,) in the weight's dtype. Elements whose bits do not change keep their master."""
    # Bits are compared as int16, not as floats: NaN differs from NaN, and -0.0 equals 0.0, as floats.
    weight = states[State.WEIGHT]
    if State.MASTER_LOW_BITS in states:
        states[State.MASTER_LOW_BITS].mul_(weight.view(torch.int16) == values.view(torch.int16))
    elif State.MASTER in states:
        master = states[State.MASTER]
        torch.where(weight.view(torch.int16) == values.view(torch.int16), master, values.float(), out=master)
    weight.copy_(values)
