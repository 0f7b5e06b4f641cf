"""Where memory is short, the host budget gives way and comes back: no bit changes, and nothing is killed."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import testing
from offload.aio import resident_bytes
from offload.engine.memory_guard import HostReading, next_host_budget
from offload.errors import BudgetError
from offload.sizes import GIB, MIB
from offload.swapper.memory import limits
from tests.support import models
from tests.support.oracle import assert_same, run, small_pieces, start, train_step, trained

JOB = models.SHALLOW._replace(steps=21, dtype="bf16")
BUDGET = 4 * MIB
"""With room for all states of the job."""
CALM, MOST_CALM = 8, 64
"""Readings before the budget grows: usually, and at most."""


def reading(room: int, limit: int = 8 * GIB, stalled: float = 0.0) -> HostReading:
    return HostReading("a limit", limit, room, stalled)


def test_the_next_budget_follows_from_readings_alone() -> None:
    margin = 256 * MIB  # 1/32 of 8 GiB
    now, least, most = 4 * GIB, GIB, 6 * GIB

    def after(*readings: HostReading) -> int:
        return next_host_budget(now, least, most, readings)

    assert reading(0).margin == margin
    assert after(reading(margin)) == now
    assert after(reading(margin - 1)) == now - margin - 1, "two margins are free then"
    assert after(reading(-GIB)) == now - GIB - 2 * margin
    assert after(reading(-9 * GIB)) == least
    assert after(reading(3 * margin, stalled=0.5)) == now - margin, "processes wait for what is free"
    assert after(reading(4 * margin, stalled=0.5)) == now, "they wait for something else"
    assert after(*[reading(GIB)] * (CALM - 1)) == now
    assert after(*[reading(GIB)] * CALM) == now + GIB - 2 * margin
    assert after(*[reading(9 * GIB)] * CALM) == most
    assert after(reading(2 * margin), *[reading(GIB)] * (CALM - 1)) == now, "one of them had little free"
    assert after(*[reading(3 * margin - 1)] * CALM) == now, "a growth alone makes nothing short"
    assert reading(0, limit=200 * MIB).margin == 64 * MIB and reading(0, limit=640 * GIB).margin == GIB


def test_a_budget_stays_within_its_bounds_and_never_swings() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        limit = chance.randrange(1, 64) * 256 * MIB
        least = chance.randrange(limit)
        most = least + chance.randrange(limit)
        now = chance.randint(least, most)
        readings = [reading(chance.randint(-limit, limit), limit) for _ in range(chance.randint(1, 2 * CALM))]
        result = next_host_budget(now, least, most, readings)
        assert least <= result <= most
        newest = readings[-1]
        if result > now:  # as if the whole growth were used at once
            assert not reading(newest.room - (result - now), limit).short
        if result < now and result > least:
            assert not reading(newest.room + now - result, limit).short


class Machine:
    """A cgroup of the second version whose usage follows one engine, as the kernel's would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: offload.Engine | None = None
        self.high = "max"
        testing.replace(monkeypatch, "machine.system_file", self.read)
        testing.replace(monkeypatch, "memory.reading_pace", (0.0, math.inf))

    @property
    def used(self) -> int:
        if self.engine is None:
            return 0
        arena = testing.inspect(self.engine).host_arena
        return resident_bytes(arena.address, arena.nbytes)

    def read(self, path: str) -> str:
        files = {
            "/proc/self/cgroup": "0::/job",
            "/sys/fs/cgroup/job/memory.max": "max",
            "/sys/fs/cgroup/job/memory.high": self.high,
            "/sys/fs/cgroup/job/memory.current": str(self.used),
            "/sys/fs/cgroup/job/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0",
        }
        return files.get(path, "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    small_pieces(monkeypatch)
    yield Machine(monkeypatch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("durability", ["step", {"every": 3}], ids=str)
def test_memory_high_lowered_and_raised_ten_times_changes_no_bit(
    durability: Any, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"host_memory": BUDGET, "durability": durability}
    expected = run(JOB, ("nvme", "nvme"), tmp_path / "calm", **options)
    engine = machine.engine = start(JOB, ("nvme", "nvme"), tmp_path / "breathes", **options)
    first, budgets = engine.host_memory, []

    def step(engine: Any, job: Any, number: int) -> float:
        # A margin is 64 MiB, so a limit just above the usage is near, and one of 1 GiB is not.
        machine.high = str(machine.used + MIB) if number % 2 else str(GIB)
        for _ in range(0 if number % 2 else MOST_CALM):
            if engine.host_memory < first:
                engine.wake()  # a call that finds memory free
        budgets.append(engine.host_memory)
        return train_step(engine, job, number)

    with caplog.at_level(logging.INFO, "offload"):
        assert_same(trained(engine, JOB, step), expected)
    assert budgets[0] == first and budgets[2::2] == [first] * 10, "it grows again to the first budget"
    shrinks = [line for line in caplog.messages if line.startswith("host memory shrinks from")]
    grows = [line for line in caplog.messages if line.startswith("host memory grows from")]
    assert len(shrinks) >= 10 and len(grows) >= 10
    assert "memory is short, memory.high of the cgroup /job of" in shrinks[0] and "are free again" in grows[0]
    engine.destroy(remove=True)


def test_shrinking_stops_at_what_the_engine_needs_and_frees_pages(machine: Machine, tmp_path: Path) -> None:
    engine = machine.engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory=BUDGET, log=str(tmp_path / "log"))
    for number in range(3):
        train_step(engine, JOB, number)
    assert "host_given_back_bytes" not in engine.measured
    before, used = engine.host_memory, machine.used
    machine.high = "4096"
    train_step(engine, JOB, 3)
    given = before - engine.host_memory
    assert given > 0 and used - machine.used >= given // 2
    assert engine.measured["host_given_back_bytes"] == given
    with pytest.raises(BudgetError, match="the least that works is"):
        engine.resize(host_memory=engine.host_memory - 1)
    engine.destroy(remove=True)


def test_a_budget_that_the_user_has_set_is_the_one_that_comes_back(machine: Machine, tmp_path: Path) -> None:
    engine = machine.engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory=BUDGET, log=str(tmp_path / "log"))
    middle = engine.resize(host_memory=engine.host_memory - 256 * 1024).host_memory
    machine.high = str(machine.used)
    engine.wake()
    assert engine.host_memory < middle
    machine.high = "max"
    for _ in range(8 * CALM):
        engine.wake()
        train_step(engine, JOB, 0) if engine.host_memory < middle else None
    assert engine.host_memory == middle
    train_step(engine, JOB, 0)
    assert "host_given_back_bytes" not in engine.measured, "the budget has come back"
    engine.destroy(remove=True)


def test_without_a_watch_the_budget_stays(machine: Machine, tmp_path: Path) -> None:
    engine = machine.engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory=BUDGET, memory_watch=False)
    before = engine.host_memory
    train_step(engine, JOB, 0)
    machine.high = "4096"
    train_step(engine, JOB, 1)
    assert engine.host_memory == before
    engine.destroy(remove=True)


def test_a_batch_without_room_gets_the_cache(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings of the watch are calm here: only the guard of batches looks at the limit."""
    testing.replace(monkeypatch, "memory.reading", lambda processes, untouched: reading(GIB))
    for watch in (False, True):
        machine.high = "max"
        engine = machine.engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory=BUDGET, memory_watch=watch)
        first = engine.host_memory
        machine.high = str(machine.used)
        if watch:
            train_step(engine, JOB, 0)
            assert engine.host_memory < first
            machine.high = "max"
            for _ in range(2 * CALM):
                train_step(engine, JOB, 0)
            assert engine.host_memory < first, "each batch may need what one has needed"
        else:
            with pytest.raises(BudgetError, match=r"this batch has no room: memory\.high of the cgroup /job"):
                train_step(engine, JOB, 0)
            assert engine.host_memory == first
        engine.destroy(remove=True)


def test_limits_and_stalls_of_both_versions_of_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/old\n0::/outer/inner",
        "/sys/fs/cgroup/memory/old/memory.limit_in_bytes": "3000",
        "/sys/fs/cgroup/memory/old/memory.usage_in_bytes": "1000",
        "/sys/fs/cgroup/outer/memory.max": "2000",
        "/sys/fs/cgroup/outer/memory.high": "1500",
        "/sys/fs/cgroup/outer/memory.current": "1800",
        "/sys/fs/cgroup/outer/memory.stat": "inactive_file 100\nanon 1600",
        "/sys/fs/cgroup/outer/memory.pressure": "some avg10=12.50 avg60=1.00 avg300=0.00 total=9",
        "/sys/fs/cgroup/memory.pressure": "some avg10=99.00 avg60=1.00 avg300=0.00 total=9",
    }
    testing.replace(monkeypatch, "machine.system_file", lambda path: files.get(path, ""))
    rooms = {limit.name: limit.room for limit in limits.cgroup_limits()}
    assert rooms == {"the cgroup /old": 2000, "the cgroup /outer": 300, "memory.high of the cgroup /outer": -200}
    assert limits.tightest_limit(2).room == -100 and limits.tightest_limit().free == 0
    assert limits.stalled() == 0.125, "that of the machine does not count"
    files["/sys/fs/cgroup/outer/memory.pressure"] = ""
    assert limits.stalled() == 0.0
