"""Files of runs, checkpoints and logs that an enemy has made end each command with one line: no traceback, no wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from tests.cli.forgery import Bench, Outcome


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("forgery"))


def faults(bench: Bench, seeds: range, commands: int) -> list[Outcome]:
    return [outcome for seed in seeds for outcome in bench.forge(seed, commands)]


def test_a_forgery_ends_each_command_with_one_line(bench: Bench) -> None:
    """`python -m tests.cli.forgery 10000` makes as many."""
    assert faults(bench, range(60), 1) == []


@pytest.mark.slow
def test_ten_thousand_forgeries(bench: Bench) -> None:
    assert faults(bench, range(1000, 11_000), 3) == []


def test_what_a_library_logs_of_a_file_is_printable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers quotes values of a config.json in its warnings."""
    import offload.runs.inspection as module

    real = module.inspect
    monkeypatch.setattr(
        module, "inspect", lambda path: (logging.getLogger("library").warning("of %s", "a \x1b[31mname"), real(path))[1]
    )
    bench.restore()
    assert bench.run(["inspect", str(bench.root / "ck")]) == ""
    assert [each.getMessage() for each in caplog.records] == [r"of a \x1b[31mname"]
    logging.getLogger("library").warning("of %s", "a \x1b[31mname")
    assert caplog.records[-1].getMessage() == "of a \x1b[31mname", "a script's own logs stay as they are"


@pytest.mark.parametrize(
    "command",
    [
        *("inspect LOOP", "verify LOOP", "export LOOP out", "export ck LOOP", "export ck LOOP --format dcp"),
        *("import LOOP out", "import ck LOOP", "convert LOOP --moments bf16", "rm LOOP --yes", "check-config LOOP"),
        *(
            "report LOOP",
            "report log.jsonl -o LOOP",
            "report log.jsonl --plan LOOP",
            "tune . --size 1MiB --config LOOP",
        ),
    ],
)
def test_a_link_that_leads_to_itself_is_an_error_of_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "ck").mkdir()
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    words = command.replace("LOOP", str(tmp_path / "loop")).split()
    known = {"ck", "log.jsonl", "out", "."}
    done = CliRunner().invoke(app, [str(tmp_path / word) if word in known else word for word in words])
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), done.exception
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
