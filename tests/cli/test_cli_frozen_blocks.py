"""`offload train --lora … --load-in-4bit` trains adapters over a model whose weights are stored in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from offload.cli.main import app
from offload.swapper.store.inspection import look
from tests.support.frozen_blocks import through_blocks
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


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("option", "form"), [("--load-in-4bit", "nf4"), ("--load-in-8bit", "int8")])
def test_adapters_train_over_the_values_of_the_folders_weights(option: str, form: str) -> None:
    done = call(*LORA, option, "--steps", "4", "--dtype", "fp32", "--output", "out", "--keep")
    assert done.exit_code == 0, done.output
    manifest = look(Path("swap/default/rank0")).manifest
    assert manifest is not None and manifest.spec.fingerprint["frozen"] == form
    assert f"frozen matrices are stored in {form}: " in done.output
    # The same job over a folder that contains the values.
    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            parameter.data = through_blocks(parameter, form, torch.float32)
    model.save_pretrained("values")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if Path("model", name).exists():
            Path("values", name).write_bytes(Path("model", name).read_bytes())
    plain = call(*LORA, "--steps", "4", "--dtype", "fp32", "--output", "other", "--run", "b", "--model", "values")
    assert plain.exit_code == 0, plain.output
    ours, theirs = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("out", "other"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    back = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("model"), "out")
    assert back.peft_config


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
