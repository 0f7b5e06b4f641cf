"""Each command has its help and its options by one name; options and a config file become one config."""

from __future__ import annotations

import copy
import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import offload
from offload import errors, schedules
from offload.cli.console import BAD_INPUT, FAILED, code_of, echo_error
from offload.cli.main import app
from offload.config import load_config, resolve_batch
from offload.errors import BudgetError, ConfigError, EngineFailed, IoError, StoreError
from offload.finetune.model import decay_groups
from offload.finetune.options import Options, chooses_dtype, in_options, merge, schedule
from offload.swapper.store import store
from offload.swapper.store.drives import Shortage
from tests.support.processes import warm_process
from tests.support.processes.cli_in_process import call, run_folder, swap_files


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)  # of a group; whose class is another in each version of typer
    if inner is None:
        yield path
        return
    for name, command_of_name in inner.items():
        yield from commands(command_of_name, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))
WITHOUT_JSON = [("run",), ("launch",)]
"""Commands whose output is that of a script."""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_and_exit_codes(path: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*path, "--help"])
    assert told.exit_code == 0
    assert f"Example: offload {' '.join(path)} " in " ".join(told.output.split()) or "Examples:" in told.output
    assert ("--json" in told.output) is (path not in WITHOUT_JSON)


CODES = {
    "ConfigError": BAD_INPUT,
    "BudgetError": BAD_INPUT,
    "StoreError": BAD_INPUT,
    "UsageError": BAD_INPUT,
    "RankError": FAILED,
    "NumericsError": FAILED,
    "AuditError": FAILED,
    "EngineFailed": FAILED,
}


def test_each_class_of_error_has_its_exit_code() -> None:
    """As `docs/reference/errors.md` says: 2 for invalid input, 1 for what failed."""
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, OSError)}
    classes |= {each.__name__ for each in errors.OffloadError.__subclasses__()}
    assert classes == {*CODES, "IoError"}
    for name, code in CODES.items():
        assert {code_of(getattr(errors, name)("words"), of_files) for of_files in (1, 2)} == {code}
    assert code_of(StoreError("words", damaged=True), BAD_INPUT) == FAILED
    failed = EngineFailed("words")
    failed.__cause__ = StoreError("words", damaged=True)
    assert code_of(failed, BAD_INPUT) == FAILED
    for number, operation, code in (
        (errno.EBADMSG, "use weight of 0,", FAILED),
        (errno.ENODATA, "read", FAILED),
        (errno.EIO, "read", FAILED),
        (errno.EACCES, "read", BAD_INPUT),
    ):
        assert code_of(IoError("path", 0, 1, number, operation), BAD_INPUT) == code


def test_a_terminal_shows_where_the_cure_of_an_error_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo_error(BudgetError("too small"))
    assert capsys.readouterr().err == "error: too small\n", "a program reads one line"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    echo_error(BudgetError("too small"))
    assert capsys.readouterr().err.endswith("\ncause and cure: docs/reference/errors.md#budgeterror\n")
    echo_error(OSError("of the system"))
    assert "cure" not in capsys.readouterr().err


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider, no summary is cut, and no wrapped line breaks a name at a dash or is a single word."""
    monkeypatch.setenv("COLUMNS", "80")
    for path in ((), ("bench",), *COMMANDS):
        lines = CliRunner().invoke(app, [*path, "--help"]).output.splitlines()
        assert max(map(len, lines)) <= 80, path
        assert not [line for line in lines[1:] if line.endswith("...") or re.search(r"\w-$", line)], path
        pairs = [(before, line.strip()) for before, line in pairwise(lines) if len(before) > 60]
        assert not [word for _, word in pairs if word and " " not in word and word[0] not in "-[{"], path


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
    for command in ("train", "generate"):
        assert "'int3' is not one of " in refused(command, "--dtype", "int3")
    assert refused("train", "--steps", "x").startswith("invalid value for '--steps' / '--max-steps': ")
    for *command, option in (
        ("plan", "--tbw"),
        ("plan", "--link"),
        ("plan", "--ram"),
        ("bench", "adam", "--numel"),
        ("bench", "swap", "--unit-size"),
        ("probe", "--size"),
        ("export", "run", "folder", "--max-shard-size"),
    ):
        assert refused(*command, option, "x").startswith(f"invalid value for '{option}': expected a ")
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("plan --parameters 1B --gpu 24GB --write /proc/out", "--write /proc/out"),
        ("tune . --config /proc/out", "--config /proc/out"),
        ("generate none --prompt x --output /proc/out", "--output /proc/out"),
        ("bench card . --output /proc/out", "--output /proc/out"),
        ("bench gpu . --device cpu --output /proc/out", "--output /proc/out"),
        ("replay . --steps 1..2 --certificate /proc/out", "--certificate /proc/out"),
        ("export . /proc/out", "OUT /proc/out"),
        ("export . /proc/out.gguf", "OUT /proc/out.gguf"),
        ("merge . /proc/out", "OUT /proc/out"),
        ("import . /proc/none/out", "OUT /proc/none/out"),
        ("convert /proc/1 --moments int8", "the new run beside /proc/1"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(arguments: str, named: str) -> None:
    """What there is to work on is not even looked at, and access() lets root write to /proc."""
    assert refused(*arguments.split()).startswith(f"{named} cannot be written: no file can be made in /proc (")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("train --text LONG", "--text"),
        ("train --model LONG --no-output", "--model"),
        ("train --output LONG", "--output"),
        ("train --no-output --log LONG", "--log"),
        ("train --no-output --nvme-path LONG/b", "--nvme-path"),
        ("inspect LONG", "PATH"),
        ("verify . --repair --model LONG", "--model"),
        ("export . LONG.gguf", "OUT"),
        ("generate LONG --prompt L", "MODEL"),
        ("generate . --prompt x --output LONG", "--output"),
        ("replay . --steps 1 --certificate LONG", "--certificate"),
        ("plan --parameters 1B --gpu 24GB --write a/LONG", "--write"),
        ("launch --hostfile LONG script.py", "--hostfile"),
    ],
)
def test_a_name_that_is_too_long_is_told_with_its_argument(
    arguments: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    words = arguments.replace("LONG", "L" * 300).split()
    if words[0] == "train":
        (tmp_path / "text.py").write_text("def double(number):\n    return 2 * number\n" * 50)
        words += () if "--text" in words else ("--text", "text.py")
        words += ("--device", "cpu", "--steps", "1", "--batch-size", "2", "--seq-len", "32")
    done = CliRunner().invoke(app, words, prog_name="offload")
    told = done.stderr.splitlines()[-1]
    assert done.exit_code == 2 and re.match(rf"error: (invalid value for )?{named}:? ", told), done.output
    assert "File name too long" in told


@pytest.mark.parametrize("path", [Path("proof"), Path("../proof"), Path("/mnt/proof")])
@pytest.mark.parametrize("below", ["", "/file.json"])
def test_a_full_drive_is_told_with_the_option_that_led_there(
    path: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (str(path), os.path.abspath(path)):
        echo_error(IoError(f"{name}{below}", 0, 0, errno.ENOSPC, "write"), {"--output": None, "--certificate": path})
        told = f"error: cannot write --certificate {name}{below}: [Errno 28] No space left on device\n"
        assert capsys.readouterr().err == told
    echo_error(IoError("/other/proof", 0, 0, errno.ENOSPC, "write"), {"--certificate": path})
    assert "--certificate" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["plan --parameters 1B --layers 4 --gpu 24GB --json", "--version", "inspect ."])
def test_output_that_finds_no_room_is_one_line(arguments: str) -> None:
    """Also where a print only fills the buffer, which Python writes at its end."""
    with Path("/dev/full").open("w") as full:
        process = warm_process.begin(["-m", "offload", *arguments.split()], stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate(240)
    assert process.returncode == 1
    assert errors == "error: cannot write the output: [Errno 28] No space left on device\n"


__all__ = ["run_folder"]


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
    assert in_options(told, Options(**wrong, config=Path("ds.json"))).startswith(begins), (
        "the option overrules the file"
    )
    assert in_options(told, Options(config=Path("ds.json"))) == told, "the value of a file is told by its key"


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
    model, more = nn.Linear(4, 1, bias=False), {"gradient_clipping": clip}
    engine = offload.initialize(model=model, config=CONFIG | ADAM | more)[0]
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


FILE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
    },
    "offload": {"run": "mine", "seed": 7, "resume": "auto", "durability": "step"},
}


def test_monitors_are_enabled_beside_the_settings_of_the_file() -> None:
    file = {**FILE, "csv_monitor": {"enabled": False, "output_path": "numbers"}}
    merged, lines = merge(file, Options(report_to=("csv", "wandb")))
    assert merged["csv_monitor"] == {"enabled": True, "output_path": "numbers"}
    assert merged["wandb"] == {"enabled": True} and "tensorboard" not in merged and lines == merge(file, Options())[1]
    with pytest.raises(ConfigError, match="--report-to is one of tensorboard, wandb, csv, not 'mlflow'"):
        merge(file, Options(report_to=("mlflow",)))


def scheduled(file: dict[str, Any] | None, **typed: Any) -> Any:
    """The schedule of a run of 100 steps, and what was said of it."""
    options = Options(**typed)
    content, lines = schedule(merge(file, options)[0], options, 100)
    return load_config(content).scheduler, lines


def test_a_schedule_that_asks_for_the_end_gets_the_steps() -> None:
    for params in ({}, {"params": {"total_num_steps": "auto"}}, {"params": None}):
        block, lines = scheduled({**FILE, "scheduler": {"type": "WarmupDecayLR", **params}})
        assert block.params == {"total_num_steps": 100} and lines == ()
    for content in (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}},
        {"type": "WarmupLR", "params": {}},
        {"type": "StepLR", "params": {"step_size": 1}},
    ):
        block, lines = scheduled({**FILE, "scheduler": content})
        assert (block.type, block.params, lines) == (content["type"], content["params"], ())
    for file in (FILE, {**FILE, "scheduler": None}, None):
        block, lines = scheduled(file)
        assert block.type == "WarmupCosineLR" and lines == (), "as that of a Trainer, where the file has none"
    assert schedule({"scheduler": 5}, Options(), 100)[0] == {"scheduler": 5}, "the config refuses it"


def rates(steps: int, file: dict[str, Any] | None = None, **typed: Any) -> list[float]:
    """The learning rates of a run's steps, in shares of the highest."""
    options = Options(lr=1.0, **typed)
    content = load_config(schedule(merge(file, options)[0], options, steps)[0])
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    if content.scheduler is None:
        return [1.0] * steps
    made = getattr(schedules, content.scheduler.type)(optimizer, **content.scheduler.params)
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return learning_rates


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_the_rate_rises_in_three_of_a_hundred_steps_and_never_is_nothing(kind: str) -> None:
    curve = rates(200, schedule=kind)
    assert min(curve) > 0 and max(curve) <= 1 and curve.index(max(curve)) in range(5, 9)
    assert curve[0] == pytest.approx(1 / 6)
    falls = {"cosine": (0.53, 0.001), "constant": (1, 1)}
    assert (curve[100], curve[-1]) == (pytest.approx(falls[kind][0], abs=0.02), pytest.approx(falls[kind][1], abs=0.01))
    assert rates(3, schedule=kind)[:2] == [1.0, 1.0], "a short run has no warm-up"
    long = rates(100, schedule=kind, warmup=50)
    assert long.index(max(long)) in range(50, 53)
    assert rates(100, schedule=kind, warmup=0.5) == long


def test_a_number_in_quotes_is_that_number() -> None:
    """Programs that turn YAML into JSON write "1e-3"; the weight decay decides about the groups of parameters."""
    quoted = {**FILE, "optimizer": {"type": "AdamW", "params": {"lr": "1e-3", "weight_decay": "0.1"}}}
    for typed in ({}, {"schedule": "constant", "warmup": 5}, {"lr": 1e-3}):
        assert merge(quoted, Options(**typed)) == merge(FILE, Options(**typed))
        assert scheduled(quoted, **typed) == scheduled(FILE, **typed)
    with pytest.raises(ConfigError, match=r"optimizer.params.lr should be a number, got \[1\]"):
        scheduled({"optimizer": {"params": {"lr": [1]}}}, schedule="constant", warmup=5)


def test_a_typed_schedule_overrules_the_files() -> None:
    file = {**FILE, "scheduler": {"type": "WarmupLR", "params": {}}}
    block, lines = scheduled(file, schedule="cosine", warmup=5)
    assert block.type == "WarmupCosineLR" and lines == ("--schedule and --warmup overrule scheduler.type WarmupLR",)
    assert scheduled(file, schedule="constant", warmup=0) == (
        None,
        ("--schedule and --warmup overrule scheduler.type WarmupLR",),
    )
    assert scheduled(FILE, warmup=5)[0].type == "WarmupCosineLR"


def test_biases_and_norms_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    model[1].weight.requires_grad_(False)
    decayed, plain = decay_groups(model.parameters(), 0.1)
    assert decayed["weight_decay"] == 0.1 and [*decayed["params"]] == [model[0].weight]
    assert plain["weight_decay"] == 0.0 and [*plain["params"]] == [model[1].bias, *model[2].parameters()]


def test_nothing_typed_leaves_the_file_as_it_is() -> None:
    before = copy.deepcopy(FILE)
    content, lines = merge(FILE, Options())
    assert FILE == before, "the file's content was changed in place"
    assert (content, lines) == (FILE, ())
    assert resolve_batch(load_config(content), 1) == (4, 8, 32)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ({"lr": 5e-4}, "--lr 0.0005 overrules optimizer.params.lr 0.001"),
        ({"dtype": "bf16"}, "--dtype bf16 overrules bf16.enabled false"),
        ({"offload_param": "none"}, "--offload-param none overrules zero_optimization.offload_param.device cpu"),
        (
            {"nvme_path": ("/a", "/b")},
            "--nvme-path /a /b overrules zero_optimization.offload_optimizer.nvme_path /fast",
        ),
        ({"run": "other"}, "--run other overrules offload.run mine"),
        ({"seed": 0}, "--seed 0 overrules offload.seed 7"),
        ({"resume": "must"}, "--resume must overrules offload.resume auto"),
        ({"durability": {"every": 3}}, '--durability {"every": 3} overrules offload.durability step'),
    ],
)
def test_a_typed_option_wins_with_one_line(typed: dict[str, Any], line: str) -> None:
    assert merge(FILE, Options(**typed))[1] == (line,)


@pytest.mark.parametrize(
    "typed", [{"lr": 1e-3}, {"dtype": "fp32"}, {"offload_param": "cpu"}, {"nvme_path": ("/fast",)}, {"seed": 7}]
)
def test_the_same_value_needs_no_line(typed: dict[str, Any]) -> None:
    content, lines = merge(FILE, Options(**typed))
    assert lines == ()
    assert load_config(content).drives == ("/fast",)


@pytest.mark.parametrize("block", ["fp16", "bfloat16"])
def test_dtype_stands_for_every_mode(block: str) -> None:
    content, lines = merge({block: {"enabled": True}}, Options(dtype="fp32"))
    assert lines == (f"--dtype fp32 overrules {block}.enabled true",)
    assert load_config(content).dtype == "fp32"
    assert load_config(merge({block: {"enabled": True}}, Options(dtype="bf16"))[0]).dtype == "bf16"
    content, lines = merge({block: {"enabled": True}}, Options(dtype="auto"))
    assert lines == (f"--dtype auto overrules {block}.enabled true",)
    assert chooses_dtype(content) and load_config(content).dtype == "fp32"


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_the_machine_chooses_the_dtype_where_that_is_asked_for(name: str) -> None:
    """Without a file, by the option, or by the file's "auto"; a file without a word is fp32, as in DeepSpeed."""
    assert chooses_dtype(merge({name: {"enabled": "auto"}}, Options())[0])
    assert chooses_dtype(merge({}, Options(dtype="auto"))[0])
    for file, typed in (({}, None), (FILE, None), ({name: {"enabled": "auto"}}, "bf16"), (None, "fp32")):
        assert not chooses_dtype(merge(file, Options(dtype=typed))[0])


@pytest.mark.parametrize(
    ("file", "typed", "batch"),
    [
        ({}, {}, (8, 1, 8)),
        ({"gradient_accumulation_steps": 4}, {}, (8, 4, 32)),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, {}, (8, 1, 8)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, {}, (2, 3, 6)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, {"batch_size": 4}, (4, 3, 12)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {"batch_size": 16}, (16, 2, 32)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {"accumulation": 2}, (4, 2, 8)),
        ({"train_batch_size": 32}, {"accumulation": 2}, (16, 2, 32)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 8}, {"batch_size": 2}, (2, 8, 16)),
        ({"train_micro_batch_size_per_gpu": 4}, {"batch_size": 16}, (16, 1, 16)),
        ({"gradient_accumulation_steps": 2.0}, {"batch_size": 3, "accumulation": 4}, (3, 4, 12)),
        (None, {"batch_size": 2, "accumulation": 4}, (2, 4, 8)),
    ],
)
def test_batch_size_is_a_micro_batch(file: dict[str, Any], typed: dict[str, int], batch: tuple[int, ...]) -> None:
    assert resolve_batch(load_config(merge(file, Options(**typed))[0]), 1) == batch


@pytest.mark.parametrize("lr", ["auto", None])
def test_a_learning_rate_is_always_there(lr: Any) -> None:
    content, lines = merge({"optimizer": {"type": "Adam", "params": {"lr": lr}}}, Options())
    assert content["optimizer"] == {"type": "Adam", "params": {"lr": 3e-4}} and lines == ()
    assert merge({"optimizer": None}, Options(lr=0.1))[0]["optimizer"] == {"type": "AdamW", "params": {"lr": 0.1}}


def test_the_default_path_counts_where_the_file_names_none() -> None:
    file = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    assert load_config(merge(file, Options())[0]).drives == ("./swap",)
    assert load_config(merge(FILE, Options())[0]).drives == ("/fast",)


@pytest.mark.parametrize("file", [{"optimizer": "AdamW"}, {"optimizer": {"params": [1]}}, {"offload": 3}])
def test_a_value_that_is_no_block_is_an_error(file: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a block of keys, got"):
        merge(file, Options(run="x"))


def test_a_stage_may_be_a_switch() -> None:
    content, _ = merge({"zero_optimization": True}, Options(offload_param="cpu"))
    assert load_config(content).zero_optimization.stage == 1


def test_the_tier_of_activations_is_an_option_and_a_key() -> None:
    assert merge(None, Options(activations="cpu"))[0]["offload"]["activations"] == "cpu"
    file = {"offload": {"activations": "nvme"}}
    assert merge(file, Options())[0]["offload"]["activations"] == "nvme"
    content, lines = merge(file, Options(activations="auto"))
    assert content["offload"]["activations"] == "auto" and any("--activations" in line for line in lines)


def test_the_order_of_micro_batches_overrules_the_file_with_a_line() -> None:
    file = {"offload": {"schedule": "micro_batch_major"}}
    content, lines = merge(file, Options(accumulation_schedule="layer_major"))
    assert content["offload"]["schedule"] == "layer_major"
    assert "--accumulation-schedule layer_major overrules offload.schedule micro_batch_major" in lines
    assert "schedule" not in merge(None, Options())[0]["offload"]
    result = CliRunner().invoke(app, ["train", "--accumulation-schedule", "layers"])
    assert result.exit_code == 2 and re.search("layer.major.*micro.batch.major", result.output)
