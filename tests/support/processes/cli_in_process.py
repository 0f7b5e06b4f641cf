"""`offload train`, called in this process on little text or a little model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.presets import PRESETS

SMALL = ("--batch-size", "2", "--seq-len", "32", "--device", "cpu")


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a folder with a short text and a default model of one block."""
    monkeypatch.chdir(tmp_path)
    tiny = PRESETS["gpt2-tiny"]
    smaller = tiny._replace(settings=tiny.settings | {"n_layer": 1, "n_embd": 64})
    monkeypatch.setitem(PRESETS, "gpt2-tiny", smaller)
    (tmp_path / "text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a cache without a probe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def call(*arguments: str, text: str = "text.py", **options: Any) -> Any:
    """Returns the result of `offload train` on a short text. No model is saved if no argument names its folder."""
    named = any(argument.startswith(("--output", "--save", "--no-output")) for argument in arguments)
    nowhere = () if named else ("--no-output",)
    result = CliRunner().invoke(app, ["train", "--text", text, *SMALL, *nowhere, *arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def facts(result: Any) -> dict[str, Any]:
    """Returns the JSON object on the only line of stdout."""
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    content: dict[str, Any] = json.loads(line)
    return content


def all_lines(path: str = "log") -> list[dict[str, Any]]:
    """Returns all lines of a log, those of steps and those of evaluations."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def log(path: str = "log") -> list[dict[str, Any]]:
    """Returns the lines of a log that describe steps."""
    return [line for line in all_lines(path) if "loss" in line]


def swap_files() -> list[Path]:
    """Returns all files of runs."""
    return [path for path in Path("swap").rglob("*") if path.is_file()]
