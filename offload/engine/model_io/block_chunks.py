"""Chunks of frozen weights that are stored as blocks, for an export: the files receive their values.

A chunk is whole blocks of one parameter, on one rank or on several. Chunks are yielded in the order of the partitions,
with the padding between the parameters, because a source compares bytes with their checksums in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from offload.aio import aligned_empty
from offload.engine.model_io.weight_plan import Place, Plan
from offload.kernels.blocks import BLOCK_FORMATS, dequantize
from offload.layout.flat_layout import Segment, SegmentShard, segment_shards
from offload.sizes import PAGE
from offload.states import State

VALUES = 1 << 20
"""Values of a chunk: a multiple of the values of two blocks of any format, whose bytes are whole elements."""


class BlockChunk(NamedTuple):
    """Blocks of one parameter that are read together."""

    unit: int
    segment: Segment
    first: int
    """First value, counted in the parameter."""
    stop: int
    """End of the values."""
    shards: tuple[SegmentShard, ...]
    """Elements of the partitions that contain the blocks, and the padding behind the last block of the parameter."""

    @property
    def numel(self) -> int:
        """Elements that are read."""
        return sum(shard.numel for shard in self.shards)


def block_chunks(plan: Plan) -> Iterator[BlockChunk]:
    """Yields the chunks of all parameters that are stored as blocks, unit by unit; none if they are left out."""
    itemsize = plan.mode.weight_dtype.itemsize
    for unit, layout in enumerate(plan.layouts) if plan.frozen else ():
        blocks = [segment for segment in layout.segments if segment.form]
        for segment, stop in zip(blocks, [*(each.start for each in blocks[1:]), layout.numel], strict=False):
            form = BLOCK_FORMATS[segment.form]
            if segment.name not in plan.cuts:  # the model's class leaves it out
                continue
            for first in range(0, segment.value_numel, VALUES):
                last = min(first + VALUES, segment.value_numel)
                start = form.stored_nbytes(first) // itemsize
                end = form.stored_nbytes(last) // itemsize if last < segment.value_numel else stop - segment.start
                shards = segment_shards(layout, plan.world_size, segment, start, end)
                yield BlockChunk(unit, segment, first, last, tuple(shards))


def reads(plan: Plan, chunk: BlockChunk, buffer: memoryview) -> Iterator[tuple[SegmentShard, memoryview]]:
    """Yields each shard of a chunk with the part of `buffer` that receives its bytes."""
    itemsize, at = plan.mode.weight_dtype.itemsize, 0
    for shard in chunk.shards:
        yield shard, buffer[at : at + shard.numel * itemsize]
        at += shard.numel * itemsize


class BlockValues:
    """Converter of chunks to values in the dtype of a plan; owns the memory of one chunk of values."""

    def __init__(self, plan: Plan, places: Mapping[str, Place]) -> None:
        """Allocates memory for a chunk.

        Args:
            plan: The plan.
            places: `plan.places()`.
        """
        self._plan, self._places = plan, places
        self._values = torch.frombuffer(aligned_empty(VALUES * 4), dtype=plan.mode.weight_dtype)

    def convert(self, chunk: BlockChunk, buffer: memoryview, room: memoryview) -> tuple[list[Place], memoryview]:
        """Writes the values of a chunk into `room`.

        Args:
            chunk: The chunk.
            buffer: Its bytes.
            room: Receives the values, from a byte on that differs from their offset in the first file by whole pages.

        Returns:
            The places in the files, and the part of `room` that goes to each of them.
        """
        plan, form, numel = self._plan, BLOCK_FORMATS[chunk.segment.form], chunk.stop - chunk.first
        skipped = (chunk.segment.first + chunk.first) * plan.dtype.itemsize
        places = [
            Place(file, offset + skipped)
            for file, offset in (self._places[cut.name] for cut in plan.cuts[chunk.segment.name])
        ]
        at = places[0].offset % PAGE
        blocks = torch.frombuffer(buffer, dtype=torch.uint8, count=form.stored_nbytes(numel))
        dequantize(form, blocks, self._values[:numel])
        nbytes = numel * plan.dtype.itemsize
        torch.frombuffer(room, dtype=plan.dtype, count=numel, offset=at).copy_(self._values[:numel])
        return places, room[at : at + nbytes]

    def infinite(self, chunk: BlockChunk) -> int:
        """Returns the number of values of the last chunk that are finite, and infinite in fp16 if that is written."""
        if self._plan.dtype is not torch.float16:
            return 0
        values = self._values[: chunk.stop - chunk.first]
        return int((values.half().isinf() & ~values.isinf()).sum())


def block_nbytes(plan: Plan) -> int:
    """Returns the bytes of all chunks."""
    return sum(chunk.numel for chunk in block_chunks(plan)) * plan.mode.weights[State.WEIGHT].itemsize
