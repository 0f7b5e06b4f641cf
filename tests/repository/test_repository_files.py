"""The front files are right, the installer works, and the pages of bounds and of what works agree with the tests."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml

import offload
from offload.cli import app
from tests import ROOT
from tests.pages import what_works_page
from tests.support.processes import warm_process

PACKAGE = ROOT / "offload"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


TEST_FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def absent_tests(text: str) -> list[str]:
    """Returns the files of tests, and the tests as `file::test`, that `text` names and that are not there."""
    files = [name for name in re.findall(r"\btests/[a-z_/]*test_[a-z0-9_]+\.py", text) if not (ROOT / name).is_file()]
    tests = re.findall(r"`(?:[a-z_/]+/)?(test_\w+\.py)::(\w+)`", text)
    return files + [f"{file}::{name}" for file, name in tests if not defines(TEST_FILES.get(file, Path()), name)]


def test_tests_that_documents_and_code_name_exist() -> None:
    fronts = [
        ROOT / name for name in ("pyproject.toml", "Makefile", ".ci/run", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")
    ]
    paths = [*fronts, *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    named = {str(path.relative_to(ROOT)): absent_tests(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: absent for path, absent in named.items() if absent} == {}
    assert absent_tests("`tests/none/test_none.py`, tests/conftest.py") == ["tests/none/test_none.py"]
    known, gone = (
        "test_docs.py::test_every_message_is_in_the_page",
        ["test_docs.py::test_none", "test_none.py::test_it"],
    )
    assert absent_tests(", ".join(f"`{name}`" for name in [known, *gone])) == gone


def commands(text: str) -> set[str]:
    """Returns the commands of offload that `text` names in code font."""
    return set(re.findall(r"`offload ([a-z]+)", text))


def test_the_forms_ask_for_commands_that_are_there() -> None:
    known = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback is not None}
    known |= {group.name for group in app.registered_groups}
    asked = {path.stem: commands(path.read_text(encoding="utf-8")) for path in FORMS}
    assert set().union(*asked.values()) <= known, known
    assert {"info", "inspect", "verify"} <= asked["bug"] and {"info", "report", "plan"} <= asked["slow"]
    assert commands("`offload gone --json` and offload said") == {"gone"} and "gone" not in known


# -- the citation ---------------------------------------------------------------------------------


def test_the_citation_is_of_this_version() -> None:
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for key in ("version", "license"):
        assert f'\n{key} = "{content[key]}"\n' in project, key
    assert content["version"] == offload.__version__
    assert f'\ndescription = "{content["abstract"]}"\n' in project
    # Required by the schema of CFF 1.2.0.
    assert content["cff-version"] == "1.2.0" and content["title"] == "offload" and content["message"]
    assert content["authors"] == [{"name": "The offload contributors"}]


# -- what SECURITY.md says of the code ------------------------------------------------------------

_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load"}
_OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list"}
"""Collectives of torch that pickle."""
_SUSPECTED = re.compile(
    "|".join([*sorted(_MODULES | _OBJECTS), r"(?<![.\w])(?:eval|exec|compile)\(", r"os\.(?:system|popen)"])
    + r"|\.(?:unsafe_)?load\(|shell|trust_remote_code|weights_only"
)
"""Of a text in which one of these may be: the others need not be parsed."""
_ALLOWED = {"fileio/torch_file.py": ["pickle"], "runs/distributed.py": ["pickle"]}
"""Writers of other programs' files. Their reader has no unpickler (`tests/fileio/test_torch_file.py`)."""


def unsafe(source: str) -> Iterator[str]:
    """Yields each call and import of `source` that could run code that a file or a neighbour brings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in _MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in _MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            plain = given.get("weights_only") == "True"
            if name in _CALLS or name.rpartition(".")[2] in _OBJECTS or (name == "torch.load" and not plain):
                yield name
            yield from (each for each in ("shell", "trust_remote_code") if given.get(each, "False") != "False")
            if given.get("weights_only", "True") != "True":
                yield "weights_only"


def test_no_file_brings_code() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    suspected = {path: source for path, source in sources.items() if _SUSPECTED.search(source)}
    assert {path: calls for path, source in suspected.items() if (calls := list(unsafe(source)))} == _ALLOWED


PAGE = ROOT / "docs" / "reference" / "bounds.md"
_NAMED = re.compile(r"`([\w/]+\.(?:py|cpp))::(\w+)`")


class Row(NamedTuple):
    quantity: str
    bound: str
    keeper: str
    test: str


def rows(text: str) -> list[Row]:
    """The rows of all tables, without heads and rules."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [Row(*row) for row in cells if row[0] != "quantity" and row[0].strip("-")]


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def defines(path: Path, name: str) -> bool:
    """Whether a file defines a function, class or method of that name; of C++, whether it has one."""
    defined = rf"^ *(?:async )?(?:def|class) {name}\b" if path.suffix == ".py" else rf"\b{name}\(|\bTEST\({name}\)"
    return re.search(defined, _source(path), re.MULTILINE) is not None


def wrong(row: Row) -> list[str]:
    """What is not there, or not said, in a row."""
    faults = []
    for cell, folder, enough in ((row.keeper, "offload", ()), (row.test, "tests", ("by construction",))):
        names = _NAMED.findall(cell)
        faults += [f"{path}::{name}" for path, name in names if not defines(ROOT / folder / path, name)]
        # Words without a reference would be a promise that nobody holds.
        if not names and cell not in enough:
            faults.append(f"{row.quantity}: {cell or 'nothing'}")
    return faults if row.bound else [*faults, f"{row.quantity}: no bound"]


ROWS = rows(PAGE.read_text(encoding="utf-8"))


def test_every_bound_is_kept_by_code_and_held_by_a_test() -> None:
    assert len(ROWS) > 40
    assert [each for row in ROWS for each in wrong(row)] == []


def test_the_page_is_of_these_tests(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[what_works_page.COLLECTED]
    if {item.path for item in items} >= set(what_works_page.files()):
        page = what_works_page.page(what_works_page.rows(items))
        assert page == what_works_page.PAGE.read_text(), "run: python -m tests.pages.what_works_page"
        return
    done = warm_process.run(["-m", "tests.pages.what_works_page", "--check"], cwd=ROOT)
    assert done.returncode == 0, done.stderr


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
