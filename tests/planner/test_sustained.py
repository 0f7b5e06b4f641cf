"""`offload probe --sustained`: where the rate of writes falls, what is kept of it, and the steps of a plan with it."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.throttle import falling
from offload.cli.main import app
from offload.hardware import sustained
from offload.hardware.info import drive
from offload.hardware.sustained import Curve, Sample, fall, measure
from offload.planner import recommend
from offload.planner.activations import Load
from offload.planner.hardware import Drive, described
from offload.planner.memory import settings
from offload.planner.model_shape import from_count
from offload.planner.recommend import Planned
from offload.planner.sustained import sustained_steps
from offload.sizes import GIB, MIB

CHUNK = 256 * MIB


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


class FakeDrive:
    """A drive with a cache: seconds of a chunk by the bytes since the last pause, with noise and stalls."""

    def __init__(self, burst: float, cache: float, after: float, noise: float = 0.0, seed: int = 0) -> None:
        self._burst, self._cache, self._after, self._noise = burst, cache, after, noise
        self._random = random.Random(seed)
        self._since = 0.0
        self.written = 0

    def write(self, number: int) -> float:
        assert number * CHUNK == self.written, "chunks come in order"
        rate = self._burst if self._since < self._cache else self._after
        self._since += CHUNK
        self.written += CHUNK
        # One chunk of forty waits ten times as long, as where a drive collects its garbage.
        stall = 10 if self._noise and self._random.random() < 1 / 40 else 1
        return CHUNK / rate * (1 + self._noise * self._random.uniform(-1, 1)) * stall

    def idle(self) -> float:
        self._since = self._cache / 2
        return 60.0


# Of reviews: Lexar NM790, MP700 Elite, FX900, P41 Plus (QLC), each of 2 TB.
@pytest.mark.parametrize(("burst", "cache", "after"), [(5, 280, 2.5), (6, 407, 1.4), (4.5, 280, 2), (3.5, 150, 0.26)])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_fall_is_found_within_a_tenth(burst: float, cache: float, after: float, noise: float, seed: int) -> None:
    device = FakeDrive(burst * 1e9, cache * 1e9, after * 1e9, noise, seed)
    samples, fall_found, recovery = measure(device.write, 10**12, CHUNK, device.idle)
    assert fall_found is not None and recovery is not None
    assert fall_found.burst_bytes == pytest.approx(cache * 1e9, rel=0.1 if noise else 0.01)
    assert fall_found.burst == pytest.approx(burst * 1e9, rel=0.1) and fall_found.after == pytest.approx(
        after * 1e9, rel=0.15
    )
    assert sum(sample.nbytes for sample in samples) < 1.35 * cache * 1e9, "it ends soon after the fall"
    assert recovery[0] == 60.0 and recovery[1] <= cache * 1e9 / 2 + 16 * CHUNK
    if not noise:
        assert recovery[1] == pytest.approx(cache * 1e9 / 2, abs=8 * CHUNK)
    assert device.written <= 10**12


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_noise_and_stalls_are_no_fall(noise: float) -> None:
    for seed in range(5):
        device = FakeDrive(3e9, 1e15, 1e9, noise, seed)
        _, fall_found, recovery = measure(device.write, 10**11, CHUNK, device.idle)
        assert fall_found is None and recovery is None and device.written == 10**11 // CHUNK * CHUNK


def test_a_rate_that_comes_back_or_hardly_falls_has_not_fallen() -> None:
    fast, slow = Sample(CHUNK, 0.1), Sample(CHUNK, 0.4)
    assert fall([fast] * 100 + [slow] * 20 + [fast] * 100) is None
    assert fall([fast] * 100 + [Sample(CHUNK, 0.12)] * 100) is None
    assert fall([slow] * 100 + [fast] * 100) is None, "a rate that rises"
    assert fall([fast] * 100 + [slow] * 5) is None, "too few to be sure"
    fall_of = fall([fast] * 100 + [slow] * 50)
    assert fall_of == (100 * CHUNK, CHUNK / 0.1, CHUNK / 0.4)


def curve(path: Path, **changes: Any) -> Curve:
    points = ((10**11, 5e9), (4 * 10**11, 2e9))
    whole = Curve(str(path), "/dev/x", 4 * 10**11, 5e9, 28 * 10**10, 1e9, 60.0, 10**10, (40.0, 71.5), 3, "d", points)
    return whole._replace(**changes)


def test_curves_are_kept_by_drive_and_for_this_machine(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert sustained.kept() == [] and sustained.curve_under(str(tmp_path)) is None
    for measured_curve in (curve(folders[0]), curve(folders[1], temperature=None), curve(folders[0], after=2e9)):
        sustained.keep(measured_curve)
    assert sustained.kept() == [curve(folders[1], temperature=None), curve(folders[0], after=2e9)]
    assert sustained.curve_under(str(folders[1])) == curve(folders[1], temperature=None)
    assert sustained.curve_under(str(tmp_path)) is not None, "another folder of the same file system"
    content = json.loads(sustained.cache_path().read_text())
    sustained.cache_path().write_text(json.dumps({**content, "processor": "another"}))
    assert sustained.kept() == []
    sustained.cache_path().write_text("{")
    assert sustained.kept() == []


def planned_on(name: str) -> Planned:
    machine = described("RTX 4090", 64 * GIB, [Drive(name, 7e9, 5e9, 2 / (1 / 7e9 + 1 / 5e9), 2 * 10**12)])
    return recommend.plan(from_count(13 * 10**9, 20, 2048), machine, Load(1), settings())


def seconds_at(planned: Planned, write: float) -> float:
    slower = Drive(planned.hardware.drives[0].name, 7e9, write, 2 / (1 / 7e9 + 1 / write), 2 * 10**12)
    machine = replace(planned.hardware, drives=(slower,))
    return recommend.plan(planned.shape, machine, Load(1), planned.content).timing.seconds


def test_a_plan_without_a_curve_says_that_its_rates_are_bursts(tmp_path: Path) -> None:
    planned = planned_on("drive of 7GB/s")
    steps = sustained_steps(planned)
    assert steps is not None and not steps.measured
    assert steps.seconds == {"at 2.5 GB/s of writes": seconds_at(planned, 2.5e9)}
    assert steps.seconds["at 2.5 GB/s of writes"] > planned.timing.seconds
    count = ("plan", "--parameters", "13B", "--layers", "40", "--batch-size", "1", "--accumulation", "1")
    machine = ("--gpu", "RTX 4090", "--ram", "64GB", "--drive")
    said = run(*count, *machine, "7GB/s,5GB/s").stdout
    assert "\nrates   burst rates, unverified; a step takes " in said and " at 2.5 GB/s of writes\n" in said
    assert "\nrates   burst rates, unverified\n" in run(*count, *machine, "7GB/s,2GB/s").stdout
    in_memory = ("plan", "--parameters", "350M", "--layers", "8", "--batch-size", "1", "--accumulation", "1")
    assert "\nrates" not in run(*in_memory, *machine, "7GB/s,5GB/s").stdout, "nothing is written"


def test_a_plan_uses_the_curve_of_its_drive(tmp_path: Path) -> None:
    planned = planned_on(str(tmp_path))
    # The plan writes some 2 to 4 GB/s: 280 GB take more than a minute and less than an hour.
    sustained.keep(curve(tmp_path))
    steps = sustained_steps(planned)
    assert steps is not None and steps.measured
    slow = seconds_at(planned, 1e9)
    assert steps.seconds == {"in the first minute": planned.timing.seconds, "after an hour": slow, "after a day": slow}
    assert slow > planned.timing.seconds
    # A drive whose burst lasts for more than an hour of this plan.
    an_hour = 3600 * planned.timing.moved.written / planned.timing.seconds
    sustained.keep(curve(tmp_path, burst_bytes=int(1.1 * an_hour)))
    steps = sustained_steps(planned)
    assert steps is not None and list(steps.seconds.values()) == [planned.timing.seconds] * 2 + [slow]
    sustained.keep(curve(tmp_path, burst_bytes=None, after=None))
    steps = sustained_steps(planned)
    assert steps is not None and set(steps.seconds.values()) == {planned.timing.seconds}


def test_the_command_writes_what_it_says_and_leaves_no_file(tmp_path: Path) -> None:
    if not drive(str(tmp_path))["o_direct"]:
        pytest.skip("no O_DIRECT here")
    done = run("probe", "--sustained", str(tmp_path), "--gigabytes", "0.01", "--json")
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.stdout)
    assert "warning: " in done.stderr and "writes up to 10 MB" in done.stderr and "Ctrl-C ends it" in done.stderr
    assert 0 < report["written"] <= 10**7 and report["burst"] > 0 and len(report["points"]) <= 200
    assert not list(tmp_path.glob(".offload-probe*")), "its file is gone"
    assert [each.path for each in sustained.kept()] == [str(tmp_path)]


def test_ctrl_c_removes_the_file_and_keeps_nothing(tmp_path: Path) -> None:
    if not drive(str(tmp_path))["o_direct"]:
        pytest.skip("no O_DIRECT here")

    def stop(words: str, done: float) -> None:
        assert list(tmp_path.glob(".offload-probe*"))
        if done > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sustained.probe(str(tmp_path), 10**7, stop, idle_seconds=0)
    assert not list(tmp_path.glob(".offload-probe*")) and sustained.kept() == []


def test_what_cannot_be_written_is_refused_before_it_begins(tmp_path: Path) -> None:
    for arguments, words in (
        (["--sustained", "--gigabytes", "999999"], "have no room"),
        (["--sustained", "--gigabytes", "-1"], "expected --gigabytes above 0"),
        (["--sustained", "--gigabytes", "nan"], "expected --gigabytes above 0"),
        (["--sustained", "--gigabytes", "0.0001"], "expected --gigabytes of at least"),
        (["--gigabytes", "1"], "--gigabytes goes with --sustained"),
    ):
        done = run("probe", str(tmp_path), *arguments)
        assert done.exit_code == 2 and words in done.output.replace("\n", " "), done.output
    assert not list(tmp_path.glob(".offload-probe*"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/sys/fs/cgroup/blkio").is_dir(), reason="needs root and cgroup v1")
def test_a_drive_that_the_kernel_holds_back_falls_there(tmp_path: Path) -> None:
    with falling(tmp_path, 200 * 10**6, 1_200_000_000, 40 * 10**6):
        measured_fall = sustained.probe(str(tmp_path), 2 * 10**9, idle_seconds=0)
    assert measured_fall.burst_bytes == pytest.approx(1.2e9, rel=0.1)
    assert measured_fall.after == pytest.approx(40e6, rel=0.1)


def test_a_drive_that_has_fallen_reads_beside_its_writes_as_before() -> None:
    steps = {}
    for mixed in (2 / (1 / 7e9 + 1 / 5e9), 1e10):
        planned = planned_on("drive of 7GB/s")
        machine = replace(planned.hardware, drives=(planned.hardware.drives[0]._replace(mixed=mixed),))
        sustained = sustained_steps(recommend.plan(planned.shape, machine, Load(1), planned.content))
        assert sustained is not None
        steps[mixed] = sustained.seconds["at 2.5 GB/s of writes"]
    one_after_the_other, beside = steps.values()
    assert beside < 0.9 * one_after_the_other
