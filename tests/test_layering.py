"""Imports go one way, so that a room can be read without the rooms above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "offload"

# Each room, and the modules of ours that it may import beside its own.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "sizes": {"errors"},
    "notices": set(),
    "config": {"errors", "sizes"},
    "fileio": set(),
    "torch_internals": set(),
    "aio": {"errors", "sizes"},
    "kernels": {"errors", "sizes"},
    "swapper": {"errors", "sizes", "notices", "fileio", "aio"},
    "engine": {
        *("errors", "sizes", "notices", "fileio", "torch_internals"),
        *("config", "aio", "kernels", "swapper", "precision"),
    },
    "schedules": {"engine"},
    "precision": {"fileio"},
    "presets": {"errors"},
    "deepnvme": {"errors", "sizes", "aio"},
    "finetune": {
        *("errors", "sizes", "fileio", "config", "engine", "swapper", "presets"),
        *("planner", "probe"),
    },
    "machine": {"sizes", "kernels", "engine", "swapper"},
    "info": {"errors", "sizes", "aio", "machine"},
    "bench": {"errors", "sizes", "aio", "kernels", "<root>"},
    "cli_progress": set(),
    "cli_signals": set(),
    "probe": {"errors", "sizes", "fileio", "aio", "kernels", "swapper", "bench", "info"},
    "report": {"errors", "sizes"},
    "planner": {
        "errors",
        "torch_internals",
        "sizes",
        "config",
        "aio",
        "engine",
        "swapper",
        "presets",
        "precision",
        "probe",
        "info",
        "report",
    },
    "tune": {"errors", "sizes", "fileio", "config", "aio", "bench"},
    "hf": {"errors", "sizes", "config", "engine"},
    "inspection": {"errors", "engine", "swapper"},
    "verification": {"errors", "sizes", "aio", "engine", "swapper"},
    "export": {"errors", "sizes", "aio", "kernels", "engine", "swapper"},
    "cli_inspect": {"inspection", "cli_inspect_tables", "cli_console"},
    "cli_inspect_tables": {"sizes"},
    "cli_store": {"errors", "sizes", "aio", "swapper", "verification", "export", "cli_console", "cli_signals"},
    "cli_console": {"errors"},
    "cli_bench": {"errors", "sizes", "bench", "info", "cli_console", "cli_options", "cli_signals"},
    "cli_machine": {
        *("errors", "sizes", "config", "aio", "info", "tune"),
        *("cli_bench", "cli_console", "cli_signals", "<root>"),
    },
    "cli_summary": {"sizes", "report"},
    "cli_report": {"errors", "sizes", "fileio", "report", "cli_console", "cli_signals"},
    "cli_run": {
        "errors",
        "sizes",
        "config",
        "engine",
        "finetune",
        "cli_console",
        "cli_signals",
        "cli_summary",
        "cli_train_progress",
    },
    "cli_train_progress": {"sizes", "engine"},
    "cli_options": set(),
    "cli_train": {"finetune", "cli_console", "cli_options", "cli_run"},
    "cli": {"cli_console", "cli_machine", "cli_inspect", "cli_store", "cli_plan", "cli_report", "cli_train", "<root>"},
    "cli_plan": {
        *("errors", "sizes", "config", "probe", "planner", "presets", "finetune"),
        *("cli_console", "cli_options", "cli_progress", "cli_signals"),
    },
    "__init__": {"errors", "engine", "schedules", "planner"},
    "__main__": {"cli"},
}
NEVER: dict[str, set[str]] = {
    "errors": {"torch", "numpy"},
    "sizes": {"torch", "numpy"},
    "config": {"torch", "numpy"},
    "aio": {"torch", "numpy"},
    "swapper": {"torch.nn", "torch.distributed"},
}


def _imports(source: str) -> set[str]:
    """Dotted names of all that is imported, at any depth of the file, and of the parts of torch that are used."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            found.add(f"torch.{node.attr}")
    return found


def _broken(room: str, source: str) -> list[str]:
    """The imports of `source` that its room must not have."""
    rooms = {path.stem for path in PACKAGE.iterdir()}
    broken = []
    for name in sorted(_imports(source)):
        first, _, rest = name.partition(".")
        if first == "offload":
            other = rest.partition(".")[0]
            # `from offload import kernels` names the root and a room; the room is what counts.
            by_name = name == "offload" and not _takes_the_root(source)
            other = other if other in rooms else "<root>"
            if not by_name and other not in MAY_IMPORT[room] | {room}:
                broken.append(name)
        elif first in ("", "tests", "bench") or any(f"{name}.".startswith(f"{n}.") for n in NEVER.get(room, ())):
            broken.append(name)
    return broken


def _takes_the_root(source: str) -> bool:
    return any(
        isinstance(node, ast.Import) and any(alias.name == "offload" for alias in node.names)
        for node in ast.walk(ast.parse(source))
    )


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


PURE = {
    *("units", "layout", "homes", "tiles", "device_need", "placement", "memory_plan", "config_request", "forecast"),
    *("description", "masters", "packed", "pieces"),
}
"""Modules of the engine that decide from plain values; the planner may import these alone."""

FILES = sorted(PACKAGE.rglob("*.py"))
OF_HF = {"transformers", "accelerate", "peft", "trl"}
"""What `hf` alone imports at the top of a file."""


def test_every_room_is_listed() -> None:
    assert {_room(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    assert _broken(_room(path), path.read_text()) == []


@pytest.mark.parametrize(
    "path", [path for path in FILES if _room(path) == "planner" or (_room(path) == "engine" and path.stem in PURE)]
)
def test_what_decides_memory_knows_pure_modules_of_the_engine_alone(path: Path) -> None:
    """So a run and the planner decide by the same functions, and these by plain values."""
    names = [name.split(".") for name in _imports(path.read_text()) if name.startswith("offload.engine.")]
    assert {name[2] for name in names} <= PURE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_hf_alone_cannot_be_imported_without_hugging_face(path: Path) -> None:
    """Others import what they need of it where they need it."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {name.partition(".")[0] for node in top for name in _imports(ast.unparse(node))} & OF_HF
    assert not found or _room(path) == "hf"


@pytest.mark.parametrize(
    ("room", "source", "broken"),
    [
        ("aio", "import torch", ["torch"]),
        ("aio", "def f():\n    from numpy import array", ["numpy", "numpy.array"]),
        ("aio", "from offload.swapper.store import Store", ["offload.swapper.store", "offload.swapper.store.Store"]),
        ("kernels", "from offload import engine", ["offload.engine"]),
        ("swapper", "from torch import nn", ["torch.nn"]),
        ("swapper", "import torch\nx = torch.distributed.get_rank()", ["torch.distributed"]),
        ("engine", "import offload", ["offload"]),
        ("engine", "from offload import kernels\nfrom offload.swapper.memory.device_arena import x", []),
        ("engine", "from offload import initialize", ["offload.initialize"]),
        ("engine", "from . import hooks", [".", "..hooks"]),
        ("cli", "from tests import models", ["tests", "tests.models"]),
        ("config", "import torchvision, json", []),
    ],
)
def test_what_goes_up_is_noticed(room: str, source: str, broken: list[str]) -> None:
    assert _broken(room, source) == broken


def test_import_is_light() -> None:
    """The package neither needs nor loads what belongs to an extra or to the command line."""
    extras = ("transformers", "accelerate", "matplotlib", "typer", "rich")
    code = f"import offload, sys; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
