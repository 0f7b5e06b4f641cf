"""The pages for who comes first work as they are: every block of theirs is run, one after the other, in one folder.

Nothing is installed: pip is asked what it would do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offload.config import load_config
from tests import ROOT
from tests.support.processes import warm_process


def run_blocks(page: str, folder: Path) -> str:
    """What the blocks of shell and of Python have printed. One that fails ends it."""
    output = ""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    installed, forked = Path(sys.executable).parent, warm_process.commands(folder / "bin")
    for language, code in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        command = ("bash", "-euo", "pipefail", "-c", code) if language == "bash" else (forked / "python", "-c", code)
        installs = code.startswith("pip install")
        alone = installs or "kill" in code  # a signal must reach the command itself
        path = f"{installed if alone else forked}:{installed}:{os.environ['PATH']}"
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
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 31))
    losses = [float(loss) for loss in re.findall(r"step \d+  loss (\S+)\n", output)]
    assert len(losses) == 3 and losses[2] < losses[0] / 2
    assert (tmp_path / "demo.html").is_file() and "3487232" in output
    load_config(str(tmp_path / "plan.json"))


def test_the_install_page_runs(tmp_path: Path) -> None:
    assert "io_uring" in run_blocks("install.md", tmp_path)
