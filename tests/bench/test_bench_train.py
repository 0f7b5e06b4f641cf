"""`offload bench train` trains the same model by each contender, compares them, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench import train_page
from offload.bench import child_process
from offload.bench.measure import DriveSpeeds
from offload.bench.train import loops
from offload.bench.train.figures import LOSS_BOUNDS, as_json, make_rows, remarks
from offload.bench.train.loops import Result, measure
from offload.bench.train.plan import CONTENDERS, TrainPlan, make_plan, reason_to_skip
from offload.cli.main import app
from offload.sizes import MIB
from tests.support.processes import warm_process

RATES = DriveSpeeds(read=1e9, write=1e9, mixed=1e9)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
TINY = ("--model gpt2-tiny --seq-len 16 --rounds 1 --steps 1 --threads 1 --dtype fp32").split()


def _forked(command: list[str], **options: Any) -> SimpleNamespace:
    """Runs a turn's process from one that has imported torch: its memory would not be a new one's."""
    timeout, _ = options.pop("timeout"), options.pop("check")
    return SimpleNamespace(returncode=warm_process.begin(command[1:], **options).wait(timeout))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start quickly, and a small probe of the drive."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(child_process, "subprocess", SimpleNamespace(run=_forked, **names))
    monkeypatch.setattr(loops, "_PROBE_BYTES", MIB)


def plan(folder: Path, *only: str, **options: Any) -> TrainPlan:
    sizes: dict[str, Any] = {"model": "gpt2-tiny", "seq_len": 16, "dtype": "fp32", "threads": 1}
    return make_plan(folder, **{**sizes, "only": only, **options})


def turn(seconds: float, losses: tuple[float, ...] = (5.0, 4.0), **more: Any) -> dict[str, Any]:
    """Figures as a turn's process writes them."""
    figures = {"parameters": 10, "losses": list(losses), "seconds": [seconds], "seconds_to_first_step": 1.0}
    phases = {f"{phase}_seconds": [None] for phase in ("forward", "backward", "update")}
    memory = {"peak_host_bytes": 1 << 20, "peak_device_bytes": None, "read_bytes": 0.0, "written_bytes": 0.0}
    return {**figures, **phases, **memory, **more}


def rows_of(folder: Path, *words: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The JSON of a run, and its rows by name; all of them have trained, with the losses of plain PyTorch."""
    swap = folder / "swap"
    swap.mkdir()
    done = CliRunner().invoke(app, ["bench", "train", str(swap), *TINY, *words, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    rows = {row["name"]: row for row in answer["rows"]}
    for row in rows.values():
        assert row["refused"] is None and row["same_losses"] and len(row["losses"]) == 3, row
        assert row["losses"][0] > row["losses"][-1] and row["peak_host_bytes"] > 0
    assert list(swap.iterdir()) == []
    return answer, rows


@pytest.mark.slow
def test_the_same_training_in_memory_and_from_files(tmp_path: Path, quick: None) -> None:
    chart = tmp_path / "chart.svg"
    answer, rows = rows_of(tmp_path, "--only", "offload nvme/nvme", "--plot", str(chart))
    assert list(rows) == ["plain", "offload nvme/nvme"]
    assert (answer["tokens"], answer["dtype"], answer["parameters"]) == (16, "fp32", 3_487_232)
    assert all(row["forward_seconds"] > 0 for row in rows.values()), "phases are told apart"
    # An update writes weight and moments of each parameter and reads them; the backward reads weights again.
    swapped = rows["offload nvme/nvme"]
    assert swapped["written_bytes"] == pytest.approx(12 * answer["parameters"], rel=0.02)
    assert swapped["read_bytes"] >= swapped["written_bytes"]
    assert rows["plain"]["over_plain"] == rows["plain"]["of_bound"] == 1
    assert "<svg" in chart.read_text()


@pytest.mark.slow
def test_layer_major_has_the_losses_of_plain_pytorch_with_activations_computed_again(
    tmp_path: Path, quick: None
) -> None:
    answer, rows = rows_of(tmp_path, "--only", "offload cpu/cpu layer-major", "--micro-batches", "2", "--recompute")
    assert list(rows) == ["plain", "offload cpu/cpu layer-major"] and answer["recompute"]
    assert rows["offload cpu/cpu layer-major"]["forward_seconds"] is None, "micro-batches take turns"


def test_a_contender_that_fails_is_a_row_with_its_words_and_takes_no_further_turns(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {
        "plain": [{"state": "done", "figures": turn(1.0)}] * 3,
        "offload cpu/cpu": [{"state": "done", "figures": turn(2.0)}, {"state": "stopped", "figures": None}],
        "fsdp2 cpu": [{"state": "failed", "figures": None, "exit_code": -9, "last_lines": ["", "a word"]}],
    }
    taken: list[str] = []

    def end_of(module: str, job: Any, *arguments: Any, **environment: str) -> dict[str, Any]:
        assert environment["OMP_NUM_THREADS"] == environment["OFFLOAD_THREADS"] == "1"
        taken.append(job["contender"])
        return ends[taken[-1]].pop(0)

    monkeypatch.setattr(loops, "run_child", end_of)
    settings = plan(tmp_path, "offload cpu/cpu", "fsdp2", "torchao", rounds=3)
    result = measure(settings)
    assert taken == ["plain", "offload cpu/cpu", "fsdp2 cpu", "plain", "offload cpu/cpu", "plain"]
    said = remarks(make_rows(settings, result), "fp32")
    assert said[0] == "offload cpu/cpu after 1 round: stopped after 15 minutes"
    assert said[1] == "fsdp2 cpu: ended with exit code -9: a word"
    assert said[2].startswith("torchao cpu: skipped: torchao")
    row = make_rows(settings, result)[1]
    assert row.over_plain == 2 and row.turns == 1 and list(tmp_path.iterdir()) == []


def test_a_row_says_where_its_losses_differ_from_plain_pytorch(tmp_path: Path) -> None:
    settings = plan(tmp_path, "offload")
    turns = {
        "plain": [turn(1.0)],
        "offload none/none": [turn(1.0, (5.0, 4.0 * (1 + LOSS_BOUNDS["fp32"] / 2)))],
        "offload cpu/cpu": [turn(1.0, (5.0, 4.0 * (1 + 2 * LOSS_BOUNDS["fp32"])))],
        "offload cpu/nvme": [turn(1.0, (5.0, float("nan")))],
    }
    result = Result(RATES, turns, {})
    rows = make_rows(settings, result)
    assert [row.same_losses for row in rows] == [True, True, False, False]
    assert [line.partition(":")[0] for line in remarks(rows, "fp32")] == ["offload cpu/cpu", "offload cpu/nvme"]
    page = train_page.markdown(settings, RATES, rows)
    assert page.count("DIFFER") == 2 and page.count("equal") == 1 and "roundings of fp32 explain 0.01%" in page
    json.dumps(as_json({}, settings, result))


def test_contenders_are_chosen_by_the_beginnings_of_their_names(tmp_path: Path) -> None:
    assert [each.name for each in plan(tmp_path, "fsdp2").contenders] == ["plain", "fsdp2 cpu"]
    assert len(plan(tmp_path).contenders) == len(CONTENDERS) - 2, "without several micro-batches no layer-major order"
    assert plan(tmp_path, micro_batches=2).contenders == CONTENDERS
    torchao = CONTENDERS[-1]
    assert "torchao" in (reason_to_skip(torchao, "cpu") or "") and reason_to_skip(CONTENDERS[0], "cpu") is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "fp8"), "expected auto, bf16, fp32"),
        (("--rounds", "0"), "expected --rounds of at least 1"),
        (("--threads", "0"), "expected --threads >= 1"),
        pytest.param(("--gpu-memory", "24GiB"), "limits a GPU", marks=WITHOUT_GPU),
        (("--only", "nonsense"), "no contender's name begins with 'nonsense'"),
        (("--model", "nonsense"), "unknown model"),
        (("--seq-len", "4096"), "more than the 1024 positions"),
        (("--plot", "plot.txt"), ".png"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["bench", "train", str(tmp_path), *options])
    assert done.exit_code == 2 and words in done.stderr, done.output
    assert list(tmp_path.iterdir()) == []
