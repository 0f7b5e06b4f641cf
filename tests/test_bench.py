"""Every benchmark runs and says what it measured; on little data, so that the numbers mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import adam, io, step


def _figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["machine"]
    return figures


def test_adam(capsys: pytest.CaptureFixture[str]) -> None:
    adam.main(["--numel", "8192", "--rounds", "1"])
    assert _figures(capsys)["fraction_of_probe"] > 0


def test_io(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    io.main([str(tmp_path), "--nbytes", "1MiB", "--request", "64KiB", "--rounds", "1"])
    figures = _figures(capsys)
    assert figures["nbytes"] == 1 << 20 and figures["read_fraction_of_plain"] > 0
    assert not list(tmp_path.iterdir())


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step.main([str(tmp_path), "--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "1"])
    assert 20 < _figures(capsys)["bytes_per_parameter"] < 30
