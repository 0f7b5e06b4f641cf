"""Updates by Muon and SinkGD: a tile contains whole matrices, or elements of no matrix.

    a matrix        gradient, momentum ─► update ─► direction ─► master ─► weight
    the others      the kernel of AdamW

The direction of Muon is computed on the compute device: its products take as many operations as a forward of thousands
of tokens. A GPU receives the update of a matrix in bf16 and returns the direction, 4 bytes an element in all. A matrix
that several ranks divide gets its direction on one of them, its home (see `ParameterExchange`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from offload import kernels
from offload.config import OptimizerBlock
from offload.distributed.process_group import Ranks
from offload.engine.optimizer import Optimizer, Rule, no_rate
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.layout.flat_layout import ParameterSegment, UnitLayout
from offload.layout.modes import MUON, SINKGD, Mode
from offload.layout.optimizer_states import (
    MARK,
    DividedParameter,
    checked_mark,
    cuts,
    divided,
    join,
    matrices_of,
    split,
)
from offload.optimizers.fused import InOnePass, Undivided, betas, floats, kernel_segments, partition_of
from offload.precision import products_in_bf16
from offload.sizes import align_up
from offload.states import State
from offload.swapper.memory.device import Device

# -- rules ---------------------------------------------------------------------------------------------
#
# The groups of an optimizer with a rule for matrices: each group contains matrices alone, or none.


class MuonStep(NamedTuple):
    """A step of Muon (Jordan et al. 2024), as `torch.optim.Muon` makes it. State: a momentum."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    ns_steps: int
    """Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float]
    adjust_lr_fn: str
    """How the learning rate follows from the shape: "original" or "match_rms_adamw"."""
    grad_scale: float = 1.0
    """Factor of the gradient: the clip coefficient over the loss scale."""

    def length(self, shape: Sequence[int]) -> float:
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))


class SinkGDStep(NamedTuple):
    """A step of SinkGD (Scetbon et al. 2025, arXiv 2502.06742), with decoupled decay. No state."""

    lr: float
    weight_decay: float
    iterations: int
    """Normalizations of the rows, each followed by a normalization of the columns."""
    grad_scale: float = 1.0


MatrixStep: TypeAlias = MuonStep | SinkGDStep


@dataclass(frozen=True, kw_only=True)
class MatrixRule(Rule):
    """A rule that steps matrices in a way of its own, and all other parameters by AdamW."""

    mark: str = MARK

    @abstractmethod
    def matrix_step(self, group: Mapping[str, Any], grad_scale: float) -> MatrixStep:
        """Returns the arguments of the step of a matrix."""

    def step(
        self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float
    ) -> MatrixStep | kernels.AdamWStep:
        if group[MARK]:
            return self.matrix_step(group, grad_scale)
        return kernels.AdamWStep(
            **floats(group, "lr", "eps", "weight_decay"),
            **betas(group),
            step=count,
            grad_scale=grad_scale,
            decoupled=True,
        )

    def steps_whole(self, step: Any) -> bool:
        return isinstance(step, MatrixStep)

    def strategy(self, setting: UpdateSetting) -> MatrixUpdates:
        return MatrixUpdates(setting)

    def configured(self, groups: Sequence[Mapping[str, Any]], block: OptimizerBlock, model: nn.Module) -> Optimizer:
        """Returns the optimizer of a config's block.

        A group's `use_muon` decides for all its parameters, before their own marks.
        """
        settings = block.settings
        matrix_lr, adam_lr = settings.pop(f"{self.name}_lr"), settings.pop("adam_lr")
        settings.pop("ns_method", None)  # only one exists
        rates = {True: _first(matrix_lr, block.params.lr), False: _first(adam_lr, block.params.lr)}
        divided = [part for group in groups for part in _divided(group, model)] or [{"params": [], MARK: False}]
        for group in divided:
            if "lr" not in group:
                rate = rates[group[MARK]]
                if rate is None:
                    raise no_rate()
                group["lr"] = rate
        defaults = {"lr": _first(block.params.lr, adam_lr, matrix_lr), MARK: False, **settings}
        return Optimizer(divided, defaults, self)


class MuonRule(MatrixRule):
    """Muon (Jordan et al. 2024), as `torch.optim.Muon` computes it."""

    def matrix_step(self, group: Mapping[str, Any], grad_scale: float) -> MuonStep:
        first, second, third = group["ns_coefficients"]
        return MuonStep(
            **floats(group, "lr", "momentum", "weight_decay"),
            nesterov=bool(group["nesterov"]),
            ns_steps=int(group["ns_steps"]),
            ns_coefficients=(float(first), float(second), float(third)),
            adjust_lr_fn=group["adjust_lr_fn"],
            grad_scale=grad_scale,
        )

    def facts(self, device: Device) -> dict[str, Any]:
        """Returns the dtype of the matrices that ranks send to each other."""
        return {"dtype of Muon's products": "bf16" if in_bf16(device) else "fp32"}


class SinkGDRule(MatrixRule):
    """SinkGD (Scetbon et al. 2025, arXiv 2502.06742)."""

    def matrix_step(self, group: Mapping[str, Any], grad_scale: float) -> SinkGDStep:
        numbers = floats(group, "lr", "weight_decay")
        return SinkGDStep(**numbers, iterations=int(group["iterations"]), grad_scale=grad_scale)


MUON_RULE = MuonRule(
    name=MUON,
    scheduled=("lr", "momentum", "betas", "eps", "weight_decay"),
    fixed=("ns_steps",),
    flags=(MARK, "nesterov"),
    defaults=("adjust_lr_fn", "ns_coefficients"),
)
SINKGD_RULE = SinkGDRule(
    name=SINKGD,
    scheduled=("lr", "betas", "eps", "weight_decay"),
    fixed=("iterations",),
    flags=(MARK,),
    known_as="SinkGD",
)


def _divided(group: Mapping[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Divides a group into a group of its matrices and a group of its other parameters, without empty groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inner = matrices_of(model)
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in group["params"]:
        # A parameter of another model has no name here, and is refused later.
        name = names.get(id(parameter), "a parameter")
        if group.get(MARK) is None:
            mark = name in inner
        else:
            mark = checked_mark(group[MARK], name, tuple(parameter.shape))
        parts[mark].append(parameter)
    return [{**group, "params": params, MARK: mark} for mark, params in parts.items() if params]


def _first(*rates: float | None) -> float | None:
    return next((rate for rate in rates if rate is not None), None)


# -- exchange ------------------------------------------------------------------------------------------
#
# Exchange of parameters that several ranks divide, and whose step needs them as a whole.
#
#     part of each rank ─► the parameter's home ─► the step of the whole ─► part of each rank
#
# The home is the rank that holds the most elements of a parameter (`layout.optimizers.whole`), so a parameter that lies
# on one rank is not sent. An exchange of a unit takes one message to each rank, and one back.
#
# Threads. The update worker calls everything, while the thread that runs the model waits in `step()`: only then no
# other collective is under way. Every rank updates the same units in the same order, each in one exchange or more, and
# takes part even if it has nothing to send or to receive. So a wait ends when the other workers arrive, which wait only
# for their drives and for earlier exchanges. Like every collective, a wait also ends when a rank is lost. Messages go
# through the host, as updates do.


class ParameterExchange:
    """One rank's side of the exchanges of its engine."""

    def __init__(self, *, ranks: Ranks, layouts: Sequence[UnitLayout], mode: Mode, memory: torch.Tensor) -> None:
        """Takes over `memory`, (n,) fp32 of the host arena, which fits this rank's exchange of the largest unit."""
        self._ranks, self._memory = ranks, memory
        self._divided = [divided(layout, mode, ranks.mesh.shards) for layout in layouts]

    @property
    def rank(self) -> int:
        return self._ranks.shard

    def begin(self, unit: int, indices: Sequence[int], dtype: torch.dtype, number: int = 0, of: int = 1) -> Trade:
        """Returns an exchange of divided parameters of a unit, the same on every rank; `of` exchanges share the memory.

        `indices` names the parameters that have a gradient. `dtype` is the dtype of the exchanged elements. `number`
        counts the exchanges that share the memory.
        """
        parameters = [parameter for parameter in self._divided[unit] if parameter.number in indices]
        numel = len(self._memory) // of
        memory = self._memory[number * numel : (number + 1) * numel].view(dtype)
        return Trade(self._ranks, parameters, memory)


class Trade:
    """One exchange: this rank's parts of `away` go out and back, other ranks' parts of `here` come in and go back."""

    def __init__(self, ranks: Ranks, parameters: Sequence[DividedParameter], memory: torch.Tensor) -> None:
        """Lays the parts out in `memory`: first outgoing parts, home by home, then incoming parts, rank by rank."""
        self._ranks, shard, shards = ranks, ranks.shard, ranks.mesh.shards
        self.away = {
            parameter.number: _part_of(parameter, shard) for parameter in parameters if parameter.home != shard
        }
        """Position and length of this rank's part of each parameter with another home; (0, 0) without a part."""
        self.here = tuple(parameter for parameter in parameters if parameter.home == shard)
        """Parameters whose home is this rank."""
        self._sent, self._got = [0] * shards, [0] * shards
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        end = 0
        for home in range(shards):
            for parameter in (parameter for parameter in parameters if parameter.home == home != shard):
                numel = self.away[parameter.number][1]
                self._places[parameter.number, shard] = memory[end : end + numel]
                self._sent[home] += numel
                end += numel
        self._out, first = memory[:end], end
        for rank in range(shards):
            for parameter in self.here if rank != shard else ():
                _, numel = _part_of(parameter, rank)
                self._places[parameter.number, rank] = memory[end : end + numel]
                self._got[rank] += numel
                end += numel
        self._in = memory[first:end]

    def part(self, index: int, rank: int) -> torch.Tensor:
        """Returns the memory, (n,), of a rank's part; this rank's own is written before `go` and read after `back`."""
        return self._places[index, rank]

    def go(self) -> None:
        self._ranks.swap(self._in, self._got, self._out, self._sent, "gather what a step needs as a whole")

    def back(self) -> None:
        self._ranks.swap(self._out, self._sent, self._in, self._got, "scatter what a step has made")


def _part_of(parameter: DividedParameter, rank: int) -> tuple[int, int]:
    """Returns position and length of a rank's part of a parameter; both are 0 if it has none."""
    return next(((part.position, part.numel) for part in parameter.parts if part.rank == rank), (0, 0))


def carve(memory: torch.Tensor, *numels: int) -> tuple[torch.Tensor, ...]:
    """Divides `memory`, (n,), into runs of full pages, each of at least as many elements as its number."""
    itemsize = memory.element_size()
    sizes = [align_up(numel * itemsize) // itemsize for numel in numels]
    starts = accumulate(sizes, initial=0)
    return tuple(memory[start : start + size] for start, size in zip(starts, sizes, strict=False))


# -- directions ----------------------------------------------------------------------------------------
#
# The directions in which Muon and SinkGD move a matrix.
#
#     Muon      the orthogonal matrix near the momentum, by a few Newton-Schulz iterations
#     SinkGD    the gradient, with all rows of one norm and all columns of one norm
#
# `orthogonalize` performs the operations of `torch.optim.Muon` in the same order and, in bf16, in the same dtype, so
# that both give the same bits. On a processor without products in bf16 the dtype is fp32, as in DeepSpeed. Versions of
# torch before 2.9 have no such optimizer.


_SMALLEST_NORM = 1e-7
"""Lower bound, as in torch, of the norm by which a momentum is divided."""
_SMALLEST_LINE = 1e-20
"""Lower bound of the norm of a row or column. Squares of smaller elements vanish in fp32, and the norm would be 0."""


class Workspace(NamedTuple):
    """Memory for `orthogonalize`: flat tensors of one dtype on the computing device. Each field names its elements."""

    matrix: torch.Tensor
    """Rows times columns. The caller writes the matrix here."""
    other: torch.Tensor
    """Rows times columns."""
    polynomial: torch.Tensor
    """The square of the smaller of rows and columns."""


def in_bf16(device: Device) -> bool:
    """Returns True if a device makes the products of Muon in bf16, else in fp32."""
    # Without instructions for it a product in bf16 takes a hundred times as long as in fp32.
    return not device.host_addressable or products_in_bf16()


def orthogonalize(
    shape: tuple[int, int], workspace: Workspace, steps: int, coefficients: tuple[float, float, float]
) -> torch.Tensor:
    """Returns a matrix near the matrix in `workspace.matrix`, with singular values near 1.

    Args:
        shape: rows and columns of the matrix.
        workspace: memory, whose `matrix` contains the rows of the matrix, one after the other; all is overwritten.
        steps: number of iterations.
        coefficients: a, b and c of the iteration X <- aX + (bA + cA^2)X with A = XX'.

    Returns:
        (rows, columns) in the memory and dtype of the workspace; columns are contiguous if there are fewer of them.
    """
    a, b, c = coefficients
    numel, small, large = shape[0] * shape[1], min(shape), max(shape)
    tall = shape[0] > shape[1]
    matrix = workspace.matrix[:numel].view(shape)
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=_SMALLEST_NORM))  # the largest singular value is now 1 at most
    polynomial = workspace.polynomial[: small * small].view(small, small)
    free, used = workspace.other[:numel].view(small, large), workspace.matrix[:numel].view(small, large)
    for _ in range(steps):
        # Read before the new matrix takes its place.
        gram = free.view(-1)[: small * small].view(small, small)
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(x, polynomial, x, beta=a, out=free)
        x, free, used = free, used, free
    return x.T if tall else x


def balance(gradient: torch.Tensor, iterations: int) -> None:
    """Scales each row, then each column, to a norm of the root of its length, repeatedly and in place.

    Args:
        gradient: (rows, columns) fp32, contiguous. Rows and columns of zeros stay so.
        iterations: number of normalizations of the rows, and of the columns.
    """
    rows, columns = gradient.shape
    for _ in range(iterations):
        for dimension, length in ((1, columns), (0, rows)):
            norms = torch.linalg.vector_norm(gradient, dim=dimension, keepdim=True)
            gradient.mul_(math.sqrt(length) / norms.clamp_(min=_SMALLEST_LINE))


# -- updates -------------------------------------------------------------------------------------------


_ALIGNMENT = 64
"""Alignment of matrices in the scratch memory, in bytes."""


class MatrixUpdates(Undivided):
    """Strategy of Muon and SinkGD. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(self, setting: UpdateSetting) -> None:
        """Divides the scratch memory: gradient, master and square of the largest matrix, and exchanges."""
        self.mode, self.layouts, self.parts = setting.mode, setting.layouts, setting.parts
        self._device, whole, ranks = setting.device, setting.whole, setting.ranks
        sizes = (whole.parameter, whole.parameter, whole.square, whole.traded)
        self._gradient, self._master, self._square, traded = carve(setting.scratch, *sizes)
        self._in_bf16, self._whole_units = in_bf16(setting.device), ranks.mesh.shards == 1
        self.exchange = ParameterExchange(ranks=ranks, layouts=self.layouts, mode=self.mode, memory=traded)
        """Exchange of divided matrices."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements for every state; for a partial state, only the elements that are in no matrix."""
        if state not in self.mode.partial:
            return range(start, stop)
        part = self.parts[unit]
        rest = max(0, min(self.layouts[unit].rest_stop, part.stop) - part.start)
        return range(min(start, rest), min(stop, rest))

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        layout, part = self.layouts[update.unit], self.parts[update.unit]
        return _UnitSteps(self, layout, update, cuts(layout, self.mode, part, self._whole_units, tile_numel))

    @property
    def traded_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.mode.optimizer == MUON and self._in_bf16 else torch.float32

    # -- the step of a matrix ---------------------------------------------------------------------------

    def update_of(
        self, states: Mapping[State, torch.Tensor], gradient: torch.Tensor, segment: ParameterStep
    ) -> torch.Tensor:
        """Steps the momentum of a matrix, or of a part of it, and returns the update from which its direction follows.

        Args:
            states: its momentum, (n,), if it has one.
            gradient: (n,); not written.

        Returns:
            (n,) fp32, in the scratch memory of gradients or in that of the momentum.
        """
        step, numel = segment.step, len(gradient)
        scaled = self._gradient[:numel].copy_(gradient).mul_(step.grad_scale)
        if not isinstance(step, MuonStep):
            return scaled
        momentum = states[State.EXP_AVG]
        if momentum.dtype is torch.float32:
            momentum.lerp_(scaled, 1 - step.momentum)
        else:
            momentum = self._rounded(momentum, gradient, segment, step)
        if step.nesterov:
            return scaled.lerp_(momentum, step.momentum)
        return momentum if momentum.data_ptr() != self._master.data_ptr() else scaled.copy_(momentum)

    def _rounded(
        self, momentum: torch.Tensor, gradient: torch.Tensor, segment: ParameterStep, step: MuonStep
    ) -> torch.Tensor:
        """Steps a bf16 momentum with stochastic rounding; returns its unrounded fp32 values, in scratch memory."""
        # The kernel of SGD: a weight of 0 becomes the momentum with a learning rate of -1.
        values = self._master[: len(momentum)].zero_()
        rule = kernels.SGDStep(
            lr=-1.0,
            momentum=step.momentum,
            dampening=step.momentum,
            weight_decay=0.0,
            nesterov=False,
            first=False,
            grad_scale=step.grad_scale,
        )
        whole = kernels.Segment(0, len(momentum), rule, segment.noise)
        kernels.update(kernels.Partition(values, gradient, (momentum,)), [whole])
        return values

    def room(self, numel: int, step: MatrixStep) -> torch.Tensor:
        """Returns the memory, (numel,), in which a matrix waits for `direction`."""
        if not isinstance(step, MuonStep):
            return self._gradient[:numel]
        return (_halves(self._master, numel)[0] if self._in_bf16 else self._master)[:numel]

    def put(self, room: torch.Tensor, place: slice, update: torch.Tensor) -> None:
        """Copies `update` to a place in `room`; `update` itself may lie elsewhere in `room`."""
        if room.data_ptr() == update.data_ptr():
            update = self._master[: len(update)].copy_(update)
        room[place] = update

    def direction(self, shape: tuple[int, int], step: MatrixStep) -> torch.Tensor:
        """Returns the direction of the matrix in `room`: (rows, columns) in the scratch memory of gradients."""
        numel = shape[0] * shape[1]
        if not isinstance(step, MuonStep):
            gradient = self._gradient[:numel].view(shape)
            balance(gradient, step.iterations)
            return gradient
        if not self._in_bf16:
            return self._in_fp32(shape, step)
        # In fp32 a parameter takes as much memory as two in bf16, beginning at multiples of the alignment.
        first, second = _halves(self._master, numel)
        # The update is read: the memory of the gradient is free for the direction.
        direction = self._gradient.view(torch.bfloat16)[:numel].view(shape)
        if not self._device.host_addressable:
            return self._on_device(first[:numel], direction, step)
        workspace = Workspace(first, second, self._square.view(torch.bfloat16))
        return direction.copy_(orthogonalize(shape, workspace, step.ns_steps, step.ns_coefficients))

    def _in_fp32(self, shape: tuple[int, int], step: MuonStep) -> torch.Tensor:
        """Returns the direction as `direction` does, with products in fp32."""
        numel = shape[0] * shape[1]
        matrix, gradient = self._master[:numel], self._gradient[:numel]
        workspace = Workspace(matrix, gradient, self._square)
        direction = orthogonalize(shape, workspace, step.ns_steps, step.ns_coefficients)
        if direction.data_ptr() == gradient.data_ptr() and direction.is_contiguous():
            return direction
        # The number of iterations decides which of the two contains the direction, and the master needs its own memory.
        # A direction that is stored column by column is copied row by row.
        if direction.data_ptr() == gradient.data_ptr():
            matrix.view(shape).copy_(direction)
            direction = matrix.view(shape)
        return gradient.view(shape).copy_(direction)

    def _on_device(self, matrix: torch.Tensor, direction: torch.Tensor, step: MuonStep) -> torch.Tensor:
        """Computes the direction of `matrix` on the device, and returns it in host memory, in `direction`."""
        shape = (direction.shape[0], direction.shape[1])
        # update stream: runs in parallel with the compute stream, so the next forward runs on. All memory is of this
        # stream, and the copies wait for the work before them.
        with self._device.updating():
            sizes = (matrix.numel(), matrix.numel(), min(shape) ** 2)
            workspace = Workspace(*(matrix.new_empty(size, device=self._device.torch) for size in sizes))
            workspace.matrix.copy_(matrix)
            direction.copy_(orthogonalize(shape, workspace, step.ns_steps, step.ns_coefficients))
            done = self._device.updated()
        done.wait()  # blocks this thread alone
        return direction

    def move(
        self,
        states: Mapping[State, torch.Tensor],
        direction: torch.Tensor,
        shape: tuple[int, int],
        segment: ParameterStep,
    ) -> None:
        """Moves the weights of a matrix, or of a part of it, in place.

        Args:
            states: its weight, and the state that completes the weight to a master, (n,) each.
            direction: (n,), not in the scratch memory of masters.
            shape: rows and columns of the entire matrix.
        """
        step = segment.step
        length = step.length(shape) if isinstance(step, MuonStep) else step.lr
        # Joined last: until here the master's memory has served for the products.
        master = join(states, self._master[: len(direction)])
        master.mul_(1 - step.lr * step.weight_decay)
        master.add_(direction, alpha=-length)
        # An fp32 weight is its own master.
        if master.data_ptr() != states[State.WEIGHT].data_ptr():
            split(master, states, segment.noise)


class _UnitSteps(InOnePass):
    def __init__(self, updates: MatrixUpdates, layout: UnitLayout, update: UnitUpdate, cuts: Sequence[range]) -> None:
        self._updates, self._layout, self._update = updates, layout, update
        self.cuts = cuts

    def run(self, tile: TileContent, last: bool) -> None:
        if elements := kernel_segments(self._update, tile):
            assert tile.gradient is not None
            kernels.update(partition_of(self._updates.mode, tile.states, tile.gradient), elements)
        matrices = {
            segment.parameter: segment
            for segment in self._update.segments
            if isinstance(segment.step, MatrixStep) and tile.start <= segment.start and segment.stop <= tile.stop
        }
        for index, segment in matrices.items():
            if index not in self._update.shared:
                self._step(self._layout.segments[index], tile, segment)
        # The last tile of each rank contains all of the rank's parts of divided matrices.
        if self._update.shared and tile.stop == self._update.numel:
            self._trade(tile, matrices)

    def _step(self, parameter: ParameterSegment, tile: TileContent, segment: ParameterStep) -> None:
        states, gradient = _content(tile, segment)
        shape, step = (parameter.shape[0], parameter.shape[1]), segment.step
        update = self._updates.update_of(states, gradient, segment)
        room = self._updates.room(parameter.numel, step)
        if room.data_ptr() != update.data_ptr():
            room.copy_(update)
        self._updates.move(states, self._updates.direction(shape, step).view(-1), shape, segment)

    def _trade(self, tile: TileContent, matrices: Mapping[int, ParameterStep]) -> None:
        exchange = self._updates.exchange
        trade = exchange.begin(self._update.unit, self._update.shared, self._updates.traded_dtype)
        away = [(self._layout.segments[index], matrices[index], index) for index in trade.away if index in matrices]
        for _, segment, index in away:
            update = self._updates.update_of(*_content(tile, segment), segment)
            trade.part(index, exchange.rank).copy_(update)
        trade.go()
        for whole in trade.here:
            self._step_home(trade, whole, tile, matrices[whole.number])
        trade.back()
        for parameter, segment, index in away:
            states, _ = _content(tile, segment)
            shape = (parameter.shape[0], parameter.shape[1])
            self._updates.move(states, trade.part(index, exchange.rank), shape, segment)

    def _step_home(self, trade: Trade, whole: DividedParameter, tile: TileContent, segment: ParameterStep) -> None:
        """Steps this rank's part of a divided matrix, and puts other ranks' parts of the direction into `trade`."""
        index, exchange, step = whole.number, self._updates.exchange, segment.step
        parameter = self._layout.segments[index]
        places = {part.rank: slice(part.position, part.position + part.numel) for part in whole.parts}
        own = places.pop(exchange.rank)
        states, gradient = _content(tile, segment)
        update = self._updates.update_of(states, gradient, segment)
        room = self._updates.room(parameter.numel, step)
        self._updates.put(room, own, update)
        for rank, place in places.items():
            room[place] = trade.part(index, rank)
        shape = (parameter.shape[0], parameter.shape[1])
        direction = self._updates.direction(shape, step).view(-1)
        for rank, place in places.items():
            trade.part(index, rank).copy_(direction[place])
        self._updates.move(states, direction[own], shape, segment)


def _content(tile: TileContent, segment: ParameterStep) -> tuple[dict[State, torch.Tensor], torch.Tensor]:
    """Returns states and gradient of a matrix, or of a part of it, in a tile."""
    own = slice(segment.start - tile.start, segment.stop - tile.start)
    numel = tile.stop - tile.start
    # States that a matrix lacks are empty in its tiles.
    states = {state: memory[own] for state, memory in tile.states.items() if len(memory) == numel}
    return states, tile.gradient_of(segment.within(tile.start, tile.stop))


def _halves(memory: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two runs of at least `numel` elements in bf16, aligned, in memory of as many elements in fp32."""
    flat = memory.view(torch.bfloat16)
    first = align_up(numel * flat.itemsize, _ALIGNMENT) // flat.itemsize
    return flat[:first], flat[first : first + numel]
