"""Uploads begin before the forward asks, and each use sees the newest weights."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio import Priority
from offload.errors import EngineFailed, IoError
from offload.sizes import MIB, PAGE, align_up
from offload.states import Tier
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import Pager
from offload.swapper.policy import Limits
from offload.swapper.table import Residency, UnitSize, pieces_of
from tests.support import models
from tests.support.access_orders import record
from tests.support.devices.late_device import LateDevice, Ticks, use_device
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
    trained,
)
from tests.swapper import test_pager

FORWARD_AND_BACKWARD = [0, 1, 2, 2, 1, 0]


class Accelerator(Device):
    """A device with memory of its own, whose uploads may be held up."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.host_addressable = False
        self.uploads: list[str] = []
        """The name of the thread that started each upload."""
        self.hold, self.held = threading.Event(), threading.Event()
        self.hold.set()

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        self.uploads.append(threading.current_thread().name)
        if not self.hold.is_set():
            self.held.set()
            assert self.hold.wait(60)
        return super().upload(destination, source, after)


class Read(test_pager.Read):
    """A read that tells others of its end, on another thread, as the queue does."""

    def __init__(self, unit: int, buffer: memoryview, priority: Priority) -> None:
        super().__init__(unit, priority, lambda: buffer.__setitem__(slice(None), bytes([unit + 1]) * len(buffer)))
        self._callbacks: list[Callable[[Any], object]] = []

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        if self.done():
            function(self)
        else:
            self._callbacks.append(function)

    def end(self, error: OSError | None = None) -> None:
        super().end(error)
        thread = threading.Thread(target=lambda: [each(self) for each in self._callbacks], name="callbacks")
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


class SlowStore:
    """Every byte of unit n is n + 1. Reads end at once, unless `slow`."""

    committed = False

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.slow = False

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Read:
        read = Read(unit, buffer, priority)
        self.reads.append(read)
        if not self.slow:
            read.end()
        return read


class Rig:
    """A pager over a slow store and an accelerator."""

    def __init__(self, pages: Sequence[int], weights: int, device: int, order: Sequence[int] = ()) -> None:
        self.store, self.device = SlowStore(), Accelerator()
        sizes = [
            UnitSize(str(unit), nbytes, Tier.DISK, nbytes, pieces_of([range(nbytes)]))
            for unit, nbytes in enumerate(size * PAGE for size in pages)
        ]
        host = HostArena(HostBudget(0, weights * PAGE, 0, 0), self.device)
        arena = DeviceArena(device * PAGE, self.device)
        self.pager = Pager(sizes, host, arena, self.device, self.store, Limits())
        record(self.pager.table.access_order, order)

    def update(self, unit: int, value: int) -> None:
        """Writes new weights, as the update worker does, and publishes them before they are written to the store."""
        updates = self.pager.weight_updates
        host_buffer = updates.buffer_for(unit)
        assert host_buffer is not None
        host_buffer.tensor(torch.uint8).fill_(value)
        updates.publish_weights(unit, True, True)

    def elsewhere(self, act: Callable[[], object]) -> threading.Thread:
        """Runs `act` on a thread of its own."""
        thread = threading.Thread(target=act, name="elsewhere", daemon=True)
        thread.start()
        return thread

    def use(self, unit: int, value: int) -> None:
        assert bool((self.pager.acquire(unit) == value).all())
        self.pager.release(unit)


def until(condition: Callable[[], bool]) -> None:
    """Waits until another thread has made `condition` true."""
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig([1, 1, 1], weights=3, device=3, order=FORWARD_AND_BACKWARD)
    yield made
    made.device.hold.set()
    for read in made.store.reads:
        if not read.done():
            read.end()
    made.pager.close()


# -- updates ------------------------------------------------------------------------------------------


def test_a_published_update_is_uploaded_before_anyone_asks(rig: Rig) -> None:
    rig.pager.begin_updates([0, 1, 2])
    for unit in (0, 1):
        rig.update(unit, 40 + unit)
        assert rig.pager.table.entries[unit].residency is Residency.DEVICE
    rig.use(0, 40)
    rig.use(1, 41)
    assert rig.pager.counts().on_device == 2


def test_an_upload_ahead_gives_way_to_a_unit_that_is_needed_now() -> None:
    """The worker would fill the room for which the model's thread waits, and its unit would leave again at once."""
    rig = Rig([2, 2, 2], weights=6, device=4, order=[2, 0, 1, 1, 0, 2])
    rig.pager.acquire(2, ahead=False)
    rig.pager.begin_updates([0])
    rig.store.slow = True
    waiting = rig.elsewhere(lambda: rig.use(0, 40))
    until(lambda: rig.pager._entries[0].pins > 0)
    with rig.pager.lock:
        rig.pager._prefetcher.read()
    rig.store.reads[-1].end()  # unit 1 is in the host now, and next after the one that is awaited
    assert rig.pager.table.entries[1].residency is Residency.HOST
    rig.update(0, 40)
    waiting.join(60)
    assert not waiting.is_alive()
    rig.pager.close()


def test_new_updates_wait_for_an_upload_ahead_and_drop_its_unit(rig: Rig) -> None:
    """Else the old weights would be on the device after the update."""
    rig.pager.begin_updates([0])
    rig.device.hold.clear()
    uploading = rig.elsewhere(lambda: rig.update(0, 40))
    assert rig.device.held.wait(60)
    beginning = rig.elsewhere(lambda: rig.pager.begin_updates([0]))
    until(lambda: rig.pager._prefetcher._stops > 0)
    assert not rig.pager._entries[0].updating
    rig.device.hold.set()
    for thread in (uploading, beginning):
        thread.join(60)
    rig.update(0, 50)
    rig.use(0, 50)


def test_a_unit_that_an_upload_ahead_keeps_out_waits_for_its_end() -> None:
    """A unit that is on its way is neither in use nor evictable: no error says that there is no room."""
    rig = Rig([2, 2, 2], weights=6, device=4, order=[2, 0, 1, 1, 0, 2])
    rig.pager.acquire(2, ahead=False)
    rig.pager.begin_updates([0])
    rig.device.hold.clear()
    uploading = rig.elsewhere(lambda: rig.update(0, 40))
    assert rig.device.held.wait(60)
    using = rig.elsewhere(lambda: rig.use(1, 2))
    until(lambda: rig.pager.table.entries[1].residency is Residency.HOST and len(rig.pager.changed._waiters) > 0)
    rig.device.hold.set()
    for thread in (uploading, using):
        thread.join(60)
        assert not thread.is_alive()
    assert rig.pager.table.entries[1].residency is Residency.DEVICE
    rig.pager.close()


def test_the_end_of_the_pager_waits_for_an_upload_ahead(rig: Rig) -> None:
    """The memory is freed next."""
    rig.pager.begin_updates([0])
    rig.device.hold.clear()
    uploading = rig.elsewhere(lambda: rig.update(0, 40))
    assert rig.device.held.wait(60)
    closing = rig.elsewhere(rig.pager.close)
    until(lambda: rig.pager._prefetcher._stops > 0)
    assert closing.is_alive()
    rig.device.hold.set()
    for thread in (uploading, closing):
        thread.join(60)
        assert not thread.is_alive()


# -- reads --------------------------------------------------------------------------------------------


def test_a_read_that_ends_is_uploaded_before_anyone_asks(rig: Rig) -> None:
    rig.store.slow = True
    rig.pager.prefetch()
    assert [read.unit for read in rig.store.reads] == [0, 1, 2]
    for unit in range(3):
        rig.store.reads[unit].end()
        assert rig.pager.table.entries[unit].residency is Residency.DEVICE
    assert rig.device.uploads == ["callbacks"] * 3


def test_a_read_that_has_ended_when_it_is_watched_is_uploaded_at_once(rig: Rig) -> None:
    rig.pager.prefetch()
    assert [rig.pager.table.entries[unit].residency for unit in range(3)] == [Residency.DEVICE] * 3


def test_a_read_ahead_that_fails_stops_the_engine_with_its_cause(rig: Rig) -> None:
    rig.store.slow = True
    rig.pager.prefetch()
    rig.store.reads[1].end(IoError("states", 0, PAGE, errno.EIO, "read"))
    with pytest.raises(EngineFailed, match="read") as caught:
        rig.pager.acquire(0)
    assert isinstance(caught.value.__cause__, IoError) and caught.value.__cause__.errno == errno.EIO
    assert rig.pager.table.entries[1].residency is Residency.FAILED


# -- who may ------------------------------------------------------------------------------------------


ON_DEVICE = (Residency.UPLOADING, Residency.DEVICE)
JOB = models.GPT2._replace(dtype="bf16", steps=3)


def first_unit(engine: offload.Engine) -> int:
    return testing.inspect(engine).access_order[0]


def residency_of_first(engine: offload.Engine) -> Residency:
    return testing.inspect(engine).residency(first_unit(engine))


class Chain(nn.Module):
    """Blocks of which the first does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


def chain_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(step))
    return models.token_loss(model(ids), ids)


CHAIN = Job(Chain, chain_loss, dtype="bf16")


@pytest.mark.sample(1)
@pytest.mark.cpu_only("the engine is on the late device")
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_the_first_unit_of_the_next_forward_is_on_its_way_when_step_returns(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not train waits for no update, where updates leave it a host buffer."""
    device = LateDevice(0, 0.0)
    use_device(monkeypatch, device)
    # Without it the default has two host buffers, which updates under the backward may hold when the step returns.
    host_memory = least_host_memory(CHAIN, tmp_path, (tier, tier)) + MIB
    engine = start(CHAIN, (tier, tier), tmp_path, device_memory=room_for(CHAIN, 2), host_memory=host_memory)
    with Ticks(device):
        for step in range(CHAIN.steps):
            train_step(engine, CHAIN, step)
            pager = testing.inspect(engine).pager
            assert pager.sizes[first_unit(engine)].name == "embedding"
            assert residency_of_first(engine) in (*ON_DEVICE, Residency.READING)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.cpu_only("the engine is on the late device")
@pytest.mark.parametrize("seed", range(8))
def test_late_reads_and_late_copies_change_no_bit(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    chance = random.Random(seed)
    job = chance.choice([JOB, CHAIN, models.MIXTURE._replace(dtype="bf16", accumulation=chance.choice([1, 2]))])
    placement = (chance.choice(["cpu", "nvme"]), chance.choice(["cpu", "nvme"]))
    expected = run(job, ("none", "none"), tmp_path)
    device = LateDevice(seed, chance.choice([0.3, 0.9]))
    use_device(monkeypatch, device)
    use_queue(monkeypatch, lambda: LateQueue(seed, 0.002))
    engine = start(job, placement, tmp_path, device_memory=room_for(job, chance.choice([2, 3, 5])))
    with Ticks(device):
        result = trained(engine, job)
    engine.destroy(remove=True)
    assert not device.broken
    assert_same(expected, result, f"{placement}, late")


STEPS = 5


class LateRead:
    """A read that a thread of a pool carries out some time later."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        return self._future.result(60)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: function(self))


class LateStore:
    """Two slots of each unit in memory, each of one value."""

    committed = False

    def __init__(self, units: int, chance: random.Random) -> None:
        self.newest = [0] * units
        self.slots = [[unit + 1, 0] for unit in range(units)]
        self.pool = ThreadPoolExecutor(3)
        self._chance = chance

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: object) -> LateRead:
        slot, delay = self.newest[unit], self._chance.choice([0, 0, 0.0002, 0.002])

        def carry_out() -> int:
            time.sleep(delay)
            buffer[:] = bytes([self.slots[unit][slot]]) * len(buffer)
            return len(buffer)

        buffer[:] = b"\xff" * len(buffer)
        return LateRead(self.pool.submit(carry_out))

    def write(self, unit: int, value: int) -> None:
        """Writes the slot that is not the newest one, which then is."""
        slot = 1 - self.newest[unit]
        self.slots[unit][slot] = value
        self.newest[unit] = slot


class Storm:
    """Steps of a model of random units, within random budgets."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.pages = [chance.randint(1, 3) for _ in range(chance.randint(3, 7))]
        two_largest = sum(sorted(self.pages)[-2:])
        host = chance.randint(2, sum(self.pages) + 1)
        on_device = two_largest + chance.choice([0, 1, 2, sum(self.pages)])
        self.device = LateDevice(seed, chance.choice([0.0, 0.5, 0.95]))
        self.store = LateStore(len(self.pages), chance)
        tiers = [chance.choice([Tier.DISK, Tier.DISK, Tier.HOST]) for _ in self.pages]
        sizes = [
            UnitSize(str(unit), pages * PAGE, tier, pages * PAGE, pieces_of([range(pages * PAGE)]))
            for unit, (pages, tier) in enumerate(zip(self.pages, tiers, strict=True))
        ]
        kept = sum(align_up(size.nbytes) for size in sizes if size.tier is Tier.HOST)
        arena = HostArena(HostBudget(0, host * PAGE, 0, kept), self.device)
        limits = Limits(chance.choice([None, None, 0, 2 * PAGE]), chance.choice([None, None, 3 * PAGE]))
        device_arena = DeviceArena(on_device * PAGE, self.device, poison=chance.random() < 0.3)
        self.pager = Pager(sizes, arena, device_arena, self.device, self.store, limits)
        self.values = [unit + 1 for unit in range(len(self.pages))]
        for unit, size in enumerate(sizes):
            if size.tier is Tier.HOST:
                self.pager.weight_updates.tier_buffer(unit).tensor(torch.uint8).fill_(unit + 1)
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Uses all units forwards and backwards, and updates some, step after step."""
        with Ticks(self.device):
            for step in range(STEPS):
                units = [unit for unit in range(len(self.pages)) if self.chance.random() < 0.9]
                for unit in [*units, *reversed(units)]:
                    self._use(unit)
                order = self.pager.end_step()
                trained = [unit for unit in dict.fromkeys(order) if self.chance.random() < 0.8]
                updating = self._start_updates(trained, step)
                self.pager.prefetch()
                if self.chance.random() < 0.3:
                    time.sleep(0.002)  # the user's code between two steps
                if self.chance.random() < 0.3:
                    self._use(self.chance.choice(range(len(self.pages))))  # weights that somebody looks at
                for unit in units if step == STEPS - 1 else ():
                    self._use(unit)
                if self.chance.random() < 0.7:
                    self._join(updating)
                else:
                    for unit in range(len(self.pages)):
                        self._use(unit)
                    self._join(updating)
        self.pager.close()
        self.store.pool.shutdown()
        assert not self.errors and not self.device.broken
        assert not any(entry.pins or entry.updating or entry.transfer for entry in self.pager._entries)

    def _use(self, unit: int) -> None:
        weights = self.pager.acquire(unit)
        assert bool((weights == self.values[unit]).all()), f"unit {unit}"
        self.pager.release(unit)

    def _join(self, thread: threading.Thread) -> None:
        thread.join(60)
        assert not thread.is_alive() and not self.errors

    def _start_updates(self, units: Sequence[int], step: int) -> threading.Thread:
        self.pager.begin_updates(units)
        for unit in units:
            self.values[unit] = (self.values[unit] + 13 + step) % 200 + 1
        thread = threading.Thread(target=self._update, args=(list(units),), daemon=True)
        thread.start()
        return thread

    def _update(self, units: list[int]) -> None:
        """Updates units as the worker does: published when computed, written a little later."""
        chance, unwritten = random.Random(len(units)), list[int]()
        try:
            self.device.enter_thread()
            updates = self.pager.weight_updates
            while units:
                with self.pager.lock:
                    wanted = updates.awaited_unit()
                unit = wanted if wanted in units else units[0]
                units.remove(unit)
                buffer = updates.buffer_for(unit) if updates.delivers(unit) else None
                if buffer is None:
                    self.store.write(unit, self.values[unit])
                    updates.publish_weights(unit, False, False)
                    updates.flushed(unit)
                    continue
                buffer.tensor(torch.uint8).fill_(self.values[unit])
                on_disk = self.pager.sizes[unit].tier is Tier.DISK
                updates.publish_weights(unit, True, on_disk)
                unwritten.append(unit)
                while unwritten and chance.random() < 0.6:
                    self._write(unwritten.pop(0))
            for unit in unwritten:
                self._write(unit)
        except BaseException as error:
            self.errors.append(error)
            self.pager.fail(error)

    def _write(self, unit: int) -> None:
        """Ends the update of a unit whose weights are published."""
        if self.pager.sizes[unit].tier is Tier.DISK:
            self.store.write(unit, self.values[unit])
        self.pager.weight_updates.flushed(unit)


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(60))
def test_each_use_sees_the_newest_weights(seed: int) -> None:
    Storm(seed).run()
