"""An engine that has made a step, its checkpoint, and an empty folder to save into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from tests.support import models
from tests.support.oracle import start, train_step

DISK, CPU = ("nvme", "nvme"), ("cpu", "cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    """Yields an engine that has made a step."""
    engine = start(models.GPT2, CPU, tmp_path_factory.mktemp("run"))
    train_step(engine, models.GPT2, 0)
    yield engine
    engine.destroy()


@pytest.fixture(scope="module")
def saved_checkpoint(engine: offload.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a complete checkpoint, for tests to copy."""
    folder = tmp_path_factory.mktemp("saved_checkpoint")
    engine.save_checkpoint(folder, tag="one")
    return folder / "one"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    path.mkdir()
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def inspect(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments)])
