"""`offload tune` finds the block with the least in flight among the best, writes it, and the engine takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import Bandwidth
from offload.aio.backend import refusals
from offload.bench.tune_io import Trial, choose, write_config
from offload.cli.main import app
from offload.config import read_json
from offload.errors import ConfigError

MIB = 1 << 20


def _trial(block_bytes: int, depth: int, rate: float) -> Trial:
    return Trial(block_bytes, depth, Bandwidth(rate, rate))


def test_the_least_in_flight_of_the_best_is_chosen() -> None:
    trials = [_trial(MIB, 64, 100), _trial(4 * MIB, 8, 98), _trial(MIB, 16, 97.5), _trial(MIB, 4, 90)]
    assert choose(trials) == trials[2]
    assert choose(trials[3:]) == trials[3]


def test_a_swap_reads_as_much_as_it_writes() -> None:
    assert Bandwidth(2e9, 6e9).swap == pytest.approx(3e9)


def test_it_writes_the_block_into_a_config(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 8, "aio": {"thread_count": 1, "block_size": 4096}}))
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--config", str(config), "--size", "1MiB", "--json"])
    assert done.exit_code == 0, done.output
    answer, content = json.loads(done.stdout), json.loads(config.read_text())
    assert content == {"train_batch_size": 8, "aio": answer["aio"]}
    assert set(answer["aio"]) == {"block_size", "queue_depth", "intra_op_parallelism"}
    assert answer["trials"] and all(trial["read_gb_per_s"] > 0 for trial in answer["trials"])
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_a_config_that_is_not_there_is_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--config", str(tmp_path / "new.json"), "--size", "1MiB"])
    assert done.exit_code == 0, done.output
    assert list(json.loads((tmp_path / "new.json").read_text())) == ["aio"]
    assert "block_size" in done.stdout


def test_the_backend_of_the_config_is_tuned(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"offload": {"io_backend": "threads"}}')
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--config", str(config), "--size", "1MiB", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["backend"] == "threads"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"aio": {"depth": 1}}', "queue_depth"),
        ("[1]", "object"),
    ],
)
def test_a_config_that_cannot_be_written_is_named_first(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "ds.json"
    config.write_text(text)
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--config", str(config), "--size", "1MiB"])
    assert done.exit_code == 2 and message in done.stderr and done.stdout == ""
    assert config.read_text() == text


def test_a_copy_has_the_comments_too_and_the_config_is_untouched(tmp_path: Path) -> None:
    config, output = tmp_path / "ds.json", tmp_path / "tuned.json"
    config.write_text('{"train_batch_size": 8} // mine')
    arguments = ["tune", str(tmp_path), "--config", str(config), "--output", str(output), "--size", "1MiB"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert read_json(output)["train_batch_size"] == 8 and output.read_text().endswith("} // mine")
    assert config.read_text() == '{"train_batch_size": 8} // mine'


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text("{}")
    with pytest.raises(ConfigError, match="no folder"):
        write_config(config, tmp_path / "none" / "out.json", {"block_size": 4096})
    write_config(config, config, {"block_size": 4096})
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    for arguments in (
        ["tune", str(tmp_path / "none"), "--size", "1MiB"],
        ["tune", str(tmp_path), "--output", str(tmp_path / "out.json"), "--size", "1MiB"],
        ["tune", str(tmp_path), "--size", "no"],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2 and done.stderr.startswith("error: "), done.output


def test_the_engine_takes_the_block(tmp_path: Path) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "aio": {"block_size": 65536, "queue_depth": 3, "intra_op_parallelism": 2},
        "offload": {"io_backend": "libaio" if refusals()["libaio"] is None else "threads"},
    }
    engine, *_ = offload.initialize(model=nn.Linear(64, 64), config=config)
    queue = testing.inspect(engine).queue._queue
    try:
        assert queue.block_bytes == 65536
        shape = (queue.threads, queue.depth)
        assert shape == ((2, 3) if queue.backend == "libaio" else (6, 1))
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 64)).sum())
            engine.step()
    finally:
        engine.destroy(remove=True)


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    before = '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "wandb": {"team": "Zoë"}}'
    real.write_text(before)
    real.chmod(0o600)
    link.symlink_to("real.json")
    write_config(link, link, {"block_size": 4096})
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert real.read_text() == f'{before[:-1]}, "aio": {{"block_size": 4096}}}}'
