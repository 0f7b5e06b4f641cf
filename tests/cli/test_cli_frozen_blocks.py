"""`offload train --lora … --load-in-4bit` trains adapters over a model whose weights are stored in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines

SMALL = ("--model", "model", "--data", "chats.jsonl", "--seq-len", "64", "--batch-size", "2", "--device", "cpu")
LORA = ("--lora", "r=4,targets=q_proj+down_proj", "--lr", "1e-2")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of one's own with a model and documents."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("model"), MARKING_TEMPLATE)
    chats = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(12)
    ]
    write_lines(Path("chats.jsonl"), chats)


def call(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["train", *SMALL, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


WRONG = {
    "--load-in-4bit": "--load-in-4bit stores frozen weights in fewer bits, and without --lora none is frozen",
    "--load-in-8bit": "--load-in-8bit stores frozen weights",
    "--lora r=2 --load-in-4bit --load-in-8bit": "exclude each other; give one of them",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_that_do_not_fit_each_other_are_refused(options: str) -> None:
    refused = call("--steps", "1", *options.split())
    assert refused.exit_code == 2 and WRONG[options] in refused.output


def test_a_run_is_resumed_in_its_form_alone() -> None:
    assert call(*LORA, "--load-in-4bit", "--steps", "1", "--keep").exit_code == 0
    refused = call(*LORA, "--load-in-8bit", "--steps", "2", "--resume", "must")
    assert refused.exit_code == 2 and '"frozen" was nf4 in the run and "frozen" is int8 here' in refused.output
    done = call(*LORA, "--load-in-4bit", "--steps", "2", "--keep", "--resume", "must")
    assert done.exit_code == 0, done.output


def test_an_option_wins_over_the_config() -> None:
    Path("config.json").write_text(json.dumps({"offload": {"frozen": "int8"}}))
    done = call(*LORA, "--config", "config.json", "--load-in-4bit", "--steps", "1")
    assert done.exit_code == 0 and "--load-in-4bit nf4 overrules offload.frozen int8" in done.output, done.output
    assert "stored in nf4" in done.output
