"""A drive that is slower when it reads and writes at once is used in windows of one direction, by its kept probe.

How a schedule orders blocks in windows is tested in tests/native/schedule_windows_test.cpp.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload import testing
from offload.aio import DirectFile, IoQueue, Priority, aligned_empty
from offload.aio import file as rule
from offload.aio.file import WINDOW_BYTES, window_bytes
from offload.cli.main import app
from offload.hardware import probe
from offload.hardware.info import machine
from offload.hardware.probe import DTYPES, DriveRates, DtypeRates, Probed, Rates, keep, kept_window
from offload.planner.hardware import probed
from tests.support import models
from tests.support.oracle import assert_same, run, start

GB = 1e9


class Drive(NamedTuple):
    """Rates of a drive, for the rule."""

    read: float
    write: float
    mixed: float

    @property
    def one_after_the_other(self) -> float:
        """Bytes a second where equal numbers are read and then written, without any cost of turns."""
        return 2 / (1 / self.read + 1 / self.write)


SLOW_AT_ONCE = Drive(0.55 * GB, 0.5 * GB, 0.35 * GB)

rates = st.floats(1e6, 1e11)
drives = st.builds(Drive, rates, rates, rates)


# -- the rule -----------------------------------------------------------------------------------------


def test_windows_are_for_drives_that_are_slower_with_both_at_once() -> None:
    drive: Drive
    for drive, windows in (
        (Drive(2.8 * GB, 5.6 * GB, 3.7 * GB), False),  # the virtual drive of docs/benchmarks/2026-11-io.md
        (Drive(7 * GB, 5 * GB, 6.5 * GB), False),  # both directions of a link at once
        (Drive(0.2 * GB, 0.2 * GB, 0.08 * GB), True),  # a disk that turns, which moves its head for each
        (SLOW_AT_ONCE, True),
    ):
        print(drive)
        assert (window_bytes([drive]) > 0) == windows


@given(drives)
def test_windows_are_chosen_only_where_they_take_less_time(drive: Drive) -> None:
    at_once, in_windows = rule.seconds_at_once(drive), rule.seconds_in_windows(drive)
    assert in_windows > 2 * WINDOW_BYTES / drive.one_after_the_other, "turns cost time"
    assert (window_bytes([drive]) > 0) == (in_windows <= 0.8 * at_once)


@given(st.lists(drives, max_size=4))
def test_several_drives_have_windows_if_each_of_them_gains(several: Sequence[Drive]) -> None:
    all_gain = bool(several) and all(window_bytes([each]) for each in several)
    assert window_bytes(several) == (WINDOW_BYTES * len(several) if all_gain else 0)


# -- the kept probe -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def keep_probe(folder: Path, drive: Drive) -> None:
    """Keeps a probe of this machine whose drive has these rates."""
    of = Rates(1e10, 1e10, 1e10, 1e10, 1e10, {name: DtypeRates(1e12, 1e10, 1e10, 1e9, 1e9) for name in DTYPES})
    here = machine() | {"name": "here", "gpu": None, "gpu_memory_bytes": 0}
    keep(Probed(here, of, (DriveRates(str(folder.resolve()), "/dev/x", *drive),), "2026-11-24", 1.0))


def test_the_window_is_that_of_the_kept_probe(tmp_path: Path) -> None:
    assert kept_window([str(tmp_path)]) == 0, "nothing was probed"
    keep_probe(tmp_path, SLOW_AT_ONCE)
    assert kept_window([str(tmp_path)]) == kept_window([str(tmp_path / "not" / "yet")]) == WINDOW_BYTES
    assert kept_window([]) == 0
    found = probe.kept()
    assert found is not None
    (planned,) = probed(found, 1 << 30).drives
    assert planned.mixed == rule.rate_of_both(SLOW_AT_ONCE) > SLOW_AT_ONCE.mixed
    keep_probe(tmp_path, Drive(2.8 * GB, 5.6 * GB, 3.7 * GB))
    assert kept_window([str(tmp_path)]) == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_drive_that_was_not_probed_reads_and_writes_at_once(tmp_path: Path) -> None:
    keep_probe(tmp_path, SLOW_AT_ONCE)
    assert kept_window(["/dev/shm"]) == kept_window([str(tmp_path), "/dev/shm"]) == 0


@pytest.mark.parametrize("drive", [SLOW_AT_ONCE, Drive(2.8 * GB, 5.6 * GB, 3.7 * GB)])
def test_the_order_is_shown_with_the_rates(drive: Drive, tmp_path: Path) -> None:
    keep_probe(tmp_path, drive)
    found = probe.kept()
    assert found is not None
    expected = "in windows of 128.0 MiB" if drive is SLOW_AT_ONCE else "at once"
    line = dict(probe.lines(found))[str(tmp_path.resolve())]
    assert f"both {drive.mixed / GB:.2f} GB/s" in line and line.endswith(expected)
    info = CliRunner().invoke(app, ["info", str(tmp_path)], env={"COLUMNS": "300"})
    assert info.exit_code == 0 and line in info.stdout
    content = json.loads(CliRunner().invoke(app, ["info", str(tmp_path), "--json"]).stdout)
    assert content["drives"][0]["probed"]["mixed"] == drive.mixed


# -- the queue and the engine -------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("window", [1, 1 << 16, 1 << 30])
def test_all_bytes_move_in_windows(backend: str, window: int, tmp_path: Path) -> None:
    """Reads and writes of each priority in random order, all of them queued at once."""
    chance, count, nbytes = random.Random(window), 300, 70_000
    data = memoryview(chance.randbytes(count * nbytes))
    back, order = aligned_empty(count * nbytes), list(range(2 * count))
    chance.shuffle(order)
    with (
        DirectFile(tmp_path / "file", create=True) as file,
        IoQueue(backend, block_bytes=1 << 16, depth=4, window_bytes=window) as queue,
    ):
        assert queue.window_bytes == max(window, 2 * queue.threads * queue.depth * queue.block_bytes)
        queue.write(file, 0, data).wait()
        futures = []
        for index in order:
            at, priority = index % count * nbytes, chance.choice(list(Priority))
            if index < count:
                futures.append(queue.read(file, at, back[at : at + nbytes], priority=priority))
            else:
                futures.append(queue.write(file, len(data) + at, data[at : at + nbytes], priority=priority))
        assert [future.wait() for future in futures] == [nbytes] * len(order)
        assert back == data
        queue.read(file, len(data), back).wait()
        assert back == data


@pytest.mark.parametrize("window", [-1, (1 << 30) + 1])
def test_a_window_out_of_range_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="expected window_bytes from 0 to"):
        IoQueue(window_bytes=window)


def test_an_engine_trains_the_same_bits_in_windows(tmp_path: Path) -> None:
    placement = ("nvme", "nvme")
    at_once = run(models.SHALLOW, placement, tmp_path)
    keep_probe(tmp_path, SLOW_AT_ONCE)
    assert_same(run(models.SHALLOW, placement, tmp_path), at_once)


def test_an_engine_says_that_its_drives_have_windows(tmp_path: Path) -> None:
    for drive, window in ((Drive(GB, GB, GB), 0), (SLOW_AT_ONCE, WINDOW_BYTES)):
        keep_probe(tmp_path, drive)
        engine = start(models.SHALLOW, ("nvme", "nvme"), tmp_path)
        queue = testing.inspect(engine).queue
        assert queue is not None and queue.window_bytes == queue._queue.window_bytes == window
        assert any("in windows of 128.0 MiB" in line for line in engine.notices) == bool(window)
        engine.destroy(remove=True)
