"""First pass of loading a checkpoint: the ranks together compare all data that will be read with its checksums.

Only after this pass has succeeded on every rank does the second pass, `offload.checkpoint.restore`, change the
engine. So a checkpoint that is damaged or does not fit changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from offload.aio import DirectFile, aligned_empty, crc32c, crc32c_joined
from offload.aio.protocols import Future, Pending, Queue
from offload.checkpoint.files import (
    Manifest,
    depth_in,
    instead_of,
    progress_file,
    read_manifest,
    states_file,
    tensor_name,
    tensors_of,
    wrong_files,
)
from offload.checkpoint.resharding import Run, SavedElement, all_places, as_rows, places, shards_of_scales
from offload.engine.snapshot import Snapshot
from offload.errors import IoError, StoreError
from offload.fileio import inner_opener, read_inner
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.fileio.safetensors_stream import TensorLocation, read_header
from offload.layout import optimizer_states
from offload.layout.fingerprint import described_layouts, described_mode
from offload.layout.flat_layout import ParameterSegment, SegmentShard, UnitLayout, segment_shards
from offload.layout.modes import MOMENT_BLOCK, Mode, moments_name
from offload.layout.optimizer_states import KEPT, join, split
from offload.records import fields, parse, read
from offload.sizes import count_of
from offload.states import State
from offload.swapper.store import Compared
from offload.swapper.store.format import tensors_in

# -- saved states --------------------------------------------------------------------------------------
#
# Reads of saved states from the partitions of all ranks, and the values of moments.


class FoundStates(Protocol):
    """Saved states that fit this engine: of a checkpoint, or of a run's swap files."""

    @property
    def mode(self) -> Mode: ...

    @property
    def saved(self) -> Mapping[str, tuple[int, ParameterSegment]]: ...

    def mode_of(self, unit: int) -> Mode: ...

    def open(self, queue: Queue) -> StateReader: ...


class StateReader(Protocol):
    """Reads of saved states, whatever their files are."""

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Pending]: ...

    def scales(self, unit: int) -> torch.Tensor: ...

    def close(self) -> None: ...


class PartitionReader(Protocol):
    """Reads of the partitions of all ranks that saved."""

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        """Begins to fill `buffer` from byte `start` of a rank's partition on."""
        ...

    def close(self) -> None: ...


def open_states(checkpoint: FoundCheckpoint) -> list[DirectFile]:
    """Opens every rank's file of states; the caller closes them. Raises `StoreError` if a file cannot be opened."""
    files: list[DirectFile] = []
    opener = inner_opener(depth_in(checkpoint.folder))
    try:
        for rank in range(checkpoint.manifest.world_size):
            files.append(DirectFile(checkpoint.folder / states_file(rank), writable=False, opener=opener))
    except IoError as error:
        for file in files:
            file.close()
        raise StoreError(f"the checkpoint {checkpoint.folder} cannot be read: {error}") from error
    return files


class CheckpointPartitions:
    """The partitions in the files of a checkpoint, open until `close`; implements `PartitionReader`."""

    def __init__(self, checkpoint: FoundCheckpoint, queue: Queue) -> None:
        self._places, self._queue = checkpoint.places, queue
        self._files = open_states(checkpoint)

    def read(
        self, rank: int, unit: int, state: State, start: int, buffer: memoryview, checksum: bool = False
    ) -> Future:
        place = self._places[rank][tensor_name(unit, state)]
        assert start + len(buffer) <= place.tensor.nbytes
        return self._queue.read(self._files[rank], place.offset + start, buffer, checksum=checksum)

    def close(self) -> None:
        for file in self._files:
            file.close()


class SavedStates:
    """The states of the partitions of all ranks that saved; implements `StateReader`."""

    def __init__(self, layouts: Sequence[UnitLayout], mode: Mode, world_size: int, partitions: PartitionReader) -> None:
        self._layouts, self._mode, self._world_size = layouts, mode, world_size
        self._partitions = partitions
        self._unit, self._scales = -1, torch.empty(0, dtype=torch.float32, device="cpu")

    def close(self) -> None:
        self._partitions.close()

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Pending]:
        """Begins to read the elements of a run, from each rank's partition that contains some of them.

        Args:
            state: The state. Runs of PACKED and SCALES are counted in values of the state.
            memory: Memory of the state for the whole chunk.
            start: Element of `memory` where the run begins.
        """
        source = run.saved
        assert source is not None
        itemsize = self._layouts[source.unit].mode_in(self._mode).states[state].itemsize
        # `segment_shards` finds the partitions of a segment's elements. This made-up segment is the run's elements.
        segment = ParameterSegment("", (), source.start, run.stop - run.start, source.trainable)
        layout = self._layouts[source.unit]
        if state is State.PACKED:  # of one rank, the home of the parameter
            shards = iter([SegmentShard(source.rank, 0, source.start, segment.numel)])
        elif state is State.SCALES:
            shards = shards_of_scales(layout, self._world_size, segment, self._mode)
        else:
            shards = segment_shards(layout, self._world_size, segment)
        for chunk in shards:
            first = (start + chunk.position) * itemsize
            part = memory[first : first + chunk.numel * itemsize]
            yield self._partitions.read(chunk.rank, source.unit, state, chunk.start * itemsize, part)

    def scales(self, unit: int) -> torch.Tensor:
        """Returns the scales of moments in 8 bits, (blocks * moments,) of all trainable elements of a unit.

        A run of elements may begin within a block, so its scales are not read with its codes. The scales of the whole
        unit are read at once: a byte for each moment of 64 elements.
        """
        if unit == self._unit:
            return self._scales
        own = len(self._layouts[unit].trainable(0, self._world_size))
        used = len(self._mode.part(State.SCALES, 0, own))
        parts = []
        for rank in range(self._world_size):
            # The scales of each rank are padded to whole pages.
            buffer = aligned_empty(len(self._mode.padded_part(State.SCALES, 0, own)) * torch.float32.itemsize)
            self._partitions.read(rank, unit, State.SCALES, 0, buffer).wait()
            parts.append(torch.frombuffer(buffer, dtype=torch.float32)[:used])
        self._unit, self._scales = unit, torch.cat(parts)
        return self._scales


class SavedMoments(NamedTuple):
    """Elements of a parameter's moments in a checkpoint."""

    mode: Mode
    states: Mapping[State, torch.Tensor]
    """(numel,) of each moment."""
    scales: torch.Tensor | None
    """Scales of the whole unit; None if the moments are not in 8 bits."""
    position: int
    """First element, counted in the unit."""

    def values(self, state: State) -> torch.Tensor:
        states = {state: self.states[state]}
        if self.scales is not None:
            block = self.position // MOMENT_BLOCK
            states[State.SCALES] = self.scales[block * len(self.mode.moments) :]
        return optimizer_states.read(self.mode, states, state, self.position % MOMENT_BLOCK)


# -- load ----------------------------------------------------------------------------------------------


CLIENT_STATE = "client_state"
"""Name of the user's own state in the progress file."""


class LoadOptions(NamedTuple):
    """The parts of a checkpoint that are loaded."""

    strict: bool
    states: bool
    """True to load moments and step counts in addition to the weights."""
    schedule: bool
    module_only: bool


EVERYTHING = LoadOptions(strict=True, states=True, schedule=True, module_only=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose files were checked, except for the bytes of its states."""

    folder: Path
    manifest: Manifest
    layouts: tuple[UnitLayout, ...]
    mode: Mode
    saved: Mapping[str, tuple[int, ParameterSegment]]
    places: Sequence[Mapping[str, TensorLocation]]
    """Location of each tensor in the file of states of each rank."""
    progress: Snapshot
    contents: Mapping[str, torch.Tensor]
    own: bool
    """True if `progress` is this rank's own; False if it is rank 0's, because the number of ranks differs."""
    notices: tuple[str, ...] = ()
    """Lines for the user about contents of the checkpoint that are not loaded."""

    @property
    def client_state(self) -> Any:
        return parse(bytes(self.contents[CLIENT_STATE].numpy()))

    def mode_of(self, unit: int) -> Mode:
        return self.layouts[unit].mode_in(self.mode)

    def steps(self, layouts: Sequence[UnitLayout], now: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the number of updates of each parameter of `layouts`.

        Args:
            now: Present counts, which apply to parameters that the checkpoint does not contain.
        """
        # In the checkpoint, a tied name and a row of a whole parameter lead to the unit and the first name of the
        # parameter.
        counts = self.progress.facts["parameter_steps"]
        saved = {
            (u, s.parameter): counts[u][i] for u, row in enumerate(self.layouts) for i, s in enumerate(row.segments)
        }
        return [
            [
                max([saved[unit, place.parameter] for unit, place in all_places(segment, self.saved)], default=before)
                for segment, before in zip(layout.segments, row, strict=True)
            ]
            for layout, row in zip(layouts, now, strict=True)
        ]

    def for_rows(self, layouts: Sequence[UnitLayout]) -> FoundCheckpoint:
        """Returns the same checkpoint, with a place for each row that is a unit of `layouts`."""
        return dataclasses.replace(self, saved={**self.saved, **as_rows(self.saved, layouts)})

    def open(self, queue: Queue) -> StateReader:
        partitions = CheckpointPartitions(self, queue)
        return SavedStates(self.layouts, self.mode, self.manifest.world_size, partitions)

    def check_bytes(self, options: LoadOptions, queue: Queue, rank: int, world_size: int) -> None:
        """Compares this rank's share of the tensors that any rank will read with their checksums."""
        states = self.mode.states if options.states else KEPT
        # Round robin over all tensors: each is compared by exactly one rank.
        work = [
            (file_rank, name)
            for file_rank, places_of in enumerate(self.places)
            for name in places_of
            if State(name.partition(".")[2]) in states
        ][rank::world_size]

        def damaged(path: Path, name: str) -> None:
            raise StoreError(f"{path} is damaged: {name} does not match its checksum; {instead_of(self.folder)}", True)

        try:
            compare_bytes(self, work, queue, damaged)
        except IoError as error:
            raise StoreError(
                f"the checkpoint {self.folder} cannot be read: {error}; {instead_of(self.folder)}"
            ) from error


# -- reading and comparing ----------------------------------------------------------------------------


def look(folder: Path, rank: int, world_size: int, tied_here: Mapping[str, str]) -> FoundCheckpoint:
    """Reads all of a checkpoint except its states.

    Args:
        rank: This rank. Its progress is read if as many ranks saved the checkpoint; otherwise rank 0's is.
        world_size: Number of ranks of this engine; 0 if there is no engine.
        tied_here: First name of each tied parameter of this model, by its other names.
    """
    manifest = read_manifest(folder)
    try:
        layouts, mode = described_layouts(manifest.layout, part=True), described_mode(manifest.layout)
        tied = manifest.about.get("tied", {})
        locations: list[Mapping[str, TensorLocation]] = []
        # Files that are missing or have another size come first: their names are the most useful message.
        if wrong := wrong_files(folder, manifest):
            raise ValueError("; ".join(f"{name} {reason}" for name, reason in wrong.items()))
        for file_rank in range(manifest.world_size):
            name = states_file(file_rank)
            if name not in manifest.files:
                raise ValueError(f"the manifest lacks {name}, of {manifest.world_size}")
            locations.append(read_header(folder / name)[0])
            expected = tensors_of(layouts, mode, file_rank, manifest.world_size, manifest.frozen)
            if {key: place.tensor for key, place in locations[file_rank].items()} != expected:
                raise ValueError(f"{name} contains other tensors than the manifest lists")
            if locations[file_rank].keys() != manifest.files[name].sums.keys():
                raise ValueError(f"the manifest lacks the checksum of a tensor of {name}")
        # With another number of ranks no saved progress belongs to this rank, so every rank reads rank 0's progress.
        own = manifest.ranks == world_size
        name = progress_file(rank if own else 0)
        if name not in manifest.files:
            raise ValueError(f"the manifest lacks {name}")
        data = read_inner(folder / name, depth_in(folder), manifest.files[name].nbytes)
        if crc32c(data) != manifest.files[name].sums.get(""):
            raise ValueError(f"{name} is damaged: it does not match its checksum")
        contents = tensors_in(data)
        progress = Snapshot.unpack(contents)
        progress.check_fits(layouts)
        if CLIENT_STATE in contents:
            read(bytes(contents[CLIENT_STATE].numpy()), fields({}), "the client state")
    except (OSError, StoreError, TypeError, ValueError) as error:
        raise StoreError(
            f"the checkpoint {folder} is incomplete or damaged: {error}; {instead_of(folder)}", damaged=True
        ) from error
    saved = with_first_names(places(layouts, tied, manifest.frozen), tied_here)
    return FoundCheckpoint(
        folder=folder,
        manifest=manifest,
        layouts=layouts,
        mode=mode,
        saved=saved,
        places=locations,
        progress=progress,
        contents=contents,
        own=own,
    )


def with_first_names(
    saved: Mapping[str, tuple[int, ParameterSegment]], tied_here: Mapping[str, str]
) -> dict[str, tuple[int, ParameterSegment]]:
    """Returns the parameters of a checkpoint by their names, and by the first names of tied parameters in this model.

    The checkpoint may have saved a tied parameter under a name that is not the first one here.
    """
    first = {first: saved[name] for name, first in tied_here.items() if name in saved and first not in saved}
    return {**saved, **first}


def buffers_among_weights(checkpoint: FoundCheckpoint, names: Collection[str], queue: Queue) -> dict[str, torch.Tensor]:
    """Returns, in fp32, the buffers that a checkpoint stores as frozen weights.

    The program that wrote such a checkpoint does not distinguish buffers from weights.
    """
    among = {name: checkpoint.saved[name] for name in names if name in checkpoint.saved}
    tensors: dict[str, torch.Tensor] = {}
    # Most checkpoints name their buffers. Then the files are not opened again.
    if among:
        with contextlib.closing(checkpoint.open(queue)) as reader:
            for name, (unit, segment) in among.items():
                memory = aligned_empty(segment.numel * torch.float32.itemsize)
                run = Run(0, segment.numel, SavedElement(unit, segment.start, segment.trainable))
                for read in list(reader.read(run, State.WEIGHT, memory, 0)):
                    read.wait()
                tensors[name] = torch.frombuffer(memory, dtype=torch.float32).view(segment.shape).clone()
    return tensors


class _TensorChunk(NamedTuple):
    """Chunk of a tensor in one rank's file, with its pending reads."""

    rank: int
    name: str
    start: int
    nbytes: int
    reads: list[Future]


def compare_bytes(
    checkpoint: FoundCheckpoint,
    work: Iterable[tuple[int, str]],
    queue: Queue,
    damaged: Callable[[Path, str], None],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Compares tensors with their checksums."""
    files = open_states(checkpoint)
    sums: dict[tuple[int, str], int] = {}

    def begin(chunk: _TensorChunk, buffer: memoryview) -> Sequence[Future]:
        offset = checkpoint.places[chunk.rank][chunk.name].offset + chunk.start
        chunk.reads.append(queue.read(files[chunk.rank], offset, buffer[: chunk.nbytes], checksum=True))
        return chunk.reads

    def ended(chunk: _TensorChunk, _: Sequence[Future]) -> None:
        progress(chunk.nbytes)
        key = chunk.rank, chunk.name
        # The manifest has one checksum for a whole tensor. Chunks end in order, so their checksums are joined.
        sums[key] = crc32c_joined(sums.get(key, 0), chunk.reads[0].crc32c(), chunk.nbytes)
        # More chunks of this tensor follow.
        if chunk.start + chunk.nbytes < checkpoint.places[chunk.rank][chunk.name].tensor.nbytes:
            return
        path = checkpoint.folder / states_file(chunk.rank)
        if sums.pop(key) != checkpoint.manifest.files[path.name].sums[chunk.name]:
            damaged(path, chunk.name)

    def chunks() -> Iterator[_TensorChunk]:
        for rank, name in work:
            nbytes = checkpoint.places[rank][name].tensor.nbytes
            for start in range(0, nbytes, BUFFER_NBYTES):
                yield _TensorChunk(rank, name, start, min(BUFFER_NBYTES, nbytes - start), [])

    try:
        flow(flow_buffers(), chunks(), begin, lambda *_: (), ended)
    finally:
        for file in files:
            file.close()


# -- conversion ----------------------------------------------------------------------------------------
#
# Conversion of a checkpoint's weights to the mode of this engine, and its description in words.


def convert(saved: Mapping[State, torch.Tensor], target: Mapping[State, torch.Tensor]) -> None:
    """Converts weights from one mode to another.

    Args:
        saved: (numel,) of each state of the checkpoint's mode.
        target: (numel,) of each state of the engine's mode; filled.
    """
    weight = target[State.WEIGHT]
    # A bf16 weight without low bits is frozen. With room for low bits `split` rounds it as it rounds trainable weights.
    if weight.dtype == torch.bfloat16 and State.MASTER_LOW_BITS not in target:
        target = {**target, State.MASTER_LOW_BITS: torch.empty(len(weight), dtype=torch.int16, device="cpu")}
    split(join(saved), target)


def in_words(saved: Mode, mode: Mode, states: bool, in_fp32: tuple[int, int] = (0, 0)) -> str | None:
    """Returns a line for the user about states that a load converts between modes; None if there are none.

    Args:
        in_fp32: number of weights that stay in fp32 while others are in 16 bits, in the checkpoint and in the engine.
    """
    changed = []
    if saved.precision != mode.precision:
        taken = "masters and moments" if states else "masters"
        changed.append(
            f"dtype {saved.precision} is now {mode.precision} ({taken} are taken over, and layers compute in "
            f"{mode.precision} from here on)"
        )
    if len(set(in_fp32)) > 1 and saved.precision == mode.precision:
        changed.append(f'"keep_in_fp32" kept {count_of(in_fp32[0], "weight")} in fp32 and keeps {in_fp32[1]} now')
    if saved.master != mode.master:
        rounded = " (rounded to 24 bits)" if mode.master == "bf24" else ""
        changed.append(f"master {saved.master} is now {mode.master}{rounded}")
    if states and saved.moment_dtype is not mode.moment_dtype:
        now = moments_name(mode.moment_dtype)
        rounded = "" if now == "fp32" else " (rounded to nearest)"
        changed.append(f"moments {moments_name(saved.moment_dtype)} are now {now}{rounded}")
    if not changed:
        return None
    return (
        f"loaded into another form than it was saved in: {', '.join(changed)}; losses from here on are not those that "
        "the run would have had"
    )


# -- checkpoint source ---------------------------------------------------------------------------------
#
# Weights and states of a checkpoint that `save_checkpoint` made, read without the model's code.


class CheckpointSource:
    """A checkpoint as source of weights. Changes nothing; implements `Source`.

    A damaged tensor is noticed when its last byte has been read.
    """

    def __init__(self, checkpoint: Path, queue: Queue) -> None:
        self._checkpoint = look(checkpoint, 0, 0, {})
        manifest = self._checkpoint.manifest
        self._sums: dict[tuple[int, str], int] = {}
        self._partitions = CheckpointPartitions(self._checkpoint, queue)
        self.description, self.about, self.step = manifest.layout, manifest.about, manifest.step
        self.frozen = manifest.frozen
        self.progress = self._checkpoint.progress
        self.buffers, self.client_state = self.progress.buffers, self._checkpoint.client_state

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        future = self._partitions.read(rank, unit, state, start, buffer, checksum=True)
        return Compared(future, partial(self._compare, rank, tensor_name(unit, state), start))

    def _compare(self, rank: int, name: str, start: int, nbytes: int, crc: int) -> None:
        # Reads of a tensor end in order, so their checksums are joined, and compared when all of it has been read.
        place, file = self._checkpoint.places[rank][name], states_file(rank)
        total = crc32c_joined(self._sums.pop((rank, name), 0), crc, nbytes)
        if start + nbytes < place.tensor.nbytes:
            self._sums[rank, name] = total
        elif total != self._checkpoint.manifest.files[file].sums[name]:
            path = str(self._checkpoint.folder / file)
            raise IoError(path, place.offset, place.tensor.nbytes, errno.EBADMSG, f"use {name},")

    def close(self) -> None:
        self._partitions.close()
