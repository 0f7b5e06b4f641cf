"""Masters and moments of a run in the form of other programs: a file for each parameter and state.

States are streamed unit by unit, so memory does not depend on the model. A parameter of a unit that several ranks share
comes from one rank after the other, and experts that are units of their own are rows of one file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from offload.aio import aligned_empty
from offload.aio.protocols import Pending
from offload.checkpoint.foreign_contents import MASTER
from offload.engine.snapshot import Snapshot
from offload.errors import StoreError
from offload.fileio.buffered_copy import flow, parts_of
from offload.fileio.safetensors_stream import Tensor
from offload.fileio.torch_file import TorchFileWriter
from offload.layout.fingerprint import described_layouts, described_mode
from offload.layout.flat_layout import ParameterSegment, UnitLayout
from offload.layout.modes import ADAM, Mode
from offload.layout.optimizer_states import join, master_sources
from offload.model_io.source import Source
from offload.notices import shell_command
from offload.runs.export import Exported
from offload.sizes import KIB
from offload.states import State

_CHUNK_NUMEL, _READS = 1 << 20, 8
_FILE_NBYTES = 8 * KIB
"""Most bytes of a file without its tensor."""


class TrainedSource(Source, Protocol):
    """Protocol of a source of weights and of all that a run needs to resume."""

    progress: Snapshot
    client_state: Any
    """The user's own state, as `to_plain` gives it."""


class StatesPlan(NamedTuple):
    """Contents of the export, decided before any file is made."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter."""
    trainable: Mapping[str, int]
    """Number of updates of each parameter that trains."""

    def mode_of(self, unit: int) -> Mode:
        """Returns the mode of a unit, whose weights may stay in fp32."""
        return self.layouts[unit].mode_in(self.mode)

    def parts(self, unit: int) -> dict[str, tuple[State, ...]]:
        """Returns the states of a unit from which each kind of file is made, by the kind's name."""
        moments = {state.value: (state,) for state in self.mode.moments}
        return {MASTER: master_sources(self.mode_of(unit).weights), **moments}

    @property
    def nbytes(self) -> int:
        """Bytes of all files, at most."""
        kinds = 1 + len(self.mode.moments)
        files = {name: kinds if name in self.trainable else 1 for name in self.shapes}
        return sum(
            count * (math.prod(self.shapes[name]) * torch.float32.itemsize + _FILE_NBYTES)
            for name, count in files.items()
        )

    def exported(self, out: Path, step: int, files: Sequence[str], notices: Iterable[str]) -> Exported:
        """Returns the result of the export into `out`."""
        parameters = sum(map(math.prod, self.shapes.values()))
        return Exported(out, step, "fp32", tuple(files), self.nbytes, parameters, tuple(notices))


def plan_states(source: TrainedSource, path: Path, kind: str) -> StatesPlan:
    """Returns the plan of an export."""
    mode = described_mode(source.description)
    layouts = described_layouts(source.description)
    # Only Adam's moments have files: DeepSpeed reads no others.
    if mode.optimizer != ADAM or mode.in_blocks:
        raise StoreError(
            f"{path} is in mode {mode.name}; {kind} has the moments of AdamW in fp32: convert moments "
            f"in 8 bits first (`{shell_command('convert', path, '--moments', 'fp32')}`), or export weights alone, "
            "without --format"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    trainable: dict[str, int] = {}
    for layout, steps in zip(layouts, source.progress.facts["parameter_steps"], strict=True):
        for segment, count in zip(layout.segments, steps, strict=True):
            if segment.form or segment.inner:
                raise StoreError(
                    f"{path} has {segment.parameter} in {segment.form or segment.kind}, for which {kind} "
                    "has no form: export its weights, without --format"
                )
            if segment.trainable or source.frozen:
                # Joined: each row of stacked experts and each piece of a table is a segment of its own.
                shapes[segment.parameter] = segment.joined_to(shapes.get(segment.parameter))
            if segment.trainable:
                trainable[segment.parameter] = max(count, trainable.get(segment.parameter, 0))
    return StatesPlan(layouts, mode, int(source.description["world_size"]), shapes, trainable)


class _StateChunk(NamedTuple):
    """Elements of a partition that are read together."""

    rank: int
    unit: int
    name: str
    """Kind of file."""
    states: tuple[State, ...]
    start: int
    """First element, in the unit's layout."""
    position: int
    """First element, in the rank's partition."""
    numel: int


StateFile = Callable[[str, str, Tensor], tuple[Path, Any]]
"""Returns path and content of a file, for a parameter's name, a kind of states and a `Tensor`.

The content has the `Tensor` in the place of the values.
"""


def write_states(source: Source, plan: StatesPlan, place: StateFile, progress: Callable[[int], None]) -> None:
    """Writes masters and moments, chunk by chunk, each file from its first element to its last.

    The source stays open.
    """
    files = _StateFiles(place, plan.shapes)

    def begin(chunk: _StateChunk, buffer: memoryview) -> Iterator[Pending]:
        for state, memory in _regions(plan, chunk, buffer).items():
            start = chunk.position * plan.mode_of(chunk.unit).states[state].itemsize
            yield source.read(chunk.rank, chunk.unit, state, start, memory)

    def end(chunk: _StateChunk, buffer: memoryview) -> tuple[()]:
        regions = _regions(plan, chunk, buffer)
        dtypes = plan.mode_of(chunk.unit).states
        states = {state: torch.frombuffer(region, dtype=dtypes[state]) for state, region in regions.items()}
        values = join(states) if State.WEIGHT in states or State.MASTER in states else next(iter(states.values()))
        for segment in plan.layouts[chunk.unit].segments:
            start, stop = max(chunk.start, segment.start), min(chunk.start + chunk.numel, segment.stop)
            if start < stop:
                files.put(segment, chunk.name, values[start - chunk.start : stop - chunk.start].float())
                progress((stop - start) * torch.float32.itemsize)
        return ()

    room = _CHUNK_NUMEL * sum(plan.mode.states[state].itemsize for state in master_sources(plan.mode.weights))
    buffers = [aligned_empty(max(room, _CHUNK_NUMEL * torch.float32.itemsize)) for _ in range(_READS)]
    try:
        flow(buffers, _chunks(plan, source.frozen), begin, end, lambda *_: None)
    finally:
        files.close()


def _chunks(plan: StatesPlan, frozen: bool) -> Iterator[_StateChunk]:
    """Yields the chunks of all units: kind after kind, and of each the ranks' partitions in order.

    Frozen weights have no other states.
    """
    size = plan.world_size
    for unit, layout in enumerate(plan.layouts):
        trainable = [layout.trainable(rank, size) for rank in range(size)]
        for name, states in plan.parts(unit).items():
            # Rank after rank before the next kind: a parameter's file then grows from its first element to its last.
            yield from _cut(unit, name, states, trainable, [0] * size)
        rest = [layout.frozen(rank, size) for rank in range(size)] if frozen else []
        yield from _cut(unit, MASTER, (State.WEIGHT,), rest, [len(part) for part in trainable])


def _cut(
    unit: int, name: str, states: tuple[State, ...], shares: Sequence[range], positions: Sequence[int]
) -> Iterator[_StateChunk]:
    """Yields chunks of the ranks' shares. `positions` are the shares' first elements in the ranks' partitions."""
    for rank, (share, position) in enumerate(zip(shares, positions, strict=False)):
        for start in range(0, len(share), _CHUNK_NUMEL):
            numel = min(_CHUNK_NUMEL, len(share) - start)
            yield _StateChunk(rank, unit, name, states, share.start + start, position + start, numel)


def _regions(plan: StatesPlan, chunk: _StateChunk, buffer: memoryview) -> dict[State, memoryview]:
    dtypes = plan.mode_of(chunk.unit).states
    return parts_of(buffer, [(state, chunk.numel * dtypes[state].itemsize) for state in chunk.states])


class _StateFiles:
    """Files of states, each open from its parameter's first element to its last."""

    def __init__(self, place: StateFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._place, self._shapes = place, shapes
        self._open: dict[tuple[str, str], tuple[TorchFileWriter, int]] = {}

    def put(self, segment: ParameterSegment, name: str, values: torch.Tensor) -> None:
        """Writes the next elements of a parameter's state, (n,) fp32."""
        key, shape = (segment.parameter, name), self._shapes[segment.parameter]
        if key not in self._open:
            writer = TorchFileWriter(*self._place(*key, Tensor(torch.float32, shape)))
            writer.begin()
            self._open[key] = (writer, 0)
        # Elements come in order: units, ranks, rows of experts and pieces all ascend.
        writer, done = self._open.pop(key)
        flat: Any = values.contiguous().view(torch.uint8).numpy()
        writer.write(memoryview(flat))
        done += len(values)
        if done == math.prod(shape):
            writer.close()
        else:
            self._open[key] = (writer, done)

    def close(self) -> None:
        """Closes the files that an error has left open."""
        # Files are open here only after an error: a complete file was closed by `put`.
        for writer, _ in self._open.values():
            writer.close()
        self._open.clear()
