"""The command `offload report` writes a page, says what a step is bound by, and replaces no other file."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import BEGIN
from offload.report.phases import ADVICE, verdict
from tests.report.report_log import ABOUT, step, written


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return written(tmp_path / "log.jsonl", step(1, about=ABOUT, seconds=9.0), *(step(n) for n in range(2, 11)))


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_a_page_beside_the_log(log: Path) -> None:
    done = call(log)
    assert done.exit_code == 0 and "10 steps, 1 to 10" in done.stdout
    assert log.with_suffix(".html").read_text().startswith("<!DOCTYPE html>")


def test_the_terminal_says_what_a_step_is_bound_by_and_the_first_change(log: Path) -> None:
    by = verdict(figures(read_log(log)))
    lines = call(log).stdout.splitlines()
    assert lines[1:3] == [f"bound by {by.bound_by}, {by.more}", f"change first: {by.first_change}"]
    assert by.more in log.with_suffix(".html").read_text(), "the same words as on the page"
    assert by.first_change == by.advice.split(";")[0] and by.advice == ADVICE[by.bound_by]


def test_the_terminal_says_how_phases_are_measured(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"step": 1, "seconds": 1.0, "loss": 2.0}) + "\n")
    assert call(log).stdout.splitlines()[1] == 'Phases were not measured: set "wall_clock_breakdown" in the config.'


def test_json_alone_writes_no_page(log: Path, tmp_path: Path) -> None:
    done = call(log, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(json.dumps(figures(read_log(log))))
    assert not log.with_suffix(".html").exists()
    assert call(log, "--json", "-o", tmp_path / "a.html").exit_code == 0 and (tmp_path / "a.html").exists()


def test_exit_codes_are_0_1_and_2(log: Path, tmp_path: Path) -> None:
    before = log.read_text()
    assert call(tmp_path / "none").exit_code == 2
    assert call(log, "--trace", log).exit_code == 2
    assert call(log, "-o", log).exit_code == 2 and log.read_text() == before
    assert call(log, "-o", tmp_path / "no" / "folder.html").exit_code == 1
    assert call().exit_code == 2


def test_a_time_line_of_another_program_is_an_error(tmp_path: Path, log: Path) -> None:
    """torch.profiler's has words for processes and threads."""
    other = tmp_path / "other.json"
    spans = [
        {"ph": "X", "pid": "Spans", "tid": "PyTorch Profiler (0)", "ts": 1.0, "dur": 2.0, "name": "PyTorch Profiler"},
        {"ph": "X", "pid": 7, "tid": 7, "ts": 1.0, "dur": "long", "name": "aten::mm", "cat": "cpu_op"},
        {"ph": "X", "pid": 7, "tid": 7, "ts": 1.0, "dur": 2.0, "name": "aten::mm", "args": 3},
    ]
    other.write_text(json.dumps({"traceEvents": spans}))
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(other)])
    assert done.exit_code == 2 and "contains no span" in done.stderr, done.output
    zipped = tmp_path / "other.json.gz"
    packed = bytearray(gzip.compress(json.dumps(list(range(10000))).encode()))
    packed[40:60] = bytes(20)
    zipped.write_bytes(packed)
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(zipped)])
    assert done.exit_code == 2 and "is not a timeline" in done.stderr, done.output


def test_a_plan_with_numbers_that_are_none_is_an_error(tmp_path: Path, log: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"step": {"seconds": NaN, "tokens": 1, "read_bytes": 1, "written_bytes": 1}}')
    done = CliRunner().invoke(app, ["report", str(log), "--plan", str(plan)])
    assert done.exit_code == 2 and "is not a plan" in done.stderr


def test_a_folder_is_no_log() -> None:
    done = CliRunner().invoke(app, ["report", "."])
    assert done.exit_code == 2 and "cannot read the log" in done.stderr, done.output


def test_a_file_that_cannot_be_read_is_not_replaced(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, opens = tmp_path / "page.html", Path.open
    place.write_text("of somebody else")

    # A mode would not do: root may read every file.
    def refused(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        done = call(log, "-o", place)
    assert done.exit_code == 2 and f"{place} exists and cannot be read: Permission denied; give" in done.stderr
    assert place.read_text() == "of somebody else"


def test_a_page_is_replaced_and_another_file_is_not(log: Path, tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    for _ in range(2):
        assert call(log, "-o", place).exit_code == 0
    place.write_text("<!DOCTYPE html>\n<html>of somebody else")
    done = call(log, "-o", place)
    assert done.exit_code == 2 and "exists and is not a page of offload report; give another" in done.stderr, (
        done.output
    )
    assert "of somebody else" in place.read_text()
    place.rename(log.with_suffix(".html"))
    assert call(log).exit_code == 2 and call(log, "--json").exit_code == 0, "without a page nothing is replaced"
    log.rename(tmp_path / "log.html")
    assert call(tmp_path / "log.html").exit_code == 2 and call(tmp_path / "log.html", "--json").exit_code == 0
    (tmp_path / "log.html").rename(log)
    place.write_text("")
    assert call(log, "-o", place).exit_code == 0


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "page.html"
    place.write_text(BEGIN + "before")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    done = CliRunner().invoke(app, ["report", str(log), "-o", str(place)])
    assert done.exit_code == 1 and "cannot write the page" in done.stderr, done.output
    assert place.read_text() == BEGIN + "before" and len(list(tmp_path.glob(".page*"))) == 0


def test_a_plan_of_the_command_is_shown_beside_what_came(tmp_path: Path, log: Path) -> None:
    plan = {"step": {"seconds": 1.0, "tokens": 100, "read_bytes": 1, "written_bytes": None}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = json.loads(call(log, "--plan", tmp_path / "plan.json", "--json").stdout)["predicted"]
    assert [(each["name"], each["ratio"]) for each in found][:2] == [("seconds", 2.0), ("tokens", 1.0)]
    assert {each["name"] for each in found} == {"seconds", "tokens", "read_bytes"}
    assert call(log, "--plan", log).exit_code == 2 and call(log, "--plan", tmp_path / "none").exit_code == 2


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_page_that_nobody_has_named_leads_to_no_other_file(kind: str, log: Path, tmp_path: Path) -> None:
    """The log may be in a folder of somebody else, who can guess the page's name."""
    target, elsewhere = log.with_suffix(".html"), tmp_path / "elsewhere"
    os.mkfifo(target) if kind == "pipe" else target.symlink_to(elsewhere)
    done = call(log)
    assert done.exit_code == 2 and "log.html exists and is not a page of offload report" in done.stderr
    assert not elsewhere.exists()
    if kind == "link":
        assert call(log, "-o", target).exit_code == 0 and elsewhere.exists() and target.is_symlink()
