"""Optimizers whose ranks send signs: 1-bit Adam (arXiv 2102.02888) and 0/1 Adam (arXiv 2202.06009).

    1-bit Adam    warm-up      gradients ─► mean of all ranks ─► the kernel of Adam: momentum, variance, weights
                  afterwards   own gradient ─► own momentum ─► mean of signs (`SignMean`) ─► momentum ─► weights

    0/1 Adam      at growing intervals       gradients ─► mean of all ranks ─► the kernel of Adam
                  between, until the freeze  own gradient ─► mean of signs ─► momentum ─► weights
                  after the freeze           own gradient ─► own momentum ─► own weights, for some steps, and then
                                             what each rank has moved ─► mean of signs ─► momentum, weights

The kernel of Adam alone changes the variance. Each rank holds whole units. Exchanges run on the update worker, tile by
tile, while `step()` waits on every rank. They are of host memory, by gloo. A rank that trains alone has nothing to
send: its momentum is that of its gradient, and its variance stays in the same steps.
"""

from __future__ import annotations

import dataclasses
import enum
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from offload.layout.modes import ONE_BIT_ADAM, SIGN_BLOCK, ZERO_ONE_ADAM, Mode
from offload.layout.optimizer_states import join, split
from offload.optimizers.fused import betas, floats, segments_in
from offload.optimizers.signs import BLOCKS_AT_ONCE, SignMean
from offload.states import State

# -- phases --------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """What a step does with gradients. All but `WHOLE` leave the variance as it is."""

    WHOLE = "whole"
    """The gradient is the mean of all ranks."""
    ALONE = "alone"
    """The gradient is this rank's, and nothing is exchanged."""
    MOMENTA = "momenta"
    """Ranks exchange signs of their momenta."""
    GRADIENTS = "gradients"
    """Ranks exchange signs of their gradients."""
    MOVES = "moves"
    """As `ALONE`, and then ranks exchange signs of what they have moved since the last such step."""

    @property
    def exchanges(self) -> bool:
        """True if ranks meet in the updates of the step."""
        return self in (Phase.MOMENTA, Phase.GRADIENTS, Phase.MOVES)


def variance_interval(step: int, scaler: int) -> int:
    """Returns the interval of updates of 0/1 Adam's variance at a step: doubled after every `scaler` updates."""
    interval = done = 0
    while done < step:
        interval = 2 * interval or 1
        done = (done // interval + scaler) * interval
    return interval


def local_interval(step: int, scaler: int, most: int) -> int:
    """Returns the interval of 0/1 Adam's exchanges at the `step`-th after the freeze: doubled every `scaler` steps."""
    return min(most, 1 << min((step - 1) // scaler, most.bit_length()))


# -- rules ---------------------------------------------------------------------------------------------


_NO_CORRECTION = 1 << 53
"""Number of a step from which on the kernel's corrections of the bias are 1."""


class SignStep(NamedTuple):
    """A step of a rule whose ranks send signs."""

    adam: kernels.AdamWStep
    """The step of the kernel in `Phase.WHOLE`; its numbers are those of every phase."""
    phase: Phase
    corrections: tuple[float, float] = (1.0, 1.0)
    """Divisors of momentum and variance in phases other than `WHOLE`."""
    rates: float = 0.0
    """Sum of the learning rates since ranks last exchanged their moves, with this step's."""
    counts: bool = False
    """True if the weights' moves are added up until ranks exchange them."""
    begins: bool = False
    """True in the first step after 0/1 Adam has frozen its variance, where the errors begin at zero."""


class SignRule(Rule):
    """A rule whose ranks send signs in most steps."""

    @abstractmethod
    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        """Returns the phase of a step, from 1, on several ranks."""

    def configured(self, groups: Sequence[Mapping[str, Any]], block: OptimizerBlock, model: nn.Module) -> Optimizer:
        optimizer = super().configured(groups, block, model)
        for key in self.fixed:
            numbers = sorted({int(group[key]) for group in optimizer.param_groups})
            if len(numbers) > 1:
                raise ConfigError(
                    f"the groups of {self.known_as} have {key} {' and '.join(map(str, numbers))}, and all parameters "
                    "change to another phase in the same step: give all groups the same number"
                )
        return optimizer

    def keeps_gradients(self, groups: Sequence[Mapping[str, Any]], step: int) -> bool:
        return self.phase(groups[0], step) is not Phase.WHOLE

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        adam = kernels.AdamWStep(
            **floats(group, "lr", "eps", "weight_decay"),
            **betas(group),
            step=_NO_CORRECTION,
            grad_scale=grad_scale,
            decoupled=True,
        )
        # The phase of a rank that trains alone; `complete` sets that of several.
        return SignStep(adam, Phase.WHOLE if self.phase(group, count) is Phase.WHOLE else Phase.ALONE)

    def complete(
        self,
        updates: list[UnitUpdate],
        step: int,
        groups: Sequence[dict[str, Any]],
        shards: LocalShards,
        gradients: GradientAccumulator,
        updater: UpdateWorker,
        agreement: Agreement,
    ) -> list[UnitUpdate]:
        """Returns the updates with the phase of the step, which is the same for all parameters of all ranks."""
        phase = self.phase(groups[0], step)
        completed = [
            dataclasses.replace(
                update,
                segments=tuple(part._replace(step=part.step._replace(phase=phase)) for part in update.segments),
                shared=tuple(part.parameter for part in update.segments) if phase.exchanges else (),
            )
            for update in updates
        ]
        # Ranks exchange signs in the order of the units; predictions of uses may differ between ranks.
        return sorted(completed, key=lambda update: update.unit) if phase.exchanges else completed

    def strategy(self, setting: UpdateSetting) -> SignUpdates:
        return SignUpdates(mode=setting.mode, ranks=setting.replicas)


class OneBitAdamRule(SignRule):
    """1-bit Adam."""

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        return Phase.WHOLE if step <= int(group["freeze_step"]) else Phase.MOMENTA

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        plain = super().step(parameter, group, count, grad_scale)
        if not group["bias_correction"]:
            return plain
        first, second = 1 - plain.adam.beta1**count, 1 - plain.adam.beta2 ** min(count, int(group["freeze_step"]))
        return plain._replace(adam=plain.adam._replace(step=count), corrections=(first, second))


class ZeroOneAdamRule(SignRule):
    """0/1 Adam."""

    def configured(self, groups: Sequence[Mapping[str, Any]], block: OptimizerBlock, model: nn.Module) -> Optimizer:
        optimizer = super().configured(groups, block, model)
        for group in optimizer.param_groups:
            group[_RATES] = 0.0
        return optimizer

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        after = step - int(group["var_freeze_step"])
        if after <= 0:
            return Phase.GRADIENTS if step % variance_interval(step, int(group["var_update_scaler"])) else Phase.WHOLE
        interval = local_interval(after, int(group["local_step_scaler"]), int(group["local_step_clipper"]))
        return Phase.ALONE if step % interval else Phase.MOVES

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        plain = super().step(parameter, group, count, grad_scale)
        return plain._replace(rates=float(group[_RATES]) + plain.adam.lr)

    def complete(
        self,
        updates: list[UnitUpdate],
        step: int,
        groups: Sequence[dict[str, Any]],
        shards: LocalShards,
        gradients: GradientAccumulator,
        updater: UpdateWorker,
        agreement: Agreement,
    ) -> list[UnitUpdate]:
        """Returns the updates with the phase of the step, and adds up the learning rates between two exchanges."""
        after, phase = step - int(groups[0]["var_freeze_step"]), self.phase(groups[0], step)
        for group in groups:
            # In the group, which a commit contains.
            group[_RATES] = group[_RATES] + float(group["lr"]) if phase is Phase.ALONE else 0.0
        return [
            dataclasses.replace(
                update,
                segments=tuple(
                    part._replace(step=part.step._replace(counts=after > 0, begins=after == 1))
                    for part in update.segments
                ),
            )
            for update in super().complete(updates, step, groups, shards, gradients, updater, agreement)
        ]


_RATES = "rates_since_exchange"
"""Key of a group: the sum of the learning rates of the steps since ranks last exchanged their moves."""
_SCHEDULED = ("lr", "betas", "eps", "weight_decay")
ONE_BIT_RULES = (
    OneBitAdamRule(
        name=ONE_BIT_ADAM,
        known_as="OneBitAdam",
        scheduled=_SCHEDULED,
        fixed=("freeze_step",),
        flags=("bias_correction",),
    ),
    ZeroOneAdamRule(
        name=ZERO_ONE_ADAM,
        known_as="ZeroOneAdam",
        scheduled=_SCHEDULED,
        fixed=("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
    ),
)

# -- updates -------------------------------------------------------------------------------------------


_CHUNK = BLOCKS_AT_ONCE * SIGN_BLOCK
"""Elements of a chunk whose weights move at once."""


class SignUpdates:
    """Strategy of the rules whose ranks send signs."""

    def __init__(self, *, mode: Mode, ranks: Ranks) -> None:
        self._mode, self._ranks = mode, ranks
        self._tile_numel: int | None = None
        """The smallest tile of all ranks; None until their first exchange."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        if not update.shared:
            return _SignSteps(update, self._mode, SignMean(self._ranks), ())
        if self._tile_numel is None:
            # update thread: the first unit begins before any signs are sent, on every rank. Ranks with other budgets
            # may have other tiles, and must meet once a tile.
            everyone = self._ranks.collect([tile_numel], "agree on the sizes of tiles")
            self._tile_numel = min(row[0] for row in everyone)
        numel = self._tile_numel
        cuts = [range(start, min(start + numel, update.numel)) for start in range(0, update.numel, numel)]
        return _SignSteps(update, self._mode, SignMean(self._ranks), cuts)

    def begin_part(self, update: UnitUpdate, writes: kernels.Writes) -> UnitSteps | None:
        return None


class _SignSteps:
    """Steps of one unit."""

    passes = 1
    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, update: UnitUpdate, mode: Mode, mean: SignMean, cuts: Sequence[range]) -> None:
        self._update, self._mode, self._mean, self.cuts = update, mode, mean, cuts
        # Ranks meet in each tile of an exchange, also in one of padding alone.
        self._phase = update.segments[0].step.phase if update.shared else None

    def run(self, tile: TileContent, last: bool) -> None:
        segments = [segment for _, segment in segments_in(self._update, tile)]
        # A rank that trains alone counts steps by parameter, so it may have both.
        whole = [segment for segment in segments if segment.step.phase is Phase.WHOLE]
        signed = [segment for segment in segments if segment.step.phase is not Phase.WHOLE]
        if whole:
            _step_by_kernel(tile, whole)
        trained = _trained(tile, signed)
        for segment in signed:
            if segment.step.begins:
                for error in (State.WORKER_ERROR, State.SERVER_ERROR):
                    tile.states[error][segment.start : segment.stop].zero_()
            gradient, scale = tile.gradient_of(segment), segment.step.adam.grad_scale
            if self._phase is Phase.GRADIENTS:
                # Memory of moves, which are counted after the freeze alone.
                tile.states[State.MOMENTUM_BUFFER][segment.start : segment.stop].copy_(gradient).mul_(scale)
            else:
                _step_momentum(tile, segment, gradient, scale, trained)
        if self._phase is Phase.GRADIENTS:
            gradients = tile.states[State.MOMENTUM_BUFFER]
            self._replace(tile, gradients, trained)
            for segment in signed:
                part = gradients[segment.start : segment.stop]
                _step_momentum(tile, segment, part, 1.0, trained)
                part.zero_()
        if self._phase is Phase.MOMENTA:
            self._replace(tile, tile.states[State.EXP_AVG], trained)
        for chunk in _chunks(signed):
            self._move(tile, chunk, trained)
        if self._phase is Phase.MOVES:
            self._exchange_moves(tile, signed, trained)

    def _move(self, tile: TileContent, chunk: _Chunk, trained: torch.Tensor) -> None:
        """Moves the weights of a chunk by their momentum over the root of the variance."""
        step, part = chunk.step, chunk.part
        direction = tile.states[State.EXP_AVG][part].div(step.corrections[0]).div_(_divisor(tile, chunk))
        # The quotient of an element without a variance is no number if eps is 0.
        moves = torch.where(trained[part], direction, 0.0)
        moves.add_(self._master(tile, chunk), alpha=step.adam.weight_decay).mul_(-step.adam.lr)
        if step.counts:
            tile.states[State.MOMENTUM_BUFFER][part].add_(moves)
        self._add(tile, chunk, moves)

    def _exchange_moves(self, tile: TileContent, segments: Sequence[ParameterStep], trained: torch.Tensor) -> None:
        """Replaces what this rank has moved since the last exchange by the mean of all ranks, and so the momentum."""
        moved = tile.states[State.MOMENTUM_BUFFER]
        for chunk in _chunks(segments):
            part = moved[chunk.part].mul_(trained[chunk.part])
            self._add(tile, chunk, -part)
            part.mul_(_divisor(tile, chunk))
        self._replace(tile, moved, trained)
        for chunk in _chunks(segments):
            part = moved[chunk.part]
            tile.states[State.EXP_AVG][chunk.part] = part / -chunk.step.rates
            self._add(tile, chunk, torch.where(trained[chunk.part], part / _divisor(tile, chunk), 0.0))
            part.zero_()

    def _replace(self, tile: TileContent, values: torch.Tensor, trained: torch.Tensor) -> None:
        """Replaces values of a tile by the mean of all ranks."""
        shape = (-1, SIGN_BLOCK)
        worker, server = tile.states[State.WORKER_ERROR], tile.states[State.SERVER_ERROR]
        first = tile.start // SIGN_BLOCK
        self._mean.replace(first, values.view(shape), trained.view(shape), worker.view(shape), server.view(shape))

    def _master(self, tile: TileContent, chunk: _Chunk) -> torch.Tensor:
        return join({state: tile.states[state][chunk.part] for state in self._mode.weights})

    def _add(self, tile: TileContent, chunk: _Chunk, values: torch.Tensor) -> None:
        """Adds values to the masters of a chunk."""
        states = {state: tile.states[state][chunk.part] for state in self._mode.weights}
        master = join(states).add_(values)
        if master.data_ptr() != states[State.WEIGHT].data_ptr():
            split(master, states, chunk.noise)


class _Chunk(NamedTuple):
    """Elements of a segment whose weights move at once."""

    part: slice
    """The elements in the tile."""
    step: SignStep
    noise: kernels.Noise | None


def _chunks(segments: Sequence[ParameterStep]) -> Iterator[_Chunk]:
    for segment in segments:
        for start in range(segment.start, segment.stop, _CHUNK):
            noise = segment.noise and segment.noise.after(start - segment.start)
            yield _Chunk(slice(start, min(start + _CHUNK, segment.stop)), segment.step, noise)


def _trained(tile: TileContent, segments: Sequence[ParameterStep]) -> torch.Tensor:
    """Returns which elements of a tile have a variance to divide by, (n,) bool, the same on each rank.

    Others had no gradient in any step of `Phase.WHOLE`, as rows of an embedding whose words were in no batch. Signs
    cannot express that their momentum is 0.
    """
    variance = tile.states[State.EXP_AVG_SQ]
    trained = torch.zeros(len(variance), dtype=torch.bool, device="cpu")
    for segment in segments:
        part = slice(segment.start, segment.stop)
        torch.gt(variance[part], 0, out=trained[part])
    return trained


def _divisor(tile: TileContent, chunk: _Chunk) -> torch.Tensor:
    variance = tile.states[State.EXP_AVG_SQ][chunk.part]
    return variance.div(chunk.step.corrections[1]).sqrt_().add_(chunk.step.adam.eps)


def _step_by_kernel(tile: TileContent, segments: Sequence[ParameterStep]) -> None:
    assert tile.gradient is not None
    states = tile.states
    partition = kernels.Partition(
        states[State.WEIGHT],
        tile.gradient,
        (states[State.EXP_AVG], states[State.EXP_AVG_SQ]),
        states.get(State.MASTER_LOW_BITS),
        states.get(State.MASTER),
    )
    steps = [
        kernels.Segment(part.start, part.stop, part.step.adam, part.noise, tile.kept.get(part.parameter))
        for part in segments
    ]
    kernels.update(partition, steps)


def _step_momentum(
    tile: TileContent, segment: ParameterStep, gradient: torch.Tensor, scale: float, trained: torch.Tensor
) -> None:
    """Adds `scale` times a gradient to the momentum of a segment, which stays 0 where there is no variance."""
    part, beta = slice(segment.start, segment.stop), segment.step.adam.beta1
    tile.states[State.EXP_AVG][part].mul_(beta).add_(gradient, alpha=(1 - beta) * scale).mul_(trained[part])
