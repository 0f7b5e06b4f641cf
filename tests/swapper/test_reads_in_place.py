"""A unit of which no two fit into the host buffers is read ahead into its device memory, where a CPU computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import testing
from offload.aio import Priority
from offload.errors import BudgetError, EngineFailed
from offload.sizes import PAGE
from offload.states import Tier
from offload.swapper.caches import DeviceCache
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import Pager
from offload.swapper.policy import AccessOrder, Limits, PassKind
from offload.swapper.table import Residency, UnitSize, pieces_of
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    Job,
    assert_same,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
)

PAGES = 4
"""Pages of a unit; the host has two."""


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
        self.at_once = False

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Read:
        value = self.values[unit]
        assert start == 0 and len(buffer) == PAGES * PAGE, "a unit comes in one read"
        buffer[:] = b"\xff" * len(buffer)

        def fill() -> None:
            buffer[:] = bytes([value]) * len(buffer)

        self.reads.append(Read(unit, priority, fill))
        if self.at_once:
            self.reads[-1].end()
        return self.reads[-1]


def pager_of(units: int, room: int, order: list[int]) -> tuple[Pager, PendingStore]:
    """Returns a pager with room for `room` units on the device, whose next step is foreseen to use them in `order`."""
    cpu, store = Device(torch.device("cpu")), PendingStore(units)
    nbytes = PAGES * PAGE
    sizes = [UnitSize(str(unit), nbytes, Tier.DISK, nbytes, pieces_of([range(nbytes)])) for unit in range(units)]
    host = HostArena(HostBudget(0, 2 * PAGE, 0, 0), cpu)
    pager = Pager(sizes, host, DeviceArena(room * nbytes, cpu), cpu, store, Limits())
    pager.table.access_order = AccessOrder.of(order, PassKind.TRAIN)
    return pager, store


def use(pager: Pager, store: PendingStore, unit: int) -> None:
    """Uses a unit whose reads end at once."""
    store.at_once = True
    assert bool((pager.acquire(unit) == store.values[unit]).all())
    pager.release(unit)
    store.at_once = False


def test_the_next_units_are_read_while_one_is_used() -> None:
    pager, store = pager_of(4, room=3, order=[0, 1, 2, 3])
    store.at_once = True
    pager.acquire(0, ahead=False)
    store.at_once = False
    pager.prefetch()
    assert [(read.unit, read.priority) for read in store.reads] == [
        (0, Priority.URGENT),
        (1, Priority.NORMAL),
        (2, Priority.NORMAL),
    ]
    assert [pager.residency(unit) for unit in range(4)] == [
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
    assert pager.residency(3) is not Residency.DISK, "in the place of the first, which is not used again"
    use(pager, store, 2)
    assert [read.unit for read in store.reads] == [0, 1, 2, 3]
    # The use of 1 found it on its way; it was delivered by then, and so was 2 at the use of 1.
    assert pager.counts().on_device == before + 1
    pager.close()


def test_a_use_waits_for_its_read_alone() -> None:
    pager, store = pager_of(3, room=3, order=[0, 1, 2])
    pager.prefetch()
    assert [read.unit for read in store.reads] == [0, 1, 2]
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(bool((pager.acquire(1) == 2).all())))
    thread.start()
    store.reads[1].end()
    thread.join(60)
    assert found == [True] and pager.residency(0) is Residency.UPLOADING
    pager.release(1)
    for read in store.reads:
        read.end()
    pager.close()


def test_a_use_that_nobody_foresaw_gets_the_room_of_a_read_ahead() -> None:
    pager, store = pager_of(4, room=2, order=[0, 1])
    pager.prefetch()
    assert [read.unit for read in store.reads] == [0, 1]
    for read in store.reads:
        read.end()
    use(pager, store, 3)
    assert pager.residency(3) is Residency.DEVICE
    pager.close()


def test_units_in_use_that_fill_the_device_are_an_error() -> None:
    pager, store = pager_of(3, room=2, order=[0, 1, 2])
    store.at_once = True
    for unit in (0, 1):
        pager.acquire(unit)
    with pytest.raises(BudgetError, match="unit 2 needs"):
        pager.acquire(2)
    pager.close()


def test_bytes_that_an_update_makes_old_are_never_used() -> None:
    pager, store = pager_of(2, room=2, order=[0, 1, 0])
    pager.prefetch()
    beginning = threading.Thread(target=lambda: pager.begin_updates([0, 1]))
    beginning.start()
    for read in store.reads:
        read.end()
    beginning.join(60)
    assert not beginning.is_alive()
    assert [pager.residency(unit) for unit in (0, 1)] == [Residency.DISK, Residency.DISK]
    store.values = [8, 9]
    for unit in (0, 1):
        assert not pager.weight_updates.delivers(unit)
        pager.weight_updates.publish_weights(unit, False, False)
        use(pager, store, unit)
    pager.close()


def test_a_read_that_fails_stops_the_engine_with_its_cause() -> None:
    pager, store = pager_of(2, room=2, order=[0, 1])
    pager.prefetch()
    store.reads[0].end(OSError(5, "broken"))
    store.reads[1].end()
    with pytest.raises(OSError, match="broken"):
        pager.acquire(0)
    with pytest.raises(EngineFailed, match="broken"):
        pager.acquire(1)
    pager.close()


def test_the_end_waits_for_reads_into_memory_that_goes() -> None:
    pager, store = pager_of(2, room=2, order=[0, 1])
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


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_training_with_the_least_host_memory_has_the_bits_of_memory(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late read leaves NaN in its memory until it ends."""
    job = models.GPT2._replace(dtype="bf16", steps=4, accumulation=2)
    budgets = tight(job, tmp_path, monkeypatch)
    expected = run(job, ("none", "none"), tmp_path / "memory")
    if late:
        use_queue(monkeypatch, lambda: LateQueue(3, 0.01))
    assert_same(expected, run(job, ("nvme", "nvme"), tmp_path / "disk", **budgets), "in memory and read in place")


def test_a_step_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, ("nvme", "nvme"), tmp_path, **tight(job, tmp_path, monkeypatch))
    pager = testing.inspect(engine).pager
    assert any(pager.streams(unit) for unit in range(len(pager.sizes)))
    started: list[Priority] = []
    begin = DeviceCache.start_read

    def start_read(cache: DeviceCache, entry: Any, buffer: Any, read: Any) -> None:
        started.append(Priority.NORMAL if not entry.pins else Priority.URGENT)
        begin(cache, entry, buffer, read)

    testing.replace(monkeypatch, "device.start_read", start_read)
    for step in range(3):
        started.clear()
        train_step(engine, job, step)
    assert engine.use_counts().unforeseen == 0
    assert Priority.NORMAL in started, "in the backward; a forward waits for each unit's update"
    engine.destroy(remove=True)
