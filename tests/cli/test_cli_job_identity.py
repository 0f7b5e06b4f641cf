"""A run of `offload train` keeps its job: another job never passes for it. Every line of `--json` has all fields."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from offload import testing
from offload.cli.main import app
from offload.errors import StoreError
from offload.finetune.output import weights_of
from tests.support.model_folders import make_folder
from tests.support.processes.cli_in_process import call, facts, log, run_folder, swap_files

__all__ = ["run_folder"]


DONE = ("--steps", "1", "--resume", "auto")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--output", "b"), "--output was None, is "),
        (("--text", "other.py"), "the data differ (tokens was "),
        (("--seq-len", "16"), "the data differ (seq-len was 32, is 16"),
        (("--model", "llama"), "--model was gpt2-tiny, is "),
        (("--steps", "2"), "the steps were 1, are 2"),
        (("--lr", "0.1"), "--lr was 0.0003, is 0.1"),
        (("--dtype", "fp32"), "bf16.enabled was auto, is False"),
        (("--seed", "7"), "--seed was 0, is 7"),
        (("--schedule", "constant"), 'the schedule was {"type": "WarmupCosineLR", '),
        (("--accumulation", "3"), "--accumulation was None, is 3"),
    ],
)
def test_another_job_is_no_job_that_is_done(more: tuple[str, str], message: str) -> None:
    make_folder(Path("llama"))
    Path("other.py").write_text("def half(number):\n    return number // 2\n\n" * 50)
    assert call(*DONE).exit_code == 0
    refused = call(*DONE, *more)
    assert refused.exit_code == 2 and "ended at step 1" in refused.stderr and message in refused.stderr, refused.stderr
    assert "another --run, or --resume restart" in refused.stderr and not Path("b").exists()
    assert call(*DONE, *more, "--resume", "restart").exit_code == 0


def test_a_finished_job_is_reported_with_every_field() -> None:
    first = facts(call(*DONE, "--output", "a", "--json"))
    again = call(*DONE, "--output", "a", "--json")
    assert "ended at step 1" in again.stderr and "nothing to do" in again.stderr
    assert facts(again).keys() == first.keys()
    assert facts(again)["losses"] == [] and facts(again)["saved"] == first["saved"]
    assert (facts(again)["steps"], facts(again)["total_steps"]) == (1, 1)
    for path in Path("a").iterdir():
        path.unlink()
    gone = call(*DONE, "--output", "a")
    assert gone.exit_code == 2 and "does not exist any more; --resume restart trains it again" in gone.stderr
    assert call(*DONE, "--output", "a", "--resume", "restart").exit_code == 0


def test_fewer_steps_than_a_run_has_made_and_a_note_without_a_schedule() -> None:
    """The schedule follows from the number of steps; notes of earlier versions have none."""
    assert call("--steps", "2", "--resume", "auto").exit_code == 0
    shorter = call(*DONE, "--json")
    assert "ended at step 2" in shorter.stderr and (facts(shorter)["steps"], facts(shorter)["total_steps"]) == (2, 1)
    note = Path("swap/default/finished.json")
    content = json.loads(note.read_text())
    del content["job"]["schedule"]
    note.write_text(json.dumps(content))
    assert "nothing to do" in call("--steps", "2", "--resume", "auto", "--schedule", "constant").stdout


def test_a_garbage_note_costs_no_run() -> None:
    """Beside swap files the note ends nothing; alone it is an error whose cure moves a file and deletes nothing."""
    assert call("--steps", "1", "--keep").exit_code == 0
    note = Path("swap/default/finished.json")
    note.write_text("\x1b[31m{")
    before = {path: path.read_bytes() for path in swap_files() if path.name not in ("lock", note.name)}
    refused = call("--steps", "2")
    assert refused.exit_code == 2 and "holds a run that did not end" in refused.stderr, refused.output
    assert {path: path.read_bytes() for path in before} == before
    assert facts(call("--steps", "2", "--resume", "auto", "--json"))["first_step"] == 2
    assert json.loads(note.read_text())["steps"] == 2
    for wrong in ("[]", '{"steps": 2, "job": "train"}', '{"steps": 2, "job": {"text": [1], "steps": "2"}}'):
        note.write_text(wrong)
        refused = call("--steps", "2", "--resume", "auto")
        assert refused.exit_code == 2 and "finished.json does not say how run default ended" in refused.stderr
        assert "move that file away" in refused.stderr and "restart" not in refused.stderr and note.read_text() == wrong


def test_another_models_run_is_not_gone_on_with() -> None:
    for name in ("first", "second"):
        make_folder(Path(name), seed=len(name))
    assert weights_of(Path("first")) != weights_of(Path("second"))
    arguments = ("--steps", "1", "--keep", "--resume", "auto")
    assert call(*arguments, "--model", "first").exit_code == 0
    before = {path: path.read_bytes() for path in swap_files() if path.name != "lock"}
    refused = call(*arguments, "--model", "second")
    assert refused.exit_code == 2 and "belongs to another job: --model was " in refused.stderr, refused.stderr
    assert {path: path.read_bytes() for path in before} == before
    Path("first").rename("moved")
    went_on = call("--steps", "2", "--keep", "--resume", "auto", "--model", "moved")
    assert went_on.exit_code == 0 and "resuming after step 1" in went_on.stdout


def test_the_model_is_saved_on_the_way() -> None:
    assert call("--steps", "5", "--output", "out", "--save-every", "2").exit_code == 0
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {"checkpoint-2", "checkpoint-4"}
    sizes = {path.stat().st_size for path in Path("out").rglob("model.safetensors")}
    assert len([*Path("out").rglob("config.json")]) == 3 and len(sizes) == 1
    weights = {path.read_bytes() for path in Path("out").rglob("model.safetensors")}
    assert len(weights) == 3, "each is of its step"


@pytest.mark.slow
def test_a_job_that_failed_before_its_first_commit_may_save_again_what_it_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its folder says whose it is, until it has ended."""

    def full(_: object) -> None:
        raise StoreError("the drive is full")

    job = ("--steps", "2", "--output", "out", "--save-every", "1", "--durability", "none", "--resume", "auto")
    with monkeypatch.context() as patch:
        testing.replace(patch, "train.save_model", full)
        failed = call(*job)
    assert failed.exit_code == 1 and "nothing is kept: no step was committed" in failed.stderr
    assert "--resume auto: no step of this run is committed" in failed.stdout
    assert "--output out is not empty" in call(*job, "--lr", "0.1").stderr, "another job"
    assert call(*job).exit_code == 0 and not Path("out/.offload-job.json").exists()


def test_a_place_that_cannot_be_written_is_found_before_training() -> None:
    refused = call("--steps", "1", "--output", "/proc/offload/out")
    assert refused.exit_code == 2 and "--output /proc/offload/out cannot be written" in refused.stderr
    assert not Path("swap").exists()


@pytest.mark.slow
def test_passes_over_the_data_are_steps() -> None:
    """2200 bytes are 68 sequences of 32; 3 are held out; 2 are in a step of two micro-batches of 1."""
    nbytes = Path("text.py").stat().st_size
    of_a_pass = math.ceil((nbytes - nbytes // 32 // 20 * 32) / 64)
    report = facts(call("--epochs", "0.2", "--batch-size", "1", "--accumulation", "2", "--json"))
    assert report["total_steps"] == report["steps"] == math.ceil(of_a_pass / 5)


def test_names_of_hugging_face_are_taken() -> None:
    typed = (
        *("--max_steps", "2", "--learning_rate", "0.01", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "3", "--max_grad_norm", "0.5"),
        *("--output_dir", "out", "--logging_steps", "1", "--weight_decay", "0.0", "--eval_steps", "1"),
    )
    result = call(*typed, "--log", "log")
    assert result.exit_code == 0, result.output
    assert [(line["lr"], line["tokens"]) for line in log()] == [(0.01, 96)] * 2
    assert "clipped to a norm of 0.5" in result.stdout and Path("out/config.json").is_file()
    for message in ("step 1/2  loss", "lr 1.00e-02", "norm "):
        assert message in result.stdout


def test_names_of_axolotl_and_accelerate_are_taken() -> None:
    """Each is the option with the same value, and nothing else."""
    command: Any = get_command(app)
    names = {
        "--base_model": ("--model", "llama"),
        "--sequence_len": ("--seq-len", "64"),
        "--cutoff_len": ("--seq-len", "65"),
        "--block_size": ("--seq-len", "66"),
        "--num_epochs": ("--epochs", "3"),
        "--micro_batch_size": ("--batch-size", "2"),
        "--lr_scheduler": ("--schedule", "constant"),
        "--gradient_clipping": ("--grad-clip", "0.5"),
        "--deepspeed_config_file": ("--config", "ds.json"),
        "--offload_param_device": ("--offload-param", "cpu"),
        "--offload-optimizer-device": ("--offload-optimizer", "none"),
    }

    def parsed(*typed: str) -> dict[str, Any]:
        params: dict[str, Any] = command.commands["train"].make_context("train", [*typed]).params
        return params

    for name, (own, value) in names.items():
        assert parsed(name, value) == parsed(own, value) != parsed(), name


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 1 --epochs 1", "give one of them"),
        ("--epochs 0", "--epochs must be a number above 0"),
        ("--warmup 1.5", "--warmup must be a fraction of the steps below 1, or a number, got"),
        ("--warmup -1", "--warmup must be a number of at least 0"),
        ("--accumulation 0", "--accumulation must be at least 1"),
        ("--weight-decay nan", "--weight-decay must be a number of at least 0"),
        ("--grad-clip -1", "--grad-clip must be a number of at least 0"),
        ("--eval-every -1", "--eval-every must be a number of at least 0"),
        ("--eval-every 0 --eval-data text.py", "never evaluates"),
        ("--eval-data none", "there is no text at none"),
        ("--save-every 2 --no-output", "--save-every writes the model below --output, and --no-output writes none"),
        ("--output out --no-output", "--no-output and --output out exclude each other"),
        ("--log-every 0", "--log-every must be at least 1"),
        ("--text binary", "binary is not text: the file contains zero bytes"),
        ("--eval-data empty", "--eval-data contains less than one sequence"),
        ("--host-memory 16", "give a unit"),
        ("--trace text.py", "text.py is not a timeline and would be overwritten"),
        ("--trace binary.gz", "binary.gz is not a timeline and would be overwritten"),
        ("--trace same --log same", "--log and --trace need two files"),
        ("--warmup 5", "--warmup 5 is more than the 1 steps"),
        ("--text data.jsonl", "give the file by --data"),
        ("--output swap/default/model", "is in the run's own folder"),
    ],
)
def test_bad_input_is_refused(arguments: str, message: str) -> None:
    Path("binary").write_bytes(bytes(range(256)) * 100)
    Path("binary.gz").write_bytes(bytes(range(256)) * 100)
    Path("data.jsonl").write_text('{"text": "words"}\n')
    Path("empty").write_bytes(b"")
    refused = call("--steps", "1", *arguments.split()) if "steps" not in arguments else call(*arguments.split())
    assert refused.exit_code == 2 and message in refused.stderr, refused.output
    assert refused.stderr.startswith("error: ") and not Path("swap").exists()
