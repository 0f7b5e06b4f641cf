"""What this rank holds of the model: its partition of every state of every unit, and where each one lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.aio.protocols import Future
from offload.layout.flat_layout import UnitLayout
from offload.states import State, Tier
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.modes import Mode
from offload.swapper.pager import Pager
from offload.swapper.store import Store
from offload.swapper.unit_table import UnitSize


@dataclass(frozen=True, slots=True)
class ResidentShard:
    """A partition whose home is not DISK: (numel,) of its dtype, and its bytes where they lie in the host arena."""

    tensor: torch.Tensor
    buffer: memoryview | None
    spare: HostBuffer | None = None
    """The lease of a partition that lies on DISK as well, and may be given back between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShards:
    """All partitions of this rank. Valid while no update is under way."""

    mode: Mode
    layouts: tuple[UnitLayout, ...]
    shares: Sequence[tuple[range, range]]
    """This rank's trainable and frozen elements of each unit."""
    nbytes: Sequence[Mapping[State, int]]
    """Bytes of each partition, gradients among them."""
    sizes: Sequence[UnitSize]
    residents: dict[tuple[int, State], ResidentShard]
    """States beside the weight whose home is above DISK; the update worker takes away what is spare."""
    pager: Pager
    device: Device
    store: Store | None

    def states(self, unit: int) -> dict[State, int]:
        """Bytes of each partition of `unit` that outlives a step."""
        return {state: nbytes for state, nbytes in self.nbytes[unit].items() if state is not State.GRAD}

    def stored(self, unit: int, state: State) -> bool:
        """Whether the store keeps this partition."""
        return self.store is not None and self.store.keeps(unit, state)

    def resident_of(self, unit: int, state: State) -> ResidentShard | None:
        """A partition's memory where its home is above DISK."""
        if state is not State.WEIGHT:
            return self.residents.get((unit, state))
        if self.sizes[unit].tier is Tier.DEVICE:
            return ResidentShard(self.pager.weight_updates.device_tier(unit), None)
        if self.sizes[unit].tier is Tier.HOST:
            lease: HostBuffer = self.pager.weight_updates.tier_buffer(unit)
            return ResidentShard(lease.tensor(torch.uint8), lease.buffer)
        return None

    def read(self, unit: int, state: State, start: int, buffer: memoryview, compare: bool = True) -> list[Future]:
        """Fill `buffer` from byte `start` of the newest copy: at once from its home, else when the future is done.

        Who reads a partition in order can have it compared with its checksums; see `Store.read`.
        """
        if self.store is not None and self.store.keeps(unit, state):
            return [self.store.read(unit, state, self.store.newest[unit], start, buffer, compare=compare)]
        home = self.resident_of(unit, state)
        assert home is not None, "what is not on disk has a home above it"
        part = home.tensor.view(torch.uint8)[start : start + len(buffer)]
        self.device.copy(torch.frombuffer(buffer, dtype=torch.uint8), part)
        return []

    def put(self, unit: int, state: State, start: int, buffer: memoryview) -> None:
        """Copy `buffer` to byte `start` of the home, where it is above DISK."""
        home = self.resident_of(unit, state)
        if home is not None:
            part = home.tensor.view(torch.uint8)[start : start + len(buffer)]
            self.device.copy(part, torch.frombuffer(buffer, dtype=torch.uint8))
