"""Whatever is early or late, in any order of threads: each use sees the newest weights, and nothing waits for ever.

A pager alone, with three threads of its own: one uses units as a model does, one updates them, one ends reads late and
in any order. The device is the late one, which notes each place that is read or written too early.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from offload.sizes import PAGE, align_up
from offload.states import Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import Pager
from offload.swapper.policy import Limits
from offload.swapper.table import Residency, UnitSize, pieces_of
from tests.support.devices.late_device import LateDevice, Ticks

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
        other = 1 - self.newest[unit]
        self.slots[unit][other] = value
        self.newest[unit] = other


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


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_storms() -> None:
    for seed in range(1000, 6000):
        Storm(seed).run()


def test_a_storm_brings_every_unit_to_the_device_ahead_of_some_uses() -> None:
    """Otherwise the storms show little."""
    storm = Storm(4)
    storm.run()
    stats = storm.pager.counts()
    assert 0 < stats.on_device < stats.uses
    assert Residency.FAILED not in [storm.pager.residency(unit) for unit in range(len(storm.pages))]
