"""`offload train` gives the same losses, weights and tokens in either order of micro-batches, and reads less in one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.finetune.options import Options, merge
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines

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


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [("--dtype", "fp32"), ("--dtype", "bf16"), ("--activations", "nvme"), ("--no-chunked-loss",), ("--lora", "r=4")],
    ids=" ".join,
)
def test_both_orders_have_the_same_bits(options: tuple[str, ...], folder: Path) -> None:
    from safetensors.torch import load_file

    data = ("--model", str(folder / "model"), "--data", str(folder / "chats.jsonl"), "--steps", "3")
    results = [
        trained(folder, schedule, *data, *options, "--save", str(folder / f"out-{schedule}"))
        for schedule in (ONE_BY_ONE, LAYERED)
    ]
    assert compared(results[0]) == compared(results[1]) and len(results[0]) == 3
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    saved = [load_file(folder / f"out-{schedule}" / name) for schedule in (ONE_BY_ONE, LAYERED)]
    assert all(value.equal(saved[1][key]) for key, value in saved[0].items()) and saved[0].keys() == saved[1].keys()


def test_the_option_overrules_the_file_with_a_line() -> None:
    file = {"offload": {"schedule": ONE_BY_ONE}}
    content, lines = merge(file, Options(accumulation_schedule=LAYERED))
    assert content["offload"]["schedule"] == LAYERED
    assert "--accumulation-schedule layer_major overrules offload.schedule micro_batch_major" in lines
    assert "schedule" not in merge(None, Options())[0]["offload"]


def test_another_word_is_an_error_that_names_the_three() -> None:
    result = CliRunner().invoke(app, ["train", "--accumulation-schedule", "layers"])
    assert result.exit_code == 2 and re.search("layer.major.*micro.batch.major", result.output)
