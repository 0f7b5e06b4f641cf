"""The timeline has what each thread did, and traces open in viewers."""

from __future__ import annotations

import gzip
import json
import logging
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.errors import ConfigError
from offload.presets import PRESETS
from offload.timeline import Row, Timeline, path_of
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    assert_same,
    assert_same_tensors,
    config,
    run,
    start,
    train_step,
    trained,
)
from tests.support.processes import warm_process

DISK = ("nvme", "nvme")


class Net(nn.Module):
    """A model of blocks, a bias of the root's own, and a block whose forward is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.h[0](hidden + self.bias)
        hidden = checkpoint(self.h[1], hidden, use_reentrant=False)
        return self.h[2](hidden)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + micro)
    return model(torch.randn(4, 32, generator=generator)).pow(2).mean()


JOB = Job(Net, loss, steps=3, accumulation=2)

# -- reading a timeline ------------------------------------------------------------------------------


class Slice(NamedTuple):
    name: str
    start: int
    end: int
    nbytes: int


def read(path: Path) -> dict[str, Any]:
    """Returns the file after a check that it has the trace event format and rows that can be drawn."""
    data = path.read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert content["displayTimeUnit"] in ("ms", "ns")
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] > 0 and event["dur"] >= 0 and isinstance(event["tid"], int)
            assert event.get("args", {}).get("bytes", 1) > 0
        elif event["ph"] == "C":
            assert event["ts"] > 0 and event["args"]["bytes"] >= 0
        else:
            assert event["ph"] in ("M", "i")
    for spans in threads(content).values():
        _check_nested(spans)
    return content


def _check_nested(spans: list[Slice]) -> None:
    """Asserts that any two spans of a thread are disjoint or nested."""
    open_until: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_until and open_until[-1] <= span.start:
            open_until.pop()
        assert not open_until or span.end <= open_until[-1], span
        open_until.append(span.end)


def threads(content: dict[str, Any]) -> dict[str, list[Slice]]:
    """Returns the spans of each thread of the file, by its name."""
    events = content["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    slices: dict[str, list[Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, nbytes = round(event["ts"] * 1000), event.get("args", {}).get("bytes", 0)
            slices[names[event["tid"]]].append(Slice(event["name"], start, start + round(event["dur"] * 1000), nbytes))
    return slices


def row(content: dict[str, Any], row: Row) -> list[Slice]:
    """Returns the spans of a row, on all of its lanes."""
    every = threads(content).items()
    return [span for name, spans in every if name.rstrip(" 0123456789") == row.value for span in spans]


def names(content: dict[str, Any], of: Row) -> set[str]:
    return {span.name for span in row(content, of)}


def counters(content: dict[str, Any]) -> dict[str, list[int]]:
    values: dict[str, list[int]] = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "C":
            values[event["name"]].append(event["args"]["bytes"])
    return values


# -- what it holds ------------------------------------------------------------------------------------


def _content(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> dict[str, Any]:
    run(job, placement, folder / "swap", trace=str(folder / "trace.json"), **options)
    return read(folder / "trace.json")


# -- what it holds ------------------------------------------------------------------------------------


@pytest.mark.sample(2)
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
    # A forward that is computed again lies between two spans of the backward.
    spans = sorted(row(content, Row.COMPUTE), key=lambda span: span.start)
    order = [span.name for span in spans if span.name in ("forward h.1", "backward h.2", "backward h.1", "step 1")]
    first = order[: order.index("step 1")]
    assert first == ["forward h.1", "backward h.2", "forward h.1", "backward h.1"] * JOB.accumulation
    values = counters(content)
    assert max(values["device memory"]) > 0 and max(values["host buffers of weights"]) > 0
    for name in ("reads in flight", "writes in flight"):
        assert max(values[name]) > 0 and values[name][-1] == 0


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


# -- what it costs ------------------------------------------------------------------------------------


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


# -- however a run ends -------------------------------------------------------------------------------


_SCRIPT = """
import sys
from pathlib import Path
from tests.support.oracle import start, train_step
from tests.report.test_timeline import DISK, JOB
engine = start(JOB, DISK, Path("swap"), trace="trace.json")
train_step(engine, JOB, 0)
{}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ends", "code"),
    [("raise ValueError", 1), ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT), ("", 0)],
    ids=["an exception", "Ctrl-C", "no destroy"],
)
def test_it_is_written_at_the_end_of_the_process(ends: str, code: int, tmp_path: Path) -> None:
    done = warm_process.python(_SCRIPT.format(ends), cwd=tmp_path, timeout=120)
    assert done.returncode == code, done.stderr
    content = read(tmp_path / "trace.json")
    assert "step 1" in names(content, Row.COMPUTE) and "commit of step 1" in names(content, Row.COMMITS)


def test_an_interrupted_engine_is_recorded(tmp_path: Path) -> None:
    """What Ctrl-C has cut short leaves the rows as they can be drawn."""
    engine = start(JOB, DISK, tmp_path / "swap", trace=str(tmp_path / "trace.json"))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    train_step(engine, JOB, 0)
    handle = engine.module.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_step(engine, JOB, 1)
    handle.remove()
    engine.zero_grad()
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)
    compute = row(read(tmp_path / "trace.json"), Row.COMPUTE)
    assert sum(span.name == "forward" for span in compute) == 2 * JOB.accumulation
    assert "step 2" in {span.name for span in compute}


def test_a_drive_that_is_full_at_the_end_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    run(JOB, DISK, tmp_path, trace="/dev/full")
    assert "cannot write the timeline /dev/full: No space left" in caplog.text


# -- where it goes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["missing/trace.json", "folder"])
def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_done(where: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match="cannot write the timeline"):
        offload.initialize(model=model, config=config(JOB, DISK, tmp_path / "swap", trace=str(tmp_path / where)))
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
    assert_same_tensors(before, model.state_dict())


# -- offload train ------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`offload train` on a little text and a default model of 0.2M."""
    monkeypatch.chdir(tmp_path)
    tiny = PRESETS["gpt2-tiny"]
    monkeypatch.setitem(PRESETS, "gpt2-tiny", tiny._replace(settings=tiny.settings | {"n_layer": 2, "n_embd": 64}))
    Path("text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)
    small = ("--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--device", "cpu")
    return lambda *options: CliRunner().invoke(app, ["train", *small, *options])


def test_the_command_writes_one(train: Callable[..., Any]) -> None:
    Path("ds.json").write_text('{"offload": {"trace": "theirs.json"}}')
    result = train("--steps", "3", "--config", "ds.json", "--trace", "trace.json.gz", "--json")
    assert result.exit_code == 0, result.output
    assert "trace.json.gz" in result.stderr and "ui.perfetto.dev" in result.stderr
    assert "--trace trace.json.gz overrules offload.trace theirs.json" in result.stderr
    assert not Path("theirs.json").exists()
    content = read(Path("trace.json.gz"))
    assert {"step 1", "step 2", "step 3", "forward transformer.h.0"} <= names(content, Row.COMPUTE)
    facts = json.loads(result.stdout)
    # The log's bytes are those up to the return of a step; the timeline goes on to the end of its last update.
    assert sum(span.nbytes for span in row(content, Row.WRITES)) >= sum(facts["written_bytes"])


def test_a_damaged_zipped_file_is_not_taken_for_a_timeline(tmp_path: Path) -> None:
    """Its header is right and its body is not, which zlib reports by an error of its own."""
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b"x" * 1000)[:10] + b"\xff" * 100)
    with pytest.raises(ConfigError, match="is not a timeline"):
        path_of(str(file), 0, 1)
