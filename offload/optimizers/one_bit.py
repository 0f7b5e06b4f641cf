"""Optimizers whose ranks send signs: 1-bit Adam (arXiv 2102.02888), 0/1 Adam (2202.06009), 1-bit LAMB (2104.06069).

    1-bit Adam    warm-up      gradients ─► mean of all ranks ─► the kernel of Adam: momentum, variance, weights
                  afterwards   own gradient ─► own momentum ─► mean of signs (`SignMean`) ─► momentum ─► weights

    0/1 Adam      at growing intervals       gradients ─► mean of all ranks ─► the kernel of Adam
                  between, until the freeze  own gradient ─► mean of signs ─► momentum ─► weights
                  after the freeze           own gradient ─► own momentum ─► own weights, for some steps, and then
                                             what each rank has moved ─► mean of signs ─► momentum, weights

    1-bit LAMB    warm-up      gradients ─► mean of all ranks ─► the kernel of LAMB, and the mean of its trust ratios
                  afterwards   own gradient ─► own momentum ─► mean of signs ─► momentum ─► a fresh variance, whose
                               distance from the variance scales that mean ─► weights

These kernels alone change the variance. Each rank holds whole units. Exchanges run on the update worker, tile by
tile, while `step()` waits on every rank. They are of host memory, by gloo. A rank that trains alone has nothing to
send: its momentum is that of its gradient, and its variance stays in the same steps.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from offload import kernels
from offload.config import OptimizerBlock
from offload.distributed.process_group import Ranks
from offload.engine.optimizer import Optimizer, Rule, SharedStep
from offload.engine.shards import LocalShards
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.errors import ConfigError
from offload.layout.flat_layout import WORD, StateField, UnitLayout, pack, unpack
from offload.layout.modes import ONE_BIT_ADAM, ONE_BIT_LAMB, SIGN_BLOCK, ZERO_ONE_ADAM, Mode
from offload.layout.optimizer_states import LAMB_COEFFICIENTS, join, split
from offload.optimizers.fused import InOnePass, Undivided, betas, floats, segments_in, with_steps
from offload.states import State

# -- the mean of signs ---------------------------------------------------------------------------------
#
# The mean of several ranks' values, which they send each other as signs, with the errors of both roundings fed back.
#
#     each rank      values + worker error ─► signs, scales; what they lose is the new worker error
#     rank b % n     mean of all ranks' signs + server error ─► signs, scales; what they lose is the new server error
#     each rank      the values of these signs, in every block
#
# It is the compressed all-reduce of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888). A block of `SIGN_BLOCK` elements
# has one scale, and is averaged by one rank: block b of a unit by rank b % n, whatever the tiles are. So tiles, tiers
# and a resume change no bit.
#
# A row is a block as ranks send it: its scale in fp32, and a bit for each element, 1 for values of at least 0.


_SCALE_NBYTES = 4
ROW_NBYTES = _SCALE_NBYTES + SIGN_BLOCK // 8
BLOCKS_AT_ONCE = 64
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
    return [slice(start, min(start + BLOCKS_AT_ONCE, blocks.stop)) for start in range(0, len(blocks), BLOCKS_AT_ONCE)]


def _slice(blocks: range) -> slice:
    return slice(blocks.start, blocks.stop, blocks.step)


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
    lamb: LambNumbers | None = None
    """Of 1-bit LAMB alone."""


class SignRule(Rule):
    """A rule whose ranks send signs in most steps."""

    def phase(self, group: Mapping[str, Any], step: int) -> Phase:
        """Returns the phase of a step, from 1, on several ranks."""
        return Phase.WHOLE if step <= int(group["freeze_step"]) else Phase.MOMENTA

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

    def complete(self, updates: list[UnitUpdate], step: SharedStep) -> list[UnitUpdate]:
        """Returns the updates with the phase of the step, which is the same for all parameters of all ranks."""
        phase = self.phase(step.groups[0], step.number)
        completed = [with_steps(update, lambda part: part.step._replace(phase=phase)) for update in updates]
        if not phase.exchanges:
            return completed
        shared = [
            dataclasses.replace(update, shared=tuple(part.parameter for part in update.segments))
            for update in completed
        ]
        # Ranks exchange signs in the order of the units; predictions of uses may differ between ranks.
        return sorted(shared, key=lambda update: update.unit)

    def strategy(self, setting: UpdateSetting) -> SignUpdates:
        return SignUpdates(mode=setting.mode, ranks=setting.replicas)


class OneBitAdamRule(SignRule):
    """1-bit Adam."""

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        plain = super().step(parameter, group, count, grad_scale)
        if not group["bias_correction"]:
            return plain
        first, second = 1 - plain.adam.beta1**count, 1 - plain.adam.beta2 ** min(count, int(group["freeze_step"]))
        return plain._replace(adam=plain.adam._replace(step=count), corrections=(first, second))


class LambNumbers(NamedTuple):
    """Numbers of a step of 1-bit LAMB beside those of Adam."""

    warm: kernels.LambStep
    """The step of the kernel in the warm-up."""
    coeff_beta: float
    factor_min: float
    factor_max: float
    factor_threshold: float
    united: float = 0.0
    """Mean of the momentum's root mean squares over all parameters; 0 but in the first step after the warm-up."""


class OneBitLambRule(SignRule):
    """1-bit LAMB. Its step has no correction of the bias, in the warm-up neither."""

    def packed(self, names: Mapping[int, str]) -> dict[str, tuple[StateField, ...]]:
        return dict.fromkeys(names.values(), LAMB_COEFFICIENTS)

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        plain = super().step(parameter, group, count, grad_scale)
        warm = kernels.LambStep(
            *plain.adam[:7], min_ratio=float(group["min_coeff"]), max_ratio=float(group["max_coeff"])
        )
        return plain._replace(lamb=LambNumbers(warm, **floats(group, *_OF_FACTORS)))

    def complete(self, updates: list[UnitUpdate], step: SharedStep) -> list[UnitUpdate]:
        """Returns the updates with the phase of the step; of the first after the warm-up also with the united scale.

        Blocks of signs contain several small parameters, whose momenta are scaled to one size before.
        """
        if step.number == int(step.groups[0]["freeze_step"]) + 1:
            united = _united(step.shards, step.updater.idle_tiles()[0].buffer)
            updates = [
                with_steps(update, lambda part: part.step._replace(lamb=part.step.lamb._replace(united=united)))
                for update in updates
            ]
        return super().complete(updates, step)

    def strategy(self, setting: UpdateSetting) -> LambSignUpdates:
        return LambSignUpdates(setting)


def _united(shards: LocalShards, buffer: memoryview) -> float:
    """Returns the mean of the momentum's root mean squares over all parameters; `buffer` receives them unit by unit."""
    scales: list[float] = []
    for unit, layout in enumerate(shards.layouts):
        memory = buffer[: layout.packed_numel() * WORD]
        for future in shards.read(unit, State.PACKED, 0, memory) if memory else ():
            future.wait()
        for segment in layout.segments:
            if segment.kept:
                content = torch.frombuffer(memory[segment.packed.start * WORD :], dtype=torch.uint8)
                scales.append(unpack(segment.kept, content).get("momentum_scale", 0.0))
    return sum(scales) / max(len(scales), 1)


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

    def complete(self, updates: list[UnitUpdate], step: SharedStep) -> list[UnitUpdate]:
        """Returns the updates with the phase of the step, and adds up the learning rates between two exchanges."""
        first = step.groups[0]
        after, phase = step.number - int(first["var_freeze_step"]), self.phase(first, step.number)
        for group in step.groups:
            # In the group, which a commit contains.
            group[_RATES] = group[_RATES] + float(group["lr"]) if phase is Phase.ALONE else 0.0
        return [
            with_steps(update, lambda part: part.step._replace(counts=after > 0, begins=after == 1))
            for update in super().complete(updates, step)
        ]


_RATES = "rates_since_exchange"
"""Key of a group: the sum of the learning rates of the steps since ranks last exchanged their moves."""
_SCHEDULED = ("lr", "betas", "eps", "weight_decay")
_OF_FACTORS = ("coeff_beta", "factor_min", "factor_max", "factor_threshold")
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
    OneBitLambRule(
        name=ONE_BIT_LAMB,
        known_as="OneBitLamb",
        scheduled=(*_SCHEDULED, "min_coeff", "max_coeff", *_OF_FACTORS),
        fixed=("freeze_step",),
    ),
)

# -- updates -------------------------------------------------------------------------------------------


_CHUNK = BLOCKS_AT_ONCE * SIGN_BLOCK
"""Elements of a chunk whose weights move at once."""


class SignUpdates(Undivided):
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


class _SignSteps(InOnePass):
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
            steps = [
                kernels.Segment(part.start, part.stop, part.step.adam, part.noise, tile.kept.get(part.parameter))
                for part in whole
            ]
            kernels.update(_partition(tile), steps)
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
        everything = slice(0, tile.stop - tile.start)
        if self._phase is Phase.GRADIENTS:
            gradients = tile.states[State.MOMENTUM_BUFFER]
            self._replace(tile, gradients, trained, everything)
            for segment in signed:
                part = gradients[segment.start : segment.stop]
                _step_momentum(tile, segment, part, 1.0, trained)
                part.zero_()
        if self._phase is Phase.MOMENTA:
            self._replace(tile, tile.states[State.EXP_AVG], trained, everything)
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
        self._replace(tile, moved, trained, slice(0, len(moved)))
        for chunk in _chunks(segments):
            part = moved[chunk.part]
            tile.states[State.EXP_AVG][chunk.part] = part / -chunk.step.rates
            self._add(tile, chunk, torch.where(trained[chunk.part], part / _divisor(tile, chunk), 0.0))
            part.zero_()

    def _replace(self, tile: TileContent, values: torch.Tensor, trained: torch.Tensor, part: slice) -> None:
        """Replaces values of a part of a tile, whole blocks, by the mean of all ranks."""
        errors = (tile.states[State.WORKER_ERROR], tile.states[State.SERVER_ERROR])
        blocks = [tensor[part].view(-1, SIGN_BLOCK) for tensor in (values, trained, *errors)]
        self._mean.replace((tile.start + part.start) // SIGN_BLOCK, *blocks)

    def _master(self, tile: TileContent, chunk: _Chunk) -> torch.Tensor:
        return join({state: tile.states[state][chunk.part] for state in self._mode.weights})

    def _add(self, tile: TileContent, chunk: _Chunk, values: torch.Tensor) -> None:
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


def _partition(tile: TileContent) -> kernels.Partition:
    assert tile.gradient is not None
    states = tile.states
    return kernels.Partition(
        states[State.WEIGHT],
        tile.gradient,
        (states[State.EXP_AVG], states[State.EXP_AVG_SQ]),
        states.get(State.MASTER_LOW_BITS),
        states.get(State.MASTER),
    )


def _step_momentum(
    tile: TileContent,
    segment: ParameterStep,
    gradient: torch.Tensor,
    scale: float,
    trained: torch.Tensor,
    part: slice | None = None,
) -> None:
    """Adds `scale` times a gradient to the momentum of a segment, or of a part of it; it stays 0 without a variance."""
    beta, part = segment.step.adam.beta1, part or slice(segment.start, segment.stop)
    tile.states[State.EXP_AVG][part].mul_(beta).add_(gradient, alpha=(1 - beta) * scale).mul_(trained[part])


# -- 1-bit LAMB ----------------------------------------------------------------------------------------


_PIECE = 512 * SIGN_BLOCK
"""Elements of a unit whose signs ranks exchange at once. A tile is a whole unit, as a step needs whole parameters."""


class LambSignUpdates(SignUpdates):
    """Strategy of 1-bit LAMB."""

    def __init__(self, setting: UpdateSetting) -> None:
        super().__init__(mode=setting.mode, ranks=setting.replicas)
        self._layouts, self._scratch = setting.layouts, setting.scratch

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return range(self._layouts[unit].packed_numel()) if state is State.PACKED else range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        mean, layout = SignMean(self._ranks), self._layouts[update.unit]
        return _LambSignSteps(update, self._mode, mean, layout, self._scratch)


class _LambSignSteps(_SignSteps):
    """Steps of one unit by 1-bit LAMB."""

    def __init__(
        self, update: UnitUpdate, mode: Mode, mean: SignMean, layout: UnitLayout, scratch: torch.Tensor
    ) -> None:
        super().__init__(update, mode, mean, ())
        self._layout, self._scratch = layout, scratch

    def run(self, tile: TileContent, last: bool) -> None:
        segments = [segment for _, segment in segments_in(self._update, tile)]
        numbers = {segment.parameter: self._numbers(tile, segment) for segment in segments}
        whole = [segment for segment in segments if segment.step.phase is Phase.WHOLE]
        signed = [segment for segment in segments if segment.step.phase is not Phase.WHOLE]
        if whole:
            self._warm_up(tile, whole, numbers)
        if signed:
            trained = _trained(tile, signed)
            for segment in signed:
                if "scaling_coeff" not in numbers[segment.parameter]:
                    self._freeze(tile, segment, numbers[segment.parameter])
            for start in range(0, tile.stop - tile.start, _PIECE):
                piece = slice(start, min(start + _PIECE, tile.stop - tile.start))
                self._exchange(tile, signed, piece, trained, numbers)
            for segment in signed:
                self._step(tile, segment, trained, numbers[segment.parameter])
        for segment in segments:
            pack(self._layout.segments[segment.parameter].kept, numbers[segment.parameter], self._words(tile, segment))

    def _words(self, tile: TileContent, segment: ParameterStep) -> torch.Tensor:
        place = self._layout.segments[segment.parameter].packed
        return tile.states[State.PACKED][place.start : place.stop].view(torch.uint8)

    def _numbers(self, tile: TileContent, segment: ParameterStep) -> dict[str, float]:
        """Returns the coefficients of a parameter by their names in `LAMB_COEFFICIENTS`."""
        packed = unpack(self._layout.segments[segment.parameter].kept, self._words(tile, segment))
        return {"lamb_coeff_freeze": 0.0, "last_factor": 1.0, **packed}

    def _warm_up(
        self, tile: TileContent, segments: Sequence[ParameterStep], numbers: Mapping[int, dict[str, float]]
    ) -> None:
        """Steps by the kernel of LAMB, and adds the trust ratios to their means."""
        partition = _partition(tile)
        steps = [
            kernels.LambSegment(part.start, part.stop, part.step.lamb.warm, part.noise, tile.kept.get(part.parameter))
            for part in segments
        ]
        sums = kernels.lamb_moments(partition, steps)
        ratios = [kernels.lamb_ratio(step.step, [own]) for step, own in zip(steps, sums, strict=True)]
        kernels.lamb_move(partition, steps, ratios)
        for segment, ratio in zip(segments, ratios, strict=True):
            of_parameter, beta = numbers[segment.parameter], segment.step.lamb.coeff_beta
            # As in DeepSpeed: a ratio of 1 has a norm of 0.
            if ratio != 1:
                of_parameter["lamb_coeff_freeze"] = beta * of_parameter["lamb_coeff_freeze"] + (1 - beta) * ratio
            momentum = tile.states[State.EXP_AVG][segment.start : segment.stop]
            of_parameter["momentum_scale"] = math.sqrt(_squares(momentum) / len(momentum))

    def _freeze(self, tile: TileContent, segment: ParameterStep, numbers: dict[str, float]) -> None:
        """Begins the fresh variance at the frozen one, and sets the scale of the momentum for its compression."""
        part, scale = slice(segment.start, segment.stop), numbers.get("momentum_scale", 0.0)
        tile.states[State.EXP_AVG_SQ_FRESH][part] = tile.states[State.EXP_AVG_SQ][part]
        united = segment.step.lamb.united
        numbers["scaling_coeff"] = united / scale if scale and united else 1.0

    def _exchange(
        self,
        tile: TileContent,
        segments: Sequence[ParameterStep],
        piece: slice,
        trained: torch.Tensor,
        numbers: Mapping[int, Mapping[str, float]],
    ) -> None:
        """Steps the momentum of a piece, replaces it by the mean of all ranks, and steps the fresh variance by it."""
        momentum, fresh = tile.states[State.EXP_AVG], tile.states[State.EXP_AVG_SQ_FRESH]
        before = momentum[piece].clone()
        parts = []
        for segment in segments:
            start, stop = max(segment.start, piece.start), min(segment.stop, piece.stop)
            if start < stop:
                part, gradient = slice(start, stop), tile.gradient_of(segment)[start - segment.start :][: stop - start]
                scaling = numbers[segment.parameter]["scaling_coeff"]
                parts.append((part, segment.step.adam, scaling))
                _step_momentum(tile, segment, gradient, segment.step.adam.grad_scale, trained, part)
                momentum[part].mul_(scaling)
        if self._phase is Phase.MOMENTA:
            self._replace(tile, momentum, trained, piece)
        for part, adam, scaling in parts:
            old = before[part.start - piece.start : part.stop - piece.start]
            # The gradient of which this momentum is made, as far as signs tell.
            rebuilt = momentum[part].div_(scaling).sub(old, alpha=adam.beta1).div_(1 - adam.beta1)
            fresh[part].mul_(adam.beta2).addcmul_(rebuilt, rebuilt, value=1 - adam.beta2)

    def _step(
        self, tile: TileContent, segment: ParameterStep, trained: torch.Tensor, numbers: dict[str, float]
    ) -> None:
        """Moves the weights of a parameter by its frozen trust ratio, times what the fresh variance says."""
        adam, lamb, fresh = segment.step.adam, segment.step.lamb, tile.states[State.EXP_AVG_SQ_FRESH]
        factor = momenta = updates = 0.0
        chunks = [
            (chunk, self._scratch[chunk.part.start - segment.start :][: chunk.part.stop - chunk.part.start])
            for chunk in _chunks([segment])
        ]
        for chunk, update in chunks:
            divisor, here = _divisor(tile, chunk), trained[chunk.part]
            update.copy_(torch.where(here, tile.states[State.EXP_AVG][chunk.part] / divisor, 0.0))
            momenta += _squares(update)
            update.add_(self._master(tile, chunk), alpha=adam.weight_decay)
            updates += _squares(update)
            divisor.div_(fresh[chunk.part].sqrt().add_(adam.eps))
            factor = max(factor, float(torch.where(here, divisor, 0.0).max()))
        if updates:
            share = min(1.0, math.sqrt(momenta) / math.sqrt(updates))
            factor = factor * share + 1 - share
        before = numbers["last_factor"]
        factor = min(max(factor, lamb.factor_min), lamb.factor_max)
        factor = min(max(factor, before * (1 - lamb.factor_threshold)), before * (1 + lamb.factor_threshold))
        numbers["last_factor"] = factor
        for chunk, update in chunks:
            self._add(tile, chunk, update.mul_(-adam.lr * numbers["lamb_coeff_freeze"] * factor))


def _squares(values: torch.Tensor) -> float:
    """Returns the sum of the squares of values, (n,) fp32, added in a fixed order."""
    return sum(kernels.squares_of_chunks(values, SIGN_BLOCK))
