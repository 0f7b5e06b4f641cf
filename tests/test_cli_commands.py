"""Every command: help with an example, `--json`, and an exit code of 2 with words for what is not understood."""

from __future__ import annotations

from collections.abc import Iterator
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
