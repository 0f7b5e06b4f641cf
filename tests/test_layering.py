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
    "config": {"errors", "sizes"},
    "aio": {"errors", "sizes"},
    "kernels": {"errors", "sizes"},
    "swapper": {"errors", "sizes", "aio"},
    "engine": {"errors", "sizes", "config", "aio", "kernels", "swapper"},
    "presets": {"errors"},
    "text": {"errors"},
    "train": {"errors", "config", "engine", "swapper", "presets", "text"},
    "cli": {"errors", "sizes", "config", "train", "swapper", "<root>"},
    "__init__": {"errors", "engine"},
}
NEVER: dict[str, set[str]] = {
    "errors": {"torch", "numpy"},
    "sizes": {"torch", "numpy"},
    "config": {"torch", "numpy"},
    "aio": {"torch", "numpy"},
    "swapper": {"torch.nn", "torch.distributed"},
}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_is_listed() -> None:
    assert {_room(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = _room(path)
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "offload":
            other = parts[1] if len(parts) > 1 else "<root>"
            if (PACKAGE / other).is_dir() or (PACKAGE / f"{other}.py").is_file() or other == "<root>":
                allowed = MAY_IMPORT[room] | {room}
                # `from offload import kernels` names the root and a room; the room is what counts.
                assert other in allowed or (other == "<root>" and name == "offload" and room in ("engine", "train"))
        assert parts[0] not in ("tests", "bench")
        for never in NEVER.get(room, set()):
            assert name != never and not name.startswith(f"{never}."), f"{path} imports {name}"


def test_import_is_light() -> None:
    """The package neither needs nor loads what belongs to an extra or to the command line."""
    code = (
        "import offload, sys; print([m for m in ('transformers', 'matplotlib', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
