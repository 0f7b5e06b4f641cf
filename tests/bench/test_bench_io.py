"""`offload bench io` reports its measurements beside fio and plain calls, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.aio import BACKENDS
from offload.aio.backend import refusals
from offload.bench.io import IoRow, make_plan, measure
from offload.bench.io import plot as draw
from offload.cli.main import app
from offload.errors import ConfigError
from tests.bench.test_bench_swap import SMALL as SWAP

KEYS = {"backend", "op", "block_bytes", "depth", "bytes", "gb_per_s", "of_fio", "cpu_s_per_gb", "p50_us", "p99_us"}
SMALL = ("--size", "1MiB", "--request", "256KiB", "--rounds", "1", "--block-size", "64KiB", "--depth", "4")


def _json(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == code, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2 and done.stdout == "", done.output
    return done.stderr


def test_every_backend_and_operation(tmp_path: Path) -> None:
    answer = _json("bench", "io", str(tmp_path), *SMALL)
    assert answer["machine"]["cores"] >= 1 and answer["machine"]["versions"]["offload"]
    works = [name for name, refused in refusals().items() if refused is None]
    ours = [row for row in answer["rows"] if row["backend"] in BACKENDS]
    assert [(row["op"], row["backend"]) for row in ours] == [
        (op, name) for op in ("write", "read", "mixed") for name in works
    ]
    for row in answer["rows"]:
        assert set(row) == KEYS
        assert (row["block_bytes"], row["depth"], row["bytes"]) == (65536, 4, 1 << 20)
        assert row["gb_per_s"] > 0 and row["cpu_s_per_gb"] >= 0
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in ours)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_several_paths_and_a_sweep(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    words = "--op read --no-fio --depth 1 --block-size 4096 --backend threads".split()
    answer = _json("bench", "io", *map(str, folders), *SMALL, *words)
    shapes = [(row["block_bytes"], row["depth"]) for row in answer["rows"]]
    assert shapes == [(65536, 4), (65536, 1), (4096, 4), (4096, 1)]
    assert all(row["of_fio"] is None for row in answer["rows"]) and answer["paths"] == [str(f) for f in folders]
    assert not any(list(folder.iterdir()) for folder in folders)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_is_measured_in_the_same_run(tmp_path: Path) -> None:
    rows = _json("bench", "io", str(tmp_path), *SMALL, "--backend", "threads")["rows"]
    assert {row["backend"] for row in rows} == {"threads", "fio io_uring", "fio libaio"}
    assert all(row["of_fio"] > 0 for row in rows)
    for op in ("write", "read", "mixed"):
        assert max(row["of_fio"] for row in rows if row["op"] == op and row["backend"] != "threads") == 1


@pytest.mark.parametrize("name", ["aiofiles", "python-libaio"])
def test_the_plain_ways_of_python_come_last(tmp_path: Path, name: str) -> None:
    try:
        make_plan([str(tmp_path)], backends=[name])
    except ConfigError as error:
        pytest.skip(str(error))
    rows = _json("bench", "io", str(tmp_path), *SMALL, "--backend", name, "--backend", "threads", "--no-fio")["rows"]
    assert [row["backend"] for row in rows] == ["threads", name] * 3
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_the_file_holds_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read brings back the bytes of the writes: the benchmark moves real ones."""
    seen: list[bytes] = []
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: seen.append(path.read_bytes()))
    plan = make_plan(
        [str(tmp_path)], backends=["threads"], blocks=[4096], depths=[2], nbytes=1 << 20, rounds=1, with_fio=False
    )
    measure(plan)
    assert len(seen) == 1 and len(seen[0]) == 1 << 20 and len(set(seen[0])) == 256


def test_bad_input_is_named_before_a_file_is_made(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for arguments, message in (
        ((str(tmp_path / "none"),), "there is no folder"),
        ((folder, "--backend", "gds"), "io_uring, libaio, threads, aiofiles, python-libaio"),
        ((folder, "--op", "trim"), "write, read, mixed"),
        ((folder, "--block-size", "1000"), "--block-size that is a multiple of 4096"),
        ((folder, "--depth", "0"), "--depth >= 1"),
        ((folder, "--rounds", "0"), "--rounds >= 1"),
        ((folder, "--size", "1"), "expected --size and --request of at least 4096"),
        ((folder, "--size", "8388608TiB"), "free"),
        ((folder, "--size", "much"), "expected a size"),
        ((folder, "--plot", str(tmp_path / "plot.txt")), ".png"),
        ((folder, "--plot", str(tmp_path / "none" / "plot.png")), "no folder"),
    ):
        assert message in _refused("bench", "io", *arguments), arguments
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "words"), [("io", "File too large"), ("swap", "error: ")])
def test_a_full_disk_is_an_error_and_leaves_nothing(command: str, words: str, tmp_path: Path) -> None:
    """Room that was there when it was looked at, and then was not."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, before[1]))
    try:
        done = CliRunner().invoke(app, ["bench", command, str(tmp_path), *(SMALL if command == "io" else SWAP)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 1 and words in done.stderr, done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(1)
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot.{suffix}"
    rows = [
        IoRow(
            backend=name,
            op=op,
            block_bytes=1 << 20,
            depth=depth,
            bytes=1 << 30,
            gb_per_s=2.0 + depth / 10,
            of_fio=None,
            cpu_s_per_gb=0.01,
            p50_us=100.0,
            p99_us=200.0,
        )
        for op in ("write", "read")
        for name in ("io_uring", "fio libaio")
        for depth in (8, 32)
    ]
    draw(rows, path)
    start = path.read_bytes()[:5]
    assert start in (b"\x89PNG\r", b"<?xml")
