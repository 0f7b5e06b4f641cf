"""The page of errors contains every message that this library raises, and no other."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

import pytest

from offload import errors
from tests import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
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
    found = []
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
                words = words_of(node.args[0])
                if len(re.findall(r"[A-Za-z]{2,}", words)) > 1:
                    found.append((node.func.id, words, f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


def sections() -> dict[str, list[str]]:
    """The words that the page has of each class."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    name = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            name = line[3:]
        elif line.startswith("* `"):
            found[name].append(line[3:].rstrip("`"))
    return found


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
    assert not missing, "add the leading words of these to docs/troubleshooting.md, below their cause:\n" + "\n".join(
        missing
    )


def test_the_page_has_no_message_that_nobody_raises() -> None:
    stale = [
        f"{name}: {each}"
        for name, some in KNOWN.items()
        for each in some
        if not any(tells_of(each, words) for other, words, _ in messages() if other == name)
    ]
    assert not stale, "take these out of docs/troubleshooting.md:\n" + "\n".join(stale)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_section_and_every_cause_a_cure(name: str) -> None:
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert section
    for part in section.split("\n### ")[1:]:
        assert "**Cause.** " in part and "**Cure.** " in part and "\n* `" in part, part.splitlines()[0]


def test_leading_words_of_the_page_identify_a_message() -> None:
    """Two words may be those of anything."""
    for some in KNOWN.values():
        for each in some:
            assert each.startswith("--") or len(re.findall(r"[\w.\-…]+", each)) >= 3, each
