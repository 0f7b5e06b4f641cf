"""`offload bench adam` reports its measurements and restores settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.bench import adam
from offload.cli.main import app
from offload.hardware.adam_arrays import Arrays
from offload.kernels import _native, thread_count

KEYS = {"name", "numel", "weight_dtype", "grad_dtype", "moment_dtype", "threads", "isa", "ms", "gb_per_s", "of_probe"}


def _json(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["bench", "adam", "--numel", "100k", "--rounds", "1", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_rows_of_every_case() -> None:
    before = thread_count(), torch.get_num_threads()
    answer = _json("--dtype", "bf16", "--dtype", "fp16", "--grad-dtype", "fp32", "--threads", "1", "--isa", "scalar")
    assert answer["machine"]["cores"] >= 1
    for row in answer["rows"]:
        assert set(row) == KEYS and row["ms"] > 0 and row["gb_per_s"] > 0
        assert (row["numel"], row["grad_dtype"], row["threads"], row["isa"]) == (100_000, "fp32", 1, "scalar")
    names = [(row["weight_dtype"], row["name"]) for row in answer["rows"]]
    assert names[:3] == [("bf16", "probe"), ("bf16", "offload"), ("bf16", "torch fused")] and len(names) >= 6
    assert all(row["of_probe"] == 1 for row in answer["rows"] if row["name"] == "probe")
    assert (thread_count(), torch.get_num_threads()) == before


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 26), ("fp32", 28), ("fp16", 28)])
def test_bytes_are_those_of_the_arrays(dtype: str, nbytes: int) -> None:
    arrays = Arrays(1000, adam.DTYPES[dtype], adam.DTYPES[dtype])
    assert arrays.bytes_per_parameter == nbytes
    assert Arrays(1000, adam.DTYPES[dtype], adam.DTYPES[dtype], torch.bfloat16).bytes_per_parameter == nbytes - 8


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--moments", "fp16"], "of moments here: expected fp32, bf16"),
        (["--isa", "sse9"], _native.supported_isas()[0]),
        (["--dtype", "int8"], "bf16, fp32, fp16"),
        (["--threads", "0"], "--threads >= 1"),
        (["--threads", "100000"], "at most 1024"),  # OpenMP ends the process
        (["--rounds", "0"], "error: expected --rounds of at least 1, got 0\n"),
        (["--numel", "many"], "250M, 64Mi"),
        (["--numel", "0"], "250M, 64Mi"),
        (["--plot", "plot.txt"], ".png"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "adam", *arguments])
    assert done.exit_code == 2 and words in done.stderr, done.output


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_table_and_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    arguments = ["bench", "adam", "--numel", "10k", "--rounds", "1", "--threads", "1", "--plot", str(path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "of probe" in done.stdout and path.read_bytes()[:4] == b"\x89PNG"
