"""LAMB over tiles: a step needs the ratio of two norms over the entire parameter, and a tile may hold a part of it.

    a unit of one tile    moments and norms ─► weights
    a larger unit         first pass: moments and norms of every tile, moments dropped
                          second pass: moments again ─► weights
    several ranks         the norms are known before (`LambRule.complete`): moments ─► weights

Sums of squares are taken over blocks whose borders do not depend on the tiles, and are added in order. The bits
therefore do not depend on the division into tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from offload import kernels
from offload.aio.protocols import Future
from offload.engine.gradients import GradientAccumulator
from offload.engine.optimizer import Rule, SharedStep
from offload.engine.shards import LocalShards
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.fileio.buffered_copy import flow
from offload.kernels import LambSegment, LambStep, Partition
from offload.kernels.lamb import BLOCK
from offload.layout.modes import LAMB, Mode
from offload.layout.placement import CHUNK
from offload.optimizers.fused import InOnePass, Undivided, betas, floats, partition_of, segments_in, with_steps
from offload.sizes import align_up
from offload.states import State

# -- rule ----------------------------------------------------------------------------------------------


class RatedStep(NamedTuple):
    """A step of LAMB."""

    step: LambStep
    ratio: float | None = None
    """Trust ratio, if the sums of other ranks were needed; None if this rank computes it."""


class LambRule(Rule):
    """LAMB. The elements of a parameter's norms may be on several ranks."""

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> RatedStep:
        return RatedStep(
            LambStep(
                **floats(group, "lr", "eps", "weight_decay"),
                **betas(group),
                step=count,
                grad_scale=grad_scale,
                min_ratio=float(group["min_coeff"]),
                max_ratio=float(group["max_coeff"]),
            )
        )

    def complete(self, updates: list[UnitUpdate], step: SharedStep) -> list[UnitUpdate]:
        """Returns the updates with the trust ratio of each segment, since a rank holds only a part of a parameter.

        The update worker takes part in no collective, so the ratios must be known before an update is scheduled. The
        thread that calls `step()` therefore reads all states while no update is in flight. The update reads the states
        again, and moves the weights.
        """
        # Two sums for each parameter of each unit, weight and direction, at the same index on every rank. So a rank
        # without a shard of a parameter adds zeros.
        shards = step.shards
        counts = [len(layout.segments) for layout in shards.layouts]
        before = [2 * sum(counts[:unit]) for unit in range(len(counts))]
        sums = [0.0] * (2 * sum(counts))
        buffers = [buffer.buffer for buffer in step.updater.idle_tiles()]

        def begin(chunk: _LambChunk, buffer: memoryview) -> list[Future]:
            return [
                future
                for state, memory in _cut(shards, chunk, buffer).items()
                for future in _read(shards, chunk, state, memory)
            ]

        def end(chunk: _LambChunk, buffer: memoryview) -> tuple[Future, ...]:
            row = before[chunk.unit] + 2 * chunk.parameter
            for weight, direction in _sums(shards, step.gradients, chunk, _cut(shards, chunk, buffer)):
                sums[row] += weight  # one block after another: no bit depends on the size of the chunks
                sums[row + 1] += direction
            return ()

        # A generator: the chunks of a large model are many.
        chunks = (chunk for update in updates for chunk in _chunks(update, step.updater.tile_numel))
        flow(buffers, chunks, begin, end, lambda *_: None)
        # float64, as the kernel's own sums are.
        total = torch.tensor(step.agreement.add_up(sums), dtype=torch.float64, device="cpu").view(-1, 1, 2)

        def rated(unit: int) -> Callable[[ParameterStep], RatedStep]:
            def step(segment: ParameterStep) -> RatedStep:
                own: LambStep = segment.step.step
                return RatedStep(own, kernels.lamb_ratio(own, [total[before[unit] // 2 + segment.parameter]]))

            return step

        return [with_steps(update, rated(update.unit)) for update in updates]

    def strategy(self, setting: UpdateSetting) -> LambUpdates:
        return LambUpdates(mode=setting.mode)


LAMB_RULE = LambRule(name=LAMB, scheduled=("lr", "betas", "eps", "weight_decay"), fixed=("min_coeff", "max_coeff"))

# -- updates -------------------------------------------------------------------------------------------


class LambUpdates(Undivided):
    """Strategy of LAMB."""

    def __init__(self, *, mode: Mode) -> None:
        self._mode = mode

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return self._mode.padded_part(state, start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        # One tile is computed at once, so its weights can follow its norms without a second read.
        rated = any(segment.step.ratio is not None for segment in update.segments)
        return _LambSteps(update, self._mode, 1 if rated or update.numel <= tile_numel else 2)


class _LambSteps(InOnePass):
    """Steps of one unit. The first of two passes only computes norms, on copies of the moments."""

    def __init__(self, update: UnitUpdate, mode: Mode, passes: int) -> None:
        self._update, self._mode = update, mode
        self.passes, self.drafts = passes, mode.optimizer_states
        self._sums: dict[int, list[torch.Tensor]] = {}
        """Sums of squares of each segment, by its number in the update, as far as they are known."""

    def run(self, tile: TileContent, last: bool) -> None:
        segments = segments_in(self._update, tile)
        if not segments:
            return
        assert tile.gradient is not None
        partition = partition_of(self._mode, tile.states, tile.gradient)
        rated = any(segment.step.ratio is not None for _, segment in segments)
        for number, segment in segments:
            sums = _moments(partition, segment, tile.start, tile.kept.get(segment.parameter))
            # In the last of two passes, or if the ratios of several ranks are known, the norms are complete: sums that
            # are added again would count twice.
            if not last or (self.passes == 1 and not rated):
                self._sums.setdefault(number, []).extend(sums)
        if not last:
            return
        # The noise rounds masters; the moments are rounded already.
        steps = [LambSegment(part.start, part.stop, part.step.step, part.noise) for _, part in segments]
        # The ratios of several ranks win: this rank's own sums lack the shards of the others.
        ratios = [
            kernels.lamb_ratio(part.step.step, self._sums[number]) if part.step.ratio is None else part.step.ratio
            for number, part in segments
        ]
        kernels.lamb_move(partition, steps, ratios)


def _moments(partition: Partition, segment: ParameterStep, start: int, kept: torch.Tensor | None) -> list[torch.Tensor]:
    """Updates the moments of a segment; returns its sums of squares, one row for each block.

    `start` is the tile's first element. `kept` is the gradient of the segment if it is not in that of the partition.
    """
    # Blocks are counted from the unit's first element, and tiles begin at borders of blocks. If the segment begins
    # within a block, the elements up to the next border are summed apart: its other blocks are then the same for every
    # size of tiles.
    first = min(segment.stop, -(-(start + segment.start) // BLOCK) * BLOCK - start)
    cuts = [(segment.start, first), (first, segment.stop)]
    noise = segment.noise
    states = [
        LambSegment(
            begin,
            end,
            segment.step.step,
            noise and noise.after(begin - segment.start),
            None if kept is None else kept[begin - segment.start : end - segment.start],
        )
        for begin, end in cuts
        if begin < end
    ]
    return kernels.lamb_moments(partition, states)


# -- norms ---------------------------------------------------------------------------------------------
#
# Norms that LAMB needs for each parameter, if the parameter's shards are on several ranks.
#
#     step() ─► each rank: states and gradients, chunk by chunk ─► sums ─► added over the ranks ─► ratios ─► updates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _LambChunk:
    """Elements [start, stop) of this rank's partition of a unit, all of one parameter."""

    unit: int
    parameter: int
    start: int
    stop: int
    step: kernels.LambStep
    noise: kernels.Noise | None


def _chunks(update: UnitUpdate, numel: int) -> Iterator[_LambChunk]:
    """Yields the chunks of an update: at most `numel` elements, within one `CHUNK` of a parameter.

    Windows of a gradient on disk may begin at any `CHUNK` border of a parameter, so no chunk crosses one.
    """
    for segment in update.segments:
        for chunk in range(segment.start, segment.stop, CHUNK):
            last = min(chunk + CHUNK, segment.stop)
            for start in range(chunk, last, numel):
                yield _LambChunk(
                    unit=update.unit,
                    parameter=segment.parameter,
                    start=start,
                    stop=min(start + numel, last),
                    step=segment.step.step,
                    noise=segment.noise and segment.noise.after(start - segment.start),
                )


def _cut(shards: LocalShards, chunk: _LambChunk, buffer: memoryview) -> dict[State, memoryview]:
    memory, offset = {}, 0
    for state, dtype in shards.mode_of(chunk.unit).states.items():
        end = offset + len(shards.mode.part(state, chunk.start, chunk.stop)) * dtype.itemsize
        memory[state] = buffer[offset:end]
        offset = align_up(end)
    return memory


def _read(shards: LocalShards, chunk: _LambChunk, state: State, memory: memoryview) -> list[Future]:
    """Starts to copy a state into `memory`: from memory at once, if its tier is above DISK, else from the store."""
    first = shards.mode.part(state, chunk.start, chunk.stop).start * shards.mode_of(chunk.unit).states[state].itemsize
    resident = shards.resident_of(chunk.unit, state)
    if resident is None:
        return shards.read(chunk.unit, state, first, memory)
    part = resident.tensor.view(torch.uint8)[first : first + len(memory)]
    shards.device.copy(torch.frombuffer(memory, dtype=torch.uint8), part)
    return []


def _sums(
    shards: LocalShards, gradients: GradientAccumulator, chunk: _LambChunk, memory: dict[State, memoryview]
) -> list[tuple[float, float]]:
    """Returns the sums of squares of weight and direction, one pair for each block of the chunk.

    The moments in `memory`, which `_read` has filled, are overwritten.
    """
    unit, parameter, start, stop = chunk.unit, chunk.parameter, chunk.start, chunk.stop
    dtypes = shards.mode_of(unit).states
    states = {state: torch.frombuffer(memory[state], dtype=dtype) for state, dtype in dtypes.items()}
    gradient = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    in_parameter = shards.shares[unit][0].start + start - shards.layouts[unit].segments[parameter].start
    gradients.look(unit, parameter, in_parameter, gradient)
    # The kernel updates the moments too, in this buffer only: the store and resident states are unchanged.
    partition = partition_of(shards.mode, states, gradient)
    (sums,) = kernels.lamb_moments(partition, [kernels.LambSegment(0, stop - start, chunk.step, chunk.noise)])
    return [(weight, direction) for weight, direction in sums.tolist()]
