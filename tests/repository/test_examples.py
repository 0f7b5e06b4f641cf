"""Each example, each block of a guide and of the first pages runs as it is written from an empty folder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from offload.config import load_config
from tests import ROOT
from tests.support.processes import warm_process

EXAMPLES = ROOT / "examples"


_run = subprocess.run


def run_forked(arguments: Sequence[str], check: bool = False, **options: Any) -> Any:
    """As `subprocess.run`, but a command of Python's is forked."""
    if options or arguments[0] != sys.executable:
        return _run(arguments, check=check, **options)
    done = warm_process.run(arguments[1:])
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Returns a function that runs an example from an empty folder, in this process, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(subprocess, "run", run_forked)

    def run_example(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name])
        AcceleratorState._reset_state(True)  # of an earlier program, which a process of its own would not have
        torch.manual_seed(0)
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def saved_in(output: str) -> str:
    """The dtype of the saved weights, which is the machine's choice."""
    match = re.search(r"parameters in torch\.(bfloat16|float32)\n", output)
    assert match, output
    return match[1]


@pytest.mark.slow
def test_the_trainer_example_runs(tmp_path: Path) -> None:
    def run() -> str:  # in a process of its own, at whose end its engine ends
        done = warm_process.run([EXAMPLES / "trainer.py"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    output = run()
    losses = [float(loss) for loss in re.findall(r"'loss': '([0-9.]+)'", output)]
    assert losses[-1] < losses[0] - 1 and (saved := saved_in(output))
    assert not any(path.is_file() for path in (tmp_path / "swap").rglob("*")), "its checkpoints are what is kept"
    assert len(list((tmp_path / "trainer-output").glob("checkpoint-*"))) == 2
    again = run()  # goes on from its last checkpoint, which is its end
    assert "'loss'" not in again and saved_in(again) == saved


@pytest.mark.slow
def test_fine_tuning_from_a_folder(run: Callable[[str], str], tmp_path: Path) -> None:
    run("tiny_model.py")
    output = run("finetune.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 36 and losses[-1] < losses[0] - 2 and saved_in(output)
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "finetuned").iterdir()}


@pytest.mark.slow
def test_the_adapter_example_runs(run: Callable[[str], str], tmp_path: Path) -> None:
    output = run("lora.py")
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\S+)", output))
    assert last < first and "saved: adapters default for" in output
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_taking_the_weights_out(run: Callable[[str], str]) -> None:
    assert "exported: torch.float32, loss" in run("export.py")


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


GUIDES = ROOT / "docs" / "guides"
PAGES = {
    guide.stem: re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    for guide in sorted(GUIDES.glob("*.md"))
}
OPTIONAL = {"bitsandbytes", "diffusers", "lightning", "ray", "torchao", "trl"}
"""Packages that a guide may use and that are in none of our extras: its block runs where they are installed."""
INSTALLED = {name for name in OPTIONAL if importlib.util.find_spec(name)}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # trl asks for the old name
@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.save in one process
@pytest.mark.parametrize("page", [page for page, codes in PAGES.items() if codes])
def test_blocks_of_a_page_run_one_after_the_other_in_one_folder(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader does a page from top to bottom: a block must not find the run of the one above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run_forked)
    for drive in ("drive_a", "drive_b"):
        Path(drive).mkdir()
    for code in PAGES[page]:
        if not OPTIONAL & set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) - INSTALLED:
            AcceleratorState._reset_state(True)  # of an earlier block, which a program of its own would not have
            exec(compile(code, "a guide", "exec"), {})


def run_blocks(page: str, folder: Path) -> str:
    """What the blocks of shell and of Python have printed, with shorter sequences. One that fails ends it."""
    output = ""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("--seq-len 128", "--seq-len 32")
    installed, forked = Path(sys.executable).parent, warm_process.commands(folder / "bin")
    for language, code in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        command = ("bash", "-euo", "pipefail", "-c", code) if language == "bash" else (forked / "python", "-c", code)
        installs = code.startswith("pip install")
        path = f"{installed if installs else forked}:{installed}:{os.environ['PATH']}"
        dry = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"} if installs else {}
        done = subprocess.run(
            command,
            cwd=ROOT if installs else folder,
            env=os.environ | {"PATH": path} | dry,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "does not provide the extra" not in done.stderr
        output += done.stdout
    return output


@pytest.mark.timeout(900)  # ten processes that import torch, which takes a while where the machine is busy
def test_the_quick_start_runs(tmp_path: Path) -> None:
    output = run_blocks("quick-start.md", tmp_path)
    log = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 21))
    losses = [float(loss) for loss in re.findall(r"step \d+  loss (\S+)\n", output)]
    assert len(losses) == 3 and losses[2] < losses[0] / 2
    assert "resuming after step" in output, "the first command was killed"
    assert (tmp_path / "demo.html").is_file() and "3487232" in output
    load_config(str(tmp_path / "plan.json"))


@pytest.mark.slow
def test_the_install_page_runs(tmp_path: Path) -> None:
    assert "io_uring" in run_blocks("install.md", tmp_path)
