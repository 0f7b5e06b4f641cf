"""Imports go one way, layer by layer; private names of torch are in one package, and what is light stays light."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import offload
from tests import ROOT
from tests.support import models
from tests.support.oracle import start, train_step

PACKAGE = ROOT / "offload"

CIRCLE = ("engine", "distributed", "checkpoint", "model_io")
"""The core of the engine, whose folders know each other, and none of the features."""
FEATURES = ("activations", "experts", "optimizers", "parallel", "passes", "quantized", "vocabulary")
"""Features of the engine, each behind a seam of the core."""
COMPOSITION = ("engine.plan", "engine.build_optimizer", "engine.assembly", "engine.setup")
"""Modules that choose features and put an engine together."""

LAYERS = (
    *("errors", "records", "interrupts", "sizes", "notices", "states", "threads", "timeline", "torch_internals"),
    "provenance",
    *("aio", "config", "options", "launch", "presets", "prices", "report", "deepnvme"),
    *("fileio", "kernels", "precision", "schedules", "checkpointing"),
    *("swapper", "hardware", "layout", "metrics"),
    "quantized.paged_tensor",
    *CIRCLE,
    *FEATURES,
    *COMPOSITION,
    *("hub", "planner", "losses", "dtype_choice", "inference_engine", "__init__"),
    *("finetune", "bench", "offline", "hf", "integrations", "runs", "deepspeed"),
    *("cli", "testing", "__main__"),
)
"""Modules and folders of the package. Each may import only those before it, and those of its circle.

A module with a dot is a layer apart from its folder.
"""

NEVER = {
    "errors": ("torch", "numpy"),
    "sizes": ("torch", "numpy"),
    "config": ("torch", "numpy"),
    "aio": ("torch", "numpy"),
    "swapper": ("torch.nn", "torch.distributed"),
}
"""Packages of others that a layer never imports."""

OF_HF = {"transformers", "accelerate", "peft", "trl"}
"""Packages that `hf` alone imports at the top of a file."""

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Returns the names of all that a file imports, and of what it imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return imported_names(tree), {name for node in top for name in imported_names(node)}


def imported_names(tree: ast.AST) -> set[str]:
    """Returns dotted names of all that is imported, at any depth of the tree, and of the parts of torch it uses."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            # `import offload` is the package itself: its `__init__` imports layers above most others.
            names |= {"offload.__init__" if alias.name == "offload" else alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
    return names


def layer_of(name: str) -> str:
    """Returns the layer of a module."""
    parts = name.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LAYERS else parts[0]


def forbidden_imports(module: str, names: set[str]) -> list[str]:
    """Returns the imports of a file that its layer forbids.

    Args:
        module: The file's dotted name within the package, such as "engine.hooks".
        names: What the file imports.
    """
    layer = layer_of(module)
    last = CIRCLE[-1] if layer in CIRCLE else layer
    lower = LAYERS[: LAYERS.index(last) + 1]
    forbidden = []
    for name in sorted(names):
        package, _, rest = name.partition(".")
        if package == "offload" and rest:
            # A name that is no layer is a public name, which the package's `__init__` gives.
            target = layer_of(rest) if layer_of(rest) in LAYERS else "__init__"
            wrong = target not in lower
        else:
            wrong = package in ("", "tests", "bench")
            wrong |= any(f"{name}.".startswith(f"{banned}.") for banned in NEVER.get(layer, ()))
        if wrong:
            forbidden.append(name)
    return forbidden


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_every_layer_is_listed_once() -> None:
    assert sorted(LAYERS) == sorted({layer_of(module_name(path)) for path in FILES})


def test_imports_go_one_way() -> None:
    modules = {module_name(path): forbidden_imports(module_name(path), imports_of(path)[0]) for path in FILES}
    assert {module: names for module, names in modules.items() if names} == {}


def test_hf_alone_cannot_be_imported_without_hugging_face() -> None:
    """Others import what they need of it where they need it."""
    modules = [module_name(path) for path in FILES if {name.partition(".")[0] for name in imports_of(path)[1]} & OF_HF]
    assert [module for module in modules if not module.startswith("hf.")] == []


TORCH_PACKAGE = Path(offload.__file__).parent
TORCH_FILES = sorted(path for path in TORCH_PACKAGE.rglob("*.py") if path.parent.name != "torch_internals")
_SUSPECTED = re.compile(r"\btorch\b[\w.]*\._[a-zA-Z]|\bfrom torch\b[^\n]*\bimport\b(?:[^\n(]*|\s*\([^)]*)\b_[a-zA-Z]")
"""Of a text in which a private name of torch may be: the others need not be parsed."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """What is imported from torch, or reached through the name `torch`, by a path with a leading underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            paths = [each.name for each in node.names if each.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute) and _begins_with_torch(node):
            paths = [ast.unparse(node)]
        else:
            continue
        yield from (path for path in paths if any(_is_private(part) for part in path.split(".")))


def _begins_with_torch(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def test_no_other_file_uses_them() -> None:
    suspected = [path for path in TORCH_FILES if _SUSPECTED.search(path.read_text())]
    assert {path: names for path in suspected if (names := [*private_names(ast.parse(path.read_text()))])} == {}


HEAVY = ("torch", "numpy", "psutil", "rich", "safetensors", "transformers", "accelerate", "matplotlib", "pyarrow")
"""Not pydantic, by which typer itself reads the options of a command; that the package does without is seen below."""

_PROGRAM = f"""
import contextlib, io, json, sys
def loaded():
    return [name for name in {HEAVY} if name in sys.modules]

import offload, offload.cli.main
before = [*loaded(), *(name for name in ["pydantic"] if name in sys.modules)]
dir(offload), offload.__version__, offload.errors.ConfigError, offload.ConfigError, offload.aio.IoQueue
from offload import StoreError, sizes
package = [before, loaded()]

commands = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["offload", *arguments]
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            offload.cli.main.main()
        except SystemExit as exit:
            code = exit.code
    commands.append([code, output.getvalue(), loaded()])

from offload import *
from offload.engine import setup
schedules.WarmupLR, offload.config.load_config, offload.kernels.adamw
print(json.dumps([package, commands, initialize is setup.initialize]))
"""
"""Uses the package, then the commands of its argument, one after the other: one import of torch for all of them."""


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


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'offload' has no attribute 'initialise'"):
        offload.initialise  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'initialise' from 'offload'"):
        exec("from offload import initialise")
    assert not hasattr(offload, "info_of")


# -- what a process loads -----------------------------------------------------------------------------

HELP = (
    *(
        "info",
        "doctor",
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
    ),
    *("bench", "bench io", "bench adam", "bench swap", "bench card"),
)


def test_the_package_and_its_commands_load_what_they_use_alone(made: Path) -> None:
    run, saved, log = str(made / "drive" / "run"), str(made / "saved"), str(made / "log.jsonl")
    config = made / "ds.json"
    config.write_text('{"bf16": {"enabled": true}}')
    helps = [["--version"], ["--help"], *([*command.split(), "--help"] for command in HELP)]
    looks = [["inspect", path, "--json"] for path in (run, str(made / "drive"), saved)]
    looks += [["report", log, "--json"], ["report", log], ["check-config", str(config)]]
    tables = [["inspect", run], ["verify", run]]
    machine = ("--gpu", "24GB", "--ram", "64GB", "--drive", "3GB/s,3GB/s")
    plans = [["plan", "--model", "llama-1b", *machine], ["plan", "--parameters", "1B", "--layers", "4", *machine]]
    removal = [["rm", run, "--yes"]]
    asked = [*helps, *looks, *tables, *removal, *plans]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    package, imported, same = json.loads(done.stdout)
    assert package == [[], []] and same, "the package is light until a name of it is used"
    assert [(command, output) for command, (code, output, _) in zip(asked, imported, strict=True) if code] == []
    outputs = {tuple(command): output for command, (_, output, _) in zip(asked, imported, strict=True)}
    loaded = [modules for _, _, modules in imported]
    assert loaded[: len(helps) + len(looks)] == [[]] * (len(helps) + len(looks)), "neither help nor a look needs torch"
    assert loaded[len(helps) + len(looks) : -len(plans)] == [["rich"]] * (len(tables) + len(removal))
    for modules in loaded[-len(plans) :]:
        assert sorted(modules) == ["numpy", "psutil", "rich", "torch"], "these plans need no transformers"
    assert outputs["--version",].strip() == offload.__version__
    assert all("Usage: " in outputs[tuple(command)] for command in helps[1:])
    assert all(outputs[tuple(command)].startswith("fits ") for command in plans)
    about = json.loads(outputs[tuple(looks[0])])
    assert about["model"]["class"] == "GPT2LMHeadModel" and about["ranks"][0]["commits"][0]["blob"] == "right"
    assert about["ranks"][0]["written_bytes"][0] > 0
    (checkpoint,) = json.loads(outputs[tuple(looks[2])])["checkpoints"]
    assert checkpoint["epoch"] == 1 and not checkpoint["damaged"]
    assert "intact" in outputs["verify", run] and not Path(run).exists()
