"""`offload report` is a page of a run that a browser shows by itself."""

from __future__ import annotations

import errno
import gzip
import html
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import ConfigError
from offload.metrics.meter import StepMeter, Stepped
from offload.metrics.writers import Reporter
from offload.report.charts import points
from offload.report.figures import figures
from offload.report.links import BACKWARD, FORWARD, Span
from offload.report.log import read_log
from offload.report.page import BEGIN, page
from offload.report.phases import ADVICE, PARTS, parts, verdict
from offload.report.timeline_view import read_window
from tests.store.test_store import DISK, JOB, begin
from tests.support.oracle import config, train_step
from tests.support.sampling import examples

ABOUT = {
    "run": "mine <b>",
    "model": "GPT2LMHeadModel",
    "parameters": 1000,
    "steps": 20,
    "samples_a_step": 4,
    "host_budget_bytes": 2**30,
    "drive_tbw": 1,
    "drive_share": 0.1,
}


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 10 / number,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 100,
        "seconds": 2.0,
        "read_bytes": 3 * 2**30,
        "written_bytes": 2**30,
        "skipped_steps": 0.0,
        "host_peak_bytes": 2e9,
        "forward_seconds": 0.5,
        "backward_seconds": 0.9,
        "step_seconds": 0.1,
        "wait_for_reads_seconds": 0.25,
        "wait_for_updates_seconds": 0.4,
        "wait_for_commits_seconds": 0.05,
        "wait_for_memory_seconds": 0.0,
        "wait_for_uploads_seconds": 0.0,
        "update_kernels_seconds": 0.3,
        "update_copies_seconds": 0.0,
        "update_waits_for_reads_seconds": 0.2,
        "update_waits_for_writes_seconds": 0.5,
        "uploaded_bytes": 2**20,
        "gradients_bytes": 2**20,
        "drives": {"/mnt/a": number * 10**9},
        **more,
    }


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines))
    return path


def span(row: str, name: str, start: float, took: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 1000, "cat": row, "name": name, "ts": start, "dur": took, **more}


def trace() -> dict[str, Any]:
    events = [span("compute", f"step {n}", n * 100, 5) for n in range(1, 5)]
    events += [span("reads", "h.0 <weight>", n * 100 + 20, 30, args={"bytes": 4096}) for n in range(1, 5)]
    return {"traceEvents": [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name"}, *events]}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return written(tmp_path / "log.jsonl", step(1, about=ABOUT, seconds=9.0), *(step(n) for n in range(2, 11)))


@pytest.mark.parametrize(("key", "form"), [("moments", "int8"), ("master", "bf24")])
def test_the_page_names_states_in_fewer_bytes(key: str, form: str, tmp_path: Path) -> None:
    for value, said in ((None, False), ("fp32", False), (form, True)):
        about = ABOUT if value is None else {**ABOUT, key: value}
        log = read_log(written(tmp_path / f"{value}.jsonl", step(1, about=about)))
        assert (f"{key} in {form}" in page(log, figures(log), None).replace("masters", "master")) is said


# -- the parts of a step -------------------------------------------------------------------------------


def test_phases_of_a_step_add_up_and_a_wait_for_updates_is_split_by_the_work() -> None:
    phases = parts(step(1))
    assert phases == pytest.approx(
        {
            "compute": 1.5 - 0.7,
            "optimizer": 0.4 * 0.3,
            "reads": 0.25 + 0.4 * 0.2,
            "writes": 0.05 + 0.4 * 0.5,
            "memory": 0,
            "uploads": 0,
            "loop": 0.5,
        }
    )
    assert sum(phases.values()) == pytest.approx(2.0) and list(phases) == list(PARTS)


def test_a_machine_that_does_other_work_is_named_before_a_faster_one(log: Path) -> None:
    assert figures(read_log(log))["advice"] == ADVICE["compute"]
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    log.write_text("".join(json.dumps(line | {"others_share": 0.4}) + "\n" for line in lines), encoding="utf-8")
    report = figures(read_log(log))
    assert report["others_share"] == pytest.approx(0.4)
    assert verdict(report).first_change == "end the other work on this machine, which took 40% of its cores"
    assert report["advice"].endswith(ADVICE["compute"])


# -- the log -------------------------------------------------------------------------------------------


def test_the_page_begins_with_what_a_step_is_bound_by_and_what_to_change(log: Path) -> None:
    text = page(read_log(log), figures(read_log(log)), None)
    top, _, rest = text.partition('<dl class="tiles">')
    assert "Bound by <b>compute</b>, 40% of a step: forward and backward." in top
    assert "To be faster: a faster device" in top and "To be faster" not in rest
    assert "<figcaption>Tokens a second</figcaption>" in rest
    charts = re.findall(r"<figure data-chart.*?</figure>", rest, re.DOTALL)
    assert len(charts) > 8 and all(">step</text>" in each for each in charts), "each chart names its axis"
    assert "<td></td>" not in rest, "each row of a table is complete"


def test_a_drive_is_foreseen_to_the_last_step_of_the_run(log: Path) -> None:
    (drive,) = figures(read_log(log))["drives"]
    assert drive == {
        "path": "/mnt/a",
        "so_far_bytes": 10 * 10**9,
        "at_end_bytes": 20 * 10**9,
        "rated_bytes": 1e12,
        "step_bytes": 10**9,
        "share": 0.02,
    }


def test_a_truncated_line_and_repeated_steps_are_reported(tmp_path: Path) -> None:
    path = written(
        tmp_path / "log",
        step(1, about=ABOUT),
        step(2),
        step(3, loss=99.0),
        '{"step": 4, "lo\n',
        step(3, loss=7.0, about={"run": "other"}),
        "[1, 2]\n\n",
        step(4, loss=None),
        '{"step": 5, "loss": NaN, "seconds": "three"}\n',
        '{"step": 6, "lo',
    )
    records = read_log(path)
    assert [values["step"] for values in records.steps] == [1, 2, 3, 4, 5] and records.steps[2]["loss"] == 7.0
    assert (records.truncated_lines, records.again, records.resumed, records.about["run"]) == (3, 1, (3,), "other")
    shown = page(records, figures(records), None)
    assert "3 lines of the log are cut short" in shown and "Resumed at step 3" in shown
    json.dumps(figures(records), allow_nan=False)


def test_evaluations_are_a_second_line_of_the_loss_and_a_tile(log: Path, tmp_path: Path) -> None:
    """A log has them on lines of their own, behind the step; NaN is told as null."""
    without = read_log(log)
    alone = page(without, figures(without), None)
    assert figures(without)["eval_loss"] is None and "evaluation loss" not in alone and ">evaluation<" not in alone
    lines = [
        step(1),
        step(2),
        {"step": 2, "eval_loss": 5.5, "eval_tokens": 64},
        step(3),
        {"step": 3, "eval_loss": None},
    ]
    records = read_log(written(tmp_path / "evaluated", *lines, step(4), {"step": 4, "eval_loss": 4.25}))
    assert figures(records)["eval_loss"] == {"first": 5.5, "last": 4.25, "least": 4.25, "most": 5.5}
    shown = page(records, figures(records), None)
    drawn(shown)
    (chart,) = [
        json.loads(unescape(each)) for each in re.findall(r'data-chart="([^"]*)"', shown) if "evaluation" in each
    ]
    assert chart["names"] == ["training", "evaluation"] and chart["rows"][1] == [None, "5.5", None, "4.25"]
    assert (
        ">evaluation</li>" in shown
        and "<dt>evaluation loss</dt><dd>4.25</dd><dd class=sub>from 5.5, least 4.25</dd>" in shown
    )


def test_steps_without_any_time_have_a_page(tmp_path: Path) -> None:
    nothing = dict.fromkeys((name for name in step(1) if name.endswith("seconds")), 0.0)
    records = read_log(written(tmp_path / "log", *(step(number, **nothing) for number in (1, 2, 3))))
    assert re.search(r"forward and backward.*0(\.0)? .s.*0\.0%", page(records, figures(records), None), re.DOTALL)


WEIRD: tuple[Any, ...] = (
    *(None, True, "", "\ud800", [1], {}, {"/p": None}, {"/p": 5}, float("nan"), float("inf"), 1e308, -1e308, 1e-320),
    *(0, -1, 10**400, 2**63, {"seconds": "a"}, {"seconds": float("nan")}, {"parts_seconds": {"compute": 10**400}}),
)


@given(some.sampled_from(sorted({*step(1), *ABOUT, "drives", "about", "predicted"})), some.sampled_from(WEIRD))
def test_any_value_in_a_log_leaves_a_page_and_figures_that_are_json(name: str, value: Any) -> None:
    """What cannot be counted with is as if it were not there."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        first = step(1) | {"about": ABOUT | {name: value}, "drives": {"/p": 5}}
        rows = [first, step(2, drives={"/p": 9}), step(3) | {name: value}, step(4, drives={"/p": 12})]
        log.write_text("\n".join(map(json.dumps, rows)))
        figures_of_log = figures(read_log(log))
        json.dumps(figures_of_log, allow_nan=False)
        page(read_log(log), figures_of_log, None).encode()


@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b"", b"my precious notes\n", b'{"loss": 3}\n', b'{"step": true}\n', b"\xff\x00"]
)
def test_a_file_that_is_no_log_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ConfigError, match="contains no step of a run"):
        read_log(tmp_path / "log")


# -- charts --------------------------------------------------------------------------------------------


@given(some.lists(some.one_of(some.none(), some.floats(-1e6, 1e6)), min_size=1, max_size=700), some.integers(1, 300))
def test_points_cover_every_step_once_and_lose_no_extreme(values: list[float | None], most: int) -> None:
    steps = list(range(5, 5 + len(values)))
    places = points(steps, values, most)
    assert len(places) == min(most, len(values))
    assert [step for point in places for step in range(point.first, point.last + 1)] == steps
    known = [value for value in values if value is not None]
    if known:
        assert min(p.least for p in places if p.least is not None) == min(known)
        assert max(p.most for p in places if p.most is not None) == max(known)


# -- the page ------------------------------------------------------------------------------------------


def drawn(text: str) -> list[ElementTree.Element]:
    """The charts, each of which must be right XML with coordinates that are numbers inside of its frame."""
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert charts and "nan" not in re.sub(r"<style.*?</style>", "", text).lower()
    for svg in charts:
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for line in svg.iter("polyline"):
            for spot in line.attrib["points"].split():
                x, y = map(float, spot.split(","))
                assert -1 <= x <= width + 1 and -1 <= y <= height + 1
    return charts


def test_a_hundred_thousand_steps_are_a_page_of_less_than_a_megabyte(tmp_path: Path) -> None:
    """A tenth of them without `--whole`: what they have beyond a page's width is merged either way."""
    steps = examples(100_000)
    line = json.dumps(step(1)).replace('"step": 1,', '"step": %d,')
    path = tmp_path / "log"
    path.write_text("".join(line % number + "\n" for number in range(1, steps + 1)))
    log = read_log(path)
    text = page(log, figures(log), None)
    assert len(text) < 2**20 and f"1 to {steps:,}" in text
    drawn(text)


def test_a_log_of_an_earlier_version_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    old = {name: step(1)[name] for name in ("step", "loss", "grad_norm", "lr", "tokens", "seconds", "read_bytes")}
    log = read_log(written(tmp_path / "log", old, old | {"step": 2}))
    report = figures(log)
    assert report["bound_by"] is None and report["drives"] == [] and report["about"] == {}
    text = page(log, report, None)
    assert "Phases were not measured" in text
    drawn(text)


def test_what_was_predicted_stands_beside_what_came(tmp_path: Path) -> None:
    about = {"predicted": {"seconds": 1.6, "read_bytes": 2**30, "host_peak_bytes": 1e9}}
    log = read_log(written(tmp_path / "log", step(1, about=about), step(2), step(3)))
    report = figures(log)["predicted"]
    assert [(each["name"], each["ratio"]) for each in report] == [
        ("seconds", 1.25),
        ("read_bytes", 3.0),
        ("host_peak_bytes", 2.0),
    ]
    assert "Predicted and measured" in page(log, figures(log), None)


# -- a timeline ---------------------------------------------------------------------------------------


def test_a_steady_step_of_a_time_line_is_drawn(tmp_path: Path, log: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace()).encode()))
    window = read_window(path)
    assert (window.title, window.start, window.end) == ("step 3", 205, 305)
    assert window.seconds() == pytest.approx({"compute": 5e-6, "reads": 30e-6})
    records = read_log(log)
    text = page(records, figures(records), window)
    assert "h.0 &lt;weight&gt;: 30 µs, 4.0 KiB" in text
    drawn(text)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph"', '{"traceEvents": 3}']
)
def test_a_file_that_is_no_time_line_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(ConfigError, match=r"is not a timeline|contains no span"):
        read_window(tmp_path / "trace")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


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
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-2000:]
    return json.loads(html.unescape(match[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="the system has no Chromium")
@pytest.mark.parametrize(("count", "width"), [(1, 1280), (12, 1280), (12, 500), (5000, 1280)])
def test_nothing_fails_or_overlaps_and_the_pointer_shows_numbers(count: int, width: int, tmp_path: Path) -> None:
    path = written(tmp_path / "log", step(1, about=ABOUT), *(step(n, loss=3 + n % 7) for n in range(2, count + 1)))
    (tmp_path / "trace").write_text(json.dumps(trace()))
    log = read_log(path)
    facts = opened(page(log, figures(log), read_window(tmp_path / "trace")), tmp_path, width)
    assert facts["wrong"] == [] and facts["overlaps"] == [] and facts["wide"] <= 0
    told = dict(facts["told"])
    assert told["Parts of a step, s"].startswith("step") and "waits: reads: 0.33 s" in told["Parts of a step, s"]
    assert (
        told["Drives, a step, GiB"].endswith("written: 1 GiB")
        or "written: 1 (1 to 1) GiB" in told["Drives, a step, GiB"]
    )


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_terminal_says_what_a_step_is_bound_by_and_the_first_change(log: Path) -> None:
    by = verdict(figures(read_log(log)))
    done = call(log)
    assert done.exit_code == 0 and "10 steps, 1 to 10" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[1:3] == [f"bound by {by.bound_by}, {by.more}", f"change first: {by.first_change}"]
    beside = log.with_suffix(".html").read_text()
    assert beside.startswith("<!DOCTYPE html>") and by.more in beside, "the same words as on the page"
    assert by.first_change == by.advice.split(";")[0] and by.advice == ADVICE[by.bound_by]


def test_exit_codes_are_0_1_and_2(log: Path, tmp_path: Path) -> None:
    before = log.read_text()
    assert call(tmp_path / "none").exit_code == 2
    assert call(log, "--trace", log).exit_code == 2
    assert call(log, "-o", log).exit_code == 2 and log.read_text() == before
    assert call(log, "-o", tmp_path / "no" / "folder.html").exit_code == 1
    assert call().exit_code == 2


def test_a_time_line_of_another_program_is_an_error(tmp_path: Path, log: Path) -> None:
    """torch.profiler's has words for processes and threads."""
    other_trace = tmp_path / "other.json"
    spans = [
        {"ph": "X", "pid": "Spans", "tid": "PyTorch Profiler (0)", "ts": 1.0, "dur": 2.0, "name": "PyTorch Profiler"},
        {"ph": "X", "pid": 7, "tid": 7, "ts": 1.0, "dur": "long", "name": "aten::mm", "cat": "cpu_op"},
        {"ph": "X", "pid": 7, "tid": 7, "ts": 1.0, "dur": 2.0, "name": "aten::mm", "args": 3},
    ]
    other_trace.write_text(json.dumps({"traceEvents": spans}))
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(other_trace)])
    assert done.exit_code == 2 and "contains no span" in done.stderr, done.output
    zipped = tmp_path / "other.json.gz"
    packed = bytearray(gzip.compress(json.dumps(list(range(10000))).encode()))
    packed[40:60] = bytes(20)
    zipped.write_bytes(packed)
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(zipped)])
    assert done.exit_code == 2 and "is not a timeline" in done.stderr, done.output


def test_a_plan_with_numbers_that_are_none_is_an_error(tmp_path: Path, log: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"step": {"seconds": NaN, "tokens": 1, "read_bytes": 1, "written_bytes": 1}}')
    done = CliRunner().invoke(app, ["report", str(log), "--plan", str(plan)])
    assert done.exit_code == 2 and "is not a plan" in done.stderr


def test_a_file_that_cannot_be_read_is_not_replaced(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, opens = tmp_path / "page.html", Path.open
    place.write_text("of somebody else")

    # A mode would not do: root may read every file.
    def refused(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        done = call(log, "-o", place)
    assert done.exit_code == 2 and f"{place} exists and cannot be read: Permission denied; give" in done.stderr
    assert place.read_text() == "of somebody else"


def test_a_page_is_replaced_and_another_file_is_not(log: Path, tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    for _ in range(2):
        assert call(log, "-o", place).exit_code == 0
    place.write_text("<!DOCTYPE html>\n<html>of somebody else")
    done = call(log, "-o", place)
    assert done.exit_code == 2 and "exists and is not a page of offload report; give another" in done.stderr, (
        done.output
    )
    assert "of somebody else" in place.read_text()
    place.rename(log.with_suffix(".html"))
    assert call(log).exit_code == 2 and call(log, "--json").exit_code == 0, "without a page nothing is replaced"
    log.rename(tmp_path / "log.html")
    assert call(tmp_path / "log.html").exit_code == 2 and call(tmp_path / "log.html", "--json").exit_code == 0
    (tmp_path / "log.html").rename(log)
    place.write_text("")
    assert call(log, "-o", place).exit_code == 0


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "page.html"
    place.write_text(BEGIN + "before")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    done = CliRunner().invoke(app, ["report", str(log), "-o", str(place)])
    assert done.exit_code == 1 and "cannot write the page" in done.stderr, done.output
    assert place.read_text() == BEGIN + "before" and len(list(tmp_path.glob(".page*"))) == 0


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_page_that_nobody_has_named_leads_to_no_other_file(kind: str, log: Path, tmp_path: Path) -> None:
    """The log may be in a folder of somebody else, who can guess the page's name."""
    target, elsewhere = log.with_suffix(".html"), tmp_path / "elsewhere"
    os.mkfifo(target) if kind == "pipe" else target.symlink_to(elsewhere)
    done = call(log)
    assert done.exit_code == 2 and "log.html exists and is not a page of offload report" in done.stderr
    assert not elsewhere.exists()
    if kind == "link":
        assert call(log, "-o", target).exit_code == 0 and elsewhere.exists() and target.is_symlink()


def span_links(row: str, name: str, start: float, end: float, lane: int = 0) -> Span:
    return Span(row=row, lane=lane, name=name, start=start, end=end, nbytes=0)


STEP = [
    span_links("compute", "forward h.0", 0, 20),
    span_links("compute", "forward h.1", 20, 40),
    span_links("compute", "backward h.1", 40, 60),
    span_links("compute", "forward h.0", 60, 70),
    span_links("compute", "backward h.0", 70, 90),
    span_links("compute", "step 3", 92, 98),
    span_links("waits", "waits for read of h.1", 30, 35),
    span_links("reads", "h.1 weight", 10, 35),
    span_links("reads", "h.0 exp_avg", 30, 50, 1),
    span_links("updates", "h.0", 5, 25),
    span_links("updates", "h.1", 60, 100),
    span_links("update worker", "waits for reads of h.0", 5, 15),
    span_links("update worker", "kernel of h.0", 15, 25),
]
"""A step whose block 0 is computed again in the backward, and whose block 1 is updated under it."""


def test_the_page_the_json_and_the_command_show_the_shares(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", step(1, about=ABOUT), step(2), step(3))
    events = [
        {
            "ph": "X",
            "pid": 1,
            "tid": 1000 + s.lane,
            "cat": s.row,
            "name": s.name,
            "ts": s.start + at,
            "dur": s.end - s.start,
        }
        for at in (0, 100, 200, 300)
        for s in STEP
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    window = read_window(trace)
    records = read_log(log)
    text = page(records, figures(records, window=window), window)
    assert "reads of the drives" in text and "under the backward" in text and "begun under the backward" in text
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(trace), "--json"])
    shares = json.loads(done.stdout)
    assert shares["links"] == pytest.approx({"compute": 0.85, "reads": 0.4, "kernels": 0.1})
    assert shares["updates"][BACKWARD] > shares["updates"][FORWARD] > 0
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(trace)])
    assert "busy: the model's compute 85%, reads of the drives 40%" in done.stdout
    assert figures(records)["links"] is None and figures(records)["updates"] is None


def test_any_loop_writes_a_log_that_goes_on_where_it_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine = begin(tmp_path, durability={"every": 2}, log=str(path), drive_tbw=5)
    for step in range(3):
        train_step(engine, JOB, step)
    testing.abandon(engine, remove=False)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    engine = begin(tmp_path, durability={"every": 2}, log=str(path), resume="must", drive_tbw=5)
    for step in range(2, 4):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "about" in line] == [1, 3]
    assert lines[0]["about"]["drive_tbw"] == 5 and lines[3]["drives"][str(tmp_path / "a")] > 0
    report = figures(read_log(path))
    assert report["resumed_at"] == [3] and report["torn_lines"] == 0 and report["drives"][0]["rated_bytes"] == 5e12


def test_a_log_that_would_take_the_place_of_another_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("my precious notes\n")
    with pytest.raises(offload.ConfigError, match="not the log of a run"):
        begin(tmp_path, log=str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "my precious notes\n" and not (tmp_path / "a" / "default").exists()


def test_numbers_of_the_last_step_can_be_asked_for(tmp_path: Path) -> None:
    content = config(JOB, DISK, tmp_path / "a") | {"wall_clock_breakdown": True, "steps_per_print": 0}
    engine = offload.initialize(model=JOB.model(), config=content).engine
    assert engine.measured == {}
    loss = train_step(engine, JOB, 0)
    assert engine.measured["loss"] == loss and engine.measured["forward_seconds"] > 0
    engine.destroy(remove=True)


def test_an_evaluation_is_a_line_behind_its_step(tmp_path: Path) -> None:
    """A resumed loop trains some steps again, and their evaluations are those of the second time."""
    path, csv = tmp_path / "log.jsonl", {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}

    def run(steps: range, **more: Any) -> None:
        content = config(JOB, DISK, tmp_path / "a", durability={"every": 2}, log=str(path), **more)
        engine = offload.initialize(model=JOB.model(), config=content | {"csv_monitor": csv}).engine
        for step in steps:
            train_step(engine, JOB, step)
            with engine.evaluation() as evaluation:
                evaluation.loss = torch.tensor(step + len(more) / 2)
            with engine.evaluation():
                pass  # without a loss there is nothing to write
        testing.abandon(engine, remove=False)

    run(range(3))
    run(range(2, 4), resume="must")
    log = read_log(path)
    assert [(line["step"], line["eval_loss"]) for line in log.steps] == [(1, 0.0), (2, 1.0), (3, 2.5), (4, 3.5)]
    assert all(line["eval_seconds"] >= 0 for line in log.steps) and figures(log)["eval_loss"]["last"] == 3.5
    assert (tmp_path / "csv" / "run" / "Offload_eval_loss.csv").read_text() == (
        "step,eval_loss\n1,0.0\n2,1.0\n3,2.5\n4,3.5\n"
    )


def test_what_an_evaluation_costs_is_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"read": 0, "nanoseconds": 0}
    testing.replace(monkeypatch, "clock.steps", lambda: spent["nanoseconds"])

    def spend(read: int, seconds: int) -> None:
        spent["read"] += read
        spent["nanoseconds"] += seconds * 10**9

    reporter = Reporter(None, {})
    meter = StepMeter(torch.device("cpu"), lambda: (spent["read"], 0), tuple, None, False, reporter)
    meter.begin()
    for step in range(1, 3):
        spend(10, 1)
        with meter.pause():
            spend(1000, 60)
        meter.end_step(Stepped(step, step, 0.1, 1.0, 0))
        assert meter.measured["read_bytes"] == 10 and meter.measured["seconds"] == 1
    meter.close()


def test_a_start_and_a_resume_are_told_without_any_configuration_of_logging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = begin(tmp_path)
    train_step(engine, JOB, 0)
    engine.destroy()
    begun = capsys.readouterr().err
    assert re.search(r"^offload: fp32 on cpu: weights on disk, states on disk; host ", begun, re.MULTILINE)
    assert "resuming" not in begun
    engine = begin(tmp_path, resume="auto")
    assert f"offload: resuming after step 1 of the run in {tmp_path}/a/default\n" in capsys.readouterr().err
    train_step(engine, JOB, 1)
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert f"offload: loaded {tmp_path}/saved/global_step2: weights alone, as asked\n" in capsys.readouterr().err
    engine.destroy(remove=True)
    logging.getLogger("offload").setLevel(logging.ERROR)
    begin(tmp_path).destroy(remove=True)
    assert capsys.readouterr().err == ""


def test_a_load_says_where_the_loader_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that nobody skips in a loop what the loader has skipped already."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "offload": {"nvme_path": str(tmp_path), "run": "loader"},
    }
    for load in (False, True):
        model = torch.nn.Linear(3, 1)
        started = offload.initialize(model=model, config=settings, training_data=list(torch.ones(10, 3)))
        engine = started.engine
        if load:
            engine.load_checkpoint(tmp_path / "saved")
        else:
            for rows in itertools.islice(iter(started.loader), 2):
                engine.backward(engine(rows).sum())
                engine.step()
            engine.save_checkpoint(tmp_path / "saved")
        engine.destroy(remove=True)
    assert "goes on after step 2, and training_data after sample 4 of pass 0: skip no" in capsys.readouterr().err
