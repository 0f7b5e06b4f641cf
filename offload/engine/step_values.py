"""Values that the ranks agree on: the gradients of a step, and new values that a user sets.

They are made by `gradients` and `weights`, and combined over the ranks by `rounds`, which imports neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from offload.states import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Facts about the gradients of a step on which the step is decided."""

    sum_squares: float
    """Of all of them, added in float64 in layout order; inf or NaN if any value is."""
    present: list[set[int]]
    """For each unit the segments that have one."""

    @property
    def norm(self) -> float:
        """The global 2-norm."""
        return math.sqrt(self.sum_squares) if self.sum_squares >= 0 else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """New values for elements [start, stop) of a unit."""

    start: int
    stop: int
    values: torch.Tensor
    """(stop - start,) on the CPU. Of a weight in fp32, which makes them the master, or in the mode's weight dtype: then
    elements whose bits do not change keep what the master has beyond them. Of another state in fp32."""
    state: State = State.WEIGHT
