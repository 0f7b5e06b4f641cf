"""Objects are complete when constructed: nothing puts a callable into one, or replaces its method, afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests import ROOT

PACKAGE = ROOT / "offload"
OF_OTHERS = {
    # transformers offers no hook round `from_pretrained`; the context puts the method back.
    ("engine/model_io/from_pretrained.py", "patched.from_pretrained"),
    # An assignment to an attribute of a module is seen nowhere else; the context puts the method back.
    ("engine/schedule/module_state.py", "nn.Module.__setattr__"),
    # Where torch does not tell the active hooks (2.6), what its own code pushes is seen nowhere else.
    ("torch_internals/graphs.py", "torch_hooks._push_saved_tensors_default_hooks"),
    ("torch_internals/graphs.py", "torch_hooks._pop_saved_tensors_default_hooks"),
}
"""Methods of other packages' objects that are replaced, each with its reason. None of ours may be here."""
FILES = sorted(PACKAGE.rglob("*.py"))


def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def _own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def _methods(nodes: Sequence[ast.AST]) -> set[str]:
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _is_callable(value: ast.expr | None, functions: set[str]) -> bool:
    """Returns whether an expression makes or names a function of the file."""
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("functools.partial", "partial", "classmethod", "staticmethod")
    if isinstance(value, ast.Tuple):
        return any(_is_callable(each, functions) for each in value.elts)
    if isinstance(value, ast.Attribute):  # a method of this object; elsewhere a field may have the same name
        return _own(value) and value.attr in functions
    return isinstance(value, ast.Name) and value.id in functions


def _assignments(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    for node in nodes:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute):
                    yield each, value


def _callable_attributes(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns names of attributes that an annotation declares to be callables."""
    return {
        each.target.attr if isinstance(each.target, ast.Attribute) else each.target.id
        for each in nodes
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Attribute | ast.Name)
        and "Callable[" in ast.unparse(each.annotation)
    }


def wired_late(nodes: Sequence[ast.AST], callables: set[str]) -> list[str]:
    """Returns the places that put a callable into another object, of the nodes of one file."""
    properties = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(d) for d in node.decorator_list)
    }
    functions = _methods(nodes) - properties
    found = [
        ast.unparse(target)
        for target, value in _assignments(nodes)
        if not _own(target) and (target.attr in callables or _is_callable(value, functions))
    ]
    calls = (node for node in nodes if isinstance(node, ast.Call))
    return found + [
        ast.unparse(call)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "setattr" and _is_callable(call.args[2], functions)
    ]


def test_nothing_is_wired_after_it_was_built() -> None:
    parsed = {str(path.relative_to(PACKAGE)): _nodes(path.read_text()) for path in FILES}
    callables = {name for nodes in parsed.values() for name in _callable_attributes(nodes)}
    late = {(name, place) for name, nodes in parsed.items() for place in wired_late(nodes, callables)}
    assert late == OF_OTHERS


@pytest.mark.parametrize(
    "source",
    [
        "parts.hooks.entered = lambda: None",
        "class A:\n    def go(self): ...\n    def wire(self, other): other.later = self.go",
        "import functools\nother.begin = functools.partial(print, 1)",
        "def f(): ...\nsetattr(owner, name, f)",
        "other.receive = given",
        "a.x, b.receive = 1, given",
    ],
)
def test_what_is_wired_late_is_found(source: str) -> None:
    assert wired_late(_nodes(source), {"receive"})


def test_what_is_complete_passes() -> None:
    source = "class A:\n    def __init__(self, f): self.receive = f\nentry.pins = 1"
    assert not wired_late(_nodes(source), {"receive"})
