"""The report says in which share of a step each link was busy, and under which phase units were updated."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload.cli.main import app
from offload.report.figures import figures
from offload.report.links import BACKWARD, FORWARD, LINKS, Span, both, busy, phases, total, union, updates
from offload.report.log import read_log
from offload.report.page import page
from offload.report.timeline_view import read_window
from tests.report.report_log import ABOUT, step, written


def span(row: str, name: str, start: float, end: float, lane: int = 0) -> Span:
    return Span(row=row, lane=lane, name=name, start=start, end=end, nbytes=0)


STEP = [
    span("compute", "forward h.0", 0, 20),
    span("compute", "forward h.1", 20, 40),
    span("compute", "backward h.1", 40, 60),
    span("compute", "forward h.0", 60, 70),
    span("compute", "backward h.0", 70, 90),
    span("compute", "step 3", 92, 98),
    span("waits", "waits for read of h.1", 30, 35),
    span("reads", "h.1 weight", 10, 35),
    span("reads", "h.0 exp_avg", 30, 50, 1),
    span("updates", "h.0", 5, 25),
    span("updates", "h.1", 60, 100),
    span("update worker", "waits for reads of h.0", 5, 15),
    span("update worker", "kernel of h.0", 15, 25),
]
"""A step whose block 0 is computed again in the backward, and whose block 1 is updated under it."""


def test_a_link_is_busy_while_any_of_its_spans_is_in_progress() -> None:
    found = busy(STEP, 0, 100)
    assert found == pytest.approx({"compute": 0.85, "reads": 0.4, "kernels": 0.1})
    assert list(found) == [link for link in LINKS if link in found], "in the order in which they are shown"


def test_compute_leaves_out_waits_and_the_end_of_a_step() -> None:
    assert busy([span("compute", "forward h.0", 0, 100), span("waits", "waits", 0, 100)], 0, 100) == {"compute": 0.0}
    assert busy([span("compute", "step 1", 0, 100), span("compute", "synchronize", 0, 50)], 0, 100) == {}


def test_what_reaches_beyond_the_step_counts_inside_alone() -> None:
    assert busy([span("writes", "h.0 weight", -50, 25), span("writes", "h.1 weight", 75, 500)], 0, 100) == {
        "writes": 0.5
    }


def test_updates_are_told_apart_by_the_phase_that_hides_them() -> None:
    assert updates(STEP, 0, 100) == pytest.approx({FORWARD: 0.22, BACKWARD: 0.38})
    assert updates(STEP[:6], 0, 100) == {}


def test_a_forward_inside_of_a_backward_belongs_to_it() -> None:
    assert phases(STEP, 0, 100) == [(FORWARD, (0, 40)), (BACKWARD, (40, 98)), (FORWARD, (98, 100))]


def test_a_further_micro_batch_begins_a_forward() -> None:
    spans = [
        span("compute", name, 10 * at, 10 * at + 10)
        for at, name in enumerate(("forward h.0", "forward h.1", "backward h.1", "backward h.0"))
    ]
    again = [span(s.row, s.name, s.start + 40, s.end + 40) for s in spans]
    assert phases([*spans, *again], 0, 80) == [
        (FORWARD, (0, 20)),
        (BACKWARD, (20, 40)),
        (FORWARD, (40, 60)),
        (BACKWARD, (60, 80)),
    ]


def test_a_block_of_several_units_is_computed_again_inside_of_a_backward() -> None:
    names = (
        "forward h.1",
        "backward h.1.mlp",
        "forward h.0",
        "forward h.0.mlp",
        "backward h.0.mlp",
        "backward h.0.attn",
    )
    spans = [span("compute", name, 10 * at, 10 * at + 10) for at, name in enumerate(names)]
    assert phases(spans, 0, 60) == [(FORWARD, (0, 10)), (BACKWARD, (10, 60))]


intervals = st.lists(st.tuples(st.integers(-5, 40), st.integers(-5, 40)), max_size=8)


@given(intervals, intervals)
def test_covered_time_is_counted_once(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> None:
    def covered(given: list[tuple[float, float]]) -> set[int]:
        return {at for at in range(30) if any(first <= at < last for first, last in given)}

    one, other = union(some, 0, 30), union(others, 0, 30)
    assert total(one) == len(covered(some))
    assert total(both(one, other)) == len(covered(some) & covered(others))
    assert all(before[1] < after[0] for before, after in pairwise(one))


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
    found = read_log(log)
    text = page(found, figures(found, window=window), window)
    assert "reads of the drives" in text and "under the backward" in text and "begun under the backward" in text
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(trace), "--json"])
    shares = json.loads(done.stdout)
    assert shares["links"] == pytest.approx({"compute": 0.85, "reads": 0.4, "kernels": 0.1})
    assert shares["updates"][BACKWARD] > shares["updates"][FORWARD] > 0
    done = CliRunner().invoke(app, ["report", str(log), "--trace", str(trace)])
    assert "busy: the model's compute 85%, reads of the drives 40%" in done.stdout
    assert figures(found)["links"] is None and figures(found)["updates"] is None
