"""Reads of a checkpoint's states from the files of all ranks, and the values of its moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from offload.aio import DirectFile, aligned_empty
from offload.aio.protocols import Future, Pending, Queue
from offload.engine.checkpoint.files import states_file, tensor_name
from offload.engine.checkpoint.resharding import Run, shards_of_scales
from offload.errors import IoError, StoreError
from offload.layout.flat_layout import Segment, SegmentShard, segment_shards
from offload.layout.optimizers import moment_values
from offload.states import State
from offload.swapper.modes import MOMENT_BLOCK, Mode

if TYPE_CHECKING:
    from offload.engine.checkpoint.load import FoundCheckpoint


class StateReader(Protocol):
    """Reads of a checkpoint's states, whatever its files are."""

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Pending]:
        """Begins to read the elements of a run; see `SavedStates.read`."""
        ...

    def scales(self, unit: int) -> torch.Tensor:
        """Returns the scales of moments in 8 bits; see `SavedStates.scales`."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


def open_states(found: FoundCheckpoint) -> list[DirectFile]:
    """Opens every rank's file of states; the caller closes them. Raises `StoreError` if a file cannot be opened."""
    files: list[DirectFile] = []
    try:
        for rank in range(found.manifest.world_size):
            files.append(DirectFile(found.folder / states_file(rank), writable=False))
    except IoError as error:
        for file in files:
            file.close()
        raise StoreError(f"the checkpoint {found.folder} cannot be read: {error}") from error
    return files


class SavedStates:
    """The files of a checkpoint's states, open until `close`; implements `StateReader`."""

    def __init__(self, found: FoundCheckpoint, queue: Queue) -> None:
        self._found, self._queue = found, queue
        self._files = open_states(found)
        self._unit, self._scales = -1, torch.empty(0, device="cpu")

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Future]:
        """Begins to read the elements of a run, from each rank's file that contains some of them.

        Args:
            run: The run; the checkpoint contains it.
            state: The state. Runs of PACKED and SCALES are counted in values of the state.
            memory: Memory of the state for the whole chunk.
            start: Element of `memory` at which the run begins.
        """
        found, source = self._found, run.saved
        assert source is not None
        itemsize = found.mode.states[state].itemsize
        # `segment_shards` finds the partitions of a segment's elements. This segment is made up, with those of the run.
        segment = Segment("", (), source.start, run.stop - run.start, source.trainable)
        name = tensor_name(source.unit, state)
        layout, size = found.layouts[source.unit], found.manifest.world_size
        if state is State.PACKED:  # of one rank, the home of the parameter
            shards = iter([SegmentShard(source.rank, 0, source.start, segment.numel)])
        elif state is State.SCALES:
            shards = shards_of_scales(layout, size, segment, found.mode)
        else:
            shards = segment_shards(layout, size, segment)
        for chunk in shards:
            first = (start + chunk.position) * itemsize
            yield self._queue.read(
                self._files[chunk.rank],
                found.places[chunk.rank][name].offset + chunk.start * itemsize,
                memory[first : first + chunk.numel * itemsize],
            )

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
        found, name = self._found, tensor_name(unit, State.SCALES)
        own = len(found.layouts[unit].trainable(0, found.manifest.world_size))
        parts = []
        for file, places in zip(self._files, found.places, strict=True):
            place = places[name]
            buffer = aligned_empty(place.tensor.nbytes)
            self._queue.read(file, place.offset, buffer).wait()
            parts.append(torch.frombuffer(buffer, dtype=torch.float32)[: len(found.mode.part(State.SCALES, 0, own))])
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
        return moment_values.read(self.mode, found, state, self.position % MOMENT_BLOCK)
