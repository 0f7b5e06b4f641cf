"""The layout of a whole model, from the layouts of its parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.errors import StoreError
from offload.layout.flat_layout import Segment, UnitLayout, arrange
from offload.layout.modes import Mode


@dataclass(frozen=True, kw_only=True)
class PartLayout:
    """What one part has: the layers of some stages, and one shard of each parameter that is divided."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    about: Mapping[str, Any]
    """Made by `CheckpointPlace.described`."""
    position: int
    """Position in the pipeline; 0 without one."""
    coordinate: int
    """Which shards; 0 without tensor parallelism."""
    in_pipeline: bool

    @classmethod
    def of(
        cls, description: Mapping[str, Any], about: Mapping[str, Any], layouts: tuple[UnitLayout, ...], mode: Mode
    ) -> PartLayout:
        """Returns the part that is described.

        Args:
            description: Made by `CheckpointPlace.described`.
            about: Made there too.
            layouts: The units that it describes.
            mode: Its mode.
        """
        return cls(
            layouts=layouts,
            mode=mode,
            about=about,
            position=description.get("pipeline", {}).get("position", 0),
            coordinate=description.get("tensor_parallel", {}).get("coordinate", 0),
            in_pipeline="pipeline" in description,
        )


class PieceOf(NamedTuple):
    """Where a part has its piece of a parameter."""

    part: int
    unit: int
    segment: Segment


class WholeParameter(NamedTuple):
    """A parameter of the whole model."""

    segment: Segment
    dim: int | None
    """The dimension along which the pieces are cut; None for one piece that is all."""
    pieces: tuple[PieceOf, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row of each piece; see `strips`."""
        shapes = [piece.segment.shape[self.dim or 0 :] for piece in self.pieces]
        return tuple(math.prod(shape) for shape in shapes)


class WholeModel(NamedTuple):
    """A whole model, put together of parts."""

    layouts: tuple[UnitLayout, ...]
    parameters: tuple[tuple[WholeParameter, ...], ...]
    """Those of each unit, in the order of its segments."""
    about: Mapping[str, Any]
    names: Mapping[tuple[int, str], str]
    """The whole model's name of each parameter and buffer, by position and own name; without those left out."""


def whole_model(parts: Sequence[PartLayout], buffers: Sequence[Sequence[str]]) -> WholeModel:
    """Puts parts together.

    Names of a pipeline begin with the number of the stage. They are left without it if no two are the same then.

    Args:
        parts: All parts.
        buffers: For each part the names of its buffers.

    Raises:
        StoreError: If it is not known how parameters are divided, or parts are stored as blocks.
    """
    first = [number for number, part in enumerate(parts) if part.coordinate == 0]
    names = _names([(parts[number], buffers[number]) for number in first])
    layouts, parameters = [], []
    for number in sorted(first, key=lambda each: parts[each].position):
        part = parts[number]
        row = [each for each, other in enumerate(parts) if other.position == part.position]
        row.sort(key=lambda each: parts[each].coordinate)
        for layout in part.layouts:
            found = [
                _parameter(names[part.position, segment.name], segment, row, parts)
                for segment in layout.segments
                if (part.position, segment.name) in names
            ]
            if not found:
                continue
            whole = arrange(layout.name, [each.segment for each in found], 1)
            by_name = {each.segment.name: each for each in found}
            layouts.append(whole)
            parameters.append(tuple(by_name[each.name]._replace(segment=each) for each in whole.segments))
    return WholeModel(tuple(layouts), tuple(parameters), _about([parts[number] for number in first], names), names)


def _names(parts: Sequence[tuple[PartLayout, Sequence[str]]]) -> dict[tuple[int, str], str]:
    """Returns the whole model's names; see `WholeModel.names`."""
    own = [
        (part.position, name, name in part.about["elsewhere"])
        for part, buffers in parts
        for name in [*(each.name for layout in part.layouts for each in layout.segments), *buffers]
    ]
    if not any(part.in_pipeline for part, _ in parts):
        return {(position, name): name for position, name, _ in own}
    short = [(position, name, tied, name.partition(".")[2]) for position, name, tied in own]
    others = {each for *_, tied, each in short if not tied}
    counted = [each for *_, tied, each in short if not (tied and each in others)]
    # A copy of a tied layer has the name of the first; all other names must tell layers apart.
    if len(set(counted)) == len(counted):
        return {(p, name): each for p, name, tied, each in short if not (tied and each in others)}
    return {(position, name): name for position, name, _ in own}


def _parameter(name: str, segment: Segment, row: Sequence[int], parts: Sequence[PartLayout]) -> WholeParameter:
    """Returns a parameter of the whole model.

    Args:
        name: Its name there.
        segment: Its segment in the first part of the row.
        row: The parts that have the same layers, by their coordinates.
        parts: All parts.
    """
    about = parts[row[0]].about
    if segment.form or segment.inner:
        raise StoreError(
            f"{segment.name} is stored as {segment.form or segment.kind}, and parts of such weights are not put "
            "together: save engine.module.state_dict() of each process"
        )
    divided = segment.parameter in about["divided"]
    dim = about["divided"].get(segment.parameter)
    if divided and dim is None:
        raise StoreError(
            f"{segment.name} is a shard of Megatron's, which does not say how the whole is divided: load the "
            "checkpoint into a run of the same size, and save engine.module.state_dict() for Megatron's own tools"
        )
    pieces = tuple(_piece(number, segment.name, parts[number]) for number in (row if divided else row[:1]))
    shape = list(segment.shape)
    if dim is not None:
        shape[dim] = sum(piece.segment.shape[dim] for piece in pieces)
    stack = segment.stack and name.rpartition("[")[0]
    whole = Segment(name, tuple(shape), 0, math.prod(shape), segment.trainable, stack=stack, row=segment.row)
    return WholeParameter(whole, dim, pieces)


def _piece(number: int, name: str, part: PartLayout) -> PieceOf:
    """Returns where a part has a parameter."""
    return next(
        PieceOf(number, unit, segment)
        for unit, layout in enumerate(part.layouts)
        for segment in layout.segments
        if segment.name == name
    )


def _about(first: Sequence[PartLayout], names: Mapping[tuple[int, str], str]) -> dict[str, Any]:
    """Returns what is said about the whole model, whose tied names are those of all stages."""
    tied: dict[str, str] = {}
    loader_ties: list[str] = []
    for part in first:
        for alias, name in part.about["tied"].items():
            if (whole := names.get((part.position, name))) is not None:
                # Under the stage's number if the other names are.
                wholly = alias if whole == name else alias.partition(".")[2]
                tied[wholly] = whole
                if alias in part.about.get("loader_ties", ()):
                    loader_ties.append(wholly)
    changed = {"tied": tied, "loader_ties": loader_ties}
    left_out = ("divided", "elsewhere", *changed)
    return {**{key: value for key, value in first[0].about.items() if key not in left_out}, **changed}
