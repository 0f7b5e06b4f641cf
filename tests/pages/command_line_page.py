"""Writes docs/reference/command-line.md, the `--help` of each command: `python -m tests.pages.command_line_page`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from offload.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"

_HEAD = """# Command line

The output of `--help` for each command. `python -m tests.pages.command_line_page` writes
this page, and a test compares the two.

Every command but `run` and `launch` has `--json`: one object on stdout, all else on stderr. A command ends with 0 after
success, with 1 after a failure, with 2 for wrong input, after a signal with 128 and its number.

`offload --install-completion` makes the shell complete commands and options; `--show-completion` prints the script. A
pipe gets no colours, and with `NO_COLOR=1` a terminal gets none either.
"""

_OTHER_NAMES = """## Names of other programs

Options are accepted under the names that Hugging Face's arguments, accelerate, axolotl and LLaMA-Factory have for them,
with underscores or dashes: `--learning_rate 1e-4`. The help does not list these.

| command | option | also |
|---|---|---|
"""


def help_of(*command: str) -> str:
    """Returns the help of a command in 80 columns."""
    result = CliRunner().invoke(app, [*command, "--help"], prog_name="offload", env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def commands(*group: str) -> Iterator[tuple[str, ...]]:
    """Yields each command below a group, those of nested groups included."""
    _, _, listed = help_of(*group).partition("\nCommands:\n")
    for name in re.findall(r"^  ([\w-]+)", listed, re.MULTILINE):
        yield (*group, name)
        yield from commands(*group, name)


def other_names() -> Iterator[str]:
    """Yields a row of the table of aliases for each option that has some."""
    root: Any = get_command(app)
    for command in commands():
        node = root
        for name in command:
            node = node.commands.get(name) if hasattr(node, "commands") else node
        for parameter in node.params:
            aliases = [name for name in parameter.opts[1:] if name.startswith("--")]
            if aliases and parameter.opts[0].startswith("--"):
                listed = ", ".join(f"`{name}`" for name in aliases)
                yield f"| `offload {' '.join(command)}` | `{parameter.opts[0]}` | {listed} |"


def document() -> str:
    sections = [_HEAD, _OTHER_NAMES + "\n".join(other_names()) + "\n"]
    sections += [f"## offload {' '.join(command)}\n\n```\n{help_of(*command)}\n```\n" for command in commands()]
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
