"""Every benchmark runs and reports its figures; on little data, so that the numbers mean nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import checkpoint, host_time, predict, ranks, score, step
from offload.bench import child_process
from tests.support.oracle import processes


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own, from one that has imported torch: their memory would not be a new one's."""
    context = processes()
    monkeypatch.setattr(child_process, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def _figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["machine"]
    return figures


@pytest.mark.slow
def test_bench_step_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "1", "--steps", "1", "--micro-batches", "2"]
    step.main([str(tmp_path), *sizes, "--schedules", "layer_major,micro_batch_major"])
    figures: dict[str, dict[str, float]] = _figures(capsys)  # type: ignore[assignment]
    layered, one_by_one = (
        figures[f"{name}_major, speculate auto, durability auto"] for name in ("layer", "micro_batch")
    )
    assert 20 < layered["bytes_per_parameter"] < one_by_one["bytes_per_parameter"] < 34


def test_bench_score_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "3", "--micro-batches", "3"]
    score.main([str(tmp_path), *sizes])
    figures = _figures(capsys)
    # The last round may have read ahead for a fourth, and the first have found less of that.
    assert 0 < figures["read_bytes_a_round"] <= 1.1 * figures["file_bytes"] and figures["over_bound"] > 0


def test_bench_host_time_reports_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        host_time.main(["--units", "6", "--rounds", "1"])
    finally:
        torch.set_num_threads(threads)
    assert _figures(capsys)["plain_forward_us"] > 0


@pytest.mark.slow
def test_bench_predict_reports_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "probe", functools.partial(predict.probe, seconds=0.3))
    sizes = ["--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "1", "--steps", "1"]
    orders = ["--accumulation", "2", "--orders", "micro_batch_major layer_major"]
    predict.main([str(tmp_path), *sizes, "--placements", "nvme/nvme", *orders])
    figures: dict[str, Any] = _figures(capsys)
    assert figures["budgets_as_planned"] and figures["by_model_over_measured"] > 0
    assert figures["gain"] > 0 and figures["gain_by_model"] > 0 and figures["accumulation"] == 2
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [], "it cleans up"


def test_bench_checkpoint_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.main([str(tmp_path), "--model", "gpt2-tiny", "--layers", "2", "--rounds", "1"])
    figures: dict[str, dict[str, float]] = _figures(capsys)  # type: ignore[assignment]
    assert all(figures[name]["seconds"] > 0 and figures[name]["kept"] for name in ("save", "load"))
    assert not list(tmp_path.glob("bench-checkpoint-saved")), "it cleans up"


@pytest.mark.slow
def test_bench_ranks_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "1", "--steps", "1", "--micro-batches", "2"]
    ranks.main([str(tmp_path), *sizes, "--only", "stage 1,stage 3,ddp"])
    figures: dict[str, Any] = _figures(capsys)
    assert figures["fastest_other"] == "ddp" and figures["ddp"]["over_fastest_other"] == 1
    first, third = (figures[f"stage {stage}"] for stage in (1, 3))
    assert first["loss"] == pytest.approx(figures["ddp"]["loss"], rel=1e-5)
    reductions, twice = (each["sent_a_step"]["gradients"] for each in (first, third))
    assert {key: 2 * value for key, value in reductions.items()} == twice
