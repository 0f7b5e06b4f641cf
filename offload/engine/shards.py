"""This rank's partition of every state of every unit, and the tier of each partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.aio import aligned_empty, crc32c
from offload.aio.protocols import Future, wait_for_all
from offload.fileio.buffered_copy import BUFFER_NBYTES
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


class PartitionSum(NamedTuple):
    """The CRC-32C of the first bytes of a partition."""

    crc: int
    nbytes: int


def checksum(values: torch.Tensor, before: int = 0) -> int:
    """Returns the CRC-32C of a tensor's bytes, from `before`, that of the bytes which precede them."""
    data: Any = values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()  # older stubs know no buffers
    return crc32c(data, before)


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
    deferred: set[int]
    """Units that are written to the store at commits alone. A unit leaves when a `spare` buffer of it does."""
    stale: set[int] = field(default_factory=set)
    """Deferred units whose slots in the store are older than memory. The update worker adds, `commit` removes."""
    dropped: dict[tuple[int, State], None] = field(default_factory=dict)
    """Partitions with a `spare` buffer that have left, in the order in which they come back."""
    undeferred: set[int] = field(default_factory=set)
    """Units that are deferred again when all their partitions have come back."""
    model_files: ModelFiles | None = None
    """The model's own files, if weights are read there."""
    watched: set[int] = field(default_factory=set)
    """Units whose updates leave checksums of what memory alone contains. The audit of the next step compares them."""
    sums: dict[tuple[int, State], PartitionSum] = field(default_factory=dict)
    """Checksums that updates have left, of partitions that have not changed since. The update worker sets them."""
    frozen_sums: dict[int, int] = field(default_factory=dict)
    """CRC-32C of the frozen weights of units, as the first audit has read them."""

    def states(self, unit: int) -> dict[State, int]:
        if self.layouts[unit].in_files:
            _, frozen = self.shares[unit]
            return {State.WEIGHT: len(frozen) * self.mode_of(unit).weight_dtype.itemsize}
        return {state: nbytes for state, nbytes in self.nbytes[unit].items() if state is not State.GRAD}

    def stored(self, unit: int, state: State) -> bool:
        """Returns True if the store contains the newest bytes of this partition, and each update writes them there."""
        return unit not in self.deferred and self.store.keeps(unit, state)

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
            _, frozen = self.shares[unit]
            return self.model_files.read(unit, frozen.start * self.mode_of(unit).weight_dtype.itemsize + start, buffer)
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
        assert not self.stale, "`flush` comes before memory is given back"
        for unit in range(len(self.layouts)):
            for state, nbytes in self.states(unit).items():
                resident = self.resident_of(unit, state) if self.store.keeps(unit, state) else None
                if resident is None:
                    continue
                # A partition in the host arena is read in place. One on the device needs a temporary buffer.
                buffer = resident.buffer or aligned_empty(nbytes)
                self.store.read(unit, state, self.store.newest[unit], 0, buffer[:nbytes]).wait()
                if resident.buffer is None:
                    self.put(unit, state, 0, buffer[:nbytes])

    def record_sum(self, unit: int, state: State, first: int, values: torch.Tensor) -> None:
        """Continues the checksum of a partition by new `values` from byte `first` on, if a watch asks for it.

        The update worker calls this tile by tile, in order.
        """
        # What a store has too is compared with the store's checksums. Updates made before their step write such alone.
        if unit not in self.watched or self.stored(unit, state):
            self.sums.pop((unit, state), None)
            return
        before = self.sums[unit, state].crc if first else 0
        self.sums[unit, state] = PartitionSum(checksum(values, before), first + values.nbytes)

    def sum_of(self, unit: int, state: State) -> PartitionSum | None:
        """Returns the checksum of what the last update wrote to a partition; None if nobody has computed it.

        No update may be under way.
        """
        if not self.store.keeps(unit, state) or unit in self.stale:
            return self.sums.get((unit, state))
        nbytes = self.store.own_nbytes(unit)[state]
        crc = self.store.sum_of(unit, state, nbytes)
        return None if crc is None else PartitionSum(crc, nbytes)

    def commit(self, step: int, contents: Mapping[str, torch.Tensor]) -> None:
        """Commits the newest states of all units; see `Store.commit`. No update may be under way."""
        self.flush()
        self.store.commit(step, contents)

    def flush(self) -> None:
        """Writes to the store the units that updates have changed in memory alone. Raises `IoError`."""
        # update thread, or the calling thread while that one is idle: nothing changes these partitions meanwhile, and
        # forwards only read them.
        for unit in sorted(self.stale):
            slot, written = self.store.target(unit), dict[State, list[tuple[int, Future]]]()
            for state, nbytes in self.store.own_nbytes(unit).items():
                resident = self.resident_of(unit, state)
                assert resident is not None, "all states of a deferred unit are in memory"
                written[state] = self._write(unit, state, slot, nbytes, resident)
            self.store.wrote(unit, slot, written)
            self.stale.discard(unit)

    def _write(
        self, unit: int, state: State, slot: int, nbytes: int, resident: ResidentShard
    ) -> list[tuple[int, Future]]:
        """Writes a partition to a slot, and returns the start and the ended future of each write."""
        writes: list[tuple[int, Future]] = []
        # A partition in the host arena is written from there, one on the device by two buffers in turn.
        buffers = [aligned_empty(min(nbytes, BUFFER_NBYTES)) for _ in range(2)] if resident.buffer is None else []
        try:
            for start in range(0, nbytes, BUFFER_NBYTES):
                stop = min(start + BUFFER_NBYTES, nbytes)
                if resident.buffer is not None:
                    memory = resident.buffer[start:stop]
                else:
                    if len(writes) > 1:
                        writes[-2][1].wait()
                    memory = buffers[len(writes) % 2][: stop - start]
                    values = resident.tensor.view(torch.uint8)[start:stop]
                    self.device.copy(torch.frombuffer(memory, dtype=torch.uint8), values)
                writes.append((start, self.store.write(unit, state, slot, start, memory)))
        finally:
            wait_for_all([write for _, write in writes])
        for _, write in writes:
            write.wait()
        return writes

    def drop_spare(self, stop: int) -> None:
        """Frees the `spare` buffers that end beyond byte `stop` of the class of weights; see `Updates.drop_spare`."""
        for key, resident in list(self.residents.items()):
            spare = resident.spare
            if spare is not None and spare.offset + spare.nbytes > stop:
                del self.residents[key]
                if key[0] in self.deferred:
                    self.deferred.discard(key[0])
                    self.undeferred.add(key[0])
                self.dropped[key] = None
                spare.release()

    def grow_host(self, cache: int) -> None:
        """Takes memory for `cache` bytes of the cache, and reads dropped partitions back into it, as far as they fit.

        No update may be under way. Raises `BudgetError` as `Pager.grow_host` does, and `IoError` if a partition cannot
        be read. Those that were not read stay on DISK.
        """
        keys = list(self.dropped)
        # calling thread: while it reads, no other engine starts, which would wait for these buffers.
        with self.pager.host.alone():
            spares = self.pager.grow_host(cache, [self.nbytes[unit][state] for unit, state in keys])
            try:
                for index, ((unit, state), spare) in enumerate(zip(keys, spares, strict=True)):
                    if spare is not None:
                        self.store.read(unit, state, self.store.newest[unit], 0, spare.buffer).wait()
                        tensor = spare.tensor(self.mode_of(unit).states[state])
                        self.residents[unit, state], spares[index] = ResidentShard(tensor, spare.buffer, spare), None
                        del self.dropped[unit, state]
            finally:
                with self.pager.lock:
                    for spare in spares:
                        if spare is not None:
                            spare.release()
        whole = self.undeferred - {unit for unit, _ in self.dropped}
        self.deferred.update(whole)
        self.undeferred.difference_update(whole)

    def put(self, unit: int, state: State, start: int, buffer: memoryview) -> None:
        self.sums.pop((unit, state), None)
        if state is State.WEIGHT:
            self.frozen_sums.pop(unit, None)
        resident = self.resident_of(unit, state)
        if resident is not None:
            part = resident.tensor.view(torch.uint8)[start : start + len(buffer)]
            self.device.copy(part, torch.frombuffer(buffer, dtype=torch.uint8))

    def mark_rewritten(self) -> None:
        self.pager.mark_rewritten(True)
