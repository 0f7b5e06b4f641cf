"""Every block of Python in a guide runs, alone and after those above it; each guide ends in the next action."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from tests import ROOT
from tests.support.processes import warm_process

GUIDES = ROOT / "docs" / "guides"
PAGES = {
    guide.stem: re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    for guide in sorted(GUIDES.glob("*.md"))
}
BLOCKS = [pytest.param(code, id=f"{page}: {code.splitlines()[0]}") for page, codes in PAGES.items() for code in codes]
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
    _in_folder(tmp_path, [code], monkeypatch)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("page", [page for page, codes in PAGES.items() if len(codes) > 1])
def test_blocks_of_a_page_run_one_after_the_other_in_one_folder(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader does a page from top to bottom: a block must not find the run of the one above it."""
    _in_folder(tmp_path, PAGES[page], monkeypatch)


def _in_folder(folder: Path, codes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs programs one after the other in `folder`."""
    for name in OPTIONAL & set(re.findall(r"^(?:import|from) (\w+)", "\n".join(codes), re.MULTILINE)):
        pytest.importorskip(name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "run", run)
    for drive in ("drive_a", "drive_b"):
        Path(drive).mkdir()
    for code in codes:
        AcceleratorState._reset_state(True)  # of an earlier block, which a program of its own would not have
        exec(compile(code, "a guide", "exec"), {})


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.md")), ids=lambda guide: guide.stem)
def test_the_guide_ends_in_the_next_action(guide: Path) -> None:
    heading, *rest = re.split(r"^## ", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)[-1].splitlines()
    assert heading == "Next" and re.search(r"\]\([\w./#-]+\)", "\n".join(rest))
