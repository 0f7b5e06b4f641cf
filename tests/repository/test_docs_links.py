"""Every link between our pages leads somewhere: to a file that is there, and to a heading that it has.

The strict build of the site checks the same and more, where mkdocs is installed (`test_docs_site.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

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
    for found in _LINK.finditer(_CODE.sub("", _FENCE.sub("", text))):
        target = next(filter(None, found.groups()))
        if not _ELSEWHERE.match(target):
            path, _, anchor = target.partition("#")
            yield Link(path, anchor)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and our site make them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", words).strip().lower().replace(" ", "-"))
    return found


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text(encoding="utf-8"))


def wrong(page: Path, inside: Path) -> list[str]:
    """The links of `page` that lead nowhere, or out of the folder `inside`."""
    found = []
    for path, anchor in links(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        link = f"{path}#{anchor}" if anchor else path
        if path.startswith("/"):
            found.append(f"{link}: is absolute")
        elif not target.is_relative_to(inside):
            found.append(f"{link}: leaves {inside.name}; write the path in code font")
        elif not target.exists():
            found.append(f"{link}: is not there")
        elif anchor and (target.suffix != ".md" or anchor not in anchors_of(target)):
            found.append(f"{link}: has no such heading")
    return found


def test_links_of_a_page_lead_somewhere_in_the_site() -> None:
    found = {page: wrong(page, DOCS) for page in PAGES}
    assert {str(page): links for page, links in found.items() if links} == {}


def test_links_beside_the_site_lead_somewhere() -> None:
    found = {page: wrong(page, ROOT) for page in BESIDE}
    assert {page.name: links for page, links in found.items() if links} == {}


def test_the_navigation_has_every_page_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    named = re.findall(r"([\w/.-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Here\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n```\n# in code\n```\n\n## Its `key`, and [a link](x.md)\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#its-key-and-a-link) [c](#top-of-it) ![d](none.png) [e](other.md#in-code)\n"
        "[f](../README.md) [g](https://example.org/none.md) `[h](none.md)` [i](/other.md) [j](#none)\n\n"
        '```\n[k](none.md)\n```\n\n[l]: gone.md\n<img src="no.png">\n\n# Top of it\n'
    )
    assert wrong(page, tmp_path / "docs") == [
        "none.png: is not there",
        "other.md#in-code: has no such heading",
        "../README.md: leaves docs; write the path in code font",
        "/other.md: is absolute",
        "#none: has no such heading",
        "gone.md: is not there",
        "no.png: is not there",
    ]
