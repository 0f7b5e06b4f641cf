"""`scripts/lines_by_room.py` counts each line once, as the kind that it is, and adds up by room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.lines_by_room import SCRIPT, lines_by_room

MIXED = '''"""A module.

Two paragraphs."""

from x import y  # noqa: F401

A = 1  # one
"""An attribute."""
TEXT = """no docstring

# and no comment
"""


# why
@decorated(
    y
)
def f():
    """Returns nothing."""  # said behind
    def inner():
        pass
    return f"""
    {inner}
    """


class Größe:
    "A class."; B = 2

    async def g(self): return "x"
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Four rooms and the root; the folders of `engine` count alone, those of others do not."""
    for path, source in {
        "__init__.py": "",
        "a.py": "a = 1\n",
        "aio/x.py": '"""One."""\n\nb = 1\n# why\nc = 2',
        "aio/deep/y.py": "def f():\n    pass\n",
        "engine/e.py": "e = 1\n",
        "engine/optim/o.py": "class A:\n    def f(self):\n        pass\n\n    def g(self):\n        return 1\n\n\n",
        "engine/__pycache__/no.py": "no = 1\n",
        "aio/native/no.cpp": "int no;\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    return tmp_path


def test_each_line_is_of_one_kind() -> None:
    found = lines_by_room.count_file("mixed.py", MIXED)
    assert (found.code, found.comment, found.docstring) == (18, 1, 5)
    assert found.lines == len(MIXED.splitlines()) and found.blank == found.lines - 24
    assert found.commented == 3  # one, why, said behind; not what is said to ruff


def test_functions_are_as_long_as_they_look() -> None:
    found = lines_by_room.count_file("mixed.py", MIXED)
    assert [(each.name, each.lines) for each in found.functions] == [("f", 10), ("f.inner", 2), ("Größe.g", 1)]


def test_docstrings_are_found_in_order() -> None:
    found = lines_by_room.count_file("mixed.py", MIXED)
    assert [text[:12] for text in found.docstrings] == ["A module.\n\nT", "An attribute", "Returns noth", "A class."]


@pytest.mark.parametrize(
    ("source", "lines"), [("", 0), ("\n", 1), ("a", 1), ("a\n", 1), ("a\n\n", 2), ("a\n\x0c\nb = '\\x85'\n", 3)]
)
def test_all_lines_are_counted(source: str, lines: int) -> None:
    assert lines_by_room.count_file("a.py", source).lines == lines


def test_lines_of_rooms_add_up(tree: Path) -> None:
    files = lines_by_room.count_tree(tree)
    rows = {row.room: row for row in lines_by_room.by_room(files)}
    assert list(rows) == ["(root)", "aio", "engine", "engine/optim"]
    assert {room: (row.files, row.code, row.comment, row.docstring, row.blank) for room, row in rows.items()} == {
        "(root)": (2, 1, 0, 0, 0),
        "aio": (2, 4, 1, 1, 1),
        "engine": (1, 1, 0, 0, 0),
        "engine/optim": (1, 5, 0, 0, 3),
    }
    assert (rows["aio"].longest_file, rows["aio"].longest_file_lines) == ("aio/x.py", 5)
    assert (rows["aio"].longest_function, rows["aio"].longest_function_lines) == ("aio/deep/y.py::f", 2)
    assert (rows["engine"].longest_function, rows["engine"].longest_function_lines) == ("", 0)
    assert rows["engine/optim"].longest_function == "engine/optim/o.py::A.f"
    total = lines_by_room.add_up("total", files)
    assert (total.files, total.code, total.comment, total.docstring, total.blank) == (6, 11, 1, 1, 4)
    assert total.longest_file == "engine/optim/o.py"


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # -I -S: neither the checkout nor what is installed can be imported.
    command = [sys.executable, "-I", "-S", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_prints_a_table_without_what_is_installed(tree: Path) -> None:
    done = _run(tree)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["room", "(root)", "aio", "engine", "engine/optim", "total"]
    assert lines[2].split() == ["aio", "2", "4", "1", "1", "1", "1", "aio/x.py", "5", "aio/deep/y.py::f", "2"]


def test_it_prints_the_same_as_json(tree: Path) -> None:
    found = json.loads(_run("--json", tree).stdout)
    assert [row["room"] for row in found["rooms"]] == ["(root)", "aio", "engine", "engine/optim"]
    assert sum(row["code"] for row in found["rooms"]) == found["total"]["code"] == 11


def test_a_tree_without_python_is_an_error(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 2 and "there is no Python file below" in done.stderr
