"""trl's trainers, unmodified in `offload run`, train as they do without it; reference models are paged."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import ROOT
from tests.support import rounding_bounds

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")

SCRIPT = ROOT / "tests" / "deepspeed" / "scripts" / "trl_trainers.py"
STEPS = 3


def bound() -> float:
    """How far numbers differ: each step adds the roundings of its sums."""
    sizes = {"vocab_size": 28, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    return STEPS * rounding_bounds.sum_error(rounding_bounds.roundings(model))


def logged(*command: str) -> dict[str, list[dict[str, float]]]:
    """Returns what a run of the script has logged."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


class Runs(NamedTuple):
    """The plain runs of all trainers, whose models are in `folder`, and the config for the others."""

    folder: Path
    config: Path
    plain: dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("trl")
    place = {"device": "nvme", "nvme_path": str(folder)}
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    content = {
        **dict.fromkeys(keys, "auto"),
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    config = folder / "ds.json"
    config.write_text(json.dumps(content))
    return Runs(folder, config, logged(sys.executable, str(SCRIPT), str(folder)))


def compare(paged: dict[str, list[dict[str, float]]], plain: dict[str, list[dict[str, float]]]) -> None:
    assert plain.keys() == paged.keys()
    error = bound()
    for kind, wanted in plain.items():
        assert len(wanted) == len(paged[kind]) == STEPS
        for left, right in zip(paged[kind], wanted, strict=True):
            assert left == pytest.approx(right, rel=error, abs=error), kind
        assert wanted[0]["grad_norm"] > 0.1


@pytest.mark.slow  # two processes that import trl, and five trainings each
@pytest.mark.works("Trainers", "trl's SFT, DPO, KTO, reward and GRPO trainers, in `offload run`", "right")
def test_losses_norms_and_samples_are_those_of_the_plain_runs(runs: Runs) -> None:
    compare(
        logged(sys.executable, "-m", "offload.deepspeed", str(SCRIPT), str(runs.folder), str(runs.config)), runs.plain
    )


@pytest.mark.slow  # two ranks, twice
@pytest.mark.works("Trainers", "trl's GRPO on two ranks, gathered and paged, in `offload run torchrun`", "right")
def test_grpo_on_two_ranks_is_that_of_two_plain_ranks(runs: Runs) -> None:
    launcher = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2", str(SCRIPT), str(runs.folder)]
    kinds = ("GRPO", "GRPO, paged")
    plain = logged(*launcher, "none", *kinds)
    offload = str(Path(sys.executable).with_name("offload"))
    paged = logged(offload, "run", *launcher, str(runs.config), *kinds)
    compare(paged, plain)
    assert plain["GRPO"] != runs.plain["GRPO"]  # which one rank draws


ROWS = {
    "dpo": '{"prompt": "abc", "chosen": " yes", "rejected": " no"}\n' * 8,
    "reward": '{"prompt": "abc", "chosen": " yes", "rejected": " no"}\n' * 8,
    "kto": 4
    * ('{"prompt": "abc", "completion": " yes", "label": true}\n{"prompt": "d", "completion": " e", "label": false}\n'),
    "grpo": '{"prompt": "abc"}\n' * 8,
}


@pytest.mark.slow  # two processes that import trl, each of which starts another
@pytest.mark.parametrize("command", ROWS)
def test_commands_of_trl_print_the_losses_of_those_without(command: str, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(ROWS[command])
    (tmp_path / "rewards.py").write_text(
        "def brief(completions, **_):\n    return [-len(text) for text in completions]\n"
    )
    kind = "LlamaForSequenceClassification" if command == "reward" else "LlamaForCausalLM"
    words = f"trl {command} --model_name_or_path {runs.folder / kind} --dataset_name data --output_dir out".split()
    words += (
        "--use_cpu --bf16 False --dtype float32 --per_device_train_batch_size 2 --max_steps 3 --logging_steps 1".split()
    )
    words += "--report_to none --save_strategy no --disable_tqdm True --learning_rate 1e-3".split()
    if command == "grpo":
        words += "--reward_funcs rewards.brief --num_generations 2 --max_completion_length 6 --beta 0.1".split()

    def losses(*command: str) -> list[dict[str, str]]:
        program = str(Path(sys.executable).with_name(command[0]))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        logs = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{'loss'")]
        return [{key: log[key] for key in ("loss", "grad_norm", "reward") if key in log} for log in logs]

    plain = losses(*words)
    assert len(plain) == STEPS
    assert losses("offload", "run", *words, "--deepspeed", str(runs.config)) == plain  # in the digits that trl prints
