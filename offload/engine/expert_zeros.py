"""Gradients of zeros for experts without a token, as torch has them inside of the gradient of a whole stack.

In torch a stacked parameter has one gradient, which is zero in the rows of experts that no token visited: their moments
fade, and their weights move by momentum and decay. If a row is a unit of its own, it receives no gradient. It gets one
of zeros here, if any other row of its parameter has one, on whichever rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offload.engine.gradients import GradientAccumulator
from offload.layout.flat_layout import UnitLayout


class _Row(NamedTuple):
    """One row of a stacked parameter."""

    unit: int
    position: int
    first: int
    """Of this rank's elements, counted in the row."""
    numel: int
    """Of this rank's elements; 0 if other ranks have the row."""


class ZeroGradients:
    """The rows of all stacked parameters of one engine that train. Belongs to the thread that calls `step()`."""

    def __init__(
        self, rows: Mapping[str, Sequence[_Row]], gradients: GradientAccumulator, device: torch.device
    ) -> None:
        """Stores the rows.

        Args:
            rows: the rows of each stacked parameter, by the parameter's name.
            gradients: the gradients of all units.
            device: device that gradients arrive on.
        """
        self._rows, self._gradients, self._device = rows, gradients, device

    def add(self, present: Sequence[set[int]]) -> None:
        """Adds zeros for each row without a gradient of a parameter that has one. No backward may run.

        Args:
            present: for each unit the segments that have a gradient, of all ranks; those of the zeros are added.
        """
        for rows in self._rows.values():
            missing = [row for row in rows if row.position not in present[row.unit]]
            if len(missing) == len(rows):
                continue
            for row in missing:
                present[row.unit].add(row.position)
                if not row.numel:
                    continue
                # An update of the unit's other parameters may have begun: it lacks this one.
                if self._gradients.completion is not None:
                    self._gradients.completion.changed(row.unit)
                zeros = torch.zeros(row.numel, dtype=self._gradients.dtype, device=self._device)
                self._gradients.put(row.unit, row.position, row.first, zeros)


def zero_gradients(
    layouts: Sequence[UnitLayout], parts: Sequence[range], gradients: GradientAccumulator, device: torch.device
) -> ZeroGradients | None:
    """Returns the object that adds zeros, or None if no rows of stacked parameters train.

    Args:
        layouts: the segments of each unit.
        parts: the elements of each unit that this rank updates.
        gradients: the gradients of all units.
        device: device that gradients arrive on.
    """
    rows: dict[str, list[_Row]] = {}
    for unit, (layout, part) in enumerate(zip(layouts, parts, strict=True)):
        for position, segment in enumerate(layout.segments):
            if segment.stack and segment.trainable and segment.numel:
                start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
                row = _Row(unit, position, start - segment.start, max(0, stop - start))
                rows.setdefault(segment.stack, []).append(row)
    return ZeroGradients(rows, gradients, device) if rows else None
