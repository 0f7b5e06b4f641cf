"""Loading a checkpoint, in two passes: all that will be read is compared with its checksums first, on all ranks; only
then is anything of the engine changed. So a checkpoint that is damaged, or does not fit, changes nothing.

The second pass goes through this rank's partitions, unit by unit, and finds each stretch by the names of its
parameters. What the store keeps goes to the slots that the last commit does not name, so that a kill leaves that commit
whole; only frozen weights, which have no second slot, are written in place, and only where they are other ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from offload import kernels
from offload.aio import DirectFile, aligned_empty, crc32c, crc32c_joined
from offload.engine.checkpoint_files import (
    Manifest,
    progress_file,
    read_manifest,
    states_file,
    tensor_name,
    tensors_of,
)
from offload.engine.checkpoint_map import Run, difference, overlaps, places, runs
from offload.engine.description import described_layouts
from offload.engine.flow import BUFFER_NBYTES, flow, flow_buffers
from offload.engine.held import Held
from offload.engine.layout import Segment, UnitLayout
from offload.engine.pieces import pieces
from offload.engine.progress import Progress
from offload.engine.tensor_file import Place, read_header
from offload.errors import IoError, StoreError
from offload.swapper.states import MODES, Mode, State
from offload.swapper.store import Future, Queue

CLIENT_STATE = "client_state"
"""The user's own, in the file of progress."""
_STEP = 2048
"""Elements: 4096 bytes of the smallest state."""


class Wish(NamedTuple):
    """What is to be loaded."""

    strict: bool
    states: bool
    """Moments and counts of steps, beside the weights."""
    schedule: bool
    module_only: bool


class Found(NamedTuple):
    """A checkpoint that was checked, as far as it is to be loaded."""

    folder: Path
    manifest: Manifest
    layouts: tuple[UnitLayout, ...]
    mode: Mode
    saved: Mapping[str, tuple[int, Segment]]
    places: Mapping[str, Place]
    """Where each tensor lies in every rank's file of states."""
    progress: Progress
    contents: Mapping[str, torch.Tensor]
    own: bool
    """Whether `progress` is this rank's own."""

    @property
    def client_state(self) -> Any:
        """As JSON."""
        return json.loads(bytes(self.contents[CLIENT_STATE].numpy()))

    def steps(self, layouts: Sequence[UnitLayout], now: Sequence[Sequence[int]]) -> list[list[int]]:
        """How often each parameter of `layouts` was updated; `now` of those that the checkpoint has not."""
        counts = self.progress.facts["parameter_steps"]
        saved = {id(s): counts[u][i] for u, row in enumerate(self.layouts) for i, s in enumerate(row.segments)}
        return [
            [
                saved[id(self.saved[segment.name][1])] if segment.name in self.saved else before
                for segment, before in zip(layout.segments, row, strict=True)
            ]
            for layout, row in zip(layouts, now, strict=True)
        ]


# -- reading and comparing ----------------------------------------------------------------------------


def look(folder: Path, rank: int, world_size: int, tied_here: Mapping[str, str]) -> Found:
    """Read all of a checkpoint but its states; raises `StoreError` where something is missing or damaged.

    `tied_here` gives the first name of each tied parameter of this model by its other ones.
    """
    manifest = read_manifest(folder)
    try:
        layouts, mode = described_layouts(manifest.layout), MODES[manifest.layout["mode"]]
        tied = manifest.about["tied"]
        expected = tensors_of(layouts, mode, manifest.world_size, manifest.frozen)
        names = [name for each in range(manifest.world_size) for name in (states_file(each), progress_file(each))]
        found: dict[str, Place] = {}
        for name in names:
            size = (folder / name).stat().st_size
            if size != manifest.files[name].nbytes:
                raise ValueError(f"{name} has {size} bytes, not {manifest.files[name].nbytes}")
            if name.startswith("states."):
                found, _ = read_header(folder / name)
                if {key: place.tensor for key, place in found.items()} != expected:
                    raise ValueError(f"{name} holds other tensors than the manifest says")
                if found.keys() != manifest.files[name].sums.keys():
                    raise ValueError(f"the manifest has not a checksum of each tensor of {name}")
        own = manifest.world_size == world_size
        name = progress_file(rank if own else 0)
        data = (folder / name).read_bytes()
        if crc32c(data) != manifest.files[name].sums[""]:
            raise ValueError(f"{name} is damaged: its checksum is not the one written")
        contents = safetensors.torch.load(data)
        progress = Progress.unpack(contents)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"the checkpoint {folder} is not whole: {error}; load another") from error
    saved = places(layouts, tied, manifest.frozen)
    saved |= {first: saved[name] for name, first in tied_here.items() if name in saved and first not in saved}
    return Found(folder, manifest, layouts, mode, saved, found, progress, contents, own)


def check_fits(found: Found, held: Held, wish: Wish, names: set[str], buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise `StoreError` where the checkpoint is of another model or mode. `names` are all that the model has."""
    what = f"the checkpoint {found.folder}"
    shapes = {s.name: s.shape for layout in held.layouts for s in layout.segments}
    absent: set[str] = set()
    if not found.manifest.frozen:
        absent = {s.name for layout in found.layouts for s in layout.segments if not s.trainable}
        absent |= {name for name, first in found.manifest.about["tied"].items() if first in absent}
    mine = {name: shape for name, shape in shapes.items() if name not in absent or name in found.saved}
    mine |= {name: tuple(value.shape) for name, value in buffers.items()}
    theirs = {name: segment.shape for name, (_, segment) in found.saved.items()}
    theirs |= {name: tuple(value.shape) for name, value in found.progress.buffers.items()}
    difference(mine, names | buffers.keys(), theirs).check(wish.strict, what)
    if wish.states and found.mode is not held.mode:
        raise StoreError(
            f"{what} is of mode {found.mode.name}, this engine is of mode {held.mode.name}, so the optimizer's states "
            f"are not the same: load the weights alone (load_optimizer_states=False), or train in {found.mode.name}"
        )


def check_progress(found: Found, wish: Wish, groups: int, schedule: Any) -> None:
    """Raise `StoreError` where counters or schedule are of another optimizer. `schedule` is the state of this one's."""
    facts, what = found.progress.facts, f"the checkpoint {found.folder}"
    if len(facts["groups"]) != groups:
        raise StoreError(
            f"{what} has {len(facts['groups'])} groups of parameters, this optimizer has {groups}: give it the same, "
            f"or load the weights alone (load_module_only=True)"
        )
    saved = facts["scheduler"]
    if wish.schedule and isinstance(saved, dict) and isinstance(schedule, dict) and saved.keys() != schedule.keys():
        raise StoreError(
            f"{what} has the state of another learning-rate schedule, with {', '.join(sorted(saved))}; this one has "
            f"{', '.join(sorted(schedule))}: give the same, or say load_lr_scheduler_states=False"
        )


def fitting(
    progress: Progress, buffers: Mapping[str, torch.Tensor], steps: Sequence[Sequence[int]], schedule: bool
) -> Progress:
    """What of `progress` is for this engine: its own buffers, its parameters' `steps`, the schedule if it is loaded."""
    facts = {**progress.facts, "parameter_steps": [list(row) for row in steps]}
    if not schedule:
        facts["scheduler"] = None
    mine = {name: value for name, value in progress.buffers.items() if name in buffers}
    return Progress(facts, progress.generators, mine)


def check_bytes(found: Found, wish: Wish, queue: Queue, rank: int, world_size: int) -> None:
    """Compare this rank's share of what any rank will read with its checksums; raises `StoreError`."""
    states = found.mode.states if wish.states else (State.WEIGHT, State.RESIDUAL)
    wanted = [name for name in found.places if State(name.partition(".")[2]) in states]
    work = [(each, name) for each in range(found.manifest.world_size) for name in wanted][rank::world_size]
    files = _open(found)
    sums: dict[tuple[int, str], int] = {}

    def begin(piece: _Stretch, buffer: memoryview) -> Sequence[Future]:
        offset = found.places[piece.name].offset + piece.start
        piece.reads.append(queue.read(files[piece.rank], offset, buffer[: piece.nbytes], checksum=True))
        return piece.reads

    def ended(piece: _Stretch, _: Sequence[Future]) -> None:
        key = piece.rank, piece.name
        sums[key] = crc32c_joined(sums.get(key, 0), piece.reads[0].crc32c(), piece.nbytes)
        if piece.start + piece.nbytes < found.places[piece.name].tensor.nbytes:
            return
        path = found.folder / states_file(piece.rank)
        if sums.pop(key) != found.manifest.files[path.name].sums[piece.name]:
            raise StoreError(f"{path} is damaged: the checksum of {piece.name} is not the one written; load another")

    def stretches() -> Iterator[_Stretch]:
        for each, name in work:
            nbytes = found.places[name].tensor.nbytes
            for start in range(0, nbytes, BUFFER_NBYTES):
                yield _Stretch(each, name, start, min(BUFFER_NBYTES, nbytes - start), [])

    try:
        flow(flow_buffers(), stretches(), begin, lambda *_: (), ended)
    except IoError as error:
        raise StoreError(f"the checkpoint {found.folder} cannot be read: {error}; load another") from error
    finally:
        for file in files:
            file.close()


class _Stretch(NamedTuple):
    """Bytes of one rank's file."""

    rank: int
    name: str
    start: int
    nbytes: int
    reads: list[Future]


def _open(found: Found) -> list[DirectFile]:
    files: list[DirectFile] = []
    try:
        for rank in range(found.manifest.world_size):
            files.append(DirectFile(found.folder / states_file(rank), writable=False))
    except IoError as error:
        for file in files:
            file.close()
        raise StoreError(f"the checkpoint {found.folder} cannot be read: {error}") from error
    return files


# -- writing ------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """Elements [start, stop) of a partition, of one state or of several that are converted together."""

    unit: int
    targets: tuple[State, ...]
    sources: tuple[State, ...]
    start: int
    stop: int
    first: int
    """The element of the unit that is the partition's `start`."""
    kept: bool = False
    """Whether all stays as it is, and only moves to the slot that is written."""


class Filling:
    """The second pass: gives this rank's partitions what a checkpoint has of them. The pager is in `begin_load`."""

    def __init__(self, found: Found, held: Held, wish: Wish, queue: Queue) -> None:
        self._found, self._held, self._states, self._queue = found, held, wish.states, queue
        self._runs = [runs(layout, found.saved) for layout in held.layouts]
        self._buffers = flow_buffers()
        self._files = _open(found)

    def run(self) -> None:
        """Fill every partition, and make what was written the newest in the store."""
        written: list[dict[State, list[tuple[int, Future]]]] = [{} for _ in self._held.layouts]
        work = (piece for unit in range(len(self._held.layouts)) for piece in self._work(unit))
        try:
            flow(
                self._buffers,
                work,
                self._begin,
                lambda piece, buffer: self._end(piece, buffer, written),
                lambda *_: None,
            )
        finally:
            for file in self._files:
                file.close()
        for unit, writes in enumerate(written):
            if writes and self._held.store is not None:
                self._held.store.wrote(unit, self._slot(unit), writes)

    def _slot(self, unit: int) -> int:
        return 0 if self._held.store is None else self._held.store.target(unit)

    @property
    def _two_slots(self) -> bool:
        return self._held.store is not None and self._held.store.spec.slots == 2

    def _work(self, unit: int) -> Iterator[_Work]:
        trainable, frozen = self._held.shares[unit]
        yield from self._trainable_work(unit, trainable)
        behind = list(self._cut(unit, (State.WEIGHT,), len(trainable), frozen))
        if any(run.saved for piece in behind for run in self._overlaps(piece)):
            if not self._two_slots or not self._same(behind):
                yield from behind

    def _end(
        self, piece: _Work, buffer: memoryview, written: Sequence[dict[State, list[tuple[int, Future]]]]
    ) -> Sequence[Future]:
        """Give a piece to its homes, and begin to write it."""
        held, store, slot = self._held, self._held.store, self._slot(piece.unit)
        self._convert(piece, buffer)
        trainable = len(held.shares[piece.unit][0])
        futures: list[Future] = []
        for state, memory in self._regions(piece, buffer)[1].items():
            start = piece.start * held.mode.states[state].itemsize
            if not piece.kept:
                held.put(piece.unit, state, start, memory)
            if store is None or not store.keeps(piece.unit, state):
                continue
            futures.append(store.write(piece.unit, state, slot, start, memory))
            written[piece.unit].setdefault(state, []).append((start, futures[-1]))
            if self._two_slots and 0 < trainable <= piece.start:
                # Updates write the trainable part alone, so what lies behind it must be in both slots.
                futures.append(store.write(piece.unit, state, 1 - slot, start, memory))
        return futures

    def _trainable_work(self, unit: int, share: range) -> Iterator[_Work]:
        """All states of the trainable part; what is not loaded too, where it moves to another slot."""
        store = self._held.store
        moves = store is not None and self._slot(unit) != store.newest[unit]
        mine, theirs = self._held.mode.states, self._found.mode.states
        for state in self._held.states(unit) if share else ():
            if state in (State.WEIGHT, State.RESIDUAL):
                if mine is theirs:
                    yield from self._cut(unit, (state,), 0, share)
                elif state is State.WEIGHT:
                    yield from self._cut(unit, tuple(s for s in mine if s in (State.WEIGHT, State.RESIDUAL)), 0, share)
            elif self._states:
                yield from self._cut(unit, (state,), 0, share)
            elif moves and self._held.stored(unit, state):
                yield from (each._replace(kept=True) for each in self._cut(unit, (state,), 0, share))

    def _cut(self, unit: int, targets: tuple[State, ...], start: int, share: range) -> Iterator[_Work]:
        """Pieces that fit a buffer, of the elements `share` of a unit, which begin at `start` of the partition."""
        sources = targets
        if self._found.mode is not self._held.mode and State.WEIGHT in targets:
            sources = tuple(s for s in self._found.mode.states if s in (State.WEIGHT, State.RESIDUAL))
        numel = BUFFER_NBYTES // sum(self._itemsizes(sources, targets)) // _STEP * _STEP
        for first in range(0, len(share), numel):
            last = min(first + numel, len(share))
            yield _Work(unit, targets, sources, start + first, start + last, share.start + first)

    def _itemsizes(self, sources: Sequence[State], targets: Sequence[State]) -> list[int]:
        mine, theirs = self._held.mode.states, self._found.mode.states
        found = [mine[state].itemsize for state in targets]
        return found if mine is theirs else found + [theirs[state].itemsize for state in sources]

    def _regions(self, piece: _Work, buffer: memoryview) -> tuple[dict[State, memoryview], dict[State, memoryview]]:
        """The memory of each state as the checkpoint has it, and as the engine has it."""
        end, numel = 0, piece.stop - piece.start
        sides: list[dict[State, memoryview]] = []
        for states, mode in ((piece.targets, self._held.mode), (piece.sources, self._found.mode)):
            if sides and mode is self._held.mode:
                sides.append(sides[0])
                break
            side: dict[State, memoryview] = {}
            for state in states:
                nbytes = numel * mode.states[state].itemsize
                side[state] = buffer[end : end + nbytes]
                end += nbytes
            sides.append(side)
        return sides[1], sides[0]

    def _overlaps(self, piece: _Work) -> list[Run]:
        return overlaps(self._runs[piece.unit], piece.first, piece.first + piece.stop - piece.start)

    def _begin(self, piece: _Work, buffer: memoryview) -> Sequence[Future]:
        """Read what the checkpoint has, and of what it has not what is there now; the rest is zero."""
        sources, targets = self._regions(piece, buffer)
        if piece.kept:
            return [future for state in targets for future in self._read_now(piece, state, targets[state], 0, None)]
        found = self._overlaps(piece)
        if sum(run.stop - run.start for run in found) < piece.stop - piece.start or any(
            run.saved and not run.saved.trainable for run in found
        ):
            for memory in (*sources.values(), *targets.values()):
                torch.frombuffer(memory, dtype=torch.uint8).zero_()
        futures: list[Future] = []
        for run in found:
            start, numel = run.start - piece.first, run.stop - run.start
            if run.saved is None:
                for state, memory in targets.items():
                    futures += self._read_now(piece, state, memory, start, numel)
                continue
            for state, memory in sources.items():
                if state is State.WEIGHT or run.saved.trainable:
                    futures += self._read_saved(run, state, memory, start)
        return futures

    def _read_now(self, piece: _Work, state: State, memory: memoryview, start: int, numel: int | None) -> list[Future]:
        """Elements of the piece as they are now, from its element `start` on."""
        itemsize = self._held.mode.states[state].itemsize
        stop = len(memory) if numel is None else (start + numel) * itemsize
        at = (piece.start + start) * itemsize
        return self._held.read(piece.unit, state, at, memory[start * itemsize : stop])

    def _read_saved(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Future]:
        """Elements of a run, which is element `start` of the memory."""
        found, source = self._found, run.saved
        assert source is not None
        itemsize = found.mode.states[state].itemsize
        segment = Segment("", (), source.start, run.stop - run.start, source.trainable)
        place = found.places[tensor_name(source.unit, state)]
        for piece in pieces(found.layouts[source.unit], found.manifest.world_size, segment):
            first = (start + piece.position) * itemsize
            yield self._queue.read(
                self._files[piece.rank],
                place.offset + piece.start * itemsize,
                memory[first : first + piece.numel * itemsize],
            )

    def _convert(self, piece: _Work, buffer: memoryview) -> None:
        """From the checkpoint's mode to the engine's, where they differ."""
        sources, targets = self._regions(piece, buffer)
        if sources is targets or piece.kept:
            return
        saved = {s: torch.frombuffer(m, dtype=self._found.mode.states[s]) for s, m in sources.items()}
        mine = {s: torch.frombuffer(m, dtype=self._held.mode.states[s]) for s, m in targets.items()}
        for run in self._overlaps(piece):
            if run.saved is not None:
                part = slice(run.start - piece.first, run.stop - piece.first)
                convert({s: t[part] for s, t in saved.items()}, {s: t[part] for s, t in mine.items()})

    def _same(self, work: Sequence[_Work]) -> bool:
        """Whether frozen weights are already what the checkpoint has: then they need not be written again."""
        same = True
        buffers = flow_buffers()
        there = aligned_empty(BUFFER_NBYTES)

        def end(piece: _Work, buffer: memoryview) -> Sequence[Future]:
            nonlocal same
            if same:
                self._convert(piece, buffer)
                mine = self._regions(piece, buffer)[1][State.WEIGHT]
                for future in self._read_now(piece, State.WEIGHT, there[: len(mine)], 0, None):
                    future.wait()
                one, other = (torch.frombuffer(m[: len(mine)], dtype=torch.uint8) for m in (there, mine))
                same = torch.equal(one, other)
            return ()

        flow(buffers, work, self._begin, end, lambda *_: None)
        return same


def convert(saved: Mapping[State, torch.Tensor], mine: Mapping[State, torch.Tensor]) -> None:
    """Write weights of one mode, (numel,) of each state, as those of another."""
    master = saved[State.WEIGHT]
    if State.RESIDUAL in saved:
        master = torch.empty(len(master), dtype=torch.float32, device="cpu")
        kernels.join_master(saved[State.WEIGHT], saved[State.RESIDUAL], master)
    master = master.float()
    if State.RESIDUAL in mine:
        kernels.split_master(master, mine[State.WEIGHT], mine[State.RESIDUAL])
    elif mine[State.WEIGHT].dtype == torch.float32:
        mine[State.WEIGHT].copy_(master)
    else:
        kernels.split_master(master, mine[State.WEIGHT], torch.empty(len(master), dtype=torch.int16, device="cpu"))
