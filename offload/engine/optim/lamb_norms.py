"""Norms that LAMB needs of each parameter, if its shards are on several ranks.

    step() ─► each rank: states and gradients, chunk by chunk ─► sums ─► added over the ranks ─► ratios ─► updates

The update worker takes part in no collective, so the ratios must be known before an update is scheduled. The thread
that calls `step()` therefore reads all states while no update is in flight. The update reads the states again, and
moves the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from offload import kernels
from offload.aio.protocols import Future
from offload.distributed.agreement import Agreement
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.optim.matrices.steps import MatrixSegment
from offload.engine.optim.torch_fallback import TorchSegment
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import partition_of
from offload.engine.optim.update_worker import UpdateWorker
from offload.engine.params.local_shards import LocalShards
from offload.fileio.buffered_copy import flow
from offload.layout.placement import CHUNK
from offload.sizes import align_up
from offload.states import State


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Elements [start, stop) of this rank's partition of a unit, all of one parameter."""

    unit: int
    parameter: int
    start: int
    stop: int
    step: kernels.LambStep
    noise: kernels.Noise | None


def with_ratios(
    updates: Sequence[UnitUpdate],
    shards: LocalShards,
    gradients: GradientAccumulator,
    updater: UpdateWorker,
    rounds: Agreement,
) -> list[UnitUpdate]:
    """Returns the updates with the trust ratio of each segment. Collective: every rank updates the same units.

    No update may be in flight: the tiles of the update worker serve as buffers here.

    Args:
        updates: updates of this rank, which may lack segments that are on other ranks.
        shards: this rank's partitions, which are only read.
        gradients: the gradients of the step.
        updater: the update worker, which lends its tiles.
        rounds: adds numbers over all ranks.
    """
    # Two sums for each parameter of each unit, weight and direction, at the same index on every rank, so that a rank
    # without a shard of a parameter adds zeros.
    counts = [len(layout.segments) for layout in shards.layouts]
    before = [2 * sum(counts[:unit]) for unit in range(len(counts))]
    sums = [0.0] * (2 * sum(counts))
    buffers = [buffer.buffer for buffer in updater.idle_tiles()]

    def begin(chunk: _Chunk, buffer: memoryview) -> list[Future]:
        return [
            future
            for state, memory in _cut(shards, chunk, buffer).items()
            for future in _read(shards, chunk, state, memory)
        ]

    def end(chunk: _Chunk, buffer: memoryview) -> tuple[Future, ...]:
        row = before[chunk.unit] + 2 * chunk.parameter
        for weight, direction in _sums(shards, gradients, chunk, _cut(shards, chunk, buffer)):
            sums[row] += weight  # one block after another: no bit depends on the size of the chunks
            sums[row + 1] += direction
        return ()

    # A generator: the chunks of a large model are many.
    chunks = (each for update in updates for each in _chunks(shards, update, updater.tile_numel))
    flow(buffers, chunks, begin, end, lambda *_: None)
    # float64, as the kernel's own sums are.
    total = torch.tensor(rounds.add_up(sums), dtype=torch.float64, device="cpu").view(-1, 1, 2)
    return [
        dataclasses.replace(
            update,
            ratios=tuple(
                kernels.lamb_ratio(_step(segment), [total[before[update.unit] // 2 + parameter]])
                for parameter, segment in zip(update.parameters, update.segments, strict=True)
            ),
        )
        for update in updates
    ]


def _chunks(shards: LocalShards, update: UnitUpdate, numel: int) -> Iterator[_Chunk]:
    """Yields the chunks of an update: at most `numel` elements, within one `CHUNK` of a parameter.

    Windows of a gradient on disk may begin at any `CHUNK` border of a parameter, so no chunk crosses one.
    """
    for parameter, segment in zip(update.parameters, update.segments, strict=True):
        for chunk in range(segment.start, segment.stop, CHUNK):
            last = min(chunk + CHUNK, segment.stop)
            for start in range(chunk, last, numel):
                yield _Chunk(
                    unit=update.unit,
                    parameter=parameter,
                    start=start,
                    stop=min(start + numel, last),
                    step=_step(segment),
                    noise=_noise(segment, start),
                )


def _cut(shards: LocalShards, chunk: _Chunk, buffer: memoryview) -> dict[State, memoryview]:
    """Returns the memory of each state in a buffer, laid out as in a tile."""
    memory, offset = {}, 0
    for state, dtype in shards.mode.states.items():
        end = offset + len(shards.mode.part(state, chunk.start, chunk.stop)) * dtype.itemsize
        memory[state] = buffer[offset:end]
        offset = align_up(end)
    return memory


def _read(shards: LocalShards, chunk: _Chunk, state: State, memory: memoryview) -> list[Future]:
    """Starts to copy a state into `memory`: from memory at once, if its tier is above DISK, else from the store."""
    first = shards.mode.part(state, chunk.start, chunk.stop).start * shards.mode.states[state].itemsize
    resident = shards.resident_of(chunk.unit, state)
    if resident is None:
        return shards.read(chunk.unit, state, first, memory)
    part = resident.tensor.view(torch.uint8)[first : first + len(memory)]
    shards.device.copy(torch.frombuffer(memory, dtype=torch.uint8), part)
    return []


def _sums(
    shards: LocalShards, gradients: GradientAccumulator, chunk: _Chunk, memory: dict[State, memoryview]
) -> list[tuple[float, float]]:
    """Returns the sums of squares of weight and direction, one pair for each block of the chunk.

    Args:
        shards: this rank's partitions.
        gradients: the gradients of the step.
        chunk: the chunk.
        memory: memory of each state, filled by `_read`; its moments are overwritten.
    """
    unit, parameter, start, stop = chunk.unit, chunk.parameter, chunk.start, chunk.stop
    states = {state: torch.frombuffer(memory[state], dtype=dtype) for state, dtype in shards.mode.states.items()}
    gradient = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    in_parameter = shards.shares[unit][0].start + start - shards.layouts[unit].segments[parameter].start
    gradients.look(unit, parameter, in_parameter, gradient)
    # The kernel updates the moments too, in this buffer only: the store and resident states are unchanged.
    partition = partition_of(shards.mode, states, gradient)
    (sums,) = kernels.lamb_moments(partition, [kernels.LambSegment(0, stop - start, chunk.step, chunk.noise)])
    return [(weight, direction) for weight, direction in sums.tolist()]


def _noise(segment: kernels.Segment | TorchSegment | MatrixSegment, start: int) -> kernels.Noise | None:
    """Returns the noise of a segment from element `start` of the partition on."""
    assert isinstance(segment, kernels.Segment)
    return segment.noise and segment.noise.after(start - segment.start)


def _step(segment: kernels.Segment | TorchSegment | MatrixSegment) -> kernels.LambStep:
    """Returns the step of a segment, which is one of LAMB."""
    assert isinstance(segment.step, kernels.LambStep)
    return segment.step
