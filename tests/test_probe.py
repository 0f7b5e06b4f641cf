"""`offload probe`: every rate of the machine once, kept for this machine and for no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload import probe
from offload.cli import app


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"_NUMEL": 1 << 16, "_COPIED": 1 << 20, "_ROUNDS": 1}.items():
        monkeypatch.setattr(probe, name, value)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["probe", *arguments])


def test_all_rates_are_measured_and_kept(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--size", "1MiB", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert all(value > 0 for value in found["rates"].values())
    assert [drive["path"] for drive in found["drives"]] == [str(tmp_path)]
    assert all(found["drives"][0][name] > 0 for name in ("read", "write", "mixed"))
    kept = probe.kept()
    assert kept is not None and probe.as_json(kept) == found
    assert not list(tmp_path.glob(".offload-probe*")), "its file is gone"


def test_words_say_where_it_is_kept(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--size", "1MiB", "--device", "cpu")
    assert done.exit_code == 0 and str(probe.kept_at().name) in done.stdout and "optimizer" in done.stdout


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
    content = json.loads(probe.kept_at().read_text())
    content["machine"]["processor"] = "another"
    probe.kept_at().write_text(json.dumps(content))
    assert probe.kept() is None
    probe.kept_at().write_text("{")
    assert probe.kept() is None


def test_bad_input(tmp_path: Path) -> None:
    for arguments in (["--size", "many"], ["--device", "tpu"]):
        done = run(str(tmp_path), *arguments)
        assert done.exit_code == 2 and ("error: expected" in done.output or "error: there is no" in done.output)
    done = run(str(tmp_path / "none"))
    assert done.exit_code == 2 and "none" in done.output


def test_what_cannot_be_kept_or_held_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "probe", lambda *_: pytest.fail("it measured"))
    done = run(str(tmp_path), "--size", "900TB")
    assert done.exit_code == 2 and "give a smaller --size" in done.stderr
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = run(str(tmp_path), "--size", "1MiB")
    assert done.exit_code == 2 and "XDG_CACHE_HOME" in done.stderr and "--no-keep" in done.stderr
    done = run(str(tmp_path / "file"))
    assert done.exit_code == 2 and "Not a directory" in done.stderr


def test_a_cache_that_is_no_whole_path_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probe.kept_at().parent == tmp_path / ".cache" / "offload"
