"""Updates by one fused kernel in one pass: AdamW, Adagrad, Lion, SGD, which all step element by element.

A unit whose gradient waits on the device is updated by the device's own kernel; all others are updated on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload import kernels
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps, partition_of, segments_in
from offload.kernels import cuda
from offload.layout.modes import Mode
from offload.states import State
from offload.swapper.memory.device import Device


class FusedUpdates:
    """Strategy of every optimizer whose kernel needs one pass."""

    scratch_nbytes = 0

    def __init__(self, *, mode: Mode, device: Device, gradients: GradientAccumulator) -> None:
        self._mode, self._device, self._gradients = mode, device, gradients

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state, and the scales of their blocks."""
        return self._mode.padded_part(state, start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        """Returns the steps of a unit, on the device if its gradient stays on the device."""
        if self._gradients.stays(update.unit):
            return _DeviceSteps(update, self._mode, self._device)
        return _HostSteps(update, self._mode)


class _HostSteps:
    """Steps of one unit by the kernel on the host."""

    passes = 1
    in_place = False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, update: UnitUpdate, mode: Mode) -> None:
        self._update, self._mode = update, mode

    def run(self, tile: TileContent, last: bool) -> None:
        """Steps all segments in the tile."""
        segments = [segment for _, segment in segments_in(self._update, tile)]
        if segments:
            assert tile.gradient is not None
            kernels.update(partition_of(self._mode, tile.states, tile.gradient), segments)


class _DeviceSteps:
    """Steps of one unit by the kernel on the device, in the memory of its states."""

    passes = 1
    in_place = True
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, update: UnitUpdate, mode: Mode, device: Device) -> None:
        self._update, self._mode, self._device = update, mode, device

    def run(self, tile: TileContent, last: bool) -> None:
        """Steps all segments in the tile, and waits for the kernel.

        No event has to precede the kernel. The norm is known, so the gradient is complete; every reader of the unit
        waits for its update.
        """
        segments = [segment for _, segment in segments_in(self._update, tile)]
        if not segments:
            return
        assert tile.gradient is not None
        partition = partition_of(self._mode, tile.states, tile.gradient)
        # The update stream is not the one of compute, so the next forward overlaps with the update. The CPU as a
        # compute device has no such stream and runs the host's kernel.
        with self._device.updating():
            (cuda.update if partition.weight.is_cuda else kernels.update)(partition, segments)
            done = self._device.updated()
        done.wait()  # blocks this thread alone
