"""Conversion of a checkpoint's weights to the mode of this engine, and the words that tell it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.layout.modes import Mode, moments_name
from offload.layout.optimizer_states import join, split
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


def in_words(saved: Mode, mine: Mode, states: bool) -> str | None:
    """Returns what a load changes where the modes differ, and what follows; None if nothing does.

    Args:
        saved: the checkpoint's mode.
        mine: the engine's mode.
        states: True if optimizer states are loaded.
    """
    changed = []
    if saved.precision != mine.precision:
        kept = "masters and moments" if states else "masters"
        changed.append(
            f"dtype {saved.precision} is now {mine.precision} ({kept} are taken over, and layers compute in "
            f"{mine.precision} from here on)"
        )
    if saved.master != mine.master:
        rounded = " (rounded to 24 bits)" if mine.master == "bf24" else ""
        changed.append(f"master {saved.master} is now {mine.master}{rounded}")
    if states and saved.moment_dtype is not mine.moment_dtype:
        now = moments_name(mine.moment_dtype)
        rounded = "" if now == "fp32" else " (rounded to nearest)"
        changed.append(f"moments {moments_name(saved.moment_dtype)} are now {now}{rounded}")
    if not changed:
        return None
    return (
        f"loaded into another form than it was saved in: {', '.join(changed)}; losses from here on are not those that "
        "the run would have had"
    )
