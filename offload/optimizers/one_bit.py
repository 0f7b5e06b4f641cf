"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): ranks send the signs of their momenta in place of gradients.

    warm-up        gradients ─► mean of all ranks ─► the kernel of Adam: momentum, variance, weights
    afterwards     own gradient ─► own momentum ─► signs ─► mean of all ranks, as signs ─► momentum ─► weights
                                                            the variance stays as the warm-up has left it

Each rank holds whole units. A block of `SIGN_BLOCK` elements has one scale, and is averaged by one rank: block b of a
unit by rank b % n, whatever the tiles are. So tiles, tiers and a resume change no bit.

    each rank      momentum + worker error ─► signs, scales; what they lose is the new worker error
    rank b % n     mean of all ranks' signs + server error ─► signs, scales; what they lose is the new server error
    each rank      the momentum of every block has the values of these signs

Both exchanges run on the update worker, tile by tile, while `step()` waits on every rank. They are of host memory, by
gloo. A rank that trains alone has nothing to send: its momentum stays as it is, and its variance is frozen too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from offload import kernels
from offload.config import OptimizerBlock
from offload.distributed.agreement import Agreement
from offload.distributed.process_group import Ranks
from offload.engine.gradients import GradientAccumulator
from offload.engine.optimizer import Optimizer, Rule
from offload.engine.shards import LocalShards
from offload.engine.update import UpdateWorker
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.errors import ConfigError
from offload.layout.modes import ONE_BIT_ADAM, SIGN_BLOCK, Mode
from offload.layout.optimizer_states import join, split
from offload.optimizers.fused import betas, floats, segments_in
from offload.states import State

# -- signs ---------------------------------------------------------------------------------------------
#
# A row is a block as ranks send it: its scale in fp32, and a bit for each element, 1 for values of at least 0.


_SCALE_NBYTES = 4
ROW_NBYTES = _SCALE_NBYTES + SIGN_BLOCK // 8
_AT_ONCE = 64
"""Blocks whose values are in memory at once, beside the states of a tile."""


def to_signs(values: torch.Tensor, trained: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes blocks of values as rows. The values of a row have the norm of the values that it replaces.

    Args:
        values: (blocks, SIGN_BLOCK) fp32, contiguous; 0 where an element is not trained.
        trained: the same shape, bool.
        rows: (blocks, ROW_NBYTES) uint8, overwritten.
    """
    # The kernel adds in float64 in a fixed order, so a scale does not depend on the processor.
    squares = torch.tensor(kernels.squares_of_chunks(values.view(-1), SIGN_BLOCK), dtype=torch.float64, device="cpu")
    scales = (squares / trained.sum(1).clamp_(min=1)).sqrt_().float()
    rows[:, :_SCALE_NBYTES] = scales.view(-1, 1).view(torch.uint8)
    rows[:, _SCALE_NBYTES:] = torch.from_numpy(np.packbits((values >= 0).numpy(), axis=1))


def from_signs(rows: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Returns the values of rows, (blocks, SIGN_BLOCK) fp32; 0 where an element is not `trained`."""
    scales = rows[:, :_SCALE_NBYTES].contiguous().view(torch.float32)
    signs = torch.from_numpy(np.unpackbits(rows[:, _SCALE_NBYTES:].numpy(), axis=1))
    return signs.float().mul_(2).sub_(1).mul_(scales).mul_(trained)


class SignMean:
    """The mean of values over ranks that send each other signs, with the errors of both compressions fed back."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def replace(
        self, first: int, values: torch.Tensor, trained: torch.Tensor, worker: torch.Tensor, server: torch.Tensor
    ) -> None:
        """Replaces this rank's values by the mean of all ranks. Collective; each rank passes the same elements.

        Args:
            first: number of the first block in its unit.
            values: (blocks, SIGN_BLOCK) fp32, overwritten where `trained`.
            trained: the same shape, bool, with the same values on each rank. Others are neither sent nor changed.
            worker: this rank's error, of the same shape, replaced by the new one.
            server: the error of the blocks that this rank averages; other blocks are neither read nor written.
        """
        blocks, ranks, size = len(values), self._ranks, self._ranks.size
        # The blocks of the tile that each rank averages.
        served = [range((rank - first) % size, blocks, size) for rank in range(size)]
        own = served[ranks.rank]
        rows = torch.empty(blocks, ROW_NBYTES, dtype=torch.uint8, device="cpu")
        for some in _parts(range(blocks)):
            total = worker[some].add(values[some]).mul_(trained[some])
            to_signs(total, trained[some], rows[some])
            total.sub_(from_signs(rows[some], trained[some]))
            worker[some] = torch.where(trained[some], total, worker[some])
        sent = torch.cat([rows[_slice(part)] for part in served])
        received = torch.empty(size, len(own), ROW_NBYTES, dtype=torch.uint8, device="cpu")
        counts = [len(part) * ROW_NBYTES for part in served]
        own_counts = [len(own) * ROW_NBYTES] * size
        ranks.swap(received.view(-1), own_counts, sent.view(-1), counts, "exchange signs of momenta")
        means = torch.empty(len(own), ROW_NBYTES, dtype=torch.uint8, device="cpu")
        for some in _parts(range(len(own))):
            place = _slice(own[some])
            here = trained[place]
            total = from_signs(received[0, some], here)
            for other in received[1:]:  # in the order of the ranks
                total.add_(from_signs(other[some], here))
            total.div_(size).add_(server[place]).mul_(here)
            to_signs(total, here, means[some])
            total.sub_(from_signs(means[some], here))
            server[place] = torch.where(here, total, server[place])
        ranks.swap(sent.view(-1), counts, means.repeat(size, 1).view(-1), own_counts, "exchange means of momenta")
        for part, mean in zip(served, sent.split([len(part) for part in served]), strict=True):
            rows[_slice(part)] = mean
        for some in _parts(range(blocks)):
            values[some] = torch.where(trained[some], from_signs(rows[some], trained[some]), values[some])


def _parts(blocks: range) -> list[slice]:
    return [slice(start, min(start + _AT_ONCE, blocks.stop)) for start in range(0, len(blocks), _AT_ONCE)]


def _slice(blocks: range) -> slice:
    return slice(blocks.start, blocks.stop, blocks.step)


# -- rule ----------------------------------------------------------------------------------------------


_NO_CORRECTION = 1 << 53
"""Number of a step from which on the kernel's corrections of the bias are 1."""


class OneBitStep(NamedTuple):
    """A step of 1-bit Adam."""

    adam: kernels.AdamWStep
    """The step of the warm-up. Afterwards its numbers are read."""
    frozen: bool
    """True after the warm-up, where the variance does not change."""
    corrections: tuple[float, float] = (1.0, 1.0)
    """Divisors of momentum and variance after the warm-up."""
    signs: bool = False
    """True if ranks exchange signs of their momenta; False if the gradient is the mean of all ranks."""


class OneBitAdamRule(Rule):
    """1-bit Adam. Its steps exchange momenta once the warm-up has ended."""

    def configured(self, groups: Sequence[Mapping[str, Any]], block: OptimizerBlock, model: nn.Module) -> Optimizer:
        optimizer = super().configured(groups, block, model)
        ends = sorted({int(group["freeze_step"]) for group in optimizer.param_groups})
        if len(ends) > 1:
            raise ConfigError(
                f"the groups of {self.known_as} have freeze_step {' and '.join(map(str, ends))}, and all parameters "
                "leave the warm-up in the same step: give all groups the same number"
            )
        return optimizer

    def keeps_gradients(self, groups: Sequence[Mapping[str, Any]], step: int) -> bool:
        return step > int(groups[0]["freeze_step"])

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> OneBitStep:
        end, corrects, factors = int(group["freeze_step"]), bool(group["bias_correction"]), betas(group)
        adam = kernels.AdamWStep(
            **floats(group, "lr", "eps", "weight_decay"),
            **factors,
            step=count if corrects else _NO_CORRECTION,
            grad_scale=grad_scale,
        )
        steps = (count, min(count, end))
        corrections = [
            1 - beta**number if corrects else 1.0 for beta, number in zip(factors.values(), steps, strict=True)
        ]
        return OneBitStep(adam, count > end, (corrections[0], corrections[1] or 1.0))

    def complete(
        self,
        updates: list[UnitUpdate],
        step: int,
        groups: Sequence[Mapping[str, Any]],
        shards: LocalShards,
        gradients: GradientAccumulator,
        updater: UpdateWorker,
        agreement: Agreement,
    ) -> list[UnitUpdate]:
        """Returns the updates with the phase of the step, which is the same for all parameters of all ranks."""
        kept = self.keeps_gradients(groups, step)

        def in_phase(update: UnitUpdate) -> UnitUpdate:
            segments = [part._replace(step=part.step._replace(frozen=kept, signs=kept)) for part in update.segments]
            shared = tuple(part.parameter for part in segments) if kept else ()
            return dataclasses.replace(update, segments=tuple(segments), shared=shared)

        # Ranks exchange signs in the order of the units; predictions of uses may differ between ranks.
        return sorted(map(in_phase, updates), key=lambda update: update.unit) if kept else list(map(in_phase, updates))

    def strategy(self, setting: UpdateSetting) -> OneBitUpdates:
        return OneBitUpdates(mode=setting.mode, ranks=setting.replicas)


ONE_BIT_ADAM_RULE = OneBitAdamRule(
    name=ONE_BIT_ADAM,
    known_as="OneBitAdam",
    scheduled=("lr", "betas", "eps", "weight_decay"),
    fixed=("freeze_step",),
    flags=("bias_correction",),
)

# -- updates -------------------------------------------------------------------------------------------


_CHUNK = _AT_ONCE * SIGN_BLOCK
"""Elements of a chunk whose weights move at once."""


class OneBitUpdates:
    """Strategy of 1-bit Adam."""

    def __init__(self, *, mode: Mode, ranks: Ranks) -> None:
        self._mode, self._ranks = mode, ranks
        self._tile_numel: int | None = None
        """The smallest tile of all ranks; None until their first exchange."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        if not update.shared:
            return _OneBitSteps(update, self._mode, SignMean(self._ranks), ())
        if self._tile_numel is None:
            # update thread: the first unit begins before any signs are sent, on every rank. Ranks with other budgets
            # may have other tiles, and must meet once a tile.
            everyone = self._ranks.collect([tile_numel], "agree on the sizes of tiles")
            self._tile_numel = min(row[0] for row in everyone)
        numel = self._tile_numel
        cuts = [range(start, min(start + numel, update.numel)) for start in range(0, update.numel, numel)]
        return _OneBitSteps(update, self._mode, SignMean(self._ranks), cuts)

    def begin_part(self, update: UnitUpdate, writes: kernels.Writes) -> UnitSteps | None:
        return None


class _OneBitSteps:
    """Steps of one unit."""

    passes = 1
    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, update: UnitUpdate, mode: Mode, mean: SignMean, cuts: Sequence[range]) -> None:
        self._update, self._mode, self._mean, self.cuts = update, mode, mean, cuts

    def run(self, tile: TileContent, last: bool) -> None:
        segments = [segment for _, segment in segments_in(self._update, tile)]
        warm = [segment for segment in segments if not segment.step.frozen]
        frozen = [segment for segment in segments if segment.step.frozen]
        if warm:
            self._warm_up(tile, warm)
        for segment in frozen:
            _step_momentum(tile, segment)
        # Ranks meet in each tile, also in one of padding alone.
        if self._update.shared:
            variance, shape = tile.states[State.EXP_AVG_SQ], (-1, SIGN_BLOCK)
            trained = torch.zeros(len(variance), dtype=torch.bool, device="cpu")
            for segment in frozen:
                part = slice(segment.start, segment.stop)
                trained[part] = variance[part] > 0
            momentum, worker, server = (
                tile.states[state].view(shape) for state in (State.EXP_AVG, State.WORKER_ERROR, State.SERVER_ERROR)
            )
            self._mean.replace(tile.start // SIGN_BLOCK, momentum, trained.view(shape), worker, server)
        for segment in frozen:
            for start in range(segment.start, segment.stop, _CHUNK):
                self._move(tile, segment, start, min(start + _CHUNK, segment.stop))

    def _warm_up(self, tile: TileContent, segments: Sequence[ParameterStep]) -> None:
        assert tile.gradient is not None
        states = tile.states
        partition = kernels.Partition(
            states[State.WEIGHT],
            tile.gradient,
            (states[State.EXP_AVG], states[State.EXP_AVG_SQ]),
            states.get(State.MASTER_LOW_BITS),
            states.get(State.MASTER),
        )
        kernels.update(
            partition,
            [
                kernels.Segment(part.start, part.stop, part.step.adam, part.noise, tile.kept.get(part.parameter))
                for part in segments
            ],
        )

    def _move(self, tile: TileContent, segment: ParameterStep, start: int, stop: int) -> None:
        """Moves the weights of elements [start, stop) of the tile, after the warm-up."""
        numbers, (first, second) = segment.step.adam, segment.step.corrections
        states = {state: tile.states[state][start:stop] for state in self._mode.weights}
        variance = tile.states[State.EXP_AVG_SQ][start:stop]
        divisor = variance.div(second).sqrt_().add_(numbers.eps)
        direction = tile.states[State.EXP_AVG][start:stop].div(first).div_(divisor)
        master = join(states)
        master.mul_(1 - numbers.lr * numbers.weight_decay)
        # An element that had no gradient in the warm-up has no variance to divide by.
        master.add_(direction.masked_fill_(variance == 0, 0), alpha=-numbers.lr)
        if master.data_ptr() != states[State.WEIGHT].data_ptr():
            split(master, states, segment.noise and segment.noise.after(start - segment.start))


def _step_momentum(tile: TileContent, segment: ParameterStep) -> None:
    """Adds this rank's gradient to the momentum of a segment, where the warm-up has left a variance."""
    part, numbers = slice(segment.start, segment.stop), segment.step.adam
    momentum = tile.states[State.EXP_AVG][part]
    momentum.mul_(numbers.beta1)
    momentum.add_(tile.gradient_of(segment), alpha=(1 - numbers.beta1) * numbers.grad_scale)
    momentum.mul_(tile.states[State.EXP_AVG_SQ][part] > 0)
