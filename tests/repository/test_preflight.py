"""Missing tools are reported at once, as one line to paste, before anything is installed."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests import ROOT

SCRIPT = ROOT / "scripts" / "preflight.py"


def _run(code: str = "", path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script after `code`, in an interpreter of its own."""
    program = f"import runpy, sys\n{code}\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    environment = None if path is None else {"PATH": path}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def test_a_machine_that_has_all() -> None:
    done = _run()
    if done.returncode:
        pytest.skip(f"this machine lacks something: {done.stderr}")
    assert done.stdout == done.stderr == ""


def test_everything_that_is_missing_is_one_line() -> None:
    code = "import sysconfig; sysconfig.get_paths = lambda: {'include': '/nowhere'}; sys.modules['ensurepip'] = None"
    done = _run(code, path="/nowhere")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "apt install" in line]
    assert len(lines) == 1
    assert lines[0].split()[:4] == ["sudo", "apt", "install", "g++"]
    assert [word.split(".")[0].split("-")[-1] for word in lines[0].split()[4:]] == ["dev", "venv"]


def test_an_old_python_and_a_full_disk() -> None:
    code = "import shutil; sys.version_info = (3, 8, 1); shutil.disk_usage = lambda _: type('', (), {'free': 10**9})"
    done = _run(code)
    assert done.returncode == 2
    assert "Python 3.8" in done.stderr and "3.10 or later" in done.stderr and "1.0 GB are free" in done.stderr


def test_an_old_python_can_read_it() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
