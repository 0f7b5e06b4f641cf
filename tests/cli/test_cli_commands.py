"""Every command has help with an example, `--json`, and an exit code of 2 with a message for wrong usage."""

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

from offload.cli.main import app
from tests.support.processes import warm_process


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)  # of a group; whose class is another in each version of typer
    if inner is None:
        yield path
        return
    for name, each in inner.items():
        yield from commands(each, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))
WITHOUT_JSON = [("run",), ("launch",)]
"""Commands whose output is that of a script."""


def test_commands_are_found() -> None:
    assert {("train",), ("plan",), ("rm",), ("bench", "io")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_and_exit_codes(path: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*path, "--help"])
    assert told.exit_code == 0
    assert f"Example: offload {' '.join(path)} " in " ".join(told.output.split()) or "Examples:" in told.output
    assert ("--json" in told.output) is (path not in WITHOUT_JSON)


def refused(*arguments: str) -> str:
    """The one line on stderr of a command that was typed wrong, without what all have."""
    result = CliRunner().invoke(app, arguments, prog_name="offload")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").strip()


@pytest.mark.sample(9)
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_usage_error_is_one_line_that_points_to_help(path: tuple[str, ...]) -> None:
    help = f"see `offload {' '.join(path)} --help`"
    unknown = refused(*path, "--no-such-option")
    assert unknown.startswith("no such option: --no-such-option") and unknown.endswith(help)
    if path not in WITHOUT_JSON:
        assert "(Possible options: --json" in refused(*path, "--jsno")
        assert refused(*path, "--json=yes").startswith("option '--json' does not take a value; see `offload ")
    if any(parameter.required for parameter in inner_command(path).params):
        assert refused(*path).startswith("missing argument ") and refused(*path).endswith(help)


def inner_command(path: tuple[str, ...]) -> Any:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command


def test_a_value_that_is_none_of_its_choices_and_a_command_that_is_none() -> None:
    choices = "'never', 'auto', 'must', 'restart'; see `offload train --help`"
    assert refused("train", "--resume", "no") == f"invalid value for '--resume': 'no' is not one of {choices}"
    assert refused("train", "--steps", "x").startswith("invalid value for '--steps' / '--max-steps': ")
    assert refused("trian") == "no such command 'trian'. Did you mean 'train'? see `offload --help`"
    assert refused("bench", "oi").endswith("see `offload bench --help`")
    assert refused("train", "more").startswith("got unexpected extra argument")


@pytest.mark.parametrize(
    ("arguments", "of"),
    [
        (("train", "--data", ""), ", that of --data"),
        (("train", "--data="), ", that of --data"),
        (("train", "--model", "", "--steps", "1"), ", that of --model"),
        (("inspect", ""), ""),
        (("verify", "--json", "."), None),
        (("rm", "", "--yes"), ""),
        (("bench", "io", ""), ""),
        (("score", "", "--data", "x"), ""),
    ],
)
def test_an_empty_path_is_not_the_working_folder(
    arguments: tuple[str, ...], of: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"an argument is empty{of}: give a value, or leave it out; see `offload --help`"
    assert (refused(*arguments) == message) is (of is not None)


def test_a_group_without_a_command_prints_its_help() -> None:
    for path in ((), ("bench",)):
        result = CliRunner().invoke(app, path, prog_name="offload")
        assert result.exit_code == 2 and result.output.startswith("Usage: offload "), result.output


def test_a_terminal_without_a_letter_ends_nothing() -> None:
    """A run's summary has µ in it; a locale without UTF-8 shows another mark in its place."""
    code = "import sys; from offload.cli import main as cli; cli.app = lambda: print('1 \\u00b5s'); cli.main()"
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 ?s\n"), done.stderr


def test_output_that_finds_no_room_is_one_line() -> None:
    command = "-m offload plan --parameters 1B --layers 4 --gpu 24GB --json".split()
    with Path("/dev/full").open("w") as full:
        process = warm_process.begin(command, stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate(240)
    assert process.returncode == 1 and errors is not None, errors
    assert "No space left" in errors and "Traceback" not in errors, errors
