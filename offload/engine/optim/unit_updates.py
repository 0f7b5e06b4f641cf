"""Updates of the units in one optimizer step, made once the gradient norm is known, in the order of their next use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from offload import kernels
from offload.engine.callbacks import Edit
from offload.engine.optim.optimizer import Optimizer
from offload.layout.flat_layout import UnitLayout
from offload.optimizers.matrix_steps import MatrixSegment, MuonStep, SinkGDStep
from offload.optimizers.of_torch import TorchSegment, TorchStep, attributes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitUpdate:
    """Update of one unit in an optimizer step. Elements outside of all segments are copied unchanged."""

    unit: int
    numel: int
    """Elements of the trainable shard of this rank's partition."""
    segments: tuple[kernels.Segment | TorchSegment | MatrixSegment, ...] = ()
    edits: tuple[Edit, ...] = ()
    """Values set by the user; an update contains segments or edits, or neither if other ranks hold all of them."""
    parameters: tuple[int, ...] = ()
    """Index in the unit of each segment's parameter."""
    ratios: tuple[float, ...] = ()
    """Trust ratio of each segment, for LAMB on several ranks; see `lamb_norms`."""
    shared: tuple[int, ...] = ()
    """Indices in the unit of parameters that several ranks step as a whole, together; the same on every rank."""

    @property
    def changes(self) -> bool:
        """True if the update changes this rank's elements, or takes part in steps of other ranks."""
        return bool(self.segments or self.edits or self.shared)


def grad_scale(norm: float, clip: float, loss_scale: float) -> float:
    """Returns the factor of every gradient: `torch.nn.utils.clip_grad_norm_`'s, over the loss scale.

    Args:
        norm: global norm of the gradient, without the loss scale.
        clip: the largest norm; 0 does not clip.
        loss_scale: factor of the loss.
    """
    # 1e-6 is torch's own, for equal bits.
    return (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / loss_scale


def part_of(part: range, start: int, stop: int) -> tuple[int, int]:
    """Returns the intersection of a unit's elements [start, stop) with this rank's `part`.

    Both ends are counted from the first element of `part`. If nothing intersects, the first end is not below the other.
    """
    return max(start, part.start) - part.start, min(stop, part.stop) - part.start


def cut(edits: Sequence[Edit], part: range) -> tuple[Edit, ...]:
    """Returns the edits of a unit, limited to this rank's `part` and counted from the first element of `part`."""
    mine: list[Edit] = []
    for edit in edits:
        start, stop = part_of(part, edit.start, edit.stop)
        if start < stop:
            first = start + part.start - edit.start
            values = edit.values[first : first + stop - start]
            mine.append(dataclasses.replace(edit, start=start, stop=stop, values=values))
    return tuple(mine)


class UpdateBuilder:
    """Builder of an optimizer step's updates. Steps are counted for each parameter, as torch does."""

    def __init__(
        self,
        *,
        layouts: Sequence[UnitLayout],
        trainable: Sequence[range],
        module: nn.Module,
        optimizer: Optimizer,
        noise_seed: int | None,
    ) -> None:
        """Looks up the parameters of each unit.

        Args:
            layouts: the layout of each unit.
            trainable: elements of each unit that this rank updates.
            module: the model.
            optimizer: its groups give the numbers of each step.
            noise_seed: seed of the stochastic rounding of moments and masters; None if they are fp32.
        """
        self._layouts, self._trainable, self._optimizer = layouts, trainable, optimizer
        self._noise_seed = noise_seed
        self._parameters = [[module.get_parameter(s.parameter) for s in layout.segments] for layout in layouts]

    def updates(
        self, present: Sequence[set[int]], order: Sequence[int], scale: float, counts: list[list[int]]
    ) -> list[UnitUpdate]:
        """Returns an update of each unit with a gradient, in the `order` in which the next forward needs the units.

        Args:
            present: for each unit the segments that have a gradient.
            order: units in the order of their next use; may repeat.
            scale: factor of the gradients.
            counts: number of updates of each parameter, by unit; incremented in place.
        """
        settings = self._optimizer.settings()
        updates: dict[int, UnitUpdate] = {}
        for unit, positions in enumerate(present):
            for position in positions:
                counts[unit][position] += 1
            # Units whose gradients are all on other ranks get an empty update, because all ranks must update the same
            # units.
            if positions:
                updates[unit] = self.update_of(unit, positions, scale, counts[unit], settings)
        # Reversed, so that the first use of a unit overwrites later ones.
        first_use = {unit: position for position, unit in reversed(list(enumerate(order)))}
        return [updates[unit] for unit in sorted(updates, key=lambda u: (first_use.get(u, len(order)), u))]

    def settings(self) -> Mapping[int, Mapping[str, Any]]:
        """Returns the group of each parameter, by the parameter's id: an argument of `update_of`."""
        return self._optimizer.settings()

    def update_of(
        self,
        unit: int,
        present: set[int],
        scale: float,
        counts: Sequence[int],
        settings: Mapping[int, Mapping[str, Any]],
    ) -> UnitUpdate:
        """Returns the update of one unit.

        Args:
            unit: index of the unit.
            present: the segments that have a gradient.
            scale: factor of the gradients.
            counts: number of updates of each parameter, this one included.
            settings: the group of each parameter.
        """
        part = self._trainable[unit]
        segments: list[kernels.Segment | TorchSegment | MatrixSegment] = []
        parameters: list[int] = []
        shared: list[int] = []
        for position in sorted(present):
            segment = self._layouts[unit].segments[position]
            start, stop = part_of(part, segment.start, segment.stop)
            group = settings[id(self._parameters[unit][position])]
            step = self._optimizer.rule.step(group, counts[position], scale)
            # Ranks have equally many elements of a unit each.
            borders = segment.start // len(part), (segment.stop - 1) // len(part)
            if isinstance(step, TorchStep | MuonStep | SinkGDStep) and segment.numel and borders[0] < borders[1]:
                shared.append(position)
            if start < stop:
                if isinstance(step, TorchStep):
                    attributes = attributes_of(self._parameters[unit][position])
                    segments.append(TorchSegment(start, stop, step._replace(attributes=attributes)))
                elif isinstance(step, MuonStep | SinkGDStep):
                    segments.append(MatrixSegment(start, stop, step, self._noise(unit, counts[position], part, start)))
                else:
                    segments.append(
                        kernels.Segment(start, stop, step, self._noise(unit, counts[position], part, start))
                    )
                parameters.append(position)
        return UnitUpdate(
            unit=unit,
            numel=len(part),
            segments=tuple(segments),
            parameters=tuple(parameters),
            shared=tuple(shared),
        )

    def _noise(self, unit: int, count: int, part: range, start: int) -> kernels.Noise | None:
        """Returns the noise that rounds states from element `start` of `part` on; None if all are fp32.

        Elements are numbered in the whole unit, and updates are counted for each parameter and committed. So neither
        ranks nor tiles nor a resume change a bit.
        """
        if self._noise_seed is None:
            return None
        return kernels.Noise(kernels.noise_stream(self._noise_seed, unit, count), part.start + start)
