"""The installer uses uv where there is one and pip's indexes; missing tools are reported at once, as one line."""

from __future__ import annotations

import ast
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


def test_uv_searches_the_indexes_of_pip(install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = make_uv(tmp_path)
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = https://not.example\nfind-links = /a\n\t/b\n[install]\ntimeout = 7\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    told = {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/a,/b",
        "UV_HTTP_TIMEOUT": "7",
    }
    for name in told:
        monkeypatch.setenv(name, "")  # so that it is taken away after the test
    assert install.choose_installer() == (str(uv), True)
    assert {name: os.environ[name] for name in told} == told
    assert install.torch_source(True)[1] == [], "no index beside the one that was named"


def test_pip_installs_where_uv_would_search_elsewhere(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = make_uv(tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "mirror.example")  # a setting that has no name here
    assert install.choose_installer() == ("", True)
    monkeypatch.setenv("UV_INDEX_URL", "https://other.example/simple")
    assert install.choose_installer() == (str(uv), True), "uv has its own"
    assert "UV_DEFAULT_INDEX" not in os.environ


def test_the_variable_uv_names_one_that_is_not_on_the_path(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = make_uv(tmp_path).rename(tmp_path / "uv")
    assert install.choose_installer() == ("", False)
    monkeypatch.setenv("UV", str(elsewhere))
    assert install.choose_installer() == (str(elsewhere), False)


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
    ast.parse(PREFLIGHT_SCRIPT.read_text(), feature_version=(3, 6))
