"""`offload train` gives the same losses, weights and tokens in either order of micro-batches, and reads less in one."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.finetune.options import Options, merge
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines
from tests.support.processes.cli_process import begin, finish, losses

SMALL = "train --seq-len 32 --batch-size 1 --device cpu --lr 1e-3 --accumulation 4".split()
LAYERED, ONE_BY_ONE = "layer_major", "micro_batch_major"
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens")


def trained(folder: Path, schedule: str, *options: str) -> list[dict[str, Any]]:
    """Returns the lines of the log, one a step."""
    chosen = ("--accumulation-schedule", schedule, "--run", schedule, "--log", str(folder / f"{schedule}.jsonl"))
    result = CliRunner().invoke(app, [*SMALL, *chosen, "--nvme-path", str(folder / "swap"), *options])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (folder / f"{schedule}.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line and "step" in line and "grad_norm" in line]


def compared(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line[key] for key in COMPARED] for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with dropout, of which the schedule must change no mask."""
    make_folder(tmp_path / "model", MARKING_TEMPLATE, attention_dropout=0.1)
    lines = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"{n}, no?"}]}
        for n in range(20)
    ]
    write_lines(tmp_path / "chats.jsonl", lines)
    return tmp_path


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [("--dtype", "fp32"), ("--dtype", "bf16"), ("--activations", "nvme"), ("--no-chunked-loss",), ("--lora", "r=4")],
    ids=" ".join,
)
def test_both_orders_have_the_same_bits(options: tuple[str, ...], folder: Path) -> None:
    from safetensors.torch import load_file

    data = ("--model", str(folder / "model"), "--data", str(folder / "chats.jsonl"), "--steps", "4")
    results = [
        trained(folder, schedule, *data, *options, "--save", str(folder / f"out-{schedule}"))
        for schedule in (ONE_BY_ONE, LAYERED)
    ]
    assert compared(results[0]) == compared(results[1]) and len(results[0]) == 4
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    saved = [load_file(folder / f"out-{schedule}" / name) for schedule in (ONE_BY_ONE, LAYERED)]
    assert all(value.equal(saved[1][key]) for key, value in saved[0].items()) and saved[0].keys() == saved[1].keys()


@pytest.mark.slow
def test_further_micro_batches_read_no_more_weights(folder: Path, tmp_path: Path) -> None:
    """By the bytes in the log, of budgets without room for a cache."""
    make_folder(tmp_path / "deep", MARKING_TEMPLATE, num_hidden_layers=8, hidden_size=128, intermediate_size=512)
    budgets = {"device_memory": "1B", "host_memory": "1B"}

    def options(count: int) -> tuple[str, ...]:
        blocks = {"zero_optimization": {"sub_group_size": 1e5}, "offload": budgets}
        (tmp_path / "config.json").write_text(json.dumps(blocks))
        config = (
            "--config",
            str(tmp_path / "config.json"),
            "--model",
            str(tmp_path / "deep"),
            "--data",
            str(folder / "chats.jsonl"),
        )
        return ("--accumulation", str(count), "--steps", "5", "--offload-param", "nvme", *config)

    def read(schedule: str, count: int) -> int:
        own = tmp_path / f"{schedule}-{count}"
        own.mkdir()
        lines = trained(own, schedule, *options(count), "--offload-optimizer", "nvme")
        return sum(int(line["read_bytes"]) for line in lines[2:])

    for _ in range(4):  # each budget that is too small is named with the least that works
        result = CliRunner().invoke(app, [*SMALL, "--nvme-path", str(tmp_path / "swap"), *options(2)])
        found = re.search(r'"(\w+)" is .*the least that works is [^(]*\((\d+) bytes\)', result.output)
        if found is not None:
            budgets[found[1]] = f"{found[2]}B"
    assert "1B" not in budgets.values(), budgets
    two, eight = (read(ONE_BY_ONE, count) for count in (2, 8))
    layered = [read(LAYERED, count) for count in (2, 8)]
    assert eight > 1.5 * two
    assert max(layered) <= two and layered[1] - layered[0] < 0.2 * (eight - two)


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_bits(folder: Path) -> None:
    def start(run: str, *options: str) -> Any:
        chosen = ("--model", "model", "--data", "chats.jsonl", "--steps", "40", "--run", run, "--log", f"{run}.jsonl")
        return begin(folder, *SMALL, *chosen, "--accumulation-schedule", LAYERED, *options)

    killed = start("killed")
    while len(losses(folder / "killed.jsonl")) < 5:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.002)
    killed.kill()
    killed.communicate()
    assert len(losses(folder / "killed.jsonl")) < 40
    outputs = [finish(each) for each in (start("killed", "--resume", "must"), start("whole"))]
    assert "resuming after step" in outputs[0]
    assert losses(folder / "killed.jsonl") == losses(folder / "whole.jsonl") and losses(folder / "whole.jsonl")


def test_the_option_overrules_the_file_with_a_line() -> None:
    file = {"offload": {"schedule": ONE_BY_ONE}}
    content, lines = merge(file, Options(accumulation_schedule=LAYERED))
    assert content["offload"]["schedule"] == LAYERED
    assert "--accumulation-schedule layer_major overrules offload.schedule micro_batch_major" in lines
    assert "schedule" not in merge(None, Options())[0]["offload"]


def test_another_word_is_an_error_that_names_the_three() -> None:
    result = CliRunner().invoke(app, ["train", "--accumulation-schedule", "layers"])
    assert result.exit_code == 2 and re.search("layer.major.*micro.batch.major", result.output)
