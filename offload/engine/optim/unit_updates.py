"""What a boundary decides, once it knows the norm: how far each parameter goes, and which units are updated when."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from offload import kernels
from offload.engine.callbacks import Edit
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.torch_fallback import TorchSegment, TorchStep, attributes_of
from offload.layout.flat_layout import UnitLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitUpdate:
    """One unit's part of an optimizer step. Elements outside of all segments are copied unchanged."""

    unit: int
    numel: int
    """Elements of the trainable part of this rank's partition."""
    segments: tuple[kernels.Segment | TorchSegment, ...] = ()
    edits: tuple[Edit, ...] = ()
    """Values set by a user; an update has either segments or edits, or neither where other ranks have them all."""
    parameters: tuple[int, ...] = ()
    """The number in the unit of each segment's parameter."""
    ratios: tuple[float, ...] = ()
    """Of LAMB on several ranks: each segment's trust ratio; see `weighing`."""


def grad_scale(norm: float, clip: float, loss_scale: float) -> float:
    """What every gradient is multiplied by: that of `torch.nn.utils.clip_grad_norm_` (with its 1e-6), unscaled."""
    return (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / loss_scale


def part_of(part: range, start: int, stop: int) -> tuple[int, int]:
    """What of a unit's elements [start, stop) is this rank's, which are `part`, counted from its first."""
    return max(start, part.start) - part.start, min(stop, part.stop) - part.start


def cut(edits: Sequence[Edit], part: range) -> tuple[Edit, ...]:
    """What of the edits of a unit lies in this rank's `part` of it, counted from its first element."""
    mine: list[Edit] = []
    for edit in edits:
        start, stop = part_of(part, edit.start, edit.stop)
        if start < stop:
            first = start + part.start - edit.start
            values = edit.values[first : first + stop - start]
            mine.append(dataclasses.replace(edit, start=start, stop=stop, values=values))
    return tuple(mine)


class Decider:
    """Makes the updates of a step. Steps are counted for each parameter, as torch counts them."""

    def __init__(
        self, layouts: Sequence[UnitLayout], trainable: Sequence[range], module: nn.Module, optimizer: Optimizer
    ) -> None:
        self._layouts, self._trainable, self._optimizer = layouts, trainable, optimizer
        self._parameters = [[module.get_parameter(s.name) for s in layout.segments] for layout in layouts]

    def updates(
        self, present: Sequence[set[int]], order: Sequence[int], scale: float, counts: list[list[int]]
    ) -> list[UnitUpdate]:
        """Of each unit with a gradient, in the `order` in which the next forward will need them.

        `present` has the segments of each unit that have one; `counts`, how often each was updated, go up.
        """
        settings = self._optimizer.settings()
        updates: dict[int, UnitUpdate] = {}
        for unit, part in enumerate(self._trainable):
            segments: list[kernels.Segment | TorchSegment] = []
            parameters: list[int] = []
            for position in sorted(present[unit]):
                counts[unit][position] += 1
                segment = self._layouts[unit].segments[position]
                start, stop = part_of(part, segment.start, segment.stop)
                group = settings[id(self._parameters[unit][position])]
                step = self._optimizer.rule.step(group, counts[unit][position], scale)
                if start < stop:
                    if isinstance(step, TorchStep):
                        attributes = attributes_of(self._parameters[unit][position])
                        segments.append(TorchSegment(start, stop, step._replace(attributes=attributes)))
                    else:
                        segments.append(kernels.Segment(start, stop, step))
                    parameters.append(position)
            if present[unit]:
                updates[unit] = UnitUpdate(
                    unit=unit, numel=len(part), segments=tuple(segments), parameters=tuple(parameters)
                )
        first_use = {unit: position for position, unit in reversed(list(enumerate(order)))}
        return [updates[unit] for unit in sorted(updates, key=lambda u: (first_use.get(u, len(order)), u))]
