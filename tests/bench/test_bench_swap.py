"""`offload bench swap` moves the bytes of training, reports the hidden time, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import offload
from offload.bench.swap import SwapPlan, SwapRow, find_limit, make_plan
from offload.cli.main import app
from offload.errors import ConfigError
from tests.support.processes import warm_process

MIB = 1 << 20
UNITS, UNIT_BYTES = 32, 1 << 18
NUMEL = UNITS * UNIT_BYTES // 2
SMALL = (
    *("--units", str(UNITS), "--unit-size", "256KiB", "--compute-ms", "0"),
    *("--steps", "2", "--rounds", "1", "--probe-size", "1MiB"),
)
TIGHT = ("--host-memory", "20.5MiB", "--device-memory", "256KiB")
"""Eight tiles, two leases, all gradients; one unit."""


def _json(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["bench", "swap", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["bench", "swap", *arguments])
    assert done.exit_code == 2 and done.stdout == "", done.output
    return done.stderr


def test_bytes_are_those_of_training(tmp_path: Path) -> None:
    """26 for each parameter where budgets hold next to nothing, 24 of files for two slots."""
    answer = _json(str(tmp_path), *SMALL, *TIGHT)
    assert (answer["parameters"], answer["units"], answer["unit_bytes"]) == (NUMEL, UNITS, UNIT_BYTES)
    assert (answer["host_memory"], answer["device_memory"]) == (20.5 * MIB, UNIT_BYTES)
    assert answer["durability"] == "step" and answer["compute_measured"] and answer["overlap"]
    assert 24 * NUMEL <= answer["file_bytes"] < 24.1 * NUMEL
    assert all(answer["drive"][f"{name}_gb_per_s"] > 0 for name in ("read", "write", "mixed"))
    (row,) = answer["rows"]
    assert set(row) == {each.name for each in fields(SwapRow)}
    assert row["bytes_per_parameter"] == pytest.approx(26, rel=0.04)
    assert row["written_bytes"] == pytest.approx(12 * NUMEL, rel=0.01)
    assert row["read_bytes"] + row["written_bytes"] == pytest.approx(row["bytes_per_parameter"] * NUMEL, rel=0.01)
    assert row["step_seconds"] > 0 and row["limit"] in ("compute", "drive", "order", "budgets")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_says_nothing_of_a_config_that_nobody_wrote(tmp_path: Path) -> None:
    """Neither the start of its engines nor the speed of bf16 is the user's; what the drive refuses is in the result."""
    process = warm_process.begin(
        ["-m", "offload", "bench", "swap", str(tmp_path), *SMALL, "--backend", "threads"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate()
    assert process.returncode == 0 and errors == "", errors
    assert output is not None and output.startswith(f"{UNITS} units of 256.0 KiB, "), output
    for words in ("exposed", "host budget", "at 0 ms a unit", "limit"):
        assert words in output, "a table, and a sentence"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        (("--no-overlap",), 28),
        (("--durability", "none"), 26),
        (("--weights", "cpu", "--host-memory", "28.5MiB"), 22),
        (("--weights", "none", "--device-memory", "8MiB", "--host-memory", "20.5MiB"), 22),
        (("--weights", "none", "--durability", "none", "--device-memory", "8MiB"), 20),
        (("--states", "cpu", "--host-memory", "60.5MiB", "--durability", "none"), 6),
        (("--weights", "cpu", "--states", "cpu", "--durability", "step"), 12),
        (("--accumulation", "2", "--host-memory", "28.5MiB"), 30),
        (("--busy",), 26),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bytes_of_other_choices(tmp_path: Path, options: tuple[str, ...], nbytes: int) -> None:
    budgets = () if "cpu" in options and "step" in options else TIGHT
    answer = _json(str(tmp_path), *SMALL, *budgets, "--no-in-memory", *options)
    (row,) = answer["rows"]
    assert row["bytes_per_parameter"] == pytest.approx(nbytes, rel=0.06)
    assert not answer["compute_measured"] and answer["overlap"] == ("--no-overlap" not in options)
    assert answer["busy"] == ("--busy" in options)
    assert answer["durability"] == ("none" if "none" in options and "--durability" in options else "step")
    assert not list(tmp_path.iterdir())


# -- errors -------------------------------------------------------------------------------------------


def test_bad_input_is_named_before_a_file_is_made(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for arguments, message in (
        ((str(tmp_path / "none"),), "there is no folder"),
        ((folder, "--units", "0"), "--units >= 1"),
        ((folder, "--steps", "0"), "--steps >= 1"),
        ((folder, "--rounds", "0"), "--rounds >= 1"),
        ((folder, "--accumulation", "0"), "--accumulation >= 1"),
        ((folder, "--compute-ms", "-1"), "--compute-ms from 0"),
        ((folder, "--compute-ms", "nan"), "--compute-ms from 0"),
        ((folder, "--unit-size", "1"), "--unit-size of at least 4096"),
        ((folder, "--unit-size", "much"), "expected a size"),
        ((folder, "--probe-size", "1"), "--probe-size of at least 4096"),
        ((folder, "--weights", "gpu"), "none, cpu, nvme"),
        ((folder, "--states", "gpu"), "none, cpu, nvme"),
        ((folder, "--durability", "every"), "auto, step, none"),
        ((folder, "--backend", "gds"), "io_uring, libaio, threads"),
        ((folder, "--weights", "cpu", "--states", "cpu"), "nothing would be swapped"),
        ((folder, "--units", "1000000000"), "free, the files take"),
        ((folder, *SMALL, "--host-memory", "1MiB"), '"host_memory"'),
        ((folder, *SMALL, "--device-memory", "4096"), '"device_memory"'),
    ):
        assert message in _refused(*arguments), arguments
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_named_before_any_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the copy in memory compute is added up; without room for the budgets nothing is begun."""

    def plan(free: int, **options: Any) -> SwapPlan:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        return make_plan([str(tmp_path)], **options)

    assert plan(1 << 36).in_memory and not plan(1 << 36, in_memory=False).in_memory
    assert not plan(4 << 30).in_memory
    with pytest.raises(ConfigError, match="leave --in-memory out"):
        plan(4 << 30, in_memory=True)
    with pytest.raises(ConfigError, match="budgets and gradients take"):
        plan(1 << 30)
    with pytest.raises(ConfigError, match="smaller budgets"):
        plan(4 << 30, host_memory=5 << 30)


def test_an_error_in_a_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_bytes(b"kept")

    def fail(self: offload.Engine) -> None:
        raise OSError(5, "on purpose")

    monkeypatch.setattr(offload.Engine, "step", fail)
    done = CliRunner().invoke(app, ["bench", "swap", str(tmp_path), *SMALL])
    assert done.exit_code == 1 and "on purpose" in done.stderr, done.output
    assert os.listdir(tmp_path) == ["mine"] and (tmp_path / "mine").read_bytes() == b"kept"


# -- what the figures mean ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "compute", "io", "order", "limit"),
    [
        (1.04, 1.0, 0.5, 1.0, "compute"),
        (2.1, 1.0, 2.0, 2.0, "drive"),
        (2.6, 2.0, 1.9, 2.5, "order"),
        (3.2, 1.0, 2.0, 2.5, "budgets"),
    ],
)
def test_the_limiting_rate_is_named(step: float, compute: float, io: float, order: float, limit: str) -> None:
    assert find_limit(step, compute, io, order) == limit
