"""`offload train`, called in this process on little text or a little model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.presets import PRESETS

SMALL = ("--batch-size", "2", "--seq-len", "32", "--device", "cpu")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a little text, a default model of 0.2M, and afterwards the library's log level as it was."""
    monkeypatch.chdir(tmp_path)
    tiny = PRESETS["gpt2-tiny"]
    smaller = tiny._replace(settings=tiny.settings | {"n_layer": 2, "n_embd": 64})
    monkeypatch.setitem(PRESETS, "gpt2-tiny", smaller)
    (tmp_path / "text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)
    level = logging.getLogger("offload").level
    yield
    logging.getLogger("offload").setLevel(level)


def call(*arguments: str, text: str = "text.py", **options: Any) -> Any:
    """The result of `offload train` on a little text."""
    result = CliRunner().invoke(app, ["train", "--text", text, *SMALL, *arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def facts(result: Any) -> dict[str, Any]:
    """The JSON object on the only line of stdout."""
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    content: dict[str, Any] = json.loads(line)
    return content


def all_lines(path: str = "log") -> list[dict[str, Any]]:
    """The lines of a log, of steps and of evaluations."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def log(path: str = "log") -> list[dict[str, Any]]:
    """Those of steps."""
    return [line for line in all_lines(path) if "loss" in line]


def swap_files() -> list[Path]:
    """All files of runs."""
    return [path for path in Path("swap").rglob("*") if path.is_file()]
