"""`offload train` from a model folder: its weights and tokenizer, documents, adapters, and the model that is saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from offload import testing
from offload.cli.main import app
from offload.errors import StoreError
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines
from tests.support.oracle import assert_same_tensors

SMALL = ("--model", "model", "--seq-len", "64", "--batch-size", "2", "--device", "cpu")
CHATS = [
    {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"It is {n}, no?"}]}
    for n in range(12)
]
PAIRS = [{"prompt": f"{n} and {n} are", "completion": f" {2 * n}"} for n in range(12)]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of one's own with a model and three kinds of documents."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("model"), MARKING_TEMPLATE)
    for name, lines in (("chats", CHATS), ("pairs", PAIRS), ("texts", [{"text": "to be or not " * 20}] * 3)):
        write_lines(Path(f"{name}.jsonl"), lines)


def call(*arguments: str, data: str = "chats.jsonl") -> Any:
    chosen = () if "--text" in arguments else ("--data", data)
    result = CliRunner().invoke(app, ["train", *SMALL, *chosen, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def facts(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return content


def everything() -> dict[Path, bytes]:
    """All files that are here."""
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def files(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def model_of(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


# -- weights and data ----------------------------------------------------------------------------------


def test_the_weights_are_those_of_the_folder() -> None:
    """With a learning rate of 0 the model is saved as it was."""
    done = call("--steps", "1", "--lr", "0", "--dtype", "fp32", "--save", "out")
    assert done.exit_code == 0 and "weights of model, from 1 safetensors file\n" in done.stdout, done.output
    before, after = (load_file(f"{folder}/model.safetensors") for folder in ("model", "out"))
    assert_same_tensors(before, after)


def test_a_folder_without_weights_is_trained_from_scratch() -> None:
    (Path("model") / "model.safetensors").unlink()
    done = call("--steps", "1")
    assert done.exit_code == 0 and "model contains no weights: its model is trained from scratch" in done.stdout


def test_a_folder_without_a_tokenizer_is_reported() -> None:
    """Of a GPT-2 without its files transformers makes a tokenizer that knows no words."""
    transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained("bare")
    done = call("--model", "bare", "--steps", "1", data="texts.jsonl")
    assert done.exit_code == 2 and "bare contains no tokenizer" in done.stderr, done.output


@pytest.mark.sample(1)
@pytest.mark.parametrize("data", ["chats", "pairs", "texts"])
def test_every_kind_of_document_is_learned(data: str) -> None:
    found = facts(call("--steps", "12", "--lr", "3e-3", "--json", data=f"{data}.jsonl"))
    assert found["losses"][-1] < found["losses"][0] - 0.1


def test_documents_may_come_from_several_places() -> None:
    Path("more").mkdir()
    Path("more/book.txt").write_text("a word " * 50)
    done = call("--steps", "1", "--data", "more", data="pairs.jsonl")
    assert "data: 13 documents in" in done.stdout and "completions are learned" in done.stdout, done.output


def test_tables_are_learned_as_the_same_lines_of_json_are() -> None:
    table = pyarrow.Table.from_pylist(PAIRS)
    pyarrow.parquet.write_table(table, "pairs.parquet")
    pyarrow.csv.write_csv(table, "pairs.csv")
    losses = [
        facts(call("--steps", "3", "--run", kind, "--json", data=f"pairs.{kind}"))["losses"]
        for kind in ("jsonl", "parquet", "csv")
    ]
    assert losses[0] == losses[1] == losses[2]


def test_a_preset_learns_documents_as_bytes() -> None:
    result = CliRunner().invoke(
        app, ["train", "--data", "pairs.jsonl", "--seq-len", "64", "--batch-size", "1", "--steps", "1"]
    )
    assert result.exit_code == 0 and "gpt2-tiny is trained from scratch" in result.stdout, result.output
    assert "[[" in result.stdout and "saved in default-output" in result.stdout, "own data are no demonstration"


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapters", [(), ("--lora", "r=4,dropout=0.1", "--lr", "1e-2")])
def test_activation_checkpointing_changes_no_bit(adapters: tuple[str, ...]) -> None:
    plain, again = (
        facts(call("--steps", "4", "--json", "--no-output", *adapters, *more))["losses"]
        for more in ((), ("--activation-checkpointing",))
    )
    assert plain == again and plain[-1] < plain[0]


# -- saving --------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_trained_model() -> None:
    found = facts(call("--steps", "3", "--lr", "1e-2", "--dtype", "fp32", "--json", "--save", "new/out"))
    assert found["saved"] == str(Path("new/out").absolute())
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files("new/out")
    again = facts(call("--steps", "1", "--lr", "0", "--json", "--dtype", "fp32", "--model", "new/out"))
    assert again["losses"][0] < found["losses"][0] - 0.1
    tokenizer = transformers.AutoTokenizer.from_pretrained("new/out")
    assert tokenizer.chat_template == MARKING_TEMPLATE and model_of("new/out").config.architectures
    assert {path.name for path in Path("swap/default").iterdir()} <= {"finished.json", "lock"}, "the store has gone"


@pytest.mark.parametrize("target", ["model", "file", "file/inside"])
def test_nothing_is_ever_saved_over(target: str) -> None:
    Path("file").write_text("mine")
    before = everything()
    for more in ((), ("--resume", "auto")):
        refused = call("--steps", "1", "--save", target, *more)
        assert refused.exit_code == 2 and f"--output {target}" in refused.stderr, refused.output
        assert everything() == before


def test_a_run_that_goes_on_saves_into_its_own_folder_alone() -> None:
    assert call("--steps", "1", "--keep", "--save", "out").exit_code == 0
    first = Path("out/model.safetensors").read_bytes()
    refused = call("--steps", "2", "--keep", "--resume", "auto", "--save", "model")
    assert refused.exit_code == 2 and "--output" in refused.stderr and "model is not empty" in refused.stderr
    assert call("--steps", "2", "--lr", "0.1", "--keep", "--resume", "must", "--save", "out").exit_code == 0
    assert Path("out/model.safetensors").read_bytes() != first


def test_a_trained_model_is_saved_unless_the_user_wants_none() -> None:
    first = call("--steps", "1").stdout.splitlines()
    assert first[0] == "the trained model will be in ./default-output (--output names another folder)"
    assert first[-1] == "saved in default-output" and "model.safetensors" in files("default-output")
    before = everything()
    again = call("--steps", "2")
    assert again.exit_code == 2 and again.stdout == "" and everything() == before, "nothing is written over"
    assert "--output default-output is not empty" in again.stderr and "or --no-output" in again.stderr
    none = call("--steps", "1", "--no-output", "--run", "none").stdout.splitlines()
    assert none[0] == "the trained model is not saved, as --no-output asks"
    assert none[-1] == "the trained model is not saved; --output FOLDER saves it"
    kept = call("--steps", "1", "--keep", "--run", "kept").stdout.splitlines()
    assert "--keep keeps it in the swap files" in kept[1] and not Path("kept-output").exists()
    assert call("--steps", "1", *LORA, "--run", "adapter").stdout.splitlines()[-1] == "saved in adapter-output"
    assert "adapter_model.safetensors" in files("adapter-output")


def test_a_run_that_goes_on_saves_into_its_default_folder() -> None:
    """What it has saved there between steps is its own."""
    whole = ("--steps", "4", "--save-every", "1", "--resume", "auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.finetune.job.Job.save_model", lambda _: (_ for _ in ()).throw(StoreError("no room")))
        assert call(*whole).exit_code == 1 and files("default-output") >= {"checkpoint-1", "checkpoint-3"}
    assert call(*whole).stdout.splitlines()[-1] == "saved in default-output"
    assert call(*whole, "--run", "unbroken").exit_code == 0
    saved = [Path(f"{run}-output/model.safetensors").read_bytes() for run in ("default", "unbroken")]
    assert saved[0] == saved[1]
    assert "nothing to do" in call(*whole).stdout


def test_a_save_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StoreError("no room")

    with monkeypatch.context() as patch:
        testing.replace(patch, "disk.shortage_of_model", full)
        failed = call("--steps", "2", "--save", "out")
    assert failed.exit_code == 1 and "--resume auto" in failed.stderr and not Path("out").exists(), failed.output
    found = facts(call("--steps", "2", "--save", "out", "--resume", "auto", "--json"))
    assert found["losses"] == [] and "model.safetensors" in files("out")


# -- adapters ------------------------------------------------------------------------------------------

LORA = ("--lora", "r=4,dropout=0.1,targets=q_proj+down_proj", "--lr", "1e-2")


def test_adapters_are_trained_and_saved_alone() -> None:
    frozen = sum(value.nbytes // 2 for value in load_file("model/model.safetensors").values())
    done = call("--steps", "6", *LORA, "--save", "out", "--log", "log")
    assert done.exit_code == 0 and "of them train" in done.stdout, done.output
    steps = [json.loads(line) for line in Path("log").read_text().splitlines() if '"loss"' in line]
    assert steps[-1]["loss"] < steps[0]["loss"]
    adapters = load_file("out/adapter_model.safetensors")
    trained = sum(value.numel() for value in adapters.values())
    assert all(".lora_" in name for name in adapters) and "model.safetensors" not in files("out")
    assert max(step["written_bytes"] for step in steps) < frozen, "what is frozen is not written"
    assert max(step["written_bytes"] for step in steps) < 14 * trained + 16 * 4096 * 4
    model = peft.PeftModel.from_pretrained(model_of("model"), "out")
    ids = transformers.AutoTokenizer.from_pretrained("out")("Count to 3.", return_tensors="pt").input_ids
    assert not torch.equal(model(ids).logits, model_of("model")(ids).logits)


def test_an_export_of_adapters_says_how_to_get_them() -> None:
    """What the notice says is done: the run is resumed at its end, and saves the adapter."""
    chosen = ("--steps", "1", "--keep", *LORA)
    facts(call(*chosen, "--json"))
    exported = CliRunner().invoke(app, ["export", "swap/default", "exported"])
    assert exported.exit_code == 0, exported.output
    assert "would leave the weights random" in exported.output
    assert "with --resume must and --output FOLDER" in exported.output
    facts(call(*chosen, "--json", "--resume", "must", "--output", "out"))
    assert "adapter_model.safetensors" in files("out") and "model.safetensors" not in files("out")
    peft.PeftModel.from_pretrained(model_of("model"), "out")


def test_a_resume_with_other_adapters_is_reported() -> None:
    assert call("--steps", "1", "--keep", "--lora", "r=4").exit_code == 0
    done = call("--steps", "2", "--keep", "--resume", "must", "--lora", "r=4,alpha=2")
    assert "resumed, and --lora was r=4, is r=4,alpha=2" in done.stdout, done.output


# -- bad input -----------------------------------------------------------------------------------------

BAD = {
    "--data missing": "no data at missing",
    "--data bad.jsonl": "bad.jsonl:2 is not JSON",
    "--text bad.jsonl": "--text and --data are two ways to read",
    "--lora r=0": "--lora r must be",
    "--lora r=2,targets=c_attn": "has no c_attn; its linear layers are",
    "--seq-len 4": "the data contain nothing to learn",
    "--seq-len 500": "128 positions",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_touches_nothing(arguments: str) -> None:
    Path("bad.jsonl").write_text('{"text": "right"}\n{"text": ')
    before = everything()
    result = CliRunner().invoke(app, ["train", *SMALL, "--data", "pairs.jsonl", *arguments.split()])
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    assert result.stderr.startswith("error: ") and BAD[arguments] in result.stderr, result.stderr
    assert everything() == before


def test_a_chat_without_a_template() -> None:
    (Path("model") / "chat_template.jinja").unlink()
    result = call()
    assert result.exit_code == 2 and "chats.jsonl:1 is a chat" in result.stderr and not Path("swap").exists()


def test_without_peft_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = call("--lora", "r=4")
    assert result.exit_code == 2 and "pip install 'offload[hf]'" in result.stderr and not Path("swap").exists()


def test_help_has_groups_and_an_example() -> None:
    done = CliRunner().invoke(app, ["train", "--help"]).stdout
    for message in ("Model:\n", "Data:\n", "Placement:\n", "Example: offload train --model", "--lora"):
        assert message in done, message


def test_code_of_a_folder_is_neither_run_nor_asked_about() -> None:
    place = Path("model/config.json")
    content = json.loads(place.read_text()) | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    place.write_text(json.dumps(content))
    Path("model/mine.py").write_text("open('ran', 'w')\n")
    result = call()
    assert result.exit_code == 2 and not Path("ran").exists() and not Path("swap").exists(), result.output
