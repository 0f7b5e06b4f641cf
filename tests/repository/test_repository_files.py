"""The repository's front files are right: issue forms, the citation, and what SECURITY.md claims of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import offload
from offload.cli import app
from tests import ROOT

PACKAGE = ROOT / "offload"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

TOP = {"name", "description", "title", "labels", "assignees", "projects", "type", "body"}
ATTRIBUTES = {
    "markdown": ({"value"}, {"value"}),
    "textarea": ({"label"}, {"label", "description", "placeholder", "value", "render"}),
    "input": ({"label"}, {"label", "description", "placeholder", "value"}),
    "dropdown": ({"label", "options"}, {"label", "description", "multiple", "options", "default"}),
    "checkboxes": ({"label", "options"}, {"label", "description", "options"}),
}
"""By type of a field: the attributes that GitHub requires, and those that it knows."""


def faults(form: dict[str, Any]) -> list[str]:
    """Returns why GitHub would not show `form`, by its syntax for issue forms; nothing if it would."""
    if not {"name", "description", "body"} <= form.keys() <= TOP:
        return ["top"]
    found = []
    ids, labels = [], []
    for at, field in enumerate(form["body"]):
        required, known = ATTRIBUTES.get(field.get("type"), ({"a type"}, set()))
        attributes = field.get("attributes", {})
        if not required <= attributes.keys() <= known or not field.keys() <= {
            "type",
            "id",
            "attributes",
            "validations",
        }:
            found.append(f"{at}: attributes")
        if field.get("type") == "markdown":
            continue
        ids.append(field.get("id", ""))
        labels.append(attributes.get("label"))
        options = [each["label"] if isinstance(each, dict) else each for each in attributes.get("options", ())]
        if len(set(options)) != len(options) or not all(isinstance(each, str) and each for each in options):
            found.append(f"{at}: options")
    if not all(re.fullmatch(r"[\w-]+", each) for each in ids) or len(set(ids)) != len(ids):
        found.append("ids")
    return found + ["labels"] * (len(set(labels)) != len(labels) or not labels)


def absent_tests(text: str) -> list[str]:
    """Returns the files of tests that `text` names and that are not there."""
    return [name for name in re.findall(r"\btests/[a-z_/]*test_[a-z0-9_]+\.py", text) if not (ROOT / name).is_file()]


@pytest.mark.parametrize("path", ["pyproject.toml", "Makefile", ".ci/run", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_of_tests_that_are_named_exist(path: str) -> None:
    assert absent_tests((ROOT / path).read_text(encoding="utf-8")) == []


def test_tests_that_documents_and_code_name_exist() -> None:
    paths = [*(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    named = {str(path.relative_to(ROOT)): absent_tests(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: absent for path, absent in named.items() if absent} == {}
    assert absent_tests("`tests/none/test_none.py`, tests/conftest.py") == ["tests/none/test_none.py"]


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem)
def test_github_shows_the_form(path: Path) -> None:
    assert faults(yaml.safe_load(path.read_text(encoding="utf-8"))) == []


def test_there_is_a_form_for_each_kind() -> None:
    assert [path.stem for path in FORMS] == ["bug", "config", "feature", "slow"]
    content = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8"))
    assert content == {"blank_issues_enabled": False}


FIELD: dict[str, Any] = {"type": "textarea", "id": "a", "attributes": {"label": "A"}}
BOXES: dict[str, Any] = {"type": "checkboxes", "id": "b", "attributes": {"label": "B", "options": [{"label": "x"}]}}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ([FIELD, BOXES], []),
        ([], ["labels"]),
        ([FIELD, FIELD], ["ids", "labels"]),
        ([FIELD | {"type": "text"}], ["0: attributes"]),
        ([FIELD | {"required": True}], ["0: attributes"]),
        ([FIELD | {"attributes": {"label": "A", "options": ["x"]}}], ["0: attributes"]),
        ([FIELD | {"id": "a b"}], ["ids"]),
        ([BOXES | {"attributes": {"label": "B", "options": [{"label": "x"}] * 2}}], ["0: options"]),
        ([FIELD, {"type": "dropdown", "id": "c", "attributes": {"label": "C", "options": [True]}}], ["1: options"]),
    ],
)
def test_a_form_that_github_refuses_is_found(body: list[Any], found: list[str]) -> None:
    assert faults({"name": "N", "description": "D", "body": body}) == found


def test_the_top_of_a_form_is_checked() -> None:
    assert faults({"name": "N", "body": [FIELD]}) == ["top"]
    assert faults({"name": "N", "description": "D", "about": "A", "body": [FIELD]}) == ["top"]


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
_ALLOWED = {
    "fileio/torch_file.py": ["pickle"],
    "runs/distributed.py": ["pickle"],
}
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
    assert {path: found for path, source in sources.items() if (found := list(unsafe(source)))} == _ALLOWED


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import json, pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("import torch\ntorch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load", "weights_only"]),
        ("torch.load(path, weights_only=True)", []),
        ("safetensors.torch.load(data)", []),
        ("eval(text)", ["eval"]),
        ("model.eval()", []),
        ("re.compile(text)", []),
        ("subprocess.run(command, shell=True)", ["shell"]),
        ("AutoModel.from_pretrained(name, trust_remote_code=given)", ["trust_remote_code"]),
        ("AutoModel.from_pretrained(name, trust_remote_code=False)", []),
        ("dist.all_gather_object(out, mine)", ["all_gather_object"]),
    ],
)
def test_what_brings_code_is_found(source: str, found: list[str]) -> None:
    assert [each.removeprefix("dist.") for each in unsafe(source)] == found
