"""Errors of `offload train` name the option where the value came from one, and the key where it came from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.config import load_config
from offload.errors import ConfigError
from offload.finetune.options import Options, in_options, merge
from tests.support.processes.cli_in_process import call, run_folder

__all__ = ["run_folder"]

FILE = Path("ds.json")


def message(**wrong: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(merge(None, Options(**wrong))[0])
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "begins"),
    [
        ({"host_memory": "much"}, "--host-memory should be a size such as"),
        ({"grad_clip": -1.0}, "--grad-clip should be greater than or equal to 0, got -1.0; 0 switches clipping off"),
        ({"durability": {"every": 0}}, "--durability should be greater than 0, got 0"),
        ({"run": "a/b"}, "--run should match pattern"),
        ({"batch_size": 0}, "--batch-size should be greater than 0, got 0"),
        ({"lr": -1.0}, "--lr should be greater than or equal to 0"),
        ({"weight_decay": -1.0}, "--weight-decay should be greater than or equal to 0"),
    ],
)
def test_a_wrong_value_of_an_option_is_told_by_its_name(wrong: dict[str, Any], begins: str) -> None:
    told = message(**wrong)
    assert in_options(told, Options(**wrong)).startswith(begins)
    assert in_options(told, Options(**wrong, config=FILE)).startswith(begins), "the option overrules the file"
    assert in_options(told, Options(config=FILE)) == told, "the value of a file is told by its key"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            'resume the run with "resume": "auto" in the "offload" block, or start over with "resume": "restart" there '
            "(offload train: --resume auto, --resume restart), or delete it",
            "resume the run with --resume auto, or start over with --resume restart, or delete it",
        ),
        ('set "durability": {"every": 10} or "durability": "none"', "set --durability 10 or --durability none"),
        ('set a larger "host_memory" in "offload"', "set a larger --host-memory"),
        ('raise "device_memory" in the "offload" block', 'raise "device_memory" in the "offload" block'),
        ("a run of default settings", "a run of default settings"),
    ],
)
def test_advice_is_given_in_options_where_there_is_no_file(told: str, expected: str) -> None:
    assert in_options(told, Options()) == expected


def test_the_command_names_the_option(run_folder: Path) -> None:
    done = call("--host-memory", "1MiB", "--steps", "1")
    assert done.exit_code == 2 and "error: --host-memory is 1.0 MiB" in done.stderr, done.stderr
