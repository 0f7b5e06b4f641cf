"""Updates by Muon and SinkGD: a tile has whole matrices, or elements that are in none.

    a matrix        gradient, momentum ─► update ─► direction ─► master ─► weight
    the others      the kernel of AdamW

The direction of Muon is computed on the compute device: its products take as many operations as a forward of thousands
of tokens. A GPU receives the update of a matrix in bf16 and returns the direction, 4 bytes an element in all. A matrix
that several ranks divide gets its direction on one of them, its home (see `optim.exchange`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload import kernels
from offload.distributed.process_group import Ranks
from offload.engine.optim.exchange import Exchange, Trade, carve
from offload.engine.optim.matrices.directions import Workspace, balance, in_bf16, orthogonalize
from offload.engine.optim.matrices.steps import MatrixSegment, MatrixStep, MuonStep
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps, partition_of, segments_in
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.modes import MUON, Mode
from offload.layout.optimizer_states import Whole, cuts, join, split
from offload.sizes import align_up
from offload.states import State
from offload.swapper.memory.device import Device

_ALIGNMENT = 64
"""Alignment of matrices in the scratch memory, in bytes."""


class MatrixUpdates:
    """Strategy of Muon and SinkGD. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(
        self,
        *,
        mode: Mode,
        layouts: Sequence[UnitLayout],
        parts: Sequence[range],
        whole: Whole,
        scratch: torch.Tensor,
        device: Device,
        ranks: Ranks | None,
    ) -> None:
        """Takes over the scratch memory.

        Args:
            mode: the mode.
            layouts: the layout of each unit.
            parts: elements of each unit that this rank updates.
            whole: sizes of matrices.
            scratch: (n,) fp32 of the host arena: a gradient, a master and a square of the largest matrix, and what
                ranks exchange.
            device: the compute device.
            ranks: all ranks; None if each has whole units.
        """
        self.mode, self.layouts, self.parts, self._device = mode, layouts, parts, device
        self.scratch_nbytes = scratch.nbytes
        sizes = (whole.parameter, whole.parameter, whole.square, whole.traded)
        self._gradient, self._master, self._square, traded = carve(scratch, *sizes)
        self._in_bf16 = in_bf16(device)
        self.exchange: Exchange | None = None
        """Exchange of divided matrices; None if there are none."""
        if ranks is not None:
            self.exchange = Exchange(ranks=ranks, layouts=layouts, mode=mode, memory=traded)

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state, or those that are in no matrix."""
        if state not in self.mode.partial:
            return range(start, stop)
        part = self.parts[unit]
        rest = max(0, min(self.layouts[unit].rest_stop, part.stop) - part.start)
        return range(min(start, rest), min(stop, rest))

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit, whose tiles end at borders of matrices."""
        layout, part = self.layouts[update.unit], self.parts[update.unit]
        return _UnitSteps(self, layout, update, cuts(layout, self.mode, part, self.exchange is None, tile_numel))

    @property
    def traded_dtype(self) -> torch.dtype:
        """Dtype in which ranks exchange updates and directions."""
        return torch.bfloat16 if self.mode.optimizer == MUON and self._in_bf16 else torch.float32

    # -- the step of a matrix ---------------------------------------------------------------------------

    def update_of(
        self, states: Mapping[State, torch.Tensor], gradient: torch.Tensor, segment: MatrixSegment
    ) -> torch.Tensor:
        """Steps the momentum of a matrix, or of a part of it, and returns the update from which its direction follows.

        Args:
            states: its momentum, (n,), if it has one.
            gradient: (n,); not written.
            segment: the step.

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
        self, momentum: torch.Tensor, gradient: torch.Tensor, segment: MatrixSegment, step: MuonStep
    ) -> torch.Tensor:
        """Steps a bf16 momentum, stochastically rounded, and returns its fp32 values before that, in scratch memory."""
        # The kernel of SGD: a weight of 0 becomes the momentum with a learning rate of -1.
        found = self._master[: len(momentum)].zero_()
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
        kernels.update(kernels.Partition(found, gradient, (momentum,)), [whole])
        return found

    def room(self, numel: int, step: MatrixStep) -> torch.Tensor:
        """Returns the memory in which a matrix of so many elements waits for `direction`, (numel,)."""
        if not isinstance(step, MuonStep):
            return self._gradient[:numel]
        return (_halves(self._master, numel)[0] if self._in_bf16 else self._master)[:numel]

    def put(self, room: torch.Tensor, place: slice, update: torch.Tensor) -> None:
        """Copies `update` to a place in `room`, in which it may lie itself, elsewhere."""
        if room.data_ptr() == update.data_ptr():
            update = self._master[: len(update)].copy_(update)
        room[place] = update

    def direction(self, shape: tuple[int, int], step: MatrixStep) -> torch.Tensor:
        """Returns the direction of the matrix in `room`: (rows, columns) in the scratch memory of gradients."""
        numel = shape[0] * shape[1]
        if not isinstance(step, MuonStep):
            found = self._gradient[:numel].view(shape)
            balance(found, step.iterations)
            return found
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
        """Does the same with products in fp32."""
        numel = shape[0] * shape[1]
        matrix, other = self._master[:numel], self._gradient[:numel]
        workspace = Workspace(matrix, other, self._square)
        found = orthogonalize(shape, workspace, step.ns_steps, step.ns_coefficients)
        if found.data_ptr() == other.data_ptr() and found.is_contiguous():
            return found
        # The number of iterations decides in which of the two the direction is, and the master needs its own memory.
        # A direction that lies in its memory column by column becomes one of rows.
        if found.data_ptr() == other.data_ptr():
            matrix.view(shape).copy_(found)
            found = matrix.view(shape)
        return other.view(shape).copy_(found)

    def _on_device(self, matrix: torch.Tensor, direction: torch.Tensor, step: MuonStep) -> torch.Tensor:
        """Copies `matrix` to the device, and the direction back into host memory; returns the latter."""
        shape = (direction.shape[0], direction.shape[1])
        # The update stream beside that of compute, so the next forward runs on. All memory is of this stream, and the
        # copies wait for the work before them.
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
        segment: MatrixSegment,
    ) -> None:
        """Moves the weights of a matrix, or of a part of it, in place.

        Args:
            states: its weight, and what completes the weight to a master, (n,) each.
            direction: (n,), not in the scratch memory of masters.
            shape: rows and columns of the entire matrix.
            segment: the step, and the noise that rounds the masters.
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


class _UnitSteps:
    """Steps of one unit."""

    passes = 1
    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, updates: MatrixUpdates, layout: UnitLayout, update: UnitUpdate, cuts: Sequence[range]) -> None:
        self._updates, self._layout, self._update = updates, layout, update
        self.cuts = cuts

    def run(self, tile: TileContent, last: bool) -> None:
        """Steps what a tile contains: elements by AdamW, or matrices."""
        if others := [segment for _, segment in segments_in(self._update, tile)]:
            assert tile.gradient is not None
            kernels.update(partition_of(self._updates.mode, tile.states, tile.gradient), others)
        pairs = zip(self._update.parameters, self._update.segments, strict=True)
        mine = {
            index: segment
            for index, segment in pairs
            if isinstance(segment, MatrixSegment) and tile.start <= segment.start and segment.stop <= tile.stop
        }
        for index, segment in mine.items():
            if index not in self._update.shared:
                self._step(self._layout.segments[index], tile, segment)
        # Every rank's last tile has all that it has of matrices.
        if self._update.shared and tile.stop == self._update.numel:
            self._trade(tile, mine)

    def _step(self, parameter: Segment, tile: TileContent, segment: MatrixSegment) -> None:
        """Steps a matrix of which this rank has all elements."""
        states, gradient = _content(tile, segment)
        shape, step = (parameter.shape[0], parameter.shape[1]), segment.step
        update = self._updates.update_of(states, gradient, segment)
        room = self._updates.room(parameter.numel, step)
        if room.data_ptr() != update.data_ptr():
            room.copy_(update)
        self._updates.move(states, self._updates.direction(shape, step).view(-1), shape, segment)

    def _trade(self, tile: TileContent, mine: Mapping[int, MatrixSegment]) -> None:
        """Steps the matrices that several ranks divide."""
        exchange = self._updates.exchange
        assert exchange is not None
        trade = exchange.begin(self._update.unit, self._update.shared, self._updates.traded_dtype)
        away = [(self._layout.segments[index], mine[index], index) for index in trade.away if index in mine]
        for _, segment, index in away:
            update = self._updates.update_of(*_content(tile, segment), segment)
            trade.part(index, exchange.rank).copy_(update)
        trade.go()
        for each in trade.here:
            self._step_home(trade, each.number, tile, mine[each.number])
        trade.back()
        for parameter, segment, index in away:
            states, _ = _content(tile, segment)
            shape = (parameter.shape[0], parameter.shape[1])
            self._updates.move(states, trade.part(index, exchange.rank), shape, segment)

    def _step_home(self, trade: Trade, index: int, tile: TileContent, segment: MatrixSegment) -> None:
        """Steps this rank's part of a divided matrix, and puts the direction of the others' parts into `trade`."""
        exchange, parameter, step = self._updates.exchange, self._layout.segments[index], segment.step
        assert exchange is not None
        parts = next(each.parts for each in trade.here if each.number == index)
        places = {part.rank: slice(part.position, part.position + part.numel) for part in parts}
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


def _content(tile: TileContent, segment: MatrixSegment) -> tuple[dict[State, torch.Tensor], torch.Tensor]:
    """Returns states and gradient of a matrix, or of a part of it, in a tile."""
    own = slice(segment.start - tile.start, segment.stop - tile.start)
    numel = tile.stop - tile.start
    assert tile.gradient is not None
    # What a matrix does not have is empty in its tiles.
    return {state: memory[own] for state, memory in tile.states.items() if len(memory) == numel}, tile.gradient[own]


def _halves(memory: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two runs of at least `numel` elements in bf16, aligned, in memory of as many elements in fp32."""
    flat = memory.view(torch.bfloat16)
    first = align_up(numel * flat.itemsize, _ALIGNMENT) // flat.itemsize
    return flat[:first], flat[first : first + numel]
