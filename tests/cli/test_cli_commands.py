"""Each command has its help, its options by one name, and plurals that are right."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.config import load_config
from offload.errors import ConfigError
from offload.finetune.options import Options, in_options, merge
from offload.swapper.store import store
from offload.swapper.store.drives import Shortage
from tests.support.processes import warm_process
from tests.support.processes.cli_in_process import call, run_folder, swap_files


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)  # of a group; whose class is another in each version of typer
    if inner is None:
        yield path
        return
    for name, each in inner.items():
        yield from commands(each, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))
WITHOUT_JSON = [("run",), ("launch",)]
"""Commands whose output is that of a script."""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_and_exit_codes(path: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*path, "--help"])
    assert told.exit_code == 0
    assert f"Example: offload {' '.join(path)} " in " ".join(told.output.split()) or "Examples:" in told.output
    assert ("--json" in told.output) is (path not in WITHOUT_JSON)


def refused(*arguments: str) -> str:
    """The one line on stderr of a command that was typed wrong, without what all have."""
    result = CliRunner().invoke(app, arguments, prog_name="offload")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").strip()


@pytest.mark.sample(9)
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_usage_error_is_one_line_that_points_to_help(path: tuple[str, ...]) -> None:
    help = f"see `offload {' '.join(path)} --help`"
    unknown = refused(*path, "--no-such-option")
    assert unknown.startswith("no such option: --no-such-option") and unknown.endswith(help)
    if path not in WITHOUT_JSON:
        assert "(Possible options: --json" in refused(*path, "--jsno")
        assert refused(*path, "--json=yes").startswith("option '--json' does not take a value; see `offload ")
    if any(parameter.required for parameter in inner_command(path).params):
        assert refused(*path).startswith("missing argument ") and refused(*path).endswith(help)


def inner_command(path: tuple[str, ...]) -> Any:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command


def test_a_value_that_is_none_of_its_choices_and_a_command_that_is_none() -> None:
    choices = "'never', 'auto', 'must', 'restart'; see `offload train --help`"
    assert refused("train", "--resume", "no") == f"invalid value for '--resume': 'no' is not one of {choices}"
    assert refused("train", "--steps", "x").startswith("invalid value for '--steps' / '--max-steps': ")
    assert refused("trian") == "no such command 'trian'. Did you mean 'train'? see `offload --help`"
    assert refused("bench", "oi").endswith("see `offload bench --help`")
    assert refused("train", "more").startswith("got unexpected extra argument")


@pytest.mark.parametrize(
    ("arguments", "of"),
    [
        (("train", "--data", ""), ", that of --data"),
        (("train", "--data="), ", that of --data"),
        (("train", "--model", "", "--steps", "1"), ", that of --model"),
        (("inspect", ""), ""),
        (("verify", "--json", "."), None),
        (("rm", "", "--yes"), ""),
        (("bench", "io", ""), ""),
        (("score", "", "--data", "x"), ""),
    ],
)
def test_an_empty_path_is_not_the_working_folder(
    arguments: tuple[str, ...], of: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"an argument is empty{of}: give a value, or leave it out; see `offload --help`"
    assert (refused(*arguments) == message) is (of is not None)


def test_a_terminal_without_a_letter_ends_nothing() -> None:
    """A run's summary has µ in it; a locale without UTF-8 shows another mark in its place."""
    code = "import sys; from offload.cli import main as cli; cli.app = lambda: print('1 \\u00b5s'); cli.main()"
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 ?s\n"), done.stderr


def test_output_that_finds_no_room_is_one_line() -> None:
    command = "-m offload plan --parameters 1B --layers 4 --gpu 24GB --json".split()
    with Path("/dev/full").open("w") as full:
        process = warm_process.begin(command, stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate(240)
    assert process.returncode == 1 and errors is not None, errors
    assert "No space left" in errors and "Traceback" not in errors, errors


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


CONFIG: dict[str, Any] = {"offload": {"device": "cpu"}, "gradient_clipping": 0}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(("clip", "message"), [(0, "not clipped"), (0.5, "clipped to a norm of 0.5")])
def test_the_line_of_a_start(clip: float, message: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload")
    engine = offload.initialize(model=nn.Linear(4, 1, bias=False), config=CONFIG | ADAM | {"gradient_clipping": clip})[
        0
    ]
    try:
        assert f"gradients {message}\n" in caplog.text
        assert "config: 1 sample a step = 1 in a micro-batch * 1 micro-batch * 1 rank" in caplog.text
        assert not re.search(r"\b1 \w+s\b(?! (a|of))", caplog.text.replace("1 is", "")), caplog.text
    finally:
        engine.destroy()


def test_keep_without_durability_is_an_error() -> None:
    result = call("--steps", "1", "--keep", "--durability", "none")
    assert result.exit_code == 2 and "exclude each other: no commit would be kept" in result.stderr and not swap_files()


def test_keep_on_a_disk_that_is_too_small_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.engine import plan

    for module in (plan, store):
        monkeypatch.setattr(module, "find_shortage", lambda *_: Shortage("swap", 4 << 20, 3 << 20))
    result = call("--steps", "1", "--keep")
    assert result.exit_code == 2 and "4.0 MiB" in result.stderr and "3.0 MiB" in result.stderr and not swap_files()


def test_another_text_or_length_is_reported() -> None:
    assert call("--steps", "1", "--keep").exit_code == 0
    more = ("--keep", "--resume", "auto")
    assert "resumed, and" not in call("--steps", "2", *more).stdout
    output = " ".join(call("--steps", "3", "--seq-len", "16", *more).stdout.split())
    assert "resumed, and the data differ (seq-len was 32, is 16" in output
    Path("other.py").write_text("def half(number):\n    return number // 2\n\n" * 50)
    output = " ".join(call("--steps", "4", "--seq-len", "16", *more, text="other.py").stdout.split())
    assert "the data differ" in output and "checksum was" in output and "seq-len" not in output
