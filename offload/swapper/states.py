"""The states of a parameter and the bytes of each, by mode of precision."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class State(enum.Enum):
    """What there is of each trainable element. The compute copy is WEIGHT; GRAD lives for one step, the others stay."""

    WEIGHT = "weight"
    RESIDUAL = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"


class Mode(NamedTuple):
    """A mode of precision: the dtype of the weights and what an update keeps beside them."""

    name: str
    states: dict[State, torch.dtype]

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.states[State.WEIGHT]

    @property
    def element_bytes(self) -> int:
        """Bytes of all states of one trainable element (12 in both modes)."""
        return sum(dtype.itemsize for dtype in self.states.values())


MODES = {
    # The master is weight and residual together, bit for bit: see kernels.split_master.
    "bf16": Mode(
        "bf16",
        {
            State.WEIGHT: torch.bfloat16,
            State.RESIDUAL: torch.int16,
            State.EXP_AVG: torch.float32,
            State.EXP_AVG_SQ: torch.float32,
        },
    ),
    # The weight is its own master.
    "fp32": Mode(
        "fp32",
        {State.WEIGHT: torch.float32, State.EXP_AVG: torch.float32, State.EXP_AVG_SQ: torch.float32},
    ),
}
