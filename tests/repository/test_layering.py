"""Imports go one way, layer by layer, so that a layer can be read without those above it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "offload"

CIRCLE = ("engine", "distributed", "checkpoint", "model_io", "activations", "optimizers", "parallel", "passes")
"""The engine and its features, which know each other."""

LAYERS = (
    *("errors", "records", "interrupts", "sizes", "notices", "states", "timeline", "torch_internals", "provenance"),
    *("aio", "config", "launch", "presets", "report", "deepnvme"),
    *("fileio", "kernels", "precision", "schedules", "checkpointing"),
    *("swapper", "hardware", "layout", "metrics"),
    *CIRCLE,
    *("planner", "losses", "dtype_choice", "inference_engine", "__init__"),
    *("finetune", "bench", "offline", "hf", "integrations", "runs", "deepspeed"),
    *("cli", "testing", "__main__"),
)
"""Modules and folders of the package. Each may import only those before it, and those of its circle."""

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
def imported_names(source: str) -> set[str]:
    """Returns dotted names of all that is imported, at any depth of the file, and of the parts of torch it uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            # `import offload` is the package itself: its `__init__` imports layers above most others.
            names |= {"offload.__init__" if alias.name == "offload" else alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
    return names


def forbidden_imports(module: str, source: str) -> list[str]:
    """Returns the imports of a file that its layer forbids.

    Args:
        module: The file's dotted name within the package, such as "engine.optim.lamb".
        source: The file's text.
    """
    layer = module.split(".")[0]
    last = CIRCLE[-1] if layer in CIRCLE else layer
    lower = LAYERS[: LAYERS.index(last) + 1]
    forbidden = []
    for name in sorted(imported_names(source)):
        package, _, rest = name.partition(".")
        if package == "offload" and rest:
            # A name that is no layer is a public name, which the package's `__init__` gives.
            target = rest.split(".")[0] if rest.split(".")[0] in LAYERS else "__init__"
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
    assert sorted(LAYERS) == sorted({module_name(path).split(".")[0] for path in FILES})


def test_imports_go_one_way() -> None:
    sources = {module_name(path): path.read_text() for path in FILES}
    assert {module: names for module, source in sources.items() if (names := forbidden_imports(module, source))} == {}


def test_hf_alone_cannot_be_imported_without_hugging_face() -> None:
    """Others import what they need of it where they need it."""
    modules = [module_name(path) for path in FILES if packages_at_the_top(path) & OF_HF]
    assert [module for module in modules if not module.startswith("hf.")] == []


def packages_at_the_top(path: Path) -> set[str]:
    """Returns the packages that a file imports when it is imported itself."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for node in top for name in imported_names(ast.unparse(node))}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("aio.queue", "import torch", ["torch"]),
        ("aio.queue", "def f():\n    from numpy import array", ["numpy", "numpy.array"]),
        ("aio.queue", "from offload.swapper import pager", ["offload.swapper", "offload.swapper.pager"]),
        ("kernels.update", "from offload import engine", ["offload.engine"]),
        ("swapper.policy", "from torch import nn", ["torch.nn"]),
        ("swapper.policy", "import torch\nx = torch.distributed.get_rank()", ["torch.distributed"]),
        ("swapper.pager", "from offload.swapper import policy", []),
        ("engine.core", "import offload", ["offload.__init__"]),
        ("engine.core", "from offload import kernels\nfrom offload.swapper.memory.device_arena import x", []),
        ("engine.core", "from offload import initialize", ["offload.initialize"]),
        ("engine.core", "from . import step", [".", "..step"]),
        ("sizes", "from offload.timeline import now", ["offload.timeline", "offload.timeline.now"]),
        ("cli.main", "from tests import models", ["tests", "tests.models"]),
        ("config.load", "import torchvision, json", []),
    ],
)
def test_what_goes_up_is_noticed(module: str, source: str, expected: list[str]) -> None:
    assert forbidden_imports(module, source) == expected
