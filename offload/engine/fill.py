"""Moving a model's weights into their homes, one unit at a time, and reading homes back on a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload import kernels
from offload.aio import aligned_empty
from offload.engine.birth import materialize
from offload.engine.homes import Homes, Partitions
from offload.engine.layout import UnitLayout
from offload.engine.placement import Placement
from offload.engine.ranks import Ranks
from offload.engine.updater import Resident
from offload.swapper.arena import DeviceArena
from offload.swapper.device import Device
from offload.swapper.host import HostArena, Lease
from offload.swapper.pager import Pager
from offload.swapper.residency import Tier
from offload.swapper.states import Mode, State
from offload.swapper.store import Future, Store


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
                piece = device.take(nbytes)
                assert piece is not None, "the device arena was sized for every home"
                resident = Resident(device.view(piece).view(mode.states[state]), None)
            resident.tensor.zero_()
            residents[unit, state] = resident
    return residents


class Filler:
    """Writes one unit after the other to its home and, where there is one, to the store.

    Holds two buffers of the largest unit's weights while it works; the host arena is still untouched then.
    """

    def __init__(
        self,
        mode: Mode,
        parts: Partitions,
        homes: Homes,
        pager: Pager,
        residents: Mapping[tuple[int, State], Resident],
        device: Device,
        store: Store | None,
        shares: Sequence[tuple[range, range]],
        ranks: Ranks | None,
    ) -> None:
        self._mode, self._parts, self._homes = mode, parts, homes
        self._ranks = ranks
        self._shares = shares
        """This rank's trainable and frozen elements of each unit."""
        self._pager, self._residents, self._device, self._store = pager, residents, device, store
        self._buffers = {state: aligned_empty(parts.largest_unit) for state in (State.WEIGHT, State.RESIDUAL)}

    def fill(self, model: nn.Module, layouts: Sequence[UnitLayout], seed: int) -> None:
        """Take the weights of `model`; each parameter is left empty as soon as it has been copied."""
        for index, layout in enumerate(layouts):
            names = [segment.name for segment in layout.segments]
            given = any(not model.get_parameter(name).is_meta for name in names)
            materialize(model, names, (seed * 1_000_003 + index) % 2**63)
            flats = self._flats(index, layout.numel)
            for segment in layout.segments:
                parameter = model.get_parameter(segment.name)
                values = parameter.detach().to("cpu").contiguous().view(-1)
                self._split(values, {state: flat[segment.start : segment.stop] for state, flat in flats.items()})
                # The hooks give it a placeholder of its shape; until then it holds no memory.
                parameter.data = parameter.data.new_empty(0)
            if self._ranks is not None and given:  # others may have drawn other numbers; what we draw is the same
                for flat in flats.values():
                    self._ranks.broadcast(flat, 0)
            self._put(index, flats)

    def read_back(self, unit_count: int) -> None:
        """Resume: fill the homes above DISK from the store's newest slots."""
        assert self._store is not None
        for unit in range(unit_count):
            for state, nbytes in self._parts.nbytes[unit].items():
                if state is State.GRAD:
                    continue
                home = self._home(unit, state)
                if home is not None:
                    buffer = home.buffer or aligned_empty(nbytes)
                    self._store.read(unit, state, self._store.newest[unit], 0, buffer[:nbytes]).wait()
                    if home.buffer is None:
                        self._device.copy(home.tensor.view(torch.uint8), torch.frombuffer(buffer, dtype=torch.uint8))

    def _flats(self, unit: int, numel: int) -> dict[State, torch.Tensor]:
        """Zeroed flat memory for the unit's weight and, in a mode that splits it, the residual."""
        flats: dict[State, torch.Tensor] = {}
        for state, dtype in self._mode.states.items():
            if state in self._buffers:
                flats[state] = torch.frombuffer(self._buffers[state], dtype=dtype)[:numel]
                flats[state].zero_()
        return flats

    def _split(self, values: torch.Tensor, out: Mapping[State, torch.Tensor]) -> None:
        if State.RESIDUAL in out:
            kernels.split_master(values.float(), out[State.WEIGHT], out[State.RESIDUAL])
        else:
            out[State.WEIGHT].copy_(values)

    def _put(self, unit: int, flats: Mapping[State, torch.Tensor]) -> None:
        """Copy this rank's share of a unit's weight and residual home; moments are zero already, in new files too."""
        writes: dict[State, list[tuple[int, Future]]] = {}
        copies: list[Future] = []
        trainable, frozen = self._shares[unit]
        for state, flat in flats.items():
            if state not in self._parts.nbytes[unit]:
                continue
            itemsize, start = flat.element_size(), 0
            home = self._home(unit, state)
            for share in (trainable, frozen) if state is State.WEIGHT else (trainable,):
                first, last, end = share.start * itemsize, share.stop * itemsize, start + len(share) * itemsize
                if home is not None:
                    self._device.copy(home.tensor.view(torch.uint8)[start:end], flat.view(torch.uint8)[first:last])
                if self._store is not None and self._store.keeps(unit, state) and share:
                    buffer = self._buffers[state][first:last]
                    writes.setdefault(state, []).append((start, self._store.write(unit, state, 0, start, buffer)))
                    if share is frozen and self._store.spec.slots == 2 and trainable:
                        # Updates write the trainable part alone, so what lies behind it must be in both slots.
                        copies.append(self._store.write(unit, state, 1, start, buffer))
                start = end
        for write in [*copies, *(write for each in writes.values() for _, write in each)]:
            write.wait()
        if self._store is not None and writes:
            self._store.wrote(unit, 0, writes)

    def _home(self, unit: int, state: State) -> Resident | None:
        """A partition's memory where its home is above DISK."""
        if state is not State.WEIGHT:
            return self._residents.get((unit, state))
        if self._homes[unit][State.WEIGHT] is Tier.DEVICE:
            return Resident(self._pager.device_home(unit), None)
        if self._homes[unit][State.WEIGHT] is Tier.HOST:
            lease: Lease = self._pager.home_lease(unit)
            return Resident(lease.tensor(torch.uint8), lease.buffer)
        return None
