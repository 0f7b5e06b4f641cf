"""Conversion of a checkpoint's weights to the mode of this engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.layout.master_weights import join, split
from offload.states import State


def copy_bits(saved: torch.Tensor, mine: torch.Tensor) -> None:
    """Copies elements of one size as bytes: as numbers, some of them would be NaNs, which a copy may change."""
    mine.view(torch.uint8).copy_(saved.view(torch.uint8))


def convert(saved: Mapping[State, torch.Tensor], mine: Mapping[State, torch.Tensor]) -> None:
    """Converts weights from one mode to another.

    Args:
        saved: (numel,) of each state of the checkpoint's mode.
        mine: (numel,) of each state of the engine's mode; filled.
    """
    weight = mine[State.WEIGHT]
    # A bf16 weight without low bits is frozen. With room for them `split` rounds it as it rounds trainable weights.
    if weight.dtype == torch.bfloat16 and State.MASTER_LOW_BITS not in mine:
        mine = {**mine, State.MASTER_LOW_BITS: torch.empty(len(weight), dtype=torch.int16, device="cpu")}
    split(join(saved), mine)
