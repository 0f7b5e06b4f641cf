"""Values of moments in any form: fp32 and bf16 as they are, 8 bits by the codes and scales of their blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels.moments import decode_moments, encode_moments
from offload.layout.modes import MOMENT_BLOCK, Mode
from offload.states import State


def scales_of(mode: Mode, scales: torch.Tensor, numel: int, offset: int = 0) -> torch.Tensor:
    """Returns the scales of the blocks of `numel` elements as the kernels take them, (blocks, moments).

    Args:
        mode: a mode with moments in 8 bits.
        scales: (n,) the scales from the first of these blocks on.
        numel: number of elements.
        offset: number of the first element in its block.
    """
    return scales[: len(mode.part(State.SCALES, 0, offset + numel))].view(-1, len(mode.moments))


def sources(mode: Mode, state: State) -> tuple[State, ...]:
    """Returns the states that together give the values of one: those in 8 bits need their scales."""
    return (state, State.SCALES) if mode.in_blocks and state in mode.moments else (state,)


def read(mode: Mode, states: Mapping[State, torch.Tensor], state: State, offset: int = 0) -> torch.Tensor:
    """Returns the values of a moment; those in fp32 or bf16 without a copy.

    Args:
        mode: dtypes of the states.
        states: (n,) of the moment on the CPU, and of moments in 8 bits the scales from their first block on.
        state: the moment.
        offset: number of the first element in its block.
    """
    stored = states[state]
    if not mode.in_blocks:
        return stored
    found = torch.empty(len(stored), dtype=torch.float32, device="cpu")
    scales = scales_of(mode, states[State.SCALES], len(stored), offset)
    decode_moments(stored, scales, mode.moments.index(state), found, offset)
    return found


def write(mode: Mode, states: Mapping[State, torch.Tensor], state: State, start: int, values: torch.Tensor) -> None:
    """Replaces elements of a moment, rounded to nearest where it is not fp32.

    The values end with a block, or with their parameter: what is behind them in the last block is padding.

    Args:
        mode: dtypes of the states.
        states: the moment and the scales of its blocks on the CPU, each from the first element of a block on.
        state: the moment.
        start: first element that is replaced, the first one of a block.
        values: (n,) of any floating dtype.
    """
    stop = start + len(values)
    if not mode.in_blocks:
        states[state][start:stop].copy_(values)
        return
    assert start % MOMENT_BLOCK == 0, "parameters, tiles and partitions begin at a border of blocks"
    part = mode.part(State.SCALES, start, stop)
    scales = states[State.SCALES][part.start : part.stop].view(-1, len(mode.moments))
    encode_moments(values.float(), states[state][start:stop], scales, mode.moments.index(state))
