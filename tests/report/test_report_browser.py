"""The page of `offload report` works in a real browser: no script fails, nothing overlaps, the pointer shows numbers.

Skips where the system has no Chromium. The page is opened from a file, without a network.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from offload.report.timeline_view import read_window
from tests.report.report_log import ABOUT, step, trace, written

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the system has no Chromium")

LOOK = """
<script>
const wrong = [];
addEventListener("error", event => wrong.push(event.message));
addEventListener("load", () => {
  const beside = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1;
  const apart = (a, b) => beside(a, b) || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
  const overlaps = [], told = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
    texts.forEach(([name, box], index) => texts.slice(index + 1).forEach(([other, its]) => {
      if (!apart(box, its)) overlaps.push(`${svg.getAttribute("aria-label")}: ${name} and ${other}`);
    }));
    const box = svg.getBoundingClientRect();
    for (const [name, its] of texts)
      if (its.left < box.left - 4 || its.right > box.right + 8) overlaps.push(`${name} leaves its chart`);
  }
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 9}));
    told.push([figure.querySelector("figcaption").textContent, document.getElementById("tip").textContent]);
  }
  const style = getComputedStyle(document.body);
  document.body.dataset.found = JSON.stringify({wrong, overlaps, told, colors: [style.color, style.backgroundColor],
    wide: document.documentElement.scrollWidth - innerWidth});
});
</script>
"""


def opened(text: str, folder: Path, width: int, *options: str) -> Any:
    """What a script in the page has found of it, in a window of so many pixels."""
    path = folder / "page.html"
    path.write_text(text.replace("<head>", f"<head>{LOOK}"))
    common = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom")
    command = (str(CHROMIUM), *common, f"--window-size={width},1000", *options, path.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize(("count", "width"), [(1, 1280), (12, 1280), (12, 500), (5000, 1280)])
def test_nothing_fails_or_overlaps_and_the_pointer_shows_numbers(count: int, width: int, tmp_path: Path) -> None:
    path = written(tmp_path / "log", step(1, about=ABOUT), *(step(n, loss=3 + n % 7) for n in range(2, count + 1)))
    (tmp_path / "trace").write_text(json.dumps(trace()))
    log = read_log(path)
    found = opened(page(log, figures(log), read_window(tmp_path / "trace")), tmp_path, width)
    assert found["wrong"] == [] and found["overlaps"] == [] and found["wide"] <= 0
    told = dict(found["told"])
    assert told["Parts of a step, s"].startswith("step") and "waits: reads: 0.33 s" in told["Parts of a step, s"]
    assert (
        told["Drives, a step, GiB"].endswith("written: 1 GiB")
        or "written: 1 (1 to 1) GiB" in told["Drives, a step, GiB"]
    )


def test_it_follows_the_colours_of_the_system(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "log", step(1), step(2)))
    text = page(log, figures(log), None)
    light = opened(text, tmp_path, 1280)["colors"]
    dark = opened(text, tmp_path, 1280, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")["colors"]
    assert light == ["rgb(27, 31, 36)", "rgb(250, 250, 250)"]
    assert dark == ["rgb(232, 234, 237)", "rgb(20, 23, 27)"]
