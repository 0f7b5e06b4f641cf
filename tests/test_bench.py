"""Every benchmark runs and says what it measured; on little data, so that the numbers mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import step


def _figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["machine"]
    return figures


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step.main([str(tmp_path), "--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "1"])
    assert 20 < _figures(capsys)["bytes_per_parameter"] < 30
