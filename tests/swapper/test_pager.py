"""The pager, over a store in memory, evicts only buffers that may go, and streams a unit that is too large.

Where a CPU computes such a unit is read in place: `test_reads_in_place`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from offload.sizes import PAGE
from offload.states import Tier
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import GatherDecision, Pager, UnitState
from offload.swapper.policy import AccessOrder, Limits, PassKind
from offload.swapper.table import Residency, UnitSize, pieces_of

CPU = Device(torch.device("cpu"))


class Done:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> int:
        return self._nbytes


class MemoryStore:
    """Every byte of unit n is n + 1; `reads` are the units that were read, and from which byte on."""

    committed = False

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: object) -> Done:
        self.reads.append((unit, start))
        buffer[:] = bytes([unit + 1]) * len(buffer)
        return Done(len(buffer))


class Twin:
    """Another rank, which does what this one does: both agree to all that this one could do."""

    def __init__(self) -> None:
        self.pager: Pager
        self.series: list[tuple[int, ...]] = []
        self._left: list[int] = []

    def agree(self, unit: int, state: Callable[[], UnitState]) -> GatherDecision:
        self.go_on(-1)
        has = state()
        if has.series is None:
            return GatherDecision(not has.unit, together=True, all=has.all, ahead=has.ahead)
        self.series.append(has.series.missing)
        self._left += has.series.missing
        has.series.begin()
        return GatherDecision(gather=False, together=True, series=True)

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        return ahead()

    @property
    def behind(self) -> bool:
        return bool(self._left)

    def go_on(self, unit: int) -> None:
        while self._left and (last := self._left.pop(0)) is not None:
            self.pager.serve_gather(last)
            if last == unit:
                break

    def gather(self, unit: int, whole: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        return uploaded


def pager_of(
    pages: list[int],
    weights: int,
    device: int,
    trace: list[int] | None = None,
    twin: Twin | None = None,
    on: Device = CPU,
) -> tuple[Pager, MemoryStore]:
    store = MemoryStore()
    sizes = [
        UnitSize(str(unit), nbytes, Tier.DISK, nbytes, pieces_of([range(nbytes)]))
        for unit, nbytes in enumerate(size * PAGE for size in pages)
    ]
    host = HostArena(HostBudget(0, weights * PAGE, 0, 0), on)
    pager = Pager(sizes, host, DeviceArena(device * PAGE, on), on, store, Limits(), twin)  # type: ignore[arg-type]
    if twin is not None:
        twin.pager = pager
    if trace:
        pager.table.access_order = AccessOrder.of(trace, PassKind.TRAIN)
    return pager, store


def test_the_host_buffer_of_a_running_update_stays() -> None:
    pager, store = pager_of([1, 1, 1], weights=2, device=3)
    pager.acquire(0)
    pager.release(0)
    pager.begin_updates([0])
    host_buffer = pager.weight_updates.buffer_for(0)
    assert host_buffer is not None and pager.weight_updates.holds_weights(0)
    for unit in (1, 2, 1, 2):
        assert bool((pager.acquire(unit) == unit + 1).all())
        pager.release(unit)
    assert pager._entries[0].host_buffer is host_buffer
    pager.weight_updates.publish_weights(0, True, False)
    pager.acquire(0)
    assert [unit for unit, _ in store.reads].count(0) == 1


def test_the_host_buffer_of_a_pending_update_can_be_evicted() -> None:
    """It is only old weights; the update that comes first needs the memory."""
    pager, _ = pager_of([1, 1, 1], weights=2, device=3, trace=[0, 1, 2, 2, 1, 0])
    for unit in (1, 2):
        pager.acquire(unit, ahead=False)
        pager.release(unit)
    pager.end_step()
    pager.table.access_order = AccessOrder.of([0, 1, 2, 2, 1, 0])
    pager.begin_updates([0, 1, 2])
    assert pager.weight_updates.buffer_for(0) is not None
    assert pager.residency(2) is Residency.DISK, "used last"
    assert pager.weight_updates.holds_weights(1)


def test_a_unit_that_is_about_to_be_used_keeps_its_host_buffer() -> None:
    """Its use has been told to the trace, which looks beyond it already."""
    pager, _ = pager_of([1, 1, 1], weights=2, device=3)
    for unit in (0, 1):
        pager.acquire(unit, ahead=False)
        pager.release(unit)
    pager.table.access_order = AccessOrder.of([0, 1, 2, 1, 2, 0])
    pager.begin_updates([0, 1, 2])
    for unit in (0, 1):
        assert pager.weight_updates.buffer_for(unit) is not None
        pager.weight_updates.publish_weights(unit, True, False)
    entry = pager._entries[0]
    entry.pins += 1  # a thread waits in `acquire`, and has not gone on yet
    pager.table.access_order.use(0)
    assert pager.table.access_order.distance(0) > pager.table.access_order.distance(2), "the trace alone would take it"
    assert pager.weight_updates.buffer_for(2) is None
    assert entry.host_buffer is not None
    entry.pins -= 1


def apart() -> Device:
    """Returns a device whose memory the host does not address."""
    device = Device(torch.device("cpu"))
    device.host_addressable = False
    return device


@pytest.mark.parametrize("replicas", [False, True], ids=["no CPU", "several ranks"])
def test_a_unit_larger_than_a_host_buffer_is_streamed_in_chunks(replicas: bool) -> None:
    pager, store = pager_of(
        [7, 1], weights=4, device=8, twin=Twin() if replicas else None, on=CPU if replicas else apart()
    )
    assert pager.streams(0) and not pager.streams(1) and not pager.weight_updates.delivers(0)
    assert bool((pager.acquire(0) == 1).all())
    assert store.reads == [(0, start * PAGE) for start in (0, 2, 4, 6)]
    assert pager.host.weights.space.used_bytes == 0
    assert bool((pager.acquire(1) == 2).all())


def test_small_units_come_ahead_though_the_device_has_room_for_no_more_than_the_largest() -> None:
    pager, _ = pager_of([9, 2, 2, 2], weights=30, device=9, trace=[0, 1, 2, 3])
    for unit in range(4):
        pager.acquire(unit)
        if unit:
            assert unit == 3 or pager.residency(unit + 1) is Residency.DEVICE
        pager.release(unit)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_gather_beside_a_series_ends_the_series_on_the_rank_that_asked(ahead: bool) -> None:
    """The unit comes in the place of one that uses without a round count on."""
    twin = Twin()
    pager, _ = pager_of([1, 1, 1, 1], weights=8, device=5, twin=twin)
    pager.arena.keep(2 * PAGE)  # gradients: the arena is as large as all units, and has room for three

    def use(*units: int) -> None:
        for unit in units:
            assert bool((pager.acquire(unit, ahead) == unit + 1).all())
            pager.release(unit)

    use(0, 1, 2, 3)
    pager.end_step()
    use(0, 1, 2, 3)  # of a step that fails, so what comes next is not foreseen
    lacking = next(unit for unit in range(4) if pager.residency(unit) is not Residency.DEVICE)
    edited = (lacking + 1) % 4
    pager.begin_updates([edited])
    pager.weight_updates.publish_weights(edited, False, False)
    use(edited)
    assert twin.series == [(edited,)], "the room of the old weights"
    use(lacking)
    dropped = [unit for unit in range(4) if pager.residency(unit) is not Residency.DEVICE]
    assert len(dropped) == 1
    use(*dropped, 0, 1, 2, 3)
