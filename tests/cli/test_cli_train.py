"""`offload train` prints its steps, its prediction and its log, on one process or several ranks."""

from __future__ import annotations

import errno
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from typer.testing import CliRunner

from offload import testing
from offload.cli.commands.train_run import StepLog
from offload.cli.main import app
from offload.errors import ConfigError
from offload.fileio.jsonl import check_log, cut_log, hold_log
from offload.finetune import model as language_model
from offload.hardware import probe, sustained
from offload.presets import PRESETS
from offload.swapper.store import run_status
from offload.swapper.store.format import read_records
from tests.support.model_folders import write_lines
from tests.support.models import WIDTHS
from tests.support.processes.cli_in_process import all_lines, call, facts, isolated_cache, log, run_folder, swap_files

STEP_KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "read_bytes", "written_bytes", "drives", "time"}
LISTS = ("losses", "grad_norms", "step_seconds", "read_bytes", "written_bytes")


__all__ = ["isolated_cache", "run_folder"]  # fixtures


# -- a run that ends -----------------------------------------------------------------------------------


def test_json_and_log_contain_every_step() -> None:
    report = facts(call("--steps", "3", "--log", "log", "--json"))
    assert all(len(report[key]) == 3 for key in LISTS)
    assert report["parameters"] == 132_032 and report["steps"] == 3 and report["first_step"] == 1
    assert 0 < report["host_budget_bytes"] < report["peak_rss_bytes"] and report["tokens_per_second"] > 0
    lines = log()
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line.keys() >= STEP_KEYS for line in lines)
    assert {(line["tokens"], line["lr"]) for line in lines} == {(64, 3e-4)}
    for key, name in zip(LISTS, ("loss", "grad_norm", "seconds", "read_bytes", "written_bytes"), strict=True):
        assert [line[name] for line in lines] == report[key]
    assert report["losses"][2] < report["losses"][0] and sum(report["written_bytes"][1:]) > 10 * report["parameters"]
    # The bound of a step, and the wear of drives.
    phases = [f"{name}_seconds" for name in ("forward", "backward", "step", "wait_for_reads", "update_kernels")]
    assert all(line.keys() >= {*phases, "uploaded_bytes", "host_peak_bytes"} for line in log())
    assert report["bound_by"] == max(report["step_parts_seconds"], key=report["step_parts_seconds"].get)
    steady = [line["seconds"] for line in log()[1:]]
    assert sum(report["step_parts_seconds"].values()) == pytest.approx(sum(steady) / 2, rel=0.2)
    ((_, drive),) = report["drive_written_bytes"].items()
    assert drive["life"] == drive["run"] > sum(report["written_bytes"])
    assert log()[0]["about"]["steps"] == 3 and "about" not in log()[1]
    tiers = {f"offload_{name}": {"device": "nvme"} for name in ("param", "optimizer")}
    early = {"zero_optimization": {"stage": 3, **tiers}, "offload": {"speculate": True}, "gradient_clipping": 1e-6}
    Path("ds.json").write_text(json.dumps(early))
    done = call("--steps", "3", "--run", "again", "--config", "ds.json", "--json")
    assert facts(done)["early_updates"] == 0 < facts(done)["early_updates_dropped_steps"]
    output = done.stderr
    assert " bound by " in output and " to be faster " in output and " written in all " in output
    assert re.search(r" updates under the backward +0 held, \d+ in \d steps? came to nothing", output), output


def test_a_drive_that_the_run_would_wear_is_warned_of_before_it_is_worn() -> None:
    Path("ds.json").write_text(
        json.dumps({"gradient_clipping": 1.0, "offload": {"drive_tbw": 1e-3, "drive_share": 0.004}})
    )
    output = call("--config", "ds.json", "--steps", "4", "--offload-optimizer", "nvme", "--run", "much").stdout
    (warned,) = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert "of its rated 1 GB (drive_tbw)" in warned
    output = call("--config", "ds.json", "--steps", "1", "--run", "little", "--lr", "0").stdout
    assert "warning" not in output and "a learning rate (--lr) of 0 changes no weight" in output


def test_weights_that_a_cpu_uses_in_host_memory_take_no_device() -> None:
    words = "device 0 B (weights are used in host memory), swap files"
    assert words in call("--steps", "1", "--offload-param", "cpu", "--offload-optimizer", "cpu").stdout
    assert words not in call("--steps", "1", "--offload-param", "nvme", "--offload-optimizer", "cpu").stdout


def test_notices_of_an_engine_that_trains_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    options = ("--steps", "2", "--keep-every", "1", "--run", "kept", "--eval-every", "0")
    assert "is not kept" not in call(*options).output
    call(*options, "--seed", "1", "--keep")
    for step in (1, 2):  # the end of the run makes the last commit
        told = f"offload: step {step} is not kept: .* is a step of another run"
        assert any(re.match(told, line) for line in caplog.messages), step
    assert not any("the run is kept in" in line for line in caplog.messages), "the command has a line of its own"


def test_the_bytes_in_all_have_the_last_commit_and_the_report_has_the_budget() -> None:
    tiers = ("--offload-param", "cpu", "--offload-optimizer", "cpu", "--drive-budget", "1GB/day", "--keep")
    report = facts(call("--steps", "2", *tiers, "--log", "log", "--json"))
    ((_, drive),) = report["drive_written_bytes"].items()
    assert drive["run"] > 12 * report["parameters"] > sum(report["written_bytes"]), "the end commits"
    done = CliRunner().invoke(app, ["report", "log"])
    assert re.search("drive budget 1GB/day: .*% used by the last step", done.stdout), done.output
    assert "drive budget 1GB/day: " in Path("log.html").read_text()


def test_a_schedule_of_the_file_ends_with_the_steps() -> None:
    params = {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": "auto"}
    content = {"optimizer": {"params": {"lr": 0.01}}, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    Path("ds.json").write_text(json.dumps(content))
    facts(call("--config", "ds.json", "--steps", "5", "--log", "log", "--json"))
    assert [line["lr"] for line in log()] == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.02 / 3])


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


def test_gradients_wait_in_16_bits_where_the_order_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order has the same bits. A model that keeps values between two blocks has an order that is not certain."""
    tiny = PRESETS["gpt2-tiny"]
    monkeypatch.setitem(PRESETS, "gpt2-tiny", tiny._replace(settings=tiny.settings | {"n_layer": 2}))

    def trained(schedule: str, run: str) -> tuple[Any, int, bool]:
        words = ("--dtype", "bf16", "--accumulation", "2", "--gradient-checkpointing", "--offload-param", "nvme")
        done = call(*words, "--steps", "1", "--accumulation-schedule", schedule, "--run", run, "--json")
        report = facts(done)
        return (
            (report["losses"], report["grad_norms"]),
            report["host_budget_bytes"],
            "gradients wait in bf16" in done.stderr,
        )

    auto = trained("auto", "auto")
    one_by_one = trained("micro_batch_major", "one-by-one")
    assert auto[0] == one_by_one[0] and auto[2] and not one_by_one[2]
    assert one_by_one[1] - auto[1] == pytest.approx(2 * 182_016, rel=0.1), "two bytes fewer a parameter"
    block: Any = transformers.models.gpt2.modeling_gpt2.GPT2Block
    forward = block.forward

    def keeps(self: Any, hidden: torch.Tensor, *args: Any, **more: Any) -> Any:
        self.last = hidden.shape
        return forward(self, hidden, *args, **more)

    monkeypatch.setattr(block, "forward", keeps)
    assert trained("auto", "keeps") == one_by_one


# -- stop and go on ------------------------------------------------------------------------------------


def test_resume_goes_on_bit_for_bit() -> None:
    """With dropout, on the same log: what was logged past the committed step is cut."""
    often = ("--eval-every", "2")
    unbroken = facts(call("--steps", "4", "--json", "--run", "whole", *often))["losses"]
    assert call("--steps", "2", "--keep", "--log", "log", *often).exit_code == 0
    with Path("log").open("a") as file:
        file.write('{"step": 3, "loss": 0.0}\n{"step": 4, "lo')
    second = facts(call("--steps", "4", "--resume", "must", "--log", "log", "--json", *often))
    assert (second["first_step"], second["losses"]) == (3, unbroken[2:])
    assert [line["loss"] for line in log()] == unbroken and [line["step"] for line in log()] == [1, 2, 3, 4]
    assert [line["step"] for line in all_lines() if "eval_loss" in line] == [2, 4], "what was evaluated is kept"


def test_a_leftover_is_never_overwritten_in_silence() -> None:
    assert call("--steps", "1", "--keep", "--log", "log").exit_code == 0
    before = {path: path.read_bytes() for path in [Path("log"), *swap_files()] if path.name != "lock"}
    refused = call("--steps", "2", "--log", "log")
    assert refused.exit_code == 2
    assert "--resume auto" in refused.stderr and "offload rm ./swap/default" in refused.stderr
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_past_the_last_step_nothing_is_done_and_nothing_is_lost() -> None:
    assert call("--steps", "2", "--keep").exit_code == 0
    result = call("--steps", "2", "--resume", "auto", "--json")
    assert facts(result)["losses"] == [] and "already at step 2 of 2" in result.stderr
    assert run_status(["swap"], "default").exists
    assert facts(call("--steps", "3", "--resume", "auto", "--json"))["first_step"] == 3


def test_a_run_in_the_place_of_a_model_is_its_last_commit(caplog: pytest.LogCaptureFixture) -> None:
    assert call("--steps", "2", "--keep", "--durability", "step").exit_code == 0
    generate = ["generate", "swap/default", "--prompt", "a", "--max-new-tokens", "2"]
    result = CliRunner().invoke(app, generate)
    assert result.exit_code == 0 and "step 2 of " in result.stderr and result.stdout, result.output
    assert "may be lost" not in caplog.text
    with Path("swap/default/rank0/commit").open("r+b") as commit:  # the record of the last one is lost
        commit.seek(read_records(Path(commit.name)).valid[0].blob * 4096)
        commit.write(bytes(4096))
    result = CliRunner().invoke(app, generate)
    assert result.exit_code == 0 and "step 1 of " in result.stderr and "a later one may be lost" in caplog.text
    assert [path.name for path in Path("swap").iterdir()] == ["default"], "the weights beside it are removed"


@pytest.mark.slow
def test_a_finished_run_is_not_resumed() -> None:
    assert call("--steps", "1").exit_code == 0
    assert [path.name for path in swap_files()] == ["finished.json"]
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


def test_damage_of_both_commits_is_a_failure_and_promises_no_resume() -> None:
    assert call("--steps", "2", "--durability", "step", "--keep").exit_code == 0
    states = Path("swap/default/rank0/states")
    states.write_bytes(bytes(byte ^ 1 if at % 4096 == 7 else byte for at, byte in enumerate(states.read_bytes())))
    again = ("--steps", "3", "--durability", "step", "--resume", "auto")
    failed = call(*again)
    assert failed.exit_code == 1 and "the last committed step is kept" not in failed.stderr, failed.output
    assert "offload verify swap/default" in failed.stderr.replace(f"{Path.cwd()}/", ""), failed.stderr
    failed = call(*again)
    assert failed.exit_code == 1 and "no commit is intact" in failed.stderr, failed.output


def test_a_full_drive_under_the_log_ends_no_run() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    failed = call("--steps", "3", "--log", "/dev/full")
    assert failed.exit_code == 0 and failed.stderr.count("warning: cannot write --log /dev/full: No space left") == 1
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
    "--log missing/log": "--log missing/log: there is no folder .*/missing; make it with `mkdir -p",
    "--log folder": "--log folder cannot be written: it is a folder",
    "--log /proc/log": "--log /proc/log cannot be written: ",
    "--trace /proc/trace": "--trace /proc/trace cannot be written: ",
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
    before = files_but_the_cache()
    result = call(*arguments.split(), **({"text": arguments.split()[1]} if arguments.startswith("--text") else {}))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output
    assert re.search(BAD[arguments], result.stderr), result.stderr
    assert files_but_the_cache() == before


def files_but_the_cache() -> list[Path]:
    return sorted(path for path in Path().rglob("*") if path.is_file() and path.parts[0] != "cache")


def test_a_sequence_beyond_the_positions_is_refused_before_the_data_are_read() -> None:
    """Reading reserves room for rows of that length, and may take minutes. It would find the text too short."""
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


# -- a model of the user's own -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama with weights and a tokenizer of words."""
    message = ["def", "double", "number", "return", "2", "*", "(", "):", ":", ")", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(message)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    place = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(place)
    config = transformers.LlamaConfig(**WIDTHS, vocab_size=16, max_position_embeddings=64)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


def test_a_folder_with_weights_and_tokenizer(folder: Path) -> None:
    report = facts(call("--model", "model", "--steps", "2", "--json", "--dtype", "float32"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # Only the words of the tokenizer are learned, from the weights of the file: the first loss is near log 16.
    assert 2.0 < report["losses"][0] < 3.5


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


def test_an_index_without_its_files_is_no_model_from_scratch(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = call("--model", "model")
    assert result.exit_code == 2 and "names model-00001-of-00002.safetensors, which is missing" in result.stderr


def test_show_batch_shows_the_row_that_the_model_would_learn_and_writes_nothing(folder: Path) -> None:
    write_lines(Path("rows.jsonl"), [{"prompt": "def double", "completion": "return 2"}] * 20)
    before = files_but_the_cache()
    # Neither the missing folder of the log nor the output in the way matters.
    command = ["train", "--model", "model", "--data", "rows.jsonl", "--show-batch"]
    result = CliRunner().invoke(app, [*command, "--log", "missing/log", "--output", "model"])
    assert result.exit_code == 0, result.output
    # Without --seq-len a row has the model's 64 positions: 16 documents of 4 words.
    assert "in 2 rows of 64 tokens" in result.stdout
    assert "the first row of step 1 (64 tokens, 32 learned, 0 of padding), its learned tokens between" in result.stdout
    assert result.stdout.count("def double[[return 2]]") == 16
    parts = json.loads(CliRunner().invoke(app, [*command, "--seq-len", "6", "--json"]).stdout)["parts"]
    assert parts == [{"text": "def double", "learned": False}, {"text": "return 2", "learned": True}]
    assert files_but_the_cache() == before


def test_text_beyond_the_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4}))
    (folder / "model.safetensors").unlink()
    result = call("--model", "model")
    assert result.exit_code == 2 and "vocabulary" in result.stderr


SMALL = ("--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--no-output")
_OF = probe.DtypeRates(1e11, 1e10, 1e10, 1e9, 2e9)
RATES = probe.Rates(2e10, 1e10, 5e9, 5e9, 4e9, dict.fromkeys(probe.DTYPES, _OF))


def keep(folder: str = ".") -> None:
    """A probe of this machine, with rates of another."""
    drive = probe.DriveRates(str(Path(folder).resolve()), "/dev/some", 2e9, 1e9, 1.5e9)
    probe.keep(probe.Probed(probe.machine_of(torch.device("cpu")), RATES, (drive,), "2026-01-01", 1.0))


def call_prediction(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["train", *SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return result


def facts_prediction(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(call_prediction(*arguments, "--json").stdout)
    return content


def reported(log: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["report", log, "--json"])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["predicted"]
    return rows


def keep_curve(burst_bytes: int | None, after: float | None) -> None:
    """A curve of the drive of `keep`, whose burst ends after some bytes."""
    where = str(Path(".").resolve())
    sustained.keep(
        sustained.Curve(
            where, "/dev/some", 10**9, 1e9, burst_bytes, after, None, None, None, None, "2026-01-01", ((10**9, 1e9),)
        )
    )


def test_a_prediction_follows_the_curve_of_the_drive() -> None:
    keep()
    run = ("--steps", "5", "--eval-every", "0", "--log", "log", "--log-every", "1")
    said = call_prediction(*run).stdout
    assert "; burst rates, unverified\n" in said and " s, predicted " not in said
    assert "predicted_seconds" not in Path("log").read_text()
    output = CliRunner().invoke(app, ["report", "log", "-o", "page.html"]).stdout
    assert "predicted by burst rates of the drives, unverified" in output
    # The first weights and one step are within the burst, three steps are not.
    written = [json.loads(line)["written_bytes"] for line in Path("log").read_text().splitlines()]
    keep_curve(sum(written[:2]), 1e6)
    Path("log").unlink()
    said = call_prediction(*run).stdout
    assert "a step takes" in said and "in the first minute" in said and "after a day" in said
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    curve = lines[0]["about"]["predicted"]["sustained"]
    (none, burst), (_, fallen) = curve["by_written"]
    assert none == 0 and burst == lines[0]["about"]["predicted"]["seconds"] < fallen and curve["measured"]
    foreseen = [line["predicted_seconds"] for line in lines]
    assert foreseen[0] == burst and foreseen[-1] == fallen and sorted(foreseen) == foreseen
    assert f" s, predicted {fallen:.3g}" in said
    rows = {row["what"]: row for row in reported("log")}
    assert rows["seconds a step before the drives' rate fell"]["predicted"] == burst
    assert rows["seconds a step after the drives' rate fell"]["predicted"] == fallen
    output = CliRunner().invoke(app, ["report", "log", "-o", "page.html"]).stdout
    assert "by the curves of its drives a step takes" in output
    assert "by the curves of its drives a step takes" in Path("page.html").read_text()


def test_without_a_probe_one_line_names_the_command() -> None:
    output = call_prediction("--steps", "2", "--log", "log").stdout
    assert [line for line in output.splitlines() if "offload probe" in line or "predict" in line] == [
        "no prediction: `offload probe` was not run on this machine; it takes a minute, once"
    ]
    assert "predicted" not in json.loads(Path("log").read_text().splitlines()[0])["about"]
    assert reported("log") == [] and not probe.cache_path().exists(), "a run never probes by itself"


def test_the_report_shows_what_was_foreseen_beside_what_came() -> None:
    keep()
    prediction = facts_prediction("--steps", "4", "--eval-every", "0", "--log", "log")["predicted"]
    assert reported("log") == prediction
    by_name = {row["name"]: row for row in prediction}
    assert by_name.keys() >= {"seconds", "tokens", "read_bytes", "written_bytes", "host_peak_bytes", "compute"}
    assert by_name["tokens"]["ratio"] == 1.0
    assert by_name["written_bytes"]["ratio"] == pytest.approx(1.0, abs=0.5)  # a late write is of the step after
    (predicted,) = (json.loads(line)["about"]["predicted"] for line in Path("log").read_text().splitlines()[:1])
    assert sum(predicted["parts_seconds"].values()) == pytest.approx(predicted["seconds"])
    call_report = CliRunner().invoke(app, ["report", "log", "-o", "page.html"])
    assert call_report.exit_code == 0 and "Predicted and measured" in Path("page.html").read_text()


def test_a_probe_that_was_disturbed_is_named_beside_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    rates = probe.kept()
    assert rates is not None
    doubt = (
        "other processes took 60% of the cores during the probe; run `offload probe` again while the machine is idle"
    )
    probe.keep(rates._replace(doubts=(doubt,)))
    testing.replace(monkeypatch, "machine.others_share", lambda _: 0.4)
    done = call_prediction("--steps", "2", "--json")
    told = json.loads(done.stdout)
    assert told["doubts"] == [doubt] and told["others_share"] == pytest.approx(0.4)
    text = " ".join(done.stderr.split())
    assert text.count(doubt) == 2, "with the prediction at the start, and beside what came"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            {"gpu": "H200", "gpu_memory_bytes": 1 << 37},
            "the probe measured another device: run `offload probe --device",
        ),
        ({}, "the drive of ./swap was not measured: run `offload probe ./swap`"),
    ],
)
def test_a_probe_of_another_machine_is_reported(
    machine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("/proc")
    rates = probe.kept()
    assert rates is not None
    testing.replace(monkeypatch, "probe.stored", lambda: rates._replace(machine=rates.machine | machine))
    output = call_prediction("--steps", "1", "--log", "log").stdout
    assert "no prediction: " in output and message in output and reported("log") == []


def test_a_model_whose_code_needs_values_is_trained_without(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()

    class Choosy(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * 2 if values.sum().item() > 1e9 else values

    real = language_model.build

    def built(name: str) -> nn.Module:
        model: Any = real(name)
        model.transformer.drop = Choosy()
        return model

    monkeypatch.setattr(language_model, "build", built)
    assert "no prediction: cannot run GPT2LMHeadModel without its weights" in call_prediction("--steps", "1").stdout


def lines(*steps: int) -> str:
    return "".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in steps)


def test_a_new_run_moves_the_log_of_an_earlier_one_aside(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for number in (1, 2):
        log.write_text(lines(number, number + 1))
        assert cut_log(log, 0) == tmp_path / f"log.{number}.jsonl"
        assert not log.exists()
    assert [(tmp_path / f"log.{number}.jsonl").read_text() for number in (1, 2)] == [lines(1, 2), lines(2, 3)]
    log.write_text("")
    assert cut_log(log, 0) is None, "an empty log is nothing to keep"


def test_the_log_of_a_run_that_is_under_way_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log.jsonl"
    log.parent.mkdir()
    log.write_text(lines(1, 2))
    held = hold_log(log)
    assert held is not None
    with pytest.raises(ConfigError, match=rf"a run that is under way \(process {os.getpid()}\); give another file"):
        check_log(log)
    for take in (lambda: cut_log(log, 0), lambda: cut_log(log, 1), lambda: hold_log(log)):
        with pytest.raises(OSError, match=r"another run \(process .*\) writes"):
            take()
    assert log.read_text() == lines(1, 2) and os.listdir(log.parent) == ["log.jsonl"]
    held.close()
    check_log(log)
    with StepLog(log, print), pytest.raises(ConfigError, match="under way"):
        check_log(log)
    assert hold_log(Path("/dev/null")) is None, "which all runs may share"


def test_lines_of_a_log_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full drive takes no step from the log if there is room again before the end; a warning tells of both."""
    path, said, write, room = tmp_path / "log.jsonl", list[str](), os.write, 30

    def short(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(descriptor, data[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", short)
    with StepLog(path, said.append) as log:
        for step in range(1, 4):
            log.write({"step": step, "loss": 0.5})
        assert len(path.read_bytes()) == 30 and len(said) == 1 and "its lines wait for room" in said[0]
        room = 1000
        log.write({"step": 4, "loss": 0.5})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
        room = 0
        log.write({"step": 5, "loss": 0.5})
    assert len(said) == 3 and "its last lines are missing" in said[2]


def test_a_log_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for log_here in (tmp_path / "file" / "log.jsonl", tmp_path / "none" / "log.jsonl"):
        with pytest.raises(ConfigError, match="no folder"):
            check_log(log_here)


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for torn in ('{"step": 3, "lo', "", "7", '{"loss": 1}', '{"step": null}', "\xff\x00"):
        log.write_bytes(lines(1, 2).encode() + torn.encode("latin1"))
        cut_log(log, 9)
        assert log.read_text() == lines(1, 2), torn


def test_a_log_is_cut_line_by_line(tmp_path: Path) -> None:
    """That of a run of weeks has gigabytes, and its process shall not."""
    log, note = tmp_path / "log", "x" * 4000
    written = [f'{{"step": {step}, "note": "{note}"}}\n' for step in range(1, 1001)]
    log.write_text("".join(written))
    tracemalloc.start()
    try:
        cut_log(log, 900)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000 and log.read_text() == "".join(written[:900])


def test_a_pipe_or_device_stays_what_it_is(tmp_path: Path) -> None:
    """Cutting replaces the file; replacing /dev/null would be a disaster for root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cut_log(pipe, 0)
    assert pipe.is_fifo()


def test_a_link_keeps_pointing_at_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(lines(1, 2))
    (tmp_path / "link").symlink_to(tmp_path / "log")
    cut_log(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "log").read_text() == lines(1)


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my precious notes\n")
    with pytest.raises(ConfigError, match="not the log of a run"):
        check_log(tmp_path / "notes.txt")
    for content in ("", "\n", "{", '{"step": ', '{"step": 1, "lo', '{"step": 1, "loss": 2.0}\n'):
        (tmp_path / "log.jsonl").write_text(content)
        check_log(tmp_path / "log.jsonl")
    for content in ('{"loss": 1', '{"steps', '{"step": 1, "lo\n', "{\n", '[{"step": 1'):
        (tmp_path / "notes").write_text(content)
        with pytest.raises(ConfigError, match="not the log of a run"):  # no line that a kill has cut off
            check_log(tmp_path / "notes")
