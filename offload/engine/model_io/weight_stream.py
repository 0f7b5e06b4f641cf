"""Stream of weights from a source into files, through a few buffers.

    read ahead ──► a chunk ──► joined and cast on the kernels' threads ──► bytes in the order of a file ──► write behind

Reads of later chunks and writes of earlier ones are in flight while a chunk is converted, so the drive does not wait
for the processor. The bytes of a chunk are converted to where O_DIRECT can write them: to an address that differs from
their offset in the file by whole pages. The memory in use does not depend on the size of a unit or a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from offload.aio import aligned_empty
from offload.aio.protocols import Pending
from offload.engine.model_io.block_chunks import BlockChunk, BlockValues, block_chunks, block_nbytes, reads
from offload.engine.model_io.weight_plan import Place, Plan
from offload.engine.model_io.weight_source import Reading, Source
from offload.fileio.buffered_copy import WriteBehind, flow
from offload.layout.optimizer_states import join, master_sources
from offload.sizes import KIB, PAGE
from offload.states import State

_CHUNK_NUMEL = 1 << 20
"""Elements read at a time: 2 MiB in 16 bits, 4 MiB in fp32, of which the master of a bf16 weight takes as much."""
_READS, _WRITES = 12, 12
"""Chunks that are read ahead, and that are written behind: at most 4 MiB each."""
_GAPS = 64 * KIB
"""Bytes of a buffer that may stay unused in order to begin a run where O_DIRECT can write it."""


class Sink(Protocol):
    """Protocol of a receiver of bytes of files."""

    def put(self, file: str, offset: int, data: memoryview) -> Sequence[Pending]:
        """Begins to write bytes of a file.

        Args:
            file: Name of the file.
            offset: First byte in the file.
            data: In use until the returned writes have ended.

        Returns:
            The writes to wait for.
        """
        ...


class Chunk(NamedTuple):
    """Elements of a partition that are read and written together."""

    rank: int
    unit: int
    start: int
    """First element, in the unit's layout."""
    position: int
    """First element, in the partition."""
    numel: int
    states: tuple[State, ...]
    """States that are read: the weight alone, or those that hold the master weight."""


class Piece(NamedTuple):
    """Elements [start, stop) of a chunk that belong to one parameter, and the byte of the buffer that they go to."""

    start: int
    stop: int
    at: int


class Run(NamedTuple):
    """Bytes of a buffer that are consecutive in a file too."""

    place: Place
    at: int
    nbytes: int


def stream(source: Source, plan: Plan, sink: Sink, progress: Callable[[int], None] = lambda _: None) -> int:
    """Reads all weights, converts them to the dtype of the plan, and passes the bytes of each file to `sink`.

    Every read and write has ended when this returns or raises.

    Args:
        source: The weights.
        plan: Made by `make_plan` for this source.
        sink: Receives the bytes, on the calling thread.
        progress: Called with the number of bytes after each read.

    Returns:
        The number of finite values that became infinite in the dtype of the plan.

    Raises:
        IoError: If bytes cannot be read or written, or are damaged.
    """
    beyond, places = 0, plan.places()
    # At most 4 bytes are read for an element.
    buffers = [aligned_empty(_CHUNK_NUMEL * 4) for _ in range(_READS)]
    rooms = [aligned_empty(_CHUNK_NUMEL * plan.dtype.itemsize + _GAPS) for _ in range(_WRITES)]

    def begin(chunk: Chunk, buffer: memoryview) -> Iterator[Reading]:
        for state, memory in _regions(plan, chunk, buffer).items():
            start = chunk.position * plan.mode.weights[state].itemsize
            yield source.read(chunk.rank, chunk.unit, state, start, memory)

    with WriteBehind(rooms) as behind:

        def end(chunk: Chunk, buffer: memoryview) -> tuple[()]:
            nonlocal beyond
            regions = _regions(plan, chunk, buffer)
            for memory in regions.values():
                progress(len(memory))
            room, writes = behind.take()
            pieces, runs = arranged(plan, places, chunk)
            beyond += _convert(plan, regions, pieces, room)
            for run in runs:
                writes += sink.put(*run.place, room[run.at : run.at + run.nbytes])
            return ()

        def begin_blocks(chunk: BlockChunk, buffer: memoryview) -> Iterator[Reading]:
            for shard, memory in reads(plan, chunk, buffer):
                start = shard.start * plan.mode.weight_dtype.itemsize
                yield source.read(shard.rank, chunk.unit, State.WEIGHT, start, memory)

        def end_blocks(chunk: BlockChunk, buffer: memoryview) -> tuple[()]:
            nonlocal beyond
            progress(chunk.numel * plan.mode.weight_dtype.itemsize)
            room, writes = behind.take()
            theirs, data = values.convert(chunk, buffer, room)
            beyond += values.infinite(chunk)
            for place in theirs:
                writes += sink.put(*place, data)
            return ()

        flow(buffers, chunks(plan), begin, end, lambda *_: None)
        values = BlockValues(plan, places)
        flow(buffers, block_chunks(plan), begin_blocks, end_blocks, lambda *_: None)
    return beyond


# -- decisions ----------------------------------------------------------------------------------------


def read_nbytes(plan: Plan) -> int:
    """Returns the bytes that an export reads."""
    whole = sum(chunk.numel * plan.mode.weights[state].itemsize for chunk in chunks(plan) for state in chunk.states)
    return whole + block_nbytes(plan)


def chunks(plan: Plan) -> Iterator[Chunk]:
    """Yields the chunks of all partitions, unit by unit and rank by rank, in order within each partition.

    Weights that are stored as blocks are left out: they come last in their partitions, and `block_chunks` has them.
    """
    weight: tuple[State, ...] = (State.WEIGHT,)
    # In the model's own dtype the weights are written as they are; for any other dtype the masters are rounded once.
    wanted = weight if plan.dtype is plan.mode.weight_dtype else master_sources(plan.mode.weights)
    for unit, layout in enumerate(plan.layouts):
        for rank in range(plan.world_size):
            position = 0
            trainable, frozen = layout.trainable(rank, plan.world_size), layout.frozen(rank, plan.world_size)
            frozen = range(frozen.start, max(frozen.start, min(frozen.stop, layout.blocks_start)))
            for share, states in ((trainable, wanted), (frozen if plan.frozen else range(0), weight)):
                for start in range(share.start, share.stop, _CHUNK_NUMEL):
                    numel = min(_CHUNK_NUMEL, share.stop - start)
                    yield Chunk(rank, unit, start, position, numel, states)
                    position += numel


def arranged(plan: Plan, places: Mapping[str, Place], chunk: Chunk) -> tuple[list[Piece], list[Run]]:
    """Returns where the parameters of a chunk go in a buffer, and which bytes of the buffer go where in the files.

    Parameters that are neighbours in a file become one run. A run begins at a byte of the buffer that differs from its
    offset in the file by whole pages, as far as `_GAPS` goes; behind that it is written through the page cache. A
    parameter that is written under several names has several runs of the same bytes.

    Args:
        plan: The plan.
        places: `plan.places()`.
        chunk: The chunk.
    """
    itemsize, gaps = plan.dtype.itemsize, 0
    pieces: list[Piece] = []
    runs: list[Run] = []
    again: list[Run] = []
    for segment in plan.layouts[chunk.unit].segments:
        start, stop = max(chunk.start, segment.start), min(chunk.start + chunk.numel, segment.stop)
        # Elements of the parameter from here on: what is one tensor of the files may be cut of it.
        first = segment.first + start - segment.start
        ranges: dict[tuple[int, int], list[Place]] = {}
        for cut in plan.cuts.get(segment.name, ()) if start < stop else ():
            begin, end = max(first, cut.start), min(first + stop - start, cut.stop)
            if begin < end:
                file, offset = places[cut.name]
                ranges.setdefault((begin, end), []).append(Place(file, offset + (begin - cut.start) * itemsize))
        for (begin, end), (place, *others) in sorted(ranges.items()):
            nbytes = (end - begin) * itemsize
            at = runs[-1].at + runs[-1].nbytes if runs else 0
            if runs and place == runs[-1].place._replace(offset=runs[-1].place.offset + runs[-1].nbytes):
                runs[-1] = runs[-1]._replace(nbytes=runs[-1].nbytes + nbytes)
            else:
                gap = (place.offset - at) % PAGE
                if gaps + gap <= _GAPS:
                    at, gaps = at + gap, gaps + gap
                runs.append(Run(place, at, nbytes))
            position = start - chunk.start + begin - first
            pieces.append(Piece(position, position + end - begin, at))
            again += [Run(other, at, nbytes) for other in others]
    return pieces, runs + again


# -- bytes --------------------------------------------------------------------------------------------


def _regions(plan: Plan, chunk: Chunk, buffer: memoryview) -> dict[State, memoryview]:
    """Returns the part of a buffer that receives each state of a chunk."""
    found: dict[State, memoryview] = {}
    end = 0
    for state in chunk.states:
        start, end = end, end + chunk.numel * plan.mode.weights[state].itemsize
        found[state] = buffer[start:end]
    return found


def _convert(plan: Plan, regions: Mapping[State, memoryview], pieces: Sequence[Piece], room: memoryview) -> int:
    """Writes the weights of a chunk into `room`, in the dtype of the plan.

    Args:
        plan: The plan.
        regions: Bytes of each state of the chunk.
        pieces: The parameters of the chunk.
        room: Receives the weights.

    Returns:
        The number of finite values that became infinite.
    """
    states = {state: torch.frombuffer(memory, dtype=plan.mode.weights[state]) for state, memory in regions.items()}
    beyond = 0
    for piece in pieces:
        numel = piece.stop - piece.start
        out = torch.frombuffer(room, dtype=plan.dtype, count=numel, offset=piece.at)
        values = {state: tensor[piece.start : piece.stop] for state, tensor in states.items()}
        if tuple(values) == (State.WEIGHT,):
            master = values[State.WEIGHT]
        else:
            # Joined where the file's bytes are collected, if those are fp32.
            master = join(values, out if plan.dtype is torch.float32 else None)
        if master is not out:
            out.copy_(master)
        # bf16 has the range of fp32, so only fp16 is checked.
        if plan.dtype is torch.float16:
            beyond += int((out.isinf() & ~master.isinf()).sum())
    return beyond
