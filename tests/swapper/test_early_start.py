"""Reads and uploads begin where they become possible: when an update is ready, a read has ended, a step is over."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from offload.aio import Priority
from offload.errors import EngineFailed, IoError
from offload.sizes import PAGE
from offload.states import Tier
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import Pager
from offload.swapper.policy import AccessOrder, Limits, PassKind
from offload.swapper.prefetch import may_upload_elsewhere
from offload.swapper.table import Residency, UnitSize, pieces_of

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


class Read:
    """A read that ends when the test says so."""

    def __init__(self, unit: int, buffer: memoryview, priority: Priority) -> None:
        self.unit, self._buffer, self.priority = unit, buffer, priority
        self._ended, self._error = threading.Event(), False
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        assert self._ended.wait(60)
        if self._error:
            raise IoError("states", 0, len(self._buffer), errno.EIO, "read")
        return len(self._buffer)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        if self.done():
            function(self)
        else:
            self._callbacks.append(function)

    def end(self, error: bool = False) -> None:
        """Ends the read, and runs its callbacks on another thread, as the queue does."""
        self._buffer[:] = bytes([self.unit + 1]) * len(self._buffer)
        self._error = error
        self._ended.set()
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
        self.pager.table.access_order = AccessOrder.of(order, PassKind.TRAIN)

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
        assert rig.pager.residency(unit) is Residency.DEVICE
    rig.use(0, 40)
    rig.use(1, 41)
    assert rig.pager.counts().on_device == 2


def test_updates_that_are_ready_out_of_order_are_uploaded_in_the_order_of_their_uses(rig: Rig) -> None:
    rig.pager.begin_updates([0, 1])
    rig.update(1, 41)
    assert rig.pager.residency(1) is Residency.WRITING, "the unit before it must find its room"
    rig.update(0, 40)
    assert rig.pager.residency(0) is rig.pager.residency(1) is Residency.DEVICE


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
    assert rig.pager.residency(1) is Residency.HOST
    rig.update(0, 40)
    waiting.join(60)
    assert not waiting.is_alive()
    rig.pager.close()


def test_an_upload_ahead_drops_nothing_that_is_used_sooner() -> None:
    rig = Rig([1, 1, 1], weights=3, device=2, order=FORWARD_AND_BACKWARD)
    for unit in (0, 1):
        rig.pager.acquire(unit, ahead=False)
        rig.pager.release(unit)
    rig.pager.table.access_order = AccessOrder.of(FORWARD_AND_BACKWARD)
    rig.pager.begin_updates([2])
    rig.update(2, 42)
    assert rig.pager.residency(0) is rig.pager.residency(1) is Residency.DEVICE
    assert rig.pager.residency(2) is Residency.WRITING
    for unit in (0, 1, 2):
        rig.use(unit, 42 if unit == 2 else unit + 1)
    rig.pager.close()


def test_new_updates_wait_for_an_upload_ahead_and_drop_its_unit(rig: Rig) -> None:
    """Else the old weights would be on the device after the update."""
    rig.pager.begin_updates([0])
    rig.device.hold.clear()
    uploading = rig.elsewhere(lambda: rig.update(0, 40))
    assert rig.device.held.wait(60)
    beginning = rig.elsewhere(lambda: rig.pager.begin_updates([0]))
    until(lambda: rig.pager._prefetcher._held > 0)
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
    until(lambda: rig.pager.residency(1) is Residency.HOST and len(rig.pager.changed._waiters) > 0)
    rig.device.hold.set()
    for thread in (uploading, using):
        thread.join(60)
        assert not thread.is_alive()
    assert rig.pager.residency(1) is Residency.DEVICE
    rig.pager.close()


def test_the_end_of_the_pager_waits_for_an_upload_ahead(rig: Rig) -> None:
    """The memory is freed next."""
    rig.pager.begin_updates([0])
    rig.device.hold.clear()
    uploading = rig.elsewhere(lambda: rig.update(0, 40))
    assert rig.device.held.wait(60)
    closing = rig.elsewhere(rig.pager.close)
    until(lambda: rig.pager._prefetcher._held > 0)
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
        assert rig.pager.residency(unit) is Residency.DEVICE
    assert rig.device.uploads == ["callbacks"] * 3


def test_reads_that_end_out_of_order_are_uploaded_in_the_order_of_their_uses(rig: Rig) -> None:
    rig.store.slow = True
    rig.pager.prefetch()
    rig.store.reads[1].end()
    assert rig.pager.residency(1) is Residency.HOST
    rig.store.reads[0].end()
    assert rig.pager.residency(0) is rig.pager.residency(1) is Residency.DEVICE


def test_a_read_that_has_ended_when_it_is_watched_is_uploaded_at_once(rig: Rig) -> None:
    rig.pager.prefetch()
    assert [rig.pager.residency(unit) for unit in range(3)] == [Residency.DEVICE] * 3


def test_a_read_ahead_that_fails_stops_the_engine_with_its_cause(rig: Rig) -> None:
    rig.store.slow = True
    rig.pager.prefetch()
    rig.store.reads[1].end(error=True)
    with pytest.raises(EngineFailed, match="read") as caught:
        rig.pager.acquire(0)
    assert isinstance(caught.value.__cause__, IoError) and caught.value.__cause__.errno == errno.EIO
    assert rig.pager.residency(1) is Residency.FAILED


def test_reads_that_end_after_the_engine_stopped_start_nothing(rig: Rig) -> None:
    rig.store.slow = True
    rig.pager.prefetch()
    rig.pager.fail(RuntimeError("of the test"))
    rig.store.reads[0].end()
    assert not rig.device.uploads and rig.pager.residency(0) is Residency.READING


# -- who may ------------------------------------------------------------------------------------------


def test_only_a_device_with_memory_of_its_own_and_no_other_ranks_is_served_by_other_threads() -> None:
    assert may_upload_elsewhere(host_addressable=False, several_ranks=False)
    assert not may_upload_elsewhere(host_addressable=True, several_ranks=False)
    assert not may_upload_elsewhere(host_addressable=False, several_ranks=True)
