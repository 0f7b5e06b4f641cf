"""Every link leads somewhere, the site builds, and its pages have every public name and every message of an error."""

from __future__ import annotations

import ast
import errno
import functools
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import offload
from offload import aio, checkpointing, deepnvme, errors, hf, kernels, losses, schedules
from tests import ROOT
from tests.pages import command_line_page

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]

_FENCE = re.compile(r"^(```+|~~~+).*?^\1$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+).+?\1", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)[^)]*\)|^\[[^\]]+\]:\s*(\S+)|\b(?:href|src)=\"([^\"]+)\"", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")


class Link(NamedTuple):
    """What a page points to: a path as it is written, empty for the page itself, and an anchor, empty for none."""

    path: str
    anchor: str


def links(text: str) -> Iterator[Link]:
    """Those that do not leave for another site."""
    for match in _LINK.finditer(_CODE.sub("", _FENCE.sub("", text))):
        target = next(filter(None, match.groups()))
        if not _ELSEWHERE.match(target):
            path, _, anchor = target.partition("#")
            yield Link(path, anchor)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and our site make them."""
    names: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        names.add(re.sub(r"[^\w\- ]", "", words).strip().lower().replace(" ", "-"))
    return names


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text(encoding="utf-8"))


def wrong(page: Path, inside: Path) -> list[str]:
    """The links of `page` that lead nowhere, or out of the folder `inside`."""
    faults = []
    for path, anchor in links(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        link = f"{path}#{anchor}" if anchor else path
        if path.startswith("/"):
            faults.append(f"{link}: is absolute")
        elif not target.is_relative_to(inside):
            faults.append(f"{link}: leaves {inside.name}; write the path in code font")
        elif not target.exists():
            faults.append(f"{link}: is not there")
        elif anchor and (target.suffix != ".md" or anchor not in anchors_of(target)):
            faults.append(f"{link}: has no such heading")
    return faults


def test_links_of_a_page_lead_somewhere_in_the_site() -> None:
    faults = {page: wrong(page, DOCS) for page in PAGES}
    assert {str(page): links for page, links in faults.items() if links} == {}


def test_links_beside_the_site_lead_somewhere() -> None:
    faults = {page: wrong(page, ROOT) for page in BESIDE}
    assert {page.name: links for page, links in faults.items() if links} == {}


def test_the_navigation_has_every_page_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    named = re.findall(r"([\w/.-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


REFERENCE_PAGES = sorted((ROOT / "docs" / "reference").rglob("*.md"))
NAMED = [
    name
    for page in REFERENCE_PAGES
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
NOT_INSTALLED = {
    name for name in NAMED if name.startswith("offload.integrations.") and find_spec(name.split(".")[2]) is None
}
"""Names of modules that are imported where the package is installed whose trainer they serve, and has their name."""
MODULES = (offload, aio, checkpointing, deepnvme, hf, kernels, losses, schedules)
NOT_FOR_USERS = {"forward"}
OF_AN_ENGINE = {f"offload.Engine.{name}" for name in ("module", "optimizer", "device", "notices")} | {
    f"offload.InferenceEngine.{name}" for name in ("module", "device", "notices")
}
"""Attributes that the constructors of engines set."""


def public() -> Iterator[tuple[str, Any]]:
    """Each public name, and what it is."""
    for module in MODULES:
        for name in module.__all__:
            if not isinstance(getattr(module, name), ModuleType) and name != "__version__":
                yield f"{module.__name__}.{name}", getattr(module, name)
    for name in {"__call__", *dir(offload.Engine)} - NOT_FOR_USERS:
        if name == "__call__" or not name.startswith("_"):
            yield f"offload.Engine.{name}", inspect.getattr_static(offload.Engine, name)
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            yield f"offload.errors.{name}", value


def found(name: str) -> Any:
    """What a dotted name is; raises where it is nothing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            # A module gives its names when they are asked for; a property must not be.
            value = getattr(value, part) if isinstance(value, ModuleType) else inspect.getattr_static(value, part)
        return value
    raise AssertionError(f"there is no {name}")


def test_every_public_name_is_there_once() -> None:
    known = [found(name) for name in NAMED if name not in OF_AN_ENGINE | NOT_INSTALLED]
    assert [name for name, value in public() if not any(value is each for each in known)] == []
    assert set(NAMED) >= OF_AN_ENGINE
    assert [name for name in NAMED if NAMED.count(name) > 1] == []


def test_each_name_of_the_reference_exists_and_is_described() -> None:
    silent = []
    for name in sorted(set(NAMED) - OF_AN_ENGINE - NOT_INSTALLED):
        value = found(name)
        described = [*members(value)] if isinstance(value, type) else []
        if callable(value) or isinstance(value, property | ModuleType):
            described.append((name, value))
        silent += [each for each, member in described if not inspect.getdoc(member)]
    assert silent == [], "these have no docstring"


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that are code of ours."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "offload":
            for name, member in vars(base).items():
                if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{base.__name__}.{name}", member


def test_the_commands_are_as_they_say_themselves() -> None:
    assert command_line_page.document() == command_line_page.PAGE.read_text(encoding="utf-8"), (
        "run: python -m tests.pages.command_line_page"
    )
    helps = {command: command_line_page.help_of(*command) for command in command_line_page.commands()}
    silent = [command for command, words in helps.items() if "\nCommands:" not in words and "--json" not in words]
    assert silent == [("run",), ("launch",)], "all but those whose output is a script's"


_LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*\shref=\"?([^\s\">]+)")


builds_sites = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="zensical is not installed: make .venv/.docs",
)


def build(folder: Path, settings: str = "") -> Path:
    """Builds the pages in `folder`/docs as `make docs` does, with `settings` over ours; returns the site's folder."""
    (folder / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\n{settings}")
    command = (sys.executable, "-m", "zensical", "build", "--strict", "-f", folder / "mkdocs.yml")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "No issues found" in done.stdout + done.stderr, done.stdout + done.stderr
    return folder / "site"


@builds_sites
def test_it_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    site = build(tmp_path)
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the one for what is not found
    loaded = {target for page in pages for found in _LOADED.findall(page) for target in found if target}
    assert loaded and [target for target in sorted(loaded) if re.match(r"https?:|//", target)] == []
    assert (site / "search.js").is_file(), "a page from the disk can load this alone"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


_SEARCH = """<script>
setTimeout(() => {
  const search = [...document.body.children].find((element) => element.shadowRoot).shadowRoot;
  const input = search.querySelector("input");
  input.value = "budgets";
  input.dispatchEvent(new Event("input", { bubbles: true }));
  setTimeout(() => document.body.append(...search.querySelectorAll("li > a")), 5000);
}, 5000);
</script>"""
"""Types a word into the search, and puts the links of its results where a dump of the page shows them."""


@builds_sites
@pytest.mark.skipif(CHROMIUM is None, reason="the system has no Chromium")
def test_the_search_works_where_the_site_is_opened_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "docs" / "stylesheets").mkdir(parents=True)
    shutil.copytree(DOCS / "javascripts", tmp_path / "docs" / "javascripts")
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n## Budgets\n\nTwo numbers.\n\n## Wear\n\nOf drives.\n")
    page = build(tmp_path, "nav: [index.md]\n") / "index.html"
    page.write_text(page.read_text().replace("</body>", f"{_SEARCH}</body>"))
    browser = (str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}")
    command = (*browser, "--virtual-time-budget=20000", "--dump-dom", page.as_uri())
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.findall(r'<a [^>]*href="[^"]*#(\w+)"', shown.rpartition("</script>")[2]) == ["budgets"]


PAGE = (DOCS / "reference" / "errors.md").read_text()
CLASSES = sorted(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.OffloadError) and value is not errors.OffloadError
)
BUILT = "IoError"
"""Its messages are made of the system's reason, so the page has those."""


def words_of(node: ast.expr) -> str:
    """A message as the page has it: … where a value stands."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(words_of, node.values))
    if isinstance(node, ast.BinOp):
        return words_of(node.left) + words_of(node.right)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        called, words = node.value.func, [each.value for each in node.value.args if isinstance(each, ast.Constant)]
        if isinstance(called, ast.Name) and called.id == "count_of":  # of several: "… files", or what stands for "s"
            return f"… {words[1] if len(words) > 1 else f'{words[0]}s'}"
    return "…"


@functools.cache  # by the first test: each worker of a run imports this file, and one runs it
def messages() -> list[tuple[str, str, str]]:
    """(class, message, place) of every error that is made, but for those whose words are all made elsewhere."""
    calls = []
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
                words = words_of(node.args[0])
                if len(re.findall(r"[A-Za-z]{2,}", words)) > 1:
                    calls.append((node.func.id, words, f"{path.relative_to(ROOT)}:{node.lineno}"))
    return calls


def sections() -> dict[str, list[str]]:
    """The words that the page has of each class."""
    lines: defaultdict[str, list[str]] = defaultdict(list)
    name = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            name = line[3:]
        elif line.startswith("* `"):
            lines[name].append(line[3:].rstrip("`"))
    return lines


def tells_of(known: str, words: str) -> bool:
    """Whether the page's words are those of a message; with values at both ends they must be all of it."""
    return known == words if known.startswith("…") and known.endswith("…") else known in words


KNOWN = sections()


def test_every_message_is_in_the_page() -> None:
    missing = [
        f"{place}: {name}: {words[:90]}"
        for name, words, place in messages()
        if name != BUILT and not any(tells_of(each, words) for each in KNOWN[name])
    ]
    assert len(messages()) > 300
    assert not missing, "add the leading words of these to docs/reference/errors.md, below their cause:\n" + "\n".join(
        missing
    )


def test_the_page_has_no_message_that_nobody_raises() -> None:
    stale = [
        f"{name}: {each}"
        for name, some in KNOWN.items()
        for each in some
        if not any(tells_of(each, words) for other, words, _ in messages() if other == name)
    ]
    assert not stale, "take these out of docs/reference/errors.md:\n" + "\n".join(stale)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_section_and_every_cause_a_cure(name: str) -> None:
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert section
    # The anchor of a heading is its text in lower case.
    error = errors.IoError("path", 0, 0, errno.EIO) if name == BUILT else getattr(errors, name)("words")
    assert error.page == f"docs/reference/errors.md#{name.lower()}"
    for part in section.split("\n### ")[1:]:
        assert "**Cause.** " in part and "**Cure.** " in part and "\n* `" in part, part.splitlines()[0]


def test_leading_words_of_the_page_identify_a_message() -> None:
    """Two words may be those of anything."""
    for some in KNOWN.values():
        for words_of_an_option in some:
            assert words_of_an_option.startswith("--") or len(re.findall(r"[\w.\-…]+", words_of_an_option)) >= 3, (
                words_of_an_option
            )
