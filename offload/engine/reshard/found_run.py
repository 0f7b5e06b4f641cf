"""The last commit of a run as a source of states for other ranks, and this rank's partitions that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.aio.protocols import Future, Queue
from offload.engine.checkpoint.saved_states import SavedStates
from offload.engine.model_io.weight_source import Reading, StoreSource
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.modes import Mode
from offload.states import State
from offload.swapper.store import Store, StoreSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """The run of another number of ranks, whose commit fits this model; implements `FoundStates`."""

    source: StoreSource
    specs: Sequence[StoreSpec]
    """Contents of the store of each rank of its first replica."""
    layouts: tuple[UnitLayout, ...]
    mode: Mode
    saved: Mapping[str, tuple[int, Segment]]
    written: Sequence[bytes | None]
    """Packed counts of the bytes that each rank of the run has written."""

    @property
    def world_size(self) -> int:
        """Number of shards of each unit."""
        return len(self.specs)

    def open(self, queue: Queue) -> SavedStates:
        """Returns the states; `queue` is that of the source already."""
        return SavedStates(self.layouts, self.mode, self.world_size, self.source)

    def compare(self, rank: int, size: int) -> None:
        """Compares a share of all bytes of the commit with their checksums; `size` ranks compare one share each.

        Raises:
            IoError: if bytes are damaged or cannot be read.
        """

        def begin(chunk: _Chunk, buffer: memoryview) -> Sequence[Reading]:
            read = self.source.read(chunk.rank, chunk.unit, chunk.state, chunk.start, buffer[: chunk.nbytes])
            return [read]

        flow(flow_buffers(), self._chunks(rank, size), begin, lambda *_: (), lambda *_: None)

    def _chunks(self, rank: int, size: int) -> Iterator[_Chunk]:
        """Yields the chunks of every `size`-th partition from number `rank` on."""
        partitions = [
            (each, unit, state, nbytes)
            for each, spec in enumerate(self.specs)
            for unit, row in enumerate(spec.partitions)
            for state, nbytes in row.items()
        ]
        # In the order of the bytes, as `StoreSource` compares them.
        for each, unit, state, nbytes in partitions[rank::size]:
            for start in range(0, nbytes, BUFFER_NBYTES):
                yield _Chunk(each, unit, state, start, min(BUFFER_NBYTES, nbytes - start))


class _Chunk(NamedTuple):
    """Bytes of a partition that are read together."""

    rank: int
    unit: int
    state: State
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShards:
    """This rank's partitions in a store without a commit, before an engine has any memory; see `FilledShards`."""

    mode: Mode
    layouts: tuple[UnitLayout, ...]
    shares: Sequence[tuple[range, range]]
    store: Store

    def states(self, unit: int) -> dict[State, int]:
        """Returns the bytes of each partition of `unit`."""
        return dict(self.store.spec.partitions[unit])

    def stored(self, unit: int, state: State) -> bool:
        """Returns True if the store keeps this partition."""
        return self.store.keeps(unit, state)

    def read(self, unit: int, state: State, start: int, buffer: memoryview) -> list[Future]:
        """Begins to fill `buffer` with the newest bytes of a partition."""
        return [self.store.read(unit, state, self.store.newest[unit], start, buffer)]

    def put(self, unit: int, state: State, start: int, buffer: memoryview) -> None:
        """Does nothing: no partition is in memory."""

    def mark_rewritten(self) -> None:
        """Does nothing: there is no commit whose bytes could be overwritten."""
