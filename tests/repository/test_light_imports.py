"""`import offload`, and the commands that compute nothing, load neither torch nor anything else that takes long.

Which modules are loaded is compared, in a process of its own; how long that takes is not.
"""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.support import models
from tests.support.oracle import start, train_step

HEAVY = ("torch", "numpy", "psutil", "rich", "safetensors", "transformers", "accelerate", "matplotlib", "pyarrow")
"""Not pydantic, by which typer itself reads the options of a command; that the package does without is seen below."""

_LOADED = f"""
import json, sys
def loaded():
    return [name for name in {HEAVY} if name in sys.modules]
"""
_COMMANDS = f"""{_LOADED}
import contextlib, io
from offload.cli.main import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["offload", *arguments]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as exit:
            code = exit.code
    told.append([code, said.getvalue(), loaded()])
print(json.dumps(told))
"""


def python(code: str, *arguments: str) -> Any:
    """What `code` prints, as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def commands(*each: tuple[str, ...]) -> dict[tuple[str, ...], tuple[int, str, list[str]]]:
    """The exit code of each command, what it said, and what is loaded after it; one after the other."""
    return dict(zip(each, map(tuple, python(_COMMANDS, json.dumps(each))), strict=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` on a drive, with a log, and a folder `saved` with a checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, ("nvme", "nvme"), folder / "drive", run="run", log=str(folder / "log.jsonl"))
    train_step(engine, job, 0)
    engine.save_checkpoint(folder / "saved")
    engine.destroy()
    return folder


# -- the package --------------------------------------------------------------------------------------


def test_the_table_what_a_type_checker_reads_and_all_have_the_same_names() -> None:
    source = ast.parse(Path(offload.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    read = {
        (alias.asname or alias.name): node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = {"checkpointing", "losses", "schedules"}
    assert read == {**offload._MODULE_OF, **dict.fromkeys(parts, "offload")}
    assert sorted([*read, "__version__"]) == sorted(offload.__all__) and parts <= offload._PARTS.keys()


def test_a_public_name_is_that_of_its_module() -> None:
    for name in offload.__all__:
        value = getattr(offload, name)
        assert name in dir(offload) and getattr(offload, name) is value, name
        if name in offload._MODULE_OF:
            assert value is getattr(importlib.import_module(offload._MODULE_OF[name]), name), name
            assert pickle.loads(pickle.dumps(value)) is value, name


def test_the_package_is_light_until_it_is_used() -> None:
    code = f"""{_LOADED}
import offload, offload.cli.main
before = [*loaded(), *(name for name in ["pydantic"] if name in sys.modules)]
dir(offload), offload.__version__, offload.errors.ConfigError, offload.ConfigError, offload.aio.IoQueue
from offload import StoreError, sizes
light = loaded()
offload.engine.optimizer.Optimizer, offload.swapper.prefetch.PrefetchStats, offload.planner.memory
from offload import *
schedules.WarmupLR, offload.config.load_config, offload.kernels.adamw
print(json.dumps([before, light, initialize is offload.engine.setup.initialize]))
"""
    assert python(code) == [[], [], True]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'offload' has no attribute 'initialise'"):
        offload.initialise  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'initialise' from 'offload'"):
        exec("from offload import initialise")
    assert not hasattr(offload, "info_of")


# -- the commands -------------------------------------------------------------------------------------


def test_help_loads_nothing() -> None:
    of = (
        "info",
        "probe",
        "plan",
        "check-config",
        "tune",
        "train",
        "inspect",
        "verify",
        "export",
        "rm",
        "report",
        "run",
    )
    asked = [(), *((each,) for each in of), ("bench",), ("bench", "io"), ("bench", "adam"), ("bench", "swap")]
    for command, (code, output, found) in commands(*((*each, "--help") for each in asked), ("--version",)).items():
        assert (code, found) == (0, []), (command, output)
        assert "Usage: " in output or output.strip() == offload.__version__


def test_an_option_that_cannot_be_is_refused_before_anything_is_loaded() -> None:
    wrong = [
        ("train", "--resume", "perhaps"),
        ("train", "--offload-param", "disk"),
        ("train", "--steps", "many"),
        ("train", "--no-such-option"),
        ("export", "run", "out", "--dtype", "int8"),
    ]
    for command, (code, output, found) in commands(*wrong).items():
        option = next(word for word in command if word.startswith("--"))
        assert (code, found) == (2, []) and option in output


def test_looking_at_what_lies_there_needs_no_torch(made: Path) -> None:
    run, saved, log = str(made / "drive" / "run"), str(made / "saved"), str(made / "log.jsonl")
    scripts = [("inspect", each, "--json") for each in (run, str(made / "drive"), saved)]
    config = made / "ds.json"
    config.write_text('{"bf16": {"enabled": true}}')
    light = (*scripts, ("report", log, "--json"), ("report", log), ("check-config", str(config)))
    found = commands(*light, ("inspect", run), ("verify", run))
    assert [code for code, _, _ in found.values()] == [0] * len(found), found
    for _, _, loaded in list(found.values())[: len(light)]:
        assert loaded == []
    assert [loaded for _, _, loaded in list(found.values())[len(light) :]] == [["rich"], ["rich"]]
    about = json.loads(found[scripts[0]][1])
    assert about["model"]["class"] == "GPT2LMHeadModel" and about["ranks"][0]["commits"][0]["blob"] == "right"
    assert about["ranks"][0]["written_bytes"][0] > 0
    (checkpoint,) = json.loads(found[scripts[2]][1])["checkpoints"]
    assert checkpoint["epoch"] == 1 and not checkpoint["damaged"]
    assert "intact" in found[("verify", run)][1]


def test_a_plan_of_a_llama_preset_or_of_a_count_needs_no_transformers() -> None:
    machine = ("--gpu", "24GB", "--ram", "64GB", "--drive", "3GB/s,3GB/s")
    counts = ("--parameters", "1B", "--layers", "4")
    each = [("plan", *model, *machine) for model in (("--model", "llama-1b"), counts)]
    for code, output, loaded in commands(*each).values():
        assert code == 0 and "it fits" in output, output
        assert sorted(loaded) == ["numpy", "psutil", "rich", "torch"]


def test_a_run_is_deleted_without_torch(made: Path) -> None:
    run = made / "drive" / "run"
    command = ("rm", str(run), "--yes")
    assert commands(command)[command][::2] == (0, []) and not run.exists()
