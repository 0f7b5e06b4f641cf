"""`offload info` says what the machine gives, which way is taken and why, and what to do about it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload import info
from offload.aio import BACKENDS
from offload.aio.backend import refusals
from offload.cli import app
from tests.seccomp import refusing


def test_a_report_for_people_and_one_for_programs(tmp_path: Path) -> None:
    plain = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert plain.exit_code == 0, plain.output
    for words in ("I/O backend", "O_DIRECT", "2 MiB pages", "lockable memory", "versions"):
        assert words in plain.stdout, words
    found = json.loads(CliRunner().invoke(app, ["info", "--nvme-path", str(tmp_path), "--json"]).stdout)
    works = [name for name in BACKENDS if refusals()[name] is None]
    assert found["io"]["backend"] == works[0] and set(found["io"]["backends"]) == set(BACKENDS)
    (drive,) = found["drives"]
    assert drive["path"] == str(tmp_path) and drive["free_bytes"] > 0 and drive["file_system"]
    assert not list(tmp_path.iterdir())


def test_why_a_backend_was_not_taken(tmp_path: Path) -> None:
    code = """
import json
from offload.info import facts, lines
found = facts()
print(json.dumps(found))
print(json.dumps(lines(found)))
"""
    found, told = map(json.loads, refusing(tmp_path, {"io_uring_setup": errno.EPERM}, code))
    assert found["io"]["backend"] != "io_uring" and "EPERM" in found["io"]["why"]
    assert "EPERM" in found["io"]["backends"]["io_uring"]
    assert any("io_uring" in words for words in found["advice"])
    assert any(name == "advice" for name, _ in told)


def test_a_folder_that_is_not_there() -> None:
    """The rest is told all the same: it is for a bug report."""
    done = CliRunner().invoke(app, ["info", "/none/such"])
    assert done.exit_code == 2 and "No such file" in " ".join(done.stdout.split()) and "I/O backend" in done.stdout


def test_memory_is_not_a_drive() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    found = info.facts(["/dev/shm"])
    assert found["drives"][0]["file_system"] == "tmpfs"
    assert any("is memory" in words for words in found["advice"])


def test_advice_has_a_line_for_each_thing_that_is_slow() -> None:
    def facts(**io: Any) -> dict[str, Any]:
        usual = {
            "backend": "io_uring",
            "why": "",
            "huge_pages": {"setting": "madvise", "granted": True},
            "registered": {"asked_bytes": 1, "got_bytes": 1},
        }
        return {"io": usual | io, "drives": []}

    assert info.advice(facts()) == []
    (words,) = info.advice(facts(huge_pages={"setting": "never", "granted": False}))
    assert "4 KiB pages" in words and "never" in words
    (words,) = info.advice(facts(registered={"asked_bytes": 2 << 20, "got_bytes": 0}))
    assert "RLIMIT_MEMLOCK" in words
    (words,) = info.advice(facts(backend="threads", why="no io_uring"))
    assert "threads" in words and "no io_uring" in words
