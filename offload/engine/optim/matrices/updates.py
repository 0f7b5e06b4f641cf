"""Updates by Muon and SinkGD: a tile is an entire unit, whose parameters step one by one.

    a matrix        gradient, momentum ─► direction ─► master ─► weight
    the others      the kernel of AdamW, on moments among the packed states

The direction of Muon is computed on the compute device: its products take as many operations as a forward of thousands
of tokens. A GPU receives the momentum of a matrix in bf16 and returns the direction, 4 bytes an element in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload import kernels
from offload.engine.optim.matrices.directions import Workspace, balance, orthogonalize
from offload.engine.optim.matrices.steps import MatrixSegment, MatrixStep, MuonStep
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.master_weights import join, split
from offload.layout.opaque_state import open_states
from offload.precision import products_in_bf16
from offload.sizes import align_up
from offload.states import State
from offload.swapper.memory.device import Device

_ALIGNMENT = 64
"""Alignment of matrices in the scratch memory, in bytes."""


class MatrixUpdates:
    """Strategy of Muon and SinkGD. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(self, *, layouts: Sequence[UnitLayout], scratch: torch.Tensor, device: Device) -> None:
        """Takes over the scratch memory.

        Args:
            layouts: the layout of each unit.
            scratch: (n,) fp32 of the host arena: a gradient and a master of the largest parameter.
            device: the compute device.
        """
        self._layouts, self._device = layouts, device
        self.scratch_nbytes = scratch.nbytes
        self._gradient, self._master = scratch[: len(scratch) // 2], scratch[len(scratch) // 2 :]
        # Without such instructions a product in bf16 takes a hundred times as long as in fp32.
        self._in_bf16 = not device.host_addressable or products_in_bf16()

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state but PACKED, of which a tile contains all words."""
        return range(self._layouts[unit].packed_numel) if state is State.PACKED else range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit, which one tile contains entirely."""
        return _UnitSteps(self, self._layouts[update.unit], update)

    def step(
        self,
        segment: Segment,
        states: Mapping[State, torch.Tensor],
        kept: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        step: MatrixStep,
    ) -> None:
        """Updates one matrix in place.

        Args:
            segment: the matrix.
            states: its weight, and what completes the weight to a master, (numel,) each.
            kept: its states by name, of its shape.
            gradient: (numel,); not written.
            step: the arguments.
        """
        rows, columns = segment.shape
        scaled = self._gradient[: segment.numel].copy_(gradient).mul_(step.grad_scale).view(rows, columns)
        if isinstance(step, MuonStep):
            momentum = kept["momentum_buffer"]
            momentum.lerp_(scaled, 1 - step.momentum)
            direction = self._orthogonal(scaled.lerp_(momentum, step.momentum) if step.nesterov else momentum, step)
            length = step.length((rows, columns))
        else:
            balance(scaled, step.iterations)
            direction, length = scaled, step.lr
        # Joined last: until here the master's memory has served for the products.
        master = join(states, self._master[: segment.numel])
        after = master.view(rows, columns)
        after.mul_(1 - step.lr * step.weight_decay)
        after.add_(direction, alpha=-length)
        # An fp32 weight is its own master.
        if master.data_ptr() != states[State.WEIGHT].data_ptr():
            split(master, states)

    def _orthogonal(self, update: torch.Tensor, step: MuonStep) -> torch.Tensor:
        """Returns the direction of Muon in the gradient's scratch memory, which may contain `update`."""
        shape = (update.shape[0], update.shape[1])
        if not self._in_bf16:
            return self._in_fp32(update, shape, step)
        # In fp32 a parameter takes as much memory as two in bf16, beginning at multiples of the alignment.
        first, second = _halves(self._master, update.numel())
        matrix = first[: update.numel()].view(shape).copy_(update)
        # The update is read: its memory is free for the products, and for the direction.
        gram, polynomial = _halves(self._gradient, update.numel())
        if self._device.host_addressable:
            found = orthogonalize(
                shape, Workspace(first, second, gram, polynomial), step.ns_steps, step.ns_coefficients
            )
            return gram[: update.numel()].view(shape).copy_(found)
        return self._on_device(matrix, gram[: update.numel()].view(shape), step)

    def _in_fp32(self, update: torch.Tensor, shape: tuple[int, int], step: MuonStep) -> torch.Tensor:
        """Does the same with products in fp32, whose grams have memory beside the scratch memory."""
        numel, square = update.numel(), min(shape) ** 2
        matrix, other = self._master[:numel], self._gradient[:numel]
        matrix.view(shape).copy_(update)
        workspace = Workspace(matrix, other, torch.empty(square, device="cpu"), torch.empty(square, device="cpu"))
        found = orthogonalize(shape, workspace, step.ns_steps, step.ns_coefficients)
        # The number of iterations decides in which of the two the direction is. The master needs its own memory.
        return found if found.data_ptr() == other.data_ptr() else other.view(shape).copy_(found)

    def _on_device(self, matrix: torch.Tensor, direction: torch.Tensor, step: MuonStep) -> torch.Tensor:
        """Copies `matrix` to the device, and the direction back into host memory; returns the latter."""
        small = min(matrix.shape)
        shape = (matrix.shape[0], matrix.shape[1])
        # The update stream beside that of compute, so the next forward runs on. All memory is of this stream, and the
        # copies wait for the work before them.
        with self._device.updating():
            sizes = (matrix.numel(), matrix.numel(), small * small, small * small)
            workspace = Workspace(*(matrix.new_empty(size, device=self._device.torch) for size in sizes))
            workspace.matrix.copy_(matrix.view(-1))
            direction.copy_(orthogonalize(shape, workspace, step.ns_steps, step.ns_coefficients))
            done = self._device.updated()
        done.wait()  # blocks this thread alone
        return direction


class _UnitSteps:
    """Steps of one unit."""

    passes = 1
    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, updates: MatrixUpdates, layout: UnitLayout, update: UnitUpdate) -> None:
        self._updates, self._layout, self._update = updates, layout, update

    def run(self, tile: TileContent, last: bool) -> None:
        """Steps all parameters of the unit, which the tile contains entirely."""
        assert tile.gradient is not None
        for position, segment in zip(self._update.parameters, self._update.segments, strict=True):
            parameter = self._layout.segments[position]
            own = slice(parameter.start, parameter.stop)
            states: dict[State, torch.Tensor] = {
                state: memory[own] for state, memory in tile.states.items() if state is not State.PACKED
            }
            kept: dict[str, torch.Tensor] = {}
            if parameter.kept:
                words = tile.states[State.PACKED][parameter.packed.start : parameter.packed.stop]
                kept = open_states(parameter.kept, words.view(torch.uint8))
            gradient = tile.gradient[own]
            if isinstance(segment, MatrixSegment):
                self._updates.step(parameter, states, kept, gradient, segment.step)
            elif isinstance(segment, kernels.Segment):
                moments = (kept["exp_avg"].view(-1), kept["exp_avg_sq"].view(-1))
                partition = kernels.Partition(
                    states[State.WEIGHT],
                    gradient,
                    moments,
                    states.get(State.MASTER_LOW_BITS),
                    states.get(State.MASTER),
                )
                kernels.update(partition, [kernels.Segment(0, parameter.numel, segment.step)])


def _halves(memory: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two runs of at least `numel` elements in bf16, aligned, in memory of as many elements in fp32."""
    flat = memory.view(torch.bfloat16)
    first = align_up(numel * flat.itemsize, _ALIGNMENT) // flat.itemsize
    return flat[:first], flat[first : first + numel]
