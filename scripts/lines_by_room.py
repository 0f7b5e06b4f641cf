"""Prints the lines of production Python by room: `python scripts/lines_by_room.py [--json] [TREE]`.

A room is a folder of `offload/`; the folders inside of `engine/` and `swapper/` are rooms of their own. Each line of a
file is of one kind: code, comment, docstring or blank. `.ci/run` prints the table, so that growth is seen in the log;
`tests/repository/test_code_limits.py` counts with the same functions. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DIVIDED = ("engine", "swapper")
"""Rooms whose folders are rooms of their own."""

ROOT = "(root)"
"""The room of the modules that are in no folder."""

_LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}

_FOR_TOOLS = re.compile(r"#\s*(type:|noqa|pragma:|fmt:|mypy:)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FunctionLines:
    """A function or method of a file.

    Attributes:
        name: Dotted from the module on, as `Engine.step`; that of a function in a function begins with the outer one's.
        lines: From the first decorator to the last line, docstring included.
    """

    name: str
    lines: int


@dataclass(frozen=True)
class FileLines:
    """The counts of one file.

    Attributes:
        path: Relative to the tree, with `/`.
        code: Lines with code on them, with a comment behind it or not.
        comment: Lines with a comment alone.
        commented: Lines with a comment, alone or behind code, less those that speak to a tool. No kind of its own.
        docstring: Lines of strings that stand alone: docstrings of modules, classes, functions and attributes.
        blank: The other lines.
        functions: In the order of the file.
        docstrings: The text of each docstring, in the order of the file.
    """

    path: str
    code: int
    comment: int
    commented: int
    docstring: int
    blank: int
    functions: tuple[FunctionLines, ...]
    docstrings: tuple[str, ...]

    @property
    def lines(self) -> int:
        """All lines of the file."""
        return self.code + self.comment + self.docstring + self.blank


@dataclass(frozen=True)
class RoomLines:
    """The sums over the files of one room, or of all of them.

    Attributes:
        longest_file: The path of the longest file, and `longest_file_lines` its lines.
        longest_function: `path::name` of the longest function, empty where there is none.
    """

    room: str
    files: int
    code: int
    comment: int
    commented: int
    docstring: int
    blank: int
    longest_file: str
    longest_file_lines: int
    longest_function: str
    longest_function_lines: int


def count_file(path: str, source: str) -> FileLines:
    """Counts the lines of one file.

    Args:
        path: The name that the counts are given.
        source: The text of the file, Python that can be parsed.

    Raises:
        SyntaxError: if `source` is not Python.
    """
    tree = ast.parse(source)
    alone = sorted(_strings_alone(tree), key=lambda node: node.lineno)
    of_docstrings = {line for node in alone for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    starts = {(node.lineno, node.col_offset) for node in alone}
    code: set[int] = set()
    comments: set[int] = set()
    for_tools: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
            if _FOR_TOOLS.match(token.string):
                for_tools.add(token.start[0])
        elif token.type not in _LAYOUT and not _begins_at(token, starts):
            code.update(range(token.start[0], token.end[0] + 1))
    of_docstrings -= code
    return FileLines(
        path=path,
        code=len(code),
        comment=len(comments - code - of_docstrings),
        commented=len(comments - for_tools),
        docstring=len(of_docstrings),
        blank=source.count("\n") + (source[-1:] not in ("", "\n")) - len(code | comments | of_docstrings),
        functions=tuple(_functions(tree)),
        docstrings=tuple(str(node.value) for node in alone),
    )


def count_tree(tree: Path) -> list[FileLines]:
    """Counts every Python file below `tree`, by path."""
    paths = sorted(path for path in tree.rglob("*.py") if "__pycache__" not in path.parts)
    return [count_file(path.relative_to(tree).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def room_of(path: str) -> str:
    """Returns the room that the file at `path`, relative to the tree, belongs to."""
    folders = path.split("/")[:-1]
    if not folders:
        return ROOT
    return "/".join(folders[:2] if folders[0] in DIVIDED else folders[:1])


def add_up(room: str, files: Sequence[FileLines]) -> RoomLines:
    """Returns the sums of `files`, of which there is at least one. Of equally long ones the first counts."""
    longest = max(files, key=lambda file: file.lines)
    functions = [(f"{file.path}::{function.name}", function.lines) for file in files for function in file.functions]
    function, length = max(functions, key=lambda each: each[1], default=("", 0))
    return RoomLines(
        room=room,
        files=len(files),
        code=sum(file.code for file in files),
        comment=sum(file.comment for file in files),
        commented=sum(file.commented for file in files),
        docstring=sum(file.docstring for file in files),
        blank=sum(file.blank for file in files),
        longest_file=longest.path,
        longest_file_lines=longest.lines,
        longest_function=function,
        longest_function_lines=length,
    )


def by_room(files: Sequence[FileLines]) -> list[RoomLines]:
    """Returns the sums of each room, in the order of their names."""
    rooms = Counter(room_of(file.path) for file in files)
    return [add_up(room, [file for file in files if room_of(file.path) == room]) for room in sorted(rooms)]


def table(rows: Sequence[RoomLines]) -> str:
    """Returns the rows as columns for a terminal, numbers to the right."""
    counts = ("files", "code", "comments", "commented", "docstrings", "blank")
    head = ("room", *counts, "longest file", "", "longest function", "")
    cells = [head, *(tuple(str(value) for value in asdict(row).values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    names = {0, 7, 9}
    lines = (
        "  ".join(
            cell.ljust(width) if at in names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or with `--json` an object with `rooms` and `total`."""
    parser = argparse.ArgumentParser(description="Print the lines of production Python by room.")
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parents[1] / "offload")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    files = count_tree(options.tree)
    if not files:
        parser.error(f"there is no Python file below {options.tree}")
    rooms, total = by_room(files), add_up("total", files)
    if options.json:
        print(json.dumps({"rooms": [asdict(row) for row in rooms], "total": asdict(total)}, indent=1))
    else:
        print(table([*rooms, total]))


def _strings_alone(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields the strings that are statements of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _functions(node: ast.AST, inside: str = "") -> Iterator[FunctionLines]:
    for child in ast.iter_child_nodes(node):
        name = f"{inside}{child.name}" if isinstance(child, Function | ast.ClassDef) else ""
        if isinstance(child, Function):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield FunctionLines(name=name, lines=(child.end_lineno or first) - first + 1)
        yield from _functions(child, f"{name}." if name else inside)


def _begins_at(token: tokenize.TokenInfo, starts: set[tuple[int, int]]) -> bool:
    """Returns whether `token` is a string that begins at one of `starts`."""
    if token.type != tokenize.STRING:
        return False
    # ast counts columns in bytes, tokenize in characters.
    return (token.start[0], len(token.line[: token.start[1]].encode())) in starts


if __name__ == "__main__":
    main()
