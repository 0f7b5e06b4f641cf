"""The pager: residencies, reads ahead, orders of uses, and what it evicts."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload import testing
from offload.aio import Priority
from offload.errors import BudgetError, EngineFailed
from offload.sizes import PAGE
from offload.states import Tier
from offload.swapper.caches import HostCache
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import GatherDecision, Pager, UnitState
from offload.swapper.policy import NEVER, AccessOrder, Limits, PassKind
from offload.swapper.store import NoStore
from offload.swapper.table import ARROWS, Residency, UnitSize, pieces_of
from tests.support import models
from tests.support.access_orders import access_order, record
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    Job,
    assert_same,
    config,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
)

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
        record(pager.table.access_order, trace)
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
    assert not pager.weight_updates.delivers(0) and pager.weight_updates.delivers(1)
    assert bool((pager.acquire(0) == 1).all())
    assert store.reads == [(0, start * PAGE) for start in (0, 2, 4, 6)]
    assert pager.host.weights.space.used_bytes == 0
    assert bool((pager.acquire(1) == 2).all())


def test_small_units_come_ahead_though_the_device_has_room_for_no_more_than_the_largest() -> None:
    pager, _ = pager_of([9, 2, 2, 2], weights=30, device=9, trace=[0, 1, 2, 3])
    for unit in range(4):
        pager.acquire(unit)
        if unit:
            assert unit == 3 or pager.table.entries[unit + 1].residency is Residency.DEVICE
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
    lacking = next(unit for unit in range(4) if pager.table.entries[unit].residency is not Residency.DEVICE)
    edited = (lacking + 1) % 4
    pager.begin_updates([edited])
    pager.weight_updates.publish_weights(edited, False, False)
    use(edited)
    assert twin.series == [(edited,)], "the room of the old weights"
    use(lacking)
    dropped = [unit for unit in range(4) if pager.table.entries[unit].residency is not Residency.DEVICE]
    assert len(dropped) == 1
    use(*dropped, 0, 1, 2, 3)


def test_the_pager_takes_the_listed_transitions_alone() -> None:
    host = HostArena(HostBudget(0, 0, 0, 4096), CPU)
    unit = UnitSize("unit", 4096, Tier.HOST, 4096, pieces_of([range(4096)]))
    pager = Pager([unit], host, DeviceArena(4096, CPU), CPU, NoStore(1), Limits())
    entry = pager._entries[0]
    for before, after in itertools.product(Residency, Residency):
        entry.residency = before
        with pager.lock:
            if (before, after) in ARROWS:
                pager.table.move(entry, after)
                assert pager.table.entries[0].residency is after
            else:
                with pytest.raises(AssertionError):
                    pager.table.move(entry, after)


def test_the_cpu_uses_weights_in_host_memory_where_they_are() -> None:
    host = HostArena(HostBudget(0, 0, 0, PAGE), CPU)
    unit = UnitSize("unit", PAGE, Tier.HOST, PAGE, pieces_of([range(PAGE)]), host_addressable=True)
    pager = Pager([unit], host, DeviceArena(0, CPU), CPU, NoStore(1), Limits())
    weights = pager.acquire(0)
    assert weights.data_ptr() == host.address and weights.nbytes == PAGE
    pager.release(0)
    pager.begin_updates([0])
    host_buffer = pager.weight_updates.buffer_for(0)
    assert host_buffer is not None and pager.weight_updates.holds_weights(0)
    host_buffer.tensor(torch.uint8).fill_(7)
    pager.weight_updates.publish_weights(0, in_host_buffer=True, unwritten=True)
    assert bool((pager.acquire(0) == 7).all()), "the write to the store may be in flight"
    pager.weight_updates.flushed(0)
    assert pager.table.entries[0].residency is Residency.DEVICE


orders = st.lists(st.integers(0, 7), min_size=1, max_size=40)


def _without_repeats(order: list[int]) -> list[int]:
    return [unit for i, unit in enumerate(order) if i == 0 or order[i - 1] != unit]


@given(orders)
def test_a_step_that_repeats_the_last_is_foreseen_exactly(order: list[int]) -> None:
    trace, uses = access_order(order), _without_repeats(order)
    assert list(trace.order) == uses
    for position, unit in enumerate(uses):
        rest = uses[position:]
        assert trace.distance(unit) == 0
        assert list(trace.upcoming()) == list(dict.fromkeys(rest)), "the next step has other weights"
        for candidate in range(8):
            ahead = [*rest, *uses]
            assert trace.distance(candidate) == (ahead.index(candidate) if candidate in uses else NEVER)
        assert trace.distances(range(8)) == tuple(trace.distance(other) for other in range(8))
        trace.use(unit)
    assert trace.unforeseen == 0


@given(orders, st.integers(0, 39))
def test_an_evaluation_comes_round_to_its_first_unit(order: list[int], passed: int) -> None:
    trace, uses = access_order(order, PassKind.EVAL), _without_repeats(order)
    for unit in uses[:passed]:
        trace.use(unit)
    assert list(trace.upcoming()) == list(dict.fromkeys([*uses[passed:], *uses[:passed]]))


@given(orders, orders, st.integers(0, 39))
def test_an_evaluation_in_the_middle_of_a_step_leaves_its_order(
    step: list[int], evaluation: list[int], at: int
) -> None:
    trace, uses = access_order(step), _without_repeats(step)
    for position, unit in enumerate(uses):
        if position == at:
            for kind in (PassKind.EVAL, PassKind.TRAIN):
                trace.begin(kind)
                for used in evaluation if kind is PassKind.EVAL else ():
                    trace.use(used)
                if kind is PassKind.EVAL:
                    trace.finish()
        trace.use(unit)
    assert trace.unforeseen == 0
    trace.finish()
    assert list(trace.order) == uses


def test_experts_that_are_expected_come_first_and_backwards_again() -> None:
    """Units 10 to 15 are the experts of a layer; the run before has used 11 and 13."""
    trace = access_order([0, 11, 13, 1, 2, 1, 13, 11, 0])
    trace.use(0)
    trace.expect([10, 12, 14], range(10, 16))
    assert list(trace.upcoming()) == [10, 12, 14, 1, 2, 13, 11, 0], "what the run before chose here is passed over"
    assert [trace.distance(unit) for unit in (10, 12, 14, 1, 2)] == [0, 1, 2, 3, 4]
    assert trace.distances([10, 1, 13, 15]) == (0, 3, 6, NEVER)
    assert list(trace.until(1)) == [10, 12, 14] and list(trace.until(12)) == [10]
    for unit in (10, 12, 14, 1, 2, 1):
        assert trace.distance(unit) == 0
        trace.use(unit)
    trace.use(14)  # its backward, of which the run before knew nothing
    assert list(trace.upcoming()) == [12, 10, 0]
    for unit in (12, 10, 0):
        trace.use(unit)
    assert trace.unforeseen == 0
    trace.finish()
    assert list(trace.order) == [0, 10, 12, 14, 1, 2, 1, 14, 12, 10, 0]


def test_a_recomputation_is_followed_by_its_backward_at_once() -> None:
    """Units 10 to 15 are the experts of layer 0; the run before has used 11 and 13 there, and then layer 3."""
    trace = access_order([2, 0, 11, 13, 11, 0, 3])
    for unit in (2, 0):
        trace.use(unit)
    trace.expect([10, 12, 14], range(10, 16), at_once=True)
    assert [trace.distance(unit) for unit in (10, 12, 14, 0, 3)] == [0, 1, 2, 5, 6]
    assert list(trace.upcoming()) == [10, 12, 14, 0, 3]
    trace.use(10)
    assert trace.distance(10) == 3, "its backward comes before the uses of other layers"
    assert list(trace.until(10)) == [12, 14, 12]
    for unit in (12, 14):
        assert trace.distance(unit) == 0
        trace.use(unit)
    trace.use(14)  # one use serves the end of the recomputation and the begin of the backward
    for unit in (12, 10, 0, 3):
        assert trace.distance(unit) == 0
        trace.use(unit)
    assert trace.unforeseen == 0
    trace.finish()
    assert list(trace.order) == [2, 0, 10, 12, 14, 12, 10, 0, 3]


def test_a_lookup_of_rows_is_no_use_of_its_units() -> None:
    """Units 0 to 3 are pieces of a table that the head uses too; the run before has fetched 0 and 2 for its lookup."""
    trace = access_order([0, 2, 4, 5, 0, 1, 2, 3, 5, 4])
    trace.expect([1], range(4), backward=False)
    assert list(trace.upcoming()) == [1, 4, 5, 0, 2, 3], (
        "nothing is prefetched for the lookup but the piece that it fetches"
    )
    uses = [1, 4, 5, 0, 1, 2, 3, 5, 4]
    for unit in uses:
        assert trace.distance(unit) == 0
        trace.use(unit)
    assert trace.unforeseen == 0
    trace.finish()
    assert list(trace.order) == uses


@given(orders, st.lists(st.tuples(st.sets(st.integers(4, 7)), st.booleans(), orders), max_size=8))
def test_expected_experts_never_fail(order: list[int], steps: list[tuple[set[int], bool, list[int]]]) -> None:
    """Whatever is used, and whatever was expected, the order answers every question."""
    trace = access_order(order)
    units = trace.units()
    for expected, at_once, uses in steps:
        trace.expect(sorted(expected), range(4, 8), at_once=at_once)
        for unit in uses:
            units.put(unit, unit not in units)
            trace.use(unit)
            present = [other for other in range(8) if other in units]
            assert list(units.latest()) == sorted(present, key=lambda unit: (-trace.distance(unit), unit))
            assert list(units.upcoming()) == [other for other in trace.upcoming() if other in units]
            ahead = list(trace.upcoming())
            assert len(ahead) == len(set(ahead))
            for candidate in range(8):
                distance = trace.distance(candidate)
                assert distance >= 0 and (distance == NEVER or len(list(trace.until(candidate))) == distance)
    trace.finish()
    assert list(trace.order) == (
        _without_repeats([unit for _, _, uses in steps for unit in uses]) or _without_repeats(order)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PassKind)
def test_a_run_that_never_ends_records_a_bounded_number_of_uses(
    kind: PassKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loop that runs forwards with a graph, and never steps."""
    testing.replace(monkeypatch, "size.access_order", 10)
    trace = AccessOrder()
    trace.begin(kind)
    for use in range(100):
        trace.use(use % 7)
    trace.finish()
    assert trace.order == tuple(use % 7 for use in range(10))


PAGES = 4
"""Pages of a unit; the host has two, so that units are read in place."""


class Read:
    """A read that ends when a test says so."""

    def __init__(self, unit: int, priority: Priority, fill: Callable[[], None]) -> None:
        self.unit, self.priority = unit, priority
        self._fill, self._ended = fill, threading.Event()
        self.error: OSError | None = None

    def end(self, error: OSError | None = None) -> None:
        self.error = error
        if error is None:
            self._fill()
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        assert self._ended.wait(60 if timeout is None else timeout)
        if self.error is not None:
            raise self.error
        return PAGES * PAGE


class PendingStore:
    """Every byte of unit n is `values[n]`; a read that somebody waits for in vain would end the test."""

    committed = False

    def __init__(self, units: int) -> None:
        self.values = list(range(1, units + 1))
        self.reads: list[Read] = []
        self.at_once = self.refuses = False

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Read:
        if self.refuses:
            raise MemoryError
        value = self.values[unit]
        assert start == 0 and len(buffer) == PAGES * PAGE, "a unit comes in one read"
        buffer[:] = b"\xff" * len(buffer)

        def fill() -> None:
            buffer[:] = bytes([value]) * len(buffer)

        self.reads.append(Read(unit, priority, fill))
        if self.at_once:
            self.reads[-1].end()
        return self.reads[-1]


def pager_of_place(
    units: int, room: int, order: list[int], host_pages: int = 2, limits: Limits | None = None
) -> tuple[Pager, PendingStore]:
    """Returns a pager with room for `room` units on the device, whose next step is foreseen to use them in `order`."""
    cpu, store = Device(torch.device("cpu")), PendingStore(units)
    nbytes = PAGES * PAGE
    sizes = [UnitSize(str(unit), nbytes, Tier.DISK, nbytes, pieces_of([range(nbytes)])) for unit in range(units)]
    host = HostArena(HostBudget(0, host_pages * PAGE, 0, 0), cpu)
    pager = Pager(sizes, host, DeviceArena(room * nbytes, cpu), cpu, store, limits or Limits())
    record(pager.table.access_order, order)
    return pager, store


def use(pager: Pager, store: PendingStore, unit: int) -> None:
    """Uses a unit whose reads end at once."""
    store.at_once = True
    assert bool((pager.acquire(unit) == store.values[unit]).all())
    pager.release(unit)
    store.at_once = False


@pytest.mark.parametrize("limits", [Limits(), Limits(reuse=0)], ids=["no limits", "no reuse"])
def test_a_unit_stays_until_the_last_micro_batch_has_used_it(limits: Limits) -> None:
    """Three micro-batches use each unit in turn; the unit after the next would fit only in the place of this one."""
    pager, store = pager_of_place(3, room=2, order=[0, 0, 0, 1, 1, 1, 2, 2, 2], limits=limits)
    use(pager, store, 0)
    for _ in range(2):
        store.at_once = True
        pager.prefetch()
        assert [read.unit for read in store.reads] == [0, 1]
        store.at_once = False
        assert pager.acquire(0, ahead=False) is not None
        pager.release(0)
    use(pager, store, 1)
    store.at_once = True
    pager.prefetch()
    assert [read.unit for read in store.reads] == [0, 1, 2]


def test_the_next_units_are_read_while_one_is_used() -> None:
    pager, store = pager_of_place(4, room=3, order=[0, 1, 2, 3])
    store.at_once = True
    pager.acquire(0, ahead=False)
    store.at_once = False
    pager.prefetch()
    assert [(read.unit, read.priority) for read in store.reads] == [
        (0, Priority.URGENT),
        (1, Priority.NORMAL),
        (2, Priority.NORMAL),
    ]
    assert [pager.table.entries[unit].residency for unit in range(4)] == [
        Residency.DEVICE,
        Residency.UPLOADING,
        Residency.UPLOADING,
        Residency.DISK,
    ], "there is room for three"
    assert pager.host.weights.space.used_bytes == 0
    pager.release(0)
    for read in store.reads[1:]:
        read.end()
    before = pager.counts().on_device
    use(pager, store, 1)
    assert pager.table.entries[3].residency is not Residency.DISK, "in the place of the first, which is not used again"
    use(pager, store, 2)
    assert [read.unit for read in store.reads] == [0, 1, 2, 3]
    # The use of 1 found it on its way; it was delivered by then, and so was 2 at the use of 1.
    assert pager.counts().on_device == before + 1
    pager.close()


def test_a_use_waits_for_its_read_alone() -> None:
    pager, store = pager_of_place(3, room=3, order=[0, 1, 2])
    pager.prefetch()
    assert [read.unit for read in store.reads] == [0, 1, 2]
    equal: list[bool] = []
    thread = threading.Thread(target=lambda: equal.append(bool((pager.acquire(1) == 2).all())))
    thread.start()
    store.reads[1].end()
    thread.join(60)
    assert equal == [True] and pager.table.entries[0].residency is Residency.UPLOADING
    pager.release(1)
    for read in store.reads:
        read.end()
    pager.close()


def test_a_use_that_nobody_foresaw_gets_the_room_of_a_read_ahead() -> None:
    pager, store = pager_of_place(4, room=2, order=[0, 1])
    pager.prefetch()
    assert [read.unit for read in store.reads] == [0, 1]
    for read in store.reads:
        read.end()
    use(pager, store, 3)
    assert pager.table.entries[3].residency is Residency.DEVICE
    pager.close()


def test_units_in_use_that_fill_the_device_are_an_error() -> None:
    pager, store = pager_of_place(3, room=2, order=[0, 1, 2])
    store.at_once = True
    for unit in (0, 1):
        pager.acquire(unit)
    with pytest.raises(BudgetError, match="unit 2 needs"):
        pager.acquire(2)
    assert pager.counts().uses == 2, "no use of unit 2 has begun"
    pager.close()


@pytest.mark.parametrize("host_pages", [2 * PAGES, 2], ids=["into a host buffer", "in place"])
def test_a_read_that_cannot_start_leaves_its_memory_free(host_pages: int) -> None:
    pager, store = pager_of_place(1, room=1, order=[0], host_pages=host_pages)
    store.refuses = True
    with pytest.raises(MemoryError):
        pager.acquire(0)
    assert not pager.host.weights.space.used_bytes and not pager.arena.used_bytes
    store.refuses, store.at_once = False, True
    use(pager, store, 0)
    pager.close()


def test_bytes_that_an_update_makes_old_are_never_used() -> None:
    pager, store = pager_of_place(2, room=2, order=[0, 1, 0])
    pager.prefetch()
    beginning = threading.Thread(target=lambda: pager.begin_updates([0, 1]))
    beginning.start()
    for read in store.reads:
        read.end()
    beginning.join(60)
    assert not beginning.is_alive()
    assert [pager.table.entries[unit].residency for unit in (0, 1)] == [Residency.DISK, Residency.DISK]
    store.values = [8, 9]
    for unit in (0, 1):
        assert not pager.weight_updates.delivers(unit)
        pager.weight_updates.publish_weights(unit, False, False)
        use(pager, store, unit)
    pager.close()


def test_a_read_that_fails_stops_the_engine_with_its_cause() -> None:
    pager, store = pager_of_place(2, room=2, order=[0, 1])
    pager.prefetch()
    store.reads[0].end(OSError(5, "broken"))
    store.reads[1].end()
    with pytest.raises(OSError, match="broken"):
        pager.acquire(0)
    with pytest.raises(EngineFailed, match="broken"):
        pager.acquire(1)
    pager.close()


def test_the_end_waits_for_reads_into_memory_that_goes() -> None:
    pager, store = pager_of_place(2, room=2, order=[0, 1])
    pager.prefetch()
    closing = threading.Thread(target=pager.close)
    closing.start()
    store.reads[0].end()
    closing.join(0.05)
    assert closing.is_alive(), "the second read still writes"
    store.reads[1].end()
    closing.join(60)
    assert not closing.is_alive()


def tight(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Returns budgets with which no large unit has a host buffer, and three fit on the device."""
    small_pieces(monkeypatch)
    return {"host_memory": least_host_memory(job, folder), "device_memory": room_for(job, 3)}


def test_training_with_the_least_host_memory_has_the_bits_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late read leaves NaN in its memory until it ends."""
    job = models.GPT2._replace(dtype="bf16", steps=2, accumulation=2)
    budgets = tight(job, tmp_path, monkeypatch)
    expected = run(job, ("none", "none"), tmp_path / "memory")
    use_queue(monkeypatch, lambda: LateQueue(3, 0.01))
    assert_same(expected, run(job, ("nvme", "nvme"), tmp_path / "disk", **budgets), "in memory and read in place")


DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(dtype="bf16")


class Switch(nn.Module):
    """Blocks that run in the order that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 61)
        self.order = [0, 1, 2, 3, 4, 5]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for index in self.order:
            hidden = torch.tanh(self.blocks[index](hidden))
        return self.head(hidden)


ORDERS = (
    [0, 1, 2, 3, 4, 5],
    [5, 4, 3, 2, 1, 0],
    [0, 2, 4],
    [1],
    [0, 1, 2, 3, 4, 5],
    [3, 3, 0, 0, 5],
    [0, 1, 2, 3, 4, 5],
)


def switch_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    getattr(model, "module", model).order = ORDERS[step]
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(step))
    return models.token_loss(model(ids), ids)


def test_other_orders_and_skipped_units_give_the_same_bits(tmp_path: Path) -> None:
    job = Job(Switch, switch_loss, steps=len(ORDERS), dtype="bf16")
    in_memory = run(job, ("none", "none"), tmp_path)
    assert_same(in_memory, run(job, DISK, tmp_path, device_memory=room_for(job, 2)), "orders that change")


def test_a_mispredicted_use_is_counted_and_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(Switch, switch_loss, dtype="bf16")
    engine = start(job, DISK, tmp_path)
    with caplog.at_level(logging.DEBUG, "offload"):
        reported = []
        for step in (0, 0, 1, 1, 2, 2):
            before = engine.use_counts()
            train_step(engine, job, step)
            lines = [record for record in caplog.records if "were mispredicted" in record.message]
            reported.append((engine.use_counts().unforeseen - before.unforeseen > 0, len(lines)))
            caplog.clear()
    assert reported == [(False, 0), (False, 0), (True, 1), (False, 0), (True, 1), (False, 0)]
    engine.destroy(remove=True)


def test_an_evaluation_between_steps_has_an_order_of_its_own(tmp_path: Path) -> None:
    alone = run(JOB, DISK, tmp_path)
    engine = start(JOB, DISK, tmp_path)
    losses = []
    for step in range(JOB.steps):
        loss = JOB.loss(engine, step, 0)
        generator = torch.get_rng_state()
        for _ in range(2):
            with torch.no_grad():
                JOB.loss(engine, step, 0)
        torch.set_rng_state(generator)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses == alone.losses
    assert engine.use_counts().unforeseen == 0
    engine.destroy(remove=True)


def _reads_on_demand(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units that somebody had to ask the disk for, and wait."""
    entries: list[int] = []
    real = HostCache.start_read

    def start_read(cache: HostCache, entry: Any, buffer: Any, priority: Any) -> None:
        if priority.name == "URGENT":
            entries.append(entry.index)
        real(cache, entry, buffer, priority)

    testing.replace(monkeypatch, "host.start_read", start_read)
    return entries


@pytest.mark.sample(1)
@pytest.mark.parametrize("late", [0.0, 0.01])
def test_from_the_second_step_on_nothing_is_read_on_demand(
    late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the reads are. An update under way holds leases, for as long as it takes: each is awaited."""
    use_queue(monkeypatch, lambda: LateQueue(0, late))
    reads = _reads_on_demand(monkeypatch)
    engine = start(JOB, DISK, tmp_path)
    try:
        for step in range(JOB.steps):
            train_step(engine, JOB, step)
            testing.settle(engine, commit=False)
            if step == 0:
                assert reads, "nothing was foreseen yet"
            if step > 1:
                assert reads == [], f"step {step}"
            reads.clear()
    finally:
        engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ({}, Limits(None, None)),
        ({"stage3_prefetch_bucket_size": "auto", "stage3_max_reuse_distance": "auto"}, Limits(None, None)),
        ({"stage3_prefetch_bucket_size": 5e7, "max_reuse_distance": 1e9}, Limits(10**8, 2 * 10**9)),
        ({"prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}, Limits(0, 0)),
    ],
)
def test_deepspeeds_limits_are_inputs_and_change_no_bit(
    keys: dict[str, Any], limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(JOB, ("none", "none"), tmp_path)
    settings = config(JOB, DISK, tmp_path)
    settings["zero_optimization"] |= keys
    reads = _reads_on_demand(monkeypatch)
    torch.manual_seed(JOB.seed)
    engine = offload.initialize(model=JOB.model(), config=settings)[0]
    assert testing.inspect(engine).prefetch_limits == limits
    losses = [train_step(engine, JOB, step) for step in range(JOB.steps)]
    assert losses == alone.losses
    if limits.ahead == 0:
        assert len(reads) > JOB.steps, "each step asks the disk, and waits"
    engine.destroy(remove=True)
