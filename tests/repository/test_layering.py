"""Imports go one way at every level, so that a room can be read without the rooms above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "offload"

GROUND = ("errors", "interrupts", "sizes", "notices", "states", "timeline", "torch_internals")
"""Modules that every room may import. Each of them may import those before it."""

MAY_IMPORT = {
    "aio": "",
    "config": "",
    "launch": "",
    "presets": "",
    "report": "",
    "deepnvme": "aio",
    "fileio": "aio",
    "kernels": "fileio",
    "precision": "fileio",
    "schedules": "config",
    "swapper": "aio fileio",
    "hardware": "aio fileio kernels swapper",
    "layout": "config kernels swapper",
    "checkpointing": "config",
    "engine": "aio checkpointing config fileio hardware kernels launch layout precision schedules swapper",
    "planner": "aio config hardware layout precision presets report swapper",
    "losses": "engine",
    "__init__": "checkpointing engine losses planner schedules",
    "finetune": "config engine fileio hardware launch losses planner presets swapper",
    "bench": "__init__ aio config fileio finetune hardware kernels layout planner precision presets swapper",
    "offline": "config engine finetune losses presets",
    "hf": "config engine losses",
    "integrations": "config engine",
    "runs": "aio engine fileio layout swapper",
    "deepspeed": "__init__ aio checkpointing config deepnvme engine fileio kernels launch planner runs schedules "
    "swapper",
    "cli": "__init__ aio bench config deepspeed fileio finetune hardware launch offline planner presets report runs "
    "swapper",
    "__main__": "cli",
}
"""For each room the rooms that it may import, lowest first. A row names only rows above it."""

WITHIN = {
    "swapper": {
        "access_order": "",
        "memory": "",
        "modes": "",
        "residency": "",
        "store": "",
        "in_place": "store",
        "chunked_upload": "in_place memory",
        "policy": "access_order memory",
        "unit_table": "access_order in_place memory residency",
        "device_cache": "chunked_upload memory policy residency unit_table",
        "host_cache": "in_place memory policy residency store unit_table",
        "prefetch": "device_cache host_cache memory policy residency unit_table",
        "speculative_weights": "host_cache memory policy residency unit_table",
        "weight_updates": "device_cache host_cache memory prefetch residency speculative_weights unit_table",
        "ranks": "device_cache policy prefetch residency unit_table",
        "pager": "access_order device_cache host_cache in_place memory policy prefetch ranks residency store "
        "unit_table weight_updates",
    },
    "engine": {
        "callbacks": "",
        "exit_status": "",
        "keywords": "",
        "activations": "",
        "metrics": "",
        "distributed": "callbacks",
        "sequence": "distributed",
        "gradients": "callbacks distributed metrics",
        "schedule": "callbacks gradients",
        "params": "activations callbacks distributed gradients keywords metrics schedule",
        "optim": "callbacks distributed gradients params",
        "training": "activations distributed gradients metrics optim params schedule sequence",
        "checkpoint": "distributed params training",
        "memory": "distributed training",
        "param_values": "",
        "param_access": "callbacks distributed param_values params training",
        "pipeline": "distributed param_access training",
        "stack_access": "param_access param_values params",
        "tiles": "param_access params",
        "shutdown": "exit_status training",
        "step": "callbacks gradients metrics optim training",
        "model_io": "checkpoint distributed keywords params training",
        "reshard": "checkpoint distributed model_io training",
        "optimizer_state_dict": "param_access params training",
        "tensor_api": "param_access params",
        "core": "callbacks checkpoint gradients memory model_io optim optimizer_state_dict pipeline schedule shutdown "
        "stack_access step training",
        "api": "checkpoint core distributed keywords memory model_io pipeline training",
        "engine": "api keywords training",
        "setup": "activations callbacks checkpoint core distributed engine gradients keywords metrics optim params "
        "pipeline reshard schedule sequence tiles training",
        "inference": "activations api core metrics model_io optim params setup",
    },
    "planner": {
        "memory": "",
        "model_shape": "",
        "published": "",
        "simulation": "",
        "hardware": "published",
        "activations": "hardware memory model_shape",
        "deepspeed_estimates": "memory",
        "step_time": "activations hardware memory model_shape simulation",
        "measure_model": "activations hardware model_shape step_time",
        "recommend": "activations hardware memory model_shape step_time",
        "reach": "activations hardware memory model_shape recommend",
        "config_file": "activations recommend",
        "predict_run": "activations hardware model_shape recommend",
        "advice": "recommend",
        "report": "activations advice published reach recommend step_time",
        "request": "activations hardware measure_model memory model_shape published reach recommend",
        "guide_table": "activations hardware memory model_shape published recommend report",
    },
    "cli": {
        "console": "",
        "options": "",
        "progress": "",
        "signals": "",
        "commands": "console options progress signals",
        "main": "commands console signals",
    },
    "launch": {
        "hosts": "",
        "environment": "hosts",
        "options": "environment hosts",
        "commands": "environment hosts options",
        "processes": "commands",
    },
    "config": {
        "blocks": "",
        "elsewhere": "blocks",
        "schema": "blocks elsewhere",
        "documentation": "blocks schema",
        "explain": "blocks schema",
        "contradictions": "schema",
        "load": "blocks contradictions explain schema",
        "edit": "load",
        "batch": "blocks load schema",
        "script_values": "blocks load",
        "__main__": "documentation",
    },
}
"""The same for the modules and folders of a room that has some; `__init__` of a room may import all of it."""

NEVER = {
    "errors": ("torch", "numpy"),
    "sizes": ("torch", "numpy"),
    "config": ("torch", "numpy"),
    "aio": ("torch", "numpy"),
    "swapper": ("torch.nn", "torch.distributed"),
}
"""Packages of others that a room never imports."""

OF_HF = {"transformers", "accelerate", "peft", "trl"}
"""Packages that `hf` alone imports at the top of a file."""

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def _imports(source: str) -> set[str]:
    """Returns dotted names of all that is imported, at any depth of the file, and of the parts of torch it uses."""
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


def _is(folder: Path, name: str) -> bool:
    """Returns whether a folder of the package has a module or a folder of this name."""
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


@cache
def _ours(source: str) -> list[tuple[str, ...]]:
    """Returns the parts of each of our modules that a file imports; ("__init__",) for the package itself."""
    whole = any(
        isinstance(node, ast.Import) and any(alias.name == "offload" for alias in node.names)
        for node in ast.walk(ast.parse(source))
    )
    found: list[tuple[str, ...]] = []
    for name in sorted(_imports(source)):
        first, *rest = name.split(".")
        if first != "offload" or (not rest and not whole):
            continue  # `from offload import kernels` names the package and a room; the room is what counts
        found.append(tuple(rest) if rest and _is(PACKAGE, rest[0]) else ("__init__",))
    return found


def broken(module: str, source: str) -> list[str]:
    """Returns the imports of a file that its place forbids.

    Args:
        module: its dotted name inside of the package, such as "engine.optim.lamb".
        source: its text.
    """
    room, *inner = module.split(".")
    found = []
    for parts in _ours(source):
        if parts[0] != room:
            if parts[0] not in _allowed(room):
                found.append(".".join(parts))
        elif room in WITHIN and inner and inner[0] != "__init__" and len(parts) > 1:
            other = parts[1]
            if _is(PACKAGE / room, other) and other != inner[0] and other not in WITHIN[room][inner[0]].split():
                found.append(".".join(parts))
    for name in sorted(_imports(source)):
        strange = name.split(".")[0] in ("", "tests", "bench")
        if strange or any(f"{name}.".startswith(f"{each}.") for each in NEVER.get(room, ())):
            found.append(name)
    return list(dict.fromkeys(found))


def _allowed(room: str) -> set[str]:
    if room in GROUND:
        return set(GROUND[: GROUND.index(room)])
    return {*GROUND, *MAY_IMPORT[room].split()}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_every_room_is_listed() -> None:
    assert {_module(path).split(".")[0] for path in FILES} == {*GROUND, *MAY_IMPORT}
    for room, rows in WITHIN.items():
        there = {_module(path).split(".")[1] for path in FILES if path.is_relative_to(PACKAGE / room)}
        assert there - {"__init__"} == set(rows), room


@pytest.mark.parametrize("rows", [MAY_IMPORT, *WITHIN.values()], ids=["rooms", *WITHIN])
def test_a_row_names_only_rows_above_it(rows: dict[str, str]) -> None:
    """So the tables themselves allow no circle."""
    order = list(rows)
    assert [(row, name) for row in order for name in rows[row].split() if name not in order[: order.index(row)]] == []


def test_imports_go_one_way() -> None:
    sources = {_module(path): path.read_text() for path in FILES}
    assert {module: found for module, source in sources.items() if (found := broken(module, source))} == {}


def test_no_row_allows_what_nobody_imports() -> None:
    """A row that allows more than there is would let an arrow come back unseen."""
    used: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    inside: dict[str, dict[str, set[str]]] = {room: {row: set() for row in rows} for room, rows in WITHIN.items()}
    for path in FILES:
        room, *inner = _module(path).split(".")
        for parts in _ours(path.read_text()):
            if parts[0] == room:
                if room in WITHIN and len(parts) > 1 and inner[0] in inside[room]:
                    inside[room][inner[0]].add(parts[1])
            elif room in used:
                used[room].add(parts[0])
    spare = [(room, name) for room, row in MAY_IMPORT.items() for name in row.split() if name not in used[room]]
    for room, rows in WITHIN.items():
        spare += [
            (f"{room}/{r}", name) for r, row in rows.items() for name in row.split() if name not in inside[room][r]
        ]
    assert spare == []


def test_hf_alone_cannot_be_imported_without_hugging_face() -> None:
    """Others import what they need of it where they need it."""
    assert [_module(path) for path in FILES if _at_the_top(path) & OF_HF and not _module(path).startswith("hf.")] == []


def _at_the_top(path: Path) -> set[str]:
    """Returns the packages that a file imports when it is imported itself."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for node in top for name in _imports(ast.unparse(node))}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("aio.queue", "import torch", ["torch"]),
        ("aio.queue", "def f():\n    from numpy import array", ["numpy", "numpy.array"]),
        ("aio.queue", "from offload.swapper import pager", ["swapper", "swapper.pager"]),
        ("kernels.update", "from offload import engine", ["engine"]),
        ("swapper.policy", "from torch import nn", ["torch.nn"]),
        ("swapper.policy", "import torch\nx = torch.distributed.get_rank()", ["torch.distributed"]),
        ("swapper.policy", "from offload.swapper import pager", ["swapper.pager"]),
        ("swapper.pager", "from offload.swapper import policy", []),
        ("engine.core", "import offload", ["__init__"]),
        ("engine.core", "from offload import kernels\nfrom offload.swapper.memory.device_arena import x", []),
        ("engine.core", "from offload import initialize", ["__init__"]),
        ("engine.core", "from . import step", [".", "..step"]),
        ("engine.optim.lamb", "from offload.engine import core", ["engine.core"]),
        ("engine.optim.lamb", "from offload.engine.optim import fused", []),
        ("sizes", "from offload.timeline import now", ["timeline", "timeline.now"]),
        ("cli.main", "from tests import models", ["tests", "tests.models"]),
        ("config.load", "import torchvision, json", []),
    ],
)
def test_what_goes_up_is_noticed(module: str, source: str, expected: list[str]) -> None:
    assert broken(module, source) == expected


def test_importing_offload_is_light() -> None:
    """The package neither needs nor loads what belongs to an extra or to the command line."""
    extras = ("transformers", "accelerate", "matplotlib", "typer", "rich")
    code = f"import offload, sys; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
