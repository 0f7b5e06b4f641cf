"""Every benchmark runs and reports its figures; on little data, so that the numbers mean nothing."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import checkpoint, codes, host_time, measure, nodes, predict, ranks, rounds, score, step
from tests.support.oracle import processes


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own, from one that has imported torch: their memory would not be a new one's."""
    context = processes()
    monkeypatch.setattr(measure, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def _figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["machine"]
    return figures


@pytest.mark.slow
def test_bench_step_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "1", "--steps", "1", "--micro-batches", "2"]
    step.main([str(tmp_path), *sizes, "--schedules", "layer_major,micro_batch_major"])
    figures: dict[str, dict[str, float]] = _figures(capsys)  # type: ignore[assignment]
    layered, one_by_one = (figures[f"{name}_major, speculate auto"] for name in ("layer", "micro_batch"))
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
def test_bench_rounds_reports_its_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context = processes()
    monkeypatch.setattr(rounds, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
    rounds.main(["--ranks", "1,2", "--models", "llama", "--steps", "2", "--rounds", "20"])
    figures: dict[str, Any] = _figures(capsys)
    two = figures["2 ranks"]
    assert two["round_us"] > 0 and figures["1 ranks"]["use_us"] > 0
    assert two["llama"]["series"]["rounds_a_step"] == 3 < two["llama"]["each use"]["rounds_a_step"]


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
    assert figures["left_out"] == [] or figures["order"] == "micro_batch_major", "an engine without the key"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [], "it cleans up"


def test_bench_checkpoint_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.main([str(tmp_path), "--model", "gpt2-tiny", "--layers", "2", "--rounds", "1"])
    figures: dict[str, dict[str, float]] = _figures(capsys)  # type: ignore[assignment]
    assert all(figures[name]["seconds"] > 0 and figures[name]["kept"] for name in ("save", "load"))
    assert not list(tmp_path.glob("bench-checkpoint-saved")), "it cleans up"


def test_bench_codes_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes.main([str(tmp_path), "--numel", "4096", "--rounds", "1", "--steps", "0"])
    figures: dict[str, Any] = _figures(capsys)
    assert all(rate > 0 for rates in figures["rates"].values() for rate in rates.values())


@pytest.mark.slow
def test_bench_codes_reports_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes.main([str(tmp_path), "--numel", "4096", "--rounds", "1", "--steps", "2", "--width", "32"])
    figures: dict[str, Any] = _figures(capsys)
    assert figures["llama"]["exact"]["farthest"] == 0 < figures["llama"]["both"]["farthest"] < 0.05


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


@pytest.mark.slow
def test_bench_nodes_reports_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        nodes.main(["--rate", "1gbit", "--rounds", "1", "--steps", "1"])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root, `ip netns` and `tc`: {error}")
    figures: dict[str, Any] = _figures(capsys)
    without, kept = figures["without"], figures["secondary"]
    assert kept["loss"] == without["loss"]
    assert kept["weights"] < without["weights"] and kept["cable_mb"] < 0.8 * without["cable_mb"]
