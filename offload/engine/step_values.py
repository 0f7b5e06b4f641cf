"""Values that the parts of a step hand to each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from offload.swapper.states import State


class Edit(NamedTuple):
    """New values for elements [start, stop) of a unit."""

    start: int
    stop: int
    values: torch.Tensor
    """(stop - start,) on the CPU. A weight's are fp32, which become the master, or of the mode's weight dtype: then
    elements whose bits do not change keep the low bits of their master. Another state's are fp32."""
    state: State = State.WEIGHT


class Known(NamedTuple):
    """What the gradients of a step have in common."""

    sum_squares: float
    """Of all of them, added in float64 in layout order; inf or NaN if any value is."""
    present: list[set[int]]
    """For each unit the segments that have one."""

    @property
    def norm(self) -> float:
        """The global 2-norm."""
        return math.sqrt(self.sum_squares) if self.sum_squares >= 0 else math.nan
