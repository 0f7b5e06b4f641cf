"""The installer uses uv where there is one, and searches no index that pip is not configured with."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

SCRIPT = ROOT / "scripts" / "install.py"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, on a machine where neither pip nor uv was told anything, with a folder of programs of its own."""
    for name in [each for each in os.environ if each.startswith(("PIP_", "UV_"))]:
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


def test_uv_is_used_only_where_it_searches_the_indexes_of_pip(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = make_uv(tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    assert install.choose_installer() == ("", True), "uv would take packages from PyPI"
    monkeypatch.setenv("UV_INDEX_URL", "https://mirror.example/simple")
    assert install.choose_installer() == (str(uv), True)
    monkeypatch.delenv("PIP_INDEX_URL")
    assert install.choose_installer() == (str(uv), True)
    assert install.torch_source(True)[1] == [], "no index beside the one that was named"


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
