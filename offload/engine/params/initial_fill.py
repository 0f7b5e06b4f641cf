"""Moving a model's weights into their homes, one unit at a time, and reading homes back on a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.aio.protocols import Future
from offload.engine.distributed.process_group import Ranks
from offload.engine.params.deferred_parameter import forget, origin_of
from offload.engine.params.local_shards import Held, Resident
from offload.engine.params.meta_init import materialize
from offload.layout.flat_layout import UnitLayout
from offload.layout.master_weights import split
from offload.layout.placement import Placement
from offload.layout.tiers import Partitions
from offload.states import State, Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.modes import Mode


def make_residents(
    parts: Partitions, mode: Mode, placement: Placement, host: HostArena, device: DeviceArena
) -> dict[tuple[int, State], Resident]:
    """Memory for every state but weight and gradient whose home is not DISK; moments are zero."""
    homes = placement.homes
    residents: dict[tuple[int, State], Resident] = {}
    for unit, row in enumerate(parts.nbytes):
        for state, nbytes in row.items():
            if state in (State.WEIGHT, State.GRAD) or homes[unit][state] is Tier.DISK:
                continue
            if homes[unit][state] is Tier.HOST:
                raised = (unit, state) in placement.raised
                lease = (host.weights if raised else host.homes).take(nbytes)
                assert lease is not None, "the class of homes was sized for every home, the cache for what was raised"
                resident = Resident(lease.tensor(mode.states[state]), lease.buffer, lease if raised else None)
            else:
                resident = Resident(device.keep(nbytes).view(mode.states[state]), None)
            resident.tensor.zero_()
            residents[unit, state] = resident
    return residents


def _values(parameter: nn.Parameter) -> Iterator[tuple[int, torch.Tensor]]:
    """All of a parameter, (n,) at a time on the CPU, each with its position: from where it is read, or of its own."""
    origin = origin_of(parameter)
    if origin is None:
        yield 0, parameter.detach().to("cpu").contiguous().view(-1)
    else:
        yield from origin.pieces()


class Filler:
    """Writes one unit after the other to its home and, where there is one, to the store.

    Holds the masters of the largest unit while it works; the host arena is still untouched then.
    """

    def __init__(self, held: Held, largest_unit: int, ranks: Ranks | None) -> None:
        self._held, self._ranks, self._store = held, ranks, held.store
        numel = largest_unit // held.mode.weight_dtype.itemsize
        self._buffers = {state: aligned_empty(numel * dtype.itemsize) for state, dtype in held.mode.weights.items()}

    def fill(self, model: nn.Module, layouts: Sequence[UnitLayout], seed: int) -> None:
        """Take the weights of `model`, or read them; each parameter is left empty as soon as it has been copied."""
        for index, layout in enumerate(layouts):
            names = [segment.name for segment in layout.segments]
            given = any(not model.get_parameter(name).is_meta for name in names)
            materialize(model, names, (seed * 1_000_003 + index) % 2**63)
            flats = self._flats(index, layout.numel)
            for segment in layout.segments:
                parameter = model.get_parameter(segment.name)
                for position, values in _values(parameter):
                    first = segment.start + position
                    split(values, {state: flat[first : first + len(values)] for state, flat in flats.items()})
                # The hooks give it a placeholder of its shape; until then it holds no memory.
                forget(parameter)
            if self._ranks is not None and given:  # others may have drawn other numbers; what we draw is the same
                for flat in flats.values():
                    self._ranks.broadcast(flat, 0)
            self._put(index, flats)

    def read_back(self, unit_count: int) -> None:
        """Resume: fill the homes above DISK from the store's newest slots."""
        assert self._store is not None
        for unit in range(unit_count):
            for state, nbytes in self._held.states(unit).items():
                home = self._held.home(unit, state)
                if home is not None:
                    buffer = home.buffer or aligned_empty(nbytes)
                    self._store.read(unit, state, self._store.newest[unit], 0, buffer[:nbytes]).wait()
                    if home.buffer is None:
                        self._held.put(unit, state, 0, buffer[:nbytes])

    def _flats(self, unit: int, numel: int) -> dict[State, torch.Tensor]:
        """Zeroed flat memory for the unit's weight and what its master has beside it."""
        flats: dict[State, torch.Tensor] = {}
        for state, dtype in self._held.mode.weights.items():
            flats[state] = torch.frombuffer(self._buffers[state], dtype=dtype)[:numel]
            flats[state].zero_()
        return flats

    def _put(self, unit: int, flats: Mapping[State, torch.Tensor]) -> None:
        """Copy this rank's share of a unit's masters home; moments are zero already, in new files too."""
        writes: dict[State, list[tuple[int, Future]]] = {}
        trainable, frozen = self._held.shares[unit]
        for state, flat in flats.items():
            if state not in self._held.states(unit):
                continue
            itemsize, start = flat.element_size(), 0
            home = self._held.home(unit, state)
            for share in (trainable, frozen) if state is State.WEIGHT else (trainable,):
                first, last, end = share.start * itemsize, share.stop * itemsize, start + len(share) * itemsize
                if home is not None:
                    self._held.device.copy(home.tensor.view(torch.uint8)[start:end], flat.view(torch.uint8)[first:last])
                if self._store is not None and self._store.keeps(unit, state) and share:
                    buffer = self._buffers[state][first:last]
                    writes.setdefault(state, []).append((start, self._store.write(unit, state, 0, start, buffer)))
                start = end
        for write in [write for each in writes.values() for _, write in each]:
            write.wait()
        if self._store is not None and writes:
            self._store.wrote(unit, 0, writes)
