"""`offload plan` within the process of a test."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from offload.cli.main import app


def run(*arguments: str) -> Any:
    """Returns what `offload plan` did with these arguments."""
    return CliRunner().invoke(app, ["plan", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    """Returns the object that `offload plan --json` prints for these arguments."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result
