"""Gradients of zeros for experts without a token, as torch has them inside of the gradient of a whole stack.

In torch a stacked parameter has one gradient, which is zero in the rows of experts that no token visited: their moments
fade, and their weights move by momentum and decay. If a row is a unit of its own, it receives no gradient. It gets one
of zeros here, if any other row of its parameter has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offload.engine.gradients.accumulator import GradientAccumulator
from offload.layout.flat_layout import UnitLayout


class _Row(NamedTuple):
    """One row of a stacked parameter."""

    unit: int
    position: int
    numel: int


class ZeroGradients:
    """The rows of all stacked parameters of one engine that train. Belongs to the thread that calls `step()`."""

    def __init__(
        self, rows: Mapping[str, Sequence[_Row]], gradients: GradientAccumulator, device: torch.device
    ) -> None:
        """Stores the rows.

        Args:
            rows: the rows of each stacked parameter, by the parameter's name.
            gradients: the gradients of all units.
            device: device on which gradients arrive.
        """
        self._rows, self._gradients, self._device = rows, gradients, device

    def add(self) -> None:
        """Adds zeros for each row without a gradient of a parameter that has one. No backward may run."""
        for rows in self._rows.values():
            missing = [row for row in rows if not self._gradients.has(row.unit, row.position)]
            if len(missing) == len(rows):
                continue
            for row in missing:
                # An update of the unit's other parameters may have begun: it lacks this one.
                if self._gradients.completion is not None:
                    self._gradients.completion.changed(row.unit)
                zeros = torch.zeros(row.numel, dtype=self._gradients.dtype, device=self._device)
                self._gradients.put(row.unit, row.position, 0, zeros)


def zero_gradients(
    layouts: Sequence[UnitLayout], gradients: GradientAccumulator, device: torch.device
) -> ZeroGradients | None:
    """Returns the object that adds zeros, or None if no rows of stacked parameters train.

    Args:
        layouts: the segments of each unit.
        gradients: the gradients of all units.
        device: device on which gradients arrive.
    """
    rows: dict[str, list[_Row]] = {}
    for unit, layout in enumerate(layouts):
        for position, segment in enumerate(layout.segments):
            if segment.stack and segment.trainable and segment.numel:
                rows.setdefault(segment.stack, []).append(_Row(unit, position, segment.numel))
    return ZeroGradients(rows, gradients, device) if rows else None
