"""The norms that LAMB needs of each parameter, where it lies in parts on several ranks.

    step() ─► each rank: states and gradients, stretch by stretch ─► sums ─► added over the ranks ─► ratios ─► updates

The update worker takes part in no collective, so what a parameter's step depends on must be known before its update is
scheduled: the thread that calls `step()` reads all states for it, while no update is under way. The update reads them
again, and moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from offload import kernels
from offload.aio.protocols import Future
from offload.engine.distributed.agreement import Rounds
from offload.engine.gradients.accumulator import Gradients
from offload.engine.optim.torch_fallback import TorchSegment
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import partition_of
from offload.engine.optim.update_worker import Updater
from offload.engine.params.local_shards import Held
from offload.fileio.buffered_copy import flow
from offload.layout.placement import CHUNK
from offload.sizes import align_up
from offload.states import State


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """Elements [start, stop) of this rank's partition of a unit, all of one parameter."""

    unit: int
    parameter: int
    start: int
    stop: int
    step: kernels.LambStep


def with_ratios(
    updates: Sequence[UnitUpdate], held: Held, gradients: Gradients, updater: Updater, rounds: Rounds
) -> list[UnitUpdate]:
    """The updates with the ratio of each segment; every rank has updates of the same units.

    No update may be under way: the buffers are those of the update worker.
    """
    counts = [len(layout.segments) for layout in held.layouts]
    before = [2 * sum(counts[:unit]) for unit in range(len(counts))]
    sums = [0.0] * (2 * sum(counts))
    buffers = [lease.buffer for lease in updater.idle_tiles()]

    def begin(stretch: _Stretch, buffer: memoryview) -> list[Future]:
        return [
            future
            for state, memory in _cut(held, stretch, buffer).items()
            for future in _read(held, stretch, state, memory)
        ]

    def end(stretch: _Stretch, buffer: memoryview) -> tuple[Future, ...]:
        row = before[stretch.unit] + 2 * stretch.parameter
        for weight, direction in _sums(held, gradients, stretch, _cut(held, stretch, buffer)):
            sums[row] += weight  # block after block: no bit depends on how a parameter is cut
            sums[row + 1] += direction
        return ()

    stretches = (each for update in updates for each in _stretches(held, update, updater.tile_numel))
    flow(buffers, stretches, begin, end, lambda *_: None)
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


def _stretches(held: Held, update: UnitUpdate, numel: int) -> Iterator[_Stretch]:
    """What is weighed at a time: `numel` elements at most, and none beyond a border that a gradient on disk has."""
    for parameter, segment in zip(update.parameters, update.segments, strict=True):
        for chunk in range(segment.start, segment.stop, CHUNK):
            last = min(chunk + CHUNK, segment.stop)
            for start in range(chunk, last, numel):
                yield _Stretch(
                    unit=update.unit,
                    parameter=parameter,
                    start=start,
                    stop=min(start + numel, last),
                    step=_step(segment),
                )


def _cut(held: Held, stretch: _Stretch, buffer: memoryview) -> dict[State, memoryview]:
    """The part of a buffer that each state has, as in a tile."""
    found, offset = {}, 0
    for state, dtype in held.mode.states.items():
        end = offset + (stretch.stop - stretch.start) * dtype.itemsize
        found[state] = buffer[offset:end]
        offset = align_up(end)
    return found


def _read(held: Held, stretch: _Stretch, state: State, memory: memoryview) -> list[Future]:
    """Begin to copy a state, from its home where that is above DISK."""
    first = stretch.start * held.mode.states[state].itemsize
    home = held.home(stretch.unit, state)
    if home is None:
        return held.read(stretch.unit, state, first, memory, compare=False)
    part = home.tensor.view(torch.uint8)[first : first + len(memory)]
    held.device.copy(torch.frombuffer(memory, dtype=torch.uint8), part)
    return []


def _sums(
    held: Held, gradients: Gradients, stretch: _Stretch, found: dict[State, memoryview]
) -> list[tuple[float, float]]:
    """The sums of squares of weight and direction, of each block."""
    unit, parameter, start, stop = stretch.unit, stretch.parameter, stretch.start, stretch.stop
    states = {state: torch.frombuffer(found[state], dtype=dtype) for state, dtype in held.mode.states.items()}
    gradient = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    in_parameter = held.shares[unit][0].start + start - held.layouts[unit].segments[parameter].start
    gradients.look(unit, parameter, in_parameter, gradient)
    partition = partition_of(held.mode, states, gradient)
    (sums,) = kernels.lamb_moments(partition, [kernels.LambSegment(0, stop - start, stretch.step)])
    return [(weight, direction) for weight, direction in sums.tolist()]


def _step(segment: kernels.Segment | TorchSegment) -> kernels.LambStep:
    assert isinstance(segment.step, kernels.LambStep)
    return segment.step
