"""The timeline of a run is right, changes nothing, and costs nothing where it is off."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offload import testing
from offload.metrics.meter import Relay
from offload.timeline import OFF, Phase, Row, Timeline, now
from tests.report.timeline_reader import DISK, JOB, _content, counters, names, read, row, threads
from tests.support import models
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    PLACEMENTS,
    assert_same,
    run,
    start,
    train_step,
    trained,
)

# -- what it holds ------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_every_byte_is_in_it_and_no_bit_is_another(placement: tuple[str, str], tmp_path: Path) -> None:
    plain = run(JOB, placement, tmp_path / "plain")
    options = {"trace": str(tmp_path / "trace.json"), "durability": "step"}
    engine = start(JOB, placement, tmp_path / "traced", **options)
    before = engine.io_bytes()
    assert_same(plain, trained(engine, JOB))
    engine.destroy()
    after = engine.io_bytes()
    content = read(tmp_path / "trace.json")
    read_bytes, written = (sum(span.nbytes for span in row(content, of)) for of in (Row.READS, Row.WRITES))
    assert (read_bytes, written) == (after.read - before.read, after.written - before.written)
    assert written > 0 and content["otherData"]["complete"]


def test_spans_have_the_names_of_the_model(tmp_path: Path) -> None:
    content = _content(JOB, DISK, tmp_path)
    assert names(content, Row.COMPUTE) == {
        "forward",
        *(f"forward h.{n}" for n in range(3)),
        *(f"backward {name}" for name in ("h.0", "h.1", "h.2", "the root")),
        "step 1",
        "step 2",
        "step 3",
    }
    units = {"h.0", "h.1", "h.2", "the root"}
    states = {f"{unit} {state}" for unit in units for state in ("weight", "exp_avg", "exp_avg_sq")}
    assert names(content, Row.WRITES) == states >= names(content, Row.READS)
    early = {f"{unit} under the backward" for unit in units}
    assert names(content, Row.UPLOADS) == units
    assert (
        names(content, Row.UPDATES) - early
        <= units
        <= {name.removesuffix(" under the backward") for name in names(content, Row.UPDATES)}
    )
    assert names(content, Row.DOWNLOADS) == {f"gradient of {unit}" for unit in units}
    assert {f"kernel of {unit}" for unit in units} <= names(content, Row.WORKER)
    assert names(content, Row.COMMITS) == {f"commit of step {n}" for n in range(4)}
    found = counters(content)
    assert max(found["device memory"]) > 0 and max(found["host buffers of weights"]) > 0
    for name in ("reads in flight", "writes in flight"):
        assert max(found[name]) > 0 and found[name][-1] == 0


def test_gradients_are_shown_when_they_have_come_from_a_device_beside_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device(monkeypatch, LateDevice(0, 0.5))
    content = _content(JOB, DISK, tmp_path)
    units = {"h.0", "h.1", "h.2", "the root"}
    assert names(content, Row.DOWNLOADS) == {f"gradient of {unit}" for unit in units}
    spans = row(content, Row.DOWNLOADS)
    parameters = sum(p.numel() for p in JOB.model().parameters())
    assert sum(span.nbytes for span in spans) == 4 * parameters * JOB.steps * JOB.accumulation


def test_a_recomputed_forward_lies_between_two_spans_of_the_backward(tmp_path: Path) -> None:
    content = _content(JOB, DISK, tmp_path)
    spans = sorted(row(content, Row.COMPUTE), key=lambda span: span.start)
    order = [span.name for span in spans if span.name in ("forward h.1", "backward h.2", "backward h.1", "step 1")]
    first = order[: order.index("step 1")]
    assert first == ["forward h.1", "backward h.2", "forward h.1", "backward h.1"] * JOB.accumulation


def test_rows_have_an_order(tmp_path: Path) -> None:
    events = _content(JOB, DISK, tmp_path)["traceEvents"]
    titles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    places = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert titles.keys() == places.keys()
    shown = [titles[tid] for tid in sorted(places, key=places.__getitem__) if titles[tid] in {r.value for r in Row}]
    assert shown == [row.value for row in Row if row.value in shown] and shown[:2] == ["compute", "waits"]


def test_waits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the drive is slow, that is what the model waits for, and the update too."""
    use_queue(monkeypatch, lambda: LateQueue(0, 0.02))
    content = _content(JOB, DISK, tmp_path)
    waits = row(content, Row.WAITS)
    assert {span.name for span in waits if span.end - span.start > 1_000_000} & {
        f"waits for {what} of {unit}" for what in ("read", "update") for unit in ("h.0", "h.1", "h.2", "the root")
    }
    assert any(name.startswith("waits for update of ") for name in names(content, Row.WAITS))
    assert any(name.startswith("waits for reads of ") for name in names(content, Row.WORKER))
    assert not any(name.startswith("waits for reads of ") for name in names(content, Row.WAITS))
    # A wait for a read ends no earlier than the read, as the timeline has it, but for what the threads need to wake.
    reads = row(content, Row.READS)
    for wait in waits:
        if wait.name.startswith("waits for read of ") and wait.end - wait.start > 5_000_000:
            unit = wait.name.removeprefix("waits for read of ")
            assert any(r.name == f"{unit} weight" and r.end <= wait.end and r.end > wait.start - 1e6 for r in reads)


def test_states_in_memory_have_no_reads(tmp_path: Path) -> None:
    content = _content(JOB, ("cpu", "cpu"), tmp_path)
    assert not row(content, Row.READS) and not row(content, Row.WRITES)
    assert names(content, Row.UPDATES) and names(content, Row.UPLOADS)


def test_dropout_and_a_real_model(tmp_path: Path) -> None:
    job = models.DROPOUT._replace(steps=2, dtype="bf16")
    plain = run(job, DISK, tmp_path / "plain")
    assert_same(plain, run(job, DISK, tmp_path / "traced", trace=str(tmp_path / "trace.json.gz")))
    content = read(tmp_path / "trace.json.gz")
    assert {f"forward transformer.h.{n}" for n in range(3)} <= names(content, Row.COMPUTE)
    assert {f"transformer.h.{n} residual" for n in range(3)} <= names(content, Row.READS)


def test_a_change_of_a_counter_has_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment that decides whether it is recorded is the one that is written."""
    clock = itertools.count(1_000_000, 1_000_000)
    monkeypatch.setattr("offload.timeline.now", lambda: next(clock))
    timeline = Timeline(tmp_path / "trace.json", 0)
    for value in (5, 6):
        timeline.count("cache", value)
    timeline.close()
    assert [
        event["ts"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "C"
    ] == [1000.0, 2000.0]


# -- what it costs ------------------------------------------------------------------------------------


def test_nothing_of_it_is_there_where_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No recorder, no hook on a module, and no request that somebody is to be told of."""
    calls: list[object] = []
    testing.replace(monkeypatch, "io.add_done_callback", lambda future, function: calls.append(function))
    engine = start(JOB, DISK, tmp_path)
    assert not testing.inspect(engine).records_spans
    for module in engine.module.modules():
        assert len(module._forward_pre_hooks) <= 1 and len(module._forward_hooks) <= 1, "the engine's own"
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    assert not calls


def test_what_begins_before_its_start_is_not_in_it(tmp_path: Path) -> None:
    """Such as the first write of every weight, which ends on another thread, at any time."""
    timeline = Timeline(tmp_path / "trace.json", waits=True)
    timeline.count("device memory", 1)
    before = now()
    timeline.begin(Row.UPDATES, "h.0")
    timeline.start()
    timeline.add(Row.WRITES, "h.0 weight", before, now(), 1)
    timeline.end(Row.UPDATES, "h.0")
    with timeline.span(Row.WAITS, "waits for upload of h.0"):
        timeline.count("device memory", 1)
    timeline.close()
    content = read(tmp_path / "trace.json")
    assert list(threads(content)) == ["waits"] and counters(content)["device memory"] == [1]


class Listener:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        assert nanoseconds >= 0
        self.calls.append((row, name, nbytes))

    def on_phase_begin(self, phase: Phase) -> None:
        self.calls.append(("begin", phase))

    def on_phase_end(self, phase: Phase) -> None:
        self.calls.append(("end", phase))

    def on_gradient(self, nbytes: int) -> None:
        self.calls.append(("gradient", nbytes))


def test_who_listens_hears_what_is_recorded_and_more(tmp_path: Path) -> None:
    for kept in (Timeline(tmp_path / "trace.json", waits=True), OFF):
        listener = Listener()
        relay = Relay(kept, listener)
        assert relay.recorded is kept
        relay.start()
        relay.begin_phase(Phase.FORWARD)
        with relay.span(Row.UPLOADS, "h.0", 4096):
            relay.add_gradient(128)
        relay.end_phase(Phase.FORWARD)
        relay.count("device memory", 4096)
        relay.close()
        assert listener.calls == [
            ("begin", Phase.FORWARD),
            ("gradient", 128),
            (Row.UPLOADS, "h.0", 4096),
            ("end", Phase.FORWARD),
        ]
    content = read(tmp_path / "trace.json")
    assert [span.name for span in row(content, Row.UPLOADS)] == ["h.0"] and counters(content)["device memory"] == [4096]


def test_the_time_line_is_bounded_and_reports_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "trace.json", most=10)
    for n in range(30):
        with timeline.span(Row.COMPUTE, f"forward h.{n}"):
            timeline.count("device memory", n)
    timeline.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "10 events" in caplog.text
    content = read(tmp_path / "trace.json")
    assert content["otherData"] | {"complete": False, "events": 10} == content["otherData"]
    assert len(row(content, Row.COMPUTE)) + len(counters(content)["device memory"]) == 10
    (last,) = (event for event in content["traceEvents"] if event["ph"] == "i")
    assert "recording stopped" in last["name"]


def test_spans_of_a_row_are_put_below_each_other(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    for start_, end in ((1000, 5000), (2000, 3000), (4000, 6000), (5000, 7000)):
        timeline.add(Row.READS, "h.0 weight", start_, end, 1)
        timeline.add(Row.COMPUTE, "forward h.0", start_, end)
    timeline.close()
    found = threads(read(tmp_path / "trace.json"))
    ends = {name: [(span.start, span.end) for span in spans] for name, spans in found.items()}
    assert ends == {
        "reads": [(1000, 5000), (5000, 7000)],
        "reads 2": [(2000, 3000), (4000, 6000)],
        "compute": [(1000, 5000), (2000, 3000), (5000, 7000)],
        "compute 2": [(4000, 6000)],
    }
