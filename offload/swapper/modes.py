"""The bytes of each state of a parameter, by mode: a precision of the weights and an optimizer's moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from offload.states import State


class Mode(NamedTuple):
    """The dtype of the weights, what beside them makes an fp32 master, and what the optimizer keeps."""

    precision: str
    optimizer: str
    weights: Mapping[State, torch.dtype]
    """WEIGHT, and RESIDUAL or MASTER where a weight is not its own master."""
    moments: tuple[State, ...]
    """fp32, in the order in which the kernel takes them; of TORCH, which has no kernel, all in one."""

    @property
    def name(self) -> str:
        """As stores and checkpoints have it: "bf16", or "bf16 lion"."""
        return self.precision if self.optimizer == ADAM else f"{self.precision} {self.optimizer}"

    @property
    def states(self) -> dict[State, torch.dtype]:
        """All of them, in the order in which they lie in a tile."""
        return {**self.weights, **dict.fromkeys(self.moments, torch.float32)}

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weights[State.WEIGHT]

    @property
    def element_bytes(self) -> int:
        """Bytes of all states of one trainable element, but for PACKED: 12 with Adam in bf16 and fp32, 14 in fp16."""
        return sum(dtype.itemsize for state, dtype in self.states.items() if state is not State.PACKED)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Of weights, by the names that configs have."""


def dtype_name(dtype: torch.dtype) -> str:
    """What configs call one of `DTYPES`."""
    return next(name for name, each in DTYPES.items() if each is dtype)


ADAM, LAMB, TORCH = "adam", "lamb", "torch"
PRECISIONS: dict[str, dict[State, torch.dtype]] = {
    # The master is weight and residual together, bit for bit: see kernels.split_master.
    "bf16": {State.WEIGHT: torch.bfloat16, State.RESIDUAL: torch.int16},
    "fp16": {State.WEIGHT: torch.float16, State.MASTER: torch.float32},
    # The weight is its own master.
    "fp32": {State.WEIGHT: torch.float32},
}
MOMENTS: dict[str, tuple[State, ...]] = {
    ADAM: (State.EXP_AVG, State.EXP_AVG_SQ),
    LAMB: (State.EXP_AVG, State.EXP_AVG_SQ),
    "adagrad": (State.SUM,),
    "lion": (State.EXP_AVG,),
    "momentum": (State.MOMENTUM_BUFFER,),
    "sgd": (),
    TORCH: (State.PACKED,),
}
MODES = {
    mode.name: mode
    for mode in (
        Mode(precision, optimizer, weights, moments)
        for precision, weights in PRECISIONS.items()
        for optimizer, moments in MOMENTS.items()
    )
}
