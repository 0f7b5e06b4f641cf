"""This rank's partition of every state of every unit, and the tier of each partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.aio import aligned_empty
from offload.aio.protocols import Future
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import Mode
from offload.states import State, Tier
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.pager import Pager
from offload.swapper.store import Store
from offload.swapper.store.model_files import ModelFiles
from offload.swapper.table import UnitSize


@dataclass(frozen=True, slots=True)
class ResidentShard:
    """A partition on HOST or DEVICE.

    `tensor` has shape (numel,) and the dtype of the state. For weights it has shape (nbytes,) and dtype uint8. `buffer`
    is the same memory if it is in the host arena, else None.
    """

    tensor: torch.Tensor
    buffer: memoryview | None
    spare: HostBuffer | None = None
    """The host buffer of a partition that is also stored on DISK; the buffer may be freed between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShards:
    """This rank's partitions in a store. It needs no memory of an engine; `LocalShards` adds the tiers above DISK."""

    mode: Mode
    layouts: tuple[UnitLayout, ...]
    shares: Sequence[tuple[range, range]]
    """This rank's trainable and frozen elements of each unit."""
    store: Store

    def mode_of(self, unit: int) -> Mode:
        """Returns the mode of a unit: the run's mode, or the same mode with weights in fp32."""
        return self.layouts[unit].mode_in(self.mode)

    def states(self, unit: int) -> dict[State, int]:
        """Returns the bytes of each partition of `unit` that outlives a step."""
        return dict(self.store.spec.partitions[unit])

    def stored(self, unit: int, state: State) -> bool:
        """Returns True if the store keeps this partition."""
        return self.store.keeps(unit, state)

    def read(self, unit: int, state: State, start: int, buffer: memoryview) -> list[Future]:
        """Starts to fill `buffer` with the newest bytes of a partition, from byte `start` on."""
        return [self.store.read(unit, state, self.store.newest[unit], start, buffer)]

    def put(self, unit: int, state: State, start: int, buffer: memoryview) -> None:
        """Copies `buffer` to byte `start` of the partition, if its tier is above DISK."""

    def mark_rewritten(self) -> None:
        """Records that bytes of the last commit, if there is one, are about to be overwritten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShards(StoredShards):
    """All partitions of this rank. Valid while no update is under way."""

    nbytes: Sequence[Mapping[State, int]]
    """Bytes of each partition, including gradients, by unit and state."""
    sizes: Sequence[UnitSize]
    residents: dict[tuple[int, State], ResidentShard]
    """Partitions above DISK, except for weights. The update worker removes those with a `spare` buffer."""
    pager: Pager
    device: Device
    model_files: ModelFiles | None = None
    """The model's own files, if weights are read there."""

    def states(self, unit: int) -> dict[State, int]:
        """Returns the bytes of each partition of `unit` that outlives a step."""
        if self.layouts[unit].in_files:
            return {State.WEIGHT: self.layouts[unit].numel * self.mode_of(unit).weight_dtype.itemsize}
        return {state: nbytes for state, nbytes in self.nbytes[unit].items() if state is not State.GRAD}

    def resident_of(self, unit: int, state: State) -> ResidentShard | None:
        """Returns the memory of a partition whose tier is above DISK, or None for a partition on DISK."""
        if state is not State.WEIGHT:
            return self.residents.get((unit, state))
        if self.sizes[unit].tier is Tier.DEVICE:
            return ResidentShard(self.pager.weight_updates.device_tier(unit), None)
        if self.sizes[unit].tier is Tier.HOST:
            host_buffer: HostBuffer = self.pager.weight_updates.tier_buffer(unit)
            return ResidentShard(host_buffer.tensor(torch.uint8), host_buffer.buffer)
        return None

    def read(self, unit: int, state: State, start: int, buffer: memoryview, compare: bool = True) -> list[Future]:
        """Fills `buffer`, on the host, with the newest bytes of a partition from byte `start` on.

        If `compare` is False, the caller compares the bytes itself; see `Store.read`. Returns futures that the caller
        must wait for before it uses `buffer`. The list is empty if the partition was copied from memory at once.
        """
        # A promoted partition is also read from the store, because the store compares the bytes with checksums.
        if self.stored(unit, state):
            return [self.store.read(unit, state, self.store.newest[unit], start, buffer, compare=compare)]
        if self.model_files is not None and unit in self.model_files:
            return self.model_files.read(unit, start, buffer)
        resident = self.resident_of(unit, state)
        assert resident is not None, "a state that is not on disk has a tier above"
        part = resident.tensor.view(torch.uint8)[start : start + len(buffer)]
        self.device.copy(torch.frombuffer(buffer, dtype=torch.uint8), part)
        return []

    def tier_of(self, unit: int, state: State) -> Tier:
        """Returns the present tier of a partition. A partition that was promoted from DISK is on HOST."""
        if state is State.WEIGHT:
            return self.sizes[unit].tier
        resident = self.residents.get((unit, state))
        if resident is None:
            return Tier.DISK
        return Tier.DEVICE if resident.buffer is None else Tier.HOST

    def read_back(self) -> None:
        """Fills partitions above DISK from the newest slots of the store, if the store contains them too."""
        for unit in range(len(self.layouts)):
            for state, nbytes in self.states(unit).items():
                resident = self.resident_of(unit, state) if self.stored(unit, state) else None
                if resident is None:
                    continue
                # A partition in the host arena is read in place. One on the device needs a temporary buffer.
                buffer = resident.buffer or aligned_empty(nbytes)
                self.store.read(unit, state, self.store.newest[unit], 0, buffer[:nbytes]).wait()
                if resident.buffer is None:
                    self.put(unit, state, 0, buffer[:nbytes])

    def put(self, unit: int, state: State, start: int, buffer: memoryview) -> None:
        """Copies `buffer` to byte `start` of the partition, if its tier is above DISK."""
        resident = self.resident_of(unit, state)
        if resident is not None:
            part = resident.tensor.view(torch.uint8)[start : start + len(buffer)]
            self.device.copy(part, torch.frombuffer(buffer, dtype=torch.uint8))

    def mark_rewritten(self) -> None:
        """Records that bytes of the last commit are about to be overwritten, until the next commit."""
        self.pager.mark_rewritten(True)
