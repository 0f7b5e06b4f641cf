"""`offload train` fine-tunes a folder's model on texts, on several ranks, and goes on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offload.finetune.corpus import packing
from offload.finetune.corpus.token_stream import choose
from tests.support import rounding_bounds
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines
from tests.support.processes import warm_process
from tests.support.processes.cli_in_process import all_lines, call, facts, run_folder
from tests.support.ranks.rank_pool import free_port

TRAIN = "train --model model --data chats.jsonl --seq-len 64 --batch-size 2 --device cpu --lr 1e-2 --steps 20".split()
ADAPTERS = ("--lora", "r=4,dropout=0.1,targets=all-linear")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def begin(folder: Path, *arguments: str) -> warm_process.Process:
    """Starts `offload` with these arguments in this folder; `finish` waits for it."""
    return warm_process.begin(
        ["-m", "offload", *arguments], cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def begin_ranks(folder: Path, *arguments: str) -> list[warm_process.Process]:
    """Starts `offload` on two ranks without a launcher, which takes three imports of torch less."""
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        warm_process.begin(
            ["-m", "offload", *arguments],
            cwd=folder,
            env=_environment() | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]


def finish(*processes: warm_process.Process) -> str:
    """Waits for the processes, each of which must succeed, and returns their outputs joined."""
    output = ""
    for process in processes:
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text
        output += text or ""
    return output


def losses(log: Path) -> list[float]:
    """Returns the loss of each step so far; an unfinished last line does not count."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [each["loss"] for each in records if "loss" in each]


def start(folder: Path, run: str, *options: str) -> warm_process.Process:
    return begin(folder, *TRAIN, "--run", run, "--log", f"{run}.jsonl", "--save", f"{run}-out", *options)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [(), ADAPTERS], ids=["whole", "adapters"])
def test_killed_and_gone_on(tmp_path: Path, options: tuple[str, ...]) -> None:
    make_folder(tmp_path / "model", MARKING_TEMPLATE, attention_dropout=0.1)
    lines = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"{n}, no?"}]}
        for n in range(20)
    ]
    write_lines(tmp_path / "chats.jsonl", lines)
    killed = start(tmp_path, "killed", *options)
    while len(losses(tmp_path / "killed.jsonl")) < 5:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.002)
    killed.kill()
    killed.communicate()
    reached = len(losses(tmp_path / "killed.jsonl"))
    assert reached < 20 and not (tmp_path / "killed-out").exists()
    ends = [start(tmp_path, "killed", *options, "--resume", "must"), start(tmp_path, "whole", *options)]
    outputs = [finish(end) for end in ends]
    assert "resuming after step" in outputs[0] and "other settings" not in " ".join(outputs[0].split())
    assert losses(tmp_path / "killed.jsonl") == losses(tmp_path / "whole.jsonl") and losses(tmp_path / "whole.jsonl")
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    saved = [(tmp_path / f"{run}-out" / name).read_bytes() for run in ("killed", "whole")]
    assert saved[0] == saved[1]


RANKS_TRAIN = "train --model model --data data.jsonl --seq-len 64 --device cpu --dtype fp32 --lr 3e-4 --steps 4".split()


def train(folder: Path, run: str, *options: str, ranks: int) -> list[float]:
    own = ("--run", run, "--nvme-path", run, "--log", f"{run}.jsonl", "--output", f"{run}-out", *options)
    own += ("--batch-size", str(4 // ranks))
    output = finish(*(begin_ranks(folder, *RANKS_TRAIN, *own) if ranks == 2 else [begin(folder, *RANKS_TRAIN, *own)]))
    assert output.count("saved in") == 1, "one rank speaks"
    return losses(folder / f"{run}.jsonl")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("options", "file"), [((), "model"), (("--lora", "r=4"), "adapter_model")])
def test_two_ranks_train_as_one(tmp_path: Path, options: tuple[str, ...], file: str) -> None:
    make_folder(tmp_path / "model", MARKING_TEMPLATE)
    lines = [
        {"text": f"{n} is a number, and {n + 1} is the next one after it, as far as anybody can tell"}
        for n in range(40)
    ]
    write_lines(tmp_path / "data.jsonl", lines)
    two, single = (train(tmp_path, name, *options, ranks=ranks) for name, ranks in (("two", 2), ("one", 1)))
    # Beside roundings to bf16: a mean of means, over rows that are nearly all learned.
    rounding_bounds.same_numbers(two, single, 2 * rounding_bounds.unit("bf16"))
    mine, theirs = (load_file(tmp_path / f"{name}-out" / f"{file}.safetensors") for name in ("two", "one"))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1.3e-3)  # four steps of Adam at 3e-4


__all__ = ["run_folder"]


def evaluated() -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in all_lines() if "eval_loss" in line]


@pytest.mark.slow
def test_five_times_a_run_and_after_its_last_step() -> None:
    result = call("--steps", "7", "--log", "log", "--json")
    report = facts(result)
    assert [step for step, _ in evaluated()] == [1, 2, 3, 4, 5, 6, 7]
    assert "evaluated on 3 sequences, held out" in result.stderr
    assert report["eval_loss"] == report["evaluations"][-1]["eval_loss"] == evaluated()[-1][1] < evaluated()[0][1]
    # A rate of 0 leaves the weights alone: each evaluation, without dropout, finds the same.
    call("--steps", "7", "--log", "log", "--eval-every", "3", "--lr", "0")
    (first, loss), *rest = evaluated()
    assert loss == pytest.approx(np.log(256), rel=0.1)
    assert first == 3 and rest == [(6, loss), (7, loss)]


def test_it_changes_nothing_of_what_is_learned() -> None:
    """With the dropout of the model: no random number is drawn."""
    Path("eval.txt").write_text("def half(number):\n    return number // 2\n" * 8)
    often = facts(call("--steps", "4", "--eval-data", "eval.txt", "--eval-every", "1", "--json"))
    never = facts(call("--steps", "4", "--eval-every", "0", "--json"))
    assert often["losses"] == never["losses"] and len(often["evaluations"]) == 4
    assert never["evaluations"] == [] and never["eval_loss"] is None


def test_too_little_to_hold_out_is_an_error() -> None:
    Path("short.py").write_text("x = 1\n" * 20)
    done = call("--steps", "1", "--json", text="short.py")
    assert "no evaluation: there is too little data" in done.stderr and facts(done)["evaluations"] == []


# -- what is held out ----------------------------------------------------------------------------------


def test_one_in_twenty_at_most_sixteen_spread_over_all() -> None:
    for count in (0, 19, 20, 39, 40, 320, 1000, 12345):
        chosen = choose(count)
        assert len(chosen) == min(count // 20, 16) == len(set(chosen)), count
        if len(chosen) > 1:
            gaps = np.diff(chosen)
            assert 0 <= chosen[0] and chosen[-1] < count and gaps.max() - gaps.min() <= 1, count


def test_rows_are_split_into_training_and_evaluation() -> None:
    documents = [packing.Document(np.full(8, n, np.int32), np.ones(8, bool), False) for n in range(40)]
    packed = packing.pack(documents, 8)
    learned, held = packing.hold_out(packed)
    assert held is not None and len(held.ids) == 2 and {*learned.ids.flat} | {*held.ids.flat} == {*range(40)}
    assert not {*learned.ids.flat} & {*held.ids.flat}
