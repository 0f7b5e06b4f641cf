"""A timeline is written however a run ends, where the option says, once for each rank, by the command too."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.engine.engine import IoBytes
from offload.errors import ConfigError, EngineFailed
from offload.presets import PRESETS
from offload.timeline import Row, path_of
from tests.report.timeline_reader import DISK, JOB, Net, names, read, row
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    assert_same_tensors,
    config,
    run,
    start,
    train_step,
)
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import RankPool
from tests.support.ranks.rank_pool import start as start_rank

# -- however a run ends -------------------------------------------------------------------------------


def test_a_failed_write_is_the_last_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def fails(operation: str, *_: Any) -> bool:
        nonlocal count
        count += operation == "write"
        return operation == "write" and count > 60

    use_queue(monkeypatch, lambda: LateQueue(0, 0.0, fails))
    engine = start(JOB, DISK, tmp_path / "swap", trace=str(tmp_path / "trace.json"))
    with pytest.raises(EngineFailed):
        for step in range(9):
            train_step(engine, JOB, step)
    engine.destroy()
    content = read(tmp_path / "trace.json")
    assert any("Input/output error" in name for name in names(content, Row.WRITES))


_SCRIPT = """
import sys
from pathlib import Path
from tests.support.oracle import start, train_step
from tests.report.test_timeline import DISK, JOB
engine = start(JOB, DISK, Path("swap"), trace="trace.json")
train_step(engine, JOB, 0)
{}
"""


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


def test_each_rank_has_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "trace")
    assert path_of(f"{file}.json", 0, 1) == Path(f"{file}.json")
    assert path_of(f"{file}.json", 1, 2) == Path(f"{file}.rank1.json")
    assert path_of(f"{file}.json.gz", 1, 2) == Path(f"{file}.rank1.json.gz")
    assert path_of(file, 0, 2) == Path(f"{file}.rank0")


def _train_and_count(folder: Path) -> IoBytes:
    engine = start_rank(JOB, DISK, folder / "swap", trace=str(folder / "trace.json"))
    before = engine.io_bytes()
    for step in range(2):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    after = engine.io_bytes()
    return IoBytes(after.read - before.read, after.written - before.written)


def test_each_of_two_ranks_writes_its_time_line(ranks: RankPool, tmp_path: Path) -> None:
    moved = ranks.run(_train_and_count, tmp_path)
    for rank in range(2):
        content = read(tmp_path / f"trace.rank{rank}.json")
        assert {event["pid"] for event in content["traceEvents"]} == {rank + 1} and content["otherData"]["rank"] == rank
        assert sum(span.nbytes for span in row(content, Row.READS)) == moved[rank].read
        assert sum(span.nbytes for span in row(content, Row.WRITES)) == moved[rank].written
        assert {"agree on a step", "agree to gather h.0", "gather"} <= names(content, Row.RANKS)
    assert sorted(path.name for path in tmp_path.glob("trace*")) == ["trace.rank0.json", "trace.rank1.json"]


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
    result = train("--steps", "3", "--trace", "trace.json.gz", "--json")
    assert result.exit_code == 0, result.output
    assert "trace.json.gz" in result.stderr and "ui.perfetto.dev" in result.stderr
    content = read(Path("trace.json.gz"))
    assert {"step 1", "step 2", "step 3", "forward transformer.h.0"} <= names(content, Row.COMPUTE)
    facts = json.loads(result.stdout)
    # The log's bytes are those up to the return of a step; the timeline goes on to the end of its last update.
    assert sum(span.nbytes for span in row(content, Row.WRITES)) >= sum(facts["written_bytes"])


def test_the_command_refuses_a_file_that_cannot_be_written(train: Callable[..., Any]) -> None:
    result = train("--steps", "1", "--trace", "missing/trace.json")
    assert result.exit_code == 2 and "error: cannot write the timeline" in result.stderr
    assert not Path("swap").exists()


def test_the_option_overrules_the_config(train: Callable[..., Any]) -> None:
    Path("ds.json").write_text('{"offload": {"trace": "theirs.json"}}')
    result = train("--steps", "1", "--config", "ds.json", "--trace", "mine.json")
    assert result.exit_code == 0, result.output
    assert "--trace mine.json overrules offload.trace theirs.json" in result.stdout
    assert Path("mine.json").exists() and not Path("theirs.json").exists()


def test_a_command_that_stops_writes_one(train: Callable[..., Any]) -> None:
    result = train("--steps", "9", "--dtype", "fp32", "--lr", "1e30", "--trace", "trace.json")
    assert result.exit_code == 1
    assert names(read(Path("trace.json")), Row.COMPUTE)


def test_a_damaged_zipped_file_is_not_taken_for_a_timeline(tmp_path: Path) -> None:
    """Its header is right and its body is not, which zlib reports by an error of its own."""
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b"x" * 1000)[:10] + b"\xff" * 100)
    with pytest.raises(ConfigError, match="is not a timeline"):
        path_of(str(file), 0, 1)
