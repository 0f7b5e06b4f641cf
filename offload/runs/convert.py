"""Implementation of `offload convert`: writes a run again, as a new run whose moments or masters have another form.

    last commit of the run ─► state by state, a few buffers at a time ─► files of the new run ─► its first commit

The run itself is only read. A kill leaves it as it is, beside a new run without a commit, which the next conversion
replaces. Counters, schedules, generators and buffers are copied, so the new run resumes at the same step.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.aio.protocols import Future, Pending, Queue
from offload.checkpoint.load import SavedMoments, SavedStates
from offload.errors import StoreError
from offload.fileio import real_path
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers, parts_of
from offload.layout import optimizer_states
from offload.layout.fingerprint import described_layouts, described_mode, store_specs
from offload.layout.flat_layout import ParameterSegment, UnitLayout, placed_for, segment_shards
from offload.layout.modes import Mode, make_mode, moments_name
from offload.layout.optimizer_states import join, split
from offload.model_io.source import StoreSource
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store.format import StoreSpec

# -- converted states ----------------------------------------------------------------------------------
#
# Reads one rank's states of a run and writes them in another form, chunk by chunk.
#
# The conversion may move a parameter within its unit. With moments in 8 bits each parameter begins at a block, and
# states of one byte an element make partitions longer. So each chunk of a new partition is gathered from the parameters
# that it contains.


class Side(NamedTuple):
    """Layouts and mode of a run, before its conversion or after it."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int

    def mode_of(self, unit: int) -> Mode:
        """Returns the mode of a unit, whose weights may stay in fp32."""
        return self.layouts[unit].mode_in(self.mode)


class _ConvertedChunk(NamedTuple):
    """A range of elements of a new partition: of one copied state, of all states of the masters, or of the moments."""

    unit: int
    states: tuple[State, ...]
    """States that are written."""
    sources: tuple[State, ...]
    """States of the former run that are converted to `states`; none if states are copied."""
    start: int
    """First element, counted in the rank's partition."""
    first: int
    """First element, counted in the unit."""
    numel: int


class _Run(NamedTuple):
    at: int
    """First element, counted in the chunk."""
    numel: int
    segment: ParameterSegment
    """The parameter before the conversion."""
    position: int
    """First element, counted in the parameter."""


class StateConverter:
    """Conversion of one rank's states."""

    def __init__(
        self, source: StoreSource, before: Side, after: Side, rank: int, store: Store, progress: Callable[[int], None]
    ) -> None:
        self._source, self._before, self._after = source, before, after
        self._rank, self._store, self._progress = rank, store, progress
        self._written: list[dict[State, list[tuple[int, Future]]]] = [{} for _ in after.layouts]
        self._saved = SavedStates(*before, source)

    def run(self) -> None:
        """Writes all states to the first slot, which then is the newest of each unit."""

        def ended(chunk: _ConvertedChunk, writes: Sequence[Future]) -> None:
            self._progress(sum(self._nbytes(chunk.unit, state, chunk.numel) for state in chunk.states))

        flow(flow_buffers(), self._chunks(), self._begin, self._end, ended)
        for unit, writes in enumerate(self._written):
            self._store.wrote(unit, 0, writes)

    def _chunks(self) -> Iterator[_ConvertedChunk]:
        layouts, _, size = self._after
        for unit, layout in enumerate(layouts):
            mode, before = self._after.mode_of(unit), self._before.mode_of(unit)
            trainable, frozen = layout.trainable(self._rank, size), layout.frozen(self._rank, size)
            if mode.weights == before.weights:
                for state in mode.weights:
                    yield from self._cut(unit, (state,), (), 0, trainable)
            else:
                yield from self._cut(unit, tuple(mode.weights), tuple(before.weights), 0, trainable)
            if not layout.in_files:
                yield from self._cut(unit, (State.WEIGHT,), (), len(trainable), frozen)
            # Matrices, which come last, may lack some moments.
            rest = len(layout.rest(self._rank, size))
            of_matrices = tuple(state for state in mode.optimizer_states if state not in mode.partial)
            for states, start, share in (
                (mode.optimizer_states, 0, trainable[:rest]),
                (of_matrices, rest, trainable[rest:]),
            ):
                moments = tuple(state for state in states if state in mode.moments)
                yield from self._cut(unit, states, moments, start, share)

    def _cut(
        self, unit: int, states: tuple[State, ...], sources: tuple[State, ...], start: int, share: range
    ) -> Iterator[_ConvertedChunk]:
        """Yields the chunks of a unit's share, which begins at `start` of the partition. Both forms share a buffer."""
        if not states:
            return
        mode = self._after.mode
        before = self._before.mode_of(unit)
        step = mode.tile_step if State.SCALES in states else mode.page_step
        nbytes = sum(self._nbytes(unit, state, step) for state in states)
        nbytes += step * sum(before.states[state].itemsize for state in sources)
        numel = BUFFER_NBYTES // nbytes * step
        for first in range(0, len(share), numel):
            last = min(first + numel, len(share))
            yield _ConvertedChunk(unit, states, sources, start + first, share.start + first, last - first)

    def _begin(self, chunk: _ConvertedChunk, buffer: memoryview) -> Sequence[Pending]:
        """Begins to read the elements of a chunk. Padding is zero."""
        new, old = self._regions(chunk, buffer)
        torch.frombuffer(buffer, dtype=torch.uint8).zero_()
        reads: list[Pending] = []
        layout, size = self._before.layouts[chunk.unit], self._before.world_size
        for run in self._runs(chunk):
            for state, memory in (old or new).items():
                itemsize = self._before.mode_of(chunk.unit).states[state].itemsize
                stop = run.position + run.numel
                for shard in segment_shards(layout, size, run.segment, run.position, stop):
                    first = (run.at + shard.position - run.position) * itemsize
                    part = memory[first : first + shard.numel * itemsize]
                    reads.append(self._source.read(shard.rank, chunk.unit, state, shard.start * itemsize, part))
        return reads

    def _end(self, chunk: _ConvertedChunk, buffer: memoryview) -> Sequence[Future]:
        new, old = self._regions(chunk, buffer)
        mode, before = self._after.mode_of(chunk.unit), self._before.mode_of(chunk.unit)
        if old:
            states = {state: torch.frombuffer(region, dtype=mode.states[state]) for state, region in new.items()}
            saved = {state: torch.frombuffer(region, dtype=before.states[state]) for state, region in old.items()}
            for run in self._runs(chunk):
                part = {state: values[run.at : run.at + run.numel] for state, values in saved.items()}
                if State.WEIGHT in states:
                    split(join(part), {state: values[run.at : run.at + run.numel] for state, values in states.items()})
                    continue
                scales = self._saved.scales(chunk.unit) if self._before.mode.in_blocks else None
                moments = SavedMoments(self._before.mode, part, scales, run.segment.start + run.position)
                for state in chunk.sources:  # a moment whose form stays is encoded to the same bits
                    optimizer_states.write(self._after.mode, states, state, run.at, moments.values(state))
        writes = []
        for state, memory in new.items():
            start = mode.part(state, chunk.start, chunk.start).start * mode.states[state].itemsize
            writes.append(self._store.write(chunk.unit, state, 0, start, memory))
            self._written[chunk.unit].setdefault(state, []).append((start, writes[-1]))
        return writes

    def _regions(
        self, chunk: _ConvertedChunk, buffer: memoryview
    ) -> tuple[dict[State, memoryview], dict[State, memoryview]]:
        dtypes = self._before.mode_of(chunk.unit).states
        new = [(state, self._nbytes(chunk.unit, state, chunk.numel)) for state in chunk.states]
        old = [(state, chunk.numel * dtypes[state].itemsize) for state in chunk.sources]
        behind = buffer[sum(nbytes for _, nbytes in new) :]
        return parts_of(buffer, new), parts_of(behind, old)

    def _nbytes(self, unit: int, state: State, numel: int) -> int:
        """Returns the bytes that `numel` elements of a new state take. The first element must begin a page."""
        mode = self._after.mode_of(unit)
        return len(mode.padded_part(state, 0, numel)) * mode.states[state].itemsize

    def _runs(self, chunk: _ConvertedChunk) -> Iterator[_Run]:
        """Yields the parameters of a chunk. Both layouts have a unit's parameters in one order."""
        old = self._before.layouts[chunk.unit].segments
        for before, after in zip(old, self._after.layouts[chunk.unit].segments, strict=True):
            first, last = max(after.start, chunk.first), min(after.stop, chunk.first + chunk.numel)
            if first < last:
                yield _Run(first - chunk.first, last - first, before, first - after.start)


# -- convert -------------------------------------------------------------------------------------------


class Converted(NamedTuple):
    """Result of a conversion."""

    run: Path
    """The new run, on its first drive."""
    step: int
    before: Mapping[str, str]
    after: Mapping[str, str]
    """Forms of the "master" and of the "moments"."""
    nbytes: int
    """Bytes of the new run's swap files, of all ranks."""


class Conversion(NamedTuple):
    """The plan of a run's conversion."""

    run: str
    """Name of the new run."""
    before: Side
    after: Side
    about: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]
    """The model's own files of each rank; see `StoreSpec.files`."""

    @property
    def specs(self) -> list[StoreSpec]:
        specs = store_specs(*self.after, self.about)
        return [spec._replace(files=files) for spec, files in zip(specs, self.files, strict=True)]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the new swap files, of all ranks."""
        return sum(spec.nbytes for spec in self.specs)


def plan(source: StoreSource, run: Path, forms: Mapping[str, str], name: str | None) -> Conversion:
    """Returns the conversion of a run.

    In `forms` the "master" is one of `MASTERS`, and the "moments" are one of `MOMENT_DTYPES`. Without `name`, the new
    name is the run's name followed by the forms.
    """
    old = described_mode(source.description)
    new = _mode_after(old, run, forms)
    layouts, size = described_layouts(source.description), int(source.description["world_size"])
    name = "-".join((real_path(run).name, *dict.fromkeys(forms.values()))) if name is None else name
    if name == real_path(run).name or "/" in name or not name.strip(". "):
        raise StoreError(f"the new run needs a name of its own, without a slash, got {name!r}; give --run")
    after = Side(placed_for(layouts, new, size), new, size)
    return Conversion(name, Side(layouts, old, size), after, source.about, source.files)


def _mode_after(old: Mode, run: Path, forms: Mapping[str, str]) -> Mode:
    """Returns the mode of the new run; arguments and errors are those of `plan`."""
    if State.PACKED in old.moments or old.rule.of_one_rank:
        raise StoreError(f"{run} is a run in mode {old.name}, whose optimizer has states in one form alone")
    if "moments" in forms and not old.moments:
        raise StoreError(f"{run} is a run in mode {old.name}, which has no moments to convert")
    if forms.get("moments") == "int8" and old.matrix_rule:
        raise StoreError(
            f"{run} is a run in mode {old.name}, and moments of matrices have no blocks of 8 bits; convert it to bf16"
        )
    if forms.get("master", "fp32") != "fp32" and State.MASTER_LOW_BITS not in old.weights:
        raise StoreError(
            f"{run} is a run in mode {old.name}, and only masters of bf16 weights can be {forms['master']}; leave "
            "--master out"
        )
    new = make_mode(old.precision, old.optimizer, **{**_forms_of(old), **forms})
    if new == old:
        listed = " and ".join(f"{what} in {form}" for what, form in forms.items())
        raise StoreError(f"{run} has {listed} already; resume the run as it is")
    return new


def _forms_of(mode: Mode) -> dict[str, str]:
    return {"master": mode.master, "moments": moments_name(mode.moment_dtype)}


def convert(
    source: StoreSource, made: Conversion, queue: Queue, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """Writes the new run and commits it. The run that is converted stays as it is.

    The source stays open, and the queue is the caller's. After an error nothing is left of the new run.
    """
    stores: list[Store] = []
    run_id = uuid.uuid4().hex
    with contextlib.ExitStack() as opened:
        try:
            for rank, spec in enumerate(made.specs):
                paths = [folder.parent.parent for folder in source.folders[rank]]
                store = Store(paths, made.run, rank, spec, queue)
                opened.callback(store.close)
                store.create(run_id=run_id)
                stores.append(store)
            for rank, store in enumerate(stores):
                StateConverter(source, made.before, made.after, rank, store, progress).run()
            # Last: until all ranks have a commit there is no run of the new name that could be resumed.
            for commit, store in zip(source.commits, stores, strict=True):
                store.commit(commit.record.step, commit.contents)
        except BaseException:
            for store in stores:
                store.remove()
            raise
        return Converted(
            run=stores[0].folders[0].parent,
            step=source.step,
            before=_forms_of(made.before.mode),
            after=_forms_of(made.after.mode),
            nbytes=made.nbytes,
        )
