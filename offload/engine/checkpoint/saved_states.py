"""Reads of saved states from the partitions of all ranks, and the values of moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from offload.aio import DirectFile, aligned_empty
from offload.aio.protocols import Future, Pending, Queue
from offload.engine.checkpoint.files import depth_in, states_file, tensor_name
from offload.engine.checkpoint.resharding import Run, shards_of_scales
from offload.errors import IoError, StoreError
from offload.fileio import inner_opener
from offload.layout import optimizer_states
from offload.layout.flat_layout import Segment, SegmentShard, UnitLayout, segment_shards
from offload.layout.modes import MOMENT_BLOCK, Mode
from offload.states import State

if TYPE_CHECKING:
    from offload.engine.checkpoint.load import FoundCheckpoint


class FoundStates(Protocol):
    """States that were found and fit this engine: those of a checkpoint, or of a run's swap files."""

    @property
    def mode(self) -> Mode:
        """Mode in which the states were saved."""
        ...

    @property
    def saved(self) -> Mapping[str, tuple[int, Segment]]:
        """Unit and segment of each parameter, by name."""
        ...

    def open(self, queue: Queue) -> StateReader:
        """Opens the files of states; the caller closes the result."""
        ...


class StateReader(Protocol):
    """Reads of saved states, whatever their files are."""

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Pending]:
        """Begins to read the elements of a run; see `SavedStates.read`."""
        ...

    def scales(self, unit: int) -> torch.Tensor:
        """Returns the scales of moments in 8 bits; see `SavedStates.scales`."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


class PartitionReader(Protocol):
    """Reads of the partitions of all ranks that saved."""

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        """Begins to fill `buffer` from byte `start` of a rank's partition on."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


def open_states(found: FoundCheckpoint) -> list[DirectFile]:
    """Opens every rank's file of states; the caller closes them. Raises `StoreError` if a file cannot be opened."""
    files: list[DirectFile] = []
    opener = inner_opener(depth_in(found.folder))
    try:
        for rank in range(found.manifest.world_size):
            files.append(DirectFile(found.folder / states_file(rank), writable=False, opener=opener))
    except IoError as error:
        for file in files:
            file.close()
        raise StoreError(f"the checkpoint {found.folder} cannot be read: {error}") from error
    return files


class CheckpointPartitions:
    """The partitions in the files of a checkpoint, open until `close`; implements `PartitionReader`."""

    def __init__(self, found: FoundCheckpoint, queue: Queue) -> None:
        self._places, self._queue = found.places, queue
        self._files = open_states(found)

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Future:
        """Begins to fill `buffer` from byte `start` of a rank's partition on."""
        place = self._places[rank][tensor_name(unit, state)]
        return self._queue.read(self._files[rank], place.offset + start, buffer)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()


class SavedStates:
    """The states of the partitions of all ranks that saved; implements `StateReader`.

    Args:
        layouts: Units of the ranks that saved.
        mode: Their mode.
        world_size: Their number.
        partitions: Reads their partitions; closed by `close`.
    """

    def __init__(self, layouts: Sequence[UnitLayout], mode: Mode, world_size: int, partitions: PartitionReader) -> None:
        self._layouts, self._mode, self._world_size = layouts, mode, world_size
        self._partitions = partitions
        self._unit, self._scales = -1, torch.empty(0, dtype=torch.float32, device="cpu")

    def close(self) -> None:
        """Closes the files."""
        self._partitions.close()

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Pending]:
        """Begins to read the elements of a run, from each rank's partition that contains some of them.

        Args:
            run: The run; the saved states contain it.
            state: The state. Runs of PACKED and SCALES are counted in values of the state.
            memory: Memory of the state for the whole chunk.
            start: Element of `memory` at which the run begins.
        """
        source = run.saved
        assert source is not None
        itemsize = self._mode.states[state].itemsize
        # `segment_shards` finds the partitions of a segment's elements. This segment is made up, with those of the run.
        segment = Segment("", (), source.start, run.stop - run.start, source.trainable)
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

        A run of elements may begin within a block, so its scales are not read with its codes, but those of the whole
        unit at once: a byte for each moment of 64 elements.
        """
        if unit != self._unit:
            self._unit, self._scales = unit, self._read_scales(unit)
        return self._scales

    def _read_scales(self, unit: int) -> torch.Tensor:
        """Reads the scales of a unit. Those of each rank are padded to whole pages."""
        own = len(self._layouts[unit].trainable(0, self._world_size))
        used = len(self._mode.part(State.SCALES, 0, own))
        parts = []
        for rank in range(self._world_size):
            buffer = aligned_empty(len(self._mode.padded_part(State.SCALES, 0, own)) * torch.float32.itemsize)
            self._partitions.read(rank, unit, State.SCALES, 0, buffer).wait()
            parts.append(torch.frombuffer(buffer, dtype=torch.float32)[:used])
        return torch.cat(parts)


class SavedMoments(NamedTuple):
    """Elements of a parameter's moments in a checkpoint."""

    mode: Mode
    states: Mapping[State, torch.Tensor]
    """(numel,) of each moment."""
    scales: torch.Tensor | None
    """Those of the whole unit; None if the moments are not in 8 bits."""
    position: int
    """First element, counted in the unit."""

    def values(self, state: State) -> torch.Tensor:
        """Returns the values of a moment."""
        found = {state: self.states[state]}
        if self.scales is not None:
            block = self.position // MOMENT_BLOCK
            found[State.SCALES] = self.scales[block * len(self.mode.moments) :]
        return optimizer_states.read(self.mode, found, state, self.position % MOMENT_BLOCK)
