"""`offload replay` computes steps again and proves the log; it finds each number that is another, and only reads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.aio import IoQueue
from offload.cli.main import app
from offload.errors import IoError, NumericsError, StoreError
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store.format import StoreSpec
from tests.support.model_folders import make_folder
from tests.support.models import GPT2
from tests.support.oracle import start, train_step
from tests.support.processes.cli_in_process import call, isolated_cache, log, run_folder

__all__ = ["isolated_cache", "run_folder"]

RUN = Path("swap/default")
KEPT = ("--log", "log", "--keep-every", "2", "--keep", "--seed", "3")


def replay(*words: object) -> Any:
    result = CliRunner().invoke(app, ["replay", str(RUN), *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def contents() -> dict[str, str]:
    """The digest of each file below the working folder but of locks and caches."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path().rglob("*"))
        if path.is_file() and path.name != "lock" and path.parts[0] != "cache"
    }


def change_log(step: int, name: str, value: float) -> None:
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    for line in lines:
        if line["step"] == step and name in line:
            line[name] = value
    Path("log").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_log_of_a_run_is_proven_in_other_placements_too() -> None:
    assert call("--steps", "6", "--accumulation", "2", "--eval-every", "3", *KEPT).exit_code == 0
    before = contents()
    done = replay("--steps", "3..4", "--json", "--certificate", "proof.json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert json.loads(Path("proof.json").read_text()) == report
    Path("proof.json").unlink()
    assert contents() == before, "the run, its log and its kept steps are only read, and nothing is left"
    assert report["equal"] and report["from"] == {"commit": "default@2", "step": 2}
    assert report["states"]["equal"] and report["states"]["compared"] > 8, "those of the kept step 4"
    logged = {line["step"]: line for line in log()}
    for row in report["steps"]:
        assert row["loss"]["replay"] == logged[row["step"]]["loss"].hex()
        assert row["grad_norm"]["replay"] == logged[row["step"]]["grad_norm"].hex()
    assert [row["step"] for row in report["steps"]] == [3, 4]
    assert report["log"]["sha256"] == before["log"] and report["trained_with"] == report["replayed_with"]
    for weights, states, steps in (("none", "none", "5..6"), ("cpu", "nvme", "5")):
        placed = replay("--steps", steps, "--offload-param", weights, "--offload-optimizer", states, "--json")
        assert placed.exit_code == 0, placed.output
        states_compared = json.loads(placed.stdout)["states"]
        assert (states_compared is None) == (steps == "5"), "step 5 is not kept, 6 is the run's last"
    assert contents() == before


def test_a_number_or_a_state_that_is_another_is_found() -> None:
    Path("ds.json").write_text("{}")
    assert call("--steps", "4", "--config", "ds.json", *KEPT).exit_code == 0
    norm = log()[3]["grad_norm"]
    change_log(3, "loss", 1.5)
    change_log(4, "grad_norm", norm * (1 + 2**-52))
    before = contents()
    done = replay("--steps", "3..4")
    assert done.exit_code == 1, done.output
    assert done.stderr.count("warning: gradients are clipped") == 1 and "fp32 on cpu" not in done.stderr
    assert "step 3: loss 0x" in done.stdout and f"step 4: grad_norm {norm.hex()}, in the log 0x" in done.stdout
    assert "0 of 2 steps equal the log in every bit" in done.stdout
    assert "the states after step 4 equal those of the kept commit" in done.stdout
    assert contents() == before
    # The states too, where the data are others than they were.
    Path("text.py").write_text(Path("text.py").read_text().replace("double", "triple"))
    done = replay("--steps", "4", "--json")
    assert done.exit_code == 1 and "the data differ (" in done.stderr, done.output
    states = json.loads(done.stdout)["states"]
    assert not states["equal"] and "0 weight" in states["different"]


@pytest.mark.slow
def test_runs_of_documents_and_adapters() -> None:
    make_folder(Path("llama"))
    rows = [{"prompt": f"{number} + {number} =", "completion": f" {2 * number}"} for number in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--model", "llama", "--data", "rows.jsonl", "--lora", "r=2,dropout=0.1", "--steps", "4", *KEPT)
    trained = CliRunner().invoke(
        app, ["train", *words, "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--no-output"]
    )
    assert trained.exit_code == 0, trained.output
    done = replay("--steps", "3..4", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["data"]["seq-len"] == 32


def test_a_run_that_was_resumed_with_other_options_is_computed_by_those_of_its_steps() -> None:
    """The run itself is gone at its end, and its kept steps stay."""
    zeros = ("--eval-every", "0", "--warmup", "0", "--weight-decay", "0")
    assert call("--steps", "2", *KEPT, *zeros).exit_code == 0
    options = tuple(word for word in KEPT if word != "--keep")
    assert call("--steps", "4", *options, *zeros, "--resume", "must", "--lr", "0.01").exit_code == 0
    assert not (RUN / "rank0").exists()
    done = replay("--steps", "3..4", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["states"]["equal"]


def test_steps_of_two_commands_without_a_commit_between_them_are_refused() -> None:
    """A longer run has another schedule: step 6 is of the first command, and the next kept step, 8, of the second."""
    options = ("--log", "log", "--keep-every", "4", "--keep", "--seed", "3", "--eval-every", "0")
    assert call("--steps", "6", *options).exit_code == 0
    assert call("--steps", "10", *options, "--resume", "must").exit_code == 0
    for steps in ("5..8", "7..8"):
        refused = replay("--steps", steps)
        assert refused.exit_code == 2, refused.output
        assert "resumed with other options between steps 4 and 8" in refused.stderr
        assert "step 5" not in refused.stderr, "it is refused before anything is computed"
    assert replay("--steps", "9..10").exit_code == 0
    # By the log, steps 5 and 6 are of the process that kept step 4.
    assert replay("--steps", "5..6").exit_code == 0


def test_what_cannot_be_computed_again_is_refused() -> None:
    assert call("--steps", "4", *KEPT).exit_code == 0
    before = contents()
    for words, message in (
        (("--steps", "1..2"), "no commit before step 1 of .* is kept: the first is of step 2, so steps from 3 on"),
        (("--steps", "4..3"), "expected steps as 100..120, from 1 on and in this order, got '4..3'"),
        (("--steps", "x"), "expected steps as 100..120"),
        (("--steps", "4..9"), "log has no line of step 5: expected steps 4 to 9"),
        (("--steps", "3", "--certificate", "log"), "--certificate log must be a new file"),
        (("--steps", "3", "--certificate", "/proc/proof"), "--certificate /proc/proof cannot be written"),
        (("--steps", "3", "--certificate", "none/proof"), "--certificate none/proof: there is no folder"),
    ):
        refused = replay(*words)
        assert refused.exit_code == 2 and re.search(message, refused.stderr), refused.output
    assert contents() == before
    script = start(GPT2, ("nvme", "nvme"), Path("scripts"))
    train_step(script, GPT2, 0)
    script.destroy(remove=False)
    Path("log").write_text('{"step": 2, "loss": 1.0, "grad_norm": 1.0}\n')
    refused = CliRunner().invoke(app, ["replay", "scripts/default", "--steps", "2", "--log", "log"])
    assert refused.exit_code == 2 and "does not contain the command that trained it" in refused.stderr, refused.output


def test_a_run_of_several_ranks_is_refused(queue: IoQueue) -> None:
    spec = StoreSpec(({State.WEIGHT: PAGE},), 2, {"world_size": 2})
    for rank in range(2):
        store = Store(["swap"], "default", rank, spec, queue)
        store.create(run_id="0" * 32)
        store.commit(2, {})
        store.close()
    before = contents()
    refused = replay("--steps", "3", "--log", "log")
    assert (
        refused.exit_code == 2
        and "default was trained by 2 ranks; offload replay computes runs of one" in refused.stderr
    )
    assert contents() == before


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("states", ["none", "cpu", "nvme"])
def test_the_log_is_proven_in_all_nine_placements(weights: str, states: str) -> None:
    assert call("--steps", "22", "--eval-every", "0", *KEPT).exit_code == 0
    words = ("--steps", "3..22", "--offload-param", weights, "--offload-optimizer", states, "--json")
    placed = replay(*words)
    assert placed.exit_code == 0, placed.output
    report = json.loads(placed.stdout)
    assert len(report["steps"]) == 20 and report["equal"] and report["states"]["equal"]


def test_a_log_without_the_numbers_is_refused_and_that_of_another_run_is_named() -> None:
    assert call("--steps", "3", *KEPT).exit_code == 0
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    for name, value in (("loss", None), ("grad_norm", "fast"), ("grad_norm", ...)):
        changed = [{key: value if key == name else each for key, each in line.items()} for line in lines]
        changed = [{key: each for key, each in line.items() if each is not ...} for line in changed]
        Path("other").write_text("".join(json.dumps(line) + "\n" for line in changed))
        refused = replay("--steps", "3", "--log", "other")
        assert refused.exit_code == 2 and f"has no number as {name} of step 3" in refused.stderr, refused.output
    same = json.dumps(lines[0]["about"])
    lines[0]["about"]["run_id"] = "0" * 32
    Path("other").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused = replay("--steps", "3", "--log", "other")
    assert refused.exit_code == 2 and f"other is of the run with the id {'0' * 32}, and default has" in refused.stderr
    assert "step 3: " not in refused.stderr, "it is refused before anything is computed"
    lines[0]["about"] = json.loads(same) | {"run": "another"}
    Path("other").write_text("".join(json.dumps(line) + "\n" for line in lines))
    renamed = replay("--steps", "3", "--log", "other")
    assert renamed.exit_code == 0 and "another run" not in renamed.stderr, "the id is the run's"
    # A log of an earlier version has a name alone.
    del lines[0]["about"]["run_id"]
    Path("other").write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = replay("--steps", "3", "--log", "other")
    assert (
        named.exit_code == 0 and "this log is of another run: other is of another, and not of default" in named.stderr
    )
    # A run that was renamed has the same numbers; those of another run are no fault of this one.
    [line for line in lines if "loss" in line][2]["loss"] += 1.0
    Path("other").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused = replay("--steps", "3", "--log", "other", "--certificate", "steps.json")
    assert refused.exit_code == 2 and "error: this log is of another run: other is of another" in refused.stderr
    assert not Path("steps.json").exists() and "equal the log in every bit" not in refused.stdout


def test_code_1_is_a_difference_and_the_result_is_printed_before_the_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert call("--steps", "4", *KEPT).exit_code == 0

    def full(path: Path, *_: object) -> None:
        raise IoError(str(path), 0, 0, errno.ENOSPC, "write")

    with monkeypatch.context() as patch:
        patch.setattr("offload.cli.commands.store.atomic_write", full)
        done = replay("--steps", "3..4", "--certificate", "proof.json")
        assert done.exit_code == 2 and "cannot write --certificate proof.json: [Errno 28] No space" in done.stderr
        assert "2 of 2 steps equal the log in every bit" in done.stdout
        change_log(3, "loss", 1.5)
        done = replay("--steps", "3..4", "--certificate", "proof.json")
        assert done.exit_code == 1 and "--certificate" in done.stderr and "1 of 2 steps equal" in done.stdout
    for error in (
        IoError("states", 0, 1, errno.EIO, "read"),
        StoreError("damaged", damaged=True),
        NumericsError("the gradient norm is inf"),
        MemoryError(),
    ):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("offload.runs.replay.fork", fails)
            assert replay("--steps", "3..4").exit_code == 2, error


def test_an_interrupted_fork_leaves_nothing_and_a_leftover_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("--steps", "3", *KEPT).exit_code == 0
    before = contents()

    def interrupted(store: Store, *_: object, **__: object) -> None:
        assert store.folders[0].is_dir(), "the folder is there, and locked"
        store.close()
        raise KeyboardInterrupt

    # Ctrl-C between the lock of the fork's folder and its first file.
    with monkeypatch.context() as patch:
        patch.setattr(Store, "fill", interrupted)
        CliRunner().invoke(app, ["replay", str(RUN), "--steps", "3"])
    assert contents() == before and not list(Path("swap").glob("*replay*"))
    left = Path(f"swap/default.replay-{os.getpid()}/rank0")
    left.mkdir(parents=True)
    (left / "lock").touch()
    refused = replay("--steps", "3")
    assert refused.exit_code == 2 and "is left from a replay that was killed: remove it with" in refused.stderr
    assert left.is_dir()
