"""`offload plan` prints where activations are and how long a sequence fits, and names wrong options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planner.test_plan import found, run
from tests.planner.test_plan_activations import COUNT, MACHINE, config, llama


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_report_says_where_inputs_are() -> None:
    report = found(*COUNT, *MACHINE, "--activations", "auto", "--chunked-loss", "--batch-size", "24")
    tiers = report["activation_tiers"]
    assert sum(tiers["inputs"].values()) == 8 and tiers["inputs"]["device"] >= 1
    assert tiers["host"] > 24 * 2 * 2048 * 5120 and tiers["device"] == report["activations"]
    assert report["step"]["recompute"] and report["step"]["chunked_loss"] and report["step"]["tile_tokens"] == 24 * 2048
    assert report["config"]["offload"]["activations"] == "auto"
    ways = {row["activations"]: row for row in report["ways"]}
    assert ways["auto"]["batch"] >= 24 > ways["device"]["batch"] and ways["device"]["seconds"] is None
    done = run(*COUNT, *MACHINE, "--activations", "cpu", "--chunked-loss", "--tile-mlp", "16", "--batch-size", "8")
    for words in ("inputs of 8 blocks: 1 on the device, 7 in host memory", "loss in chunks", "tiles of 1024 tokens"):
        assert words in done.stdout, done.stdout
    assert "longest sequence with 8 in a micro-batch" in done.stdout and "does not fit" in done.stdout


def test_a_config_with_activations_is_planned_and_written(tmp_path: Path) -> None:
    file, target = tmp_path / "config.json", tmp_path / "written.json"
    file.write_text(json.dumps(config("cpu", 4)))
    report = found(*COUNT, *MACHINE, "--config", str(file), "--chunked-loss", "--batch-size", "2")
    assert report["activation_tiers"]["inputs"] == {"device": 1, "host": 7, "disk": 0}
    assert report["step"]["tile_tokens"] == 2 * 2048 // 4
    found(*COUNT, *MACHINE, "--activations", "cpu", "--tile-mlp", "8", "--write", str(target))
    written = json.loads(target.read_text())["offload"]
    assert written["activations"] == "cpu" and written["tile_mlp"] == 8
    done = run(*COUNT, *MACHINE, "--config", str(file), "--activations", "cpu")
    assert done.exit_code == 2 and "cannot be given beside --config" in done.output


def test_the_search_prints_lengths_and_what_to_set(tmp_path: Path) -> None:
    rows = found(*COUNT, *MACHINE, "--longest-sequence")["longest"]
    assert [row["sequence_chunked"] > 0 for row in rows] == [True] * 5
    best = max(rows, key=lambda row: row["sequence_chunked"])
    file = tmp_path / "best.json"
    file.write_text(json.dumps(best["config"]))
    length = str(best["sequence_chunked"])
    report = found(*COUNT[:4], *MACHINE, "--config", str(file), "--chunked-loss", "--seq-len", length)
    assert report["activation_tiers"] == best["activation_tiers"]
    done = run(*COUNT, *MACHINE, "--longest-sequence")
    assert f"for {best['sequence_chunked']:,} tokens set" in done.stdout and "chunk_loss_of" in done.stdout
    with_file = found(*COUNT, *MACHINE, "--longest-sequence", "--config", str(file), "--no-chunked-loss")["longest"]
    assert all(not row["chunked_loss"] for row in with_file)


def test_the_search_names_the_positions_of_a_model(tmp_path: Path) -> None:
    done = run("--model", llama(tmp_path), *MACHINE, "--longest-sequence", "--seq-len", "128")
    assert done.exit_code == 0 and "allows 8,192 positions" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--activations", "ram"), "expected --activations of device, cpu, nvme, auto"),
        (("--tile-mlp", "0"), "expected --tile-mlp of auto, off or a number"),
        (("--activations", "cpu", "--no-gradient-checkpointing"), "leave one of them out"),
        (("--longest-sequence", "--measure"), "writes and measures nothing"),
        (("--batch-size", "4000", "--no-chunked-loss"), "--chunked-loss"),
        (("--activations", "device", "--batch-size", "4000"), "--activations cpu"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*COUNT, *MACHINE, *arguments)
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_micro_batch_that_is_too_large_is_told_with_one_that_fits() -> None:
    done = run(*COUNT, *MACHINE, "--activations", "device", "--batch-size", "400")
    batch = int(done.output.partition("--batch-size ")[2].split()[0])
    assert batch > 8 and run(*COUNT, *MACHINE, "--activations", "device", "--batch-size", str(batch)).exit_code == 0
