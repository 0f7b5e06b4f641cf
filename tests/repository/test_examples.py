"""Each example runs unchanged from an empty folder, and resumes."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT
from tests.support.processes import warm_process

EXAMPLES = ROOT / "examples"
RUN_HERE = {"train_loop", "trainer", "tiny_model", "finetune", "lora", "export", "resume"}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUN_HERE


def run(name: str, folder: Path) -> str:
    done = warm_process.run([EXAMPLES / name], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved_in(output: str) -> str:
    """The dtype of the saved weights, which is the machine's choice."""
    found = re.search(r"parameters in torch\.(bfloat16|float32)\n", output)
    assert found, output
    return found[1]


def test_the_trainer_example_runs(tmp_path: Path) -> None:
    output = run("trainer.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '([0-9.]+)'", output)]
    assert losses[-1] < losses[0] - 1 and (saved := saved_in(output))
    assert not any(path.is_file() for path in (tmp_path / "swap").rglob("*")), "its checkpoints are what is kept"
    assert len(list((tmp_path / "trainer-output").glob("checkpoint-*"))) == 2
    again = run("trainer.py", tmp_path)  # goes on from its last checkpoint, which is its end
    assert "'loss'" not in again and saved_in(again) == saved


def test_fine_tuning_from_a_folder(tmp_path: Path) -> None:
    run("tiny_model.py", tmp_path)
    output = run("finetune.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 36 and losses[-1] < losses[0] - 2 and saved_in(output)
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "finetuned").iterdir()}


def test_the_adapter_example_runs(tmp_path: Path) -> None:
    output = run("lora.py", tmp_path)
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\S+)", output))
    assert last < first and "saved: adapters default for" in output
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_taking_the_weights_out(tmp_path: Path) -> None:
    assert "exported: torch.float32, loss" in run("export.py", tmp_path)


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loops that it starts, kills and follows are forked processes; the last is the one that nobody kills."""
    followed: list[dict[int, str]] = []

    def begin(arguments: list[str | Path], cwd: Path, text: bool, **streams: int) -> warm_process.Process:
        assert arguments == [sys.executable, EXAMPLES / "train_loop.py"] and text
        return warm_process.begin(arguments[1:], cwd=cwd.absolute(), **streams)

    def follow(process: warm_process.Process, **how: Any) -> dict[int, str]:
        followed.append(example["follow"](process, **how))
        return followed[-1]

    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "resume.py"))
    popen = SimpleNamespace(Popen=begin, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    example["main"].__globals__.update(subprocess=popen, follow=follow)
    example["main"]()
    output = capsys.readouterr().out
    assert "ended with step 20" in output and "each loss is that of the unbroken run: True" in output
    losses = [float(loss) for loss in followed[2].values()]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
