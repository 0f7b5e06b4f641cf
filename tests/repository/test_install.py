"""The installer uses uv where there is one and pip's indexes; missing tools are reported at once, as one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

SCRIPT = ROOT / "scripts" / "install.py"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, on a machine where neither pip nor uv was told anything, with a folder of programs of its own."""
    for name in [each for each in os.environ if each == "UV" or each.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_uv(tmp_path: Path, code: int = 0) -> Path:
    """A uv that notes its arguments, and ends with `code`."""
    path = tmp_path / "bin" / "uv"
    note = f"json.dump(sys.argv[1:], open({str(tmp_path / 'called.json')!r}, 'w'))"
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{note}\nsys.exit({code})\n")
    path.chmod(0o755)
    return path


def test_uv_installs_where_there_is_one(install: ModuleType, tmp_path: Path) -> None:
    assert install.choose_installer() == ("", False)
    uv = make_uv(tmp_path)
    assert install.choose_installer() == (str(uv), False)


def test_uv_installs_into_this_environment_and_takes_the_newest_of_all_indexes(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install.install(str(make_uv(tmp_path)), "-c", "constraints.txt", "torch")
    arguments = json.loads((tmp_path / "called.json").read_text())
    assert arguments[:2] == ["pip", "install"] and arguments[-3:] == ["-c", "constraints.txt", "torch"]
    assert arguments[arguments.index("--python") + 1] == sys.executable
    assert arguments[arguments.index("--index-strategy") + 1] == "unsafe-best-match"
    assert capsys.readouterr().out == "+ uv install -c constraints.txt torch\n"


def test_a_failure_names_who_failed(install: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="uv failed; its words are above"):
        install.install(str(make_uv(tmp_path, code=2)), "torch")


PREFLIGHT_SCRIPT = ROOT / "scripts" / "preflight.py"


def _run(code: str = "", path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script after `code`, in an interpreter of its own."""
    program = f"import runpy, sys\n{code}\nrunpy.run_path({str(PREFLIGHT_SCRIPT)!r}, run_name='__main__')"
    environment = None if path is None else {"PATH": path}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


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
