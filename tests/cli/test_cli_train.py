"""`offload train`, called in this process, prints, writes, leaves and returns what its help promises."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from offload.cli.main import app
from offload.swapper.store import run_status
from tests.support.processes.cli_in_process import call, facts, log, run_folder, swap_files

STEP_KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "read_bytes", "written_bytes", "drives", "time"}
LISTS = ("losses", "grad_norms", "step_seconds", "read_bytes", "written_bytes")


__all__ = ["run_folder"]


# -- a run that ends -----------------------------------------------------------------------------------


def test_json_and_log_contain_every_step() -> None:
    found = facts(call("--steps", "3", "--log", "log", "--json"))
    assert all(len(found[key]) == 3 for key in LISTS)
    assert found["parameters"] == 182_016 and found["steps"] == 3 and found["first_step"] == 1
    assert 0 < found["host_budget_bytes"] < found["peak_rss_bytes"] and found["tokens_per_second"] > 0
    lines = log()
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line.keys() >= STEP_KEYS for line in lines)
    assert {(line["tokens"], line["lr"]) for line in lines} == {(64, 3e-4)}
    for key, name in zip(LISTS, ("loss", "grad_norm", "seconds", "read_bytes", "written_bytes"), strict=True):
        assert [line[name] for line in lines] == found[key]
    assert found["losses"][2] < found["losses"][0] and sum(found["written_bytes"][1:]) > 10 * found["parameters"]


def test_the_summary_names_the_bound_of_a_step_and_the_wear_of_drives() -> None:
    found = facts(call("--steps", "3", "--log", "log", "--json"))
    phases = [f"{name}_seconds" for name in ("forward", "backward", "step", "wait_for_reads", "update_kernels")]
    assert all(line.keys() >= {*phases, "uploaded_bytes", "host_peak_bytes"} for line in log())
    assert found["bound_by"] == max(found["step_parts_seconds"], key=found["step_parts_seconds"].get)
    steady = [line["seconds"] for line in log()[1:]]
    assert sum(found["step_parts_seconds"].values()) == pytest.approx(sum(steady) / 2, rel=0.2)
    ((_, drive),) = found["drive_written_bytes"].items()
    assert drive["life"] == drive["run"] > sum(found["written_bytes"])
    assert log()[0]["about"]["steps"] == 3 and "about" not in log()[1]
    output = call("--steps", "2", "--run", "again").stdout
    assert " bound by " in output and " to be faster " in output and " written in all " in output


def test_a_drive_that_the_run_would_wear_is_warned_of_before_it_is_worn() -> None:
    Path("ds.json").write_text(
        json.dumps({"gradient_clipping": 1.0, "offload": {"drive_tbw": 1e-3, "drive_share": 0.02}})
    )
    output = call("--config", "ds.json", "--steps", "20", "--offload-optimizer", "nvme", "--run", "much").stdout
    (warned,) = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert "of its rated 1 GB (drive_tbw)" in warned
    assert "warning" not in call("--config", "ds.json", "--steps", "5", "--run", "little").stdout


def test_a_schedule_of_the_file_ends_with_the_steps() -> None:
    params = {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": "auto"}
    content = {
        "optimizer": {"params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    Path("ds.json").write_text(json.dumps(content))
    facts(call("--config", "ds.json", "--steps", "5", "--log", "log", "--json"))
    assert [line["lr"] for line in log()] == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.02 / 3])


def test_the_store_goes_and_a_note_stays() -> None:
    assert call("--steps", "1").exit_code == 0
    assert [path.name for path in swap_files()] == ["finished.json"]
    again = call("--steps", "1")  # "never" starts a finished run over
    assert again.exit_code == 0


def test_a_seed_decides_the_run() -> None:
    losses = [facts(call("--steps", "2", "--json", "--seed", seed))["losses"] for seed in ("0", "0", "1")]
    assert losses[0] == losses[1] != losses[2]


def test_all_tiers_give_the_same_bits() -> None:
    tiers = [("nvme", "nvme"), ("none", "cpu")]
    losses = [
        facts(call("--steps", "2", "--json", "--offload-param", weights, "--offload-optimizer", states))["losses"]
        for weights, states in tiers
    ]
    assert losses[0] == losses[1]


def test_a_person_reads_plain_lines_where_there_is_no_terminal() -> None:
    result = call("--steps", "2", "--keep")
    assert result.exit_code == 0 and "\x1b" not in result.output and "\r" not in result.output
    for message in ("step 1/2  loss", "tokens/s", "GB/s", "RAM", "peak RAM", "offload rm /", "/swap/default"):
        assert message in result.stdout, message
    assert "Warning" not in result.stderr


def test_batch_and_accumulation_come_from_the_config() -> None:
    Path("ds.json").write_text(
        """{ // a comment, as users write them
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}"""
    )
    arguments = ["train", "--text", "text.py", "--seq-len", "32", "--steps", "1", "--log", "log"]
    result = CliRunner().invoke(app, [*arguments, "--config", "ds.json", "--lr", "5e-4"])
    assert result.exit_code == 0, result.output
    assert "--lr 0.0005 overrules optimizer.params.lr 0.001" in result.stdout
    assert (log()[0]["tokens"], log()[0]["lr"]) == (64, 5e-4)
    assert not Path("swap").exists(), "the config keeps nothing on a drive"


# -- stop and go on ------------------------------------------------------------------------------------


def test_resume_goes_on_bit_for_bit() -> None:
    """With dropout, on the same log: what was logged past the committed step is cut."""
    unbroken = facts(call("--steps", "4", "--json", "--run", "whole"))["losses"]
    assert call("--steps", "2", "--keep", "--log", "log").exit_code == 0
    with Path("log").open("a") as file:
        file.write('{"step": 3, "loss": 0.0}\n{"step": 4, "lo')
    second = facts(call("--steps", "4", "--resume", "must", "--log", "log", "--json"))
    assert (second["first_step"], second["losses"]) == (3, unbroken[2:])
    assert [line["loss"] for line in log()] == unbroken and [line["step"] for line in log()] == [1, 2, 3, 4]


def test_a_run_that_starts_over_starts_its_log_over() -> None:
    for _ in range(2):
        assert call("--steps", "1", "--log", "log").exit_code == 0
    assert [line["step"] for line in log()] == [1]


def test_a_leftover_is_never_overwritten_in_silence() -> None:
    assert call("--steps", "1", "--keep", "--log", "log").exit_code == 0
    before = {path: path.read_bytes() for path in [Path("log"), *swap_files()] if path.name != "lock"}
    refused = call("--steps", "2", "--log", "log")
    assert refused.exit_code == 2
    assert "--resume auto" in refused.stderr and "offload rm ./swap/default" in refused.stderr
    assert {path: path.read_bytes() for path in before} == before


def test_past_the_last_step_nothing_is_done_and_nothing_is_lost() -> None:
    assert call("--steps", "2", "--keep").exit_code == 0
    result = call("--steps", "2", "--resume", "auto", "--json")
    assert facts(result)["losses"] == [] and "already at step 2 of 2" in result.stderr
    assert run_status(["swap"], "default").exists
    assert facts(call("--steps", "3", "--resume", "auto", "--json"))["first_step"] == 3


def test_a_run_in_the_place_of_a_model_is_refused_with_the_command_that_exports_it() -> None:
    assert call("--steps", "1", "--keep").exit_code == 0
    result = CliRunner().invoke(app, ["generate", "swap/default", "--prompt", "a"])
    assert result.exit_code == 2 and "first: offload export swap/default FOLDER\n" in result.stderr, result.output


def test_a_finished_run_is_not_resumed() -> None:
    assert call("--steps", "1").exit_code == 0
    result = call("--steps", "1", "--resume", "auto", "--json")
    assert "ended at step 1" in result.stderr and facts(result)["losses"] == []
    must = call("--resume", "must")
    assert must.exit_code == 2 and "was finished at step 1, so no step is left to resume" in must.stderr
    assert call("--run", "none", "--resume", "must").exit_code == 2
    assert call("--run", "none", "--resume", "auto", "--steps", "1").exit_code == 0


def test_a_gradient_that_is_not_finite_loses_nothing() -> None:
    failed = call("--steps", "9", "--dtype", "fp32", "--lr", "1e30")
    assert failed.exit_code == 1 and "Traceback" not in failed.output
    assert "the step was not applied" in failed.stderr and "--resume auto" in failed.stderr
    assert run_status(["swap"], "default").exists


def test_a_full_drive_under_the_log_ends_no_run() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    failed = call("--steps", "3", "--log", "/dev/full")
    assert failed.exit_code == 0 and failed.stderr.count("warning: cannot write the log /dev/full: No space left") == 1
    assert "step 3/3" in failed.stdout and Path("/dev/full").is_char_device()


# -- bad input -----------------------------------------------------------------------------------------

BAD = {
    "--model gpt2-tny": "did you mean gpt2-tiny",
    "--model folder": "contains no config.json",
    "--text missing": "no text at missing",
    "--text folder": r"no \*\.py, \*\.txt or \*\.md file",
    "--text short": "a sequence needs 32",
    "--text empty": "a sequence needs 32",
    "--seq-len 2048": "1024 positions",
    "--seq-len 99999999999999999999": "--seq-len must be at most 2147483647, got 9+$",
    "--batch-size 99999999999999999999": "--batch-size must be at most 2147483647, got 9+$",
    "--batch-size 2147483647": "--seq-len give each rank token ids of .* [GT]iB a step, and .* are free",
    "--accumulation 2147483647": "token ids of .* [GT]iB a step, and .* are free",
    "--seq-len 1": "--seq-len must be at least 2",
    "--steps 0": "--steps must be at least 1",
    "--batch-size -3": "--batch-size must be at least 1",
    "--lr nan": "--lr must be a number",
    "--seed -1": "seed",
    "--log missing/log": "cannot write the log",
    "--log folder": "cannot write the log",
    "--config missing": "cannot read the config",
    "--config text.py": "is not JSON",
    "--host-memory lots": "should be a size",
    "--host-memory 9KiB": "least that works",
    "--nvme-path text.py/inside": "cannot use .*text.py/inside: Not a directory",
    "--run ../up": "--run should match .* it names a folder",
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_touches_nothing(arguments: str) -> None:
    Path("folder").mkdir()
    Path("short").write_text("abc")
    Path("empty").touch()
    before = sorted(path for path in Path().rglob("*"))
    result = call(*arguments.split(), **({"text": arguments.split()[1]} if arguments.startswith("--text") else {}))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output
    assert re.search(BAD[arguments], result.stderr), result.stderr
    assert [path for path in sorted(Path().rglob("*")) if path.is_file()] == [p for p in before if p.is_file()]


def test_a_sequence_beyond_the_positions_is_refused_before_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading reserves room for rows of that length, and may take minutes."""
    monkeypatch.setattr("offload.finetune.job.read_files", lambda *_: pytest.fail("the data were read"))
    result = call("--seq-len", "100000000")
    assert result.exit_code == 2 and "--seq-len 100000000 is more than the 1024 positions" in result.stderr


def test_a_rank_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "abc")
    result = call()
    assert result.exit_code == 2 and result.stderr.startswith("error: the variable RANK is 'abc', expected a number")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "-1")
    result = call()
    assert result.exit_code == 2 and result.stderr.startswith("error: the variable WORLD_SIZE is '-1', expected")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = call()
    assert result.exit_code == 2 and "pip install 'offload[hf]'" in result.stderr


# -- a model of the user's own -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama with weights and a tokenizer of words."""
    message = ["def", "double", "number", "return", "2", "*", "(", "):", ":", ")", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(message)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    place = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(place)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=16,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


def test_a_folder_with_weights_and_tokenizer(folder: Path) -> None:
    found = facts(call("--model", "model", "--steps", "2", "--json", "--dtype", "fp32"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # Only the words of the tokenizer are learned, from the weights of the file: the first loss is near log 16.
    assert 2.0 < found["losses"][0] < 3.5


def test_a_folder_without_weights_starts_fresh(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert 2.0 < facts(call("--model", "model", "--steps", "1", "--json"))["losses"][0] < 3.5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"\x00" * 40, "is not a complete safetensors file"),
        ("config.json", b"{", "cannot"),
        ("tokenizer.json", b"{", "cannot read a tokenizer in"),
    ],
)
def test_a_folder_that_is_broken(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    result = call("--model", "model")
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not Path("swap").exists()


def test_text_beyond_the_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4}))
    (folder / "model.safetensors").unlink()
    result = call("--model", "model")
    assert result.exit_code == 2 and "vocabulary" in result.stderr


def test_fp16_by_an_option() -> None:
    result = call("--steps", "2", "--dtype", "fp16")
    assert result.exit_code == 0 and "fp16 on cpu" in result.output, result.output
