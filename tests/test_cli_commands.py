"""Every command: help with an example, `--json`, and an exit code of 2 with words for what is not understood."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from offload.cli import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)  # of a group; whose class is another in each version of typer
    if inner is None:
        yield path
        return
    for name, each in inner.items():
        yield from commands(each, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))


def test_there_are_some() -> None:
    assert {("train",), ("plan",), ("rm",), ("bench", "io")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_and_exit_codes(path: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*path, "--help"])
    assert told.exit_code == 0
    assert f"Example: offload {' '.join(path)} " in " ".join(told.output.split()) or "Examples:" in told.output
    assert "--json" in told.output
    wrong = CliRunner().invoke(app, [*path, "--no-such-option"])
    assert wrong.exit_code == 2 and "--no-such-option" in wrong.output and "Traceback" not in wrong.output


def test_a_terminal_without_a_letter_ends_nothing() -> None:
    """A run's summary has µ in it; a locale without UTF-8 shows another mark in its place."""
    code = "import sys; from offload import cli; cli.app = lambda: print('1 \\u00b5s'); cli.main()"
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 ?s\n"), done.stderr


def test_output_that_finds_no_room_is_one_line() -> None:
    command = [
        sys.executable,
        "-m",
        "offload",
        "plan",
        "--parameters",
        "1B",
        "--layers",
        "4",
        "--gpu",
        "24GB",
        "--json",
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr, done.stderr
