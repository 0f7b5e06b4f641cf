"""The site is built without a warning, and loads nothing from elsewhere. Skips where mkdocs is not installed.

A warning is a link, an anchor, a page of the navigation or a name of the reference that is not there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs is not installed: make .venv/.docs",
)

_LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*\shref=\"?([^\s\">]+)")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does. Not `--quiet`, with which mkdocs does not count its warnings."""
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "--site-dir", site)
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_it_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the one for what is not found
    loaded = {target for page in pages for found in _LOADED.findall(page) for target in found if target}
    assert loaded and [target for target in sorted(loaded) if re.match(r"https?:|//", target)] == []
    assert (tmp_path / "search" / "search_index.js").is_file(), "a page from the disk can load this alone"


def build_page(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Builds a site of one page, with the settings of ours."""
    (folder / "docs" / "stylesheets").mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "javascripts", folder / "docs" / "javascripts")
    (folder / "docs" / "index.md").write_text("\n\n".join(["# A page", *lines]))
    (folder / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md]\n")
    return build(folder / "mkdocs.yml", folder / "site")


def test_each_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    links = {
        "[gone](gone.md)": "contains a link 'gone.md'",
        "[no heading](index.md#none)": "there is no such anchor",
        "[absolute](/index.md)": "absolute link '/index.md'",
    }
    done = build_page(tmp_path, *links)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and f"Aborted with {len(links)} warnings in strict mode" in output, output
    assert [message for message in links.values() if message not in output] == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("line", "message"),
    [("::: offload.nothing", "offload.nothing could not be found"), ('--8<-- "nothing.md"', "nothing.md")],
)
def test_a_name_or_a_file_that_is_not_there_is_an_error(line: str, message: str, tmp_path: Path) -> None:
    done = build_page(tmp_path, line)
    assert done.returncode != 0 and message in done.stdout + done.stderr


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="the system has no Chromium")
def test_the_search_works_where_the_site_is_opened_from_the_disk(tmp_path: Path) -> None:
    done = build_page(tmp_path, "## Budgets", "Two numbers.", "## Wear", "Of drives.")
    assert done.returncode == 0, done.stdout + done.stderr
    browser = (str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}")
    asked = f"{(tmp_path / 'site' / 'index.html').as_uri()}?q=budgets"
    command = (*browser, "--virtual-time-budget=20000", "--dump-dom", asked)
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.findall(r'href="[^"]*#(\w+)" class="md-search-result__link"', page) == ["budgets"]
