"""The log: one JSON object a line, cut to the committed step before a resumed run appends."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.fileio.jsonl import check_log, cut_log, hold_log, json_line


def lines(*steps: int) -> str:
    return "".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in steps)


def test_later_steps_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(lines(1, 2, 3, 4))
    assert cut_log(log, 2) is None
    assert log.read_text() == lines(1, 2)
    assert os.listdir(tmp_path) == ["log"], "the temporary file is left"


def test_a_new_run_moves_the_log_of_an_earlier_one_aside(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for number in (1, 2):
        log.write_text(lines(number, number + 1))
        assert cut_log(log, 0) == tmp_path / f"log.{number}.jsonl"
        assert not log.exists()
    assert [(tmp_path / f"log.{number}.jsonl").read_text() for number in (1, 2)] == [lines(1, 2), lines(2, 3)]
    log.write_text("")
    assert cut_log(log, 0) is None, "an empty log is nothing to keep"


def test_the_log_of_a_run_that_is_under_way_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(lines(1, 2))
    held = hold_log(log)
    assert held is not None
    with pytest.raises(ConfigError, match="a run that is under way; give another file"):
        check_log(log)
    for take in (lambda: cut_log(log, 0), lambda: cut_log(log, 1), lambda: hold_log(log)):
        with pytest.raises(OSError, match="another run writes"):
            take()
    assert log.read_text() == lines(1, 2) and os.listdir(tmp_path) == ["log.jsonl"]
    held.close()
    check_log(log)
    assert hold_log(Path("/dev/null")) is None, "which all runs may share"


def test_a_log_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for log in (tmp_path / "file" / "log.jsonl", tmp_path / "none" / "log.jsonl"):
        with pytest.raises(ConfigError, match="give a file in a folder that exists"):
            check_log(log)


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "", "7", '{"loss": 1}', '{"step": null}', "\xff\x00"])
def test_a_torn_line_is_dropped(torn: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(lines(1, 2).encode() + torn.encode("latin1"))
    cut_log(log, 9)
    assert log.read_text() == lines(1, 2)


def test_a_log_is_cut_line_by_line(tmp_path: Path) -> None:
    """That of a run of weeks has gigabytes, and its process shall not."""
    log, note = tmp_path / "log", "x" * 4000
    written = [f'{{"step": {step}, "note": "{note}"}}\n' for step in range(1, 1001)]
    log.write_text("".join(written))
    tracemalloc.start()
    try:
        cut_log(log, 900)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000 and log.read_text() == "".join(written[:900])


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    cut_log(tmp_path / "log", 3)
    assert os.listdir(tmp_path) == []


def test_a_pipe_or_device_stays_what_it_is(tmp_path: Path) -> None:
    """Cutting replaces the file; replacing /dev/null would be a disaster for root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cut_log(pipe, 0)
    assert pipe.is_fifo()


def test_a_link_keeps_pointing_at_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(lines(1, 2))
    (tmp_path / "link").symlink_to(tmp_path / "log")
    cut_log(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "log").read_text() == lines(1)


def test_numbers_that_are_not_finite_are_null() -> None:
    content = {"loss": float("nan"), "grad_norms": [1.0, float("inf")], "step": 3, "folder": "a"}
    assert json.loads(json_line(content)) == {"loss": None, "grad_norms": [1.0, None], "step": 3, "folder": "a"}


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my precious notes\n")
    with pytest.raises(ConfigError, match="not the log of a run"):
        check_log(tmp_path / "notes.txt")
    for content in ("", "\n", "{", '{"step": ', '{"step": 1, "lo', '{"step": 1, "loss": 2.0}\n'):
        (tmp_path / "log.jsonl").write_text(content)
        check_log(tmp_path / "log.jsonl")


@pytest.mark.parametrize("content", ['{"loss": 1', '{"steps', '{"step": 1, "lo\n', "{\n", '[{"step": 1'])
def test_only_a_line_that_a_kill_cut_off_is_taken_for_one_of_a_log(content: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(content)
    with pytest.raises(ConfigError, match="not the log of a run"):
        check_log(tmp_path / "notes")


def test_a_run_that_was_killed_in_its_first_line_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"step": 1, "lo')
    check_log(log)
    cut_log(log, 0)
    assert log.read_text() == ""
