"""The page of `offload report` shows the figures of the log, however the file ended, and needs no other file."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from offload.errors import ConfigError
from offload.report.charts import points, ticks
from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from offload.report.phases import ADVICE, PARTS, advice, bound, parts, verdict
from offload.report.timeline_view import read_window
from tests.report.report_log import ABOUT, step, trace, written
from tests.support.sampling import examples


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
    found = parts(step(1))
    assert found == pytest.approx(
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
    assert sum(found.values()) == pytest.approx(2.0) and list(found) == list(PARTS)


def test_a_step_is_bound_by_its_longest_phase() -> None:
    by = bound([step(1), step(2, wait_for_reads_seconds=0.95)])
    assert by is not None and by.by == "reads" and by.share == pytest.approx((0.33 + 1.03) / 2 / 2)
    assert by.words().startswith("reads: 0.680 of 2.000 s a step (34%) waits for reads, 0.5")
    assert bound([{"seconds": 1.0}]) is None and parts({"seconds": 1.0}) == {}


def test_a_machine_that_does_other_work_is_named_before_a_faster_one(log: Path) -> None:
    assert figures(read_log(log))["advice"] == ADVICE["compute"]
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    log.write_text("".join(json.dumps(line | {"others_share": 0.4}) + "\n" for line in lines), encoding="utf-8")
    found = figures(read_log(log))
    assert found["others_share"] == pytest.approx(0.4)
    assert verdict(found).first_change == "end the other work on this machine, which took 40% of its cores"
    assert found["advice"].endswith(ADVICE["compute"])


def test_other_work_is_named_where_cores_limit_alone() -> None:
    assert advice("compute", 0.15) == ADVICE["compute"] and advice("compute", 0.16) != ADVICE["compute"]
    assert advice("optimizer", 0.5).startswith("end the other work")
    assert advice("reads", 0.5) == ADVICE["reads"]


# -- the log -------------------------------------------------------------------------------------------


def test_the_first_step_of_a_process_is_in_no_median(log: Path) -> None:
    found = figures(read_log(log))
    assert (found["steps"], found["first_step"], found["last_step"], found["seconds"]) == (10, 1, 10, 27.0)
    assert found["step_seconds"] == {"median": 2.0, "p95": 2.0, "least": 2.0, "most": 2.0}
    assert found["loss"] == {"first": 10.0, "last": 1.0, "least": 1.0, "most": 10.0}
    assert (found["tokens_per_second"], found["samples_per_second"]) == (50.0, 2.0)
    assert found["read_bytes"] == {"total": 30 * 2**30, "median": 3 * 2**30} and found["bound_by"] == "compute"


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
    found = read_log(path)
    assert [values["step"] for values in found.steps] == [1, 2, 3, 4, 5] and found.steps[2]["loss"] == 7.0
    assert (found.truncated_lines, found.again, found.resumed, found.about["run"]) == (3, 1, (3,), "other")
    shown = page(found, figures(found), None)
    assert "3 lines of the log are cut short" in shown and "Resumed at step 3" in shown
    json.dumps(figures(found), allow_nan=False)


def test_evaluations_are_a_second_line_of_the_loss_and_a_tile(log: Path, tmp_path: Path) -> None:
    """A log has them on lines of their own, behind the step; NaN is told as null."""
    without = read_log(log)
    alone = page(without, figures(without), None)
    assert figures(without)["eval_loss"] is None and "evaluation loss" not in alone and ">evaluation<" not in alone
    each = [step(1), step(2), {"step": 2, "eval_loss": 5.5, "eval_tokens": 64}, step(3), {"step": 3, "eval_loss": None}]
    found = read_log(written(tmp_path / "evaluated", *each, step(4), {"step": 4, "eval_loss": 4.25}))
    assert figures(found)["eval_loss"] == {"first": 5.5, "last": 4.25, "least": 4.25, "most": 5.5}
    shown = page(found, figures(found), None)
    drawn(shown)
    (chart,) = [
        json.loads(unescape(each)) for each in re.findall(r'data-chart="([^"]*)"', shown) if "evaluation" in each
    ]
    assert chart["names"] == ["training", "evaluation"] and chart["rows"][1] == [None, "5.5", None, "4.25"]
    assert (
        ">evaluation</li>" in shown
        and "<dt>evaluation loss</dt><dd>4.25</dd><dd class=sub>from 5.5, least 4.25</dd>" in shown
    )


def test_one_of_a_kind_is_singular(tmp_path: Path) -> None:
    found = read_log(written(tmp_path / "log", step(1, about={"parameters": 1}), step(2), step(2), '{"step": 3, "lo'))
    shown = page(found, figures(found), None)
    assert "1 line of the log is cut short" in shown and "1 step was trained again" in shown
    assert "1 parameter," in shown


def test_steps_without_any_time_have_a_page(tmp_path: Path) -> None:
    nothing = dict.fromkeys((name for name in step(1) if name.endswith("seconds")), 0.0)
    found = read_log(written(tmp_path / "log", *(step(number, **nothing) for number in (1, 2, 3))))
    assert re.search(r"forward and backward.*0(\.0)? .s.*0\.0%", page(found, figures(found), None), re.DOTALL)


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
    found = points(steps, values, most)
    assert len(found) == min(most, len(values))
    assert [step for point in found for step in range(point.first, point.last + 1)] == steps
    known = [value for value in values if value is not None]
    if known:
        assert min(p.least for p in found if p.least is not None) == min(known)
        assert max(p.most for p in found if p.most is not None) == max(known)


@given(some.floats(-1e9, 1e9), some.floats(0, 1e9))
@example(134217728.0, 1.192092896e-07)
@example(-5e-324, 0.0)
@example(0.0, 0.0)
def test_ticks_are_round_and_hold_all_between_them(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    assert 2 <= len(marks) <= 9 and marks == sorted(set(marks))
    slack = 1e-6 * max(abs(low) + span, 1e-290)
    assert marks[0] <= low + slack and marks[-1] >= low + span - slack


def test_a_chart_of_zeros_has_readable_numbers() -> None:
    assert ticks(0, 0) == [0.0, 0.2]


# -- the page ------------------------------------------------------------------------------------------


def drawn(text: str) -> list[ElementTree.Element]:
    """The charts, each of which must be right XML with coordinates that are numbers inside of its frame."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert found and "nan" not in re.sub(r"<style.*?</style>", "", text).lower()
    for svg in found:
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for line in svg.iter("polyline"):
            for spot in line.attrib["points"].split():
                x, y = map(float, spot.split(","))
                assert -1 <= x <= width + 1 and -1 <= y <= height + 1
    return found


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_any_number_of_steps_is_drawn(count: int, tmp_path: Path) -> None:
    path = written(tmp_path / "log", step(1, about=ABOUT), *(step(n) for n in range(2, count + 1)))
    log = read_log(path)
    text = page(log, figures(log), None)
    assert len(drawn(text)) >= 8
    assert ("Each point of a chart is about" in text) == (count == 1000)


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


def test_the_page_needs_nothing_beside_it_and_shows_names_as_text(log: Path) -> None:
    found = read_log(log)
    text = page(found, figures(found), None)
    assert "mine &lt;b&gt;" in text and "mine <b>" not in text
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", text)


def test_a_log_of_an_earlier_version_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    old = {name: step(1)[name] for name in ("step", "loss", "grad_norm", "lr", "tokens", "seconds", "read_bytes")}
    log = read_log(written(tmp_path / "log", old, old | {"step": 2}))
    found = figures(log)
    assert found["bound_by"] is None and found["drives"] == [] and found["about"] == {}
    text = page(log, found, None)
    assert "Phases were not measured" in text
    drawn(text)


def test_what_was_predicted_stands_beside_what_came(tmp_path: Path) -> None:
    about = {"predicted": {"seconds": 1.6, "read_bytes": 2**30, "host_peak_bytes": 1e9}}
    log = read_log(written(tmp_path / "log", step(1, about=about), step(2), step(3)))
    found = figures(log)["predicted"]
    assert [(each["name"], each["ratio"]) for each in found] == [
        ("seconds", 1.25),
        ("read_bytes", 3.0),
        ("host_peak_bytes", 2.0),
    ]
    assert "Predicted and measured" in page(log, figures(log), None)


# -- a timeline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_steady_step_of_a_time_line_is_drawn(name: str, tmp_path: Path, log: Path) -> None:
    path = tmp_path / name
    content = json.dumps(trace()).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    window = read_window(path)
    assert (window.title, window.start, window.end) == ("step 3", 205, 305)
    assert window.seconds() == pytest.approx({"compute": 5e-6, "reads": 30e-6})
    found = read_log(log)
    text = page(found, figures(found), window)
    assert "h.0 &lt;weight&gt;: 30 µs, 4.0 KiB" in text
    drawn(text)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph"', '{"traceEvents": 3}']
)
def test_a_file_that_is_no_time_line_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(ConfigError, match=r"is not a timeline|contains no span"):
        read_window(tmp_path / "trace")
