"""Reads the parts of a checkpoint, or of an engine's processes, as one `Source` of the whole model's weights."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.aio.protocols import Pending, Queue
from offload.checkpoint.directory import check_parts, described_part
from offload.checkpoint.files import read_manifest, states_file
from offload.checkpoint.load import SavedStates, StateReader, compare_bytes, look
from offload.checkpoint.resharding import Run, SavedElement
from offload.distributed.process_group import Ranks
from offload.engine.components import EngineComponents
from offload.engine.snapshot import persistent_buffers
from offload.errors import IoError, StoreError
from offload.fileio.safetensors_stream import TensorLocation
from offload.layout.fingerprint import about, describe, described_layouts, described_mode
from offload.layout.flat_layout import ParameterSegment, UnitLayout, arrange
from offload.layout.modes import Mode
from offload.layout.optimizer_states import KEPT
from offload.model_io.source import Source
from offload.states import State

# -- layout --------------------------------------------------------------------------------------------
#
# The layout of a whole model, from the layouts of its parts. Pure.


@dataclass(frozen=True, kw_only=True)
class PartLayout:
    """The layout of one part: the layers of some stages, and one shard of each divided parameter."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    about: Mapping[str, Any]
    """Made by `described_part`."""
    position: int
    """Position in the pipeline; 0 without a pipeline."""
    coordinate: int
    """Number of the part's shards in tensor parallelism; 0 without it."""
    in_pipeline: bool

    @classmethod
    def of(
        cls, description: Mapping[str, Any], about: Mapping[str, Any], layouts: tuple[UnitLayout, ...], mode: Mode
    ) -> PartLayout:
        return cls(
            layouts=layouts,
            mode=mode,
            about=about,
            position=description.get("pipeline", {}).get("position", 0),
            coordinate=description.get("tensor_parallel", {}).get("coordinate", 0),
            in_pipeline="pipeline" in description,
        )


class PieceOf(NamedTuple):
    """The place of one piece of a parameter in a part of the model."""

    part: int
    unit: int
    segment: ParameterSegment


class WholeParameter(NamedTuple):
    """A parameter of the whole model."""

    segment: ParameterSegment
    dim: int | None
    """The dimension along which the parameter is cut into pieces; None if it is in one piece."""
    pieces: tuple[PieceOf, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        shapes = [piece.segment.shape[self.dim or 0 :] for piece in self.pieces]
        return tuple(math.prod(shape) for shape in shapes)


def joined_units(
    parts: Sequence[PartLayout], names: Mapping[tuple[int, str], str]
) -> list[tuple[UnitLayout, tuple[WholeParameter, ...]]]:
    """Returns the units of the whole model, each with its parameters in the order of its segments.

    `names` are the whole model's names, as `whole_names` returns them.
    """
    first = [number for number, part in enumerate(parts) if part.coordinate == 0]
    units = []
    for number in sorted(first, key=lambda index: parts[index].position):
        part = parts[number]
        row = [index for index, candidate in enumerate(parts) if candidate.position == part.position]
        row.sort(key=lambda index: parts[index].coordinate)
        for layout in part.layouts:
            placed = [
                _parameter(names[part.position, segment.name], segment, row, parts)
                for segment in layout.segments
                if (part.position, segment.name) in names
            ]
            if not placed:
                continue
            whole = arrange(layout.name, [parameter.segment for parameter in placed], 1)
            by_name = {parameter.segment.name: parameter for parameter in placed}
            parameters = tuple(by_name[segment.name]._replace(segment=segment) for segment in whole.segments)
            units.append((whole, parameters))
    return units


def whole_names(parts: Sequence[tuple[PartLayout, Sequence[str]]]) -> dict[tuple[int, str], str]:
    """Returns the whole model's name of each parameter and buffer that is kept, by position and name in the part.

    Names of a pipeline begin with the number of the stage. The number is dropped if all names stay different without
    it.
    """
    own = [
        (part.position, name, name in part.about["elsewhere"])
        for part, buffers in parts
        for name in [*(segment.name for layout in part.layouts for segment in layout.segments), *buffers]
    ]
    if not any(part.in_pipeline for part, _ in parts):
        return {(position, name): name for position, name, _ in own}
    short = [(position, name, tied, name.partition(".")[2]) for position, name, tied in own]
    untied = {short_name for *_, tied, short_name in short if not tied}
    counted = [short_name for *_, tied, short_name in short if not (tied and short_name in untied)]
    # A copy of a tied layer gets the name of the first layer. All other names must differ between layers.
    if len(set(counted)) == len(counted):
        return {(p, name): short_name for p, name, tied, short_name in short if not (tied and short_name in untied)}
    return {(position, name): name for position, name, _ in own}


def _parameter(name: str, segment: ParameterSegment, row: Sequence[int], parts: Sequence[PartLayout]) -> WholeParameter:
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
    pieces = tuple(
        PieceOf(number, unit, own)
        for number in (row if divided else row[:1])
        for unit, layout in enumerate(parts[number].layouts)
        for own in layout.segments
        if own.name == segment.name
    )
    shape = list(segment.shape)
    if dim is not None:
        shape[dim] = sum(piece.segment.shape[dim] for piece in pieces)
    stack = segment.stack and name.rpartition("[")[0]
    whole = ParameterSegment(name, tuple(shape), 0, math.prod(shape), segment.trainable, stack=stack, row=segment.row)
    return WholeParameter(whole, dim, pieces)


def _about(first: Sequence[PartLayout], names: Mapping[tuple[int, str], str]) -> dict[str, Any]:
    """Returns `about` of the whole model, with the tied names of all stages."""
    tied: dict[str, str] = {}
    loader_ties: list[str] = []
    for part in first:
        for alias, name in part.about["tied"].items():
            if (whole := names.get((part.position, name))) is not None:
                # With the stage's number if the other names have it.
                wholly = alias if whole == name else alias.partition(".")[2]
                tied[wholly] = whole
                if alias in part.about.get("loader_ties", ()):
                    loader_ties.append(wholly)
    changed = {"tied": tied, "loader_ties": loader_ties}
    left_out = ("divided", "elsewhere", *changed)
    return {**{key: value for key, value in first[0].about.items() if key not in left_out}, **changed}


# -- strips --------------------------------------------------------------------------------------------
# Pure arithmetic for a tensor that is cut along one dimension: finds the elements of the whole in the pieces.
#
# whole (4, 6), cut along 1       a row of the whole has a part of each piece's row; neighbouring rows are read at once
# a a a a | b b
# a a a a | b b                   elements 8 to 20: the end of row 1, row 2, the begin of row 3
# a a a a | b b
# a a a a | b b


class Strip(NamedTuple):
    """Elements [start, stop) of one piece. They are the same columns in each of `rows` rows of the whole."""

    piece: int
    start: int
    stop: int
    at: int
    """Position of the first element in the requested range of the whole."""
    rows: int


def strips(widths: Sequence[int], start: int, stop: int) -> Iterator[Strip]:
    """Yields the strips that make up elements [start, stop) of the whole.

    Args:
        widths: The number of elements in a row of each piece: the product of the piece's sizes from the cut dimension
            on. The sum of all widths is a row of the whole.
    """
    borders, at = [0, *itertools.accumulate(widths)], start
    row = borders[-1]
    while at < stop:
        number, within = divmod(at, row)
        whole_rows = 0 if within else (stop - at) // row
        # Each piece is read once for all complete rows. An incomplete row at either end needs a further read.
        columns = range(row) if whole_rows else range(within, min(row, within + stop - at))
        rows = whole_rows or 1
        for piece, (left, right) in enumerate(itertools.pairwise(borders)):
            first, last = max(left, columns.start), min(right, columns.stop)
            if first < last:
                width = right - left
                begin = number * width + first - left
                end = begin + (rows - 1) * width + last - first
                yield Strip(piece, begin, end, at - start + first - columns.start, rows)
        at += rows * len(columns)


# -- source --------------------------------------------------------------------------------------------


class OpenPart(NamedTuple):
    """One part of a model, open for reads."""

    layout: PartLayout
    states: StateReader
    buffers: Mapping[str, torch.Tensor]
    frozen: bool


class WholeSource:
    """The parts of a model as one source of weights; implements `offload.model_io.source.Source`."""

    def __init__(self, parts: Sequence[OpenPart], step: int, close: Callable[[], None] = lambda: None) -> None:
        # Raises `StoreError` if the parts cannot be put together.
        self._parts, self._close = parts, close
        first = [(part.layout, list(part.buffers)) for part in parts if part.layout.coordinate == 0]
        names = whole_names(first)
        units = joined_units([part.layout for part in parts], names)
        modes = {part.layout.mode.name: part.layout.mode for part in parts}
        if len(modes) > 1:
            raise StoreError(f"the parts are in different modes, {', '.join(modes)}: give parts of one run")
        (self._mode,) = modes.values()
        self._parameters = [parameters for _, parameters in units]
        # Described as one rank, without padding between ranks: `read` finds bytes by element numbers alone.
        self.description: Mapping[str, Any] = describe([layout for layout, _ in units], self._mode, 1)
        self.about: Mapping[str, Any] = _about([layout for layout, _ in first], names)
        self.step = step
        self.client_state: Mapping[str, Any] = {}
        """Always empty, because each part has a state of its own, and none describes the whole model."""
        self.frozen = all(part.frozen for part in parts)
        self.buffers: Mapping[str, torch.Tensor] = {
            names[part.layout.position, name]: value
            for part in parts
            if part.layout.coordinate == 0
            for name, value in part.buffers.items()
        }

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> _Joined:
        assert rank == 0
        size = self._mode.states[state].itemsize
        joined, first, last = _Joined(len(buffer)), start // size, (start + len(buffer)) // size
        # Padding between parameters is not read: these bytes of the buffer are never used.
        for parameter in self._parameters[unit]:
            segment = parameter.segment
            begin, end = max(first, segment.start), min(last, segment.stop)
            if begin >= end:
                continue
            out, widths = buffer[(begin - first) * size : (end - first) * size], parameter.widths
            for strip in strips(widths, begin - segment.start, end - segment.start):
                piece = parameter.pieces[strip.piece]
                nbytes = (strip.stop - strip.start) * size
                if strip.rows == 1:
                    memory = out[strip.at * size : strip.at * size + nbytes]
                else:
                    # One long read in place of a read for each row. The rows are copied to their places afterwards.
                    memory = aligned_empty(nbytes)
                    joined.copies.append((memory, out[strip.at * size :], strip.rows, sum(widths) * size))
                source = SavedElement(piece.unit, piece.segment.start + strip.start, piece.segment.trainable)
                run = Run(0, strip.stop - strip.start, source)
                joined.reads += self._parts[piece.part].states.read(run, state, memory, 0)
        return joined

    def close(self) -> None:
        self._close()


class _Joined:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.reads: list[Pending] = []
        self.copies: list[tuple[memoryview, memoryview, int, int]] = []
        """Rows that were read one after the other, their destination, their number, and the bytes between two rows."""

    def done(self) -> bool:
        return all(read.done() for read in self.reads)

    def wait(self) -> int:
        # In the order in which the reads began: with an engine each wait is a collective.
        for read in self.reads:
            read.wait()
        for memory, out, rows, step in self.copies:
            width = len(memory) // rows
            whole = torch.frombuffer(out, dtype=torch.uint8)
            whole.as_strided((rows, width), (step, 1)).copy_(
                torch.frombuffer(memory, dtype=torch.uint8).view(rows, width)
            )
        return self._nbytes


# -- of checkpoint -------------------------------------------------------------------------------------
#
# These functions read a checkpoint of a grid of processes as the weights of a whole model.


def whole_of_checkpoint(checkpoint: Path, queue: Queue) -> WholeSource:
    """Opens all parts of a checkpoint, after their weights have been compared with the checksums.

    Weights are read twice, since pieces of a parameter are not read in the order of the checksums.
    """
    manifest = read_manifest(checkpoint)
    check_parts(checkpoint, manifest)
    # Rank 0's progress is read, since it has the buffers, which are equal on all ranks of a part.
    checkpoints = [look(checkpoint / part, 0, 0, {}) for part in manifest.parts]
    for checkpoint_part in checkpoints:
        places = checkpoint_part.places
        # Moments are not read, so damaged moments do not prevent a read of the weights.
        work = [
            (rank, name)
            for rank, tensors in enumerate(places)
            for name in tensors
            if State(name.partition(".")[2]) in KEPT
        ]

        def damaged(path: Path, name: str, places: Sequence[Mapping[str, TensorLocation]] = places) -> None:
            tensor = next(tensors[name] for rank, tensors in enumerate(places) if states_file(rank) == path.name)
            raise IoError(str(path), tensor.offset, tensor.tensor.nbytes, errno.EBADMSG, f"use {name},")

        compare_bytes(checkpoint_part, work, queue, damaged)
    # Files that are open already are closed if a later part cannot be opened, or the parts do not fit.
    with contextlib.ExitStack() as opened:
        parts = []
        for checkpoint_part in checkpoints:
            states = opened.enter_context(contextlib.closing(checkpoint_part.open(queue)))
            layout = PartLayout.of(
                checkpoint_part.manifest.layout,
                checkpoint_part.manifest.about,
                checkpoint_part.layouts,
                checkpoint_part.mode,
            )
            parts.append(OpenPart(layout, states, checkpoint_part.progress.buffers, checkpoint_part.manifest.frozen))
        return WholeSource(parts, manifest.step, opened.pop_all().close)


# -- of engine -----------------------------------------------------------------------------------------
# Between steps, the weights of a grid of processes are read as those of one model. All processes read the same bytes.


class _Partitions:
    """The partitions of one part, each read and sent by its own process; implements `PartitionReader`."""

    def __init__(self, own: Source, processes: Sequence[int]) -> None:
        self._own, self._processes = own, processes

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        return self._own.read(self._processes[rank], unit, state, start, buffer)

    def close(self) -> None:
        """Does nothing: no file is open."""


def whole_of_engine(module: nn.Module, components: EngineComponents, own: Source) -> WholeSource:
    """Returns the weights of all processes as one model. Collective of all processes.

    Args:
        own: Reads the partition of a process, by its rank among all, and sends it to all others.

    Raises:
        StoreError: On all processes, if the parts cannot be put together.
    """
    world = components.world
    described: dict[str, Any] = {"part": world.part}
    # One process of a column describes it: the description names each parameter, and would be sent once for each rank.
    if world.ranks.rank == 0:
        whole = describe(components.layouts, components.shards.mode, world.ranks.mesh.shards)
        described["layout"], described["about"] = described_part(world, whole, about(module))
        described["buffers"] = {
            name: [str(value.dtype).removeprefix("torch."), list(value.shape)]
            for name, value in persistent_buffers(module).items()
        }
    rows = world.everyone.share(described, "describe the model")
    parts = []
    # All processes go through the parts in the same order, since buffers are sent in between.
    for name in world.parts:
        processes = [number for number, row in enumerate(rows) if row["part"] == name]
        first = rows[processes[0]]
        description = first["layout"]
        layouts, mode = described_layouts(description, part=True), described_mode(description)
        layout = PartLayout.of(description, first["about"], layouts, mode)
        # Processes of a column are in the order of their ranks; processes of other replicas follow, and read nothing.
        shards = int(description["world_size"])
        states = SavedStates(layouts, mode, shards, _Partitions(own, processes[:shards]))
        parts.append(OpenPart(layout, states, _buffers(module, world.everyone, processes[0], first["buffers"]), True))
    return WholeSource(parts, own.step)


def _buffers(
    module: nn.Module, everyone: Ranks, source: int, described: Mapping[str, Sequence[Any]]
) -> dict[str, torch.Tensor]:
    """Returns the buffers of process `source`, on each process. Collective."""
    own = persistent_buffers(module) if everyone.rank == source else {}
    values = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        for name, (dtype, shape) in described.items()
    }
    for name, value in values.items():
        if name in own:
            value.copy_(own[name].detach())
        everyone.broadcast(value, source)
    return values
