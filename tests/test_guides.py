"""Every block of Python in the guides runs, in an empty folder of its own; each guide ends in the next action."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from tests.support import warm_process

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
BLOCKS = [
    pytest.param(code, id=f"{guide.stem}: {code.splitlines()[0]}")
    for guide in sorted(GUIDES.glob("*.md"))
    for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
]
OPTIONAL = {"bitsandbytes", "diffusers", "lightning", "ray", "torchao", "trl"}
"""Packages that a guide may use and that are in none of our extras: its block runs where they are installed."""


_run = subprocess.run


def run(arguments: Sequence[str], check: bool = False, **options: Any) -> Any:
    """As `subprocess.run`, but a command of Python's is forked."""
    if options or arguments[0] != sys.executable:
        return _run(arguments, check=check, **options)
    done = warm_process.run(arguments[1:])
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # trl asks for the old name
@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.save in one process
@pytest.mark.parametrize("code", BLOCKS)
def test_a_code_block_of_a_guide_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPTIONAL & set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    for drive in ("drive_a", "drive_b"):
        Path(drive).mkdir()
    AcceleratorState._reset_state(True)  # of an earlier block, which a program of its own would not have
    exec(compile(code, "a guide", "exec"), {})


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.md")), ids=lambda guide: guide.stem)
def test_the_guide_ends_in_the_next_action(guide: Path) -> None:
    heading, *rest = re.split(r"^## ", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)[-1].splitlines()
    assert heading == "Next" and re.search(r"\]\([\w./#-]+\)", "\n".join(rest))
