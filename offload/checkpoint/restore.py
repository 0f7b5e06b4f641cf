"""Second pass of loading a checkpoint: fills this rank's partitions, chunk by chunk.

The elements of each chunk are found by the names of their parameters, so units and ranks may differ from the save.
Partitions that the store keeps are written to the slots that the last commit does not name, so a kill leaves this
commit intact. Frozen weights are the exception: they have no second slot, so frozen weights that differ are written in
place, over the bytes of this commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from offload.aio.protocols import Future, Pending, Queue
from offload.checkpoint.load import FoundStates, LoadOptions, SavedMoments, convert
from offload.checkpoint.resharding import Run, overlaps, packed_runs, runs, scale_runs
from offload.engine.shards import StoredShards
from offload.errors import StoreError
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers, parts_of
from offload.layout import optimizer_states
from offload.layout.flat_layout import WORD
from offload.layout.modes import Mode
from offload.states import State

_BY_THEMSELVES = ((State.PACKED,), (State.SCALES,))
"""States whose chunks are counted in their own values, not in elements of the parameters."""


class _RestoreChunk(NamedTuple):
    """Elements [start, stop) of a partition, of one state or of several that are converted together."""

    unit: int
    targets: tuple[State, ...]
    """States of this engine that are written."""
    sources: tuple[State, ...]
    """States of the checkpoint that are read."""
    start: int
    stop: int
    first: int
    """Element `start` of the partition, counted in the unit."""
    kept: bool = False
    """True if the engine keeps its own values, which are only compared, or copied to the slot that is written."""


class CheckpointRestorer:
    """Second pass of a load: fills this rank's partitions from a checkpoint, between `begin_load` and `end_load`."""

    def __init__(
        self, source: FoundStates, shards: StoredShards, options: LoadOptions, queue: Queue, rank: int
    ) -> None:
        self._source, self._shards, self._states = source, shards, options.states
        self._runs = [runs(layout, source.saved) for layout in shards.layouts]
        self._packed_runs = [packed_runs(layout, source.saved, rank) for layout in shards.layouts]
        self._scale_runs = [scale_runs(layout, source.saved, shards.mode) for layout in shards.layouts]
        saved_units = ([run.saved.unit for run in unit_runs if run.saved is not None] for unit_runs in self._runs)
        self._saved_modes = [source.mode_of(units[0]) if units else source.mode for units in saved_units]
        """For each unit the mode of its parameters in the checkpoint. `check_fits` allows one mode per unit."""
        self._keeps_commit = shards.store.durable is not None
        """True if the store has made a commit, which must stay intact. States that train have a second slot."""
        self._buffers = flow_buffers()
        self._saved = source.open(queue)

    def run(self) -> None:
        """Fills every partition and makes the written slots the newest in the store."""
        written: list[dict[State, list[tuple[int, Future]]]] = [{} for _ in self._shards.layouts]
        try:
            # Before any write: a damaged store must not change.
            self._compare_kept()
            layouts = enumerate(self._shards.layouts)
            filled = [unit for unit, layout in layouts if not layout.in_files and self._frozen_work(unit)]
            # With a commit only the units that differ are written, in place; without one all of them.
            frozen = self._differing(filled) if self._keeps_commit else set(filled)
            work = (
                chunk
                for unit, (share, _) in enumerate(self._shards.shares)
                for chunks in (self._trainable_work(unit, share), self._frozen_work(unit) if unit in frozen else ())
                for chunk in chunks
            )
            flow(self._buffers, work, self._begin, lambda chunk, buffer: self._end(chunk, buffer, written))
        finally:
            self._saved.close()
        for unit, writes in enumerate(written):
            # All writes were awaited by `flow`, so the slot is complete and may become the newest.
            if writes:
                self._shards.store.wrote(unit, self._shards.store.target(unit), writes)

    def _compare_kept(self) -> None:
        """Raises `IoError` if the swap files are damaged in a unit with a parameter that keeps its values.

        A read that begins in the middle of a checksummed range cannot be compared, and its bytes would be written
        again with a new, valid checksum. So such a unit is read completely and in order, before anything changes.
        """
        shards, page = self._shards, self._shards.mode.page_step
        if not self._keeps_commit:
            return
        work = [
            _RestoreChunk(unit, (state,), (state,), start, min(start + numel, last), 0, kept=True)
            for unit, unit_runs in enumerate(self._runs)
            if any(run.saved is None for run in unit_runs)
            for state, nbytes in shards.states(unit).items()
            if shards.stored(unit, state)
            for itemsize in [shards.mode_of(unit).states[state].itemsize]
            for last, numel in [(nbytes // itemsize, BUFFER_NBYTES // itemsize // page * page)]
            for start in range(0, last, numel)
        ]

        def begin(chunk: _RestoreChunk, buffer: memoryview) -> Sequence[Future]:
            nbytes = (chunk.stop - chunk.start) * shards.mode_of(chunk.unit).states[chunk.targets[0]].itemsize
            return self._read_now(chunk, chunk.targets[0], buffer[:nbytes], 0, None)

        flow(self._buffers, work, begin, lambda *_: ())

    def _converts(self, unit: int) -> bool:
        """Returns True if weights of a unit are converted: both modes differ, or the engine's mode has masters."""
        weights = self._shards.mode_of(unit).weights
        # With full masters (fp32, for a 16-bit weight), the checkpoint has no master of a weight that was frozen. Its
        # master is made from the weight.
        return self._saved_modes[unit].weights != weights or State.MASTER in weights

    def _makes_masters(self, unit: int, targets: Sequence[State]) -> bool:
        """Returns whether these target states of a unit include master weights that are made anew."""
        return self._converts(unit) and State.WEIGHT in targets

    def _differ(self, unit: int, targets: Sequence[State]) -> bool:
        """Returns whether the checkpoint stores some target states of a unit in another form than the engine."""
        own, saved = self._shards.mode_of(unit).states, self._saved_modes[unit].states
        # Optimizers with other states are refused, so moments can only differ in form.
        other_form = any(saved.get(state, own[state]) != own[state] for state in targets)
        return self._makes_masters(unit, targets) or other_form

    def _frozen_work(self, unit: int, room: int = BUFFER_NBYTES) -> list[_RestoreChunk]:
        """Returns the chunks of a unit's frozen weights, or [] if the checkpoint contains none of them."""
        trainable, frozen = self._shards.shares[unit]
        work = list(self._cut(unit, (State.WEIGHT,), len(trainable), frozen, room))
        return work if any(run.saved for chunk in work for run in self._overlaps(chunk)) else []

    def _end(
        self, chunk: _RestoreChunk, buffer: memoryview, written: Sequence[dict[State, list[tuple[int, Future]]]]
    ) -> Sequence[Future]:
        """Converts a chunk, copies it to its tiers in memory, and begins to write it to the store.

        Args:
            written: Receives the writes of each unit and state, each with its first byte in the partition.
        """
        shards, store = self._shards, self._shards.store
        self._convert(chunk, buffer)
        trainable = len(shards.shares[chunk.unit][0])
        futures: list[Future] = []
        for state, memory in self._regions(chunk, buffer)[1].items():
            itemsize = shards.mode_of(chunk.unit).states[state].itemsize
            start = self._part(chunk, state, chunk.start, chunk.stop).start * itemsize
            if not chunk.kept:
                shards.put(chunk.unit, state, start, memory)
            if not store.keeps(chunk.unit, state):
                continue
            if self._keeps_commit and state is State.WEIGHT and trainable <= chunk.start:
                # Frozen weights have no second slot: this write changes bytes that the last commit names, which
                # is recorded until the load is committed.
                shards.mark_rewritten()
            futures.append(store.write(chunk.unit, state, store.target(chunk.unit), start, memory))
            written[chunk.unit].setdefault(state, []).append((start, futures[-1]))
        return futures

    def _trainable_work(self, unit: int, share: range) -> Iterator[_RestoreChunk]:
        """Yields the chunks of all states of a unit's trainable elements.

        States that are not loaded are included if they must move to another slot.
        """
        store = self._shards.store
        moves = store.target(unit) != store.newest[unit]
        mode, saved_mode = self._shards.mode_of(unit), self._saved_modes[unit]
        weights = mode.weights
        for state, nbytes in self._shards.states(unit).items() if share else ():
            # This rank's values of the state alone, counted in the unit: words, scales, or elements. A state that not
            # every parameter has belongs to the first elements.
            if state is State.PACKED:
                part = range(nbytes // WORD)
            else:
                numel, first = nbytes // mode.states[state].itemsize, mode.part(state, share.start, share.stop).start
                part = range(first, first + (numel if state is State.SCALES else min(numel, len(share))))
            if state in weights:
                if not self._converts(unit):
                    yield from self._cut(unit, (state,), 0, share)
                # All states that hold the weight are converted together, at WEIGHT; the others are skipped.
                elif state is State.WEIGHT:
                    yield from self._cut(unit, tuple(weights), 0, share)
            elif self._states and mode.in_blocks is not saved_mode.in_blocks:
                # All moments have their scales in one state, so they are converted together, at the first of them.
                if state is mode.moments[0]:
                    yield from self._cut(unit, mode.optimizer_states, 0, share)
            elif self._states:
                yield from self._cut(unit, (state,), 0, part)
            # The next commit names one slot for all states of a unit, so states that are not loaded move there too.
            elif moves and store.keeps(unit, state):
                yield from (chunk._replace(kept=True) for chunk in self._cut(unit, (state,), 0, part))

    def _cut(
        self, unit: int, targets: tuple[State, ...], start: int, share: range, room: int = BUFFER_NBYTES
    ) -> Iterator[_RestoreChunk]:
        """Cuts `share` into chunks that fit into a buffer, and yields them.

        Args:
            start: Element of the partition where `share` begins.
        """
        sources = targets
        if self._makes_masters(unit, targets):
            sources = tuple(self._saved_modes[unit].weights)
        elif self._differ(unit, targets):  # the checkpoint has no scales, or `SavedStates` reads them
            sources = tuple(state for state in targets if state is not State.SCALES)
        # Each chunk begins at a multiple of a page in every state, as direct I/O requires.
        step = self._shards.mode.tile_step if State.SCALES in targets else self._shards.mode.page_step
        # Bytes of `step` elements of all states that share the buffer.
        sides = [(targets, self._shards.mode_of(unit))]
        if self._differ(unit, targets):
            sides.append((sources, self._saved_modes[unit]))
        step_nbytes = sum(
            len(range(step) if tuple(states) in _BY_THEMSELVES else mode.padded_part(state, 0, step))
            * mode.states[state].itemsize
            for states, mode in sides
            for state in states
        )
        numel = room // step_nbytes * step
        for first in range(0, len(share), numel):
            last = min(first + numel, len(share))
            yield _RestoreChunk(unit, targets, sources, start + first, start + last, share.start + first)

    def _part(self, chunk: _RestoreChunk, state: State, start: int, stop: int) -> range:
        return range(start, stop) if chunk.targets in _BY_THEMSELVES else self._shards.mode.part(state, start, stop)

    def _regions(
        self, chunk: _RestoreChunk, buffer: memoryview
    ) -> tuple[dict[State, memoryview], dict[State, memoryview]]:
        """Returns the part of `buffer` for each state: first in the checkpoint's mode, then in the engine's.

        Both are the same dict if nothing is converted.
        """
        numel, alone = chunk.stop - chunk.start, chunk.targets in _BY_THEMSELVES

        def side(states: Sequence[State], mode: Mode, at: int = 0) -> dict[State, memoryview]:
            parts = {state: range(numel) if alone else mode.padded_part(state, 0, numel) for state in states}
            sizes = [(state, len(part) * mode.states[state].itemsize) for state, part in parts.items()]
            return parts_of(buffer[at:], sizes)

        here = side(chunk.targets, self._shards.mode_of(chunk.unit))
        # Without a conversion both sides are the same memory, and the checkpoint's bytes are read directly into it.
        if not self._differ(chunk.unit, chunk.targets):
            return here, here
        return side(chunk.sources, self._saved_modes[chunk.unit], sum(map(len, here.values()))), here

    def _overlaps(self, chunk: _RestoreChunk) -> list[Run]:
        """Returns the runs of a chunk, in elements of its unit. Runs of PACKED and SCALES are in their own values."""
        last = chunk.first + chunk.stop - chunk.start
        if chunk.targets == (State.SCALES,):
            # After the scales of this rank comes padding, not the scales of the next rank.
            share = self._shards.shares[chunk.unit][0]
            last = min(last, self._shards.mode.part(State.SCALES, share.start, share.stop).stop)
            return overlaps(self._scale_runs[chunk.unit], chunk.first, last)
        unit_runs = self._packed_runs if chunk.targets == (State.PACKED,) else self._runs
        return overlaps(unit_runs[chunk.unit], chunk.first, last)

    def _begin(self, chunk: _RestoreChunk, buffer: memoryview) -> Sequence[Pending]:
        """Begins to read a chunk from the checkpoint. Elements that it does not contain are read from the engine.

        Padding becomes zero, and so do the other states of weights that were frozen in the checkpoint.
        """
        sources, targets = self._regions(chunk, buffer)
        if chunk.kept:
            return [future for state in targets for future in self._read_now(chunk, state, targets[state], 0, None)]
        chunk_runs, own = self._overlaps(chunk), self._shards.mode.rule.of_one_rank
        # If the reads below do not fill the whole buffer, the rest still holds an earlier chunk.
        # So does the padding after the scales of the last blocks.
        if (
            sum(run.stop - run.start for run in chunk_runs) < chunk.stop - chunk.start
            or any(run.saved and not run.saved.trainable for run in chunk_runs)
            or chunk.targets[0] in own
            or State.SCALES in chunk.targets
        ):
            for memory in (*sources.values(), *targets.values()):
                torch.frombuffer(memory, dtype=torch.uint8).zero_()
        futures: list[Pending] = []
        for run in chunk_runs:
            start, numel = run.start - chunk.first, run.stop - run.start
            if run.saved is None:
                for state, memory in targets.items():
                    futures += self._read_now(chunk, state, memory, start, numel)
                continue
            for state, memory in sources.items():
                # Frozen weights have no other states in the checkpoint; the zeros written above stay. So do those of
                # states that belong to one rank: a checkpoint has only the first rank's.
                if state not in own and (state is State.WEIGHT or run.saved.trainable):
                    futures += self._saved.read(run, state, memory, start)
        return futures

    def _read_now(
        self, chunk: _RestoreChunk, state: State, memory: memoryview, start: int, numel: int | None
    ) -> list[Future]:
        """Begins to read the engine's own values of a chunk.

        Args:
            start: First element, counted from the chunk's first.
            numel: Number of elements; None for all from `start` on.
        """
        itemsize = self._shards.mode_of(chunk.unit).states[state].itemsize
        here = self._part(chunk, state, start, start + (numel or 0))
        stop = len(memory) if numel is None else here.stop * itemsize
        at = self._part(chunk, state, chunk.start + start, chunk.stop).start * itemsize
        return self._shards.read(chunk.unit, state, at, memory[here.start * itemsize : stop])

    def _convert(self, chunk: _RestoreChunk, buffer: memoryview) -> None:
        sources, targets = self._regions(chunk, buffer)
        if sources is targets or chunk.kept:
            return
        there, here = self._saved_modes[chunk.unit].states, self._shards.mode_of(chunk.unit).states
        saved = {state: torch.frombuffer(memory, dtype=there[state]) for state, memory in sources.items()}
        converted = {state: torch.frombuffer(memory, dtype=here[state]) for state, memory in targets.items()}
        codes = self._shards.layouts[chunk.unit].values_stop
        for run in self._overlaps(chunk):
            if run.saved is not None:
                part = slice(run.start - chunk.first, run.stop - chunk.first)
                states = saved if run.saved.trainable else {State.WEIGHT: saved[State.WEIGHT]}
                if run.start >= codes:
                    # These are bytes of codes and scales, not values. As numbers some are NaNs, which a copy may
                    # change.
                    copied = states[State.WEIGHT][part].view(torch.uint8)
                    converted[State.WEIGHT][part].view(torch.uint8).copy_(copied)
                    continue
                saved_part = {s: t[part] for s, t in states.items()}
                if State.WEIGHT in converted:
                    convert(saved_part, {s: t[part] for s, t in converted.items()})
                elif run.saved.trainable:
                    # All moments, or one whose form has no scales in either mode.
                    saved_mode = self._source.mode
                    scales = self._saved.scales(run.saved.unit) if saved_mode.in_blocks else None
                    moments = SavedMoments(saved_mode, saved_part, scales, run.saved.start)
                    for state in chunk.targets:
                        if state is not State.SCALES:
                            # Rounded to nearest where the new form is not fp32.
                            values = moments.values(state)
                            optimizer_states.write(self._shards.mode, converted, state, part.start, values)

    def check_model_files(self) -> None:
        """Raises `StoreError` if frozen weights differ that are in the model's own files, which are only read."""
        layouts = self._shards.layouts
        try:
            units = [unit for unit, layout in enumerate(layouts) if layout.in_files and self._frozen_work(unit)]
            differ = self._differing(units)
        finally:
            self._saved.close()
        if differ:
            raise StoreError(
                f"the checkpoint has other frozen weights than the model's own files, the first of "
                f"{layouts[min(differ)].name}, and these files are only read: load the checkpoint into a run that "
                'begins with "frozen_files": false, or over the model with which the checkpoint was saved'
            )

    def _differing(self, units: Sequence[int]) -> set[int]:
        """Returns those of `units` whose frozen weights differ from the checkpoint's.

        One half of each buffer receives the checkpoint's weights, the other half the engine's own.
        """
        half = BUFFER_NBYTES // 2
        differ: set[int] = set()

        def begin(chunk: _RestoreChunk, buffer: memoryview) -> Sequence[Pending]:
            now = self._regions(chunk, buffer[half:])[1][State.WEIGHT]
            return [*self._begin(chunk, buffer[:half]), *self._read_now(chunk, State.WEIGHT, now, 0, None)]

        def end(chunk: _RestoreChunk, buffer: memoryview) -> Sequence[Future]:
            self._convert(chunk, buffer[:half])
            saved, now = (self._regions(chunk, part)[1][State.WEIGHT] for part in (buffer[:half], buffer[half:]))
            if not torch.equal(torch.frombuffer(saved, dtype=torch.uint8), torch.frombuffer(now, dtype=torch.uint8)):
                differ.add(chunk.unit)
            return ()

        # A generator, because `end` adds to `differ`: the remaining chunks of a unit that differs are not read.
        work = (chunk for unit in units for chunk in self._frozen_work(unit, half) if unit not in differ)
        flow(self._buffers, work, begin, end)
        return differ
