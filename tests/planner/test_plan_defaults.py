"""`offload plan` without options means what `offload train` does, and the machine that a hobbyist describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers

from offload.cli.commands import plan as command
from offload.finetune.model import allows_chunks
from offload.planner.gpus import GPUS, find_gpu
from offload.planner.hardware import described, parse_memory
from offload.sizes import GIB
from tests.planner.test_plan import found, run
from tests.support import models

MACHINE = ("--gpu", "12GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
TINY = ("--model", "gpt2-tiny", "--seq-len", "128")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder(path: Path, kind: str) -> str:
    """A folder with the config of a small model."""
    settings = {**models.WIDTHS, "vocab_size": 261, "max_position_embeddings": 128}
    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(path)
    return str(path)


# -- the loss -----------------------------------------------------------------------------------------


def test_the_loss_is_computed_in_chunks_where_the_model_allows_it_as_in_train(tmp_path: Path) -> None:
    assert found(*TINY, *MACHINE)["step"]["chunked_loss"]
    assert not found(*TINY, *MACHINE, "--no-chunked-loss")["step"]["chunked_loss"]
    assert found("--parameters", "1B", "--layers", "4", *MACHINE)["step"]["chunked_loss"]
    capped = folder(tmp_path / "capped", "Gemma2")
    assert not allows_chunks(capped) and allows_chunks(folder(tmp_path / "plain", "Llama"))
    assert not found("--model", capped, "--seq-len", "32", *MACHINE)["step"]["chunked_loss"]


def test_the_heading_says_how_the_loss_is_computed() -> None:
    assert ", loss in chunks" in run(*TINY, *MACHINE).stdout
    assert ", all logits in memory" in run(*TINY, *MACHINE, "--no-chunked-loss").stdout


def test_chunks_that_the_model_does_not_allow_are_an_error(tmp_path: Path) -> None:
    done = run("--model", folder(tmp_path / "capped", "Gemma2"), "--seq-len", "32", *MACHINE, "--chunked-loss")
    assert done.exit_code == 2 and "cannot be computed in chunks" in done.stderr


# -- while it computes --------------------------------------------------------------------------------


def test_a_terminal_is_told_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def recorded(console: Any) -> Iterator[Any]:
        assert console.stderr, "stdout has the plan alone"
        yield shown.append

    monkeypatch.setattr(command, "status_line", recorded)
    assert run(*TINY, *MACHINE).exit_code == 0
    expected = ["loading", "reading", "counting", "trying", "searching", "trying"]
    assert [words.split()[0] for words in shown] == expected


# -- the machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "name"),
    [("8GB", "RTX 4060"), ("10GB", "RTX 3080"), ("12 GB", "RTX 3060"), ("16GB", "RTX 4060 Ti 16GB")],
)
def test_a_size_below_24_gb_is_the_slowest_card_that_is_sold_with_it(size: str, name: str) -> None:
    gpu, like = find_gpu(size)
    assert like == f"the GPU is as fast as a {name}"
    (card,) = [each for each in GPUS if each.name == name]
    assert (gpu.memory, gpu.flops, gpu.matmul) == (card.memory, card.flops, card.matmul)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4060", "RTX 4060"),
        ("4060 Ti", "RTX 4060 Ti 16GB"),
        ("4070", "RTX 4070"),
        ("4070 super", "RTX 4070 SUPER"),
        ("4070 ti", "RTX 4070 Ti"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("4080 super", "RTX 4080 SUPER"),
        ("5070 ti", "RTX 5070 Ti"),
        ("5060ti", "RTX 5060 Ti 16GB"),
        ("T4", "T4"),
        ("a100", "A100 80GB"),
    ],
)
def test_a_part_of_a_name_is_the_card_that_users_mean(text: str, name: str) -> None:
    assert find_gpu(text)[0].name == name


def test_a_card_without_units_for_bf16_is_planned_in_fp32_as_train_would() -> None:
    count = ("--parameters", "1B", "--layers", "4", "--gpu", "T4")
    plain, half = found(*count), found(*count, "--dtype", "fp16")
    assert not {"bf16", "fp16"} & plain["config"].keys()
    assert any("--dtype fp16 is faster there" in each for each in plain["machine"]["assumed"])
    assert not any("--dtype fp16" in each for each in half["machine"]["assumed"])
    assert half["step"]["compute_seconds"] < plain["step"]["compute_seconds"]
    rates = {dtype: described("T4", dtype=dtype).matmul for dtype in ("fp32", "bf16", "fp16")}
    assert rates["bf16"] < rates["fp32"] < rates["fp16"]


def test_ram_is_as_large_as_it_is_sold() -> None:
    assert parse_memory("64GB") == parse_memory("64GiB") == parse_memory("64 gb") == parse_memory("64G") == 64 * GIB
    assert found(*TINY, *MACHINE)["machine"]["ram"] == int(0.9 * 64 * GIB)


# -- how long -----------------------------------------------------------------------------------------


def test_steps_are_told_as_a_time() -> None:
    report = found(*TINY, *MACHINE, "--steps", "500")
    assert report["run_seconds"] == pytest.approx(500 * report["step"]["seconds"], rel=0.001)
    assert "64k tokens take" in (text := run(*TINY, *MACHINE, "--steps", "500").stdout) and ", 500 steps" in text


def test_steps_and_tokens_are_one_question() -> None:
    done = run(*TINY, *MACHINE, "--steps", "500", "--tokens", "1M")
    assert done.exit_code == 2 and "--tokens and --steps both say how long" in done.stderr
    assert run(*TINY, *MACHINE, "--steps", "0").exit_code == 2


# -- adapters -----------------------------------------------------------------------------------------


def test_what_a_run_saves_of_adapters_is_their_bytes_alone() -> None:
    pytest.importorskip("peft")
    whole, adapters = found(*TINY, *MACHINE), found(*TINY, *MACHINE, "--lora", "r=4")
    assert whole["export"] == 2 * whole["model"]["parameters"]
    trained = adapters["model"]["parameters"] - whole["model"]["parameters"]
    assert 0 < adapters["export"] == 2 * trained < whole["export"] / 10
    assert adapters["least_host_memory"] <= adapters["host_memory"]
    assert "; the saved adapters take" in run(*TINY, *MACHINE, "--lora", "r=4").stdout
