"""Private names of torch are used by one package alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import offload

PACKAGE = Path(offload.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "torch_internals")
_SUSPECTED = re.compile(r"\btorch\b[\w.]*\._[a-zA-Z]|\bfrom torch\b[^\n]*\bimport\b(?:[^\n(]*|\s*\([^)]*)\b_[a-zA-Z]")
"""Of a text in which a private name of torch may be: the others need not be parsed."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """What is imported from torch, or reached through the name `torch`, by a path with a leading underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{each.name}" for each in node.names]
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


def test_private_names_of_torch_are_found() -> None:
    code = "import torch._C\nfrom torch.utils import _pytree\ntorch._C._x()\nfrom torch import nn\ntorch.__version__"
    assert [*private_names(ast.parse(code))] == ["torch._C", "torch.utils._pytree", "torch._C._x", "torch._C"]
    lines = [
        "import torch._C",
        "from torch.utils import (\n    data,\n    _pytree,\n)",
        "torch._C._x()",
        "from torch._C import x",
    ]
    assert all(_SUSPECTED.search(line) and [*private_names(ast.parse(line))] for line in lines)


def test_no_other_file_uses_them() -> None:
    sources = {path.relative_to(PACKAGE): path.read_text() for path in FILES}
    suspected = {path: source for path, source in sources.items() if _SUSPECTED.search(source)}
    assert {path: found for path, source in suspected.items() if (found := [*private_names(ast.parse(source))])} == {}
