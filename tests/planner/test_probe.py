"""`offload probe` measures every rate of the machine once, within its seconds, and stores it for this machine."""

from __future__ import annotations

import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload import testing
from offload.cli.main import app
from offload.hardware import probe
from offload.planner.hardware import probed

SECONDS = 0.3
"""So little that every size is the smallest; on any machine."""


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    testing.replace(monkeypatch, "probe.measure", functools.partial(probe.probe, seconds=SECONDS))
    # Other tests run beside this one.
    testing.replace(monkeypatch, "probe.largest_spread", math.inf)
    testing.replace(monkeypatch, "probe.least_rate", 0.0)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["probe", *arguments])


def test_all_rates_are_measured_kept_and_announced(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--size", "1MiB", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    by_dtype = report["rates"].pop("by_dtype")
    assert by_dtype.keys() == {"bf16", "fp32", "fp16"}
    assert all(value > 0 for rates in (report["rates"], *by_dtype.values()) for value in rates.values())
    assert [drive["path"] for drive in report["drives"]] == [str(tmp_path)]
    assert all(report["drives"][0][name] > 0 for name in ("read", "write", "mixed"))
    kept = probe.kept()
    assert kept is not None and probe.as_json(kept) == json.loads(done.stdout)
    assert not list(tmp_path.glob(".offload-probe*")), "its file is gone"
    # Without a terminal progress is printed line by line.
    progress = [line for line in done.stderr.splitlines() if line.startswith("measuring ")]
    assert progress[0] == f"measuring the drive of {tmp_path}" and len(progress) == len(set(progress)) > 10
    for message in ("memory", "matrix products in bf16", "optimizer and gradients in fp32", "new memory"):
        assert f"measuring {message}" in progress


@pytest.mark.slow
def test_a_second_drive_joins_the_first(tmp_path: Path) -> None:
    for name in ("one", "two", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        assert run(str(tmp_path / name), "--size", "1MiB", "--device", "cpu").exit_code == 0
    kept = probe.kept()
    assert kept is not None and [Path(each.path).name for each in kept.drives] == ["two", "one"]


def test_another_processor_is_another_machine(tmp_path: Path) -> None:
    assert probe.kept() is None
    assert run(str(tmp_path), "--size", "1MiB", "--device", "cpu", "--no-keep").exit_code == 0
    assert probe.kept() is None
    run(str(tmp_path), "--size", "1MiB", "--device", "cpu")
    content = json.loads(probe.cache_path().read_text())
    content["machine"]["processor"] = "another"
    probe.cache_path().write_text(json.dumps(content))
    assert probe.kept() is None
    probe.cache_path().write_text("{")
    assert probe.kept() is None


def test_bad_input_is_refused(tmp_path: Path) -> None:
    for arguments in (["--size", "many"], ["--device", "tpu"]):
        done = run(str(tmp_path), *arguments)
        assert done.exit_code == 2 and ("expected a size" in done.output or "error: there is no" in done.output)
    done = run(str(tmp_path / "none"))
    assert done.exit_code == 2 and "none" in done.output


def test_a_folder_that_cannot_be_used_is_an_error_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "probe.measure", lambda *_: pytest.fail("it measured"))
    done = run(str(tmp_path), "--size", "900TB")
    assert done.exit_code == 2 and "give a smaller --size" in done.stderr
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = run(str(tmp_path), "--size", "1MiB")
    assert done.exit_code == 2 and "XDG_CACHE_HOME" in done.stderr and "--no-keep" in done.stderr
    done = run(str(tmp_path / "file"))
    assert done.exit_code == 2 and "Not a directory" in done.stderr


def test_a_cache_with_a_relative_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probe.cache_path().parent == tmp_path / ".cache" / "offload"


# -- what runs beside ---------------------------------------------------------------------------------


def test_two_figures_that_differ_are_reported_with_the_fix() -> None:
    message = lambda rate: f"{rate:g} GB/s"  # noqa: E731
    assert probe.apart("memory", 20.0, 17.0, message) == []
    for first, last in ((20.0, 10.0), (10.0, 20.0)):
        (progress,) = probe.apart("memory", first, last, message)
        assert f"memory: {first:g} GB/s at the beginning" in progress and f"{last:g} GB/s at its end" in progress
        assert "run `offload probe` again while the machine is idle" in progress


def test_cores_that_others_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy, mine = [0.0], [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: mine[0])
    testing.replace(monkeypatch, "machine.busy_seconds", lambda: busy[0])
    testing.replace(monkeypatch, "machine.cores", lambda: {0, 1, 2, 3})
    for of_all, of_mine, progress in ((40.0, 39.0, 0), (40.0, 30.0, 1), (10.0, 1.0, 1), (20.0, 20.0, 0)):
        clock[0] = busy[0] = mine[0] = 0.0
        load = probe.Others()
        clock[0], busy[0], mine[0] = 10.0, of_all, of_mine
        assert len(load.doubts()) == progress
    testing.replace(monkeypatch, "machine.busy_seconds", lambda: None)
    assert probe.Others().doubts() == [], "where nobody can tell"


def test_what_ran_beside_is_kept_and_assumed_by_a_plan(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--size", "1MiB", "--device", "cpu")
    kept = probe.kept()
    assert kept is not None
    doubts = ("memory: 2 GB/s at the beginning of the probe, 1 GB/s at its end",)
    probe.keep(kept._replace(doubts=doubts))
    again = probe.kept()
    assert again is not None and again.doubts == doubts
    assert set(doubts) <= set(probed(again, 1 << 30).assumptions)
    assert {rate.origin for rate in probed(again, 1 << 30).rates} <= {"measured", "assumed"}
    assert {rate.name: rate.origin for rate in probed(again, 1 << 30).rates}["host memory"] == "measured"
    assert done.stdout.count("warning: ") == len(kept.doubts)


@pytest.mark.parametrize("wrong", ["products", "apart"])
def test_figures_of_no_machine_are_not_kept(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(str(tmp_path), "--size", "1MiB", "--device", "cpu")
    good = probe.kept()
    assert good is not None
    testing.replace(monkeypatch, "probe.largest_spread", 10.0)
    testing.replace(monkeypatch, "probe.least_rate", 1e8)
    by_dtype = {name: of._replace(matmul=2e11, elementwise=3e9) for name, of in good.rates.by_dtype.items()}
    good = good._replace(rates=good.rates._replace(memory=5e9, by_dtype=by_dtype))
    probe.keep(good)
    slow = good.rates._replace(by_dtype={**by_dtype, "bf16": by_dtype["bf16"]._replace(matmul=3e7)})
    bad = good._replace(spread=12.0) if wrong == "apart" else good._replace(rates=slow)
    testing.replace(monkeypatch, "probe.measure", lambda *_: bad)
    done = run(str(tmp_path), "--size", "1MiB", "--device", "cpu")
    reason = "differs 12-fold" if wrong == "apart" else "matrix products in bf16: 3e+07 operations a second"
    assert done.exit_code == 1 and "the result is not stored" in done.stderr and reason in done.stderr, done.output
    assert "while the machine is idle" in done.stderr and "stored in" not in done.stdout
    kept = probe.kept()
    assert kept is not None and kept.rates.by_dtype["bf16"].matmul == 2e11, "what was stored before stays"
    assert run(str(tmp_path), "--size", "1MiB", "--device", "cpu", "--no-keep").exit_code == 0
    # Such a file of an earlier version is none.
    content = json.loads(probe.cache_path().read_text())
    content["rates"]["by_dtype"]["fp32"]["matmul"] = 3e7
    probe.cache_path().write_text(json.dumps(content))
    assert probe.kept() is None


def test_a_plan_counts_with_the_rates_of_its_dtype(tmp_path: Path) -> None:
    run(str(tmp_path), "--size", "1MiB", "--device", "cpu")
    kept = probe.kept()
    assert kept is not None
    for name, dtype in probe.DTYPES.items():
        on, of = probed(kept, 1 << 30, dtype=name), kept.rates.by_dtype[name]
        assert (on.matmul, on.weights, on.elementwise, on.optimizer, on.gradient) == (
            *(of.matmul, of.weights, of.elementwise),
            *(of.optimizer, of.gradient),
        )
        assert on.itemsize == torch.empty(0, dtype=dtype).itemsize
    cast = probed(kept, 1 << 30, dtype="fp32", autocast=True)
    assert cast.matmul == kept.rates.by_dtype["bf16"].matmul and cast.itemsize == 4


def test_in_a_terminal_it_is_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    plain = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **given: plain(**{**given, "force_terminal": True, "width": 100})
    )
    done = run(str(tmp_path), "--size", "1MiB", "--device", "cpu", "--json")
    json.loads(done.stdout)
    assert "━" in done.stderr and "memory" in done.stderr and "measuring " not in done.stderr


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([9, 1, 1, 1, 1, 1], 3),  # the first call of each finds memory
        ([9, 9, 9, 1, 9, 9, 1, 1, 1], 3),  # other work made some calls longer
        ([9, 9, 9, 9, 9], 1),  # it is that slow
        ([1, 6, 6, 6, 6], 1),  # the next one would take far more
    ],
)
def test_a_size_is_judged_by_its_shortest_call(
    taken: list[float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(taken)
    testing.replace(monkeypatch, "clock.probed_call", lambda action, device: next(calls))
    work = {1: 1.0, 2: 10.0 if 6 in taken else 2.0, 3: 3.0}
    assert probe.grown((1, 2, 3), work.__getitem__, lambda size: lambda: None, 8.0) == expected
